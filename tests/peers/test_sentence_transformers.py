"""sentence-transformers loads an export of `forge embed` as it is, and its own losses are those of the run's first step."""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import forge

from ..whole import pictures, test_images_of_embeddings as pictured
from ..whole.conftest import write_model, write_rows
from ..whole.test_embed import SHORT, embed, labelled, rows

sentence_transformers = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")

PREFIXES = {"query_prefix": "query: ", "document_prefix": "passage: "}
TEXTS = ["what colour has plum 3?", "a b c d e f g", "x"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny chat model."""
    return write_model(tmp_path_factory.mktemp("model"))


def first_loss(run: Path) -> float:
    """Loss of the first step in metrics.jsonl."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return next(line["loss"] for line in lines if "loss" in line)


@pytest.mark.parametrize("adapter", ["none", "lora"])
@pytest.mark.parametrize("pooling", ["last", "mean", "cls"])
def test_it_embeds_as_the_run_did(adapter: str, pooling: str, folder: Path, tmp_path: Path) -> None:
    """In a padded batch, with the prompt of the file: each embedding is plain transformers' of that text alone, to 1e-5."""
    from peft import PeftModel
    from transformers import AutoModel, AutoTokenizer

    data = write_rows(tmp_path / "rows.jsonl", rows())
    result = forge.embed(
        model_path=folder, data_path=data, ckpt_output_dir=tmp_path / "run", adapter=adapter, pooling=pooling, max_seq_len=64,
        **PREFIXES, **SHORT,
    )  # fmt: skip
    theirs = sentence_transformers.SentenceTransformer(str(result.model_dir), device="cpu")
    assert theirs.max_seq_length == 64
    found = theirs.encode(TEXTS, prompt_name="query", convert_to_tensor=True)
    plain: Any = AutoModel.from_pretrained(folder if adapter == "lora" else result.model_dir)
    plain = PeftModel.from_pretrained(plain, str(result.model_dir)) if adapter == "lora" else plain
    tokenizer = AutoTokenizer.from_pretrained(result.model_dir)
    wanted = torch.stack([embed(plain.eval(), tokenizer, "query: " + text, pooling) for text in TEXTS])
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("adapter", ["none", "lora"])
@pytest.mark.parametrize("name", ["gemma3", "llava"])
def test_it_embeds_images_as_the_run_did(adapter: str, name: str, tmp_path: Path) -> None:
    """Strings, images, objects and messages, with the prompt of the file: plain transformers' of that text alone, to 1e-6."""
    from peft import PeftModel
    from transformers import AutoModel

    model = pictures.save(name, tmp_path / "model")
    result = forge.embed(
        model_path=model, data_path=pictured.pairs(tmp_path), ckpt_output_dir=tmp_path / "run", adapter=adapter,
        query_prefix="find it", **SHORT | {"max_tokens_per_gpu": 192}, save_dtype=None if adapter == "lora" else "float32",
    )  # fmt: skip
    exact = {"dtype": torch.float32}
    theirs = sentence_transformers.SentenceTransformer(str(result.model_dir), device="cpu", model_kwargs=exact)
    plain: Any = AutoModel.from_pretrained(model if adapter == "lora" else result.model_dir, dtype=torch.float32)
    plain = PeftModel.from_pretrained(plain, str(result.model_dir)) if adapter == "lora" else plain
    image, part = pictures.picture(3), {"type": "image", "image": "3.png"}
    image.save(tmp_path / "3.png")
    texts = [
        ("a red fruit", "a red fruit"),
        (image, [part]),
        ({"image": image, "text": "a fruit"}, [part, {"type": "text", "text": "a fruit"}]),
        ([{"role": "user", "content": [{"type": "image", "image": image}]}], [part]),
    ]
    for given, content in texts:
        for prompt in ("query", "document"):
            system = [{"role": "system", "content": "find it"}] if prompt == "query" else []
            ids, made = pictures.read(model, tmp_path, [*system, {"role": "user", "content": content}])
            with torch.no_grad():
                hidden = plain.eval()(input_ids=torch.tensor([ids]), **made).last_hidden_state[0, -1]
            found = theirs.encode([given], prompt_name=prompt, convert_to_tensor=True)[0]
            torch.testing.assert_close(found, hidden / hidden.norm(), rtol=0, atol=1e-6)


def test_its_losses_are_those_of_a_step(folder: Path, tmp_path: Path) -> None:
    """MultipleNegativesRankingLoss and BatchAllTripletLoss over all rows are the first step's loss, to 1e-5."""
    plain = tmp_path / "plain"
    shutil.copytree(folder, plain)
    # A model with a chat template that has no files of its own is given texts as messages by its versions from 6 on.
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        file = plain / name
        if name.endswith(".jinja"):
            file.unlink(missing_ok=True)
        else:
            config = json.loads(file.read_text())
            config.pop("chat_template", None)
            file.write_text(json.dumps(config))
    inner = "sentence_transformers.sentence_transformer"
    losses, modules = (importlib.import_module(f"{inner}.{name}") for name in ("losses", "modules"))
    parts = [modules.Transformer(str(plain)), modules.Pooling(32, pooling_mode="mean")]
    model = sentence_transformers.SentenceTransformer(modules=parts, device="cpu").eval()

    def features(texts: list[str]) -> dict[str, torch.Tensor]:
        return model.preprocess(texts)

    pairs = [{**row, "negative": f"not {row['positive']}"} for row in rows(12)]
    given = {"model_path": folder, "pooling": "mean", **SHORT, "max_steps": 1, "effective_batch_size": 12}
    columns = [features([row[name] for row in pairs]) for name in ("query", "positive", "negative")]
    data = write_rows(tmp_path / "pairs.jsonl", pairs)
    forge.embed(**given, data_path=data, ckpt_output_dir=tmp_path / "pairs")
    with torch.no_grad():
        wanted = losses.MultipleNegativesRankingLoss(model, scale=20.0)(columns, torch.zeros(12))
    assert first_loss(tmp_path / "pairs") == pytest.approx(wanted.item(), rel=1e-5)

    texts = labelled(12)
    numbers = torch.tensor([("red", "green", "blue").index(row["label"]) for row in texts])
    data = write_rows(tmp_path / "texts.jsonl", texts)
    forge.embed(**given, data_path=data, ckpt_output_dir=tmp_path / "texts", loss="batch_all_triplet")
    model.append(modules.Normalize())
    with torch.no_grad():
        wanted = losses.BatchAllTripletLoss(model, margin=5.0)([features([row["text"] for row in texts])], numbers)
    assert first_loss(tmp_path / "texts") == pytest.approx(wanted.item(), rel=1e-4)
