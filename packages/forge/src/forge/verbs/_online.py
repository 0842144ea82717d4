"""`forge.ppo`, `grpo`, `rloo`: reinforcement learning on rewards of own completions."""

from __future__ import annotations

import math
from abc import abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

import forge_algos
import forge_data
import forge_dist
import forge_packing
from forge._errors import SettingsError
from forge.settings._settings import RunSettings
from forge.tasks._media import check_prompt_media, with_media
from forge.tasks._reference_model import check_moves, check_moving
from forge.tasks._rehearsed_rollouts import RehearsedRollouts
from forge.tasks._rollouts import RolloutSteps
from forge.tasks._sampling_server import check_server_settings
from forge.tasks._task import Run
from forge.tasks.items._prompts import Prompts
from forge.verbs._prompts import PromptTask
from forge.verbs._registry import verb

if TYPE_CHECKING:
    from forge._progress import Reporter


@attrs.frozen(kw_only=True)
class OnlineRunSettings(RunSettings):
    """Settings that all online verbs share."""

    data: forge_data.PromptDataSettings

    def check(self) -> None:
        """Refuse a run without a reward, and a trained model that differs from the sampling one."""
        super().check()
        if not self.objective.reward and self.objective.reward_model_path is None and self.objective.env is None:
            raise SettingsError(
                "nothing rewards the completions: set reward=package.module:function, reward_model_path, or "
                "env=package.module:Class."
            )
        check_moving(self)
        check_server_settings(self)
        if self.plan.max_tokens is not None:
            raise SettingsError(
                f"max_tokens={self.plan.max_tokens} has no effect here: how many tokens are learned is known only once "
                "completions are sampled. Give max_steps or num_epochs."
            )
        if self.adapter.lora_dropout or self.optimizer.optimizer == "schedule_free":
            name = f"lora_dropout={self.adapter.lora_dropout}" if self.adapter.lora_dropout else "optimizer=schedule_free"
            raise SettingsError(
                f"{name} trains another model than the one that samples the completions, so that the probability ratio would "
                "not begin at 1: leave it out."
            )

    def check_length(self, num_steps: int | None) -> None:
        """Refuse a moving reference that would not move before the run's last rollout."""
        super().check_length(num_steps)
        check_moves(self, num_steps, each=updates_of(self))


def updates_of(s: Any) -> int:
    """Return the optimizer steps on one rollout."""
    return s.objective.steps_of_rollout


class OnlineTask(PromptTask):
    """Base of the online verbs; each names its objective."""

    step_is = "rollout"
    media = True

    def check_settings(self, s: Any) -> None:
        """Import and check reward functions and environment; check that the reward model is one."""
        if s.objective.env is not None:
            forge_algos.online.load_environment(s.objective.env)
        for name in s.objective.reward:
            forge_algos.online.check_reward(name)
        for name, path in self.other_models(s).items():
            if (Path(path) / "adapter_config.json").is_file():
                continue  # an adapter is checked when it is loaded on its base
            try:
                forge_dist.check_model(path, task="reward")
            except forge_dist.ModelError as error:
                raise forge_dist.ModelError(str(error).replace("model_path", name, 1)) from None

    def other_models(self, s: Any) -> dict[str, str]:
        """Return the path of the reward model, where there is one."""
        path = s.objective.reward_model_path
        return {} if path is None else {"reward_model_path": path}

    def row_readers(self, s: Any) -> dict[str, str]:  # noqa: ARG002 - the same for all settings
        """Return none: a reward model has a tokenizer of its own."""
        return {}

    def text_readers(self, s: Any) -> dict[str, str]:
        """Return the reward model, which reads prompts with their completions."""
        return self.other_models(s)

    def items(self, s: Any, store: Any) -> Prompts:
        """Plan prompts."""
        return Prompts(store, max_new_tokens=s.objective.max_new_tokens)

    def check_data(self, s: Any, report: Reporter, train: Any, held_out: Any) -> None:
        """Refuse rows without a reward's fields and what images cannot have; warn of idle settings.

        The lint looks at what is learned, and of prompts nothing is.
        """
        check_prompt_media(s, report, train, held_out)
        _warn_of_idle(s.objective, report)
        for setting, store in (("data_path", train), ("eval_data_path" if s.data.eval_data_path else "data_path", held_out)):
            for name in s.objective.reward if store is not None else ():
                _check_columns(name, setting, store)

    def steps(self, s: Any, endless: forge_packing.BatchPlan) -> int | None:  # noqa: ARG002 - the same for all prompts
        """Plan as many rollouts as `max_steps` optimizer steps need."""
        steps = s.plan.max_steps
        return None if steps is None else math.ceil(steps / self.updates(s))

    def updates(self, s: Any) -> int:
        """Return the optimizer steps on one rollout."""
        return updates_of(s)

    @abstractmethod
    def objective(self, settings: Any) -> forge_algos.Objective:
        """Return the objective on a rollout."""

    def rehearsal_source(self, run: Run) -> RehearsedRollouts:
        """Make up rollouts: what a model without numbers samples has none."""
        return RehearsedRollouts(run, self.objective(run.settings.objective))

    def step_source(self, run: Run) -> RolloutSteps:
        """Sample, reward and learn from rollouts."""
        return RolloutSteps(with_media(run), self.objective(run.settings.objective), self.updates(run.settings))


def _warn_of_idle(own: Any, report: Reporter) -> None:
    """Warn of settings that act from the second step on a rollout on, where each has one.

    They are no error: values of on-policy runs elsewhere have them too, `clip_high=0.28` for instance.
    """
    if not own.idle:
        return
    said = [f"{name}={getattr(own, name)}" for name in own.idle]
    if "loss_type" in own.idle:
        said[own.idle.index("loss_type")] += f" (the gradients are those of {own.policy.first_as})"
    report.note(
        f"WARNING: {', '.join(said)} {'has' if len(said) == 1 else 'have'} no effect: each rollout is learned from in one "
        "step, in which the ratio to the policy that sampled is 1. Set updates_per_pass or num_iterations above 1."
    )


def _check_columns(reward: str, setting: str, store: Any) -> None:
    """Raise SettingsError where a reward function takes a field that no row has."""
    missing = forge_algos.online.reward_columns(reward)
    seen: set[str] = set()
    for prompt in store if missing else ():
        seen |= prompt.columns.keys()
        if not missing - seen:
            return
    if missing - seen:
        has = ", ".join(sorted(seen)) or "none but the prompt"
        raise SettingsError(
            f"reward {reward!r}: it takes the field {min(missing - seen)}, which no row of {setting} has (they have {has}). "
            "Correct the function or the rows; a column of another name is read with rename_columns."
        )


@attrs.frozen(kw_only=True)
class PPOSettings(OnlineRunSettings):
    """Settings of `forge.ppo`."""

    objective: forge_algos.PPOSettings


class PPO(OnlineTask):
    """Proximal policy optimization."""

    name = "ppo"
    settings = PPOSettings
    about = "Proximal policy optimization: train a model on rewards of its own completions, with a value head."
    extra_modules = ("value_head",)

    def add_modules(self, model: Any, s: Any) -> None:  # noqa: ARG002 - the same for all settings
        """Put the value head on the model."""
        forge_algos.online.attach_value_head(model)

    def objective(self, settings: Any) -> forge_algos.Objective:
        """Return the PPO objective."""
        return forge_algos.PPO(settings)


@attrs.frozen(kw_only=True)
class GRPOSettings(OnlineRunSettings):
    """Settings of `forge.grpo`."""

    objective: forge_algos.GRPOSettings


class GRPO(OnlineTask):
    """Group-relative policy optimization."""

    name = "grpo"
    settings = GRPOSettings
    about = "Group-relative policy optimization: train a model on rewards of its own completions, compared within groups."

    def objective(self, settings: Any) -> forge_algos.Objective:
        """Return the GRPO objective."""
        return forge_algos.GRPO(settings)


@attrs.frozen(kw_only=True)
class RLOOSettings(OnlineRunSettings):
    """Settings of `forge.rloo`."""

    objective: forge_algos.RLOOSettings


class RLOO(OnlineTask):
    """REINFORCE with a leave-one-out baseline."""

    name = "rloo"
    settings = RLOOSettings
    about = "REINFORCE with a leave-one-out baseline: train a model on rewards of its own completions."

    def objective(self, settings: Any) -> forge_algos.Objective:
        """Return the RLOO objective."""
        return forge_algos.RLOO(settings)


ppo, grpo, rloo = verb(PPO()), verb(GRPO()), verb(RLOO())
