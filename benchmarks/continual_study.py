"""Claim: at 96 % on new tasks forge's OSFT forgets at least 15 points less than full fine-tuning, at 98.5 % at least 10.

The tasks of `osft_continual.py`, with the steps of a task as an axis, further methods (replay of 5 % of the pretraining,
self-distillation on own answers, other shares of free directions), and methods compared at the same accuracy on new tasks.
Rates are searched for each method and number of steps on a seed of its own; then five further seeds run at the rates around
each level. Cells run in the order of `ORDER`, so that a study that is stopped has the first ones whole; a cell that was not
run says so. With `--base shown` the pretraining ends with rows that show an answer before they ask for it, without which
nothing could teach itself; all methods begin from it.

With `--model` the base is a pretrained chat model, three methods learn the questions of `_continual_chat.py`, and the claim is
that they forget in the same order: least `inputs`, then the directions of the weights, most full fine-tuning. After these the
two OSFT forms run with half of the directions free.

    python benchmarks/continual_study.py --work DIRECTORY     # days of one core for all of it; resumes; Ctrl-C at any time
    python benchmarks/continual_study.py --work DIRECTORY --report     # the tables of what there is
    python benchmarks/continual_study.py --work DIRECTORY --model path/to/SmolLM2-135M-Instruct     # hours of one core

`--work` receives the base model, the cells (a line each) and the tables.
"""

import argparse
import importlib.util
import json
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import attrs
import numpy as np
import torch
from _chats import MODULES, TOY_MODULES
from _continual_chat import Chat, Questions, sources
from _continual_methods import INFORMED, METHODS
from _continual_run import Sizes, Small, Subject, pretrained, sequence
from _continual_table import Cell, along, spread
from _continual_tasks import Data, docstrings, read_text
from _report import emit, machine, note
from osft_continual import NEEDS, TUNING_SEED

RATES = [2.5e-5 * 2**k for k in range(15)]
Method = tuple[str, int]
"""Name of a method and steps of a task."""


@attrs.frozen(kw_only=True)
class Design:
    """Which cells are run, and at which accuracies on tasks just learned methods are compared."""

    groups: tuple[tuple[Method, ...], ...]
    """Cells in the order in which they are run: of each group first the rates, on the tuning seed, then one reported seed after
    another over all of its methods."""
    begin: Mapping[str, int]
    """Index of the rate at which the search of a method, by its name or the first word of it, begins; of all others `start`."""
    start: int
    levels: tuple[float, ...]
    """Accuracies on tasks just learned at which methods are compared."""
    compared: float
    """Level at which skills and kl_base are given, and methods compared seed by seed."""
    wanted: float
    """Accuracy that a search brackets: reported are the last rate that learns less and the first ones that learn more."""
    reported: int = 3
    """Rates that are reported of a search."""
    widest: int = 6
    """Rates of a search, at most."""

    @property
    def order(self) -> tuple[Method, ...]:
        """All methods, in the order in which they are run."""
        return tuple(each for group in self.groups for each in group)

    def begins(self, method: str) -> int:
        """Return the index of the rate at which a method's search begins."""
        return self.begin.get(method, self.begin.get(re.split("[ ,]", method)[0], self.start))


PICKED = {
    ("strict/direct", 180): [7, 8, 9],
    ("full", 180): [2, 3, 4],
    ("paper", 180): [3, 4, 5],
    ("replay", 180): [2, 3],
    ("inputs", 180): [8, 9],
    ("inputs .50", 180): [7, 8],
    ("inputs, general", 180): [8, 9],
    ("inputs, adaptive", 180): [7, 8],
    ("inputs, paper", 180): [4],
    ("inputs .10", 180): [9, 10],
    ("strict/factors", 180): [7, 8, 9],
    ("direct .10", 180): [8, 9, 10],
    ("direct .50", 180): [6, 7, 8],
    ("paper .10", 180): [4, 5, 6],
    ("paper .50", 180): [2, 3, 4],
    **{(f"inputs, {by}", 180): [8, 9] for by in ("down_proj 0", "first less", "last less", "embeddings train")},
}
"""Rates of the plain base, taken without a search from an earlier look at seeds 0 and 1, those of `inputs` at seed 0;
neither is reported. Those after
`inputs, general` have rates near those of `inputs`, `paper` and `strict/direct`, without a search."""
SMALL = Design(
    groups=(
        (("strict/direct", 180), ("full", 180), ("paper", 180), ("replay", 180), ("sdft", 180)),
        (("inputs", 180), ("inputs .50", 180), ("inputs, general", 180)),
        (("inputs, paper", 180), ("inputs .10", 180), ("inputs, adaptive", 180)),
        tuple((f"inputs, {by}", 180) for by in ("down_proj 0", "first less", "last less", "embeddings train")),
        (("strict/direct", 60), ("paper", 60), ("full", 60), ("replay", 60)),
        (("lora", 180), ("peft-osf", 180), ("mini-trainer", 180), ("strict/factors", 180)),
        (("direct .10", 180), ("direct .50", 180), ("paper .10", 180), ("paper .50", 180)),
        (("sdft, direct", 180), ("sdft, forward", 180), ("on-policy", 180)),
        (("direct, adaptive", 180), ("paper, adaptive", 180)),
    ),
    begin={"full": 2, "replay": 2, "paper": 3, "inputs, paper": 3, "lora": 5, "sdft": 0, "sdft, direct": 6, "on-policy": 1},
    start=7,
    levels=(0.9, 0.93, 0.95, 0.96, 0.985),
    compared=0.93,
    wanted=0.96,
)
"""Of a model that is pretrained here."""
CHAT = Design(
    groups=((("full", 30), ("strict/direct", 30), ("inputs", 30)), (("direct .50", 30),), (("inputs .50", 30),)),
    begin={"full": 1, "direct .50": 2, "inputs .50": 4, "inputs": 5},
    start=4,
    levels=(0.8, 0.85, 0.9, 0.95),
    compared=0.9,
    wanted=0.9,
    reported=2,
    widest=3,
)
"""Of a pretrained chat model."""
BASES = {"shown": Sizes(shown_steps=400), "plain": Sizes()}
"""Bases: that of `osft_continual.py`, where no method may distil itself, and the same after 400 steps that show answers before
they ask for them, as self-distillation needs."""
TOY = Sizes(width=32, layers=1, pretraining_steps=3, steps=2, rows=4, measured=8, shown_steps=2)


class Study:
    """Cells that were run, in a file line by line."""

    def __init__(self, file: Path, subject: Subject, design: Design) -> None:
        self._file, self._subject, self.design = file, subject, design
        self.cells: list[Cell] = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def get(self, method: str, steps: int, index: int, seed: int) -> Cell:
        """Return one sequence of tasks; run it where it is missing."""
        key = (method, steps, RATES[index], seed)
        cell = next((c for c in self.cells if (c["method"], c["steps"], c["rate"], c["seed"]) == key), None)
        if cell is None:
            cell = sequence(method, RATES[index], seed, self._subject, steps)
            self.cells.append(cell)
            with self._file.open("a") as out:
                out.write(json.dumps(cell) + "\n")
            note(" ".join(f"{k} {v if isinstance(v, str) else round(v, 4)}" for k, v in cell.items() if k != "accuracy"))
        return cell

    def searched(self, method: str, steps: int) -> list[int]:
        """Search the rates around what is wanted, by the tuning seed; return those to report, ascending."""
        design = self.design

        def learned(index: int) -> float:
            return self.get(method, steps, index, TUNING_SEED)["new_task"]

        low = high = design.begins(method)
        while learned(high) < design.wanted and high - low < design.widest and high + 1 < len(RATES):
            if high > low and learned(high) < learned(high - 1) - 0.02:
                break
            high += 1
        while learned(low) >= design.wanted and high - low < design.widest and low > 0:
            low -= 1
        tried = range(low, high + 1)
        best = max(tried, key=learned)
        if learned(best) < design.wanted and best < high:
            # A higher rate learns less: there is none that learns what is wanted.
            return list(range(max(0, best - 1), best + 1))
        below = max((k for k in tried if learned(k) < design.wanted), default=low)
        return list(range(max(0, below - (below == high)), min(below + design.reported, len(RATES))))

    def lowered(self, method: str, steps: int, lowest: int, seeds: Sequence[int]) -> None:
        """Run lower rates than `lowest` until one of them learns, over the reported seeds, less than the compared accuracy.

        The tuning seed may have chosen rates at which the others learn more than that.
        """

        def learned(index: int) -> float:
            return spread([self.get(method, steps, index, seed) for seed in seeds], "new_task")[0]

        while learned(lowest) > self.design.compared and lowest > 0:
            lowest -= 1

    def rows(self, method: str, steps: int, seeds: Sequence[int]) -> list[list[Cell]]:
        """Return the cells of each reported rate, of those seeds for which all of the method's rates are there."""
        mine = [c for c in self.cells if (c["method"], c["steps"]) == (method, steps) and c["seed"] in seeds]
        rates = sorted({c["rate"] for c in mine})
        there = [seed for seed in seeds if {c["rate"] for c in mine if c["seed"] == seed} == set(rates)]
        found = [[c for c in mine if c["rate"] == rate and c["seed"] in there] for rate in rates]
        return [sorted(row, key=lambda c: c["seed"]) for row in found if there]


def tables(study: Study, seeds: Sequence[int]) -> tuple[str, dict[str, dict[str, float]]]:
    """Return (markdown, backward transfer by cell and level): what each method keeps at each level, with standard errors."""
    design = study.design
    columns, compared = [f"{100 * level:g} %" for level in design.levels], f"{100 * design.compared:g} %"
    lines = [
        f"| method | steps | seeds | {' | '.join(columns)} | skills at {compared} | kl_base at {compared} "
        "| learns, forgets, skills left at each rate | CPU seconds |",
        "|---|---|---|" + "---|" * (len(design.levels) + 4),
    ]
    means: dict[str, dict[str, float]] = {}
    for method, steps in design.order:
        rows = study.rows(method, steps, seeds)
        if not rows:
            begun = sum((c["method"], c["steps"]) == (method, steps) for c in study.cells)
            word = f"{begun} cells of the search" if begun else "not run"
            lines.append(f"| {method} | {steps} | {word} |" + " |" * (len(design.levels) + 4))
            continue
        written, found = [], {}
        for level in design.levels:
            there = along(rows, level)
            if there is None:
                most = max(spread(row, "new_task")[0] for row in rows)
                least = min(spread(row, "new_task")[0] for row in rows)
                written.append(f"learns at most {100 * most:.1f} %" if level > most else f"learns at least {100 * least:.1f} %")
                continue
            mean, error = spread(there, "backward")
            found[f"{level:g}"] = mean
            written.append(f"{100 * mean:.1f} ± {100 * error:.1f}")
        at = along(rows, design.compared)
        more = ["", ""] if at is None else [f"{100 * spread(at, 'skills')[0]:.1f}", f"{spread(at, 'kl_base')[0]:.3f}"]
        each = [", ".join(f"{100 * spread(row, f)[0]:.1f}" for f in ("new_task", "backward", "skills")) for row in rows]
        seconds = np.mean([c["cpu_seconds"] for row in rows for c in row])
        count = f"{len(rows[0])} of {len(seeds)}"
        lines.append(f"| {method} | {steps} | {count} | {' | '.join([*written, *more, '; '.join(each)])} | {seconds:.0f} |")
        means[f"{method}, {steps}"] = found
    return "\n".join(lines), means


def against(study: Study, seeds: Sequence[int], reference: tuple[str, int]) -> dict[str, dict[str, float | int]]:
    """Compare each method with `reference` at the design's level, seed by seed: points of backward transfer, with error."""
    there = {key: along(study.rows(*key, seeds), study.design.compared) for key in study.design.order}
    other = {c["seed"]: c["backward"] for c in there.get(reference) or []}
    found: dict[str, dict[str, float | int]] = {}
    for (method, steps), cells in there.items():
        less = [{"less": c["backward"] - other[c["seed"]]} for c in cells or [] if c["seed"] in other]
        if less and (method, steps) != reference:
            mean, error = spread(less, "less")
            found[f"{method}, {steps}"] = {"points": 100 * mean, "error": 100 * error, "seeds": len(less)}
    return found


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


def taught(options: argparse.Namespace, work: Path) -> Subject:
    """Make what is taught: a pretrained chat model, or a small one whose pretraining is in `work` or begins."""
    if options.model:
        from forge_data import load_tokenizer

        # A toy's tokenizer has little more than bytes.
        files, longest = (sources("s*.py"), 400) if options.toy else (sources(), 40)
        questions = Questions(load_tokenizer(str(options.model)), files=files, longest=longest)
        note(f"rows trained on and held out: {questions.counted()}")
        return Chat(options.model, questions, **({"rows": 2, "measured": 8, "kept": 4} if options.toy else {}))
    sizes = TOY if options.toy else BASES[options.base]
    data = Data(read_text(options.data) if options.data else docstrings(TOY_MODULES if options.toy else MODULES))
    return Small(data, sizes, pretrained(data, sizes, work / "base.pt"))


def leads(design: Design, means: Mapping[str, Mapping[str, float]]) -> dict[str, float | None]:
    """Return by level how many points the best OSFT forgets less than the better of full fine-tuning and mini-trainer."""
    found: dict[str, float | None] = {}
    for level in (f"{level:g}" for level in design.levels):
        mine = [v[level] for k, v in means.items() if k.startswith(("strict", "direct", "paper", "inputs")) and level in v]
        full = [v[level] for k, v in means.items() if k.startswith(("full,", "mini-trainer,")) and level in v]
        found[level] = 100 * (max(mine) - max(full)) if mine and full else None
    return found


def ordered(design: Design, means: Mapping[str, Mapping[str, float]]) -> float:
    """Return what `inputs` keeps (1 + backward transfer) over what the weights' directions keep, or that over full, if less.

    At the compared level; 0 where one of the three was not measured there.
    """
    level = f"{design.compared:g}"
    kept = {k.split(",")[0]: 1 + v[level] for k, v in means.items() if level in v}
    if not {"inputs", "strict/direct", "full"} <= set(kept):
        return 0.0
    return min(kept["inputs"] / kept["strict/direct"], kept["strict/direct"] / kept["full"])


def main() -> None:
    """Run what is missing, report, and print the line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="directory of .jsonl files; by default the standard library's docstrings")
    parser.add_argument("--work", type=Path, help="directory for the base model, the cells and the tables")
    parser.add_argument("--base", choices=BASES, default="shown", help="which base; one --work for each")
    parser.add_argument("--model", type=Path, help="directory of a chat model, the base instead; a --work of its own")
    parser.add_argument("--only", nargs="+", metavar="METHOD", help="run the cells of these methods alone")
    parser.add_argument("--seeds", type=int, help="seeds that are reported; by default 5, with --model 2")
    parser.add_argument("--report", action="store_true", help="run nothing: the tables of what there is")
    parser.add_argument("--toy", action="store_true", help="two steps of everything: seconds, and no proof")
    options = parser.parse_args()
    torch.set_num_threads(1)
    at, design = machine(), CHAT if options.model else SMALL
    plain = options.base == "plain" and not options.model
    count = 2 if options.toy else options.seeds or (2 if options.model else 5)
    # Seeds 0 and 1 have chosen rates of the plain base.
    seeds = range(2, 2 + count) if plain else range(count)
    work = options.work or Path(tempfile.mkdtemp())
    work.mkdir(parents=True, exist_ok=True)
    subject = taught(options, work)
    measured = work / "before.json"
    if not measured.exists() and not options.report:
        measured.write_text(json.dumps(subject.before()) + "\n")
    before = json.loads(measured.read_text()) if measured.exists() else {}
    note(f"the base: {before}")
    study = Study(work / "cells.jsonl", subject, design)
    for group in () if options.report else design.groups:
        there = [(m, TOY.steps if options.toy else n) for m, n in group if m not in NEEDS or importlib.util.find_spec(NEEDS[m])]
        there = [(m, n) for m, n in there if options.only is None or m in options.only]
        if plain:
            there = [(m, n) for m, n in there if not m.startswith(("sdft", "on-policy"))]
        picked = PICKED if plain else {}
        rates = {(m, n): [design.begins(m)] if options.toy else picked.get((m, n)) or study.searched(m, n) for m, n in there}
        for seed in seeds:
            for (method, steps), indices in rates.items():
                for index in indices:
                    study.get(method, steps, index, seed)
            (work / "levels.md").write_text(tables(study, seeds)[0] + "\n")
        for (method, steps), indices in rates.items():
            if (method, steps) not in picked and not options.toy:
                study.lowered(method, steps, min(indices), seeds)
    text, means = tables(study, seeds)
    (work / "levels.md").write_text(text + "\n")
    note(f"\nbackward transfer where all learn the new tasks equally well, points; {len(seeds)} seeds\n{text}")
    found = leads(design, means)
    claim, ratio = (
        ("what inputs keeps (1 + backward transfer) over the weights' directions, or these over full, the smaller of the two")
        if options.model
        else "points of backward transfer of the best OSFT over full fine-tuning and mini-trainer at 96 % on new tasks, of 15",
        max(ordered(design, means), 1e-3) if options.model else (found["0.96"] or 0.0) / 15,
    )
    emit(
        "continual_study",
        claim,
        ratio,
        1.0,
        toy=options.toy,
        at=at,
        before=before,
        leads=found,
        less_full=against(study, seeds, next(each for each in design.order if each[0] == "full")),
        backward_at=means,
        rank_correlation_with_backward_transfer=predicted([c for c in study.cells if c["seed"] in seeds]),
        methods=sorted({c["method"] for c in study.cells}),
        known=sorted([*METHODS, *INFORMED]),
        cells=len(study.cells),
        sizes={"tasks": len(subject.tasks), "seeds": len(seeds), "rows": subject.rows, "measured": subject.measured},
    )


if __name__ == "__main__":
    main()
