"""Embeddings of texts with images or audio: runs are those of plain transformers, one text a forward with its processor."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy, normalize
from transformers import AutoModel, AutoProcessor

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
    "max_tokens_per_gpu": 192,
    "validation_split": 0.2,
}
ALL: dict[str, Any] = {"freeze_vision_tower": False, "freeze_multi_modal_projector": False}
TEMPERATURE = 0.05


def pairs(folder: Path, number: int = 24, *, kind: str = "image", images: int = 3) -> Path:
    """Questions with no, one or two images and answers of text, the other way round, and with hard negatives of either kind."""
    made: list[dict[str, Any]] = []
    for each in range(number):
        row = pictures.conversation(folder, each, (each + 1) % images, kind)
        query, answer = row["messages"][:1], f"{each} is " + "very " * (each % 4) + "red"
        hard = [{}, {"negative": answer + " not"}, {"negatives": [query[0]["content"], "none"]}][each % 3]
        made.append({"query": answer, "positive": query} if each % 4 == 3 else {"query": query, "positive": answer, **hard})
    return write_rows(folder / "pairs.jsonl", made)


def labelled(folder: Path, number: int = 12, images: int = 3) -> Path:
    """Conversations with no, one or two images, and their labels."""
    made = [pictures.conversation(folder, each, (each + 1) % images) | {"label": "ab"[each % 2]} for each in range(number)]
    return write_rows(folder / "labelled.jsonl", made)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Tiny models of `pictures`, each made once."""
    return cache(lambda name: pictures.save(name, tmp_path_factory.mktemp(name)))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 queries with their documents."""
    return pairs(tmp_path_factory.mktemp("pairs"))


@pytest.fixture(scope="module")
def given(saved: Callable[[str], Path], data: Path) -> dict[str, Any]:
    """Settings of three steps."""
    return {"model_path": str(saved("gemma3")), "data_path": str(data), **GIVEN}


def messages_of(text: Any) -> list[dict[str, Any]]:
    """A text as the chat template is given it: the user's message."""
    if isinstance(text, list) and "role" in text[0]:
        return text
    return [{"role": "user", "content": text}]


class Rows:
    """Queries and documents of a store, as the model's processor reads them."""

    def __init__(self, store: forge_data.PromptStore, data: Path, model: Path) -> None:
        lines = [json.loads(line) for line in data.read_text().splitlines()]
        rows = [lines[int(store.source(at).rpartition(":")[2]) - 1] for at in range(len(store))]
        self.texts = []
        for row, prompt in zip(rows, store, strict=True):
            hard = row.get("negatives", [row["negative"]] if "negative" in row else [])
            made = [pictures.read(model, data.parent, messages_of(text)) for text in (row["query"], row["positive"], *hard)]
            assert list(itertools.chain.from_iterable(ids for ids, _ in made)) == prompt.input_ids.tolist()
            self.texts.append(made)

    def loss(self, plain: Any, taken: list[int]) -> torch.Tensor:
        """InfoNCE among all documents of the rows, each text embedded alone: its last hidden state, of length 1."""

        def embed(text: Any) -> torch.Tensor:
            ids, made = text
            hidden = plain(input_ids=torch.tensor([ids]), **made).last_hidden_state
            return normalize(hidden[0, -1], dim=0)

        rows = [[embed(text) for text in self.texts[at]] for at in taken]
        queries = torch.stack([query for query, *_ in rows])
        documents = torch.stack([row[1] for row in rows] + [text for row in rows for text in row[2:]])
        return cross_entropy(queries @ documents.T / TEMPERATURE, torch.arange(len(rows)))


def plain_model(model: Path, *, trained: bool = False) -> Any:
    """The saved model as transformers' AutoModel loads it; its language part is trainable, or all of it."""
    plain: Any = AutoModel.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    plain.requires_grad_(trained)
    plain.get_decoder().requires_grad_(True)
    return plain


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("gemma3", {}),
        ("llava", {}),
        ("qwen2-audio", {}),
        pytest.param("llava", ALL, marks=pytest.mark.slow),
        pytest.param("gemma3", {"adapter": "lora"}, marks=pytest.mark.slow),
        pytest.param("llava", {"max_tokens_per_gpu": 2000}, marks=pytest.mark.slow),
    ],
)
def test_losses_are_those_of_plain_transformers(
    name: str, more: dict[str, Any], saved: Callable[[str], Path], data: Path, tmp_path: Path
) -> None:
    """Losses, gradient norms and held-out losses: padded, packed, of audio, in several micro-batches and one, by an adapter, of
    the tower too."""
    model = saved(name)
    if name == "qwen2-audio":
        pytest.importorskip("soundfile", reason="soundfile is not installed here: forge-data[audio]")
        data, more = pairs(tmp_path, kind="audio"), {"max_tokens_per_gpu": 384, **more}
    plain = plain_model(model, trained=ALL.keys() <= more.keys())
    if more.get("adapter") == "lora":
        plain = pictures.with_adapter(plain, lambda: plain_model(model), tmp_path / "adapter", "FEATURE_EXTRACTION")
        more = more | {"adapter_path": str(tmp_path / "adapter")}
    run = forge.embed(**GIVEN | more, model_path=model, data_path=data, ckpt_output_dir=tmp_path / "run")
    train, held_out = forge_data.PromptStore.open(run.output_dir / "data" / "train").split(0.2, seed=42)
    plan = forge_packing.BatchPlan.load(run.output_dir / "plan" / "plan.npz")
    rows, others = (Rows(store, data, model) for store in (train, held_out))

    def held() -> float:
        with torch.no_grad():
            return float(others.loss(plain, list(range(len(others.texts)))))

    before = held()
    expected = pictures.steps(plain, plan, lambda taken: rows.loss(plain, taken))
    measured = [line["eval_loss"] for line in metrics(run.output_dir) if "eval_loss" in line]
    assert measured[:2] == pytest.approx([before, held()], rel=1e-5)
    assert figures(run.output_dir) == pytest.approx([loss for loss, _ in expected], rel=1e-6)
    assert figures(run.output_dir, "grad_norm") == pytest.approx([norm for _, norm in expected], rel=1e-5)
    log = (run.output_dir / "log.txt").read_text()
    assert "could not be measured" not in log
    assert ("several micro-batches a rank" in log) == (more.get("max_tokens_per_gpu") != 2000)
    if not more.keys() - {"max_tokens_per_gpu"}:
        assert log.count("several in a forward, padded" if name == "gemma3" else "several in a row") == 1
        _uses_the_export(run, others, "audio" if name == "qwen2-audio" else "image")


def _uses_the_export(run: Any, held_out: Rows, kind: str) -> None:
    """As docs/embeddings.md has it: plain AutoModel and sentence-transformers' files, and the loss is the run's."""
    model, report = AutoModel.from_pretrained(run.model_dir, dtype=torch.float32, output_loading_info=True)
    assert not any(report.values())
    AutoProcessor.from_pretrained(run.model_dir)
    with torch.no_grad():
        exported = held_out.loss(model, list(range(len(held_out.texts))))
    assert float(exported) == pytest.approx(run.eval_after["eval_loss"], rel=1e-5)
    written = json.loads((Path(run.model_dir) / "sentence_bert_config.json").read_text())
    kinds = ("text", "audio" if kind == "audio" else "image", "message")
    assert tuple(written["modality_config"]) == kinds
    assert written["modality_config"]["message"]["method_output_name"] == "last_hidden_state"
    card = (forge.export(run.output_dir, run.output_dir.parent / "export") / "README.md").read_text()
    assert "AutoModel, AutoProcessor" in card


def test_trained_on_from_an_embedding_model_that_is_asked(saved: Callable[[str], Path], data: Path, tmp_path: Path) -> None:
    """Its prompts are system messages, and its messages end with the generation prompt, as its files say; the export's too."""
    given = {"data_path": data, "max_steps": 1, "effective_batch_size": 3, "query_prefix": "find it"}
    first = forge.embed(model_path=saved("llava"), **given, ckpt_output_dir=tmp_path / "first").model_dir
    file = Path(first) / "sentence_bert_config.json"
    asks = {"chat_template": {"add_generation_prompt": True}}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"processing_kwargs": asks}))
    run = forge.embed(model_path=first, **given | {"query_prefix": None}, ckpt_output_dir=tmp_path / "run")
    prompt = forge_data.PromptStore.open(run.output_dir / "data" / "train")[0]
    texts = [[{"role": "system", "content": "find it"}, *messages_of(json.loads(data.read_text().splitlines()[0])["query"])],
             messages_of(json.loads(data.read_text().splitlines()[0])["positive"])]  # fmt: skip
    made = [pictures.prompt_inputs(saved("llava"), text, data.parent)["input_ids"][0].tolist() for text in texts]
    assert prompt.input_ids.tolist() == made[0] + made[1]
    written = json.loads((Path(run.model_dir) / "sentence_bert_config.json").read_text())
    assert written["processing_kwargs"] == asks
    assert json.loads((Path(run.model_dir) / "config_sentence_transformers.json").read_text())["prompts"]["query"] == "find it"


def test_triplets(saved: Callable[[str], Path], tmp_path: Path) -> None:
    """Labelled texts with images, of a model that takes one a forward: the loss is that of one micro-batch and of many."""
    data, found = labelled(tmp_path), {}
    for tokens in (80, 2000):
        run = forge.embed(
            **{name: value for name, value in GIVEN.items() if name != "validation_split"}
            | {"model_path": saved("llava"), "data_path": data, "loss": "batch_all_triplet", "max_tokens_per_gpu": tokens},
            ckpt_output_dir=tmp_path / str(tokens),
        )
        found[tokens] = figures(run.output_dir), figures(run.output_dir, "grad_norm")
    assert found[80][0] == pytest.approx(found[2000][0], rel=1e-6)
    assert found[80][1] == pytest.approx(found[2000][1], rel=1e-5)
    alone = forge.embed(
        model_path=saved("mllama"), data_path=data, ckpt_output_dir=tmp_path / "alone", loss="batch_all_triplet", max_steps=1,
        effective_batch_size=6,
    )  # fmt: skip
    assert "one sample a row" in (alone.output_dir / "log.txt").read_text()


def test_the_same_words_with_other_images_are_another_text(saved: Callable[[str], Path], tmp_path: Path) -> None:
    """exclude_same_text leaves out a document with the same tokens and the same image, and no other."""
    for number in range(2):
        pictures.picture(number).resize((30, 30)).save(tmp_path / f"{number}.png")
    rows = [{"query": f"number {at}", "positive": {"image": f"{int(at == 2)}.png", "text": "a fruit"}} for at in range(3)]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    run = forge.embed(
        model_path=saved("llava"), data_path=data, ckpt_output_dir=tmp_path / "run", exclude_same_text=True, max_steps=1,
        effective_batch_size=3,
    )  # fmt: skip
    store = forge_data.PromptStore.open(run.output_dir / "data" / "train")
    documents = [prompt.input_ids[prompt.columns["lengths"][0] :].tolist() for prompt in store]
    assert documents[0] == documents[1] == documents[2]
    plain, loss = plain_model(saved("llava")), 0.0
    texts = [[pictures.read(saved("llava"), tmp_path, [{"role": "user", "content": content}]) for content in row] for row in (
        [(row["query"]), [{"type": "image", "image": row["positive"]["image"]}, {"type": "text", "text": "a fruit"}]]
        for row in rows
    )]  # fmt: skip
    with torch.no_grad():
        states = [[normalize(plain(torch.tensor([ids]), **made).last_hidden_state[0, -1], dim=0) for ids, made in row]
                  for row in texts]  # fmt: skip
    for at, (query, _) in enumerate(states):
        kept = [other for other in range(3) if other == at or rows[other]["positive"] != rows[at]["positive"]]
        scores = torch.stack([query @ states[other][1] for other in kept]) / TEMPERATURE
        loss += float(cross_entropy(scores[None], torch.tensor([kept.index(at)]))) / 3
    assert figures(run.output_dir)[0] == pytest.approx(loss, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "strategy"), ci_keeps([("llava", "fsdp2")], [("llava", "fsdp2"), ("gemma3", "fsdp2"), ("llava", "ddp")])
)
def test_two_ranks(name: str, strategy: str, saved: Callable[[str], Path], tmp_path: Path) -> None:
    """Divided it trains as on one rank, also where a rank's rows have no images."""
    data = pairs(tmp_path, 12, images=2)
    settings = GIVEN | {"model_path": str(saved(name)), "data_path": str(data), "strategy": strategy, "effective_batch_size": 3}
    assert_two_ranks_as_one("embed", settings, tmp_path, ("loss", "mrr", "grad_norm", "eval_loss"))


@pytest.mark.lane
@pytest.mark.slow
def test_a_killed_run(given: dict[str, Any], tmp_path: Path) -> None:
    """Killed in its second step and started again it ends with the same bits."""
    whole, killed = (given | {"full_state_every_steps": 1, "ckpt_output_dir": str(tmp_path / name)} for name in ("a", "b"))
    run_on_ranks(run_verb, 1, "embed", whole, joined=False)
    with pytest.raises(RuntimeError, match="status -9"):
        run_on_ranks(run_verb_killed, 1, "embed", killed, str(tmp_path), 1, joined=False)
    run_on_ranks(run_verb, 1, "embed", killed, joined=False)
    assert untimed(tmp_path / "a") == untimed(tmp_path / "b")
    assert weights(tmp_path / "a") == weights(tmp_path / "b")


def test_refused(given: dict[str, Any], saved: Callable[[str], Path], model_dir: Path, tmp_path: Path) -> None:
    """A model that takes one text a forward, one of text alone, and a text with a token of an image."""

    def refusal(**change: Any) -> str:
        settings = {name: value for name, value in given.items() if name != "validation_split"} | change
        with pytest.raises((forge.SettingsError, forge_data.ForgeDataError)) as raised:
            forge.embed(**settings, ckpt_output_dir=tmp_path / "run")
        return str(raised.value)

    assert "it is given one text at a time" in refusal(model_path=str(saved("mllama")))
    assert "does not take them beside text" in refusal(model_path=str(model_dir))
    made = write_rows(tmp_path / "rows.jsonl", [{"query": "a <img>", "positive": "b"}, {"query": "c", "positive": [
        {"type": "image", "image": str(Path(given["data_path"]).parent / "images" / "0_0.png")}]}])  # fmt: skip
    assert "rows.jsonl:1: " in refusal(data_path=str(made))
