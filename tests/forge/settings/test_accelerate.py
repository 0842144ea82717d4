"""Accelerate's file and environment: each key has its effect, is always so, or is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

import forge
from forge.settings._accelerate import from_environment, read_file, translated, with_accelerate

FSDP = {"distributed_type": "FSDP"}
ZERO = {"distributed_type": "DEEPSPEED"}
LAUNCHED = {"ACCELERATE_DYNAMO_USE_FULLGRAPH": "False", "ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "NO"}


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests are not started by a launcher."""
    for name in (*LAUNCHED, "RANK", "ACCELERATE_CONFIG_DS_FIELDS"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        ({"distributed_type": "NO"}, {}),
        ({"distributed_type": False}, {}),  # a bare NO
        ({"mixed_precision": "bf16"}, {"dtype": "bfloat16"}),
        ({"mixed_precision": "no"}, {"dtype": "float32"}),
        ({"mixed_precision": False}, {"dtype": "float32"}),
        ({"use_cpu": True, "gpu_ids": "all", "debug": False, "main_training_function": "main"}, {"device": "cpu"}),
        ({"distributed_type": "MULTI_GPU", "num_processes": 8, "num_machines": 1}, {"nproc_per_node": 8}),
        (
            {"num_processes": 8, "num_machines": 2, "machine_rank": 1, "main_process_ip": "a", "main_process_port": 5},
            {"nproc_per_node": 4, "nnodes": 2, "node_rank": 1, "master_addr": "a", "master_port": 5},
        ),
        (FSDP, {"strategy": "fsdp2"}),
        (
            {**FSDP, "fsdp_config": {"fsdp_version": 2, "fsdp_offload_params": True, "fsdp_activation_checkpointing": True}},
            {"strategy": "fsdp2", "cpu_offload": True, "activation_checkpointing": True},
        ),
        (
            {
                **FSDP,
                "fsdp_config": {"fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer", "fsdp_forward_prefetch": True},
            },
            {"strategy": "fsdp2"},
        ),
        ({**FSDP, "fsdp_config": {"reshard_after_forward": False}}, {"strategy": "fsdp2", "reshard_after_forward": "never"}),
        ({**FSDP, "fsdp_config": {"fsdp_sharding_strategy": "NO_SHARD"}}, {"strategy": "ddp"}),
        (
            {**FSDP, "fsdp_config": {"fsdp_reshard_after_forward": "HYBRID_SHARD_ZERO2"}},
            {"strategy": "hsdp", "reshard_after_forward": "never"},
        ),
        (ZERO, {"strategy": "zero2"}),
        ({**ZERO, "deepspeed_config": {"zero_stage": 0}}, {"strategy": "ddp"}),
        (
            {
                **ZERO,
                "deepspeed_config": {
                    "zero_stage": 3,
                    "offload_optimizer_device": "cpu",
                    "offload_param_device": "cpu",
                    "gradient_clipping": 0.5,
                    "gradient_accumulation_steps": 1,
                    "zero3_init_flag": True,
                },
            },
            {"strategy": "zero3", "cpu_offload": True, "max_grad_norm": 0.5},
        ),
        (
            {"parallelism_config": {"parallelism_config_dp_replicate_size": 2, "parallelism_config_dp_shard_size": 4}},
            {"strategy": "hsdp", "shard_size": 4},
        ),
        ({"parallelism_config": {"dp_shard_size": 4, "tp_size": 1}}, {"strategy": "fsdp2"}),
        ({"parallelism_config": {"dp_shard_size": 4, "cp_size": 2}}, {"strategy": "fsdp2", "cp_size": 2}),
        ({"parallelism_config": {"tp_size": 2}}, {"tp_size": 2}),
        (
            {"parallelism_config": {"dp_replicate_size": 2, "dp_shard_size": 2, "cp_size": 4, "cp_backend": "torch"}},
            {"strategy": "hsdp", "shard_size": 8, "cp_size": 4},
        ),
        ({"dynamo_config": {"dynamo_backend": "NO"}, "fp8_config": {}, "tpu_env": []}, {}),
    ],
)
def test_keys_that_have_an_effect(config: dict[str, Any], settings: dict[str, Any]) -> None:
    """Each becomes the settings of the same meaning."""
    assert translated({"distributed_type": "NO", **config}, "a.yaml") == settings


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"mixed_precision": "fp16"}, "a.yaml: mixed_precision: fp16: dtype is float32"),
        ({"mixed_precision": "fp8"}, "mixed_precision: fp8"),
        ({"distributed_type": "MEGATRON_LM"}, "distributed_type: MEGATRON_LM: forge has"),
        ({"distributed_type": "XLA"}, "distributed_type: XLA: forge has"),
        ({"compute_environment": "AMAZON_SAGEMAKER"}, "compute_environment: AMAZON_SAGEMAKER: here it is LOCAL_MACHINE"),
        ({"num_processes": -1}, "num_processes: -1: a number of processes from 1"),
        ({"num_processes": 3, "num_machines": 2}, "cannot be divided over num_machines 2"),
        ({"num_processes": "many"}, "num_processes: many"),
        ({"num_machines": 0}, "num_machines: 0"),
        ({"num_processes": True}, "num_processes: True"),
        ({**ZERO, "deepspeed_config": {"zero_stage": True}}, "zero_stage: True"),
        ({**ZERO, "deepspeed_config": {"gradient_clipping": True}}, "gradient_clipping: True: a number"),
        ({**FSDP, "fsdp_config": {3: 4}}, "fsdp_3: 4: forge knows no such key"),
        ({"parallelism_config": {"dp_shard_size": -1}}, "dp_shard_size: -1: a whole number"),
        ({"gpu_ids": "0,1"}, "gpu_ids: 0,1: choose devices"),
        ({"debug": True}, "debug: True: forge always checks"),
        ({"dynamo_config": {"dynamo_backend": "INDUCTOR"}}, "dynamo_config: .*give compile=blocks"),
        ({"mpirun_config": {"mpirun_hostfile": "h"}}, "mpirun_config"),
        ({"fsdp_config": {"fsdp_version": 2}}, "fsdp_config: ...: it has no effect with distributed_type NO"),
        ({**ZERO, "fsdp_config": {"fsdp_version": 2}}, "no effect with distributed_type DEEPSPEED"),
        ({**FSDP, "fsdp_config": {"auto_wrap_policy": "SIZE_BASED_WRAP"}}, "fsdp_auto_wrap_policy: SIZE_BASED_WRAP"),
        ({**FSDP, "fsdp_config": {"fsdp_transformer_layer_cls_to_wrap": "Layer"}}, "fsdp_transformer_layer_cls_to_wrap"),
        ({**FSDP, "fsdp_config": {"fsdp_sharding_strategy": "HALF"}}, "one of FULL_SHARD"),
        ({**FSDP, "fsdp_config": {"fsdp_colour": "red"}}, "fsdp_colour: red: forge knows no such key"),
        ({**FSDP, "fsdp_config": "yes"}, "fsdp_config: yes: keys with values are wanted"),
        ({**FSDP, "fsdp_config": {"fsdp_version": [2]}}, "a single value is wanted"),
        ({**ZERO, "deepspeed_config": {"zero_stage": 4}}, "zero_stage: 4: a stage from 0 to 3"),
        ({**ZERO, "deepspeed_config": {"offload_param_device": "nvme"}}, "nothing is offloaded to disk"),
        ({**ZERO, "deepspeed_config": {"zero_stage": 3, "offload_param_device": "cpu"}}, "set both devices to cpu"),
        ({**ZERO, "deepspeed_config": {"gradient_accumulation_steps": 4}}, "gradient_accumulation_steps: 4: here it is 1"),
        ({**ZERO, "deepspeed_config": {"deepspeed_config_file": "ds.json"}}, "deepspeed_config_file: ds.json"),
        ({"parallelism_config": {"sp_size": 2}}, "parallelism_config_sp_size: 2: rows are divided by cp_size"),
        ({"parallelism_config": {"tp_size": 0}}, "a whole number is wanted"),
        ({"parallelism_config": {"dp_shard_size": "all"}}, "a whole number is wanted"),
        ({"parallelism_config": {"cp_size": True}}, "cp_size: True: a whole number is wanted"),
        ({"colour": None}, "colour: None: forge knows no such key"),
        ({"gpu_ids": 0}, "gpu_ids: 0: choose devices"),
        ({"num_processes": True}, "num_processes: True: a number of processes"),
        ({"num_machines": True}, "num_machines: True: a number of machines"),
        ({"machine_rank": 3}, "machine_rank: 3: machines are numbered from 0, and num_machines is 1"),
        ({"use_cpu": "no"}, "use_cpu: no: true or false is wanted"),
        ({**FSDP, "fsdp_config": {"fsdp_offload_params": "false"}}, "fsdp_offload_params: false: true or false is wanted"),
        ({**ZERO, "deepspeed_config": {"zero_stage": True}}, "zero_stage: True: a stage from 0 to 3"),
        ({**ZERO, "deepspeed_config": {"gradient_clipping": True}}, "gradient_clipping: True: a number is wanted"),
    ],
)
def test_keys_that_are_refused(config: dict[str, Any], named: str) -> None:
    """With the file, the key, the value and the reason."""
    with pytest.raises(forge.SettingsError, match=named):
        translated({"distributed_type": "NO", **config}, "a.yaml")


def test_what_is_given_otherwise_wins(tmp_path: Path) -> None:
    """File and launcher are below recipe and arguments, also where a key could not be had."""
    file = tmp_path / "a.yaml"
    file.write_text(yaml.safe_dump({**FSDP, "mixed_precision": "fp16", "num_processes": 2}))
    layers = with_accelerate(file, ("recipe r", {"strategy": "ddp"}), ("argument", {"dtype": "bfloat16"}))
    assert [origin for origin, _ in layers] == [f"accelerate {file}", "recipe r", "argument"]
    assert layers[0][1] == {"nproc_per_node": 2}
    with pytest.raises(forge.SettingsError, match="mixed_precision: fp16"):
        with_accelerate(file)


def test_a_worker_takes_only_what_can_be_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a launcher the addresses are known, and only the number of processes is held against it."""
    file = tmp_path / "a.yaml"
    config = {"num_processes": 4, "num_machines": 2, "machine_rank": 1, "main_process_ip": "a", "main_process_port": 5}
    file.write_text(yaml.safe_dump({"distributed_type": "MULTI_GPU", **config}))
    monkeypatch.setenv("RANK", "3")
    assert with_accelerate(file)[0][1] == {"nproc_per_node": 2, "nnodes": 2}


@pytest.mark.parametrize("text", ["", "a: [", "- 1", "model_path: x", "\x00"])
def test_what_is_no_configuration(text: str, tmp_path: Path) -> None:
    """One error that names the file."""
    file = tmp_path / "a.yaml"
    file.write_text(text)
    with pytest.raises(forge.RecipeError, match=r"a\.yaml(:1:5)?: (cannot be read|is no configuration)"):
        read_file(file)
    with pytest.raises(forge.RecipeError, match="cannot be read: No such file"):
        read_file(tmp_path / "b.yaml")
    with pytest.raises(forge.SettingsError, match="accelerate_config must be the path"):
        with_accelerate({"a": 1})


def test_the_environment_of_a_launcher() -> None:
    """Only accelerate launch is believed: transformers sets the precision too, in any process that trains."""
    assert from_environment({"ACCELERATE_MIXED_PRECISION": "bf16"}) == {}
    assert from_environment(LAUNCHED) == {}
    found = from_environment({**LAUNCHED, "ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_USE_CPU": "True"})
    assert translated(found, "accelerate launch") == {"dtype": "bfloat16", "device": "cpu"}
    for name, value in (
        ("ACCELERATE_DEBUG_MODE", "true"),
        ("ACCELERATE_CPU_AFFINITY", "1"),
        ("ACCELERATE_DYNAMO_BACKEND", "EAGER"),
    ):
        with pytest.raises(forge.SettingsError, match="accelerate launch: "):
            translated(from_environment({**LAUNCHED, name: value}), "accelerate launch")
