"""Claim: chats behind one system prompt train faster where a plan gives it room once in each micro-batch.

Three sides of forge's SFT train copies of one model on the same samples in each step, by `forge_algos.train`: `planned`, whose
plan knows the prefix (`forge_packing.find_prefixes`); `shared`, whose plan does not, while chats that happen to be in one row
share it; and `repeated`, where each chat computes its own. Losses must agree in each step. They take turns step by step in one
process, each round in the opposite order of the round before. The ratio is the median over all rounds of the seconds of
`repeated` over `planned`; `over_shared` is that of `shared` over `planned`.

    python benchmarks/shared_prefixes.py --system 400 --tokens 2048
"""

import argparse
import copy
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from _chats import MODULES, TOY_MODULES, behind_system_prompt, make_chats, stand_in_encode, tokenize_with_stand_in
from _models import SHAPES, describe, write_model
from _repeated_steps import take_turns
from _report import emit, machine

SIDES = ("planned", "shared", "repeated")


def main() -> None:
    """Measure and print the line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="smollm2-135m")
    parser.add_argument("--system", type=int, default=400, help="tokens of the system prompt")
    parser.add_argument("--chat", type=int, default=200, help="most tokens of a chat behind it")
    parser.add_argument("--tokens", type=int, default=2048, help="most tokens of a micro-batch")
    parser.add_argument("--batch-size", type=int, default=16, help="chats of a step")
    parser.add_argument("--steps", type=int, default=4, help="measured steps")
    parser.add_argument("--warmup", type=int, default=1, help="steps before them that are not counted")
    parser.add_argument("--toy", action="store_true", help="a size that runs in seconds and proves nothing")
    options = parser.parse_args()
    if options.toy:
        options.shape, options.system, options.chat, options.tokens, options.batch_size = "toy-llama", 40, 60, 320, 24
        options.steps = 2
    at = machine()

    import torch

    import forge_packing
    from forge_accel import accelerator
    from forge_algos import SFT, OptimizerSettings, adamw, schedule, shares_prompts, train
    from forge_dist import load_model

    found = accelerator("cpu")
    device, dtype = found.device.value, found.dtype("float32").value
    attention = found.attention("auto", dtype).value
    settings = OptimizerSettings(learning_rate=1e-5, lr_scheduler="cosine", warmup_steps=2, max_grad_norm=1.0)
    number = options.warmup + options.steps
    with tempfile.TemporaryDirectory(prefix="forge-bench-") as scratch:
        directory = write_model(options.shape, Path(scratch) / "model")
        vocabulary = describe(directory, options.shape).vocabulary
        encode = stand_in_encode(vocabulary)
        chats = make_chats(
            lambda turns: tokenize_with_stand_in(turns, encode),
            kind="both",
            max_length=options.chat,
            modules=TOY_MODULES if options.toy else MODULES,
        )
        chats = behind_system_prompt(chats, options.system, vocabulary)
        ends = np.cumsum(chats.lengths)
        samples = [(chats.input_ids[a:b], chats.labels[a:b]) for a, b in zip(ends - chats.lengths, ends, strict=True)]
        prefixes = forge_packing.find_prefixes(chats.input_ids, chats.lengths)
        assert prefixes is not None
        plan = forge_packing.plan(
            chats.lengths,
            batch_size=options.batch_size,
            max_tokens=options.tokens,
            max_steps=number,
            epochs=None,
            prefixes=prefixes[0],
            prefix_tokens=prefixes[1],
        )
        plans = {"planned": plan, "shared": plan.alone(), "repeated": plan.alone()}
        model = load_model(
            str(directory), dtype=dtype, device=device, attention=attention.name, attention_function=attention.function
        )
        steps: dict[str, list[list[Any]]] = {}
        loops: dict[str, Iterator[float]] = {}
        for side in SIDES:

            def collate(rows: Any, side: str = side) -> Any:
                mine = [samples[at] for at in rows]
                if side == "repeated":
                    return forge_packing.collate(mine)
                return forge_packing.collate_shared(mine, max_tokens=options.tokens)

            steps[side] = [[collate(rows) for rows in plans[side].micro_batches(step)] for step in range(number)]
            own = copy.deepcopy(model)
            assert shares_prompts(own, device=device)[0]
            optimizer = adamw(own, settings, fused=found.fused_optimizer.value)
            outputs = train(
                own,
                steps[side],
                objective=SFT(),
                optimizer=optimizer,
                scheduler=schedule(optimizer, settings, num_steps=number),
                max_grad_norm=1.0,
                device=device,
            )
            loops[side] = (output.loss for output in outputs)

        def same(step: int, losses: dict[str, float]) -> None:
            if max(losses.values()) - min(losses.values()) > 1e-4 * abs(losses["repeated"]):
                raise SystemExit(f"step {step + 1}: the sides do not train the same thing: losses {losses}")

        taken, _, losses = take_turns(loops, number, same)
    seconds = {side: times[options.warmup :] for side, times in taken.items()}

    def over(slow: str, fast: str) -> float:
        return statistics.median(a / b for a, b in zip(seconds[slow], seconds[fast], strict=True))

    computed = {side: sum(len(batch.input_ids) for step in steps[side] for batch in step) for side in SIDES}
    emit(
        "shared_prefixes",
        "seconds of an SFT step in which each chat computes its own system prompt over one planned for sharing it",
        over("repeated", "planned"),
        2.0,
        toy=options.toy,
        at=at,
        over_shared=round(over("shared", "planned"), 3),
        sides={
            side: {
                "seconds_per_step": round(statistics.median(seconds[side]), 4),
                "computed_tokens": computed[side],
                "micro_batches": sum(map(len, steps[side])),
            }
            for side in SIDES
        },
        final_loss=losses,
        sizes={
            "shape": options.shape,
            "system": options.system,
            "chat": options.chat,
            "tokens_per_micro_batch": options.tokens,
            "batch_size": options.batch_size,
            "steps": options.steps,
            "threads": torch.get_num_threads(),
        },
    )


if __name__ == "__main__":
    main()
