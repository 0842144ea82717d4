"""Files of rollouts/ → a page of prompts with their completions, rewards and advantages."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from forge._counted import counted
from forge._errors import SettingsError
from forge.reports._charts import charts
from forge.reports._page import PLOTS, page, reading, write_page
from forge.reports._record import read_record
from forge.reports._report import read_curves

_ROLLOUTS, _PROMPTS, _ALL_PROMPTS = 12, 8, 256
"""Rollouts on a page, prompts of each, and prompts where one rollout is asked for."""
_LONGEST = 20_000
"""Characters of a prompt or a completion on the page."""


def rollouts(run: str | Path, *, step: int | None = None, output: str | Path | None = None) -> Path:
    """Write a page of a run's rollouts: prompts, completions, rewards by function, advantages.

    Args:
        run: Directory of a run of forge ppo, grpo or rloo.
        step: Show the rollout that this step was trained on, with all of its prompts; by default twelve, first to last.
        output: Where to write the page; by default rollouts.html of the run.

    Returns:
        The path of the page.

    Raises:
        SettingsError: this is no run with rollouts, one of them is damaged, or the page cannot be written.

    """
    root = Path(run).expanduser()
    with reading(root):
        record = read_record(root)
        files = {int(number): file for file in root.glob("rollouts/step_*.jsonl") if (number := file.stem[5:]).isdigit()}
        if not files:
            raise SettingsError(f"{root}: has no rollouts. Give a run of forge ppo, grpo or rloo that made a step.")
        figures = {
            name: curve
            for name, curve in read_curves(record).figures.items()
            if name.startswith(("rollout_", "eval_")) or name == "kl"
        }
        text = page(
            "rollouts.html",
            styles=("vendor/uPlot.min.css", "plots.css"),
            scripts=PLOTS,
            data={"renew": 0, "runs": 1, **charts({root.name: figures}, record.verb)},
            run=record,
            name=root.resolve().name,
            count=len(files),
            shown=[read_rollout(files[at], at, whole=step is not None) for at in _chosen(sorted(files), step)],
        )
    return write_page(root / "rollouts.html" if output is None else Path(output).expanduser(), text, "output")


def read_rollout(file: Path, step: int, *, whole: bool) -> dict[str, Any]:
    """Read a rollout's prompts, each with its completions.

    Raises:
        SettingsError: the file is damaged.

    """
    try:
        # A text may hold what Python takes for an end of a line (U+2028); JSONL has one alone.
        with file.open(encoding="utf-8", errors="replace", newline="\n") as opened:
            head, *lines = map(json.loads, opened)
        if len(lines) != head["completions"]:
            raise ValueError(f"it has {len(lines)} of {head['completions']} completions")
        groups: dict[int, dict[str, Any]] = {}
        for line in lines:
            group = groups.setdefault(
                line["group"], {"prompt": _cut(line.get("prompt", "")), "row": line.get("row"), "all": []}
            )
            group["all"].append(_completion(line))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise SettingsError(f"{file}: cannot be read as a rollout: {error}. Put the run's own back.") from error
    most = _ALL_PROMPTS if whole else _PROMPTS
    rewards = [float(each["reward"]) for group in groups.values() for each in group["all"] if each["reward"] is not None]
    return {
        "step": step,
        "groups": list(groups.values())[:most],
        "left_out": max(0, len(groups) - most),
        "completions": len(lines),
        "reward": math.fsum(rewards) / len(rewards) if rewards else None,
    }


def _completion(line: dict[str, Any]) -> dict[str, Any]:
    """Return what is shown of a completion; its advantage is the mean over its tokens."""
    tokens = [value for value in line.get("advantages") or [] if value is not None]
    return {
        "text": _cut(line["completion"]),
        "reward": line["reward"],
        "scores": line["scores"] if len(line["scores"]) > 1 else {},
        "advantage": math.fsum(tokens) / len(tokens) if tokens else None,
        "tokens": len(line["completion_ids"]),
        "finished": line["finished"],
        "trained": line["trained"],
    }


def _chosen(steps: list[int], step: int | None) -> list[int]:
    """Return the rollouts to show: evenly spaced, or the one that a step was trained on."""
    if step is not None:
        if not steps[0] <= step:
            raise SettingsError(f"step={step}: was trained on no rollout of this run; its first rollout is of step {steps[0]}.")
        return [max(at for at in steps if at <= step)]
    count = min(_ROLLOUTS, len(steps))
    return [steps[round(place * (len(steps) - 1) / max(count - 1, 1))] for place in range(count)]


def _cut(text: Any) -> str:
    """Shorten a very long text."""
    words = text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)
    return words if len(words) <= _LONGEST else f"{words[:_LONGEST]} … and {counted(len(words) - _LONGEST, 'more characters')}"
