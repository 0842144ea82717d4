"""Settings → the arguments of instructlab-training and mini-trainer; what they do not have is refused by name."""

from __future__ import annotations

import importlib
import json
import sys
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import forge
from forge.backends import _instructlab, _mini_trainer
from forge.backends._instructlab import InstructLabBackend
from forge.backends._mini_trainer import MiniTrainerBackend
from forge.backends._own_loop import Follower, exports
from forge.run._prepare import Prepared
from forge.settings._settings import flat_fields, resolve
from forge.verbs._registry import task_of

BACKENDS: dict[str, Any] = {"mini-trainer": MiniTrainerBackend, "instructlab-training": InstructLabBackend}
# Groups that forge itself reads before the library's loop and around it.
FORGES = {"model", "data", "launch", "report", "tracking", "backend", "passed_on"}
_SHARED = {
    "effective_batch_size",
    "max_tokens_per_gpu",
    "num_epochs",
    "seed",
    "learning_rate",
    "warmup_steps",
    "warmup_ratio",
    "device",
    "strategy",
}
_SHARED |= {"adapter", "ckpt_output_dir", "save_samples", "checkpoint_at_epoch", "keep_last_checkpoint_only", "resume"}
TAKEN = {
    "mini-trainer": _SHARED
    | {"max_steps", "max_tokens", "lr_scheduler", "min_lr_ratio", "num_cycles", "dtype", "save_dtype"}
    | {"unfreeze_rank_ratio", "target_modules"},
    "instructlab-training": _SHARED | {"weight_decay", "beta1", "beta2", "eps"},
}
REFUSED = {"mini-trainer": _mini_trainer.REFUSED, "instructlab-training": _instructlab.REFUSED}


class Items:
    """As much of a run's items as arguments are made of."""

    longest = np.array([7, 40, 12])


def arguments(backend: str, verb: str = "sft", **more: Any) -> dict[str, Any]:
    """Arguments that a backend makes of settings, checked by the library's own class."""
    kind = BACKENDS[backend]
    classes = pytest.importorskip(kind.types, reason=f"{backend} is not installed here")
    given = {"model_path": "m", "data_path": "d", "ckpt_output_dir": "o", "backend": backend, "learning_rate": 0.5, **more}
    s = resolve(task_of(verb).settings, ("argument", {"max_tokens_per_gpu": 100, **given}))
    prepared: Any = Prepared(s, Items(), None, types.SimpleNamespace(num_steps=90, num_samples=360))  # ty: ignore
    found = kind().training_args(classes, prepared, "start", Path("/folder"))
    made = classes.TrainingArgs(**found)
    classes.TorchrunArgs(**kind().torchrun_args(s))
    for name, value in found.items():
        assert getattr(made, name) == value, name
    return found


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_library_that_passes_over_an_argument_is_refused(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A version whose class drops a name in silence, does not know it, or refuses its value: one error, by name."""
    kind = BACKENDS[backend]
    s = resolve(task_of("sft").settings, ("argument", {"model_path": "m", "data_path": "d", "ckpt_output_dir": "o"}))
    prepared: Any = Prepared(s, Items(), None, types.SimpleNamespace(num_steps=90, num_samples=360))  # ty: ignore
    library = types.SimpleNamespace(TorchrunArgs=dict)

    class Arguments:
        def __init__(self, *, batch_size: int, **_: object) -> None:
            self.batch_size = batch_size

    class Strict:
        def __init__(self, *, num_epochs: int) -> None: ...

    monkeypatch.setitem(sys.modules, "library", library)
    monkeypatch.setattr(kind, "types", "library")
    monkeypatch.setattr(kind, "training_args", lambda *_: {"batch_size": 4, "seed": 1})
    for made, message in (
        (Arguments, "the library that is installed has no seed, so that"),
        (Strict, f"backend={backend} does not take its arguments: .*unexpected keyword"),
    ):
        library.TrainingArgs = made
        with pytest.raises(forge.SettingsError, match=message):
            kind()._arguments(prepared, "start", Path("/folder"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_setting_is_taken_or_refused(backend: str) -> None:
    """No setting is silently without effect; those of an adapter that is not there are refused with the adapter."""
    for verb in BACKENDS[backend]().capabilities().verbs:
        for group, field in flat_fields(task_of(verb).settings):
            taken = field.name in TAKEN[backend] or group in FORGES - {"launch"} or field.name == "nproc_per_node"
            assert taken or field.name in REFUSED[backend] or group == "adapter", field.name
            assert not (field.name in TAKEN[backend] and field.name in REFUSED[backend]), field.name


@pytest.mark.parametrize(
    ("given", "theirs"),
    [
        ({}, {"batch_size": 32, "learning_rate": 0.5, "max_tokens_per_gpu": 100, "max_epochs": 1, "train_dtype": "float32"}),
        ({"num_epochs": 3}, {"max_epochs": 3}),
        ({"max_steps": 7}, {"max_steps": 7}),
        ({"max_tokens": 900}, {"max_tokens": 900}),
        ({"seed": 7, "warmup_steps": 2}, {"seed": 7, "num_warmup_steps": 2}),
        ({"warmup_ratio": 0.05}, {"num_warmup_steps": 5}),
        ({"lr_scheduler": "constant"}, {"lr_scheduler": "constant_with_warmup"}),
        (
            {"lr_scheduler": "cosine_with_min_lr", "min_lr_ratio": 0.1},
            {"lr_scheduler": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}},
        ),
        ({"lr_scheduler": "cosine_with_restarts", "num_cycles": 2}, {"lr_scheduler_kwargs": {"num_cycles": 2}}),
        ({"save_samples": 64, "save_dtype": "bfloat16"}, {"min_samples_per_checkpoint": 64, "save_dtype": "bfloat16"}),
        ({"save_samples": 0.25}, {"min_samples_per_checkpoint": 90}),
        ({"checkpoint_at_epoch": True, "use_liger_kernels": True}, {"checkpoint_at_epoch": True, "use_liger_kernels": True}),
        (
            {"adapter": "osft", "unfreeze_rank_ratio": 0.5, "target_modules": ("q_proj",), "osft_upcast_dtype": "bfloat16"},
            {
                "osft": True,
                "osft_unfreeze_rank_ratio": 0.5,
                "osft_target_patterns": ["q_proj"],
                "osft_upcast_dtype": "bfloat16",
            },
        ),
    ],
)
def test_mini_trainers_arguments(given: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Each setting is the argument that has its meaning; mini-trainer's own class holds it."""
    found = arguments("mini-trainer", **given)
    assert {name: found[name] for name in theirs} == theirs
    assert found["data_path"] == "/folder/data.jsonl"


def test_mini_trainer_is_told_which_limit_ends_it() -> None:
    """Epochs, steps or tokens."""
    modes = [arguments("mini-trainer", **each)["training_mode"].value for each in ({}, {"max_steps": 3}, {"max_tokens": 3})]
    assert modes == ["epoch", "step", "token"]


@pytest.mark.parametrize(
    ("given", "theirs"),
    [
        ({}, {"effective_batch_size": 32, "max_batch_len": 100, "max_seq_len": 40, "num_epochs": 1, "process_data": False}),
        (
            {"beta1": 0.8, "weight_decay": 0.1, "eps": 1e-6},
            {"adamw_betas": (0.8, 0.95), "adamw_weight_decay": 0.1, "adamw_eps": 1e-6},
        ),
        ({"seed": 7, "warmup_steps": 2, "num_epochs": 3}, {"random_seed": 7, "warmup_steps": 2, "num_epochs": 3}),
        ({}, {"checkpoint_at_epoch": True, "keep_last_checkpoint_only": True, "accelerate_full_state_at_epoch": False}),
        ({"save_samples": 64}, {"save_samples": 64, "keep_last_checkpoint_only": False}),
        ({"save_samples": 0.25}, {"save_samples": 90, "keep_last_checkpoint_only": False}),
        ({"checkpoint_at_epoch": True}, {"keep_last_checkpoint_only": False}),
        ({"checkpoint_at_epoch": True, "keep_last_checkpoint_only": True}, {"keep_last_checkpoint_only": True}),
        ({"disable_flash_attn": True}, {"disable_flash_attn": True}),
    ],
)
def test_instructlabs_arguments(given: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Each setting is the argument that has its meaning; instructlab-training's own class holds it."""
    found = arguments("instructlab-training", **given)
    assert {name: found[name] for name in theirs} == theirs


def test_instructlab_divides_as_it_is_told() -> None:
    """Its own settings become FSDPOptions."""
    options = arguments("instructlab-training", sharding_strategy="FULL_SHARD", cpu_offload_params=True)["fsdp_options"]
    assert (options.sharding_strategy.value, options.cpu_offload_params) == ("FULL_SHARD", True)


@pytest.mark.parametrize(
    ("backend", "verb", "given", "message"),
    [
        (
            "mini-trainer",
            "sft",
            {"weight_decay": 0.1},
            "weight_decay=0.1 has no effect with backend=mini-trainer: .*does not pass it on",
        ),
        ("mini-trainer", "sft", {"max_grad_norm": 0.5}, "max_grad_norm=0.5 has no effect .*it clips at 1"),
        ("mini-trainer", "sft", {"lr_scheduler": "polynomial"}, "lr_scheduler=polynomial is not available"),
        ("mini-trainer", "sft", {"num_epochs": 2, "max_steps": 3}, "num_epochs and max_steps: .*give one of them"),
        ("mini-trainer", "sft", {"num_epochs": "inf", "lr_scheduler": "constant"}, "ends by one number of epochs"),
        (
            "mini-trainer",
            "osft",
            {"unfreeze_rank_ratio": 1.0},
            "unfreeze_rank_ratio=1: mini-trainer does not train what it says",
        ),
        ("mini-trainer", "osft", {"osft_rule": "paper"}, "osft_rule=paper has no effect with backend=mini-trainer"),
        # The weights' directions are what it has.
        ("mini-trainer", "osft", {"osft_directions": "weights", "osft_rule": "paper"}, "^osft_rule=paper has no effect"),
        ("mini-trainer", "osft", {"osft_calibration_path": "rows.jsonl"}, "osft_calibration_path=rows.jsonl has no effect"),
        ("mini-trainer", "sft", {"osft_upcast_dtype": "bfloat16"}, "osft_upcast_dtype has no effect without OSFT"),
        (
            "mini-trainer",
            "sft",
            {"adapter": "lora"},
            "adapter=lora is not available with backend=mini-trainer; it has none, osft",
        ),
        ("mini-trainer", "dpo", {}, "backend=mini-trainer has no dpo; it has sft, osft"),
        (
            "instructlab-training",
            "sft",
            {"lr_scheduler": "linear"},
            "lr_scheduler=linear has no effect .*its schedule is a cosine",
        ),
        ("instructlab-training", "sft", {"max_steps": 3}, "max_steps=3 has no effect .*it ends after num_epochs"),
        ("instructlab-training", "sft", {"nnodes": 2, "node_rank": 0}, "nnodes=2 has no effect .*processes of one node"),
        ("instructlab-training", "sft", {"validation_split": 0.1}, "validation_split=0.1 has no effect"),
        ("instructlab-training", "osft", {}, "backend=instructlab-training has no osft; it has sft"),
    ],
)
def test_what_they_do_not_have_is_refused(backend: str, verb: str, given: dict[str, Any], message: str) -> None:
    """Before a model is looked for: the message names the setting, the backend and the reason."""
    with pytest.raises(forge.SettingsError, match=message):
        getattr(forge, verb)(model_path="m", data_path="d", ckpt_output_dir="o", backend=backend, **given)


RECORDED = (
    '{"step": 1, "epoch": 0, "steps_per_epoch": 6, "lr": 0.002, "grad_norm": 2.139199733734131, "loss": 5.909332752227783, '
    '"avg_loss_backward": 5.909332752227783, "num_samples": 4.0, "num_loss_counted_tokens": 45.0, '
    '"batch_num_loss_counted_tokens": 45, "num_total_tokens": 185.0, "grad_accum": 1, "avg_time_per_minibatch": 0.0623, '
    '"time_per_batch": 0.19560837745666504, "tokens_per_second": 945.7672641908437, "total_samples_accumulated": 4.0, '
    '"total_tokens_accumulated": 45, "samples_per_second": 20.449021928450676, "peak_memory_usage_GB": 0.5, "val_loss": null, '
    '"timestamp": "2026-11-23T14:31:48.987309"}'
)
"""Line that mini-trainer 0.9.0 wrote."""


def test_a_recorded_line_of_mini_trainer() -> None:
    """Its names become ours, in our units."""
    assert MiniTrainerBackend().line(json.loads(RECORDED)) == {
        "step": 1,
        "epoch": 0,
        "samples": 4,
        "loss": 5.909332752227783,
        "lr": 0.002,
        "grad_norm": 2.139199733734131,
        "tokens": 185,
        "loss_tokens": 45,
        "tokens_per_second": 945.8,
        "memory": 500_000_000,
    }
    assert MiniTrainerBackend().line({"val_loss": 3.0}) is None


class Out:
    """Run directory that keeps its lines."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def metrics(self, line: dict[str, Any]) -> None:
        """Keep a line."""
        self.lines.append(line)


def test_steps_are_recorded_while_they_are_written(tmp_path: Path) -> None:
    """A line counts once it is whole, however its writer flushes; a file that is not there yet is waited for."""
    out: Any = Out()
    file = tmp_path / "log.jsonl"
    with Follower(MiniTrainerBackend(), file, out) as follower:
        half = len(RECORDED) // 2
        file.write_text(RECORDED[:half])
        time.sleep(0.7)
        assert out.lines == []
        with file.open("a") as more:
            more.write(RECORDED[half:] + "\n")
    assert [line["step"] for line in out.lines] == [1]
    assert follower.last == out.lines[0]


def test_steps_are_recorded_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that writes each line in a task of its own writes two steps the other way round, at once or one look later."""
    out: Any = Out()
    file = tmp_path / "log.jsonl"
    follower = Follower(MiniTrainerBackend(), file, out)
    monkeypatch.setattr(MiniTrainerBackend, "line", lambda _self, logged: logged)

    def look(*steps: int) -> list[int]:
        with file.open("a") as more:
            more.writelines(json.dumps({"step": step}) + "\n" for step in steps)
        follower._record()
        return [line["step"] for line in out.lines]

    assert look(2, 1) == []
    assert look(4) == [1, 2]
    assert look(3, 5) == [1, 2, 3, 4]
    assert look() == [1, 2, 3, 4, 5]


def test_what_cannot_be_recorded_is_raised(tmp_path: Path) -> None:
    """A full disk, or a line that is none, ends the run with an error; a failure of the library itself comes first."""
    out: Any = Out()
    file = tmp_path / "log.jsonl"
    file.write_text("no JSON\n")
    with pytest.raises(json.JSONDecodeError), Follower(MiniTrainerBackend(), file, out):
        pass
    with pytest.raises(KeyError), Follower(MiniTrainerBackend(), file, out):
        raise KeyError


def test_exports_are_found_by_their_samples(tmp_path: Path) -> None:
    """mini-trainer writes a float into the name; instructlab-training's last has a name of its own; others are no exports."""
    for name in ("samples_16.0", "samples_8", "last_epoch", "samples_8.0_best_val_loss", "other"):
        (tmp_path / name).mkdir()
    assert sorted((count, path.name) for count, path in exports(tmp_path)) == [
        (8.0, "samples_8"),
        (16.0, "samples_16.0"),
        (float("inf"), "last_epoch"),
    ]


def test_the_modules_are_where_the_backends_say() -> None:
    """Both libraries' run_training is found under the name in the table."""
    for kind in BACKENDS.values():
        pytest.importorskip(kind.module, reason=f"{kind.name} is not installed here")
        assert callable(importlib.import_module(kind.module).run_training)
