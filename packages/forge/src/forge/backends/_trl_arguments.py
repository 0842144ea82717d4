"""Settings of a run → the arguments of TRL's configuration classes, and how a step is cut."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from forge._counted import counted
from forge._errors import SettingsError

CLASSES = {
    "sft": ("SFTConfig", "SFTTrainer"),
    "dpo": ("DPOConfig", "DPOTrainer"),
    "kto": ("KTOConfig", "KTOTrainer"),
    "reward": ("RewardConfig", "RewardTrainer"),
    "grpo": ("GRPOConfig", "GRPOTrainer"),
}
"""Verb → names of TRL's configuration and trainer."""

OBJECTIVE: dict[str, dict[str, str]] = {
    "sft": {"loss": "loss_type", "neftune_alpha": "neftune_noise_alpha"},
    "dpo": {
        "beta": "beta",
        "loss_type": "loss_type",
        "loss_weights": "loss_weights",
        "label_smoothing": "label_smoothing",
        "f_divergence": "f_divergence_type",
        "f_divergence_alpha": "f_alpha_divergence_coef",
        "discopop_tau": "discopop_tau",
        "ld_alpha": "ld_alpha",
        "wpo": "use_weighting",
        "reference_sync_steps": "ref_model_sync_steps",
        "reference_mixup": "ref_model_mixup_alpha",
    },
    "kto": {
        "beta": "beta",
        "loss_type": "loss_type",
        "desirable_weight": "desirable_weight",
        "undesirable_weight": "undesirable_weight",
        "reference_sync_steps": "ref_model_sync_steps",
        "reference_mixup": "ref_model_mixup_alpha",
    },
    "reward": {"centering": "center_rewards_coefficient"},
    "grpo": {
        "loss_type": "loss_type",
        "importance_sampling_level": "importance_sampling_level",
        "num_generations": "num_generations",
        "num_iterations": "num_iterations",
        "scale_rewards": "scale_rewards",
        "multi_objective_aggregation": "multi_objective_aggregation",
        "kl_weight": "beta",
        "clip": "epsilon",
        "clip_high": "epsilon_high",
        "dual_clip": "delta",
        "off_policy_mask_threshold": "off_policy_mask_threshold",
        "entropy_coef": "entropy_coef",
        "top_entropy_quantile": "top_entropy_quantile",
        **{name: name for name in ("use_adaptive_entropy", "entropy_target", "entropy_coef_delta")},
        **{name: name for name in ("entropy_coef_min", "entropy_coef_max")},
        "sapo_temperature_pos": "sapo_temperature_pos",
        "sapo_temperature_neg": "sapo_temperature_neg",
        **{name: name for name in ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg")},
        "kl_estimator": "use_bias_correction_kl",
        "temperature": "temperature",
        "top_p": "top_p",
        "top_k": "top_k",
        "min_p": "min_p",
        "repetition_penalty": "repetition_penalty",
        "max_new_tokens": "max_completion_length",
        "mask_truncated": "mask_truncated_completions",
        "reference_sync_steps": "ref_model_sync_steps",
        "reference_mixup": "ref_model_mixup_alpha",
        "reward_weights": "reward_weights",
    },
}
"""Verb → setting of its objective → TRL's argument."""

BY_FORGE: dict[str, tuple[str, ...]] = {
    "dpo": ("reference", "reference_path"),
    "kto": ("reference", "reference_path"),
    "grpo": ("reference", "reward", "updates_per_pass"),
}
"""Verb → settings of its objective that are no argument: a model that the trainer is given, functions, the cut of a step."""
NONE_IF_ZERO = ("neftune_alpha", "centering", "min_p")


class Cut(NamedTuple):
    """How a step is divided: the same number of rows in each micro-batch of each rank."""

    rows: int
    """Rows of a micro-batch at most: samples, pairs, answers or completions."""
    micro_batches: int
    """Micro-batches of a step on each rank."""


def cut_step(s: Any, rows: int, shards: int, longest: int, *, least: int = 1, asked: int | None = None) -> Cut:
    """Divide the rows of a step by ranks and micro-batches.

    Args:
        s: the settings.
        rows: of a step.
        shards: number of ranks.
        longest: tokens of the longest row, which the others are padded to.
        least: rows that a micro-batch must have.
        asked: micro-batches that were asked for.

    Raises:
        SettingsError: the rows of a step cannot be divided so.

    """
    if rows % shards:
        raise SettingsError(
            f"effective_batch_size={s.plan.effective_batch_size} gives {counted(rows, 'rows')} a step, which {shards} ranks "
            "cannot share evenly, as TRL does: choose a multiple."
        )
    mine = rows // shards
    choices = [number for number in range(1, mine + 1) if mine % number == 0 and mine // number >= least]
    if asked is not None:
        if asked not in choices:
            raise SettingsError(
                f"gradient_accumulation_steps={asked} does not divide the {counted(mine, 'rows')} that a rank has in a step: "
                f"choose {', '.join(map(str, choices)) or 'a larger effective_batch_size'}."
            )
        return Cut(mine // asked, asked)
    if not choices:
        raise SettingsError(
            f"effective_batch_size={s.plan.effective_batch_size} leaves a rank {counted(mine, 'rows')} a step, and TRL needs "
            f"{least} in a micro-batch: choose a larger one."
        )
    fitting = [number for number in choices if mine // number * longest <= s.plan.max_tokens_per_gpu]
    number = min(fitting, default=max(choices))
    return Cut(mine // number, number)


def arguments(
    verb: str, s: Any, cut: Cut, *, steps: int, output_dir: str, on_cpu: bool, bf16: bool, ddp: str | None
) -> dict[str, Any]:
    """Return the arguments of TRL's configuration class.

    Args:
        verb: the training verb.
        s: its settings, with every choice made.
        cut: how a step is divided.
        steps: optimizer steps.
        output_dir: a directory that exists; nothing is written to it.
        on_cpu: whether the device is a CPU.
        bf16: whether forwards compute in bfloat16.
        ddp: name of the collective backend; None on one rank.

    """
    found: dict[str, Any] = {
        "output_dir": output_dir,
        "max_steps": steps,
        "per_device_train_batch_size": cut.rows,
        "gradient_accumulation_steps": cut.micro_batches,
        "learning_rate": s.optimizer.learning_rate,
        "max_grad_norm": s.optimizer.max_grad_norm,
        "seed": s.plan.seed,
        "bf16": bf16,
        "use_cpu": on_cpu,
        "ddp_backend": ddp,
        "activation_checkpointing": s.strategy.activation_checkpointing == "full",
        # Every step is told, with its loss as it is.
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "disable_tqdm": True,
        "report_to": [],
        "save_strategy": "no",
        "eval_strategy": "no",
        "dataloader_pin_memory": not on_cpu,
    }
    if verb != "reward":
        found["router_aux_loss_coef"] = s.moe.router_aux_loss_coef if s.moe.moe_aux_loss == "trl" else 0.0
    if verb != "grpo":
        found |= {"max_length": None, "pad_to_multiple_of": s.passed_on.pad_to_multiple_of}
    for ours, theirs in OBJECTIVE[verb].items():
        value = getattr(s.objective, ours)
        found[theirs] = list(value) if isinstance(value, tuple) else None if ours in NONE_IF_ZERO and not value else value
    if verb in ("dpo", "kto", "reward"):
        found["disable_dropout"] = False  # TRL's default is True, under which lora_dropout does nothing
    if verb in ("dpo", "kto", "grpo"):
        found["sync_ref_model"] = s.objective.reference == "moving"
    if verb == "grpo":
        found["scale_rewards"] = s.objective.scale
        found |= _ratio(s.objective)
        found["steps_per_generation"] = cut.micro_batches * s.objective.updates_per_pass
        # The plan has the order of the prompts already.
        found["shuffle_dataset"] = False
    return found


def _ratio(s: Any) -> dict[str, Any]:
    """Return what a policy loss is called there, and the bounds of its ratio."""
    kind = s.policy
    low, high = kind.bounds(s.clip, s.clip_high)
    of_completions = kind.ratio == "sequence_mean"
    return {
        "loss_type": "grpo" if s.loss_type == "gspo" else s.loss_type,
        "importance_sampling_level": "sequence" if of_completions else "token",
        "use_bias_correction_kl": s.kl_estimator == "unbiased",
        # TRL bounds CISPO's ratio above alone, and by the bound itself.
        "epsilon": 0.2 if low is None else low,
        "epsilon_high": 1 + high if kind.clipped == "weight" else high,
    }


def short_steps(sizes: list[int], shards: int, cut: Cut) -> int | None:
    """Return the first step with too few rows for its micro-batches; None where there is none."""
    return next((step for step, size in enumerate(sizes) if size % shards or size < shards * cut.micro_batches), None)


def spread(rows: int, parts: int) -> list[int]:
    """Divide a number of rows into parts whose sizes differ by one at most."""
    return [math.ceil((rows - part) / parts) for part in range(parts)]
