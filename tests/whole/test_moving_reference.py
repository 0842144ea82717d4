"""`reference=moving`: resumes, cuts, ranks, adapters, memory, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import forge
from forge._errors import SettingsError
from forge.run import _memory

from ..lanes import ci_keeps
from ..ranks import run_on_ranks
from .starts import metrics, untimed, weights
from .verbs import run_verb, run_verb_killed, settings_of, uninterrupted

pytestmark = pytest.mark.slow

MOVING = {
    "reference": "moving",
    "reference_sync_steps": 2,
    "max_steps": 6,
    "learning_rate": 2e-2,
    "lr_scheduler": "constant",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of rows."""
    return tmp_path_factory.mktemp("moving")


@pytest.fixture(scope="module")
def alone(model_dir: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Verb and settings → their uninterrupted run in one process."""
    return uninterrupted(model_dir, folder, tmp_path_factory, **MOVING)


def losses(run: Path) -> list[float]:
    """Losses of the steps, and those of held-out rows."""
    return [line[name] for line in metrics(run) for name in ("loss", "eval_loss") if name in line]


@pytest.mark.parametrize(("verb", "more"), ci_keeps([("dpo", {})], [("dpo", {}), ("dpo", {"adapter": "lora"}), ("kto", {})]))
def test_a_resume_is_invisible(
    verb: str, more: dict[str, Any], alone: Any, model_dir: Path, folder: Path, tmp_path: Path
) -> None:
    """kill -9 after step 3, between two moves of the reference, and the same command: the same bits."""
    given = settings_of(verb, model_dir, folder) | MOVING | more
    given |= {"full_state_every_steps": 3, "ckpt_output_dir": str(tmp_path / "run")}
    with pytest.raises(RuntimeError, match="status -9"):
        run_on_ranks(run_verb_killed, 1, verb, given, str(folder), 3, joined=False)
    run_on_ranks(run_verb, 1, verb, given, joined=False)
    assert "resuming after step 3" in (tmp_path / "run" / "log.txt").read_text()
    assert untimed(tmp_path / "run") == untimed(alone(verb, **more))
    assert weights(tmp_path / "run") == weights(alone(verb, **more))


def test_it_moves_and_any_cut_is_the_same(alone: Any, model_dir: Path, folder: Path, tmp_path: Path) -> None:
    """Up to the first move it is a reference that stays; then it is not; however small the micro-batches are."""
    given = settings_of("dpo", model_dir, folder) | MOVING
    small = forge.dpo(**{**given, "max_tokens_per_gpu": 100}, ckpt_output_dir=tmp_path / "small")
    assert losses(small.output_dir) == pytest.approx(losses(alone("dpo")), rel=1e-5)
    stays = alone("dpo", reference="live", reference_sync_steps=512)
    moves = [line["loss"] for line in metrics(alone("dpo")) if "loss" in line]
    still = [line["loss"] for line in metrics(stays) if "loss" in line]
    assert moves[:2] == pytest.approx(still[:2], rel=1e-5)
    assert all(abs(a - b) > 1e-4 for a, b in zip(moves[2:], still[2:], strict=True))


@pytest.mark.parametrize(
    ("verb", "strategy"),
    ci_keeps(
        [("dpo", "fsdp2")],
        [("dpo", "ddp"), ("dpo", "fsdp2"), ("dpo", "fsdp2 tp_size"), ("dpo", "fsdp2 cp_size"), ("kto", "fsdp2")],
    ),
)
def test_ranks_do_not_change_it(verb: str, strategy: str, alone: Any, model_dir: Path, folder: Path, tmp_path: Path) -> None:
    """Two ranks, which divide the reference as they do the weights, make the losses of one process."""
    name, *sharing = strategy.split()
    given = settings_of(verb, model_dir, folder) | MOVING | {"strategy": name, **dict.fromkeys(sharing, 2)}
    run_on_ranks(run_verb, 2, verb, {**given, "ckpt_output_dir": str(tmp_path / "two")}, joined=False)
    assert losses(tmp_path / "two") == pytest.approx(losses(alone(verb)), rel=1e-5)


def test_other_ranks_go_on_with_it(alone: Any, model_dir: Path, folder: Path, tmp_path: Path) -> None:
    """What one process saved goes on on two, which divide it: the same losses."""
    given = settings_of("dpo", model_dir, folder) | MOVING
    given |= {"full_state_every_steps": 3, "ckpt_output_dir": str(tmp_path / "run")}
    with pytest.raises(RuntimeError, match="status -9"):
        run_on_ranks(run_verb_killed, 1, "dpo", given, str(folder), 3, joined=False)
    run_on_ranks(run_verb, 2, "dpo", given | {"strategy": "fsdp2"}, joined=False)
    assert losses(tmp_path / "run") == pytest.approx(losses(alone("dpo")), rel=1e-5)


@pytest.mark.parametrize("more", [{}, {"adapter": "lora"}], ids=str)
def test_its_memory_is_planned(
    more: dict[str, Any], model_dir: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second set of trained weights is in the plan, as part of the optimizer's state, and in what is measured."""
    monkeypatch.setattr(_memory, "_SMALL", 0)
    found = {}
    for name, kind in (("moving", MOVING), ("stored", {**MOVING, "reference": "stored", "reference_sync_steps": 512})):
        run = tmp_path / name
        forge.dpo(**(settings_of("dpo", model_dir, folder) | kind | more), ckpt_output_dir=run)
        found[name] = {phase["name"]: phase for phase in json.loads((run / "memory.json").read_text())["phases"]}
    moving, stored = found["moving"], found["stored"]
    assert moving["first steps"]["planned"] == pytest.approx(moving["first steps"]["measured"], rel=0.02)
    trained = moving["saving"]["parts"]["gradients"]
    for phase in ("step", "evaluation", "saving"):
        extra = moving[phase]["parts"]["optimizer"] - stored[phase]["parts"]["optimizer"]
        assert extra == pytest.approx(trained, rel=0.05)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"strategy": "zero2"}, "reference=moving with strategy=zero2"),
        ({"optimizer": "schedule_free"}, "optimizer=schedule_free with reference=moving"),
        ({"reference_sync_steps": 6}, "reference_sync_steps=6 with the 6 steps of this run"),
        ({"keep_best": True}, "keep_best with reference=moving: held-out losses .* are beside different references"),
        (
            {"early_stopping_patience": 2, "eval_every_steps": 2},
            "early_stopping_patience with reference=moving: held-out losses",
        ),
        ({"reference_path": "MODEL"}, "reference_path='.*' has no effect with reference='moving'"),
    ],
)
def test_what_cannot_move_is_refused(more: dict[str, Any], message: str, model_dir: Path, folder: Path, tmp_path: Path) -> None:
    """By name, before anything is written."""
    given = settings_of("dpo", model_dir, folder) | MOVING
    given |= {name: str(model_dir) if value == "MODEL" else value for name, value in more.items()}
    with pytest.raises(SettingsError, match=message):
        forge.dpo(**given, ckpt_output_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_losses_beside_different_references_are_not_compared(model_dir: Path, folder: Path, tmp_path: Path) -> None:
    """A held-out loss above that before training is no reason to warn: its reference is another one."""
    given = settings_of("dpo", model_dir, folder) | MOVING | {"adapter": "lora", "lora_dropout": 0.3}
    result = forge.dpo(**given, ckpt_output_dir=tmp_path / "run")
    assert result.eval_after["eval_loss"] > result.eval_before["eval_loss"]
    assert "held-out loss is higher" not in (tmp_path / "run" / "log.txt").read_text()
