"""Claim: while a full state is saved in the background, training waits for at most a third of a foreground save.

About 300 MB of weights and AdamW's two moments on one rank, saved in turn in the foreground (`async_save` off) and in the
background, each to the same disk; the ratio is the median time that `save` keeps the training waiting in the foreground over
that in the background. The first background save, which allocates its memory, is reported apart; so is how long a background
save takes altogether.

    python benchmarks/dist_save.py
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from _report import emit, machine, note

import forge_dist


def make_state(megabytes: int) -> dict[str, torch.Tensor]:
    """Make weights of 1024 × 1024 values each with AdamW's two moments: float32, `megabytes` in all."""
    torch.manual_seed(0)
    count = max(1, megabytes // 12)
    weights = {f"layers.{index}.weight": torch.randn(512, 2048) for index in range(count)}
    state = {f"model/{name}": weight for name, weight in weights.items()}
    for key in ("exp_avg", "exp_avg_sq"):
        state |= {f"optimizer/{name}/{key}": torch.randn_like(weight) for name, weight in weights.items()}
    return state


def fail(text: str) -> None:
    """End the benchmark where a save fails."""
    sys.exit(text)


def main() -> None:
    """Measure and print the line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--directory", help="where to save; a temporary directory by default")
    parser.add_argument("--toy", action="store_true", help="a small state: seconds, and no proof")
    options = parser.parse_args()
    at = machine()
    megabytes, repeats = (12, 2) if options.toy else (options.megabytes, options.repeats)
    state = make_state(megabytes)
    # One thread, as a rank beside others has; otherwise threads that wait for each other on a busy machine would be measured.
    torch.set_num_threads(1)
    stalls: dict[bool, list[float]] = {True: [], False: []}
    busy: dict[bool, list[float]] = {True: [], False: []}
    whole: list[float] = []
    topology = forge_dist.topology(forge_dist.LaunchSettings(), environ={})
    with tempfile.TemporaryDirectory(dir=options.directory) as scratch, forge_dist.join(topology) as ranks:
        ranks.connect("gloo", torch.device("cpu"))
        savers = {
            background: forge_dist.Checkpoints(Path(scratch) / str(background), ranks, keep=1, background=background, note=fail)
            for background in (False, True)
        }
        for step in range(repeats + 1):
            for background, saver in savers.items():
                start, working = time.perf_counter(), time.thread_time()
                saver.save(step, state, {})
                stalls[background].append(time.perf_counter() - start)
                busy[background].append(time.thread_time() - working)
                saver.wait()
                if background:
                    whole.append(time.perf_counter() - start)
    foreground, background = (statistics.median(stalls[kind][1:]) for kind in (False, True))
    note(
        f"foreground {foreground:.3f} s, background {background:.3f} s (first {stalls[True][0]:.3f} s), "
        f"done after {statistics.median(whole):.3f} s"
    )
    emit(
        "dist_save",
        "a save in the background keeps training waiting a third as long as one in the foreground, or less",
        foreground / background,
        3.0,
        toy=options.toy,
        at=at,
        seconds={
            "foreground": foreground,
            "background": background,
            "first in the background": stalls[True][0],
            "background, until it is on the disk": statistics.median(whole[1:]),
        },
        processor_seconds={
            "foreground": statistics.median(busy[False][1:]),
            "background": statistics.median(busy[True][1:]),
        },
        sizes={"bytes": sum(tensor.nbytes for tensor in state.values()), "tensors": len(state), "repeats": repeats},
    )


if __name__ == "__main__":
    main()
