"""Claim: forge's default OSFT forgets least where all learn the new task equally well (within two points).

A small Llama is pretrained on real text and on rules for words, digits and phrases (`_continual_tasks.py`), three of which are so rare that it
does them only sometimes. Then those three are learned one after the other, each on its own, from the plain model of the one before:
with full fine-tuning, LoRA (merged between tasks), PEFT's `osf`, mini-trainer's OSFT and our three. Average accuracy and backward transfer
are GEM's; beside them stand the skills and the text of the pretraining. Each method's learning rate is searched on tuning seeds by the same
rule, in factors of two; the reported seeds are never looked at for it. `_continual_table.py` has the two rules: tuned and matched.

The ratio compares at matched rates: what our default keeps of the old tasks (one plus backward transfer) over what the best other method keeps,
of those that learn the new ones no more than two points worse than it.

    python benchmarks/osft_continual.py --data DIRECTORY --work DIRECTORY     # about 40 minutes of one core; starts again where it stopped

`--data` holds `.jsonl` files with `text`, `messages`, or `prompt` and `chosen`; without it the text is the standard library's docstrings.
`--work` receives the base model, the cells, the table and the plot.
"""

import argparse
import importlib.util
import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from _chats import MODULES, TOY_MODULES
from _continual_methods import FREE, LORA_RANK, METHODS
from _continual_run import Sizes, accuracy, left, new_model, pretrained, sequence
from _continual_table import CLOSE, Cell, best, curve, lowest_rate, spread, table
from _continual_tasks import TASKS, Data, docstrings, read_text
from _report import emit, machine, note

import forge_algos

RATES = [1e-4 * 2**k for k in range(10)]
START = 3
"""Where every method's search begins."""
TUNING_SEED = 100
NEEDS = {"mini-trainer": "mini_trainer"}
TOY = Sizes(width=32, layers=1, pretraining_steps=3, steps=2, rows=4, measured=8)


class Cells:
    """Sequences that were run, kept in a file line by line, so that a run that was stopped goes on."""

    def __init__(self, file: Path, base: dict[str, torch.Tensor], data: Data, sizes: Sizes) -> None:
        self._file, self._base, self._data, self._sizes = file, base, data, sizes
        self.all: list[Cell] = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def get(self, method: str, index: int, seeds: Iterable[int]) -> list[Cell]:
        """The sequences of a method at `RATES[index]`, run where they have not been."""
        found = []
        for seed in seeds:
            key = (method, RATES[index], seed)
            cell = next((c for c in self.all if (c["method"], c["rate"], c["seed"]) == key), None)
            if cell is None:
                cell = sequence(*key, self._base, self._data, self._sizes)
                self.all.append(cell)
                with self._file.open("a") as out:
                    out.write(json.dumps(cell) + "\n")
                note(" ".join(f"{k} {v if isinstance(v, str) else round(v, 4)}" for k, v in cell.items() if k != "accuracy"))
            found.append(cell)
        return found


def search(cells: Cells, method: str, seeds: list[int]) -> None:
    """Up from `START` until it learns worse, or no better than nearly all; down until it learns worse by more than counts as equal."""

    def learned(index: int) -> float:
        return spread(cells.get(method, index, seeds), "new_task")[0]

    most = learned(START)
    for index in range(START + 1, len(RATES)):
        if (now := learned(index)) < most - CLOSE or (now <= most and most > 1 - CLOSE):
            break
        most = max(most, now)
    _search_down(cells, method, seeds, most)


def _search_down(cells: Cells, method: str, seeds: list[int], wanted: float) -> None:
    tried = [k for k, rate in enumerate(RATES) if any((c["method"], c["rate"]) == (method, rate) for c in cells.all)]
    for index in range(max(tried), -1, -1):
        if index < START and spread(cells.get(method, index + 1, seeds), "new_task")[0] < wanted - CLOSE:
            return
        cells.get(method, index, seeds)


def main() -> None:
    """Search, report, and print the line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="directory of .jsonl files")
    parser.add_argument("--work", type=Path, help="directory for the base model, the cells, the table and the plot")
    parser.add_argument("--method", choices=METHODS, action="append", help="by default all that are installed")
    parser.add_argument("--seeds", type=int, default=5, help="seeds that are reported")
    parser.add_argument("--tuning-seeds", type=int, default=2, help="seeds of the search for learning rates")
    parser.add_argument("--toy", action="store_true", help="two steps of everything: seconds, and no proof")
    options = parser.parse_args()
    if options.toy:
        options.seeds, options.tuning_seeds = 2, 1
    torch.set_num_threads(1)
    at, sizes = machine(), TOY if options.toy else Sizes()
    methods = options.method or [m for m in METHODS if m not in NEEDS or importlib.util.find_spec(NEEDS[m])]
    seeds, tuning = range(options.seeds), list(range(TUNING_SEED, TUNING_SEED + options.tuning_seeds))
    data = Data(read_text(options.data) if options.data else docstrings(TOY_MODULES if options.toy else MODULES))
    work = options.work or Path(tempfile.mkdtemp())
    work.mkdir(parents=True, exist_ok=True)
    base = pretrained(data, sizes, work / "base.pt")
    model = new_model(sizes)
    model.load_state_dict(base)
    before = {task: accuracy(model, data.rule(task, sizes.measured, np.random.default_rng(4), held=True)) for task in TASKS}
    before |= left(model, data, sizes)
    note(f"the base: {before}")
    cells = Cells(work / "cells.jsonl", base, data, sizes)
    for method in methods:
        if options.toy:
            cells.get(method, START, tuning)
        else:
            search(cells, method, tuning)
    curves = {m: curve([c for c in cells.all if c["seed"] in tuning], m) for m in methods}
    slowest = min(best(found) for found in curves.values())
    if not options.toy:
        for method in methods:
            _search_down(cells, method, tuning, slowest)
        curves = {m: curve([c for c in cells.all if c["seed"] in tuning], m) for m in methods}
    tables = {}
    for rule, wanted in (("tuned", 1.0), ("matched", slowest)):
        rates = {m: lowest_rate(found, wanted) for m, found in curves.items()}
        chosen = {m: cells.get(m, RATES.index(rate), seeds) for m, rate in rates.items()}
        tables[rule] = chosen
        text = table(chosen, before)
        (work / f"{rule}.md").write_text(text + "\n")
        note(f"\n{rule}\n{text}")
    if not options.toy:
        from _continual_plot import plot

        plot(curves, tables, before, work / "osft_continual.svg")
    matched = {
        m: {f: spread(c, f)[0] for f in ("new_task", "average", "backward", "skills", "text_loss")}
        for m, c in tables["matched"].items()
    }
    default = _default()
    level = matched[default]["new_task"] - CLOSE
    others = [1 + row["backward"] for m, row in matched.items() if m != default and row["new_task"] >= level]
    emit(
        "osft_continual",
        "what the default keeps of old tasks (1 + backward transfer) over the best other method that learns new ones within 2 points",
        max(1 + matched[default]["backward"], 1e-3) / max([*others, 1e-3]),
        1.0,
        toy=options.toy,
        at=at,
        default=default,
        rates={rule: {m: c[0]["rate"] for m, c in chosen.items()} for rule, chosen in tables.items()},
        matched=matched,
        tuned={m: {f: spread(c, f)[0] for f in ("new_task", "average", "backward")} for m, c in tables["tuned"].items()},
        sizes={"tasks": len(TASKS), "seeds": len(seeds), "free": FREE, "lora_rank": LORA_RANK, "steps": sizes.steps},
    )


def _default() -> str:
    settings = forge_algos.AdapterSettings(adapter="osft")
    return f"strict/{settings.osft_form}" if settings.osft_rule == "strict" else settings.osft_rule


if __name__ == "__main__":
    main()
