"""Claim: at 96 % on new tasks forge's OSFT forgets at least 15 points less than full fine-tuning, at 98.5 % at least 10.

The tasks of `osft_continual.py`, with the steps of a task as an axis, further methods (replay of 5 % of the pretraining,
self-distillation on own answers, other shares of free directions), and methods compared at the same accuracy on new tasks.
Rates are searched for each method and number of steps on a seed of its own; then five further seeds run at the rates around
each level. Cells run in the order of `ORDER`, so that a study that is stopped has the first ones whole; a cell that was not
run says so. The base is pretrained with rows that show an answer before they ask for it, without which nothing could teach
itself; all methods begin from it.

    python benchmarks/continual_study.py --work DIRECTORY     # days of one core for all of it; resumes; Ctrl-C at any time
    python benchmarks/continual_study.py --work DIRECTORY --report     # the tables of what there is

`--work` receives the base model, the cells (a line each) and the tables.
"""

import argparse
import importlib.util
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import attrs
import numpy as np
import torch
from _chats import MODULES, TOY_MODULES
from _continual_methods import METHODS
from _continual_run import Sizes, accuracy, left, new_model, pretrained, sequence
from _continual_table import Cell, along, spread
from _continual_tasks import SKILLS, TASKS, Data, docstrings, read_text
from _report import emit, machine, note
from osft_continual import NEEDS, RATES, TUNING_SEED

ORDER = (
    ("strict/direct", 180),
    ("paper", 180),
    ("full", 180),
    ("replay", 180),
    ("sdft", 180),
    ("strict/direct", 60),
    ("paper", 60),
    ("full", 60),
    ("replay", 60),
    ("lora", 180),
    ("peft-osf", 180),
    ("mini-trainer", 180),
    ("strict/factors", 180),
    ("direct .10", 180),
    ("direct .50", 180),
    ("paper .10", 180),
    ("paper .50", 180),
    ("sdft, direct", 180),
    ("sdft, forward", 180),
)
"""Cells in the order in which they are run: method and steps of a task."""
BEGIN = {"full": 1, "replay": 1, "paper": 1, "paper .10": 1, "paper .50": 1, "lora": 3, "sdft": 2, "sdft, forward": 2}
"""Index of the rate at which a method's search begins; of all others `START`."""
START = 5
LEVELS = (0.9, 0.93, 0.96, 0.985)
"""Accuracies on tasks just learned at which methods are compared."""
LEAST, NEARLY = 0.88, 0.988
"""A search goes on downwards until it learns less, and upwards until it learns more."""
WIDEST = 5
"""Rates of a search, at most."""
TOY = Sizes(width=32, layers=1, pretraining_steps=3, steps=2, rows=4, measured=8, shown=4)


class Study:
    """Cells that were run, in a file line by line."""

    def __init__(self, file: Path, base: dict[str, torch.Tensor], data: Data, sizes: Sizes) -> None:
        self._file, self._base, self._data, self._sizes = file, base, data, sizes
        self.cells: list[Cell] = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def get(self, method: str, steps: int, index: int, seed: int) -> Cell:
        """Return one sequence of tasks; run it where it is missing."""
        key = (method, steps, RATES[index], seed)
        cell = next((c for c in self.cells if (c["method"], c["steps"], c["rate"], c["seed"]) == key), None)
        if cell is None:
            cell = sequence(method, RATES[index], seed, self._base, self._data, attrs.evolve(self._sizes, steps=steps))
            self.cells.append(cell)
            with self._file.open("a") as out:
                out.write(json.dumps(cell) + "\n")
            note(" ".join(f"{k} {v if isinstance(v, str) else round(v, 4)}" for k, v in cell.items() if k != "accuracy"))
        return cell

    def searched(self, method: str, steps: int) -> list[int]:
        """Search the rates that learn between `LEAST` and `NEARLY`, by the tuning seed; return those to report, ascending."""

        def learned(index: int) -> float:
            return self.get(method, steps, index, TUNING_SEED)["new_task"]

        low = high = BEGIN.get(method, START)
        while high - low < WIDEST and high + 1 < len(RATES) and learned(high) < NEARLY:
            high += 1
            if learned(high) < learned(high - 1) - 0.02:
                break
        while high - low < WIDEST and low > 0 and learned(low) > LEAST:
            low -= 1
        near = [k for k in range(low, high + 1) if learned(k) > LEAST - 0.1]
        return near or [high]

    def rows(self, method: str, steps: int, seeds: Sequence[int]) -> list[list[Cell]]:
        """Return the cells of each rate for which all the reported seeds are there."""
        mine = [c for c in self.cells if (c["method"], c["steps"]) == (method, steps)]
        rates = sorted({c["rate"] for c in mine})
        found = [[c for c in mine if c["rate"] == rate and c["seed"] in seeds] for rate in rates]
        return [sorted(row, key=lambda c: c["seed"]) for row in found if len(row) == len(seeds)]


def tables(study: Study, seeds: Sequence[int]) -> tuple[str, dict[str, dict[str, float]]]:
    """Return (markdown, backward transfer by cell and level): what each method keeps at each level, with standard errors."""
    columns = [f"{100 * level:g} %" for level in LEVELS]
    lines = [
        f"| method | steps | {' | '.join(columns)} | skills at 96 % | kl_base at 96 % | CPU seconds |",
        "|---|---|" + "---|" * (len(LEVELS) + 3),
    ]
    means: dict[str, dict[str, float]] = {}
    for method, steps in ORDER:
        rows = study.rows(method, steps, seeds)
        if not rows:
            begun = sum((c["method"], c["steps"]) == (method, steps) for c in study.cells)
            lines.append(f"| {method} | {steps} | " + (f"not finished ({begun} cells)" if begun else "not run") + " | " * 7)
            continue
        written, found = [], {}
        for level in LEVELS:
            there = along(rows, level)
            if there is None:
                most = max(spread(row, "new_task")[0] for row in rows)
                least = min(spread(row, "new_task")[0] for row in rows)
                written.append(f"learns at most {100 * most:.1f} %" if level > most else f"learns at least {100 * least:.1f} %")
                continue
            mean, error = spread(there, "backward")
            found[f"{level:g}"] = mean
            written.append(f"{100 * mean:.1f} ± {100 * error:.1f}")
        at = along(rows, 0.96)
        more = ["", ""] if at is None else [f"{100 * spread(at, 'skills')[0]:.1f}", f"{spread(at, 'kl_base')[0]:.3f}"]
        seconds = np.mean([c["cpu_seconds"] for row in rows for c in row])
        lines.append(f"| {method} | {steps} | {' | '.join([*written, *more])} | {seconds:.0f} |")
        means[f"{method}, {steps}"] = found
    return "\n".join(lines), means


def predicted(cells: Sequence[Cell]) -> dict[str, float]:
    """Return the rank correlation of backward transfer with kl_base and with the accuracy on new tasks, over all cells."""

    def ranks(values: Sequence[float]) -> np.ndarray:
        return np.argsort(np.argsort(values))

    if len(cells) < 3:
        return {}
    backward = ranks([c["backward"] for c in cells])
    return {
        name: round(float(np.corrcoef(ranks([c[name] for c in cells]), backward)[0, 1]), 3) for name in ("kl_base", "new_task")
    }


def main() -> None:
    """Run what is missing, report, and print the line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="directory of .jsonl files; by default the standard library's docstrings")
    parser.add_argument("--work", type=Path, help="directory for the base model, the cells and the tables")
    parser.add_argument("--seeds", type=int, default=5, help="seeds that are reported")
    parser.add_argument("--report", action="store_true", help="run nothing: the tables of what there is")
    parser.add_argument("--toy", action="store_true", help="two steps of everything: seconds, and no proof")
    options = parser.parse_args()
    torch.set_num_threads(1)
    at, sizes = machine(), TOY if options.toy else Sizes(pretraining_steps=1500, shown=32)
    seeds = range(2 if options.toy else options.seeds)
    data = Data(read_text(options.data) if options.data else docstrings(TOY_MODULES if options.toy else MODULES))
    work = options.work or Path(tempfile.mkdtemp())
    work.mkdir(parents=True, exist_ok=True)
    base = pretrained(data, sizes, work / "base.pt")
    model = new_model(sizes)
    model.load_state_dict(base)
    before = {task: accuracy(model, data.rule(task, sizes.measured, np.random.default_rng(4), held=True)) for task in TASKS}
    before |= left(model, data, sizes)
    before["shown"] = accuracy(model, data.shown(SKILLS + TASKS, sizes.measured, np.random.default_rng(6)))
    note(f"the base: {before}")
    study = Study(work / "cells.jsonl", base, data, sizes)
    order = [(m, TOY.steps if options.toy else n) for m, n in ORDER if m not in NEEDS or importlib.util.find_spec(NEEDS[m])]
    for method, steps in [] if options.report else dict.fromkeys(order):
        for index in [BEGIN.get(method, START)] if options.toy else study.searched(method, steps):
            for seed in seeds:
                study.get(method, steps, index, seed)
        (work / "levels.md").write_text(tables(study, seeds)[0] + "\n")
    text, means = tables(study, seeds)
    (work / "levels.md").write_text(text + "\n")
    note(f"\nbackward transfer where all learn the new tasks equally well, points; {len(seeds)} seeds\n{text}")

    def lead(level: str) -> float | None:
        mine = [v[level] for k, v in means.items() if k.startswith(("strict", "direct", "paper")) and level in v]
        full = [v[level] for k, v in means.items() if k.startswith(("full,", "mini-trainer,")) and level in v]
        return 100 * (max(mine) - max(full)) if mine and full else None

    leads = {level: lead(level) for level in ("0.96", "0.985")}
    emit(
        "continual_study",
        "points of backward transfer of the best OSFT over full fine-tuning and mini-trainer at 96 % on new tasks, of 15",
        (leads["0.96"] or 0.0) / 15,
        1.0,
        toy=options.toy,
        at=at,
        before=before,
        leads=leads,
        backward_at=means,
        rank_correlation_with_backward_transfer=predicted([c for c in study.cells if c["seed"] in seeds]),
        methods=sorted({c["method"] for c in study.cells}),
        known=sorted(METHODS),
        cells=len(study.cells),
    )


if __name__ == "__main__":
    main()
