"""A run that draws completions from the model that it trains: prompts → rollouts, kept in the run directory → steps."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

import forge_algos
import forge_data
import forge_dist
import forge_packing
from forge._errors import SettingsError
from forge._progress import Reporter
from forge.run._adaptation import why_not_off
from forge.run._resume import step_seed
from forge.settings._settings import RunSettings
from forge.tasks._task import Items, Measured, Run, Task
from forge.tasks.items._prompts import Prompts

_HELD_OUT = -1
"""Stands for a step in the seed of held-out completions: the same ones are drawn at every measurement of the same weights."""


@attrs.frozen(kw_only=True)
class OnlineRunSettings(RunSettings):
    """What the online verbs' settings share."""

    data: forge_data.PromptDataSettings

    def check(self) -> None:
        """Refuse a run that nothing rewards."""
        super().check()
        if not self.objective.reward and self.objective.reward_model_path is None:
            raise SettingsError(
                "nothing rewards the completions: set reward to 'package.module:function', or reward_model_path."
            )
        if self.adapter.lora_dropout or self.optimizer.optimizer == "schedule_free":
            name = "lora_dropout" if self.adapter.lora_dropout else "optimizer=schedule_free"
            raise SettingsError(
                f"{name} trains another model than the one that draws the completions, so that the probability ratio would not begin at 1: "
                "leave it out."
            )


class OnlineTask(Task):
    """What PPO, GRPO and RLOO share; each names its objective."""

    def prepare(self, s: Any, path: Any, tokenizer: Any, directory: Path, report: Reporter, **more: Any) -> Any:  # noqa: ARG002 - prompts are few
        """Tokenise prompts."""
        return forge_data.prepare_prompts(
            path,
            tokenizer,
            directory,
            preprocess=s.data.preprocess,
            max_prompt_len=s.data.max_prompt_len,
            on_overflow=s.data.on_overflow,
            **more,
        )

    def open(self, directory: Path) -> Any:
        """Open the store of prompts."""
        return forge_data.PromptStore.open(directory)

    def items(self, s: Any, store: Any) -> Prompts:
        """Plan prompts."""
        return Prompts(store, max_new_tokens=s.objective.max_new_tokens)

    def look(self, s: Any) -> None:
        """Find the reward functions; what the reward model is, full or an adapter, is seen when it is loaded."""
        for name in s.objective.reward:
            forge_algos.online.load_reward(name)

    def check(self, s: Any, report: Reporter, train: Any, held_out: Any) -> None:
        """Find nothing wrong: rows of prompts say nothing of rewards."""

    def length(self, s: Any, items: Items) -> tuple[int | None, int | None]:  # noqa: ARG002 - prompts say nothing of steps
        """As many rollouts as the optimizer steps of `max_steps` need."""
        steps = s.plan.max_steps
        return s.plan.num_epochs, None if steps is None else math.ceil(steps / self.updates(s))

    def summary(self, plan: forge_packing.BatchPlan) -> str:
        """Say how many rollouts there are; what they will hold nobody knows yet."""
        return f"{plan.num_steps:,} rollouts of at most {plan.batch_size:,} prompts"

    def updates(self, s: Any) -> int:
        """Optimizer steps on one rollout."""
        return s.objective.num_iterations * s.objective.updates_per_pass

    def paths(self, s: Any) -> dict[str, str]:
        """The reward model, where there is one."""
        path = s.objective.reward_model_path
        return {} if path is None else {"reward_model_path": path}

    @abstractmethod
    def objective(self, settings: Any) -> forge_algos.Objective:
        """What is learned from a rollout."""

    def begin(self, run: Run) -> Online:
        """Make the work of rollouts."""
        return Online(run, self.objective(run.settings.objective), self.updates(run.settings))


class Online:
    """The work of the online verbs."""

    def __init__(self, run: Run, objective: forge_algos.Objective, updates: int) -> None:
        self.objective = objective
        self._run, self._updates, self._own = run, updates, run.settings.objective
        self._shares, why = forge_algos.shares_prompts(run.model, device=run.device)
        run.report.note(f"prompts: {'computed once a group' if self._shares else 'computed once a completion'}: {why}")
        self._sampler = forge_algos.online.GenerateSampler(
            run.model,
            eos_ids=_ends(run),
            pad_id=run.tokenizer.pad_token_id if run.tokenizer.pad_token_id is not None else _ends(run)[0],
            batch_tokens=run.settings.plan.max_tokens_per_gpu,
            synced=run.strategy.divides,
            autocast=run.autocast,
            parallel=run.strategy,
        )
        self._rewards = _rewards(run)
        self._reference: Any = None
        if self._own.kl_weight:
            off = why_not_off(run.settings) is None
            self._reference = "adapter_off" if off else run.load_frozen(run.settings.model.model_path)

    def first(self) -> None:
        """Nothing but the data and the model has to hold."""

    def steps(self, first: int) -> Iterator[list[Any]]:
        """The updates on one rollout after another; one that was begun before is read back."""
        run, batches = self._run, []
        for step in range(first, run.num_steps):
            planned, update = divmod(step, self._updates)
            if update == 0 or not batches:
                batches = self._batches(self._rollout(planned, begun=update > 0))
            run.machine.seed(step_seed(run.settings.plan.seed, step, run.ranks.rank))
            yield batches[update]

    def measure(self, model: Any) -> Measured | None:
        """The mean reward of completions of the held-out prompts; None for another model than the one that is trained."""
        run = self._run
        if run.held_out is None or model is not run.model:
            return None
        rows = range(len(run.held_out))
        found = self._make(run.held_out, rows, step_seed(run.settings.plan.seed, _HELD_OUT, 0)).figures()
        count = int(found["completions"])
        shown = ("reward", "kl", "length", "cut_off", "unscored")
        figures = {name: found[name] for name in found if name in shown or name.startswith("reward/")}
        return Measured(loss=None, count=count, unit="completions", figures=figures)

    def _rollout(self, planned: int, *, begun: bool) -> forge_algos.online.Rollout:
        run = self._run
        file = run.root / "rollouts" / f"step_{planned * self._updates + 1}.jsonl"
        if begun:
            return forge_algos.online.Rollout.read(file)
        rows = [int(i) for i in run.plan.samples(planned)]
        made = self._make(run.train, rows, step_seed(run.settings.plan.seed, planned, 0))

        def write() -> None:
            file.parent.mkdir(exist_ok=True)
            made.write(file)

        run.ranks.first(write)
        figures = {name: value for name, value in made.figures().items() if value == value}  # noqa: PLR0124 - NaN is not equal
        run.metrics({"step": planned * self._updates, **{f"rollout_{name}": value for name, value in figures.items()}})
        return made

    def _make(self, prompts: Any, rows: Any, seed: int) -> forge_algos.online.Rollout:
        run, tokenizer = self._run, self._run.tokenizer
        return forge_algos.online.make_rollout(
            run.model,
            self._sampler,
            prompts.batch(rows),
            settings=self._own,
            rewards=self._rewards,
            decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=True),
            max_tokens=run.settings.plan.max_tokens_per_gpu,
            seed=seed,
            rows=rows,
            device=run.device,
            autocast=run.autocast,
            parallel=run.strategy,
            rank=run.ranks.rank,
            reference=self._reference,
            share_prompts=self._shares,
        )

    def _batches(self, rollout: forge_algos.online.Rollout) -> list[list[Any]]:
        run = self._run
        return forge_algos.online.rollout_batches(
            rollout,
            max_tokens=run.settings.plan.max_tokens_per_gpu,
            updates=self._own.updates_per_pass,
            passes=self._own.num_iterations,
            share_prompts=self._shares,
            parallel=run.strategy,
            rank=run.ranks.rank,
        )


def _ends(run: Run) -> list[int]:
    """Token ids that end a completion: the model's and the tokenizer's."""
    found = [getattr(getattr(run.model, "generation_config", None), "eos_token_id", None), run.tokenizer.eos_token_id]
    ids = [one for each in found if each is not None for one in (each if isinstance(each, list) else [each])]
    if not ids:
        raise SettingsError(
            "neither the model's generation config nor its tokenizer names a token that ends a text: set eos_token."
        )
    return sorted(set(ids))


def _rewards(run: Run) -> list[forge_algos.online.Reward]:
    own = run.settings.objective
    weights = own.reward_weights or (1.0,) * (len(own.reward) + 1)
    rewards = [
        forge_algos.online.Reward(name=name, function=forge_algos.online.load_reward(name), weight=weight)
        for name, weight in zip(own.reward, weights, strict=False)
    ]
    if own.reward_model_path is not None:
        rewards.append(
            forge_algos.online.Reward(
                name="reward_model", function=_reward_model(run, own.reward_model_path), weight=weights[-1]
            )
        )
    return rewards


def _reward_model(run: Run, path: str) -> Any:
    """A reward model as a reward function; each rank holds a whole copy, for ranks score different completions."""
    model = forge_dist.load_trained(
        path, dtype=run.machine.dtype(run.settings.device.dtype).value, device=run.device, task="reward"
    )
    return forge_algos.online.RewardModel(
        model,
        tokenizer=forge_data.load_tokenizer(path),
        device=run.device,
        max_tokens=run.settings.plan.max_tokens_per_gpu,
        autocast=run.autocast,
    )
