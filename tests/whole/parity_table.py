"""The runs of test_any_ranks.py → docs/parity.md: how close ranks, strategies and continued runs come to one process.

    python -m tests.whole.parity_table > docs/parity.md

By hand, from the root of the repository; about 80 runs. Progress goes to stderr.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import shutil
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import forge

from .chaos import section
from .conftest import write_model
from .repository import ROOT
from .starts import DROPOUT, final_state, metrics, untimed, weights
from .test_any_ranks import ADAPTERS, CLOSE, SHORT, STEPS, TOPOLOGIES, WAYS, losses, run, settings_of, stop_in_third_step, takes

BFLOAT16 = ("ddp x2", "fsdp2 x2")
EARLY = 5
"""Steps after which differences have not yet grown much."""
LIBRARIES = ("torch", "transformers", "peft", "deepspeed")


def largest_difference(found: list[float], wanted: list[float]) -> float:
    """The largest relative difference; as many figures on both sides, and every one a number."""
    assert wanted
    return max(abs(one - other) / abs(other) for one, other in zip(found, wanted, strict=True))


def sample_ids_by_step(where: Path) -> list[list[int]]:
    """Each step's sample ids, sorted, as all micro-batches of all ranks hold them."""
    plan = forge.packing.BatchPlan.load(where / "plan" / "plan.npz")
    return [
        sorted(int(sample) for rank in range(plan.world_size) for batch in plan.micro_batches(step, rank) for sample in batch)
        for step in range(len(losses(where)))
    ]


def formatted(number: float) -> str:
    """A difference, to two digits."""
    assert math.isfinite(number)
    return "0" if number == 0 else f"{number:.1e}"


def yes_or_no(flag: bool) -> str:
    return "yes" if flag else "**no**"


def possible(way: str) -> bool:
    return "zero" not in way or importlib.util.find_spec("deepspeed") is not None


def compared(found: Path, alone: Path) -> list[str]:
    """Cells: losses; gradient norms of the first steps, and of all; held-out losses; sample ids."""
    norms = losses(found, "grad_norm"), losses(alone, "grad_norm")
    figures = [
        largest_difference(losses(found), losses(alone)),
        largest_difference(norms[0][:EARLY], norms[1][:EARLY]),
        largest_difference(*norms),
        largest_difference(losses(found, "eval_loss"), losses(alone, "eval_loss")),
    ]
    return [*map(formatted, figures), yes_or_no(sample_ids_by_step(found) == sample_ids_by_step(alone))]


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """A Markdown table."""
    return ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]


class Runs:
    """Runs in directories of their own under `place`, each reported on stderr."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.given = settings_of(write_model(place / "model"), place)
        self.began = time.monotonic()

    def say(self, what: str) -> None:
        print(f"{time.monotonic() - self.began:6.0f} s  {what}", file=sys.stderr, flush=True)

    def where(self, *names: str) -> Path:
        return self.place / "-".join(names).replace(" ", "_")

    def parity(self, dtype: str, ways: list[str]) -> tuple[list[list[str]], dict[str, Path]]:
        """Rows of the table of strategies, each against one process in the same dtype; and that process' runs by adapter."""
        rows, alone = [], {}
        for adapter, settings in ADAPTERS.items():
            for way in ["single", *(way for way in ways if takes(adapter, way))]:
                self.say(f"{dtype} {adapter} {way}")
                where = run(self.given, self.where(dtype, adapter, way), way, dtype=dtype, **settings)
                assert len(losses(where)) == STEPS
                if way == "single":
                    alone[adapter] = where
                else:
                    rows.append([way, adapter, *compared(where, alone[adapter])])
        return rows, alone

    def resumed(self) -> list[list[str]]:
        """Rows of the matrix: saved under a row's strategy, resumed under a column's."""
        short = {**self.given, **SHORT}
        untouched = run(short, self.where("untouched"), "single")
        rows = []
        for before in TOPOLOGIES:
            self.say(f"stopped: {before}")
            stopped = stop_in_third_step(short, self.where("stopped", before), before)
            row = [before]
            for after in TOPOLOGIES:
                self.say(f"  gone on with: {after}")
                where = self.where("stopped", before, after)
                shutil.copytree(stopped, where)
                run(short, where, after)
                steps = [line["step"] for line in metrics(where) if "loss" in line]
                once = steps == [1, 2, 3, 4, 5, 6] and sample_ids_by_step(where) == sample_ids_by_step(untouched)
                row.append(
                    formatted(largest_difference(losses(where), losses(untouched))) + ("" if once else " **samples differ**")
                )
            rows.append(row)
        return rows

    def same(self) -> list[list[str]]:
        """Rows: a strategy, and what is equal to the bit after a resume under the same, with dropout."""
        settings = {**self.given, **SHORT, **DROPOUT}
        rows = []
        for way in filter(partial(takes, "lora"), TOPOLOGIES):
            self.say(f"the same way: {way}")
            untouched = run(settings, self.where("bits", way), way)
            where = run(settings, stop_in_third_step(settings, self.where("bits", "stopped", way), way), way)
            pairs = [(each(where), each(untouched)) for each in (untimed, weights, final_state)]
            rows.append([way, *(yes_or_no(found == wanted) for found, wanted in pairs)])
        return rows


def page(runs: Runs) -> list[str]:
    """The page's lines."""
    everything = [way for way in WAYS if way != "single"]
    ways = [way for way in everything if possible(way)]
    left_out = [way for way in everything if way not in ways]
    exact, alone = runs.parity("float32", ways)
    coarse, alone_coarse = runs.parity("bfloat16", list(BFLOAT16))
    against = [
        ["single, bfloat16 against float32", adapter, *compared(alone_coarse[adapter], alone[adapter])] for adapter in ADAPTERS
    ]
    found = [f"{name} {importlib.metadata.version(name)}" for name in LIBRARIES if importlib.util.find_spec(name)]
    head = [
        "way",
        "trained",
        "losses",
        f"gradient norms, {EARLY} steps",
        "gradient norms",
        "held-out losses",
        "same sample ids",
    ]
    return [
        "# Measured parity",
        "",
        "How close ranks, strategies and continued runs come to one process that was never stopped. Generated by",
        "`python -m tests.whole.parity_table > docs/parity.md` from the runs of `tests/whole/test_any_ranks.py`; do not edit.",
        "A tiny Llama on gloo ranks of one machine, one thread each; samples with very unequal numbers of learned tokens, 7 of",
        "them a step, in several micro-batches; clipping at 0.5, weight decay 0.1, a learning rate of 0.01, which makes small",
        "differences grow fast.",
        f"Python {platform.python_version()}, {', '.join(found)}, {platform.machine()}.",
        "",
        "## Any ranks, any strategy",
        "",
        f"The largest relative difference to one process over {STEPS} steps, float32. The tests allow {CLOSE:.0e} for losses.",
        "Sample ids are those of each step, over all ranks and micro-batches, each exactly once.",
        "",
        *table(head, exact),
        "",
        *([f"Not run, because DeepSpeed is not installed: {', '.join(left_out)}.", ""] if left_out else []),
        "The same with dtype=bfloat16, to one process with dtype=bfloat16; below, how far bfloat16 itself is from float32. A",
        "number of bfloat16 has three digits, so another order of sums is seen at once, and grows from step to step. fsdp2",
        "gathers its weights in bfloat16 and computes without autocast (`gather_dtype`). No bound is tested here.",
        "",
        *table(head, [*coarse, *against]),
        "",
        "## Stopped, and continued another way",
        "",
        "A run of 6 steps is asked to stop in its third (SIGTERM), saves its full state and continues from it: saved as in the",
        "row, continued as in the column. The largest relative difference of the 6 losses to one process that was never",
        "stopped, float32; every step and every sample is there once unless a cell says otherwise.",
        "",
        *table(["saved by", *TOPOLOGIES], runs.resumed()),
        "",
        "## Stopped, and continued the same way",
        "",
        "LoRA with dropout 0.3, against the same run never stopped: equal to the bit?",
        "",
        *table(
            ["way", "every line of metrics.jsonl", "exported weights", "weights and optimizer of the last full state"],
            runs.same(),
        ),
        *faults(),
    ]


def faults() -> list[str]:
    """The section that `hatch run chaos` last wrote, from its results; without any, the page's own."""
    file = ROOT / "docs" / "lanes" / "chaos.json"
    text = section(json.loads(file.read_text())) if file.exists() else (ROOT / "docs" / "parity.md").read_text()
    return ["", *text[text.index("## Random faults") :].splitlines()]


def main() -> None:
    """Print the page; whatever a run prints goes to stderr."""
    for name in ("OMP_NUM_THREADS", "HF_HUB_OFFLINE"):
        os.environ.setdefault(name, "1")
    shown = os.dup(1)
    os.dup2(2, 1)
    with tempfile.TemporaryDirectory() as place:
        lines = page(Runs(Path(place)))
    with open(shown, "w", encoding="utf-8") as out:
        out.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
