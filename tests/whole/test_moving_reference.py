"""`reference=moving`: resumes, cuts, ranks, adapters, memory, and what is refused."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

import forge
from forge._errors import SettingsError
from forge.run import _memory

from ..lanes import ci_keeps
from ..ranks import run_on_ranks
from .starts import metrics, untimed, weights
from .verbs import run_verb, run_verb_killed, settings_of, teacher, uninterrupted

pytestmark = pytest.mark.slow

MOVING = {
    "reference": "moving",
    "reference_sync_steps": 2,
    "max_steps": 6,
    "learning_rate": 2e-2,
    "lr_scheduler": "constant",
}


ONLINE = {"kl_weight": 0.5, "num_iterations": 2, "temperature": 0.7}
"""Of the online verbs: two steps on each rollout, so that the reference moves between two of them."""


def given_to(verb: str, model_dir: Path, folder: Path, **more: Any) -> dict[str, Any]:
    """Settings of a short run with a moving reference; "TEACHER" is another model."""
    online = ONLINE if verb in ("ppo", "grpo", "rloo") else {}
    found = settings_of(verb, model_dir, folder) | MOVING | online | more
    return {name: str(teacher(model_dir, folder)) if value == "TEACHER" else value for name, value in found.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of rows and rewards."""
    return tmp_path_factory.mktemp("moving")


@pytest.fixture(scope="module")
def alone(model_dir: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Verb and settings → their uninterrupted run in one process."""
    return uninterrupted(lambda verb, **more: given_to(verb, model_dir, folder, **more), folder, tmp_path_factory)


def losses(run: Path) -> list[float]:
    """Losses of the steps, those of held-out rows, and the KL of rollouts and of held-out completions."""
    names = ("loss", "eval_loss", "rollout_kl", "rollout_reward", "eval_kl")
    return [line[name] for line in metrics(run) for name in names if name in line]


OTHER = {"reference_path": "TEACHER"}


@pytest.mark.parametrize(
    ("verb", "more"),
    ci_keeps(
        [("grpo", {})],
        [
            *(("dpo", each) for each in ({}, OTHER, {"adapter": "lora"})),
            ("kto", {}),
            *(("grpo", each) for each in ({}, {"adapter": "lora"})),
            ("rloo", {}),
            ("ppo", {}),
        ],
    ),
)
def test_a_resume_is_invisible(
    verb: str, more: dict[str, Any], alone: Any, model_dir: Path, folder: Path, tmp_path: Path
) -> None:
    """kill -9 after step 3, between two moves of the reference (and within a rollout), and the same command: the same bits."""
    given = given_to(verb, model_dir, folder, **more)
    given |= {"full_state_every_steps": 3, "ckpt_output_dir": str(tmp_path / "run")}
    with pytest.raises(RuntimeError, match="status -9"):
        run_on_ranks(run_verb_killed, 1, verb, given, str(folder), 3, joined=False)
    run_on_ranks(run_verb, 1, verb, given, str(folder), joined=False)
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


@pytest.mark.parametrize("verb", ["dpo", "grpo"])
def test_the_log_says_when_it_moves(verb: str, alone: Any) -> None:
    """A loss that jumps has its reason in the log."""
    said = "reference: it moves 0.6 of the way to the trained model every 2 steps; the figures that are measured from it jump"
    assert said in (alone(verb) / "log.txt").read_text()


def test_sampling_is_that_of_the_trained_weights(alone: Any) -> None:
    """Up to the first rollout after a move a run is one with a reference that stays; then its KL is another."""
    moves, stays = alone("grpo"), alone("grpo", reference="initial", reference_sync_steps=512)
    first, second = ([line["rollout_kl"] for line in metrics(run) if "rollout_kl" in line] for run in (moves, stays))
    assert first[0] == pytest.approx(second[0], abs=1e-6)
    assert first[1] < 0.5 * second[1]  # the reference has taken on 0.6 of what the first two steps did
    for step in (1, 3):
        files = [(run / "rollouts" / f"step_{step}.jsonl").read_text().splitlines()[1:] for run in (moves, stays)]
        one, other = ([json.loads(line)["completion"] for line in lines] for lines in files)
        assert one == other


def test_it_begins_as_another_model(alone: Any, model_dir: Path) -> None:
    """The first losses are those beside that model; given the initial model itself, it is that to the bit."""
    still = alone("dpo", reference="live", reference_sync_steps=512, **OTHER)
    moves = alone("dpo", **OTHER)
    first, second = ([line["loss"] for line in metrics(run) if "loss" in line] for run in (moves, still))
    assert first[:2] == pytest.approx(second[:2], rel=1e-5)
    assert all(abs(a - b) > 1e-4 for a, b in zip(first[2:], second[2:], strict=True))
    itself = alone("dpo", reference_path=str(model_dir))
    assert untimed(itself) == untimed(alone("dpo"))


@pytest.mark.parametrize(
    ("verb", "strategy", "more"),
    ci_keeps(
        [("dpo", "fsdp2", OTHER)],
        [
            *(("dpo", each, {}) for each in ("ddp", "fsdp2", "fsdp2 tp_size", "fsdp2 cp_size")),
            *(("dpo", each, OTHER) for each in ("ddp", "fsdp2", "fsdp2 tp_size", "fsdp2 cp_size")),
            ("kto", "fsdp2", {}),
            *(("grpo", each, {}) for each in ("ddp", "fsdp2", "fsdp2 tp_size", "fsdp2 cp_size")),
            ("grpo", "fsdp2", {"adapter": "lora"}),
            ("rloo", "fsdp2", {}),
            ("ppo", "fsdp2", {}),
        ],
    ),
)
def test_ranks_do_not_change_it(
    verb: str, strategy: str, more: dict[str, Any], alone: Any, model_dir: Path, folder: Path, tmp_path: Path
) -> None:
    """Two ranks, which divide the reference as they do the weights, make the losses of one process."""
    name, *sharing = strategy.split()
    given = given_to(verb, model_dir, folder, **more) | {"strategy": name, **dict.fromkeys(sharing, 2)}
    run_on_ranks(run_verb, 2, verb, {**given, "ckpt_output_dir": str(tmp_path / "two")}, str(folder), joined=False)
    assert losses(tmp_path / "two") == pytest.approx(losses(alone(verb, **more)), rel=1e-4, abs=1e-5)


def test_other_ranks_go_on_with_it(alone: Any, model_dir: Path, folder: Path, tmp_path: Path) -> None:
    """What one process saved goes on on two, which divide it: the same losses."""
    given = settings_of("dpo", model_dir, folder) | MOVING
    given |= {"full_state_every_steps": 3, "ckpt_output_dir": str(tmp_path / "run")}
    with pytest.raises(RuntimeError, match="status -9"):
        run_on_ranks(run_verb_killed, 1, "dpo", given, str(folder), 3, joined=False)
    run_on_ranks(run_verb, 2, "dpo", given | {"strategy": "fsdp2"}, joined=False)
    assert losses(tmp_path / "run") == pytest.approx(losses(alone("dpo")), rel=1e-5)


@pytest.mark.parametrize(
    ("verb", "more"),
    ci_keeps(
        [("dpo", OTHER), ("grpo", {})],
        [("dpo", {}), ("dpo", OTHER), *((verb, {"adapter": "lora"}) for verb in ("dpo", "grpo")), ("grpo", {})],
    ),
    ids=str,
)
def test_its_memory_is_planned(
    verb: str, more: dict[str, Any], model_dir: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second set of trained weights is in the plan, as part of the optimizer's state, and in what is measured."""
    monkeypatch.setattr(_memory, "_SMALL", 0)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "forge_test_rewards", raising=False)
    monkeypatch.setattr("forge.tasks._rollouts.end_ids", lambda _: [10**6])  # as long as they may be
    stays = {"reference": "stored" if verb == "dpo" else "initial", "reference_sync_steps": 512}
    found = {}
    for name, kind in (("moving", {}), ("stored", stays)):
        run = tmp_path / name
        getattr(forge, verb)(**given_to(verb, model_dir, folder, **(more | kind)), ckpt_output_dir=run)
        found[name] = {phase["name"]: phase for phase in json.loads((run / "memory.json").read_text())["phases"]}
    moving, stored = found["moving"], found["stored"]
    assert moving["first steps"]["planned"] == pytest.approx(moving["first steps"]["measured"], rel=0.02)
    trained = moving["saving"]["parts"]["gradients"]
    for phase in ("step", "saving"):
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
        ({**OTHER, "adapter": "lora"}, "reference_path with reference=moving and adapter=lora"),
        ({"verb": "grpo", "strategy": "zero2"}, "reference=moving with strategy=zero2"),
        ({"verb": "grpo", "kl_weight": 0}, "reference='moving' has no effect with kl_weight=0"),
        (
            {"verb": "rloo", "reference_sync_steps": 5},
            "with the 6 steps of this run: .* the last rollout, which is for 2 of them. .* reference=initial",
        ),
    ],
)
def test_what_cannot_move_is_refused(more: dict[str, Any], message: str, model_dir: Path, folder: Path, tmp_path: Path) -> None:
    """By name, before anything is written."""
    verb = more.get("verb", "dpo")
    given = given_to(verb, model_dir, folder, **{name: value for name, value in more.items() if name != "verb"})
    with pytest.raises(SettingsError, match=message):
        getattr(forge, verb)(**given, ckpt_output_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_another_model_of_other_numbers_is_refused(model_dir: Path, folder: Path, tmp_path: Path) -> None:
    """The reference is other weights in the trained model, whose configuration they must have been made for."""
    other = tmp_path / "other"
    shutil.copytree(teacher(model_dir, folder), other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
    with pytest.raises(
        SettingsError, match=r"reference_path .*other with reference=moving: its configuration has rms_norm_eps=0.5"
    ):
        forge.dpo(**given_to("dpo", model_dir, folder, reference_path=str(other)), ckpt_output_dir=tmp_path / "run")


def test_losses_beside_different_references_are_not_compared(model_dir: Path, folder: Path, tmp_path: Path) -> None:
    """A held-out loss above that before training is no reason to warn: its reference is another one."""
    given = settings_of("dpo", model_dir, folder) | MOVING | {"adapter": "lora", "lora_dropout": 0.3}
    result = forge.dpo(**given, ckpt_output_dir=tmp_path / "run")
    assert result.eval_after["eval_loss"] > result.eval_before["eval_loss"]
    assert "held-out loss is higher" not in (tmp_path / "run" / "log.txt").read_text()
