"""Every shipped recipe, run whole on a tiny model, and its memory planned on a real one's shape: `hatch run recipes`.

What each gave and needs is written into its head and into docs/lanes/recipes.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import lane
from repository import ROOT

sys.path.insert(0, str(ROOT))

RUN = {"max_steps": 24, "effective_batch_size": 4, "learning_rate": 5e-3}
"""Steps, rows of each and least learning rate of a run."""
ONLINE = {"max_steps": 120, "effective_batch_size": 16, "learning_rate": 1e-2}
"""The same of a verb that learns from rewards, which tell little an answer."""
SHARPER = 10
"""Factor of such a verb's tied embeddings: those of a random model let no adapter make one token likelier than all others."""


def one(name: str, model: Path, outline: Path) -> lane.Result:
    """Run a recipe, and return its first and last held-out figure, and the memory that it needs."""
    whole = import_module("tests.whole.recipes")
    words_of = whole.words_of

    from forge.settings._recipe import read_recipe
    from forge.settings._shipped import shipped

    with tempfile.TemporaryDirectory() as scratch:
        folder, run = Path(scratch), Path(scratch) / "run"
        recipe = read_recipe(shipped()[name])
        given: dict[str, Any] = dict(ONLINE if "reward" in recipe else RUN)
        if "reward" in recipe:
            model = sharper(model, folder / "model")
            given |= {"num_generations": 8} if "num_generations" in recipe else {}
        # So small a model moves only at a higher rate than the recipe's.
        given["learning_rate"] = max(float(str(recipe["learning_rate"])), given["learning_rate"])
        words = words_of(name, model, folder, run, **given)
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}
        done = subprocess.run(
            [sys.executable, "-m", "forge", *words], capture_output=True, text=True, check=False, env=environ, cwd=folder
        )
        if done.returncode:
            return {"failed": True, "says": f"status {done.returncode}: {done.stderr.strip().splitlines()[-1]}"}
        result = json.loads((run / "result.json").read_text())
        memory = max(json.loads(line).get("memory") or 0 for line in (run / "metrics.jsonl").read_text().splitlines())
        try:
            needs, phase = whole.needs_of(name, outline, folder)
        except Exception as error:  # noqa: BLE001 - a case that fails is a result, and the lane goes on
            return {"failed": True, "says": f"its memory was not planned: {type(error).__name__}: {error}"}
    needed = {"needs": round(needs, 1), "phase": phase, "how": how(given)}
    return {"failed": False, **figures(result), **needed, "seconds": round(result["seconds"], 1), "memory": memory}


def sharper(model: Path, path: Path) -> Path:
    """Write a model with larger embeddings, which are its head too."""
    import torch
    from transformers import AutoModelForCausalLM

    shutil.copytree(model, path)
    loaded = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        loaded.get_input_embeddings().weight.mul_(SHARPER)
    loaded.save_pretrained(path)
    return path


def how(given: dict[str, Any]) -> str:
    """Say how a recipe was run."""
    rows, rate = given["effective_batch_size"], given["learning_rate"]
    return f"in {given['max_steps']} steps of {rows} rows on a tiny random model, at a rate of {rate:g}"


def figures(result: dict[str, Any]) -> dict[str, Any]:
    """Return the figure to compare, before and after: the held-out loss, or the reward of an online verb."""
    before, after = result["eval_before"] or {}, result["eval_after"] or {}
    key = next(key for key in ("eval_loss", "eval_reward") if key in after)
    name = {"eval_loss": "held-out loss", "eval_reward": "held-out reward"}[key]
    says = f"{name} {before[key]:.3f} → {after[key]:.3f}"
    worse = after[key] > before[key] if key == "eval_loss" else after[key] < before[key]
    return {"says": f"{says}, which shows that it runs and not that it learns," if worse else says}


def write_gave(file: Path, says: str, run: str) -> None:
    """Write into a recipe's head what it gave, and how it was run."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    line = f"# Gave: {says} {run} ({today}, `hatch run recipes`)."
    file.write_text(re.sub(r"^# Gave: .*$", line, file.read_text(encoding="utf-8"), flags=re.MULTILINE), encoding="utf-8")


def write_needs(file: Path, gibibytes: float, phase: str) -> None:
    """Write into a recipe's head what it needs."""
    pattern = import_module("tests.whole.recipes").NEEDS
    text = file.read_text(encoding="utf-8")
    file.write_text(pattern.sub(rf"# Needs: {gibibytes:.1f} GiB of GPU memory ({phase})\g<3>", text), encoding="utf-8")


def main(arguments: list[str]) -> int:
    """Run what is not done yet, write the table, return whether anything failed."""
    write_model = import_module("tests.whole.conftest").write_model
    write_outline = import_module("tests.whole.recipes").write_outline

    from forge.settings._shipped import about, shipped

    parser = argparse.ArgumentParser(prog="hatch run recipes", description=__doc__)
    parser.add_argument("--fresh", action="store_true", help="repeat what an interrupted lane had done")
    options = parser.parse_args(arguments)
    state = lane.Lane("recipes", fresh=options.fresh)
    with tempfile.TemporaryDirectory() as scratch:
        model = write_model(Path(scratch) / "model")
        outline = write_outline(model, Path(scratch) / "outline")
        state.run({name: partial(one, name, model, outline) for name in shipped()})
    found = {name: state.done[name] for name in shipped()}
    rows = []
    for name, result in found.items():
        if not result["failed"]:
            write_gave(shipped()[name], result["says"], result["how"])
            write_needs(shipped()[name], result["needs"], result["phase"])
        needs = f"{result['needs']} GiB ({result['phase']})" if "needs" in result else ""
        rows.append([f"`{name}`", about(shipped()[name]), result["says"].rstrip(","), str(result.get("seconds", "")), needs])
    what = f"Each ran on a random model of 2 layers and a width of 32, {how(RUN).replace(' on a tiny random model', '')}"
    what += f"; what learns from rewards {how(ONLINE).replace(' on a tiny random model', '')}, with larger embeddings"
    body = f"{what}. The figures show that it learns, not how well. "
    body += (
        "What each needs is the memory plan's worst phase on a GPU, for the shape of Llama 3.2 1B and micro-batches of 4,096 "
    )
    body += "tokens.\n\n"
    lane.page("recipes", "Recipes", "hatch run recipes", body + lane.table(["recipe", "", "it gave", "seconds", "needs"], rows))
    return int(any(result["failed"] for result in found.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
