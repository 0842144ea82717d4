"""What TRL logs of each step → lines of metrics.jsonl with forge's names."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import forge_accel
import forge_algos
from forge._progress import Reporter
from forge.run._prepare import Prepared
from forge.run._run_directory import NoDirectory, RunDirectory
from forge.tasks._task import Task

FIGURES = {
    "rewards/accuracies": "accuracy",
    "rewards/margins": "margin",
    "rewards/chosen": "chosen_reward",
    "rewards/rejected": "rejected_reward",
    "logps/chosen": "chosen_logp",
    "logps/rejected": "rejected_logp",
    "accuracy": "accuracy",
    "margin": "margin",
    "kl": "kl",
    "reward": "reward",
}
"""Name of a figure in TRL's logs → its name here; others keep theirs, with `trl/` before it."""
UNITS = {"sft": "tokens", "kto": "completions"}
_OWN = {"loss", "grad_norm", "learning_rate", "epoch"}


class _Step(NamedTuple):
    """A step as the progress report shows it."""

    step: int
    loss: float
    learning_rate: float
    grad_norm: float
    figures: dict[str, float]


class Steps:
    """Record of a run's steps.

    Args:
        task: the verb.
        prepared: its settings, items and plan.
        planned: indices of the items of each step of the plan.
        updates: optimizer steps with one of them.
        out: the run directory.
        report: the progress report.
        machine: the accelerator.
        last: number of the last step.

    """

    step = samples = 0
    loss = math.nan

    def __init__(
        self,
        task: Task,
        prepared: Prepared,
        planned: Sequence[Any],
        updates: int,
        out: RunDirectory | NoDirectory,
        report: Reporter,
        machine: forge_accel.Accelerator,
        last: int,
    ) -> None:
        self._task, self._prepared, self._planned, self._updates = task, prepared, planned, updates
        self._out, self._report, self._machine, self._last = out, report, machine, last
        self._since = time.perf_counter()

    def callback(self) -> Any:
        """Return the callback for TRL's trainer."""
        from transformers import TrainerCallback

        record = self.record

        class Recorder(TrainerCallback):
            def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:  # noqa: ARG002
                if logs and "loss" in logs:
                    record(state.global_step, logs)

        return Recorder()

    def record(self, step: int, logs: Mapping[str, Any]) -> None:
        """Write the line of a step.

        Raises:
            forge_algos.DivergedError: its loss is not finite.

        """
        items, plan = self._prepared.train, self._prepared.plan
        now = time.perf_counter()
        at = (step - 1) // self._updates
        indices = self._planned[at]
        tokens = int(items.lengths[indices].sum())
        first = (step - 1) % self._updates == 0
        self.step, self.loss = step, float(logs["loss"])
        self.samples += len(indices) if first else 0
        norm, rate = float(logs.get("grad_norm", math.nan)), float(logs["learning_rate"])
        figures = {
            FIGURES.get(name, f"trl/{name}"): float(value)
            for name, value in logs.items()
            if name not in _OWN and isinstance(value, int | float)
        }
        unit = UNITS.get(self._task.name, "pairs")
        counted = int(items.loss_counts[indices].sum()) if unit == "tokens" else len(indices)
        seconds, self._since = now - self._since, now
        self._out.began = True
        self._out.metrics(
            {
                "step": step,
                "epoch": plan.epoch(at),
                "samples": self.samples,
                "loss": self.loss,
                "lr": rate,
                "grad_norm": norm,
                **({} if self._task.name == "grpo" else {"tokens": tokens, f"loss_{unit}": counted}),
                **figures,
                **({} if self._task.name == "grpo" else {"tokens_per_second": round(tokens / seconds, 1)}),
                "memory": self._machine.peak_memory_bytes(),
            }
        )
        self._report.step(_Step(step, self.loss, rate, norm, figures), tokens / seconds)
        if not math.isfinite(self.loss):
            raise forge_algos.DivergedError(
                f"the loss of step {step} is {self.loss}, and TRL has moved the weights by it: lower learning_rate, or look at "
                f"the rows of that step (from {items.source(int(indices[0]))} on)"
            )
