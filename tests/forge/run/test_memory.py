"""What a run says of the memory of its first steps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forge._progress import Reporter
from forge.memory._memory_plan import Phase
from forge.run import _memory
from forge.run._memory import FirstSteps, measured_line

MIB = 2**20


@pytest.mark.parametrize(("planned", "difference"), [(9_999_999, "+0.0%"), (10_200_000, "+2.0%"), (9_700_000, "-3.0%")])
def test_a_difference_has_a_sign_that_it_has(planned: int, difference: str) -> None:
    """Less than a twentieth of a percent is 0 without a minus; the figures are of tensors, on a CPU beside the process."""
    phase = Phase(name="first steps", planned=planned, parts={}, measured=10_000_000)
    assert measured_line(phase, range(2), of_process=False).startswith("memory: the tensors of the first 2 steps took 9.5 MiB")
    assert measured_line(phase, range(2), of_process=False).endswith(f"({difference})")
    assert f"planned for these rows without compiled blocks ({difference})" in measured_line(
        phase, range(2), of_process=False, compiled=True
    )
    assert "the tensors of step 2 took 9.5 MiB" in measured_line(phase, range(1, 2), of_process=True)
    assert measured_line(phase, range(1, 2), of_process=True).endswith(
        "; the process holds more, with Python and libraries: memory in metrics.jsonl"
    )


@pytest.mark.parametrize(
    ("planned", "parts", "said"),
    [
        (10 * MIB, {"activations": 10 * MIB}, "(+0.0%)"),
        (14 * MIB, {"activations": 14 * MIB}, "; the plan's step, 14.0 MiB, is that of the run's largest micro-batch"),
        (
            12 * MIB,
            {"activations": 10 * MIB, "compiled": 2 * MIB},
            "; the plan's step, 12.0 MiB, has 2.0 MiB that libraries keep of compiled products",
        ),
        (
            14 * MIB,
            {"activations": 12 * MIB, "compiled": 2 * MIB},
            "; the plan's step, 14.0 MiB, is that of the run's largest micro-batch and has 2.0 MiB that libraries keep of "
            "compiled products",
        ),
    ],
)
def test_two_plans_of_a_step_are_told_apart(planned: int, parts: dict[str, int], said: str) -> None:
    """Where the plan's step is another number than the measured steps were planned with, the line says why."""
    phase = Phase(name="first steps", planned=10 * MIB, parts={}, measured=10 * MIB)
    step = Phase(name="step", planned=planned, parts=parts)
    assert measured_line(phase, range(1, 2), of_process=False, step=step).endswith(said)


class Meter:
    """Meter that notes what it is asked for."""

    records = True

    def __init__(self, asked: list[str]) -> None:
        self._asked = asked

    def start(self, held: int) -> None:
        """Begin to measure."""
        self._asked.append(f"start {held}")

    def __getattr__(self, name: str) -> Callable[[], int]:
        return lambda: self._asked.append(name) or 10


class Machine:
    """Accelerator that has this meter."""

    def __init__(self, asked: list[str]) -> None:
        self.meter = lambda: Meter(asked)

    @classmethod
    def count(cls) -> int:
        """Return that it has no devices."""
        return 0


class Stopped:
    """Answers from the call of this number on that the run was asked to stop."""

    def __init__(self, after: int | None) -> None:
        self._left = after

    def __call__(self) -> bool:
        if self._left is None:
            return False
        self._left -= 1
        return self._left < 0


def steps_made(asked: list[str], folder: Path, said: list[str], stopping: Callable[[], bool], **settings: Any) -> list[float]:
    """Make three steps of two micro-batches, with what each asks of the meter; return what measuring took of each."""
    (folder / "memory.json").write_text('{"phases": []}')
    often: Any = SimpleNamespace(
        checkpoints=SimpleNamespace(save_samples=None, full_state_every_steps=None),
        evaluation=SimpleNamespace(eval_every_steps=settings.get("eval_every_steps")),
        plan=SimpleNamespace(effective_batch_size=8),
        device=SimpleNamespace(compile=settings.get("compile", "off")),
    )
    planned: Any = SimpleNamespace(machine=Machine(asked), settings=often, train=None, num_steps=settings.get("num_steps", 3))
    report = Reporter(lambda line, **_: said.append(line))
    first = FirstSteps.of(planned, folder, report, stopping=stopping)
    parallel = SimpleNamespace(zero_grad=lambda _: asked.append("zero_grad"))
    objective, spent = SimpleNamespace(tokens=lambda batch: batch), []
    forward = first.forwards(nullcontext)
    with first:
        for number, batches in enumerate(first.watched(iter([[1, 2]] * 3), [], SimpleNamespace(state={}), objective, parallel)):
            asked.append(f"step {number}")
            for _ in batches:
                with forward():
                    asked.append("forward")
            spent.append(first.made())
    return spent


MADE = ["step 0", "forward", "forward"]
MEASURED = ["zero_grad", "start 0", "step 1", "add_up", "forward", "add_up", "forward", "stop"]


def test_the_second_step_is_measured_a_micro_batch_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was recorded of one is let go of before the next; what follows is said before it begins."""
    asked, said, given = list[str](), list[str](), list[Any]()

    def forecast(*about: Any, **more: Any) -> None:
        assert "comparing the memory that a step took with its plan ..." in capsys.readouterr().err
        given.extend([about[2], more["measured"], more["first"], more["compiled"]])

    monkeypatch.setattr(_memory, "forecast_steps", forecast)
    monkeypatch.setattr(_memory, "Target", SimpleNamespace(here=lambda _: None))
    spent = steps_made(asked, tmp_path, said, lambda: False, compile="blocks")
    assert asked == [*MADE, *MEASURED, "step 2", "forward", "forward"]
    assert given == [[[1, 2]], 10, True, True]
    assert [line.partition(";")[0] for line in said] == ["memory: the tensors of step 2 took 0.0 MiB"]
    assert [seconds > 0 for seconds in spent] == [False, True, False]


@pytest.mark.parametrize("settings", [{"num_steps": 1}, {"eval_every_steps": 1}])
def test_the_first_is_measured_where_there_is_no_second(
    settings: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or where the run works between the two."""
    monkeypatch.setattr(_memory, "forecast_steps", lambda *_, **__: None)
    monkeypatch.setattr(_memory, "Target", SimpleNamespace(here=lambda _: None))
    asked = list[str]()
    steps_made(asked, tmp_path, [], lambda: False, **settings)
    assert asked[:8] == ["zero_grad", "start 0", "step 0", *MEASURED[3:]]


@pytest.mark.parametrize(
    ("answers", "measured"), [(0, []), (1, MEASURED[:3]), (2, MEASURED[:5]), (3, MEASURED[:7]), (4, MEASURED)]
)
def test_nothing_is_measured_once_a_stop_was_asked_for(
    answers: int, measured: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the step, at each of its micro-batches, after it, and while its plan is computed."""

    def forecast(*_: Any, check: Callable[[], None], **__: Any) -> None:
        check()
        raise AssertionError

    monkeypatch.setattr(_memory, "forecast_steps", forecast)
    monkeypatch.setattr(_memory, "Target", SimpleNamespace(here=lambda _: None))
    asked, said = list[str](), list[str]()
    steps_made(asked, tmp_path, said, Stopped(answers))
    done = [each for each in asked if each not in ("forward", "abandon") and not each.startswith("step")]
    assert done == [each for each in measured if each != "forward" and not each.startswith("step")]
    assert asked.count("abandon") == (0 < answers < 4)
    assert said == []
