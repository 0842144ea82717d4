"""Dataclasses of Kubeflow's KEP-2401 (adapters, FSDP, ZeRO) → settings of forge.

Names and defaults are the proposal's; QLoraConfig is its LoraConfig with `quantize_base`. What forge does not have is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from forge._errors import SettingsError

_ATTENTION = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "output_proj": "o_proj", "o_proj": "o_proj"}
"""Name of a layer in torchtune → in transformers."""
_MLP = ("gate_proj", "up_proj", "down_proj")


def _kind(*kinds: type) -> Any:
    """Check a field's type; True is no number."""

    def check(_: object, field: attrs.Attribute[Any], value: object) -> None:
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            wanted = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
            raise SettingsError(f"{field.name} must be {wanted}, not {value!r}.")

    return check


def _optional(*kinds: type) -> Any:
    return attrs.field(default=None, validator=_kind(type(None), *kinds))


def _field(kind: type, *, default: object) -> Any:
    return attrs.field(default=default, validator=_kind(kind))


@attrs.frozen(kw_only=True)
class LoraConfig:
    """Low-rank adapters, as TorchTune's recipes and KEP-2401 name their options."""

    apply_lora_to_mlp: bool | None = _optional(bool)
    """Adapt the feed-forward layers (gate_proj, up_proj, down_proj) too."""
    apply_lora_to_output: bool | None = _optional(bool)
    """Adapt the head too."""
    lora_attn_modules: Sequence[str] | None = attrs.field(default=None, validator=_kind(type(None), list, tuple))
    """Layers of the attention: q_proj, k_proj, v_proj, output_proj.

    All linear layers but the head where no field names any."""
    lora_rank: int | None = _optional(int)
    """Rank of the adapters."""
    lora_alpha: float | None = _optional(int, float)
    """Scale of the adapters."""
    lora_dropout: float | None = _optional(int, float)
    """Share of the adapters' inputs set to zero."""
    quantize_base: bool | None = _optional(bool)
    """Hold the base in 4 bits."""
    use_dora: bool | None = _optional(bool)
    """Give each adapted matrix a magnitude of its own."""

    def to_settings(self) -> dict[str, object]:
        """Return the settings of forge. Raises SettingsError for DoRA on 4 bits, unknown layers."""
        if self.quantize_base and self.use_dora:
            raise SettingsError("quantize_base and use_dora together: forge has DoRA beside a base of plain floats only.")
        found: dict[str, object] = {"adapter": "qlora" if self.quantize_base else "dora" if self.use_dora else "lora"}
        given = {"lora_r": self.lora_rank, "lora_alpha": self.lora_alpha, "lora_dropout": self.lora_dropout}
        found |= {name: value for name, value in given.items() if value is not None}
        if targets := self._targets():
            found["target_modules"] = targets
        return found

    def _targets(self) -> list[str]:
        """Return the layers by their names in transformers; none where no field names any."""
        named = list(self.lora_attn_modules or ())
        unknown = [name for name in named if name not in _ATTENTION]
        if unknown:
            raise SettingsError(f"lora_attn_modules holds {unknown[0]!r}; layers of the attention are {', '.join(_ATTENTION)}.")
        attention = [_ATTENTION[name] for name in named]
        if not (attention or self.apply_lora_to_output or self.apply_lora_to_mlp is not None):
            return []
        return [
            *(attention or ["attention"]),
            *(_MLP if self.apply_lora_to_mlp else ()),
            *(["lm_head"] if self.apply_lora_to_output else ()),
        ]


@attrs.frozen(kw_only=True)
class QLoraConfig(LoraConfig):
    """Low-rank adapters beside a base in 4 bits."""

    quantize_base: bool = _field(bool, default=True)
    """Always true."""

    def to_settings(self) -> dict[str, object]:
        """Return the settings of forge."""
        if not self.quantize_base:
            raise SettingsError("QLoraConfig is a base in 4 bits: use LoraConfig for another one.")
        return super().to_settings()


@attrs.frozen(kw_only=True)
class AdapterConfig:
    """Virtual tokens, gated beside the attention of the uppermost layers (arXiv 2303.16199)."""

    adapter_len: int = _field(int, default=10)
    """Number of virtual tokens."""
    adapter_layers: int = _field(int, default=30)
    """Number of the uppermost layers."""

    def to_settings(self) -> dict[str, object]:
        """Return the settings of forge."""
        return {"adapter": "adapter_prompt", "num_virtual_tokens": self.adapter_len, "adapter_layers": self.adapter_layers}


@attrs.frozen(kw_only=True)
class PrefixConfig:
    """Prefix tuning: virtual tokens before each layer (arXiv 2101.00190)."""

    num_virtual_tokens: int = _field(int, default=30)
    """Number of virtual tokens."""

    def to_settings(self) -> dict[str, object]:
        """Return the settings of forge."""
        return {"adapter": "prefix", "num_virtual_tokens": self.num_virtual_tokens}


def _check_precision(config: Any) -> None:
    """Raise SettingsError for what forge's dtypes and states are not."""
    if config.use_fp16:
        raise SettingsError(
            "use_fp16: forge computes in bfloat16 or float32, for float16 needs its losses scaled. Leave it out."
        )
    if config.checkpoint_type != "SHARDED_STATE_DICT":
        raise SettingsError(
            f"checkpoint_type={config.checkpoint_type!r}: full states are sharded, and load on any number of ranks; exports "
            "are whole. Leave it out."
        )


def _state_field() -> Any:
    return _field(str, default="SHARDED_STATE_DICT")


@attrs.frozen(kw_only=True)
class FsdpConfig:
    """PyTorch's sharded data parallelism."""

    mixed_precision: bool = _field(bool, default=True)
    """Compute in bfloat16, with weights and sums of gradients in float32; else all in float32."""
    use_fp16: bool = _field(bool, default=False)
    """Compute in float16 instead; refused."""
    fsdp_cpu_offload: bool = _field(bool, default=False)
    """Keep weights and the optimizer's state in the host's memory."""
    sharding_strategy: str = _field(str, default="FULL_SHARD")
    """FULL_SHARD, SHARD_GRAD_OP, HYBRID_SHARD or NO_SHARD."""
    hsdp: bool = _field(bool, default=False)
    """Shard within groups of ranks, and copy between them."""
    sharding_group_size: int = _field(int, default=0)
    """Ranks of a group, with hsdp; 0 takes those of a node."""
    replica_group_size: int = _field(int, default=0)
    """Number of groups, which follows from the ranks; only 0 is taken."""
    checkpoint_type: str = _state_field()
    """How states are saved; only SHARDED_STATE_DICT is taken."""
    fsdp_activation_checkpointing: bool = _field(bool, default=True)
    """Recompute activations in the backward pass."""

    def to_settings(self) -> dict[str, object]:
        """Return the settings of forge. Raises SettingsError for what has no counterpart."""
        _check_precision(self)
        ways: dict[str, dict[str, object]] = {
            "FULL_SHARD": {"strategy": "fsdp2"},
            "SHARD_GRAD_OP": {"strategy": "fsdp2", "reshard_after_forward": "never"},
            "HYBRID_SHARD": {"strategy": "hsdp"},
            "NO_SHARD": {"strategy": "ddp"},
        }
        if self.sharding_strategy not in ways:
            raise SettingsError(f"sharding_strategy must be one of {', '.join(ways)}, not {self.sharding_strategy!r}.")
        found = dict(ways[self.sharding_strategy])
        if self.hsdp:
            if found["strategy"] == "ddp":
                raise SettingsError("hsdp with sharding_strategy='NO_SHARD': nothing would be sharded. Set one of them.")
            found["strategy"] = "hsdp"
        if self.replica_group_size:
            raise SettingsError("replica_group_size follows from the ranks and sharding_group_size: leave it out.")
        if self.sharding_group_size:
            if found["strategy"] != "hsdp":
                raise SettingsError("sharding_group_size has no effect without hsdp: set that, or leave it out.")
            found["shard_size"] = self.sharding_group_size
        if self.fsdp_cpu_offload:
            if found["strategy"] == "ddp":
                raise SettingsError("fsdp_cpu_offload has no effect with sharding_strategy='NO_SHARD': leave it out.")
            found["cpu_offload"] = True
        if self.fsdp_activation_checkpointing:
            found["activation_checkpointing"] = True
        return {**found, "dtype": "bfloat16" if self.mixed_precision else "float32"}


@attrs.frozen(kw_only=True)
class ZeroConfig:
    """DeepSpeed's ZeRO."""

    stage: int = _field(int, default=0)
    """0 copies all; 1 to 3 shard the optimizer's state, gradients too, weights too."""
    zero_cpu_offload: bool = _field(bool, default=False)
    """Keep weights and the optimizer's state in the host's memory."""
    checkpoint_type: str = _state_field()
    """How states are saved; only SHARDED_STATE_DICT is taken."""
    mixed_precision: bool = _field(bool, default=True)
    """Compute in bfloat16, with weights and sums of gradients in float32; else all in float32."""
    use_fp16: bool = _field(bool, default=False)
    """Compute in float16 instead; refused."""

    def to_settings(self) -> dict[str, object]:
        """Return the settings of forge. Raises SettingsError for what has no counterpart."""
        _check_precision(self)
        if self.stage not in range(4):
            raise SettingsError(f"stage must be 0, 1, 2 or 3, not {self.stage!r}.")
        if self.zero_cpu_offload and not self.stage:
            raise SettingsError("zero_cpu_offload has no effect with stage=0: leave it out, or set a stage.")
        found: dict[str, object] = {"strategy": f"zero{self.stage}" if self.stage else "ddp"}
        if self.zero_cpu_offload:
            found["cpu_offload"] = True
        return {**found, "dtype": "bfloat16" if self.mixed_precision else "float32"}
