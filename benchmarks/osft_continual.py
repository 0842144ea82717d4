"""Claim: forge's default OSFT forgets least where all learn the new task equally well (within two points).

A small Llama is pretrained on real text and on rules for words, digits and phrases (`_continual_tasks.py`), three of which
are so rare that it does them only sometimes. Then those three are learned one after the other, each from the plain model of
the one before: by full fine-tuning, LoRA (merged between tasks), PEFT's `osf`, mini-trainer's OSFT and our three. Average
accuracy and backward transfer are GEM's; skills and text of the pretraining are measured too. Each method's learning rate is
searched on tuning seeds by the same rule, in factors of two, never on the reported seeds. `_continual_table.py` has the two
rules: tuned and level.

The ratio compares where all learn the new tasks equally well (`level`): what our default keeps of the old ones, one plus
backward transfer, over what the best other method keeps.

    python benchmarks/osft_continual.py --data DIRECTORY --work DIRECTORY     # about 40 minutes of one core; resumes

`--data` holds `.jsonl` files with `text`, `messages`, or `prompt` and `chosen`; without it the text is the standard library's
docstrings. `--work` receives the base model, the cells, the table and the plot.
"""

import argparse
import importlib.util
import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from _chats import MODULES, TOY_MODULES
from _continual_methods import FREE, LORA_RANK
from _continual_run import Sizes, Small, pretrained, sequence
from _continual_table import CLOSE, FIGURES, Cell, at_level, best, curve, levels_table, lowest_rate, spread, table
from _continual_tasks import TASKS, Data, docstrings, read_text
from _report import emit, machine, note

import forge_algos

RATES = [1e-4 * 2**k for k in range(12)]
START = 3
"""Index of the rate at which every method's search begins."""
TUNING_SEED = 100
NEEDS = {"mini-trainer": "mini_trainer"}
SEVEN = ("full", "lora", "peft-osf", "mini-trainer", "strict/direct", "strict/factors", "paper")
"""Methods of the claim; `continual_study.py` has further ones."""
TOY = Sizes(width=32, layers=1, pretraining_steps=3, steps=2, rows=4, measured=8)


class Cells:
    """Sequences that were run, in a file line by line, so that a stopped benchmark resumes."""

    def __init__(self, file: Path, subject: Small) -> None:
        self._file, self._subject = file, subject
        self.all: list[Cell] = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def get(self, method: str, index: int, seeds: Iterable[int]) -> list[Cell]:
        """Return the sequences of a method at `RATES[index]`; run those that are missing."""
        found = []
        for seed in seeds:
            key = (method, RATES[index], seed)
            cell = next((c for c in self.all if (c["method"], c["rate"], c["seed"]) == key), None)
            if cell is None:
                cell = sequence(*key, self._subject, self._subject.sizes.steps)
                self.all.append(cell)
                with self._file.open("a") as out:
                    out.write(json.dumps(cell) + "\n")
                note(" ".join(f"{k} {v if isinstance(v, str) else round(v, 4)}" for k, v in cell.items() if k != "accuracy"))
            found.append(cell)
        return found


def search(cells: Cells, method: str, seeds: list[int]) -> None:
    """Search rates: up from `START` until it learns worse or nearly all, down until it learns worse by more than CLOSE."""

    def learned(index: int) -> float:
        return spread(cells.get(method, index, seeds), "new_task")[0]

    most = learned(START)
    for index in range(START + 1, len(RATES)):
        if (now := learned(index)) < most - CLOSE or (now <= most and most > 1 - CLOSE):
            break
        most = max(most, now)
    index = START
    while index > 0 and learned(index) >= most - CLOSE:
        index -= 1


def around(cells: Cells, method: str, seeds: Iterable[int], index: int, level: float) -> list[Cell]:
    """Return the figures at `level`, between the two neighbouring rates on either side, searched from `index`."""

    def learned(k: int) -> float:
        return spread(cells.get(method, k, seeds), "new_task")[0]

    while index + 1 < len(RATES) and learned(index) < level and learned(index) < learned(index + 1):
        index += 1
    while index > 1 and learned(index - 1) > level:
        index -= 1
    return at_level(cells.get(method, index - 1, seeds), cells.get(method, index, seeds), level)


def main() -> None:
    """Search, report, and print the line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="directory of .jsonl files")
    parser.add_argument("--work", type=Path, help="directory for the base model, the cells, the table and the plot")
    parser.add_argument("--seeds", type=int, default=5, help="seeds that are reported")
    parser.add_argument("--tuning-seeds", type=int, default=1, help="seeds of the search for learning rates")
    parser.add_argument("--toy", action="store_true", help="two steps of everything: seconds, and no proof")
    options = parser.parse_args()
    if options.toy:
        options.seeds = 2
    torch.set_num_threads(1)
    at, sizes = machine(), TOY if options.toy else Sizes()
    methods = [m for m in SEVEN if m not in NEEDS or importlib.util.find_spec(NEEDS[m])]
    seeds, tuning = range(options.seeds), list(range(TUNING_SEED, TUNING_SEED + options.tuning_seeds))
    data = Data(read_text(options.data) if options.data else docstrings(TOY_MODULES if options.toy else MODULES))
    work = options.work or Path(tempfile.mkdtemp())
    work.mkdir(parents=True, exist_ok=True)
    subject = Small(data, sizes, pretrained(data, sizes, work / "base.pt"))
    before = subject.before()
    note(f"the base: {before}")
    cells = Cells(work / "cells.jsonl", subject)
    for method in methods:
        if options.toy:
            cells.get(method, START, tuning)
        else:
            search(cells, method, tuning)
    curves = {m: curve([c for c in cells.all if c["seed"] in tuning], m) for m in methods}
    level = min(best(found) for found in curves.values()) - CLOSE
    tables = {
        "tuned": {m: cells.get(m, RATES.index(lowest_rate(found, best(found) - CLOSE)), seeds) for m, found in curves.items()},
        "level": {m: around(cells, m, seeds, RATES.index(lowest_rate(found, level)), level) for m, found in curves.items()},
    }
    for rule, chosen in tables.items():
        text = table(chosen, before, _default())
        (work / f"{rule}.md").write_text(text + "\n")
        note(f"\n{rule}\n{text}")
    reported = {m: _complete(cells, m, seeds) for m in methods}
    text, at_levels = levels_table(reported)
    (work / "levels.md").write_text(text + "\n")
    note(f"\nbackward transfer where all learn equally well\n{text}")
    if not options.toy:
        from _continual_plot import plot

        plot(reported, before, work / "osft_continual.svg")
    means = {rule: {m: {f: spread(c, f)[0] for f in FIGURES} for m, c in chosen.items()} for rule, chosen in tables.items()}
    default = _default()
    others = [1 + row["backward"] for m, row in means["level"].items() if m != default]
    emit(
        "osft_continual",
        "what the default keeps of old tasks (1 + backward transfer) where all learn new ones equally well, "
        "over the best other method",
        max(1 + means["level"][default]["backward"], 1e-3) / max([*others, 1e-3]),
        1.0,
        toy=options.toy,
        at=at,
        default=default,
        level=level,
        rates={rule: {m: c[0]["rate"] for m, c in chosen.items()} for rule, chosen in tables.items()},
        means=means,
        backward_at=at_levels,
        sizes={"tasks": len(TASKS), "seeds": len(seeds), "free": FREE, "lora_rank": LORA_RANK, "steps": sizes.steps},
    )


def _complete(cells: Cells, method: str, seeds: Iterable[int]) -> list[list[Cell]]:
    """Return a method's cells on the reported seeds, rate by rate, where all of them were run."""
    wanted = list(seeds)
    rows = [{c["seed"]: c for c in cells.all if (c["method"], c["rate"]) == (method, rate)} for rate in RATES]
    return [[row[seed] for seed in wanted] for row in rows if set(wanted) <= set(row)]


def _default() -> str:
    settings = forge_algos.AdapterSettings(adapter="osft")
    return f"strict/{settings.osft_form}" if settings.osft_rule == "strict" else settings.osft_rule


if __name__ == "__main__":
    main()
