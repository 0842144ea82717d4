"""Backend `mlx`: mlx-lm's tuner on forge's rows; the adapter comes back as PEFT's."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, ClassVar

from forge._errors import SettingsError
from forge.backends._backend import Backend, Capabilities
from forge.backends._request import read_request
from forge.backends._trl import REFUSED as REFUSED_BY_TRL

if TYPE_CHECKING:
    from forge._result import RunResult

_APOLLO = ("apollo_rank", "apollo_update_interval", "apollo_scale")
_ONE = "it is one process"
_LOSS = "its loss is the mean cross-entropy of a step's learned tokens"
_STATES = "it saves no full states: a run that was stopped begins anew"
REFUSED: dict[str, str] = {
    **{name: why.replace("TRL", "mlx-lm") for name, why in REFUSED_BY_TRL.items()},
    **dict.fromkeys(("loss", "label_smoothing", "z_loss", "neftune_alpha", "normalize"), _LOSS),
    **dict.fromkeys(("optimizer", "momentum", "loraplus_lr_ratio", *_APOLLO), "it has AdamW with one rate"),
    **dict.fromkeys(
        ("init_lora_weights", "lora_fa", "modules_to_save"), "its LoRA layers begin as LoRA does, and both parts learn"
    ),
    **dict.fromkeys(("rank_pattern", "alpha_pattern"), "one rank and one scale are handed over"),
    **dict.fromkeys(("attention", "device"), "MLX computes on its own device, in its own way"),
    "adapter_path": "mlx-lm begins a LoRA of its own",
    "activation_checkpointing": "mlx-lm's is for whole models",
    **dict.fromkeys(("moe_aux_loss", "router_aux_loss_coef"), "mlx-lm adds none"),
    **dict.fromkeys(("nproc_per_node", "nnodes", "node_rank", "rdzv_id", "rdzv_endpoint", "master_addr", "master_port"), _ONE),
    **dict.fromkeys(("max_restarts", "connect_seconds"), _ONE),
    "on_nan": "mlx-lm has moved the weights when it tells the loss: such a run stops",
    **dict.fromkeys(("full_state_every_steps", "full_state_every_minutes"), _STATES),
}
"""Setting that mlx-lm cannot honour → why."""


class MLXBackend(Backend):
    """mlx-lm's tuner: SFT with LoRA, in one process, on Apple silicon."""

    name = "mlx"
    requires = ("mlx", "mlx_lm")
    # mlx by its package too: mlx-cpu and mlx-metal alone make a folder of that name, without what can be imported.
    versions: ClassVar[Mapping[str, str]] = {"mlx": ">=0.32", "mlx-lm": ">=0.32.2,<0.33"}
    install = "forge-llm[mlx]"
    refused = REFUSED

    def capabilities(self) -> Capabilities:
        """Return SFT with LoRA in one process."""
        return Capabilities(verbs=("sft",), adapters=("lora", "rslora"), strategies=("auto", "single"))

    def check(self, verb: str, s: Any) -> None:
        """Raise SettingsError for what mlx-lm does not have."""
        super().check(verb, s)
        if s.plan.num_epochs == "inf" and s.plan.max_steps is None and s.plan.max_tokens is None:
            raise SettingsError("num_epochs=inf is not available with backend=mlx, which needs a last step: set max_steps too.")

    def _check_installed(self) -> None:
        super()._check_installed()
        try:
            import mlx.core  # noqa: F401 - whether it can be
        except ImportError as error:
            raise SettingsError(
                f"backend=mlx: mlx {version('mlx')} is installed and cannot be loaded ({error}). What computes is a package of "
                f"its own: on Linux `pip install mlx-cpu=={version('mlx')}`, on a Mac mlx-metal of the same version."
            ) from error

    def execute_training(self, params: Mapping[str, object]) -> RunResult:
        """Run a training verb to its end."""
        from forge.backends._mlx_run import run

        return run(*read_request(self, params))
