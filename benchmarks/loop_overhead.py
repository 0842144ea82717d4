"""Claim: `forge_algos.train` is nearly as fast as a bare PyTorch loop: at least 0.97 of its tokens per second.

Both loops train a copy of one model on the same packed batches with the same attention function, the same chunked loss, the
same fused AdamW, clipping and schedule, and read the loss after every step; only the loop differs. They take turns step by
step in one process, each round in the opposite order of the round before. The ratio is the median over all rounds of the bare
loop's seconds over forge's for the same batches.

    python benchmarks/loop_overhead.py --steps 60
"""

import copy
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _models import write_model
from _repeated_steps import load_on_cpu, repeated_steps, sizes, steps_options, steps_parser, take_turns
from _report import emit, machine, note

Steps = list[list[Any]]


def bare_loop(model: Any, steps: Steps, optimizer: Any, scheduler: Any, device: Any) -> Iterator[float]:
    """Train with the least that a loop has to do, and yield the loss of each step."""
    import torch

    from forge_algos import nll

    trained = [p for p in model.parameters() if p.requires_grad]
    model.train()
    for micro_batches in steps:
        optimizer.zero_grad(set_to_none=True)
        moved = []
        for batch in micro_batches:
            targets = torch.from_numpy(batch.labels).to(device).roll(-1)
            targets[-1] = -100
            ends = torch.from_numpy(batch.cu_seqlens).to(device)
            moved.append(
                (
                    torch.from_numpy(batch.input_ids).to(device)[None],
                    torch.from_numpy(batch.position_ids).to(device)[None],
                    ends,
                    targets,
                    batch,
                )
            )
        count = sum(int((targets != -100).sum()) for _, _, _, targets, _ in moved)
        total = 0.0
        for input_ids, position_ids, ends, targets, batch in moved:
            hidden = model.model(
                input_ids=input_ids,
                position_ids=position_ids,
                use_cache=False,
                cu_seq_lens_q=ends,
                cu_seq_lens_k=ends,
                max_length_q=batch.max_seqlen,
                max_length_k=batch.max_seqlen,
            ).last_hidden_state[0]
            loss = nll(hidden, model.lm_head.weight, targets).sum / count
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        scheduler.step()
        yield total


def main() -> None:
    """Measure and print the line."""
    parser = steps_parser(__doc__, shape="tiny", tokens=512, micro_batches=2, steps=40, warmup=4)
    parser.add_argument("--threads", type=int, default=None, help="threads of torch (default: its own choice)")
    options = steps_options(parser)
    at = machine()

    import torch

    from forge_accel import accelerator
    from forge_algos import SFT, OptimizerSettings, adamw, schedule, train

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    found = accelerator("cpu")
    device = found.device.value
    with tempfile.TemporaryDirectory(prefix="forge-bench-") as scratch:
        directory = write_model(options.shape, Path(scratch) / "model")
        steps = repeated_steps(directory, options)
        model = load_on_cpu(directory, torch.float32)
    settings = OptimizerSettings(learning_rate=1e-5, lr_scheduler="cosine", warmup_steps=2, max_grad_norm=1.0)
    loops: dict[str, Iterator[Any]] = {}
    for side in ("forge", "bare"):
        replica = copy.deepcopy(model)
        optimizer = adamw(replica, settings, fused=found.fused_optimizer.value)
        scheduler = schedule(optimizer, settings, num_steps=len(steps))
        if side == "bare":
            loops[side] = bare_loop(replica, steps, optimizer, scheduler, device)
        else:
            outputs = train(
                replica, steps, objective=SFT(), optimizer=optimizer, scheduler=scheduler, max_grad_norm=1.0, device=device
            )
            loops[side] = (output.loss for output in outputs)

    def same(step: int, losses: dict[str, float]) -> None:
        if abs(losses["forge"] - losses["bare"]) > 1e-3 * abs(losses["bare"]):
            raise SystemExit(f"step {step + 1}: the loops do not train the same thing: losses {losses}")

    taken, cpu, losses = take_turns(loops, len(steps), same)
    seconds = {side: times[options.warmup :] for side, times in taken.items()}
    tokens_of = [sum(len(batch.input_ids) for batch in micro_batches) for micro_batches in steps][options.warmup :]
    sides = {
        side: {
            "tokens_per_second": round(statistics.median(t / s for t, s in zip(tokens_of, times, strict=True)), 1),
            "seconds_per_step": round(statistics.median(times), 5),
        }
        for side, times in seconds.items()
    }
    note(f"loss after {len(steps)} steps: {losses}")
    emit(
        "loop_overhead",
        "tokens per second of forge_algos.train over a bare PyTorch loop on the same packed batches",
        statistics.median(bare / forge for bare, forge in zip(seconds["bare"], seconds["forge"], strict=True)),
        0.97,
        toy=options.toy,
        at=at,
        cpu_time_ratio=round(
            statistics.median(b / f for b, f in zip(*(cpu[side][options.warmup :] for side in ("bare", "forge")), strict=True)),
            4,
        ),
        sides=sides,
        final_loss=losses,
        sizes=sizes(options),
    )


if __name__ == "__main__":
    main()
