"""Rated answers with images: their runs are those of plain transformers, one answer a forward with its processor's arrays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import forge
import forge_data
import forge_packing
from forge.run import _memory
from forge.tasks.items._pairs import Answers as Items

from ..lanes import ci_keeps
from ..ranks import run_on_ranks
from . import modalities, pictures, reference
from .conftest import write_rows
from .starts import metrics, untimed, weights
from .three_steps import SETTINGS, figures
from .verbs import assert_two_ranks_as_one, run_verb, run_verb_killed

# Exports with images are compared in test_images.py, those of each verb in test_verbs.py.
pytestmark = pytest.mark.usefixtures("unchecked_exports")

GIVEN: dict[str, Any] = {name: value for name, value in SETTINGS.items() if name != "moe_aux_loss"} | {
    "effective_batch_size": 6,
    "max_tokens_per_gpu": 160,
    "validation_split": 0.2,
    "beta": 0.4,
    "desirable_weight": 1.3,
    "undesirable_weight": 0.8,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that the runs train."""
    return pictures.save("gemma3", tmp_path_factory.mktemp("gemma3"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 answers, a third of them unwanted."""
    return pictures.rated(tmp_path_factory.mktemp("rated"))


@pytest.fixture(scope="module")
def given(model: Path, data: Path) -> dict[str, Any]:
    """Settings of three steps."""
    return {"model_path": str(model), "data_path": str(data), **GIVEN}


class Answers:
    """Answers of a store, and their mismatches, as the model's processor reads them."""

    def __init__(self, store: forge_data.TokenStore, data: Path, model: Path) -> None:
        lines = [json.loads(line) for line in data.read_text().splitlines()]
        rows = [lines[int(store.source(at).rpartition(":")[2]) - 1] for at in range(len(store))]
        tokenizer = forge_data.load_tokenizer(model)
        self.wanted = [row["label"] for row in rows]
        assert self.wanted == store.desirable.tolist()

        def sample(prompt: list[Any], answer: list[Any]) -> reference.Sample:
            ids, made = pictures.read(model, data.parent, prompt + answer)
            # What the template writes after the turn is not learned.
            stop = len(ids) - ids[::-1].index(tokenizer.eos_token_id)
            start = stop - len(tokenizer.encode(answer[0]["content"] + "<end>", add_special_tokens=False))
            assert tokenizer.decode(ids[start:stop]) == f"{answer[0]['content']}<end>"
            none = reference.NO_LOSS
            labels = [none] * start + ids[start:stop] + [none] * (len(ids) - stop)
            return reference.Sample(ids, labels, made)

        self.own = [sample(row["prompt"], row["completion"]) for row in rows]
        # The row's own prompt, with its images, and the next row's answer.
        following = rows[1:] + rows[:1]
        self.others = [sample(row["prompt"], other["completion"]) for row, other in zip(rows, following, strict=True)]
        assert [each.input_ids for each in self.own] == [each.input_ids.tolist() for each in store]

    def references(self, plain: Any) -> tuple[list[float], list[float]]:
        """Log-probabilities of the answers and of their mismatches before training."""
        with torch.no_grad():
            return [float(logp(plain, each)) for each in self.own], [float(logp(plain, each)) for each in self.others]

    def loss(self, plain: Any, taken: list[int], own: list[float], others: list[float], *, kl: bool = True) -> torch.Tensor:
        """Equation 7 of arXiv 2402.01306 over some answers, around the KL of their mismatches."""
        z = torch.zeros(())
        if kl:
            with torch.no_grad():
                z = torch.stack([logp(plain, self.others[at]) - others[at] for at in taken]).mean().clamp(min=0)
        terms = []
        for at in taken:
            off = GIVEN["beta"] * (logp(plain, self.own[at]) - own[at] - z)
            good = self.wanted[at]
            weight = GIVEN["desirable_weight" if good else "undesirable_weight"]
            terms.append(weight * (1 - torch.sigmoid(off if good else -off)))
        return torch.stack(terms).mean()


def logp(plain: Any, sample: reference.Sample) -> torch.Tensor:
    """One answer a forward."""
    return -reference.sample_loss(plain, sample)[0]


def check(run: forge.RunResult, model: Path, data: Path, kl: bool) -> None:
    """Losses, gradient norms and the held-out losses of a run are a plain model's."""
    train, held_out = forge_data.TokenStore.open(run.output_dir / "data" / "train").split(0.2, seed=42)
    plan = forge_packing.BatchPlan.load(run.output_dir / "plan" / "plan.npz")
    answers, others = (Answers(store, data, model) for store in (train, held_out))
    plain = modalities.plain(model)
    own, held = answers.references(plain), others.references(plain)
    every = list(range(len(others.own)))
    with torch.no_grad():
        before = float(others.loss(plain, every, *held, kl=kl))
    expected = pictures.steps(plain, plan, lambda taken: answers.loss(plain, taken, *own, kl=kl))
    with torch.no_grad():
        after = float(others.loss(plain, every, *held, kl=kl))
    measured = [line["eval_loss"] for line in metrics(run.output_dir) if "eval_loss" in line]
    assert measured[:2] == pytest.approx([before, after], rel=1e-5)
    assert figures(run.output_dir) == pytest.approx([loss for loss, _ in expected], rel=1e-5)
    assert figures(run.output_dir, "grad_norm") == pytest.approx([norm for _, norm in expected], rel=1e-4)
    if kl:
        assert max(figures(run.output_dir, "kl")) > 0


SINGLE = "the model's processor makes arrays that are not joined"


@pytest.mark.parametrize(
    ("more", "single"),
    [
        ({}, False),
        ({"reference": "live", "packing": "off"}, True),
        pytest.param({}, True, marks=pytest.mark.lane),
        pytest.param({"loss_type": "apo_zero_unpaired"}, False, marks=[pytest.mark.slow, pytest.mark.lane]),
    ],
)
def test_losses_are_those_of_plain_transformers(
    more: dict[str, Any],
    single: bool,
    given: dict[str, Any],
    model: Path,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each answer, and each mismatch, which has the images of its prompt; also where a row holds one sample."""
    if single:
        monkeypatch.setattr("forge.tasks._media._known", {})
        monkeypatch.setattr(forge_data.MediaInputs, "joins_of", lambda *_: False)
    run = forge.kto(**given | more, ckpt_output_dir=tmp_path / "run")
    check(run, model, data, kl=more.get("loss_type") is None)
    log = (run.output_dir / "log.txt").read_text()
    assert "could not be measured" not in log
    assert ("one sample a row: " + SINGLE in log) is single
    assert "18 images, for which 180 tokens stand, in 12 of the rows" in log


@pytest.fixture(scope="module")
def whole(given: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run."""
    return forge.kto(**given, keep_full_state=True, ckpt_output_dir=tmp_path_factory.mktemp("whole") / "run").output_dir


@pytest.mark.slow
def test_other_references(model: Path, tmp_path: Path) -> None:
    """Stored, without its adapter and as a second model an adapted model's reference is the same; one that moves is not."""
    data = pictures.rated(tmp_path, 12)
    given = GIVEN | {"model_path": str(model), "data_path": str(data), "max_steps": 2, "validation_split": 0.0}

    def run(name: str, **more: Any) -> forge.RunResult:
        return forge.kto(**given, **more, ckpt_output_dir=tmp_path / name)

    def losses(name: str, **more: Any) -> list[float]:
        return figures(run(name, **more).output_dir)

    stored, off, live = (losses(kind, adapter="lora", lora_r=4, reference=kind) for kind in ("stored", "adapter_off", "live"))
    assert stored == pytest.approx(off, rel=1e-6)
    assert stored == pytest.approx(live, rel=1e-6)
    whole, moving = losses("whole"), run("moving", reference="moving", reference_sync_steps=1)
    assert figures(moving.output_dir)[0] == pytest.approx(whole[0], rel=1e-6)
    assert figures(moving.output_dir)[1] > whole[1] + 1e-3
    other = str(moving.model_dir)
    stored, live = (losses(f"other_{kind}", reference=kind, reference_path=other) for kind in ("stored", "live"))
    assert stored == pytest.approx(live, rel=1e-6)
    assert abs(stored[0] - whole[0]) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ci_keeps([], ["ddp", "fsdp2"]))
def test_two_ranks(strategy: str, given: dict[str, Any], tmp_path: Path) -> None:
    """Divided it trains as on one rank, also where a rank's rows have no images, or it has none in the end."""
    data = pictures.rated(tmp_path, 12, images=2)
    settings = given | {"data_path": str(data), "effective_batch_size": 3, "strategy": strategy}
    assert_two_ranks_as_one("kto", settings, tmp_path, ("loss", "kl", "grad_norm", "eval_loss", "eval_kl"), absolute=1e-6)


@pytest.mark.lane
@pytest.mark.slow
def test_a_killed_run(given: dict[str, Any], whole: Path, tmp_path: Path) -> None:
    """Killed in its second step and started again it ends with the same bits."""
    settings = given | {"full_state_every_steps": 1, "ckpt_output_dir": str(tmp_path / "run")}
    with pytest.raises(RuntimeError, match="status -9"):
        run_on_ranks(run_verb_killed, 1, "kto", settings, str(tmp_path), 1, joined=False)
    run_on_ranks(run_verb, 1, "kto", settings, joined=False)
    assert "resuming after step 1" in (tmp_path / "run" / "log.txt").read_text()
    assert untimed(tmp_path / "run") == untimed(whole)
    assert weights(tmp_path / "run") == weights(whole)


def test_images_within_answers(model: Path, tmp_path: Path) -> None:
    """A mismatch has its prompt's images and those of the answer that it is given, in their places; errors name both rows."""
    for seed in range(3):
        pictures.picture(seed).save(tmp_path / f"{seed}.png")

    def asked(image: str, text: str) -> dict[str, Any]:
        return {"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": text}]}

    def said(text: str) -> dict[str, Any]:
        return {"role": "assistant", "content": text}

    rows = [
        {"prompt": [asked("0.png", "what?")], "completion": [said("a plum")], "label": True},
        {"prompt": [asked("1.png", "and?")], "completion": [said("see"), asked("2.png", "so?"), said("no")], "label": False},
    ]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    store = forge_data.prepare(data, model, tmp_path / "store", media=True, progress=False)
    items = Items(store).with_media(forge_data.MediaInputs(model), "lines")
    batch = items.batch([0, 1])
    for found, answers in ((batch.completions, rows), (batch.mismatched, rows[::-1])):
        ends = found.cu_seqlens.tolist()
        for at, (row, other, arrays) in enumerate(zip(rows, answers, found.media_inputs(), strict=True)):
            ids, made = pictures.read(model, tmp_path, row["prompt"] + other["completion"])
            assert found.input_ids[ends[at] : ends[at + 1]].tolist() == ids
            del made["attention_mask"]  # all ones, which a row's documents need not
            assert {name: array.tolist() for name, array in arrays.items()} == {
                name: array.tolist() for name, array in made.items()
            }
    assert items.media_counts[:, 0].tolist() == [1, 2]
    pictures.picture(3).save(tmp_path / "2.png")
    with pytest.raises(forge_data.DataError, match=r"rows\.jsonl:1, with the answer of rows\.jsonl:2: .*2\.png"):
        items.batch([0]).mismatched.media_inputs()


@pytest.mark.parametrize(
    ("more", "refusal"),
    [
        ({"backend": "trl", "validation_split": 0}, "backend=trl and rows with images.*text alone"),
    ],
)
def test_what_cannot_have_images(
    more: dict[str, Any], refusal: str, given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One error before a model is loaded, and no run directory."""
    monkeypatch.setattr("forge.run._run.load_with_attention", lambda *_, **__: pytest.fail("a model is loaded"))
    with pytest.raises(forge.ForgeError, match=refusal) as caught:
        forge.kto(**given | more, ckpt_output_dir=tmp_path / "run")
    assert caught.value.exit_status == 2
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("packing", ci_keeps(["auto"], ["auto", "off"]))
def test_the_memory_plan_counts_images(
    packing: str, given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of answers and mismatches, packed or in lines: steps take what was planned."""
    monkeypatch.setattr(_memory, "_SMALL", 0)
    forge.kto(**given | {"max_steps": 2}, packing=packing, ckpt_output_dir=tmp_path / "run")
    about = json.loads((tmp_path / "run" / "memory.json").read_text())
    phases = {phase["name"]: phase for phase in about["phases"]}
    measured = phases["first steps"]["measured"]
    assert phases["first steps"]["planned"] == pytest.approx(measured, rel=0.01)
    assert phases["step"]["planned"] >= 0.999 * measured
    assert "not counted" not in str(about["notes"])
