"""Claim: a head's loss in chunks of the labelled rows takes less time and memory than full logits; its log-probabilities too.

Hidden states and a head's weight, no model: the loss (`nll` against `cross_entropy` of all logits) and log-probabilities
(`token_logps` against a gather from `log_softmax`), forward and backward. Values and gradients of the two sides are compared
first. Times are taken in turn in one process; memory is what a process of its own held at most during one pass, over what it
held before. `ratio` is full logits' seconds over ours for the loss with a quarter of the rows labelled. Beside it stand the
other cases, with every row labelled too, where nothing is left out and log-probabilities cost their recomputing; and the
times against full logits of the labelled rows alone, gathered first.

    python benchmarks/head_alone.py
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _lockstep import peak_rss_bytes, rss_bytes
from _report import emit, machine, note

TARGET = 1.5
KINDS = ("loss", "logps")
SIDES = ("chunked", "full", "full_labelled")


def passes(kind: str, T: int, D: int, V: int, share: float) -> tuple[dict[str, Callable[[], Any]], list[Any]]:
    """Return each side's forward and backward, a function that returns the loss, and the tensors that get gradients."""
    import torch
    from torch.nn.functional import cross_entropy

    from forge_algos.losses import nll, token_logps

    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(T, D, generator=generator).requires_grad_()
    weight = (torch.randn(V, D, generator=generator) / D**0.5).requires_grad_()
    targets = torch.randint(V, (T,), generator=generator)
    targets[torch.rand(T, generator=generator) >= share] = -100
    rows = (targets != -100).nonzero().squeeze(1)

    def full(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        if kind == "loss":
            return cross_entropy(logits, wanted, reduction="sum")
        return logits.log_softmax(1).gather(1, wanted.clamp(min=0)[:, None]).squeeze(1)[wanted >= 0].square().sum()

    def chunked() -> torch.Tensor:
        return nll(hidden, weight, targets).sum if kind == "loss" else token_logps(hidden, weight, targets).square().sum()

    sides: dict[str, Callable[[], torch.Tensor]] = {
        "chunked": chunked,
        "full": lambda: full(hidden @ weight.t(), targets),
        "full_labelled": lambda: full(hidden[rows] @ weight.t(), targets[rows]),
    }

    def whole(side: str) -> Callable[[], float]:
        def run() -> float:
            hidden.grad = weight.grad = None
            loss = sides[side]()
            loss.backward()
            return loss.item()

        return run

    return {side: whole(side) for side in sides}, [hidden, weight]


def require_the_same(runs: dict[str, Callable[[], float]], tensors: list[Any]) -> None:
    """End the benchmark if a side's loss or gradients differ from the others'."""
    found = {side: (run(), [tensor.grad.clone() for tensor in tensors]) for side, run in runs.items()}
    expected_loss, expected = found["full"]
    for side, (loss, grads) in found.items():
        off = max(float((g - e).norm() / e.norm()) for g, e in zip(grads, expected, strict=True))
        if abs(loss / expected_loss - 1) > 1e-5 or off > 1e-4:
            raise SystemExit(f"{side} does not compute the same: loss {loss}, not {expected_loss}; gradients {off:.1e} apart")


def peak_of(side: str, kind: str, sizes: list[str]) -> int:
    """Measure the peak bytes of one pass of a side, in a process of its own."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).resolve()), "--peak-of", side, kind, *sizes],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{side} ended with exit status {done.returncode}:\n{done.stderr}")
    return json.loads(done.stdout)


def measure_peak(side: str, kind: str, T: str, D: str, V: str, share: str) -> None:
    """Run one pass in a process of its own, and print its peak bytes."""
    import torch

    torch.set_num_threads(1)
    runs, _ = passes(kind, int(T), int(D), int(V), float(share))
    # The memory of imports and of making the tensors is no part of the pass, even where it was more for a moment.
    before = max(rss_bytes(), peak_rss_bytes())
    runs[side]()
    print(json.dumps(peak_rss_bytes() - before))


def main() -> None:
    """Measure and print the line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--width", type=int, default=576, help="D; 576 is SmolLM2-135M's")
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--rounds", type=int, default=7, help="measured passes of each side")
    parser.add_argument("--threads", type=int, default=None, help="threads of torch (default: its own choice)")
    parser.add_argument("--toy", action="store_true", help="a size that runs in seconds and proves nothing")
    parser.add_argument("--peak-of", nargs=6, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak_of:
        measure_peak(*options.peak_of)
        return
    if options.toy:
        options.rows, options.width, options.vocabulary, options.rounds = 512, 16, 4096, 2
    at = machine()

    import torch

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    found: dict[str, dict[str, Any]] = {}
    for kind in KINDS:
        for share in (0.25,) if options.toy else (0.25, 1.0):
            sizes = (options.rows, options.width, options.vocabulary, share)
            runs, tensors = passes(kind, *sizes)
            require_the_same(runs, tensors)
            taken: dict[str, list[float]] = {side: [] for side in SIDES}
            cpu: dict[str, list[float]] = {side: [] for side in SIDES}
            for number in range(options.rounds):
                for side in SIDES if number % 2 == 0 else reversed(SIDES):
                    start, cpu_start = time.perf_counter(), time.process_time()
                    runs[side]()
                    taken[side].append(time.perf_counter() - start)
                    cpu[side].append(time.process_time() - cpu_start)
            seconds = {side: round(statistics.median(times), 4) for side, times in taken.items()}
            cpu_seconds = {side: round(statistics.median(times), 4) for side, times in cpu.items()}
            memory = {side: peak_of(side, kind, [str(size) for size in sizes]) for side in ("chunked", "full")}
            found[f"{kind}_{share:g}"] = {
                "ratio": round(seconds["full"] / seconds["chunked"], 3),
                "cpu_time_ratio": round(cpu_seconds["full"] / cpu_seconds["chunked"], 3),
                "memory_ratio": round(memory["full"] / max(memory["chunked"], 1), 3),
                "ratio_to_labelled_logits": round(seconds["full_labelled"] / seconds["chunked"], 3),
                "seconds": seconds,
                "cpu_seconds": cpu_seconds,
                "peak_bytes": memory,
            }
            note(f"{kind}, {share:.0%} labelled: {found[f'{kind}_{share:g}']}")
            del runs, tensors
    emit(
        "head_alone",
        "seconds of full logits over those of the loss in chunks of the labelled rows, a quarter of all",
        found["loss_0.25"]["ratio"],
        TARGET,
        toy=options.toy,
        at=at,
        cpu_time_ratio=found["loss_0.25"]["cpu_time_ratio"],
        memory_ratio=found["loss_0.25"]["memory_ratio"],
        cases=found,
        sizes={
            "rows": options.rows,
            "width": options.width,
            "vocabulary": options.vocabulary,
            "rounds": options.rounds,
            "threads": torch.get_num_threads(),
        },
    )


if __name__ == "__main__":
    main()
