"""Every shipped recipe, run whole on a tiny model: `hatch run recipes`.

What each gave is written into its head and into docs/lanes/recipes.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import lane
from repository import ROOT

sys.path.insert(0, str(ROOT / "tests"))

STEPS = 24
"""Optimizer steps of a run, of 4 rows each."""
RATE = 5e-3
"""Least learning rate of a run."""


def one(name: str, model: Path) -> lane.Result:
    """Run a recipe, and return its first and last held-out figure."""
    words_of = import_module("whole.recipes").words_of

    from forge.settings._recipe import read_recipe
    from forge.settings._shipped import shipped

    with tempfile.TemporaryDirectory() as scratch:
        folder, run = Path(scratch), Path(scratch) / "run"
        # So small a model moves only at a higher rate than the recipe's.
        rate = max(float(str(read_recipe(shipped()[name])["learning_rate"])), RATE)
        words = words_of(name, model, folder, run, max_steps=STEPS, learning_rate=rate)
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}
        done = subprocess.run(
            [sys.executable, "-m", "forge", *words], capture_output=True, text=True, check=False, env=environ, cwd=folder
        )
        if done.returncode:
            return {"failed": True, "says": f"status {done.returncode}: {done.stderr.strip().splitlines()[-1]}"}
        result = json.loads((run / "result.json").read_text())
        memory = max(json.loads(line).get("memory") or 0 for line in (run / "metrics.jsonl").read_text().splitlines())
    return {"failed": False, **figures(result), "seconds": round(result["seconds"], 1), "memory": memory}


def figures(result: dict[str, Any]) -> dict[str, Any]:
    """Return the figure to compare, before and after: the held-out loss, or the reward of an online verb."""
    before, after = result["eval_before"] or {}, result["eval_after"] or {}
    key = next(key for key in ("eval_loss", "eval_reward") if key in after)
    name = {"eval_loss": "held-out loss", "eval_reward": "held-out reward"}[key]
    says = f"{name} {before[key]:.3f} → {after[key]:.3f}"
    return {"says": says}


def write_gave(file: Path, says: str) -> None:
    """Write into a recipe's head what it gave."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    how = f"in {STEPS} steps of 4 rows on a tiny random model, at a rate of {RATE:g} ({today}, `hatch run recipes`)"
    line = f"# Gave: {says} {how}."
    file.write_text(re.sub(r"^# Gave: .*$", line, file.read_text(encoding="utf-8"), flags=re.MULTILINE), encoding="utf-8")


def main(arguments: list[str]) -> int:
    """Run what is not done yet, write the table, return whether anything failed."""
    write_model = import_module("whole.conftest").write_model

    from forge.settings._shipped import about, shipped

    parser = argparse.ArgumentParser(prog="hatch run recipes", description=__doc__)
    parser.add_argument("--fresh", action="store_true", help="repeat what an interrupted lane had done")
    options = parser.parse_args(arguments)
    state = lane.Lane("recipes", fresh=options.fresh)
    with tempfile.TemporaryDirectory() as scratch:
        model = write_model(Path(scratch) / "model")
        state.run({name: partial(one, name, model) for name in shipped()})
    found = {name: state.done[name] for name in shipped()}
    rows = []
    for name, result in found.items():
        if not result["failed"]:
            write_gave(shipped()[name], result["says"])
        rows.append([f"`{name}`", about(shipped()[name]), result["says"], str(result.get("seconds", ""))])
    what = f"Each ran {STEPS} steps of 4 rows on a random model of 2 layers and a width of 32, at a learning rate of {RATE:g}"
    body = f"{what}: the figures show that it learns, not how well.\n\n"
    lane.page("recipes", "Recipes", "hatch run recipes", body + lane.table(["recipe", "", "it gave", "seconds"], rows))
    return int(any(result["failed"] for result in found.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
