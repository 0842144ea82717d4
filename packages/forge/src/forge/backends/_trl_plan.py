"""Batch plan → the steps that a trainer of TRL makes of it, and their micro-batches."""

from __future__ import annotations

from typing import Any, NamedTuple

from forge._counted import counted
from forge._errors import SettingsError
from forge.backends._trl_arguments import Cut, cut_step, short_steps
from forge.backends._trl_rows import rows_of
from forge.run._prepare import Prepared
from forge.tasks._task import Task


class Plan(NamedTuple):
    """Steps of a run, as TRL makes them."""

    steps: list[Any]
    """Indices of the items of each step of the batch plan."""
    cut: Cut
    optimizer_steps: int
    updates: int
    """Optimizer steps with one step of the batch plan."""
    left_out: int
    """Items of short steps, which GRPO cannot take."""

    @property
    def cut_in_words(self) -> str:
        """How TRL divides a step."""
        passes = f"{self.cut.micro_batches} micro-batch{'es' * (self.cut.micro_batches != 1)}"
        return f"{passes} a rank, of at most {counted(self.cut.rows, 'rows')}"


def plan_steps(task: Task, prepared: Prepared, shards: int) -> Plan:
    """Cut the steps of the batch plan. Raises SettingsError where TRL could not make them."""
    s, items, plan = prepared.settings, prepared.train, prepared.plan
    size, updates = s.plan.effective_batch_size, task.updates(s)
    steps = [plan.samples(step) for step in range(plan.num_steps)]
    asked = s.passed_on.gradient_accumulation_steps
    if task.name == "grpo":
        own = s.objective
        completions = size * own.num_generations
        if completions % own.updates_per_pass:
            raise SettingsError(
                f"updates_per_pass={own.updates_per_pass} does not divide the {completions} completions of a rollout: choose a "
                "divisor."
            )
        longest = int(items.lengths.max())
        cut = cut_step(s, completions // own.updates_per_pass, shards, longest, asked=asked)
        whole = [step for step in steps if len(step) == size]
        if not whole:
            raise SettingsError(
                f"effective_batch_size={size} is more than the {counted(len(items), 'prompts')}, and TRL makes whole "
                "rollouts alone: lower it."
            )
        left = sum(map(len, steps)) - size * len(whole)
        total = len(whole) * updates
        return Plan(whole, cut, min(total, s.plan.max_steps or total), updates, left)
    rows_a_item = 2 if task.name in ("dpo", "reward") else 1
    cut = cut_step(
        s,
        size,
        shards,
        int(items.longest.max()) * rows_a_item,
        least=2 if task.name == "kto" and s.objective.estimates_kl else 1,
        asked=asked,
    )
    short = short_steps(list(map(len, steps)), shards, cut)
    if short is not None:
        raise SettingsError(
            f"step {short + 1} has {counted(len(steps[short]), 'rows')} left of an epoch, and {shards} ranks with "
            f"{cut.micro_batches} micro-batches each cannot share them, as TRL does: choose an effective_batch_size that "
            f"divides {len(items)}, or a max_steps below {short + 1}."
        )
    return Plan(steps, cut, len(steps), 1, 0)


def check_rows(task: Task, prepared: Prepared, plan: Plan) -> None:
    """Make every row once, so that one that TRL cannot take is refused before training."""
    if task.name == "grpo":
        return
    rows = rows_of(task.name, prepared.train)
    for index in sorted({int(index) for step in plan.steps for index in step}):
        rows(index)
