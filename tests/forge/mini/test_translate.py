"""mini-trainer's arguments: each has an effect, is always so, or is refused by name."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

import forge
from forge.mini import PretrainingConfig, TorchrunArgs, TrainingArgs, TrainingMode, run_training
from forge.mini._command import main
from forge.mini._translate import translate
from forge.settings._settings import resolve
from forge.verbs._registry import task_of

REQUIRED: dict[str, Any] = {
    "model_name_or_path": "org/model",
    "data_path": "rows.jsonl",
    "batch_size": 8,
    "max_tokens_per_gpu": 1000,
    "learning_rate": 1e-4,
    "output_dir": "out",
}
HELD_OUT = {"validation_split": 0.1}
OSFT = {"osft": True, "osft_unfreeze_rank_ratio": 0.25}


def made(**given: Any) -> tuple[str, dict[str, Any]]:
    """The verb and the settings of a training on one process."""
    return translate(TorchrunArgs(), TrainingArgs(**REQUIRED, **given))


# Argument: what is given beside it, a value, and what must be among the settings.
EFFECTS: dict[str, tuple[dict[str, Any], Any, dict[str, Any]]] = {
    "num_warmup_steps": ({}, 5, {"warmup_steps": 5}),
    "lr_scheduler": ({}, "constant_with_warmup", {"lr_scheduler": "constant"}),
    "lr_scheduler_kwargs": ({"lr_scheduler": "cosine_with_min_lr"}, {"min_lr": 1e-5}, {"min_lr_ratio": pytest.approx(0.1)}),
    "seed": ({}, 7, {"seed": 7}),
    "beta1": ({}, 0.8, {"beta1": 0.8}),
    "beta2": ({}, 0.9, {"beta2": 0.9}),
    "eps": ({}, 1e-6, {"eps": 1e-6}),
    "weight_decay": ({}, 0.1, {"weight_decay": 0.1}),
    "osft": ({"osft_unfreeze_rank_ratio": 0.5}, True, {"osft_form": "factors"}),
    "osft_unfreeze_rank_ratio": ({"osft": True}, 0.5, {"unfreeze_rank_ratio": 0.5}),
    "osft_target_patterns": (OSFT, ["q_proj", "k_proj"], {"target_modules": ["q_proj", "k_proj"]}),
    "min_samples_per_checkpoint": ({}, 100, {"save_samples": 100}),
    "training_mode": ({"max_steps": 3}, "step", {"max_steps": 3}),
    "max_epochs": ({}, 3, {"num_epochs": 3}),
    "max_steps": ({"training_mode": TrainingMode.STEP}, 4, {"max_steps": 4}),
    "max_tokens": ({"training_mode": TrainingMode.TOKEN}, 4, {"max_tokens": 4}),
    "checkpoint_at_epoch": ({}, True, {"checkpoint_at_epoch": True}),
    "save_dtype": ({}, "torch.bfloat16", {"save_dtype": "bfloat16"}),
    "wandb_project": ({}, "p", {"wandb_project": "p", "trackers": ("wandb",)}),
    "wandb_run_name": ({"wandb_project": "p"}, "r", {"wandb_run_name": "r"}),
    "wandb_entity": ({"wandb_project": "p"}, "e", {"wandb_entity": "e"}),
    "mlflow_tracking_uri": ({}, "u", {"mlflow_tracking_uri": "u", "trackers": ("mlflow",)}),
    "mlflow_experiment_name": ({}, "x", {"mlflow_experiment_name": "x", "trackers": ("mlflow",)}),
    "mlflow_run_name": ({}, "r", {"mlflow_run_name": "r"}),
    "use_liger_kernels": ({}, True, {"kernels": "liger"}),
    "validation_split": ({}, 0.2, {"validation_split": 0.2}),
    "validation_data_path": ({}, "held.jsonl", {"eval_data_path": "held.jsonl"}),
    "validation_frequency": (HELD_OUT, 5, {"eval_every_steps": 5}),
    "validate_at_epoch": (HELD_OUT, True, {"eval_at_epoch": True}),
    "min_samples_per_validation": (HELD_OUT, 20, {"eval_every_steps": 3}),
    "pretraining_config": ({}, PretrainingConfig(64), {"block_size": 64, "cross_documents": True}),
    "save_best_val_loss": (HELD_OUT, True, {"keep_best": True}),
    "resume_from_full_state_checkpoint": ({}, "out/full_state/step_2", {"resume": "out/full_state/step_2"}),
}
# Argument: the value that asks for what is always so, and one that is refused.
ONLY: dict[str, tuple[Any, Any]] = {
    "osft_upcast_dtype": ("fp32", "bfloat16"),
    "save_final_checkpoint": (True, False),
    "train_dtype": ("float32", "bfloat16"),
    "trust_remote_code": (False, True),
    "val_loss_improvement_threshold": (0.0, 0.1),
}
# Asked for or not, it happens: a signal saves the state, and the end is measured. Callbacks are no setting.
EITHER = ("on_demand_checkpointing", "validate_at_final", "callbacks")


def test_every_argument_has_a_case() -> None:
    """No argument is taken and then forgotten."""
    assert {field.name for field in attrs.fields(TrainingArgs)} == {*REQUIRED, *EFFECTS, *ONLY, *EITHER}


@pytest.mark.parametrize("name", EFFECTS)
def test_an_argument_has_an_effect(name: str) -> None:
    """It becomes settings that the verb takes, and that differ from those without it."""
    beside, value, wanted = EFFECTS[name]
    verb, settings = made(**beside, **{name: value})
    assert {setting: settings.get(setting) for setting in wanted} == wanted
    resolve(task_of(verb).settings, ("argument", settings))
    if name not in ("osft", "osft_unfreeze_rank_ratio", "training_mode", "max_steps", "max_tokens"):
        assert made(**beside) != (verb, settings)


@pytest.mark.parametrize("name", ONLY)
def test_an_argument_that_can_have_one_value(name: str) -> None:
    """The one passes, any other is refused with the reason."""
    only, other = ONLY[name]
    assert made(**{name: only}) == made()
    with pytest.raises(forge.SettingsError, match=f"{name}={other!r}: .*Leave it out"):
        made(**{name: other})


def test_the_verb_that_is_asked_for() -> None:
    """OSFT and pretraining are commands of their own, and go together."""
    assert made()[0] == "sft"
    assert made(**OSFT)[0] == "osft"
    assert made(pretraining_config=PretrainingConfig(64))[0] == "pretrain"
    verb, settings = made(**OSFT, pretraining_config=PretrainingConfig(64))
    assert (verb, settings["adapter"]) == ("pretrain", "osft")


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"osft": True}, "osft_unfreeze_rank_ratio is required"),
        ({"osft": "false"}, "osft must be True or False, not 'false'"),
        ({"use_liger_kernels": "no"}, "use_liger_kernels must be True or False"),
        ({"osft_target_patterns": ["q"]}, r"osft_target_patterns=\['q'\] has no effect without osft"),
        ({"max_steps": 5}, "max_steps=5 has no effect with training_mode=epoch: set training_mode=step"),
        ({"max_epochs": 2, "training_mode": "infinite"}, "max_epochs=2 has no effect with training_mode=infinite"),
        ({"training_mode": "forever"}, "training_mode must be one of epoch, step, token, infinite"),
        ({"lr_scheduler": "constant", "num_warmup_steps": 2}, "set lr_scheduler='constant_with_warmup'"),
        ({"lr_scheduler_kwargs": {"colour": 1}}, "lr_scheduler_kwargs: colour=1 is not available"),
        ({"lr_scheduler_kwargs": "{}"}, "lr_scheduler_kwargs must be a mapping"),
        ({"lr_scheduler": ["cosine"]}, "lr_scheduler must be a string"),
        ({"validation_frequency": 2, "min_samples_per_validation": 9}, "both say how often"),
        ({"min_samples_per_validation": "often"}, "min_samples_per_validation must be a whole number"),
        ({"lr_scheduler_kwargs": {"min_lr_ratio": 0.1, "min_lr_rate": 0.2}}, "min_lr_rate and another name both say"),
        ({"validate_at_final": True}, "validate_at_final=True has no effect without held-out rows"),
        ({"pretraining_config": {"block_size": 3}}, "pretraining_config must be a forge.mini.PretrainingConfig"),
    ],
)
def test_what_cannot_be(given: dict[str, Any], named: str) -> None:
    """Contradictions and wrong types are refused by the name that was given."""
    with pytest.raises(forge.SettingsError, match=named):
        made(**given)


def test_infinite_training_asks_for_a_schedule_without_an_end() -> None:
    """As there; forge names the setting and the schedules."""
    verb, settings = made(training_mode=TrainingMode.INFINITE)
    with pytest.raises(forge.SettingsError, match="num_epochs=inf has no end, which lr_scheduler=cosine needs"):
        resolve(task_of(verb).settings, ("argument", settings))
    verb, settings = made(training_mode="infinite", lr_scheduler="constant_with_warmup", num_warmup_steps=3)
    assert resolve(task_of(verb).settings, ("argument", settings)).plan.num_epochs == "inf"


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, {"nproc_per_node": 1}),
        ({"nproc_per_node": "gpu"}, {"nproc_per_node": "gpu"}),
        (
            {"nnodes": 2, "nproc_per_node": 8, "node_rank": 1, "master_addr": "a", "master_port": 5},
            {"nnodes": 2, "nproc_per_node": 8, "node_rank": 1, "master_addr": "a", "master_port": 5},
        ),
        (
            {"nnodes": 2, "rdzv_endpoint": "a:5"},
            {"nproc_per_node": 1, "nnodes": 2, "node_rank": 0, "rdzv_endpoint": "a:5", "rdzv_id": "123"},
        ),
    ],
)
def test_processes(given: dict[str, Any], wanted: dict[str, Any]) -> None:
    """What says nothing about one node is left out."""
    _, settings = translate(TorchrunArgs(**given), TrainingArgs(**REQUIRED))
    assert {name: settings[name] for name in settings if name in (*wanted, "rdzv_id", "nnodes", "node_rank")} == wanted


def test_wrong_arguments() -> None:
    """Two places to meet, and anything that is no such object."""
    with pytest.raises(forge.SettingsError, match="both say where"):
        TorchrunArgs(rdzv_endpoint="a:1", master_addr="b")
    with pytest.raises(forge.SettingsError, match=r"forge\.mini\.TrainingArgs is wanted"):
        run_training(TorchrunArgs(), {})  # type: ignore[arg-type]
    with pytest.raises(forge.SettingsError, match=r"TorchrunArgs"):
        run_training(None, TrainingArgs(**REQUIRED))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ([], "--model-name-or-path"),
        (["--lr-scheduler-kwargs", "{"], "--lr-scheduler-kwargs is no JSON"),
        (["--trust-remote-code"], "--trust-remote-code"),
        (["--no-save-final-checkpoint"], "--no-save-final-checkpoint"),
        (["--training-mode", "infinite", "--lr-scheduler", "cosine"], "--lr-scheduler cosine needs"),
        (["--batch-size", "0"], "--batch-size"),
        (["--colour", "red"], "--colour"),
    ],
)
def test_the_command_speaks_of_its_flags(words: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Status 2 and one message, in mini-trainer's words."""
    required = [word for name, value in REQUIRED.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    assert main([*(required if words else []), *words]) == 2
    assert named in capsys.readouterr().err
