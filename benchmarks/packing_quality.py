"""Claim: fewer micro-batches than mini-trainer, in no trial more, ranks that wait less, and no more rows than TRL.

Every step of every family of lengths (`_lengths.py`) is divided over 8 ranks by `forge_packing.divide` and by mini-trainer,
and measured by the same two figures: micro-batches on a rank, and the makespan (the sum over passes of the costliest rank,
where a sample costs its tokens plus attention's quadratic share, an 8B model's) over the ideal, an even spread. Lower bounds
of both are in the line. `pack_rows` is compared with TRL's `pack_dataset`, and both divisions with the optimum of steps of
eight samples, found by trying every partition.

The ratio is mini-trainer's micro-batches over ours, all families together. The script fails where a claim is broken: more
micro-batches in any trial, a larger makespan over a family, more rows than TRL.

    python benchmarks/packing_quality.py --trials 1000
"""

import argparse
import statistics
from typing import Any

import numpy as np
from _brute_force import optimum
from _lengths import FAMILIES, RANKS, Step, makespan, mini_trainer, mini_trainers_division, trials
from _report import emit, machine, note

import forge_packing
from forge_packing.dividing._bounds import makespan_bound, micro_batch_bound

COST = forge_packing.Cost()


def family_figures(family: str, count: int, pack: Any) -> dict[str, Any]:
    """Measure both sides over the trials of a family."""
    micro_batches = {"forge": 0, "mini_trainer": 0, "bound": 0}
    over_ideal: dict[str, list[float]] = {"forge": [], "mini_trainer": [], "bound": []}
    more = 0
    for step in trials(family, count):
        costs = COST.of(step.lengths)
        ours = forge_packing.divide(step.lengths, max_tokens=step.max_tokens, world_size=RANKS)
        theirs = mini_trainers_division(pack, step, RANKS)
        for side, division in (("forge", ours), ("mini_trainer", theirs)):
            assert sorted(i for rank in division for m in rank for i in m.tolist()) == list(range(len(step.lengths)))
            micro_batches[side] += len(division[0])
            over_ideal[side].append(float(makespan(division, costs) / (costs.sum() / RANKS)))
        more += len(ours[0]) > len(theirs[0])
        micro_batches["bound"] += micro_batch_bound(step.lengths, step.max_tokens, RANKS)
        over_ideal["bound"].append(float(makespan_bound(step.lengths, step.max_tokens, RANKS, COST) / (costs.sum() / RANKS)))
    means = {side: round(statistics.fmean(values), 4) for side, values in over_ideal.items()}
    if more or means["forge"] > means["mini_trainer"]:
        raise SystemExit(f"{family}: more micro-batches in {more} trials; makespan over ideal {means}")
    note(f"{family:18} micro-batches {micro_batches}   makespan over ideal {means}")
    return {"micro_batches": micro_batches, "makespan_over_ideal": means, "trials_with_more": more}


def rows_figures(samples: int) -> dict[str, Any]:
    """Count the rows of `pack_rows` and of TRL on a data set of each family; empty where TRL is not installed."""
    try:
        import datasets
        import trl
    except ImportError:
        note("TRL is not installed here: rows are not compared")
        return {}
    datasets.disable_progress_bars()
    found = {}
    for family in FAMILIES:
        steps = list(trials(family, -(-samples // 64)))
        lengths = np.concatenate([step.lengths for step in steps])[:samples]
        data = datasets.Dataset.from_dict({"input_ids": [[0] * length for length in lengths.tolist()]})
        theirs = len(trl.pack_dataset(data, steps[0].max_tokens, strategy="bfd"))
        ours = len(forge_packing.pack_rows(lengths, steps[0].max_tokens))
        if ours > theirs:
            raise SystemExit(f"{family}: {ours} rows, TRL {theirs}")
        note(f"{family:18} rows {ours}, TRL {theirs}")
        found[family] = {"forge": ours, "trl": theirs}
    return found


def small_figures(count: int, pack: Any) -> dict[str, Any]:
    """Compare both sides with the optimum on steps of eight samples, on one to three ranks."""
    rng = np.random.Generator(np.random.Philox(0))
    found = {side: {"optimal_micro_batches": 0, "optimal_makespan": 0, "worst": 1.0} for side in ("forge", "mini_trainer")}
    for _ in range(count):
        ranks = int(rng.integers(1, 4))
        step = Step(rng.integers(1, 8193, 8), 8192 * int(rng.integers(1, 3)))
        costs = COST.of(step.lengths)
        fewest, least = optimum(step.lengths, costs, step.max_tokens, ranks)
        for side, division in (
            ("forge", forge_packing.divide(step.lengths, max_tokens=step.max_tokens, world_size=ranks)),
            ("mini_trainer", mini_trainers_division(pack, step, ranks)),
        ):
            taken = float(makespan(division, costs) / least)
            found[side]["optimal_micro_batches"] += int(len(division[0]) == fewest)
            found[side]["optimal_makespan"] += int(len(division[0]) == fewest and taken < 1 + 1e-9)
            found[side]["worst"] = round(max(found[side]["worst"], taken), 4)
    note(f"of {count} steps of eight samples: {found}")
    return found


def main() -> None:
    """Measure and print the line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=1000, help="steps of each family")
    parser.add_argument("--toy", action="store_true", help="a few steps: seconds, and no proof")
    options = parser.parse_args()
    at = machine()
    count, samples, small = (3, 200, 5) if options.toy else (options.trials, 20_000, 300)
    pack = mini_trainer()
    if pack is None:
        raise SystemExit(
            "rhai-innovation-mini-trainer is not installed here, and it is one side of this comparison: benchmarks/README.md"
        )
    families = {family: family_figures(family, count, pack) for family in FAMILIES}
    totals = {side: sum(f["micro_batches"][side] for f in families.values()) for side in ("forge", "mini_trainer", "bound")}
    emit(
        "packing_quality",
        "mini-trainer's micro-batches over ours, 8 ranks; in no trial more, in no family a larger makespan, no more rows "
        "than TRL",
        totals["mini_trainer"] / totals["forge"],
        1.05,
        toy=options.toy,
        at=at,
        micro_batches=totals,
        families=families,
        rows=rows_figures(samples),
        eight_samples=small_figures(small, pack),
        sizes={"trials": count, "ranks": RANKS, "samples_for_rows": samples, "steps_of_eight": small},
    )


if __name__ == "__main__":
    main()
