"""Arguments of mini-trainer → the training verb that they ask for and its settings."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import attrs

from forge._errors import SettingsError
from forge.mini._types import PretrainingConfig, TorchrunArgs, TrainingArgs, TrainingMode

NAMES = {
    "model_name_or_path": "model_path",
    "data_path": "data_path",
    "batch_size": "effective_batch_size",
    "max_tokens_per_gpu": "max_tokens_per_gpu",
    "learning_rate": "learning_rate",
    "output_dir": "ckpt_output_dir",
    "num_warmup_steps": "warmup_steps",
    "lr_scheduler": "lr_scheduler",
    "seed": "seed",
    "beta1": "beta1",
    "beta2": "beta2",
    "eps": "eps",
    "weight_decay": "weight_decay",
    "min_samples_per_checkpoint": "save_samples",
    "checkpoint_at_epoch": "checkpoint_at_epoch",
    "save_dtype": "save_dtype",
    "wandb_project": "wandb_project",
    "wandb_run_name": "wandb_run_name",
    "wandb_entity": "wandb_entity",
    "mlflow_tracking_uri": "mlflow_tracking_uri",
    "mlflow_experiment_name": "mlflow_experiment_name",
    "mlflow_run_name": "mlflow_run_name",
    "validation_split": "validation_split",
    "validation_data_path": "eval_data_path",
    "validation_frequency": "eval_every_steps",
    "validate_at_epoch": "eval_at_epoch",
    "save_best_val_loss": "keep_best",
    "resume_from_full_state_checkpoint": "resume",
    "osft_unfreeze_rank_ratio": "unfreeze_rank_ratio",
    "osft_target_patterns": "target_modules",
}
"""Argument → setting of the same meaning; None is left out."""

_SCHEDULES = {"constant_with_warmup": "constant"}
_SCHEDULE_ARGUMENTS = {
    "min_lr_rate": "min_lr_ratio",
    "min_lr_ratio": "min_lr_ratio",
    "power": "power",
    "num_cycles": "num_cycles",
    "num_decay_steps": "decay_steps",
}
_RATES = ("min_lr", "lr_end")
"""Arguments of a schedule that are learning rates, where ours is a share of the highest."""

_DTYPES = {
    name: full
    for full, names in {
        "float32": "float32 fp32 float torch.float32",
        "bfloat16": "bfloat16 bf16 torch.bfloat16",
        "float16": "float16 fp16 half torch.float16",
    }.items()
    for name in names.split()
}

_ONLY = {
    "trust_remote_code": (False, "no code of a model is run"),
    "val_loss_improvement_threshold": (0, "any lower held-out loss is the best one"),
    "save_final_checkpoint": (True, "the model is always exported at the end"),
}
"""Argument → the one value that it can have, and why."""

_SWITCHES = ("osft", "use_liger_kernels", "validate_at_final", "on_demand_checkpointing")
_WORDS = ("lr_scheduler", "train_dtype", "save_dtype", "osft_upcast_dtype")
_LIMITS = {TrainingMode.EPOCH: "max_epochs", TrainingMode.STEP: "max_steps", TrainingMode.TOKEN: "max_tokens"}
_OSFT = ("osft_unfreeze_rank_ratio", "osft_target_patterns")


def translate(torch_args: TorchrunArgs | None, train_args: TrainingArgs) -> tuple[str, dict[str, Any]]:
    """Return the training verb and its settings.

    Args:
        torch_args: processes to start; None where torchrun started this one, or nobody asks for several.
        train_args: the training.

    Raises:
        SettingsError: an argument asks for what forge does not have, or has no effect with the others.

    >>> args = TrainingArgs("org/model", "rows.jsonl", 128, 25_000, 1e-5, "out", training_mode="token", max_tokens=1_000_000)
    >>> verb, settings = translate(TorchrunArgs(nproc_per_node=8), args)
    >>> verb, settings["max_tokens"], settings["nproc_per_node"]
    ('sft', 1000000, 8)

    """
    for args, kind in ((torch_args, TorchrunArgs), (train_args, TrainingArgs)):
        if not isinstance(args, kind) and not (args is None and kind is TorchrunArgs):
            raise SettingsError(f"a forge.mini.{kind.__name__} is wanted, not {args!r}.")
    for name in _SWITCHES:
        value = getattr(train_args, name)
        if not isinstance(value, bool):
            raise SettingsError(f"{name} must be True or False, not {value!r}.")
    for name in _WORDS:
        value = getattr(train_args, name)
        if not isinstance(value, str | None):
            raise SettingsError(f"{name} must be a string, not {value!r}.")
    for name, (only, why) in _ONLY.items():
        if getattr(train_args, name) != only:
            raise _refused(train_args, name, why)
    given = {theirs: getattr(train_args, theirs) for theirs in NAMES}
    settings = {NAMES[theirs]: value for theirs, value in given.items() if value is not None}
    verb = "sft"
    if train_args.pretraining_config is not None:
        verb, config = "pretrain", train_args.pretraining_config
        if not isinstance(config, PretrainingConfig):
            raise SettingsError(f"pretraining_config must be a forge.mini.PretrainingConfig, not {config!r}.")
        # Its blocks are one stream, in which documents see each other.
        settings |= {"block_size": config.block_size, "cross_documents": True}
    for part in (_osft, _dtypes, _schedule, _end, _validation, _trackers):
        settings |= part(train_args)
    if train_args.use_liger_kernels:
        settings["kernels"] = "liger"
    if train_args.osft and verb == "sft":
        verb = "osft"
    elif train_args.osft:
        settings["adapter"] = "osft"
    # Every block is recomputed there, for which max_tokens_per_gpu was chosen.
    return verb, {**settings, "activation_checkpointing": True, **({} if torch_args is None else _launch(torch_args))}


def _refused(args: TrainingArgs, name: str, why: str) -> SettingsError:
    return SettingsError(f"{name}={getattr(args, name)!r}: {why}. Leave it out.")


def _osft(args: TrainingArgs) -> dict[str, Any]:
    """Return how OSFT trains what it trains there: factors, and all that it does not decompose."""
    if args.osft_upcast_dtype is not None and _DTYPES.get(args.osft_upcast_dtype) != "float32":
        raise _refused(args, "osft_upcast_dtype", "decompositions are computed in float32")
    if not args.osft:
        for name in _OSFT:
            if getattr(args, name) is not None:
                raise SettingsError(
                    f"{name}={getattr(args, name)!r} has no effect without osft=True: set that, or leave it out."
                )
        return {}
    if args.osft_unfreeze_rank_ratio is None:
        raise SettingsError("osft_unfreeze_rank_ratio is required with osft=True: the share of each matrix that is trained.")
    return {"osft_form": "factors", "osft_train_rest": ("all",)}


def _dtypes(args: TrainingArgs) -> dict[str, Any]:
    if _DTYPES.get(args.train_dtype) != "float32":
        raise _refused(args, "train_dtype", "the weights that are trained are float32; computation is in what suits the device")
    if args.save_dtype is None:
        return {}
    return {
        "save_dtype": _DTYPES.get(args.save_dtype, args.save_dtype) if isinstance(args.save_dtype, str) else args.save_dtype
    }


def _schedule(args: TrainingArgs) -> dict[str, Any]:
    """Return the schedule with its arguments, shares of the highest rate in place of rates."""
    if args.lr_scheduler == "constant" and args.num_warmup_steps:
        raise SettingsError(
            f"num_warmup_steps={args.num_warmup_steps} has no effect with lr_scheduler='constant': set "
            "lr_scheduler='constant_with_warmup', or leave it out."
        )
    found: dict[str, Any] = {"lr_scheduler": _SCHEDULES.get(args.lr_scheduler, args.lr_scheduler)}
    more = args.lr_scheduler_kwargs or {}
    if not isinstance(more, dict):
        raise SettingsError(f"lr_scheduler_kwargs must be a mapping, not {more!r}.")
    for name, given in more.items():
        value = given
        if name in _RATES:
            numbers = all(isinstance(each, int | float) and each > 0 for each in (given, args.learning_rate))
            # What is no number is refused with the other settings.
            ours, value = "min_lr_ratio", given / args.learning_rate if numbers else given
        elif name in _SCHEDULE_ARGUMENTS:
            ours = _SCHEDULE_ARGUMENTS[name]
        else:
            known = ", ".join(sorted({*_SCHEDULE_ARGUMENTS, *_RATES}))
            raise SettingsError(f"lr_scheduler_kwargs: {name}={value!r} is not available; there are {known}.")
        if found.setdefault(ours, value) != value:
            raise SettingsError(f"lr_scheduler_kwargs: {name} and another name both say how low the rate ends: give one.")
    return found


def _end(args: TrainingArgs) -> dict[str, Any]:
    """Return what ends the training; limits of other modes are refused."""
    mode, defaults = args.training_mode, attrs.fields_dict(TrainingArgs)
    for other, name in _LIMITS.items():
        value = getattr(args, name)
        if other is not mode and value != defaults[name].default:
            raise SettingsError(
                f"{name}={value!r} has no effect with training_mode={mode.value}: set training_mode={other.value}, or leave "
                "it out."
            )
    if mode is TrainingMode.INFINITE:
        return {"num_epochs": "inf"}
    return {{"max_epochs": "num_epochs"}.get(_LIMITS[mode], _LIMITS[mode]): getattr(args, _LIMITS[mode])}


def _validation(args: TrainingArgs) -> dict[str, Any]:
    """Return how often held-out rows are measured."""
    often = args.min_samples_per_validation
    if args.validate_at_final and not args.validation_split and args.validation_data_path is None:
        raise SettingsError(
            "validate_at_final=True has no effect without held-out rows: set validation_data_path or validation_split, or "
            "leave it out."
        )
    if often is None:
        return {}
    if args.validation_frequency is not None:
        raise SettingsError(
            "validation_frequency and min_samples_per_validation both say how often to measure: give one of them."
        )
    for name in ("min_samples_per_validation", "batch_size"):
        value = getattr(args, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise SettingsError(f"{name} must be a whole number from 1, not {value!r}.")
    return {"eval_every_steps": math.ceil(often / args.batch_size)}


def _trackers(args: TrainingArgs) -> dict[str, Any]:
    named = {
        "wandb": (args.wandb_project, args.wandb_run_name, args.wandb_entity),
        "mlflow": (args.mlflow_tracking_uri, args.mlflow_experiment_name, args.mlflow_run_name),
    }
    found = tuple(tracker for tracker, values in named.items() if any(value is not None for value in values))
    return {"trackers": found} if found else {}


def _launch(args: TorchrunArgs) -> dict[str, Any]:
    """Return the launch settings that have an effect: one node meets nobody."""
    return dict(_launch_items(args))


def _launch_items(args: TorchrunArgs) -> Iterator[tuple[str, Any]]:
    several = args.nnodes != 1
    yield "nproc_per_node", args.nproc_per_node
    if several:
        yield "nnodes", args.nnodes
    if several or args.node_rank:
        yield "node_rank", args.node_rank
    if args.rdzv_endpoint:
        yield "rdzv_endpoint", args.rdzv_endpoint
        yield "rdzv_id", str(args.rdzv_id)
    for name in ("master_addr", "master_port"):
        if getattr(args, name):
            yield name, getattr(args, name)
