"""Prepared run → its memory plan in memory.json, and what its first steps took."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import attrs

import forge_accel
import forge_algos
import forge_dist
from forge._counted import first_of
from forge._progress import Reporter
from forge.memory._largest import computed_tokens
from forge.memory._measured_steps import forecast_steps
from forge.memory._media_rows import expected_rows
from forge.memory._memory_plan import MEASURED, MemoryPlan, Phase, size
from forge.memory._planned import Planned
from forge.memory._target import Target
from forge.run._loading import Tried, quantized, try_ways
from forge.run._starting_model import Start, with_kept_adapter
from forge.settings._share import steps_between
from forge.tasks._answers import read_prompts
from forge.tasks._media import has_media
from forge.tasks._task import Task
from forge.tasks.items._own_answers import OwnAnswers
from forge.tasks.items._own_taught import OwnTaught
from forge.tasks.items._prompts import Prompts

FILE = "memory.json"
_SMALL = 40 * 2**20
"""Bytes of a directory's weights below which a run fits any machine: a plan would take longer than its steps."""


def is_small(model_path: str) -> bool:
    """Return whether a model is so small that its memory is not worth a plan."""
    return forge_dist.weight_bytes(model_path) < _SMALL


def planned_of(
    task: Task,
    s: Any,
    machine: forge_accel.Accelerator,
    strategy: tuple[str, int],
    start: Start,
    tokenizer: Any,
    prepared: Any,
    identity: Any,
    tried: Tried | None = None,
) -> Planned:
    """Gather what is known of a run before its model is loaded.

    Args:
        task: the verb.
        s: its settings.
        machine: the accelerator of this process.
        strategy: name, and number of data shards.
        start: the model that it starts from.
        tokenizer: of that model.
        prepared: data and plan.
        identity: of its models.
        tried: a small random model of these settings, tried before; it is tried again where the rows chose other labels since.
    """
    if tried is None or tried.task != task.model_task(s):
        tried = try_ways(task, s, machine)
    dtype = machine.dtype(s.device.dtype).value
    planned = Planned(
        task=task,
        settings=with_kept_adapter(prepared.settings, start),
        machine=machine,
        dtype=dtype,
        strategy=strategy[0],
        ranks=strategy[1] * s.strategy.cp_size * s.strategy.tp_size,
        attention=tried.attention,
        packed=tried.packed,
        draft=tried.model,
        model_path=start.path,
        new_tokens=start.new_ids,
        loading=quantized(s, machine, dtype),
        tokenizer=tokenizer,
        train=prepared.train,
        held_out=prepared.held_out,
        plan=prepared.plan,
        num_steps=task.num_steps(prepared.settings, prepared.plan),
        identity=identity,
        media=has_media(*(getattr(items, "store", None) for items in (prepared.train, prepared.held_out))),
        shown=any(asked.media for asked in read_prompts(task, s)),
    )
    return _with_media_rows(planned, task, s) if planned.media else planned


def _with_media_rows(planned: Planned, task: Task, s: Any) -> Planned:
    """Return a run with the rows, and the attention, that a model with images will take."""
    expected = expected_rows(planned)
    if expected is None:
        return planned
    rows = "packed" if expected.way in ("bounds", "positions") else expected.way or "single"
    if expected.ahead and planned.attention.function is not None and s.device.attention == "auto":
        # Attention of our own is causal. The next that a run tries reads masks.
        tried = try_ways(task, s.with_value("device", "attention", "sdpa"), planned.machine)
        planned = attrs.evolve(planned, attention=tried.attention, packed=tried.packed, draft=tried.model)
    return attrs.evolve(planned, media_rows=rows)


def write_plan(plan: MemoryPlan, former: Path, folder: Path, report: Reporter, *, dry: bool) -> None:
    """Log a memory plan, and write it to `folder`.

    Args:
        plan: of the run.
        former: directory of the run, whose measured steps stay where the plan is for the same division.
        folder: gets the file.
        report: gets the lines.
        dry: whether the answer of a dry run is to say what takes less, and not the log.

    """
    for line in [*plan.lines(), *([] if dry else plan.remedies())]:
        report.note(line)
    about = plan.as_json()
    with suppress(OSError, ValueError, KeyError, TypeError):
        before = json.loads((former / FILE).read_text(encoding="utf-8"))
        if all(before[name] == about[name] for name in ("machine", "ranks", "tokens")):
            about["phases"] += [phase for phase in before["phases"] if phase["name"] == MEASURED]
    (folder / FILE).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


class FirstSteps:
    """Measures the first steps of a run that has a memory plan, and adds them to it.

    Args:
        planned: the run.
        folder: directory of the run.
        report: gets a line with both figures.
        measured: which steps, counted from 0.
        stopping: whether the run was asked to stop: nothing is measured from then on.
    """

    def __init__(
        self, planned: Planned, folder: Path, report: Reporter, *, measured: range, stopping: Callable[[], bool] = bool
    ) -> None:
        self._planned, self._folder, self._report = planned, folder, report
        self._measured, self._stopping = measured, stopping
        self._compiled = planned.settings.device.compile == "blocks"
        self._meter: Any = None
        self._at = 0
        self._first = True
        """Whether the optimizer had no state when measuring began."""
        self._steps: list[list[Any]] = []
        self._spent = 0.0

    @classmethod
    def of(cls, planned: Planned, folder: Path, report: Reporter, *, stopping: Callable[[], bool] = bool) -> FirstSteps:
        """Measure the first two steps, or one where there is work between them or it takes time.

        Where it takes time that is the second, which has the optimizer's state from its beginning.
        """
        s = planned.settings
        saved = s.checkpoints.save_samples or 0
        shares = (s.evaluation.eval_every_steps, s.checkpoints.full_state_every_steps, saved if saved < 1 else 0)
        often = any(steps_between(every, planned.num_steps) == 1 for every in shares)
        # Between the steps of an online verb completions are sampled, which is a phase of its own.
        sampled = isinstance(planned.train, (OwnAnswers, OwnTaught, Prompts))
        disturbed = often or sampled or 1 <= saved <= s.plan.effective_batch_size
        meter = planned.machine.meter()
        second = range(1, 2) if meter is not None and meter.records else range(2)
        measured = range(1) if disturbed or planned.num_steps == 1 else second
        return cls(planned, folder, report, measured=measured, stopping=stopping)

    def watched(
        self, steps: Iterator[list[Any]], models: Iterable[Any], optimizer: Any, objective: Any, parallel: Any
    ) -> Iterator[list[Any]]:
        """Yield the micro-batches of each step; begin to measure with those of the first measured."""
        for self._at, batches in enumerate(steps):
            begins = self._at == self._measured.start and not self._stopping()
            if begins and (meter := self._planned.machine.meter()) is not None:
                # What the step begins with: a recording does not see that what was there before it goes.
                parallel.zero_grad(optimizer)
                self._meter, self._first = meter, not optimizer.state
                meter.start(held_bytes(models, optimizer))
            if self._meter is not None:
                self._steps.append(_worst_two(batches, objective.tokens))
            yield batches

    def forwards(self, autocast: Callable[[], AbstractContextManager[Any]]) -> Callable[[], AbstractContextManager[Any]]:
        """Return `autocast`, before which the micro-batch before is added up."""

        @contextmanager
        def forward() -> Iterator[None]:
            self._add_up()
            with autocast():
                yield

        return forward

    def __enter__(self) -> None:
        """Begin nothing yet: the first micro-batches do."""

    def __exit__(self, *_: object) -> None:
        """End a measurement whose steps were not made."""
        self._abandon()

    def made(self) -> float:
        """Count a step that was made; after the last of them the measurement ends, and is written.

        Returns:
            Seconds of the step that measuring took.
        """
        spent, self._spent = self._spent, 0.0
        if self._meter is not None and self._at == self._measured[-1]:
            try:
                with self._report.aside("comparing the memory that a step took with its plan"):
                    phase, step = self._ended()
            except _AskedToStop:
                self._abandon()
            else:
                of_process = type(self._planned.machine).count() == 0
                line = measured_line(phase, self._measured, of_process=of_process, compiled=self._compiled, step=step)
                self._report.note(line)
        return spent

    def _ended(self) -> tuple[Phase, Phase | None]:
        """Return what the steps took, written beside the plan, and the plan's own step."""
        self._check()
        measured = self._meter.stop()
        self._meter = None
        phase = forecast_steps(
            self._planned,
            Target.here(self._planned.machine),
            self._steps,
            measured=measured,
            first=self._first,
            compiled=self._compiled,
            check=self._check,
        )
        self._steps = []
        if phase is None:
            phase = Phase(name=MEASURED, planned=0, parts={})
        phase = attrs.evolve(phase, measured=measured)
        file = self._folder / FILE
        about = json.loads(file.read_text(encoding="utf-8"))
        step = next((Phase(**each) for each in about["phases"] if each["name"] == "step"), None)
        about["phases"].append(attrs.asdict(phase))
        forge_dist.write_text_atomically(file, json.dumps(about, indent=1) + "\n")
        return phase, step

    def _add_up(self) -> None:
        if self._meter is None:
            return
        began = time.perf_counter()
        with self._report.aside():
            if self._stopping():
                self._abandon()
            else:
                self._meter.add_up()
        self._spent += time.perf_counter() - began

    def _check(self) -> None:
        if self._stopping():
            raise _AskedToStop

    def _abandon(self) -> None:
        if self._meter is not None:
            self._meter.abandon()
        self._meter, self._steps = None, []


class _AskedToStop(BaseException):
    """The run was asked to stop: ends what is computed of its memory, and is no error."""


def measured_line(phase: Phase, steps: range, *, of_process: bool, compiled: bool = False, step: Phase | None = None) -> str:
    """Return in words what the tensors of the steps took, beside what was planned.

    Args:
        phase: with both figures.
        steps: which, counted from 0.
        of_process: whether the peak in metrics.jsonl is that of the whole process, as on a CPU.
        compiled: whether blocks were compiled, of which no plan is made.
        step: of the plan, which is with the run's largest micro-batch.

    """
    assert phase.measured is not None
    against = "nothing planned"
    if phase.planned:
        # Adding 0 makes 0 of -0.
        how = " without compiled blocks" if compiled else ""
        against = (
            f"{size(phase.planned)} planned for these rows{how} ({round(phase.planned / phase.measured - 1, 3) + 0.0:+.1%})"
        )
        against += "" if step is None else _beside_plan(phase.planned, step)
    process = "; the process holds more, with Python and libraries: memory in metrics.jsonl" if of_process else ""
    which = f"step {steps.start + 1}" if len(steps) == 1 else first_of(len(steps), "steps")
    return f"memory: the tensors of {which} took {size(phase.measured)}; {against}{process}"


def _beside_plan(planned: int, step: Phase) -> str:
    """Say why the plan's step is another number than what steps were planned to take."""
    kept = step.parts.get("compiled", 0)
    reasons = ["is that of the run's largest micro-batch"] if size(step.planned - kept) != size(planned) else []
    reasons += [f"has {size(kept)} that libraries keep of compiled products"] if kept else []
    return f"; the plan's step, {size(step.planned)}, {' and '.join(reasons)}" if reasons else ""


def held_bytes(models: Iterable[Any], optimizer: Any) -> int:
    """Add up the bytes of the tensors of models and of an optimizer."""
    tensors = [
        *(t for model in models for t in forge_algos.tensors_of(model)),
        *(t for state in optimizer.state.values() for t in state.values()),
    ]
    storages = [t.untyped_storage() for t in tensors if hasattr(t, "untyped_storage")]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _worst_two(batches: list[Any], tokens: Callable[[Any], int]) -> list[Any]:
    """Return the largest micro-batch of a step, and one beside whose gradients it runs."""

    def amount(batch: Any) -> int:
        return computed_tokens(batch) if hasattr(batch, "kv_rows") else tokens(batch)

    at = max(range(len(batches)), key=lambda index: amount(batches[index]))
    before, after = sorted(batches[:at], key=amount), sorted(batches[at + 1 :], key=amount)
    return [before[0], batches[at]] if before else [batches[at], *after[-1:]]
