"""Curves of runs → charts: which figures share one, in which order, under which title."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forge.reports._curves import Curve

_ROLES = (("exported_eval_", "held out, as exported"), ("eval_", "held out"), ("rollout_", "rollout"))
_TRAINING = "training"
_SHARED = {
    "chosen_reward": "rewards of answers",
    "rejected_reward": "rewards of answers",
    "chosen_logp": "log-probabilities of answers",
    "rejected_logp": "log-probabilities of answers",
    "expert_load_most": "expert load",
    "expert_load_least": "expert load",
    **dict.fromkeys(("prompts", "completions", "trained", "cut_off", "unscored", "equal_rewards"), "completions"),
    "tokens": "tokens",
}
"""Figure → chart that it shares with others."""
_TITLES = {
    "lr": "Learning rate",
    "grad_norm": "Gradient norm",
    "tokens_per_second": "Tokens per second",
    "memory": "Peak memory",
    "tokens": "Tokens",
    "kl": "KL",
}
_NOTES = {
    "grad_norm": "before clipping",
    "memory": "of the device; on a CPU, of the process",
    "tokens": "of a step, or of a rollout's completions",
    "expert load": "of the most and the least loaded expert of any layer; 1 is an even share",
    "completions": "of a rollout, by what became of them",
    "rewards by function": "means over completions",
}
_FIRST = ("loss", "accuracy", "reward", "rewards by function", "margin")
_LAST = ("lr", "grad_norm", "tokens_per_second", "memory", "tokens")
_LOSS_NOTES = {
    "grpo": "near 0 by construction, but with loss_type=online_dpo: watch the reward",
    "rloo": "near 0 by construction: watch the reward",
    **dict.fromkeys(("dpo", "simpo", "reward", "kto", "orpo"), "mean over pairs or answers"),
    "embed": "mean over queries, or triplets",
    **dict.fromkeys(("sft", "osft", "pretrain"), "nats per learned token"),
}


def charts(runs: Mapping[str, Mapping[str, Curve]], verb: str = "") -> dict[str, Any]:
    """Return the charts as JSON for pages/plots.js.

    That is `{"axes": [[step, ...], ...], "charts": [...]}`; lines of equal steps share an axis. A line has `name`, `run` (its
    number), `axis`, `y`, and `low` and `high` where a point stands for several measurements.

    Args:
        runs: name of each run → its figures.
        verb: of the runs, where they share one.

    """
    axes: dict[tuple[int, ...], int] = {}
    found: dict[str, list[dict[str, Any]]] = {}
    for number, (run, figures) in enumerate(runs.items()):
        for figure, curve in figures.items():
            base, role = _role(figure)
            chart = _chart_of(base, figures)
            if chart is None or not curve.count:
                continue
            steps = curve.steps()
            line = {"name": _line_name(base, role, chart), "run": number, "axis": axes.setdefault(steps, len(axes))}
            if len(runs) > 1:
                line["name"] = f"{run}: {line['name']}" if line["name"] != _TRAINING else run
            line |= {"stride": curve.stride, "sparse": role not in (_TRAINING, "rollout"), **curve.points()}
            found.setdefault(chart, []).append(line)
    notes = _NOTES | {"loss": _LOSS_NOTES.get(verb, "")}
    return {
        "axes": [list(steps) for steps in axes],
        "charts": [
            {
                "name": chart,
                "title": _TITLES.get(chart, _words(chart)),
                "note": notes.get(chart, ""),
                "bytes": chart == "memory",
                "lines": sorted(found[chart], key=lambda line: (line["run"], line["sparse"])),
            }
            for chart in sorted(found, key=_place)
        ],
    }


def table(figures: Mapping[str, Curve]) -> list[dict[str, Any]]:
    """Return a row for each figure: first, last, least and largest value."""
    rows = []
    for figure in sorted(figures, key=lambda name: (_place(_chart_of(_role(name)[0], figures) or name), name)):
        curve = figures[figure]
        if _chart_of(_role(figure)[0], figures) is not None:
            rows.append({"name": figure, **{field: getattr(curve, field) for field in _FIELDS}})
    return rows


_FIELDS = ("count", "not_finite", "first", "last", "least", "most")


def _role(figure: str) -> tuple[str, str]:
    """Return the figure's name without its prefix, and what was measured."""
    return next(
        ((figure.removeprefix(prefix), role) for prefix, role in _ROLES if figure.startswith(prefix)), (figure, _TRAINING)
    )


def _chart_of(base: str, figures: Mapping[str, Curve]) -> str | None:
    """Return the chart that shows a figure; None for counts that only explain others."""
    if base.startswith("loss_") or base == "samples":
        return None
    if base.startswith("reward/"):
        # One function's reward is the reward.
        several = len({name.partition("reward/")[2] for name in figures if "reward/" in name}) > 1
        return "rewards by function" if several else None
    return _SHARED.get(base, base)


def _line_name(base: str, role: str, chart: str) -> str:
    if base == chart:
        return role
    name = base.removeprefix("reward/").removeprefix("expert_load_").replace("_", " ")
    return name if role in (_TRAINING, "rollout") else f"{name}, {role}"


def _place(chart: str) -> tuple[int, str]:
    if chart in _FIRST:
        return _FIRST.index(chart), ""
    if chart in _LAST:
        return len(_FIRST) + 1 + _LAST.index(chart), ""
    return len(_FIRST), chart


def _words(chart: str) -> str:
    text = chart.replace("_", " ")
    return text[:1].upper() + text[1:]
