"""Backend `trl`: TRL's trainers on forge's rows, in forge's run directory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import attrs

from forge._errors import SettingsError
from forge.backends._backend import Backend, Capabilities
from forge.backends._request import read_request

if TYPE_CHECKING:
    from forge._result import RunResult


def _count(_: object, field: Any, value: object) -> None:
    """Raise TypeError or ValueError unless the value is None or a whole number above 0."""
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{field.name} must be a whole number, not {value!r}")
    if value < 1:
        raise ValueError(f"{field.name} must be at least 1, not {value}")


_optional_count: Any = {"default": None, "validator": _count}


@attrs.frozen(kw_only=True)
class TRLSettings:
    """Settings that the backend `trl` alone has, named as in TRL."""

    gradient_accumulation_steps: int | None = attrs.field(**_optional_count)
    """Micro-batches of a step on each rank, which TRL's losses of pairs depend on. By default as few as max_tokens_per_gpu
    allows, padding counted."""
    pad_to_multiple_of: int | None = attrs.field(**_optional_count)
    """Pad the rows of a micro-batch to a multiple of so many tokens."""


STEP = "TRL takes its own mean, which depends on the cut"
_EVAL = "it measures nothing while it trains; `forge eval` and `forge compare` do afterwards"
_STATES = "it saves no full states: a run that was stopped begins anew"
_EXPORTS = "the model is exported once, at the end"

REFUSED: dict[str, str] = {
    "normalize": STEP,
    "z_loss": "TRL has none",
    "packing": "the rows of a micro-batch are padded",
    **dict.fromkeys(("compile", "kernels"), "its model computes as transformers loads it"),
    "on_nan": "TRL has moved the weights when it tells the loss: such a run stops",
    **dict.fromkeys(("shard_size", "gather_dtype", "reshard_after_forward", "cpu_offload"), "each rank holds the whole model"),
    **dict.fromkeys(("tp_size", "cp_size", "ep_size"), "each rank holds the whole model"),
    "weights": "TRL's optimizers round to the nearest, which loses small steps",
    "qat": "TRL computes with the weights that it trains",
    "activation_offloading": "it is forge's own strategies that move activations",
    **dict.fromkeys(("eval_data_path", "validation_split", "eval_every_steps", "keep_best", "metric_for_best"), _EVAL),
    **dict.fromkeys(("early_stopping_patience", "eval_prompts", "eval_max_new_tokens", "kl_base", "stop_at_kl"), _EVAL),
    "adapter_path": "an adapter goes on in forge's own loop",
    **dict.fromkeys(("freeze_vision_tower", "freeze_audio_tower"), "its rows are text here"),
    **dict.fromkeys(("freeze_multi_modal_projector", "freeze_language_model"), "its rows are text here"),
    "eval_at_epoch": _EVAL,
    **dict.fromkeys(("full_state_every_steps", "full_state_every_minutes", "accelerate_full_state_at_epoch"), _STATES),
    **dict.fromkeys(("keep_last_n", "keep_full_state", "async_save", "max_failed_saves", "emergency_dir"), _STATES),
    "checkpoint_storage": "it makes no full states and one export; `forge push` and a copy hand that on",
    **dict.fromkeys(("save_samples", "checkpoint_at_epoch", "keep_last_checkpoint_only"), _EXPORTS),
    "reward_model_path": "TRL would need the reward model's own tokens: wrap it in a reward function",
    "on_reward_error": "TRL stops where a reward function raises",
    "reward_clip_range": "TRL has none for GRPO; let the reward function clip",
    "reward_timeout": "TRL waits for reward functions",
    **dict.fromkeys(("env", "max_turns", "env_timeout"), "TRL's environments are other classes: choose backend=forge"),
    **dict.fromkeys(
        ("sampler", "sampler_url", "sampler_timeout", "tis_above", "tis_cap", "max_sampler_gap"),
        "TRL samples with the trained model here: choose backend=forge",
    ),
    "missing_eos_penalty": "TRL has none for GRPO; let a reward function subtract it",
    "loss_reduction": "TRL averages as its loss type does: set loss_type",
    **dict.fromkeys(
        ("dro_beta", "clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio", "kl_cov_coef"), "TRL has no such loss"
    ),
    **dict.fromkeys(("baseline", "whiten", "kl_in_reward"), "TRL's GRPO subtracts the group's mean and has the KL in its loss"),
    **dict.fromkeys(("kl_target", "kl_horizon"), "TRL's weight of the KL stays as it is"),
    "overlong_buffer": "TRL has it as a reward function: give reward one that subtracts it",
    **dict.fromkeys(
        ("on_equal_rewards", "max_resamples", "min_group_reward", "max_group_reward"), "TRL keeps groups of equal rewards"
    ),
}
"""Setting that TRL cannot honour → why."""


class TRLBackend(Backend):
    """TRL's SFTTrainer, DPOTrainer, KTOTrainer, RewardTrainer and GRPOTrainer."""

    name = "trl"
    Settings = TRLSettings
    requires = ("trl",)
    versions: ClassVar[Mapping[str, str]] = {"trl": ">=1.16,<2"}
    install = "forge-llm[trl]"
    refused = REFUSED

    def capabilities(self) -> Capabilities:
        """Return the five trainers, full training and LoRA, whole copies on each rank."""
        return Capabilities(
            verbs=("sft", "dpo", "kto", "reward", "grpo"),
            adapters=("none", "lora", "qlora", "dora", "rslora"),
            strategies=("auto", "single", "ddp"),
        )

    def check(self, verb: str, s: Any) -> None:
        """Raise SettingsError for what TRL does not have."""
        super().check(verb, s)
        if verb == "sft" and s.objective.label_smoothing:
            raise SettingsError("label_smoothing is not available with sft of backend=trl, which gives it up with version 2.")
        if s.plan.num_epochs == "inf" and s.plan.max_steps is None and s.plan.max_tokens is None:
            raise SettingsError("num_epochs=inf is not available with backend=trl, which needs a last step: set max_steps too.")
        if s.optimizer.optimizer == "schedule_free":
            raise SettingsError("optimizer=schedule_free is not available with backend=trl: its trainers do not switch modes.")
        if s.strategy.activation_checkpointing in ("selective", "auto"):
            raise SettingsError(
                f"activation_checkpointing={s.strategy.activation_checkpointing} is not available with backend=trl: set full "
                "or none."
            )
        if s.adapter.subtracts and s.optimizer.weight_decay:
            raise SettingsError(
                f"init_lora_weights={s.adapter.init_lora_weights} with weight_decay is not available with backend=trl, whose "
                "steps nothing follows that undoes the decay of what it subtracts: set weight_decay=0."
            )
        if s.device.attention == "documents":
            raise SettingsError("attention=documents is for packed rows, and backend=trl pads them: choose sdpa or eager.")
        if verb == "grpo" and s.objective.kl_estimator == "unbiased" and s.objective.policy.ratio == "sequence_mean":
            raise SettingsError(
                "kl_estimator=unbiased is not available with a completion's ratio of backend=trl, which weighs each token's KL "
                "by it: set importance_sampling_level=token, kl_estimator=k3, or backend=forge."
            )
        if verb == "dpo" and "cdpo" in s.objective.loss_type:
            raise SettingsError("loss_type=cdpo is not available with backend=trl: choose robust, or backend=forge.")
        if verb == "dpo" and s.objective.wpo and (unable := {"hinge", "sft"} & set(s.objective.loss_type)):
            raise SettingsError(
                f"wpo with loss_type={', '.join(sorted(unable))} is not available with backend=trl, which fails in it: choose "
                "backend=forge."
            )
        if verb in ("dpo", "kto", "grpo") and s.objective.reference == "moving" and s.adapter.adapter != "none":
            raise SettingsError(
                f"reference=moving with adapter={s.adapter.adapter} is not available with backend=trl, which keeps no "
                "reference beside an adapter: choose backend=forge."
            )
        if s.passed_on.pad_to_multiple_of is not None and verb == "grpo":
            raise SettingsError("pad_to_multiple_of has no effect with grpo: leave it out.")
        if verb == "grpo":
            _check_policy(s.objective)
        if verb == "grpo" and s.objective.loss_type == "cispo" and s.objective.clip is not None:
            raise SettingsError(
                f"clip={s.objective.clip:g} is not available with loss_type=cispo of backend=trl, which bounds the ratio above "
                "alone."
            )
        if verb == "grpo" and s.data.chat_template_kwargs is not None:
            raise SettingsError("chat_template_kwargs is not available with grpo of backend=trl: put them into the template.")

    def execute_training(self, params: Mapping[str, object]) -> RunResult:
        """Run a training verb to its end."""
        from forge.backends._trl_run import run

        return run(*read_request(self, params))

    def rehearse(self, params: Mapping[str, object], *, target: str | None = None) -> str:
        """Check, tokenize and plan, and list the arguments that TRL would get."""
        from forge.backends._trl_run import rehearse

        if target is not None:
            raise SettingsError("--for is not available with backend=trl, whose memory is not planned: leave it out.")
        return rehearse(*read_request(self, params)[:3])


def _check_policy(s: Any) -> None:
    """Raise SettingsError for a policy loss or a scale that TRL's GRPOTrainer does not have."""
    if s.loss_type in ("gmpo", "dppo_tv", "dppo_kl", "gpg", "dro", "clip_cov", "kl_cov"):
        raise SettingsError(
            f"loss_type={s.loss_type} is not available with backend=trl, which has no such loss: choose backend=forge."
        )
    if s.scale == "nonzero":
        raise SettingsError("scale_rewards=nonzero is not available with backend=trl: set group, batch or none.")
    if s.paired:
        raise SettingsError(
            f"loss_type={s.loss_type} is not available with backend=trl, whose GRPOTrainer trains on no pairs: "
            "choose backend=forge."
        )
