"""Distillation on rows with images: teacher and student are plain transformers', one conversation a forward."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoProcessor

import forge
import forge_algos
import forge_data
import forge_packing

from ..lanes import ci_keeps
from . import modalities, pictures, reference
from .starts import metrics
from .three_steps import SETTINGS, figures, samples
from .verbs import assert_two_ranks_as_one

if TYPE_CHECKING:
    from collections.abc import Sequence

# Exports with images are compared in test_images.py, those of each verb in test_verbs.py.
pytestmark = pytest.mark.usefixtures("unchecked_exports")

GIVEN: dict[str, Any] = {name: value for name, value in SETTINGS.items() if name != "moe_aux_loss"} | {
    "effective_batch_size": 6,
    "max_tokens_per_gpu": 160,
    "validation_split": 0.2,
    "beta": 0.0,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A student and a teacher of other weights."""
    made = tmp_path_factory.mktemp("models")
    return pictures.save("gemma3", made / "student"), pictures.save("gemma3", made / "teacher", seed=21)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 conversations."""
    return pictures.rows(tmp_path_factory.mktemp("rows"))


def divergence(student: Any, teacher: Any, taken: Sequence[reference.Sample]) -> torch.Tensor:
    """KL(teacher ‖ student) a learned token (arXiv 2306.13649, equation 1 with β = 0)."""
    total, count = torch.zeros(()), 0
    for sample in taken:
        learned = torch.tensor(sample.labels[1:]) != reference.NO_LOSS
        ours = reference.sample_logits(student, sample)[:-1][learned].log_softmax(-1)
        with torch.no_grad():
            theirs = reference.sample_logits(teacher, sample)[:-1][learned].log_softmax(-1)
        total = total + (theirs.exp() * (theirs - ours)).sum()
        count += int(learned.sum())
    return total / count


@pytest.mark.parametrize("more", [{}, pytest.param({"packing": "off"}, marks=pytest.mark.slow)])
def test_losses_are_those_of_plain_transformers(
    more: dict[str, Any], models: tuple[Path, Path], data: Path, tmp_path: Path
) -> None:
    """Losses, gradient norms and held-out losses."""
    given = {"model_path": str(models[0]), "teacher_path": str(models[1]), "data_path": str(data), **GIVEN}
    run = forge.distill(**given | more, ckpt_output_dir=tmp_path / "run").output_dir
    train, held_out = forge_data.TokenStore.open(run / "data" / "train").split(0.2, seed=42)
    plan = forge_packing.BatchPlan.load(run / "plan" / "plan.npz")
    inputs = pictures.inputs_of(models[0], data)
    rows, others = (samples(store, list(range(len(store))), inputs) for store in (train, held_out))
    student, teacher = map(modalities.plain, models)
    with torch.no_grad():
        before = float(divergence(student, teacher, others))
    expected = pictures.steps(student, plan, lambda taken: divergence(student, teacher, [rows[at] for at in taken]))
    with torch.no_grad():
        after = float(divergence(student, teacher, others))
    measured = [line["eval_loss"] for line in metrics(run) if "eval_loss" in line]
    assert measured[:2] == pytest.approx([before, after], rel=1e-5)
    assert figures(run) == pytest.approx([loss for loss, _ in expected], rel=1e-5)
    assert figures(run, "grad_norm") == pytest.approx([norm for _, norm in expected], rel=1e-4)
    assert "could not be measured" not in (run / "log.txt").read_text()


@pytest.mark.parametrize("most", [160, pytest.param(600, marks=pytest.mark.lane)])
def test_own_completions_behind_images(most: int, models: tuple[Path, Path], data: Path, tmp_path: Path) -> None:
    """With on_policy a step's loss is that of plain transformers at the completions that were sampled behind images."""
    given = {"model_path": str(models[0]), "teacher_path": str(models[1]), "data_path": str(data), **GIVEN}
    given |= {"on_policy": 1.0, "max_new_tokens": 9, "max_steps": 1, "max_tokens_per_gpu": most}
    run = forge.distill(**given, ckpt_output_dir=tmp_path / "run").output_dir
    student, teacher = map(modalities.plain, models)
    rows = [json.loads(line)["messages"] for line in data.read_text().splitlines()]
    total, count, seen = 0.0, 0, 0
    for line in map(json.loads, (run / "samples" / "step_1.jsonl").read_text().splitlines()):
        messages = forge_data.TokenStore.open(run / "data" / "train").split(0.2, seed=42)[0].source(line["row"])
        asked = pictures.prompt_inputs(models[0], rows[int(messages.rpartition(":")[2]) - 1][:-1], data.parent)
        seen += "pixel_values" in asked
        begin, drawn = asked["input_ids"].shape[1], torch.tensor([line["completion_ids"]])
        asked |= {
            name: torch.cat(
                (asked[name], drawn if name == "input_ids" else torch.full_like(drawn, name == "attention_mask")), 1
            )
            for name in ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
            if name in asked
        }
        with torch.no_grad():
            ours, theirs = (one(**asked).logits[0, begin - 1 : -1].log_softmax(-1) for one in (student, teacher))
        total += float((theirs.exp() * (theirs - ours)).sum())
        count += drawn.shape[1]
    assert seen >= 2
    assert figures(run) == pytest.approx([total / count], rel=1e-5)


@pytest.mark.lane
@pytest.mark.slow
def test_own_completions_on_two_ranks(models: tuple[Path, Path], data: Path, tmp_path: Path) -> None:
    """Two ranks sample the same completions behind images, and make the same losses."""
    given = {"model_path": str(models[0]), "teacher_path": str(models[1]), "data_path": str(data), **GIVEN}
    given |= {"on_policy": 0.6, "max_new_tokens": 9, "max_steps": 3, "strategy": "fsdp2"}
    assert_two_ranks_as_one("distill", given, tmp_path, ("loss", "eval_loss"))


@pytest.mark.parametrize("single", [True, False])
def test_what_can_be_a_teacher(
    single: bool, models: tuple[Path, Path], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that takes one sample a forward can, where the student does too; one that sees no images cannot."""
    if single:
        monkeypatch.setattr("forge.tasks._media._known", {})
        monkeypatch.setattr(forge_data.MediaInputs, "joins_of", lambda *_: False)
        monkeypatch.setattr(forge_algos, "pack_media", lambda *_, **__: (None, "no two fit"))
    given = {"model_path": str(models[0]), "data_path": str(data), **GIVEN, "validation_split": 0, "max_steps": 1}
    if single:
        run = forge.distill(**given, teacher_path=str(models[1]), ckpt_output_dir=tmp_path / "run").output_dir
        assert "one sample a row" in (run / "log.txt").read_text()
    blind = tmp_path / "blind"
    AutoModelForCausalLM.from_config(modalities.plain(models[1]).config.text_config).save_pretrained(blind)
    forge_data.load_tokenizer(models[1]).save_pretrained(blind)
    with pytest.raises(forge_algos.PackedBatchError, match="blind cannot be given the rows' media: .*sees no images"):
        forge.distill(**given, teacher_path=str(blind), ckpt_output_dir=tmp_path / "blind_run")
    if not single:
        # Nor can it learn from images, whatever lies beside it.
        AutoProcessor.from_pretrained(models[1]).save_pretrained(blind)
        with pytest.raises(forge_algos.PackedBatchError, match="blind cannot be given the rows' media: .*sees no images"):
            own = {name: value for name, value in given.items() if name != "beta"} | {"model_path": str(blind)}
            forge.sft(**own, ckpt_output_dir=tmp_path / "blind_run")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ci_keeps(["fsdp2"], ["ddp", "fsdp2"]))
def test_two_ranks(strategy: str, models: tuple[Path, Path], tmp_path: Path) -> None:
    """Divided it trains as on one rank, also where a rank's rows have no images, for the teacher too."""
    data = pictures.rows(tmp_path, 12)
    settings = {"model_path": str(models[0]), "teacher_path": str(models[1]), "data_path": str(data), **GIVEN}
    settings |= {"effective_batch_size": 3, "strategy": strategy}
    assert_two_ranks_as_one("distill", settings, tmp_path, ("loss", "grad_norm", "eval_loss"))
