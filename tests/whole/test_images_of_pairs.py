"""Preferences with images: their runs are those of plain transformers, one completion a forward with its processor's arrays."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.nn.functional import logsigmoid

import forge
import forge_algos
import forge_data
import forge_packing
from forge.tasks import _media
from forge_data.media import _inputs

from ..lanes import ci_keeps
from ..ranks import run_on_ranks
from . import modalities, pictures, reference
from .starts import untimed, weights
from .three_steps import SETTINGS, figures
from .verbs import assert_two_ranks_as_one, run_verb, run_verb_killed

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

# Exports with images are compared in test_images.py, those of each verb in test_verbs.py.
pytestmark = pytest.mark.usefixtures("unchecked_exports")

GIVEN: dict[str, Any] = {name: value for name, value in SETTINGS.items() if name != "moe_aux_loss"} | {
    "effective_batch_size": 6,
    "max_tokens_per_gpu": 160,
    "validation_split": 0.2,
}
BETA, GAMMA = 0.4, 0.3
Terms = list[tuple[torch.Tensor, int]]
"""Of the chosen and the rejected answer the log-probability and the number of tokens."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that the runs train."""
    return pictures.save("gemma3", tmp_path_factory.mktemp("gemma3"))


@pytest.fixture(scope="module")
def adapter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of the language part that is not zero."""
    torch.manual_seed(3)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=r".*language_model.*(q_proj|v_proj|down_proj)", task_type="CAUSAL_LM")
    made = get_peft_model(modalities.plain(model), config)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.1 * torch.randn_like(parameter))
    made.save_pretrained(where := tmp_path_factory.mktemp("adapter"))
    return where


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 pairs."""
    return pictures.pairs(tmp_path_factory.mktemp("pairs"))


@pytest.fixture(scope="module")
def given(model: Path, data: Path) -> dict[str, Any]:
    """Settings of three steps."""
    return {"model_path": str(model), "data_path": str(data), **GIVEN}


def pairs_of(store: forge_data.TokenStore, data: Path, model: Path) -> list[list[reference.Sample]]:
    """Both samples of each pair of a store, with what the processor makes of the row; their ids must be the store's."""
    tokenizer, rows = forge_data.load_tokenizer(model), [json.loads(line) for line in data.read_text().splitlines()]
    found = []
    for both in store.pairs.tolist():
        row, sides = rows[int(store.source(both[0]).rpartition(":")[2]) - 1], []
        for at, side in zip(both, ("chosen", "rejected"), strict=True):
            ids, made = pictures.read(model, data.parent, row["prompt"] + row[side])
            assert ids == store[at].input_ids.tolist()
            learned = store[at].input_ids[store[at].labels != -100]
            assert tokenizer.decode(learned) == f"{row[side][0]['content']}<end>"
            parts = [part for message in row["prompt"] for part in message["content"] if isinstance(part, dict)]
            assert len(store[at].media) == sum(part["type"] != "text" for part in parts)
            sides.append(reference.Sample(ids, store[at].labels.tolist(), made))
        found.append(sides)
    return found


def terms(plain: nn.Module, pair: list[reference.Sample]) -> Terms:
    """One completion a forward."""
    return [(-loss, count) for loss, count in (reference.sample_loss(plain, side) for side in pair)]


def dpo(step: list[Terms], references: list[Terms]) -> torch.Tensor:
    """Sigmoid; the mean over the step's pairs (arXiv 2305.18290, equation 7)."""
    ratios = [
        (chosen[0] - other[0][0]) - (rejected[0] - other[1][0])
        for (chosen, rejected), other in zip(step, references, strict=True)
    ]
    return -torch.stack([logsigmoid(BETA * ratio) for ratio in ratios]).mean()


def orpo(step: list[Terms], _references: Any) -> torch.Tensor:
    """The likelihood over the step's chosen tokens, and the odds over its pairs (arXiv 2403.07691, equations 4 to 7)."""

    def log_odds(term: tuple[torch.Tensor, int]) -> torch.Tensor:
        mean = term[0] / term[1]
        return mean - torch.log1p(-mean.exp())

    likelihood = -sum(chosen[0] for chosen, _ in step) / sum(chosen[1] for chosen, _ in step)
    odds = torch.stack([logsigmoid(log_odds(chosen) - log_odds(rejected)) for chosen, rejected in step]).mean()
    return likelihood - BETA * odds


def simpo(step: list[Terms], _references: Any) -> torch.Tensor:
    """Log-probabilities a token, with a margin (arXiv 2405.14734, equation 6)."""
    gaps = [BETA * (chosen[0] / chosen[1] - rejected[0] / rejected[1]) - GAMMA for chosen, rejected in step]
    return -torch.stack([logsigmoid(gap) for gap in gaps]).mean()


def oracle(run: Path, plain: Any, loss: Callable[..., torch.Tensor], data: Path, model: Path) -> tuple[float, list[Any]]:
    """Held-out loss before the first step, and (loss, gradient norm) of each step, of a plain model."""
    train, held_out = forge_data.TokenStore.open(run / "data" / "train").split(0.2, seed=42)
    plan = forge_packing.BatchPlan.load(run / "plan" / "plan.npz")
    pairs, others = (pairs_of(store, data, model) for store in (train, held_out))
    with torch.no_grad():
        references = [terms(plain, pair) for pair in pairs]
        held = [terms(plain, pair) for pair in others]
        before = float(loss(held, held))

    def of_step(taken: list[int]) -> torch.Tensor:
        return loss([terms(plain, pairs[at]) for at in taken], [references[at] for at in taken])

    return before, pictures.steps(plain, plan, of_step)


LOSSES: dict[str, Any] = {"dpo": dpo, "orpo": orpo, "simpo": simpo}
OWN: dict[str, dict[str, Any]] = {verb: {"beta": BETA} for verb in LOSSES}
OWN["simpo"]["gamma"] = GAMMA


@pytest.mark.parametrize(
    ("verb", "adapted", "more"),
    [
        ("dpo", False, {}),
        ("dpo", True, {}),
        ("dpo", False, {"reference": "live", "packing": "off", "activation_checkpointing": True}),
        ("orpo", False, {}),
        # With an adapter a sample's log-probability is what changes, not what a verb makes of it.
        pytest.param("orpo", True, {}, marks=pytest.mark.lane),
        # As ORPO it has no reference; its formula is compared in forge-algos.
        pytest.param("simpo", False, {}, marks=pytest.mark.lane),
        pytest.param("simpo", True, {}, marks=pytest.mark.lane),
        pytest.param("dpo", True, {"reference": "live"}, marks=pytest.mark.lane),
    ],
)
def test_losses_are_those_of_plain_transformers(
    verb: str,
    adapted: bool,
    more: dict[str, Any],
    given: dict[str, Any],
    adapter: Path,
    model: Path,
    data: Path,
    tmp_path: Path,
) -> None:
    """Losses, gradient norms and the held-out loss, of all weights and of an adapter."""
    more = more | ({"adapter": "lora", "adapter_path": str(adapter)} if adapted else {})
    run = getattr(forge, verb)(**given | OWN[verb] | more, ckpt_output_dir=tmp_path / "run")
    plain = modalities.plain(model)
    plain = PeftModel.from_pretrained(plain, adapter, is_trainable=True) if adapted else plain
    before, expected = oracle(run.output_dir, plain, LOSSES[verb], data, model)
    assert run.eval_before["eval_loss"] == pytest.approx(before, rel=1e-5)
    assert figures(run.output_dir) == pytest.approx([loss for loss, _ in expected], rel=1e-5)
    assert figures(run.output_dir, "grad_norm") == pytest.approx([norm for _, norm in expected], rel=1e-4)
    assert run.eval_after["eval_loss"] < before
    assert "could not be measured" not in (run.output_dir / "log.txt").read_text()


def test_images_that_are_padded(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor that pads images to the largest of a batch has pairs too; a model is tried on samples of unlike shapes."""
    tried, pack_media = [], forge_algos.pack_media

    def spy(model: Any, documents: Any, **options: Any) -> Any:
        tried.append((documents, options["join"]([each.inputs for each in documents])))
        return pack_media(model, documents, **options)

    monkeypatch.setattr(forge_algos, "pack_media", spy)
    model = pictures.save("llava-next", tmp_path / "model")
    settings = GIVEN | {"model_path": str(model), "data_path": str(data), "max_tokens_per_gpu": 640}
    run = forge.dpo(**settings, beta=BETA, ckpt_output_dir=tmp_path / "run")
    before, expected = oracle(run.output_dir, modalities.plain(model), dpo, data, model)
    assert run.eval_before["eval_loss"] == pytest.approx(before, rel=1e-5)
    assert figures(run.output_dir) == pytest.approx([loss for loss, _ in expected], rel=1e-5)
    assert figures(run.output_dir, "grad_norm") == pytest.approx([norm for _, norm in expected], rel=1e-4)
    for (short, large, *_), padded in tried:
        pieces = [each["pixel_values"].shape[1] for each in (short.inputs, large.inputs, *padded)]
        assert pieces[0] < pieces[1] < pieces[2] == pieces[3]


@pytest.fixture(scope="module")
def whole(given: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of DPO."""
    return forge.dpo(**given, keep_full_state=True, ckpt_output_dir=tmp_path_factory.mktemp("whole") / "run").output_dir


@pytest.fixture(scope="module")
def few(given: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Settings of two steps on twelve pairs, none of them held out."""
    data = pictures.pairs(tmp_path_factory.mktemp("few"), 12)
    return given | {"data_path": str(data), "max_steps": 2, "validation_split": 0.0}


def test_references_with_an_adapter(few: dict[str, Any], tmp_path: Path) -> None:
    """Stored, without its adapter and as a second model, the reference of an adapted model is the same."""
    found = []
    for kind in ("stored", "adapter_off", "live"):
        run = forge.dpo(**few, adapter="lora", lora_r=4, reference=kind, ckpt_output_dir=tmp_path / kind)
        found.append(figures(run.output_dir))
    assert found[0] == pytest.approx(found[1], rel=1e-6)
    assert found[0] == pytest.approx(found[2], rel=1e-6)


def test_a_reference_that_moves(given: dict[str, Any], whole: Path, tmp_path: Path) -> None:
    """It is scored with images before each step: in the first two it has not moved."""
    run = forge.dpo(**given, reference="moving", reference_sync_steps=2, ckpt_output_dir=tmp_path / "run").output_dir
    assert figures(run)[:2] == pytest.approx(figures(whole)[:2], rel=1e-6)
    assert figures(run)[2] > figures(whole)[2]


def test_another_model_as_the_reference(few: dict[str, Any], tmp_path: Path) -> None:
    """A model at a path of its own computes images too."""
    trained = forge.orpo(**few | {"max_steps": 1}, ckpt_output_dir=tmp_path / "other").model_dir
    found = [
        forge.dpo(**few, reference=kind, reference_path=str(trained), ckpt_output_dir=tmp_path / kind)
        for kind in ("stored", "live")
    ]
    stored, live = (figures(each.output_dir) for each in found)
    assert stored == pytest.approx(live, rel=1e-6)
    assert abs(stored[0] - 0.6931) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verb", "strategy"), ci_keeps([("dpo", "fsdp2")], [("dpo", "ddp"), ("orpo", "fsdp2"), ("dpo", "fsdp2")])
)
def test_two_ranks(verb: str, strategy: str, given: dict[str, Any], tmp_path: Path) -> None:
    """Divided it trains as on one rank, also where a rank's rows have no images, or it has none in the end."""
    data = pictures.pairs(tmp_path, 12, images=2)
    settings = given | {"data_path": str(data), "effective_batch_size": 3, "strategy": strategy}
    assert_two_ranks_as_one(verb, settings, tmp_path, ("loss", "grad_norm", "eval_loss"))


@pytest.mark.lane
@pytest.mark.slow
def test_a_killed_run(given: dict[str, Any], whole: Path, tmp_path: Path) -> None:
    """Killed in its second step and started again it ends with the same bits."""
    settings = given | {"full_state_every_steps": 1, "ckpt_output_dir": str(tmp_path / "run")}
    with pytest.raises(RuntimeError, match="status -9"):
        run_on_ranks(run_verb_killed, 1, "dpo", settings, str(tmp_path), 1, joined=False)
    run_on_ranks(run_verb, 1, "dpo", settings, joined=False)
    assert "resuming after step 1" in (tmp_path / "run" / "log.txt").read_text()
    assert untimed(tmp_path / "run") == untimed(whole)
    assert weights(tmp_path / "run") == weights(whole)


@pytest.mark.parametrize(
    ("verb", "more", "refusal"),
    [
        ("dpo", {"backend": "trl", "validation_split": 0}, "backend=trl and rows with images.*text alone"),
        ("orpo", {"learn_prompt": True}, "learn_prompt and rows with images.*Leave learn_prompt out"),
    ],
)
def test_what_cannot_have_images(
    verb: str, more: dict[str, Any], refusal: str, given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One error before a model is loaded, and no run directory."""
    monkeypatch.setattr("forge.run._run.load_with_attention", lambda *_, **__: pytest.fail("a model is loaded"))
    with pytest.raises((forge.ForgeError, forge_data.ForgeDataError), match=refusal) as caught:
        getattr(forge, verb)(**given | more, ckpt_output_dir=tmp_path / "run")
    assert caught.value.exit_status == 2
    assert not (tmp_path / "run").exists()


def test_the_log_counts_images(whole: Path) -> None:
    """An image of a prompt is counted for both answers, and the log says so."""
    log = (whole / "log.txt").read_text()
    store = forge_data.TokenStore.open(whole / "data" / "train").split(0.2, seed=42)[0]
    images, tokens = store.media_counts.sum(axis=0).tolist()
    assert f"; {images} images, counted in each of a row's samples, for which {tokens} tokens stand, in " in log


def test_what_is_done_once(whole: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked with and without the tokenizer, a run loads one processor, and makes the arrays of two short samples once."""
    done: list[str] = []
    load, call = _inputs.load_processor, forge_data.MediaInputs.__call__
    monkeypatch.setattr(_inputs, "load_processor", lambda *given: done.append("processor") or load(*given))
    monkeypatch.setattr(forge_data.MediaInputs, "__call__", lambda *given: done.append("sample") or call(*given))
    monkeypatch.setattr(_media, "_known", {})
    settings, tokenizer = SimpleNamespace(model=SimpleNamespace(model_path=str(model))), forge_data.load_tokenizer(model)
    items = SimpleNamespace(store=forge_data.TokenStore.open(whole / "data" / "train"))
    assert _media.media_join(settings, items.store)
    documents = _media.media_documents(settings, tokenizer, items, None)
    assert _media.media_documents(settings, tokenizer, items, None) is documents
    assert (len(documents), done) == (2, ["processor", "sample", "sample"])


def test_a_processor_whose_arrays_do_not_join(given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row would hold one sample, and no pair: one error before a model is loaded."""
    monkeypatch.setattr("forge.tasks._media._known", {})
    monkeypatch.setattr(forge_data.MediaInputs, "joins_of", lambda *_: False)
    monkeypatch.setattr("forge.run._run.load_with_attention", lambda *_, **__: pytest.fail("a model is loaded"))
    with pytest.raises(forge.SettingsError, match="pairs of answers with images: the processor .*with sft, or") as caught:
        forge.dpo(**given, ckpt_output_dir=tmp_path / "run")
    assert caught.value.exit_status == 2
    assert not (tmp_path / "run").exists()
