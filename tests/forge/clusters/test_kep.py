"""The dataclasses of KEP-2401: each field has an effect on a setting, or is refused by name."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from forge._errors import SettingsError
from forge.clusters import AdapterConfig, ForgeConfig, FsdpConfig, LoraConfig, PrefixConfig, QLoraConfig, ZeroConfig
from forge.settings._settings import resolve
from forge.verbs._registry import task_of

FSDP = {"strategy": "fsdp2", "activation_checkpointing": True, "dtype": "bfloat16"}
GIVEN = {"model_path": "m", "data_path": "d", "ckpt_output_dir": "c"}
TAKEN: list[tuple[Any, dict[str, object]]] = [
    (LoraConfig(), {"adapter": "lora"}),
    (
        LoraConfig(lora_rank=8, lora_alpha=16, lora_dropout=0.1),
        {"adapter": "lora", "lora_r": 8, "lora_alpha": 16, "lora_dropout": 0.1},
    ),
    (LoraConfig(use_dora=True), {"adapter": "dora"}),
    (LoraConfig(quantize_base=True), {"adapter": "qlora"}),
    (QLoraConfig(lora_rank=4), {"adapter": "qlora", "lora_r": 4}),
    (
        LoraConfig(lora_attn_modules=["q_proj", "output_proj"], apply_lora_to_mlp=True, apply_lora_to_output=True),
        {"adapter": "lora", "target_modules": ["q_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]},
    ),
    (LoraConfig(apply_lora_to_mlp=False), {"adapter": "lora", "target_modules": ["attention"]}),
    (AdapterConfig(), {"adapter": "adapter_prompt", "num_virtual_tokens": 10, "adapter_layers": 30}),
    (PrefixConfig(num_virtual_tokens=7), {"adapter": "prefix", "num_virtual_tokens": 7}),
    (FsdpConfig(), FSDP),
    (FsdpConfig(sharding_strategy="SHARD_GRAD_OP"), {**FSDP, "reshard_after_forward": "never"}),
    (FsdpConfig(sharding_strategy="HYBRID_SHARD", sharding_group_size=4), {**FSDP, "strategy": "hsdp", "shard_size": 4}),
    (FsdpConfig(hsdp=True), {**FSDP, "strategy": "hsdp"}),
    (FsdpConfig(sharding_strategy="NO_SHARD"), {**FSDP, "strategy": "ddp"}),
    (
        FsdpConfig(fsdp_cpu_offload=True, mixed_precision=False, fsdp_activation_checkpointing=False),
        {"strategy": "fsdp2", "cpu_offload": True, "dtype": "float32"},
    ),
    (ZeroConfig(), {"strategy": "ddp", "dtype": "bfloat16"}),
    (ZeroConfig(stage=2, zero_cpu_offload=True), {"strategy": "zero2", "cpu_offload": True, "dtype": "bfloat16"}),
    (ZeroConfig(stage=3, mixed_precision=False), {"strategy": "zero3", "dtype": "float32"}),
]


@pytest.mark.parametrize(("config", "settings"), TAKEN, ids=[repr(config) for config, _ in TAKEN])
def test_fields_become_settings(config: Any, settings: dict[str, object]) -> None:
    """What a dataclass says is a setting that forge takes."""
    assert config.to_settings() == settings
    resolve(task_of("sft").settings, ("argument", {**GIVEN, **settings}))


@pytest.mark.parametrize(
    ("kind", "fields", "named"),
    [
        (LoraConfig, {"quantize_base": True, "use_dora": True}, "quantize_base and use_dora"),
        (LoraConfig, {"lora_attn_modules": ["query"]}, "'query'"),
        (LoraConfig, {"lora_rank": True}, "lora_rank must be"),
        (LoraConfig, {"lora_rank": "8"}, "lora_rank must be"),
        (QLoraConfig, {"quantize_base": False}, "use LoraConfig"),
        (FsdpConfig, {"use_fp16": True}, "use_fp16"),
        (FsdpConfig, {"checkpoint_type": "FULL_STATE_DICT"}, "checkpoint_type='FULL_STATE_DICT'"),
        (FsdpConfig, {"sharding_strategy": "full"}, "sharding_strategy must be one of FULL_SHARD"),
        (FsdpConfig, {"sharding_group_size": 2}, "no effect without hsdp"),
        (FsdpConfig, {"hsdp": True, "replica_group_size": 2}, "replica_group_size"),
        (FsdpConfig, {"hsdp": True, "sharding_strategy": "NO_SHARD"}, "nothing would be sharded"),
        (FsdpConfig, {"sharding_strategy": "NO_SHARD", "fsdp_cpu_offload": True}, "fsdp_cpu_offload has no effect"),
        (ZeroConfig, {"stage": 4}, "stage must be"),
        (ZeroConfig, {"use_fp16": True}, "use_fp16"),
        (ZeroConfig, {"zero_cpu_offload": True}, "zero_cpu_offload has no effect"),
        (ZeroConfig, {"checkpoint_type": "x"}, "checkpoint_type"),
    ],
)
def test_what_forge_does_not_have_is_refused(kind: Any, fields: dict[str, object], named: str) -> None:
    """By the field's name, with what to do."""
    with pytest.raises(SettingsError, match=named):
        kind(**fields).to_settings()


def test_each_field_is_in_one_of_the_tables() -> None:
    """No field of a dataclass is dropped silently: changing it changes the settings, or is refused."""
    for kind in (LoraConfig, AdapterConfig, PrefixConfig, FsdpConfig, ZeroConfig):
        default = kind().to_settings()
        for field in attrs.fields(kind):
            other: Any = {"bool": not field.default, "bool | None": True}.get(str(field.type))
            if other is None:
                other = {"int": 3, "int | None": 3, "float | None": 0.5, "str": "NO_SHARD"}.get(str(field.type), ["q_proj"])
            assert outcome(kind, field.name, other) != default, field.name


def outcome(kind: Any, name: str, value: object) -> object:
    """The settings with one field changed, or the refusal, which names it."""
    try:
        return kind(**{name: value}).to_settings()
    except SettingsError as error:
        return name if name in str(error) else kind().to_settings()


def test_a_configuration_takes_both() -> None:
    """peft_config and sharding_config beside settings; what two of them say differently is refused."""
    config = ForgeConfig(settings={"lora_r": 8}, peft_config=LoraConfig(lora_rank=8), sharding_config=ZeroConfig(stage=1))
    assert config.to_args() == ["--adapter=lora", "--lora-r=8", "--strategy=zero1", "--dtype=bfloat16"]
    with pytest.raises(SettingsError, match="peft_config sets lora_r=8"):
        ForgeConfig(settings={"lora_r": 4}, peft_config=LoraConfig(lora_rank=8)).to_args()
