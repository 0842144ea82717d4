"""Run directory → report.html: curves, what was trained, samples, exports, events, cost."""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forge._content import content_text
from forge._counted import counted
from forge._disk import write_remedy
from forge._errors import SettingsError
from forge.reports._charts import charts, table
from forge.reports._curves import Curve, Curves, lowest
from forge.reports._page import PLOTS, page, reading, write_page
from forge.reports._record import SETUP, Record, active_seconds, device_seconds, moment, read_record, starts
from forge.settings._data_sets import paths_in

FILE = "report.html"
RENEWED_EVERY = 30.0
"""Seconds between two renewals while a run goes on."""
_SHARE = 100
"""A renewal waits until this many times what the last one took has passed: it costs a hundredth of the time at most."""
_MOST_EVENTS, _MOST_PROMPTS = 300, 32
_PROOF = {"export", "measure", "on", "reloaded", "in_memory"}
_STATES = {
    "running": "It goes on",
    "finished": "Finished",
    "preempted": "Stopped by a signal, with its state saved; the same command goes on",
    "interrupted": "Interrupted",
    "failed": "Failed",
    "killed": "Ended without a word: it was killed, or its machine stopped; the same command goes on",
}


def report(run: str | Path, *, output: str | Path | None = None, price_per_hour: float | None = None) -> Path:
    """Write the page of a run: curves, what was trained on what, samples, exports, events.

    A run renews its own page while it trains, this command does so afterwards.

    Args:
        run: The run's directory.
        output: Where to write the page; by default report.html of the run.
        price_per_hour: What an hour of one device costs (a GPU, or on a CPU a process), in money of your own; the page then has
            the cost of the run.

    Returns:
        The path of the page.

    Raises:
        SettingsError: this is no run directory, the page cannot be written, or the price is no number from 0.

    """
    if price_per_hour is not None and not _is_price(price_per_hour):
        raise SettingsError(f"price_per_hour must be a number from 0, not {price_per_hour!r}.")
    root = Path(run).expanduser()
    with reading(root):
        record = read_record(root)
        text = report_page(record, read_curves(record), price_per_hour)
    return write_page(root / FILE if output is None else Path(output).expanduser(), text, "output")


class LiveReport:
    """Page of a run that goes on, written anew where that is due.

    It never raises, and costs a hundredth of the time at most.

    Args:
        path: the run directory.
        warn: takes a line that says why the page could not be written, once.

    """

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        self._path, self._warn = path, warn
        self._curves = Curves()
        self._due = 0.0
        self._failed = False

    def renew(self, *, measured: bool = False, ended: bool = False) -> None:
        """Write the page after half a minute, sooner where something was `measured`, and at the end."""
        now = time.monotonic()
        if not ended and now < (self._due if not measured else min(self._due, self._cheap)):
            return
        try:
            record = read_record(self._path, running=not ended)
            text = report_page(record, read_curves(record, self._curves))
            write_page(self._path / FILE, text, "output")
        except Exception as error:  # noqa: BLE001 - nothing that is only looked at may end a run
            if not self._failed:
                self._failed = True
                unwritten = error.__cause__ if isinstance(error, SettingsError) else None
                why = f"{type(error).__name__}: {error}" if unwritten is None else f"{unwritten}: {write_remedy(error)}"
                self._warn(f"WARNING: {FILE} cannot be renewed ({why}); the run goes on without it")
        spent = time.monotonic() - now
        self._cheap = now + _SHARE * spent
        self._due = max(now + RENEWED_EVERY, self._cheap)

    _cheap = 0.0


def read_curves(run: Record, curves: Curves | None = None) -> Curves:
    """Read the figures of a run, or what was appended since the last time."""
    curves = Curves() if curves is None else curves
    curves.starts = starts(run.events)
    curves.read(run.path / "metrics.jsonl")
    return curves


def _is_price(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


def report_page(run: Record, curves: Curves, price: float | None = None) -> str:
    """Write the page, with the cost where an hour of a device has a price."""
    figures = curves.figures
    running = run.state == "running"
    data = {"renew": RENEWED_EVERY if running else 0, "runs": 1, **charts({run.path.name: figures}, run.verb)}
    planned, held_out = run.last("planned"), _held_out(figures)
    steps = planned.get("steps") if run.value("max_steps") is None else _least(run)
    return page(
        "report.html",
        styles=("vendor/uPlot.min.css", "plots.css"),
        scripts=PLOTS,
        data=data,
        run=run,
        name=run.path.resolve().name,
        state=_STATES[run.state],
        renew=int(RENEWED_EVERY) if running else None,
        now=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
        curves=curves,
        loss=figures.get("loss"),
        held_out=held_out,
        lowest=lowest(held_out[1]) if held_out is not None and held_out[0] == "eval_loss" else "",
        num_steps=steps,
        cost=_cost(run, curves, steps if running else None, price),
        rows=table(figures),
        planned=planned,
        all_steps=0 < len(planned.get("stretches") or ()) == planned.get("steps"),
        answers=_answers(run.answers),
        exports=[event for event in run.events if event["event"] == "exported" and event.keys() >= _PROOF],
        events=_events(run),
        chosen=[one for one in run.settings.values() if one.origin != "default"],
        defaults=[one for one in run.settings.values() if one.origin == "default"],
        data_parts=_data(run),
        evals=_evals(run.evals),
        memory=_memory(run.memory),
        osft=_osft(run.osft),
    )


def _least(run: Record) -> int | None:
    """Return the steps of a run that `max_steps` ends, or its data before that.

    The plan of an online method counts rollouts, each of several steps.
    """
    planned, most = run.last("planned").get("steps"), run.value("max_steps")
    if not isinstance(most, int) or run.value("num_iterations") is not None:
        return most
    return most if planned is None else min(most, planned)


def _held_out(figures: dict[str, Curve]) -> tuple[str, Curve] | None:
    """Return the main held-out figure: the loss, or else the reward."""
    return next(((name, figures[name]) for name in ("eval_loss", "eval_reward") if name in figures), None)


def _cost(run: Record, curves: Curves, num_steps: int | None, price: float | None) -> dict[str, Any]:
    """Return seconds, tokens, their rates, hours of devices, and the time left of a run."""
    figures = curves.figures
    seconds = run.result.get("seconds") or active_seconds(run.events, curves.times)
    tokens = figures["tokens"].total if "tokens" in figures else None
    learned = next((curve.total for name, curve in figures.items() if name == "loss_tokens"), None)
    inside, done = curves.step_seconds, curves.step
    first, began = curves.settled or (0, None)
    began, last = moment(began), moment(curves.times[-1][1]) if curves.times else None
    hours = {device: seconds / 3600 for device, seconds in device_seconds(run.events, curves.times).items()}
    left = None
    if num_steps and began and last and done > first:
        left = (last - began).total_seconds() / (done - first) * (num_steps - done)
    return {
        "seconds": seconds,
        "inside": inside or None,
        "tokens": tokens,
        "learned": learned,
        "tokens_per_second": tokens / inside if tokens and inside else None,
        "samples_per_second": curves.samples / inside if inside else None,
        "memory": figures["memory"].most if "memory" in figures and figures["memory"].count else None,
        "left": left,
        "hours": {"CPU ranks" if device == "cpu" else device: number for device, number in hours.items()},
        "price": price,
        "money": sum(hours.values()) * price if hours and price is not None else None,
    }


def _data(run: Record) -> list[dict[str, Any]]:
    """Return for each set of rows what was kept and dropped, and what became of them."""
    rows = []
    for name, title in (("data_path", "training"), ("eval_data_path", "held out")):
        read, items = run.last("read", rows=name), run.last("data", part=name)
        if read or items:
            path = run.value(name)
            where = ", ".join(map(str, paths_in(path))) or "split off the rows above"
            rows.append({"title": title, "path": where, "read": read, "counts": items.get("items", "")})
    return rows


def _events(run: Record) -> list[dict[str, Any]]:
    """Return the events to list, newest last; of very many the first and the last."""
    found = [
        {**event, "at": at.strftime("%Y-%m-%d %H:%M:%S") if (at := moment(event.get("time"))) else ""}
        for event in run.events
        if event["event"] not in SETUP
    ]
    if len(found) <= _MOST_EVENTS:
        return found
    half = _MOST_EVENTS // 2
    left = {"event": "", "step": "", "at": "", "text": f"{counted(len(found) - _MOST_EVENTS, 'more events')}, in events.jsonl"}
    return [*found[:half], left, *found[-half:]]


def _answers(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return each prompt with its answers by step: the first, the last, and those between."""
    by_prompt: dict[str, dict[str, Any]] = {}
    for line in lines:
        prompt = line.get("prompt")
        found = by_prompt.setdefault(repr(prompt), {"prompt": _messages(prompt), "steps": {}})
        found["steps"][line["step"]] = str(line.get("answer", ""))
    rows = []
    for found in list(by_prompt.values())[:_MOST_PROMPTS]:
        steps = sorted(found["steps"])
        answers = [(step, found["steps"][step]) for step in steps]
        rows.append({"prompt": found["prompt"], "first": answers[0], "last": answers[-1], "between": answers[1:-1]})
    return rows


def _messages(prompt: Any) -> Any:
    """Return a prompt as text, or as messages with a role and a content each."""
    if isinstance(prompt, list) and all(isinstance(message, dict) for message in prompt):
        return [{"role": str(m.get("role", "")), "content": content_text(m.get("content", ""))} for m in prompt]
    return str(prompt)


def _evals(evals: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return evaluations as a table: a row a task and metric, a column a file, `before` first."""
    names = sorted(evals, key=lambda name: (name not in ("before", "base"), name))
    rows: dict[tuple[str, str], dict[str, float]] = {}
    for name in names:
        for task, figures in evals[name].items():
            for metric, value in figures.items():
                if not metric.endswith("_stderr"):
                    rows.setdefault((task, metric), {})[name] = value
    return {"names": names, "rows": [(task, metric, [found.get(n) for n in names]) for (task, metric), found in rows.items()]}


def _memory(memory: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the phases of a memory plan whose figures are whole numbers."""
    phases = memory.get("phases")
    found = []
    for phase in phases if isinstance(phases, list) else []:
        if not isinstance(phase, dict) or not isinstance(phase.get("planned"), int):
            continue
        parts = phase.get("parts")
        held = {str(k): v for k, v in (parts if isinstance(parts, dict) else {}).items() if isinstance(v, int | float) and v}
        measured = phase.get("measured")
        found.append(
            {
                "name": str(phase.get("name", "")),
                "planned": phase["planned"],
                "measured": measured if isinstance(measured, int) and measured > 0 else None,
                "parts": dict(sorted(held.items(), key=lambda item: -item[1])),
            }
        )
    return found


def _osft(plan: dict[str, Any]) -> dict[str, int] | None:
    """Count the targets of OSFT and their directions."""
    targets = [
        t for t in plan.values() if isinstance(t, dict) and isinstance(t.get("free"), int) and isinstance(t.get("shape"), list)
    ]
    if not targets:
        return None
    experts = [t["shape"][0] if len(t["shape"]) == 3 else 1 for t in targets]
    return {
        "targets": len(targets),
        "free": sum(count * t["free"] for count, t in zip(experts, targets, strict=True)),
        "directions": sum(count * min(t["shape"][-2:]) for count, t in zip(experts, targets, strict=True)),
    }
