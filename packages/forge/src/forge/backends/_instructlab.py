"""Backend `instructlab-training`: instructlab.training's own `run_training` on forge's rows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import attrs

from forge._errors import SettingsError
from forge.backends._backend import Capabilities
from forge.backends._own_loop import REFUSED_BY_ALL, OwnLoopBackend
from forge.run._prepare import Prepared
from forge.settings._share import steps_between

Sharding = Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"]

_sharding: Any = attrs.validators.in_(get_args(Sharding))


@attrs.frozen(kw_only=True)
class InstructLabSettings:
    """Settings that the backend `instructlab-training` alone has, named as there."""

    sharding_strategy: Sharding = attrs.field(default="HYBRID_SHARD", validator=_sharding)
    """How FSDP divides the model: within a node (HYBRID_SHARD), over all ranks (FULL_SHARD), gradients and optimizer alone
    (SHARD_GRAD_OP), or not (NO_SHARD)."""
    cpu_offload_params: bool = attrs.field(default=False, validator=attrs.validators.instance_of(bool))
    """Keep the parameters in the CPU's memory between uses."""
    disable_flash_attn: bool = attrs.field(default=False, validator=attrs.validators.instance_of(bool))
    """Compute without flash attention, on padded rows."""


REFUSED: dict[str, str] = {
    **REFUSED_BY_ALL,
    **dict.fromkeys(("max_steps", "max_tokens"), "it ends after num_epochs"),
    **dict.fromkeys(("lr_scheduler", "min_lr_ratio", "decay_steps", "power", "num_cycles"), "its schedule is a cosine"),
    "dtype": "it computes in bfloat16",
    "save_dtype": "it exports in bfloat16",
}
"""Setting that instructlab-training cannot honour → why."""


class InstructLabBackend(OwnLoopBackend):
    """instructlab-training: full training with FSDP, in processes of its own."""

    name = "instructlab-training"
    Settings = InstructLabSettings
    requires = ("instructlab",)
    versions: ClassVar[Mapping[str, str]] = {"instructlab-training": ">=0.16.2"}
    install = "forge-llm[instructlab]"
    refused = REFUSED
    module = types = "instructlab.training"
    says = (
        "backend: instructlab-training makes the steps, in processes of its own. Not promised with it: forge's order of the "
        "rows, a run that is resumed where it was stopped, the same numbers on any number of ranks, an export compared with "
        "the model in memory."
    )

    def capabilities(self) -> Capabilities:
        """Return SFT on GPUs of CUDA."""
        import forge_accel

        return Capabilities(
            verbs=("sft",),
            adapters=("none",),
            strategies=("auto",),
            devices=(forge_accel.CUDAAccelerator.name, forge_accel.ROCMAccelerator.name),
        )

    def check(self, verb: str, s: Any) -> None:
        """Raise SettingsError for what instructlab-training does not have."""
        if s.plan.num_epochs == "inf":
            raise SettingsError("num_epochs=inf is not available with backend=instructlab-training, whose cosine needs an end.")
        super().check(verb, s)

    def training_args(self, classes: Any, prepared: Prepared, model_path: str, folder: Path) -> dict[str, Any]:
        """Return the arguments of `instructlab.training.TrainingArgs`."""
        s = prepared.settings
        keeps_all = bool(s.checkpoints.save_samples or s.checkpoints.checkpoint_at_epoch)
        return {
            "model_path": model_path,
            "data_path": str(folder),
            "data_output_dir": str(folder),
            "ckpt_output_dir": str(folder),
            # The rows are tokenized, and none is longer.
            "process_data": False,
            "max_seq_len": int(prepared.train.longest.max()),
            "max_batch_len": s.plan.max_tokens_per_gpu,
            "num_epochs": s.plan.num_epochs or 1,
            "effective_batch_size": s.plan.effective_batch_size,
            "learning_rate": s.optimizer.learning_rate,
            "warmup_steps": s.optimizer.warmup(prepared.plan.num_steps),
            "adamw_weight_decay": s.optimizer.weight_decay,
            "adamw_betas": (s.optimizer.beta1, s.optimizer.beta2),
            "adamw_eps": s.optimizer.eps,
            "random_seed": s.plan.seed,
            "save_samples": steps_between(s.checkpoints.save_samples, prepared.plan.num_samples),
            # It exports at the end of an epoch or not at all.
            "checkpoint_at_epoch": True,
            "keep_last_checkpoint_only": not keeps_all or s.checkpoints.keep_last_checkpoint_only,
            "accelerate_full_state_at_epoch": False,
            "fsdp_options": classes.FSDPOptions(
                cpu_offload_params=s.passed_on.cpu_offload_params,
                sharding_strategy=classes.ShardingStrategies(s.passed_on.sharding_strategy),
            ),
            "disable_flash_attn": s.passed_on.disable_flash_attn,
        }

    def logs(self, folder: Path) -> Path:
        """Return the file of its steps."""
        return folder / "training_params_and_metrics_global0.jsonl"

    def line(self, logged: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return a line of metrics.jsonl for a logged step."""
        if "avg_loss" not in logged:
            return None
        return {
            "step": int(logged["step"]),
            "epoch": logged["epoch"],
            "samples": int(logged["samples_seen"]),
            "loss": float(logged["avg_loss"]),
            "lr": logged["lr"],
            "grad_norm": logged["gradnorm"],
            "loss_tokens": int(logged["num_loss_counted_tokens"]),
            "samples_per_second": logged["overall_throughput"],
        }
