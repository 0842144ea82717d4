"""No dead settings: each setting of `forge.sft` changes the plan, the run or its files, or is refused by name."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import forge
from forge.settings._settings import flat_fields, signature_of
from forge.verbs._sft import SFTSettings

from .conftest import CHATML, conversations, write_rows

pytestmark = pytest.mark.usefixtures("unchecked_exports")

BASE: dict[str, Any] = {
    "max_steps": 3,
    "effective_batch_size": 4,
    "max_tokens_per_gpu": 256,
    "learning_rate": 1e-2,
    "max_grad_norm": 1.0,
}
LORA = {"adapter": "lora", "lora_r": 4}
IA3 = {"adapter": "ia3", "target_modules": ("k_proj", "v_proj", "down_proj")}
FOURIERFT = {"adapter": "fourierft"}
OSFT = {"adapter": "osft"}
ADAPTIVE = {**OSFT, "osft_rank": "adaptive"}
HELD_OUT = {"validation_split": 0.25}

# For every setting: what is given beside it, and two values that must tell two runs apart; a default is a run that others have.
CASES: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "model_path": ({}, "MODEL", "OTHER MODEL"),
    "add_tokens": ({}, (), ("the ",)),
    "add_special_tokens": ({}, (), ("the ",)),
    "data_path": ({}, "DATA", "OTHER DATA"),
    "eval_data_path": ({}, "HELD OUT", "OTHER HELD OUT"),
    "validation_split": ({}, 0.25, 3),
    "max_seq_len": ({}, 40, 60),
    "data_format": ({"data_path": "TWO WAYS"}, "messages", "text"),
    "train_on": ({}, "assistant", "last"),
    "turns": ({"chat_template": "TEMPLATE", "lint": "off"}, "auto", "history"),
    "chat_template": ({}, None, "TEMPLATE"),
    "chat_template_kwargs": ({"chat_template": "TEMPLATE"}, None, {"mood": "glad"}),
    "system_prompt": ({}, None, "Answer in one word."),
    "turn_end": ({"chat_template": "OPEN TEMPLATE", "lint": "off"}, None, "<|endoftext|>"),
    "train_on_turn_end": ({}, "turn", "none"),
    "on_overflow": ({"max_seq_len": 40}, "drop", "truncate"),
    "preprocess": ({}, None, "forge_test_hooks:shout"),
    "rename_columns": ({"data_path": "TWO TALKS"}, {"talk": "messages"}, {"other": "messages"}),
    "on_bad_row": ({"data_path": "A BAD ROW"}, "error", "skip"),
    "max_samples": ({}, None, 12),
    "max_bad_rows": ({"data_path": "A BAD ROW", "on_bad_row": "skip"}, 0.005, 0.02),
    "lint": ({"data_path": "DOUBTFUL"}, "on", "off"),
    "effective_batch_size": ({}, 4, 5),
    "max_tokens_per_gpu": ({}, 100, 256),
    "num_epochs": ({"max_steps": None, "effective_batch_size": 12}, 1, 2),
    "max_steps": ({}, 2, 3),
    "max_tokens": ({"max_steps": None}, 100, 300),
    "seed": ({}, 42, 1),
    "shuffle": ({}, True, False),
    "learning_rate": ({}, 1e-2, 2e-2),
    "weight_decay": ({}, 0.0, 0.5),
    "beta1": ({}, 0.9, 0.5),
    "beta2": ({}, 0.95, 0.5),
    "eps": ({}, 1e-8, 1e-2),
    "max_grad_norm": ({}, 1.0, 0.1),
    "warmup_steps": ({}, 0, 2),
    "warmup_ratio": ({}, 0.0, 0.6),
    "lr_scheduler": ({}, "cosine", "constant"),
    "adapter": ({}, "none", "lora"),
    "lora_r": (LORA, 4, 2),
    "unfrozen_parameters": ({}, None, ("model.layers",)),
    "adapter_path": ({"adapter": "lora"}, "ADAPTER", "OTHER ADAPTER"),
    "lora_alpha": (LORA, 8.0, 32.0),
    "lora_dropout": (LORA, 0.0, 0.5),
    "init_lora_weights": (LORA, "default", "pissa"),
    "lora_fa": (LORA, False, True),
    "alpha_pattern": (LORA, None, ("q_proj=2",)),
    "loraplus_lr_ratio": (LORA, 1.0, 4.0),
    "target_modules": (LORA, None, ("q_proj",)),
    "modules_to_save": (LORA, None, ("embed_tokens",)),
    "quant_type": ({"adapter": "qlora"}, "nf4", "int8"),
    "double_quant": ({"adapter": "qlora"}, True, False),
    "feedforward_modules": (IA3, ("down_proj",), ("v_proj", "down_proj")),
    "num_virtual_tokens": ({"adapter": "prompt"}, 20, 4),
    "prefix_projection": ({"adapter": "prefix"}, False, True),
    "prompt_init_text": ({"adapter": "prompt"}, None, "the apple is red"),
    "adapter_layers": ({"adapter": "adapter_prompt"}, None, 1),
    "oft_block_size": ({"adapter": "oft"}, 4, 8),
    "vera_rank": ({"adapter": "vera"}, 8, 16),
    "fourier_n_frequency": (FOURIERFT, 20, 40),
    "fourier_scaling": ({**FOURIERFT, "fourier_n_frequency": 20}, 150.0, 300.0),
    "c3a_block_size": ({"adapter": "c3a"}, 4, 8),
    "unfreeze_rank_ratio": (OSFT, 0.25, 0.5),
    "osft_directions": ({**ADAPTIVE, "osft_calibration_path": "HELD OUT"}, "weights", "inputs"),
    "osft_rule": (OSFT, "strict", "paper"),
    "osft_form": (OSFT, "direct", "factors"),
    "osft_rank": (OSFT, "uniform", "adaptive"),
    "osft_calibration_path": (ADAPTIVE, None, "HELD OUT"),
    "rank_pattern": (OSFT, None, ("q_proj=1",)),
    "osft_train_rest": (OSFT, (), ("norms",)),
    "osft_svd": (OSFT, "exact", "randomized"),
    "osft_cache": (OSFT, None, "CACHE"),
    "dtype": ({}, "float32", "bfloat16"),
    "weights": ({"dtype": "bfloat16"}, "float32", "bfloat16"),
    "qat": ({}, None, "q4_0"),
    "attention": ({}, "auto", "eager"),
    "packing": ({}, "auto", "off"),
    "moe_aux_loss": ({"model_path": "MIXTURE"}, "global", "off"),
    "router_aux_loss_coef": ({"model_path": "MIXTURE"}, None, 0.5),
    "save_samples": ({}, 0, 4),
    "save_dtype": ({}, None, "bfloat16"),
    "checkpoint_at_epoch": ({"max_steps": None, "num_epochs": 2, "effective_batch_size": 12}, False, True),
    "loss": ({}, "nll", "dft"),
    "label_smoothing": ({}, 0.0, 0.2),
    "z_loss": ({}, 0.0, 1e-2),
    "neftune_alpha": ({}, 0.0, 5.0),
    "normalize": ({"max_tokens_per_gpu": 100}, "global", "trl"),
    "optimizer": ({}, "adamw", "adafactor"),
    "apollo_rank": ({"optimizer": "apollo"}, None, 2),
    "apollo_update_interval": ({"optimizer": "apollo"}, 200, 1),
    "apollo_scale": ({"optimizer": "apollo_mini"}, None, 1.0),
    "momentum": ({"optimizer": "muon"}, 0.95, 0.5),
    "min_lr_ratio": ({"lr_scheduler": "polynomial"}, 0.0, 0.5),
    "decay_steps": ({"lr_scheduler": "warmup_stable_decay"}, 1, 2),
    "power": ({"lr_scheduler": "polynomial"}, 1.0, 2.0),
    "num_cycles": ({"lr_scheduler": "cosine_with_restarts"}, 1, 2),
    "eval_every_steps": (HELD_OUT, 0, 0.5),
    "eval_at_epoch": ({**HELD_OUT, "max_steps": None, "num_epochs": 2, "effective_batch_size": 12}, False, True),
    "keep_best": (HELD_OUT, False, True),
    "metric_for_best": ({**HELD_OUT, "keep_best": True, "eval_every_steps": 1, "learning_rate": 1e-4}, "loss", "accuracy"),
    "early_stopping_patience": (
        {**HELD_OUT, "keep_best": True, "eval_every_steps": 1, "metric_for_best": "accuracy", "learning_rate": 1e-5},
        0,
        1,
    ),
    "kl_base": (HELD_OUT, False, True),
    "stop_at_kl": ({**HELD_OUT, "kl_base": True, "eval_every_steps": 1}, None, 1e-6),
    "eval_prompts": ({}, None, ("what colour has the fig?",)),
    "eval_max_new_tokens": ({"eval_prompts": ("what colour has the fig?",)}, 4, 8),
    "logging_steps": ({}, 1, 2),
    "full_state_every_steps": ({"keep_full_state": True}, 0, 1),
    "full_state_every_minutes": ({"keep_full_state": True}, 30.0, 1e-9),
    "accelerate_full_state_at_epoch": ({"max_steps": None, "num_epochs": 2, "effective_batch_size": 12}, True, False),
    "keep_last_n": ({"full_state_every_steps": 1, "keep_full_state": True}, 1, 2),
    "keep_full_state": ({}, False, True),
    "keep_last_checkpoint_only": ({"save_samples": 4}, False, True),
    "on_nan": ({"learning_rate": 1e6, "max_grad_norm": 0.0, "max_steps": 4}, "stop", "skip"),
}
REFUSED = {"device": "abacus"}
PLACES = {"ckpt_output_dir"}
# How many processes tokenise decides how long it takes and nothing else: the promise is that the traces are the same.
SPEEDS = {"num_proc": (1, 2), "async_save": (True, False), "activation_checkpointing": ("none", "selective", True)}
# What takes several processes, or a run that goes on, to be seen: where it is.
ELSEWHERE = {
    "checkpoint_storage": "tests/whole/test_checkpoint_storage.py",
    "backend": "tests/whole/test_backends.py",
    "compile": "tests/whole/test_compiled.py",
    "kernels": "tests/whole/test_compiled.py",
    "trackers": "tests/forge/trackers/test_watchers.py",
    "wandb_project": "tests/forge/trackers/test_watchers.py",
    "wandb_entity": "tests/forge/trackers/test_names.py",
    "wandb_run_name": "tests/forge/trackers/test_names.py",
    "mlflow_tracking_uri": "tests/forge/trackers/test_names.py",
    "mlflow_experiment_name": "tests/forge/trackers/test_built_in.py",
    "mlflow_run_name": "tests/forge/trackers/test_names.py",
    "tensorboard_log_dir": "tests/whole/test_watched.py",
    "strategy": "tests/whole/test_any_ranks.py",
    "shard_size": "tests/whole/test_any_ranks.py",
    "tp_size": "tests/whole/test_any_ranks.py",
    "cp_size": "tests/whole/test_any_ranks.py",
    "ep_size": "tests/whole/test_moe_aux_loss.py",
    "gather_dtype": "tests/forge-dist/strategies/test_torch.py",
    "reshard_after_forward": "tests/forge-dist/strategies/test_torch.py",
    "cpu_offload": "tests/forge-dist/strategies/test_choose.py",
    "activation_offloading": "tests/forge-dist/strategies/test_activation_checkpointing.py",
    "max_failed_saves": "tests/whole/test_full_disk.py",
    "emergency_dir": "tests/whole/test_full_disk.py",
    **dict.fromkeys(
        ("freeze_vision_tower", "freeze_multi_modal_projector", "freeze_language_model"), "tests/whole/test_trained_parts.py"
    ),
    "freeze_audio_tower": "tests/whole/test_audio.py",
    "resume": "tests/whole/test_resume.py",
    "quiet": "tests/whole/test_quiet.py",
    "nproc_per_node": "tests/whole/test_launched.py",
    "nnodes": "tests/forge-dist/environment/test_topology.py",
    "node_rank": "tests/forge-dist/environment/test_topology.py",
    "rdzv_id": "tests/forge-dist/environment/test_topology.py",
    "rdzv_endpoint": "tests/forge-dist/environment/test_topology.py",
    "master_addr": "tests/forge-dist/environment/test_topology.py",
    "master_port": "tests/forge-dist/environment/test_topology.py",
    "max_restarts": "tests/forge-dist/environment/test_topology.py",
    "connect_seconds": "tests/forge-dist/launching/test_rendezvous.py",
    "stall_timeout": "tests/whole/test_standing_still.py",
}


@pytest.fixture(scope="module")
def monkeypatch() -> Iterator[pytest.MonkeyPatch]:
    """A monkeypatch for the whole file."""
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def places(
    model_dir: Path, chats: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> dict[str, str]:
    """Two models and several data sets by name, and a module of hooks that can be imported."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig

    other = tmp_path_factory.mktemp("other")
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(1.5)
    model.save_pretrained(other / "model")
    AutoTokenizer.from_pretrained(model_dir).save_pretrained(other / "model")
    mixture = Qwen3MoeConfig(
        **{name: getattr(model.config, name) for name in ("vocab_size", "eos_token_id", "pad_token_id")},
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        head_dim=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
    )
    AutoModelForCausalLM.from_config(mixture).save_pretrained(other / "mixture")
    AutoTokenizer.from_pretrained(model_dir).save_pretrained(other / "mixture")
    rows = write_rows(other / "rows.jsonl", conversations(15))
    ambiguous = write_rows(other / "two_ways.jsonl", [{**row, "text": "an apple is red"} for row in conversations(15)])
    silent = [{"messages": [*row["messages"][:1], {"role": "assistant", "content": ""}]} for row in conversations(2)]
    doubtful = write_rows(other / "doubtful.jsonl", conversations(15) + silent)
    talks = [
        {"talk": one["messages"], "other": two["messages"]} for one, two in zip(*[iter(conversations(24))] * 2, strict=True)
    ]
    bad = write_rows(other / "bad.jsonl", [*conversations(12) * 9, {"words": "x"}])
    (other / "forge_test_hooks.py").write_text(
        "def shout(row):\n    return {'messages': [m | {'content': m['content'].upper()} for m in row['messages']]}\n"
    )
    first = "('- ' if loop.last and message['role'] == 'assistant' else '') + message['content']"
    late = "{{ mood }}" + CHATML.replace("message['content']", first)
    (other / "late.jinja").write_text(late)
    (other / "open.jinja").write_text(CHATML.replace("<|im_end|>", ""))
    monkeypatch.syspath_prepend(other)
    return {
        "MODEL": str(model_dir),
        "OTHER MODEL": str(other / "model"),
        "MIXTURE": str(other / "mixture"),
        "DATA": str(chats),
        "OTHER DATA": str(rows),
        "TEMPLATE": str(other / "late.jinja"),
        "OPEN TEMPLATE": str(other / "open.jinja"),
        "TWO WAYS": str(ambiguous),
        "DOUBTFUL": str(doubtful),
        "TWO TALKS": str(write_rows(other / "talks.jsonl", talks)),
        "A BAD ROW": str(bad),
        "HELD OUT": str(write_rows(other / "held_out.jsonl", conversations(40)[32:])),
        "CACHE": str(other / "cache"),
        "ADAPTER": str(write_adapter(other, "adapter", model_dir, chats)),
        "OTHER ADAPTER": str(write_adapter(other, "other_adapter", model_dir, rows)),
        "OTHER HELD OUT": str(write_rows(other / "other_held_out.jsonl", conversations(40)[24:32])),
    }


def write_adapter(folder: Path, name: str, model_dir: Path, rows: Path) -> Path:
    """An adapter that a run of one step exported."""
    given = {"model_path": model_dir, "data_path": rows, "ckpt_output_dir": folder / name, "max_steps": 1, "lora_r": 2}
    return forge.sft(adapter="lora", learning_rate=1e-2, **given).model_dir


def traces(run: Path) -> str:
    """What a run computed and wrote, without times, paths and config.yaml."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line.pop("tokens_per_second", None)
        line.pop("time")
        line.pop("memory", None)
    files = sorted(path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file())
    weights = {
        name: hashlib.sha256((run / name).read_bytes()).hexdigest()
        for name in files
        if name.endswith((".safetensors", ".bin", ".npz"))
    }
    asked = run / "answers.jsonl"
    answers = [json.loads(line)["answer"] for line in asked.read_text().splitlines()] if asked.exists() else []
    steps = [line for line in (run / "log.txt").read_text().splitlines() if re.search(r"step \d+/", line)]
    return json.dumps([lines, files, weights, len(steps), answers], sort_keys=True)


def run_with(options: dict[str, Any], places: dict[str, str], directory: Path) -> str:
    given = {"model_path": "MODEL", "data_path": "DATA", **BASE, **options}
    given = {name: places.get(value, value) if isinstance(value, str) else value for name, value in given.items()}
    forge.sft(ckpt_output_dir=directory, **given)
    return traces(directory)


def test_every_setting_has_a_case() -> None:
    """A setting that is added without a case here fails the suite."""
    names = {field.name for _, field in flat_fields(SFTSettings)}
    assert names == set(CASES) | set(REFUSED) | PLACES | set(SPEEDS) | set(ELSEWHERE)
    root = Path(__file__).parents[2]
    assert all(name in (root / file).read_text() for name, file in ELSEWHERE.items())
    assert not set(CASES) & set(REFUSED)


@pytest.mark.slow
def test_the_same_settings_leave_the_same_traces(
    places: dict[str, str], outcome: Callable[[dict[str, Any]], str], tmp_path: Path
) -> None:
    """Without this, any two runs would differ and the cases below would prove nothing."""
    assert run_with({}, places, tmp_path / "again") == outcome({})


@pytest.fixture(scope="module")
def outcome(places: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Callable[[dict[str, Any]], str]:
    """Settings → what their run left, or why it was refused."""

    def made(options: dict[str, Any]) -> str:
        try:
            return run_with(options, places, tmp_path_factory.mktemp("run") / "run")
        except (forge.DataLintError, forge.data.DataError, forge.algos.DivergedError, forge.dist.ExportError) as error:
            return f"refused: {type(error).__name__}"

    return once(SFTSettings, made, BASE | {"model_path": "MODEL", "data_path": "DATA"})


def once(settings_class: type, made: Callable[[dict[str, Any]], str], given: dict[str, Any]) -> Callable[[dict[str, Any]], str]:
    """Return what is made of settings, once for all that differ in no more than naming what is given or the default."""
    usual = {name: parameter.default for name, parameter in signature_of(settings_class).parameters.items()} | given
    found: dict[str, str] = {}

    def one(options: dict[str, Any]) -> str:
        key = repr(sorted((name, repr(value)) for name, value in options.items() if value != usual[name]))
        if key not in found:
            found[key] = made(options)
        return found[key]

    return one


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CASES))
def test_setting_takes_effect(name: str, outcome: Callable[[dict[str, Any]], str]) -> None:
    """Two values of one setting leave different traces."""
    beside, one, other = CASES[name]
    assert outcome({**beside, name: one}) != outcome({**beside, name: other})


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SPEEDS))
def test_speed_settings_change_nothing_else(name: str, outcome: Callable[[dict[str, Any]], str]) -> None:
    """A setting that is about speed leaves the same traces, whatever its value."""
    assert len({outcome({name: value}) for value in SPEEDS[name]}) == 1


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_setting_is_refused_by_name(name: str, places: dict[str, str], tmp_path: Path) -> None:
    """What this machine cannot do is refused, naming what was asked for."""
    with pytest.raises(Exception, match=REFUSED[name]) as caught:
        run_with({name: REFUSED[name]}, places, tmp_path / "run")
    assert caught.value.exit_status == 2
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_the_place_is_where_the_run_goes(places: dict[str, str], tmp_path: Path) -> None:
    """ckpt_output_dir is where everything of a run goes, and the only place."""
    run_with({}, places, tmp_path / "here")
    assert [entry.name for entry in tmp_path.iterdir()] == ["here"]
    assert (tmp_path / "here" / "config.yaml").exists()


@pytest.mark.parametrize(
    ("name", "value"), [("lora_r", 4), ("lora_alpha", 4.0), ("lora_dropout", 0.1), ("target_modules", ("q_proj",))]
)
def test_adapter_settings_without_an_adapter_are_refused(
    name: str, value: object, places: dict[str, str], tmp_path: Path
) -> None:
    """A LoRA setting beside adapter="none" would change nothing: refused by name."""
    with pytest.raises(forge.SettingsError, match=f"{name}=.* has no effect"):
        run_with({name: value}, places, tmp_path / "run")


def test_eval_every_steps_without_held_out_data_is_refused(places: dict[str, str], tmp_path: Path) -> None:
    """Measuring on nothing would change nothing: refused by name."""
    with pytest.raises(forge.SettingsError, match="eval_every_steps has no effect"):
        run_with({"eval_every_steps": 2}, places, tmp_path / "run")
