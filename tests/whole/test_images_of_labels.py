"""Classifiers of rows with images: runs are those of plain transformers, one text a forward with its processor's arrays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoProcessor

import forge
import forge_data
import forge_packing

from ..lanes import ci_keeps
from ..ranks import run_on_ranks
from . import pictures
from .conftest import write_rows
from .starts import metrics, untimed, weights
from .three_steps import SETTINGS, figures
from .verbs import assert_two_ranks_as_one, run_verb, run_verb_killed

GIVEN: dict[str, Any] = {name: value for name, value in SETTINGS.items() if name != "moe_aux_loss"} | {
    "effective_batch_size": 6,
    "max_tokens_per_gpu": 160,
    "validation_split": 0.2,
}
NAMES = ("apple", "cherry", "plum")
ALL: dict[str, Any] = {"freeze_vision_tower": False, "freeze_multi_modal_projector": False}


def save(directory: Path, **more: Any) -> Path:
    """A tiny classifier with three labels."""
    labels = {"id2label": dict(enumerate(NAMES)), "label2id": {name: number for number, name in enumerate(NAMES)}}
    return pictures.save("gemma3", directory, AutoModelForSequenceClassification, num_labels=3, **labels, **more)


def rows(folder: Path, number: int = 24, *, several: bool = False, images: int = 3) -> Path:
    """Conversations with no, one or two images, of one label; or of any number of labels, which depend on the number."""
    made = []
    for each in range(number):
        row = pictures.conversation(folder, each, (each + 1) % images)
        label = {"labels": [name for at, name in enumerate(NAMES) if each >> at & 1]} if several else {"label": NAMES[each % 3]}
        made.append(row | label)
    return write_rows(folder / "rows.jsonl", made)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The classifier that the runs train."""
    return save(tmp_path_factory.mktemp("gemma3"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 rows."""
    return rows(tmp_path_factory.mktemp("rows"))


@pytest.fixture(scope="module")
def given(model: Path, data: Path) -> dict[str, Any]:
    """Settings of three steps."""
    return {"model_path": str(model), "data_path": str(data), **GIVEN}


class Texts:
    """Texts of a store, as the model's processor reads them, and what they are."""

    def __init__(self, store: forge_data.PromptStore, data: Path, model: Path) -> None:
        lines = [json.loads(line) for line in data.read_text().splitlines()]
        self.rows = [lines[int(store.source(at).rpartition(":")[2]) - 1] for at in range(len(store))]
        self.given = [pictures.read(model, data.parent, row["messages"]) for row in self.rows]
        assert [ids for ids, _ in self.given] == [prompt.input_ids.tolist() for prompt in store]

    def loss(self, plain: Any, taken: list[int]) -> torch.Tensor:
        """transformers' own losses, one text a forward."""
        found = []
        for at in taken:
            ids, made = self.given[at]
            logits = plain(torch.tensor([ids]), use_cache=False, **made).logits
            if "label" in self.rows[at]:
                found.append(cross_entropy(logits, torch.tensor([NAMES.index(self.rows[at]["label"])])))
            else:
                wanted = torch.tensor([[float(name in self.rows[at]["labels"]) for name in NAMES]])
                found.append(binary_cross_entropy_with_logits(logits, wanted))
        return torch.stack(found).mean()


def plain_model(model: Path, *, trained: bool = False) -> Any:
    """The saved model as transformers itself loads it; its language part and its head are trainable, or all of it."""
    plain: Any = AutoModelForSequenceClassification.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    plain.requires_grad_(trained)
    for part in (plain.model.language_model, plain.score):
        part.requires_grad_(True)
    return plain


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("whole", {}),
        ("several", {}),
        pytest.param("adapter", {"packing": "off"}, marks=pytest.mark.slow),
        pytest.param("all", ALL, marks=pytest.mark.slow),
        ("projector", {"freeze_language_model": True, "freeze_multi_modal_projector": False, "max_tokens_per_gpu": 100}),
    ],
)
def test_losses_are_those_of_plain_transformers(
    kind: str, more: dict[str, Any], given: dict[str, Any], model: Path, data: Path, tmp_path: Path
) -> None:
    """Losses, gradient norms and held-out losses, of labels and of several, all weights and an adapter, other parts too."""
    if kind == "several":
        model, data = save(tmp_path / "model", problem_type="multi_label_classification"), rows(tmp_path, several=True)
        given = given | {"model_path": str(model), "data_path": str(data)}
    plain = plain_model(model, trained=kind == "all")
    if kind == "projector":  # and the new layer, which nothing else would teach
        plain.model.language_model.requires_grad_(False)
        plain.model.multi_modal_projector.requires_grad_(True)
    if kind == "adapter":
        plain = pictures.with_adapter(plain, lambda: plain_model(model), tmp_path / "adapter", "SEQ_CLS")
        more = more | {"adapter": "lora", "adapter_path": str(tmp_path / "adapter")}
    run = forge.classify(**given | more, ckpt_output_dir=tmp_path / "run")
    train, held_out = forge_data.PromptStore.open(run.output_dir / "data" / "train").split(0.2, seed=42)
    plan = forge_packing.BatchPlan.load(run.output_dir / "plan" / "plan.npz")
    texts, others = (Texts(store, data, model) for store in (train, held_out))

    def held() -> float:
        with torch.no_grad():
            return float(others.loss(plain, list(range(len(others.rows)))))

    before = held()
    expected = pictures.steps(plain, plan, lambda taken: texts.loss(plain, taken))
    measured = [line["eval_loss"] for line in metrics(run.output_dir) if "eval_loss" in line]
    assert measured[:2] == pytest.approx([before, held()], rel=1e-5)
    assert figures(run.output_dir) == pytest.approx([loss for loss, _ in expected], rel=1e-6)
    assert figures(run.output_dir, "grad_norm") == pytest.approx([norm for _, norm in expected], rel=1e-5)
    log = (run.output_dir / "log.txt").read_text()
    assert "could not be measured" not in log
    assert "images, for which" in log
    if kind == "whole":
        _uses_the_export(run, Path(run.model_dir), others, data)


def _uses_the_export(run: Any, export: Path, held_out: Texts, data: Path) -> None:
    """As docs/classification.md has it: the accuracy is the run's, in a padded batch too, and the card says how."""
    model, processor = AutoModelForSequenceClassification.from_pretrained(export), AutoProcessor.from_pretrained(export)
    named, asked = [], json.loads(json.dumps([row["messages"] for row in held_out.rows]))
    for messages in asked:
        for part in (part for message in messages if isinstance(message["content"], list) for part in message["content"]):
            pictures.load(part, data.parent, processor)
        inputs = processor.apply_chat_template(messages, tokenize=True, return_dict=True, return_tensors="pt")
        with torch.no_grad():
            named.append(model.config.id2label[int(model(**inputs).logits.argmax())])
    right = np.mean([name == row["label"] for name, row in zip(named, held_out.rows, strict=True)])
    assert right == pytest.approx(run.eval_after["eval_accuracy"])
    with_images = [messages for messages in asked if isinstance(messages[0]["content"], list)]
    batch = processor.apply_chat_template(
        with_images, tokenize=True, return_dict=True, return_tensors="pt", processor_kwargs={"padding": True}
    )
    with torch.no_grad():
        found = [model.config.id2label[number] for number in model(**batch).logits.argmax(-1).tolist()]
    assert found == [name for name, messages in zip(named, asked, strict=True) if messages in with_images]
    card = (forge.export(run.output_dir, run.output_dir.parent / "export") / "README.md").read_text()
    assert "AutoModelForSequenceClassification, AutoProcessor" in card


def test_a_text_beside_a_column_of_images(model: Path, tmp_path: Path) -> None:
    """A table of pictures and labels, some with a text, is trained; its adapter is loaded with the names and the processor."""
    made = []
    for number in range(12):
        file = tmp_path / f"{number}.png"
        pictures.picture(number).save(file)
        made.append({"image": str(file), "label": NAMES[number % 3]} | ({"text": "what is it?"} if number % 2 else {}))
    base = pictures.save("gemma3", tmp_path / "base")
    run = forge.classify(
        model_path=base, data_path=made, ckpt_output_dir=tmp_path / "run", adapter="lora", max_steps=1, effective_batch_size=4
    )
    config = AutoConfig.from_pretrained(run.model_dir)
    loaded = AutoModelForSequenceClassification.from_pretrained(base, config=config)
    PeftModel.from_pretrained(loaded, run.model_dir)
    AutoProcessor.from_pretrained(run.model_dir)
    assert tuple(config.id2label.values()) == NAMES
    card = (forge.export(run.output_dir, tmp_path / "export") / "README.md").read_text()
    assert "AutoConfig, AutoProcessor, AutoModelForSequenceClassification" in card


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ci_keeps(["fsdp2"], ["ddp", "fsdp2"]))
def test_two_ranks(strategy: str, given: dict[str, Any], tmp_path: Path) -> None:
    """Divided it trains as on one rank, also where a rank's rows have no images."""
    settings = given | {"data_path": str(rows(tmp_path, 12, images=2)), "effective_batch_size": 3, "strategy": strategy}
    assert_two_ranks_as_one("classify", settings, tmp_path, ("loss", "accuracy", "grad_norm", "eval_loss"))


@pytest.mark.lane
@pytest.mark.slow
def test_a_killed_run(given: dict[str, Any], tmp_path: Path) -> None:
    """Killed in its second step and started again it ends with the same bits."""
    whole, killed = (given | {"full_state_every_steps": 1, "ckpt_output_dir": str(tmp_path / name)} for name in ("a", "b"))
    run_on_ranks(run_verb, 1, "classify", whole, joined=False)
    with pytest.raises(RuntimeError, match="status -9"):
        run_on_ranks(run_verb_killed, 1, "classify", killed, str(tmp_path), 1, joined=False)
    run_on_ranks(run_verb, 1, "classify", killed, joined=False)
    assert untimed(tmp_path / "a") == untimed(tmp_path / "b")
    assert weights(tmp_path / "a") == weights(tmp_path / "b")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"freeze_vision_tower": False, "data_path": [{"text": "a", "label": "apple"}, {"text": "b", "label": "plum"}]},
         "no row of data_path has an image"),
        ({"adapter": "prefix"}, "virtual tokens move their places"),
        ({"data_path": [{"text": "<img>", "label": "apple"}, {"image": "PICTURE", "label": "plum"}]}, "'<img>' in its text"),
    ],
)  # fmt: skip
def test_refused(change: dict[str, Any], message: str, given: dict[str, Any], tmp_path: Path) -> None:
    """By the setting, or by file and row."""
    pictures.picture(1).save(tmp_path / "1.png")
    change = json.loads(json.dumps(change).replace("PICTURE", str(tmp_path / "1.png")))
    settings = {name: value for name, value in given.items() if name != "validation_split"} | change
    with pytest.raises((forge.SettingsError, forge_data.DataError), match=message):
        forge.classify(**settings, ckpt_output_dir=tmp_path / "run")


def test_a_family_without_a_classifier(given: dict[str, Any], tmp_path: Path) -> None:
    """transformers has no class of it: one error, before anything is read."""
    model = pictures.save("llava", tmp_path / "model")
    with pytest.raises(forge.dist.ModelError, match=r"llava gives no labels: .* no class \.\.\.ForSequenceClassification"):
        forge.classify(**{**given, "model_path": str(model)}, ckpt_output_dir=tmp_path / "run")
