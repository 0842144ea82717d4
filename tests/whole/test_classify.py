"""`forge.classify`: labelled rows → a sequence classifier that plain transformers (or PEFT) uses, with exact losses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import forge

from ..ranks import run_on_ranks
from .conftest import FRUITS, write_rows
from .verbs import run_verb

SHORT: dict[str, Any] = {
    "max_steps": 6,
    "effective_batch_size": 6,
    "max_tokens_per_gpu": 128,
    "learning_rate": 1e-2,
    "logging_steps": 100,
    "lr_scheduler": "constant",
}
COLOURS = ("red", "green", "blue")


def rows(number: int = 24, *, several: bool = False, first: int = 0) -> list[dict[str, Any]]:
    """Ragged texts that name their colour; with `several` conversations with a list of labels."""
    made: list[dict[str, Any]] = []
    for index in range(first, first + number):
        text = f"the {FRUITS[index % 8]} number {index} is " + "very " * (index % 5) + COLOURS[index % 3]
        if several:
            turns = [{"role": "user", "content": text}, {"role": "assistant", "content": "so it is"}]
            made.append({"messages": turns, "labels": [COLOURS[index % 3], *(["very"] if index % 5 else [])][: index % 4]})
        else:
            made.append({"text": text, "label": COLOURS[index % 3]})
    return made


def losses(model: Any, tokenizer: Any, texts: list[str], targets: torch.Tensor) -> list[float]:
    """transformers' own loss of each text, alone."""
    found = []
    for text, target in zip(texts, targets, strict=True):
        ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
        with torch.no_grad():
            found.append(model(input_ids=ids, labels=target[None]).loss.item())
    return found


@pytest.fixture(scope="module")
def trained(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run on one class a text, in one process, from a file."""
    folder = tmp_path_factory.mktemp("classify")
    data, held_out = write_rows(folder / "train.jsonl", rows()), write_rows(folder / "eval.jsonl", rows(9, first=30))
    return forge.classify(
        model_path=model_dir, data_path=data, eval_data_path=held_out, ckpt_output_dir=folder / "run", **SHORT
    )


def test_plain_transformers_uses_it(trained: Any) -> None:
    """The pipeline of transformers names the labels, its own loss is the run's (1e-6), and accuracy and macro F1 are those
    of its predictions.
    """
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

    where = str(trained.model_dir)
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(where), AutoTokenizer.from_pretrained(where)
    assert model.config.id2label == {0: "blue", 1: "green", 2: "red"}
    assert model.config.label2id == {"blue": 0, "green": 1, "red": 2}
    assert model.config.problem_type == "single_label_classification"
    held_out = rows(9, first=30)
    targets = torch.tensor([model.config.label2id[row["label"]] for row in held_out])
    texts = [row["text"] for row in held_out]
    after = trained.eval_after
    assert after["eval_loss"] == pytest.approx(np.mean(losses(model, tokenizer, texts, targets)), rel=1e-6)
    assert after["eval_loss_samples"] == 9
    named = [found["label"] for found in pipeline("text-classification", where)(texts, batch_size=4)]
    guessed = np.array([model.config.label2id[name] for name in named])
    assert after["eval_accuracy"] == pytest.approx((guessed == targets.numpy()).mean())
    pairs = [(guessed == c, targets.numpy() == c) for c in range(3)]
    assert after["eval_f1"] == pytest.approx(
        np.mean([2 * (g & t).sum() / (g.sum() + t.sum()) for g, t in pairs if (g | t).any()])
    )
    assert after["eval_loss"] < trained.eval_before["eval_loss"]


@pytest.mark.slow
def test_several_labels_by_an_adapter(model_dir: Path, tmp_path: Path) -> None:
    """LoRA on conversations with any number of labels: loaded back by plain PEFT with the config.json beside the adapter,
    its loss is the run's; and so it is once the adapter is merged.
    """
    from peft import PeftModel
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    held_out = rows(8, several=True, first=30)
    run = forge.classify(
        model_path=model_dir,
        data_path=rows(several=True),
        eval_data_path=held_out,
        ckpt_output_dir=tmp_path / "run",
        adapter="lora",
        **SHORT,
    )
    config = AutoConfig.from_pretrained(run.model_dir)
    assert config.problem_type == "multi_label_classification"
    assert list(config.label2id) == ["blue", "green", "red", "very"]
    base = AutoModelForSequenceClassification.from_pretrained(model_dir, config=config)
    tokenizer = AutoTokenizer.from_pretrained(run.model_dir)
    texts = [tokenizer.apply_chat_template(row["messages"], tokenize=False) for row in held_out]
    targets = torch.tensor([[float(name in row["labels"]) for name in config.label2id] for row in held_out])
    adapted = PeftModel.from_pretrained(base, run.model_dir).eval()
    assert run.eval_after["eval_loss"] == pytest.approx(np.mean(losses(adapted, tokenizer, texts, targets)), rel=1e-5)
    merged = forge.export(tmp_path / "run", merge=True)
    plain = AutoModelForSequenceClassification.from_pretrained(merged)
    assert plain.config.id2label == config.id2label
    assert run.eval_after["eval_loss"] == pytest.approx(np.mean(losses(plain, tokenizer, texts, targets)), rel=1e-4)
    assert "text-classification" in (merged / "README.md").read_text()


def figures(path: Path) -> list[dict[str, float]]:
    """Loss, accuracy and F1 of every line of a run's metrics."""
    names = ("loss", "accuracy", "f1", "eval_loss", "eval_accuracy", "eval_f1")
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [{name: line[name] for name in names if name in line} for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize(
    "several", [pytest.param(False, id="one class"), pytest.param(True, id="several labels", marks=pytest.mark.lane)]
)
def test_any_division_gives_the_same_losses(model_dir: Path, tmp_path: Path, several: bool) -> None:
    """Packed, one text at a time, and on two ranks: the same losses and figures in every step, within 1e-5."""
    data = write_rows(tmp_path / "rows.jsonl", rows(several=several))
    given = {"model_path": str(model_dir), "data_path": str(data), "validation_split": 0.25, **SHORT, "max_steps": 3}
    forge.classify(**given, ckpt_output_dir=tmp_path / "packed")
    expected = figures(tmp_path / "packed")
    forge.classify(**given | {"packing": "off", "max_tokens_per_gpu": 80}, ckpt_output_dir=tmp_path / "alone")
    two = {**given, "ckpt_output_dir": str(tmp_path / "two"), "strategy": "ddp"}
    run_on_ranks(run_verb, 2, "classify", two, joined=False)
    for other in ("alone", "two"):
        found = figures(tmp_path / other)
        assert len(found) == len(expected) == 5
        for one, same in zip(found, expected, strict=True):
            assert one == pytest.approx(same, rel=1e-5), other


@pytest.mark.slow
def test_a_classifier_goes_on(trained: Any, tmp_path: Path) -> None:
    """A classifier's own labels are kept, in its order, though the rows lack one; names may be given for its outputs."""
    begun = forge.classify(
        model_path=trained.model_dir,
        data_path=[row for row in rows() if row["label"] != "green"],
        eval_data_path=rows(9, first=30),
        ckpt_output_dir=tmp_path / "more",
        **SHORT | {"max_steps": 1},
    )
    assert begun.eval_before["eval_loss"] == pytest.approx(trained.eval_after["eval_loss"], rel=1e-6)
    numbered = [{"text": row["text"], "label": COLOURS.index(row["label"])} for row in rows(12)]
    named = forge.classify(
        model_path=trained.model_dir,
        data_path=numbered,
        labels=["rot", "gruen", "blau"],
        ckpt_output_dir=tmp_path / "named",
        **SHORT | {"max_steps": 1},
    )
    config = json.loads((named.model_dir / "config.json").read_text())
    assert config["id2label"] == {"0": "rot", "1": "gruen", "2": "blau"}
    with pytest.raises(forge.dist.ModelError, match=r"a classifier with 3 labels .*blue, green, red.* 2 are wanted"):
        forge.classify(
            model_path=trained.model_dir, data_path=rows(), labels=["a", "b"], ckpt_output_dir=tmp_path / "no", **SHORT
        )
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    ("made", "settings", "message"),
    [
        ([{"text": "a", "label": "x"}] * 3, {}, r"rows.jsonl:1 and every other row \(3\) has the label 'x'"),
        ([{"text": "a", "labels": []}] * 3, {}, r"rows.jsonl:1 and every other row \(3\) has no label"),
        ([{"text": "a", "label": "x"}, {"text": "b", "label": "y"}], {"labels": ["x", "z"]}, "rows.jsonl:2: the label 'y' is"),
        ([{"text": "a", "label": "x"}, {"text": "b", "labels": ["y"]}], {}, "rows.jsonl:2 has labels, and .*rows.jsonl:1 has"),
        (
            [{"text": "a", "labels": ["x"]}, {"text": "b", "labels": ["x", "y"]}],
            {"problem_type": "single_label_classification"},
            "rows.jsonl:2: has 2 labels",
        ),
        ([{"text": "a", "label": True}], {}, "rows.jsonl:1: field label is true, which is no label: write it as a text"),
        ([{"text": "a", "label": "x", "labels": ["x"]}], {}, "rows.jsonl:1 has label beside labels"),
        ([{"text": "a", "prompt": "b"}], {}, "rows.jsonl:1 has the fields 'text', 'prompt', and no label"),
        ([{"prompt": "a", "label": "x"}], {}, "rows.jsonl:1 has the fields .* none of them is a text"),
    ],
)
def test_bad_rows(made: list[dict[str, Any]], settings: dict[str, Any], message: str, model_dir: Path, tmp_path: Path) -> None:
    """One error that names file and row, before a model is loaded; nothing is left."""
    data = write_rows(tmp_path / "rows.jsonl", made)
    with pytest.raises(forge.data.DataError, match=message):
        forge.classify(model_path=model_dir, data_path=data, ckpt_output_dir=tmp_path / "run", **SHORT, **settings)
    assert not (tmp_path / "run").exists()
