"""Backend `mini-trainer`: mini_trainer's own `run_training` on forge's rows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import attrs

from forge._errors import SettingsError
from forge.backends._backend import Capabilities
from forge.backends._own_loop import REFUSED_BY_ALL, ROWS, OwnLoopBackend
from forge.run._prepare import Prepared
from forge.settings._share import steps_between

Upcast = Literal["float32", "bfloat16", "float16"]
_upcast: Any = attrs.validators.in_(get_args(Upcast))
SCHEDULES = {
    "cosine": "cosine",
    "linear": "linear",
    "constant": "constant_with_warmup",
    "inverse_sqrt": "inverse_sqrt",
    "cosine_with_min_lr": "cosine_with_min_lr",
    "cosine_with_restarts": "cosine_with_hard_restarts_with_warmup",
}
"""Value of `lr_scheduler` → its name there."""


@attrs.frozen(kw_only=True)
class MiniTrainerSettings:
    """Settings that the backend `mini-trainer` alone has, named as there."""

    use_liger_kernels: bool = attrs.field(default=False, validator=attrs.validators.instance_of(bool))
    """Compute with Liger's kernels, which must be installed."""
    osft_upcast_dtype: Upcast = attrs.field(default="float32", validator=_upcast)
    """Dtype in which osft's projections are computed."""


_BUFFERS = (".rotary_emb.inv_freq", ".rotary_emb.original_inv_freq")
_FIXED = "mini-trainer's run_training does not pass it on"
_OSFT = "mini-trainer has one form of OSFT"
REFUSED: dict[str, str] = {
    **REFUSED_BY_ALL,
    **dict.fromkeys(("beta1", "beta2", "eps", "weight_decay"), _FIXED),
    **dict.fromkeys(("decay_steps", "power"), "its schedules have no such argument"),
    **dict.fromkeys(("osft_directions", "osft_rule", "osft_form", "osft_rank", "osft_calibration_path"), _OSFT),
    **dict.fromkeys(("rank_pattern", "osft_train_rest", "osft_svd", "osft_cache", "modules_to_save"), _OSFT),
}
"""Setting that mini-trainer cannot honour → why."""


class MiniTrainerBackend(OwnLoopBackend):
    """mini-trainer: full training and OSFT with FSDP2, in processes of its own."""

    name = "mini-trainer"
    Settings = MiniTrainerSettings
    requires = ("mini_trainer",)
    versions: ClassVar[Mapping[str, str]] = {"rhai-innovation-mini-trainer": ">=0.9"}
    install = "forge-llm[mini-trainer]"
    refused = REFUSED
    has: ClassVar[Mapping[str, object]] = {"osft_directions": "weights"}
    module, types = "mini_trainer.api_train", "mini_trainer.training_types"
    says = (
        "backend: mini-trainer makes the steps, in processes of its own. Not promised with it: forge's order of the rows, a "
        "run that is resumed where it was stopped, the same numbers on any number of ranks, an export compared with the model "
        "in memory."
    )

    def capabilities(self) -> Capabilities:
        """Return SFT and OSFT on GPUs of CUDA."""
        import forge_accel

        return Capabilities(
            verbs=("sft", "osft"),
            adapters=("none", "osft"),
            strategies=("auto", "fsdp2"),
            devices=(forge_accel.CUDAAccelerator.name, forge_accel.ROCMAccelerator.name),
        )

    def check(self, verb: str, s: Any) -> None:
        """Raise SettingsError for what mini-trainer does not have."""
        if s.optimizer.lr_scheduler not in SCHEDULES:
            raise SettingsError(
                f"lr_scheduler={s.optimizer.lr_scheduler} is not available with backend=mini-trainer; it has "
                f"{', '.join(SCHEDULES)}. Choose one of them."
            )
        limits = [name for name in ("num_epochs", "max_steps", "max_tokens") if getattr(s.plan, name) is not None]
        if len(limits) > 1 or s.plan.num_epochs == "inf":
            raise SettingsError(
                f"{' and '.join(limits)}: backend=mini-trainer ends by one number of epochs, steps or tokens: give one of them."
            )
        if s.adapter.adapter == "osft" and s.adapter.unfreeze_rank_ratio in (0, 1):
            raise SettingsError(
                f"unfreeze_rank_ratio={s.adapter.unfreeze_rank_ratio:g}: mini-trainer does not train what it says there (1 "
                "frees half of each matrix, 0 still one direction): choose a share between."
            )
        if s.adapter.adapter != "osft" and s.passed_on.osft_upcast_dtype != "float32":
            raise SettingsError("osft_upcast_dtype has no effect without OSFT: leave it out.")
        super().check(verb, s)

    def training_args(self, classes: Any, prepared: Prepared, model_path: str, folder: Path) -> dict[str, Any]:
        """Return the arguments of `mini_trainer.TrainingArgs`."""
        s = prepared.settings
        limit = next((name for name in ("max_steps", "max_tokens") if getattr(s.plan, name) is not None), "max_epochs")
        mode = {"max_epochs": "epoch", "max_steps": "step", "max_tokens": "token"}[limit]
        kwargs: dict[str, Any] = {}
        if s.optimizer.lr_scheduler == "cosine_with_min_lr":
            kwargs = {"min_lr_rate": s.optimizer.min_lr_ratio}
        elif s.optimizer.lr_scheduler == "cosine_with_restarts":
            kwargs = {"num_cycles": s.optimizer.num_cycles}
        found: dict[str, Any] = {
            "model_name_or_path": model_path,
            "data_path": str(folder / ROWS),
            "output_dir": str(folder),
            "batch_size": s.plan.effective_batch_size,
            "max_tokens_per_gpu": s.plan.max_tokens_per_gpu,
            "learning_rate": s.optimizer.learning_rate,
            "num_warmup_steps": s.optimizer.warmup(prepared.plan.num_steps),
            "lr_scheduler": SCHEDULES[s.optimizer.lr_scheduler],
            "lr_scheduler_kwargs": kwargs,
            "seed": s.plan.seed,
            "training_mode": classes.TrainingMode(mode),
            limit: getattr(s.plan, "num_epochs" if limit == "max_epochs" else limit) or 1,
            "min_samples_per_checkpoint": steps_between(s.checkpoints.save_samples, prepared.plan.num_samples) or None,
            "checkpoint_at_epoch": s.checkpoints.checkpoint_at_epoch,
            "save_final_checkpoint": True,
            "save_dtype": s.checkpoints.save_dtype,
            "train_dtype": "float32" if s.device.dtype == "auto" else s.device.dtype,
            "use_liger_kernels": s.passed_on.use_liger_kernels,
        }
        if s.adapter.adapter == "osft":
            found |= {
                "osft": True,
                "osft_unfreeze_rank_ratio": s.adapter.unfreeze_rank_ratio,
                "osft_target_patterns": list(s.adapter.target_modules) if s.adapter.target_modules else None,
                "osft_upcast_dtype": s.passed_on.osft_upcast_dtype,
            }
        return found

    def tidy(self, directory: Path) -> None:
        """Remove the buffers of rotary embeddings, which mini-trainer saves like weights."""
        from safetensors import safe_open
        from safetensors.torch import save_file

        for file in directory.glob("*.safetensors"):
            with safe_open(file, "pt") as opened:
                names = list(opened.keys())
                kept = {name: opened.get_tensor(name) for name in names if not name.endswith(_BUFFERS)}
                metadata = opened.metadata()
            if len(kept) < len(names):
                save_file(kept, file.with_suffix(".tmp"), metadata=metadata)
                file.with_suffix(".tmp").replace(file)
        index = directory / "model.safetensors.index.json"
        if index.is_file():
            listed = json.loads(index.read_text(encoding="utf-8"))
            places = listed["weight_map"].items()
            listed["weight_map"] = {name: place for name, place in places if not name.endswith(_BUFFERS)}
            index.write_text(json.dumps(listed, indent=2) + "\n", encoding="utf-8")

    def logs(self, folder: Path) -> Path:
        """Return the file of its steps."""
        return folder / "training_metrics_0.jsonl"

    def line(self, logged: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return a line of metrics.jsonl for a logged step."""
        if "loss" not in logged:
            return None
        return {
            "step": int(logged["step"]),
            "epoch": logged["epoch"],
            "samples": int(logged["total_samples_accumulated"]),
            "loss": float(logged["loss"]),
            "lr": logged["lr"],
            "grad_norm": logged["grad_norm"],
            "tokens": int(logged["num_total_tokens"]),
            "loss_tokens": int(logged["num_loss_counted_tokens"]),
            "tokens_per_second": round(logged["tokens_per_second"], 1),
            "memory": round(logged["peak_memory_usage_GB"] * 1e9),
        }
