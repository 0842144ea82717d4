"""`forge.embed`: pairs or labelled texts → an embedding model that plain transformers, PEFT and sentence-transformers load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import forge

from ..lanes import ci_keeps
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


def rows(number: int = 24, *, first: int = 0, negatives: bool = True) -> list[dict[str, Any]]:
    """Ragged questions with their answers, every second with a hard negative."""
    made: list[dict[str, Any]] = []
    for index in range(first, first + number):
        fruit, colour = FRUITS[index % 8], COLOURS[index % 3]
        answer = f"{fruit} {index} is " + "very " * (index % 5) + colour
        row = {"query": f"what colour has {fruit} {index}?", "positive": answer}
        hard = {"negative": f"{fruit} {index} is not {colour}"} if index % 2 and negatives else {}
        made.append(row | hard)
    return made


def labelled(number: int = 24) -> list[dict[str, Any]]:
    """Texts with the label of their colour."""
    return [{"text": row["positive"], "label": COLOURS[index % 3]} for index, row in enumerate(rows(number))]


def embed(model: Any, tokenizer: Any, text: str, pooling: str) -> torch.Tensor:
    """Embed one text by plain transformers: pooled, of length 1."""
    with torch.no_grad():
        hidden = model(input_ids=torch.tensor([tokenizer(text)["input_ids"]])).last_hidden_state[0]
    one = {"last": hidden[-1], "cls": hidden[0], "mean": hidden.mean(0)}[pooling]
    return one / one.norm()


def infonce(model: Any, tokenizer: Any, made: list[dict[str, Any]], *, pooling: str = "last", temperature: float = 0.05,
            query: str = "", document: str = "") -> tuple[float, float, float]:  # fmt: skip
    """Loss, accuracy and MRR of rows among each other, by their definition."""
    queries = torch.stack([embed(model, tokenizer, query + row["query"], pooling) for row in made])
    texts = [row["positive"] for row in made] + [row["negative"] for row in made if "negative" in row]
    documents = torch.stack([embed(model, tokenizer, document + text, pooling) for text in texts])
    scores = queries @ documents.T / temperature
    places = [int((scores[at] >= scores[at, at]).sum()) for at in range(len(made))]
    loss = torch.nn.functional.cross_entropy(scores, torch.arange(len(made)))
    return loss.item(), sum(place == 1 for place in places) / len(made), sum(1 / place for place in places) / len(made)


@pytest.fixture(scope="module")
def trained(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run on pairs with prefixes, in one process, several micro-batches a step."""
    folder = tmp_path_factory.mktemp("embed")
    data, held_out = write_rows(folder / "train.jsonl", rows()), write_rows(folder / "eval.jsonl", rows(9, first=30))
    return forge.embed(
        model_path=model_dir, data_path=data, eval_data_path=held_out, ckpt_output_dir=folder / "run",
        query_prefix="query: ", document_prefix="passage: ", max_seq_len=64, **SHORT,
    )  # fmt: skip


@pytest.mark.slow
def test_plain_transformers_uses_it(trained: Any) -> None:
    """AutoModel of the export, the last token's hidden state of one text at a time: loss, accuracy and MRR of the held-out
    rows are the run's, among all held-out documents.
    """
    from transformers import AutoModel, AutoTokenizer

    where = str(trained.model_dir)
    model, tokenizer = AutoModel.from_pretrained(where), AutoTokenizer.from_pretrained(where)
    assert type(model).__name__ == "LlamaModel"
    loss, accuracy, mrr = infonce(model, tokenizer, rows(9, first=30), query="query: ", document="passage: ")
    after = trained.eval_after
    assert after["eval_loss"] == pytest.approx(loss, rel=1e-5)
    assert after["eval_loss_queries"] == 9
    assert after["eval_accuracy"] == pytest.approx(accuracy)
    assert after["eval_mrr"] == pytest.approx(mrr)
    assert after["eval_loss"] < trained.eval_before["eval_loss"]


def test_sentence_transformers_finds_its_files(trained: Any) -> None:
    """The modules, the pooling, the normalisation, the limit and the prompts stand beside the model, and in the run's words."""
    where = Path(trained.model_dir)
    modules = json.loads((where / "modules.json").read_text())
    assert [module["type"].rpartition(".")[2] for module in modules] == ["Transformer", "Pooling", "Normalize"]
    assert all((where / module["path"]).is_dir() for module in modules)
    pooling = json.loads((where / "1_Pooling" / "config.json").read_text())
    assert pooling["word_embedding_dimension"] == 32
    assert [name for name, value in pooling.items() if name.startswith("pooling_mode") and value] == ["pooling_mode_lasttoken"]
    config = json.loads((where / "config_sentence_transformers.json").read_text())
    assert config["prompts"] == {"query": "query: ", "document": "passage: "}
    assert json.loads((where / "sentence_bert_config.json").read_text())["max_seq_length"] == 64
    text = (where.parent.parent / "config.yaml").read_text()
    assert "pooling: last  # chosen: the last token of a causal model" in text
    assert "temperature: 0.05" in text
    log = (where.parent.parent / "log.txt").read_text()
    assert "24 queries, each with its document, and 12 hard negatives" in log
    assert "several micro-batches a rank, each of which takes one more forward" in log
    assert forge.dist.model_pooling(str(where)) == ("last", "1_Pooling/config.json of the model says so")


@pytest.mark.slow
def test_trained_on_from_its_own_export(trained: Any, tmp_path: Path) -> None:
    """A model without a head, with its own pooling and prompts, is trained on; and no other verb takes it for a language model.

    The first loss says that texts have the prompts: it is the trained model's with them.
    """
    data = write_rows(tmp_path / "rows.jsonl", rows())
    given = {"model_path": trained.model_dir, "data_path": data, **SHORT, "max_steps": 1}
    again = forge.embed(**given, eval_data_path=data, ckpt_output_dir=tmp_path / "run")
    assert again.steps == 1
    text = (tmp_path / "run" / "config.yaml").read_text()
    assert "query_prefix: 'query: '  # chosen: the prompt that is stored with the model" in text
    assert json.loads((Path(again.model_dir) / "config_sentence_transformers.json").read_text())["prompts"] == {
        "query": "query: ", "document": "passage: "
    }  # fmt: skip
    bare = forge.embed(**given, eval_data_path=data, query_prefix="", document_prefix="", ckpt_output_dir=tmp_path / "bare")
    from transformers import AutoModel, AutoTokenizer

    model, tokenizer = (each.from_pretrained(trained.model_dir) for each in (AutoModel, AutoTokenizer))
    with_them = infonce(model, tokenizer, rows(), query="query: ", document="passage: ")[0]
    assert again.eval_before["eval_loss"] == pytest.approx(with_them, rel=1e-5)
    assert bare.eval_before["eval_loss"] != pytest.approx(with_them, rel=1e-3)
    with pytest.raises(forge.dist.ModelError, match="LlamaModel.*no causal language model"):
        forge.sft(**given, ckpt_output_dir=tmp_path / "other")
    with pytest.raises(forge.SettingsError, match="has no head: it embeds texts"):
        forge.generate(trained.model_dir, ["hello"])


@pytest.mark.slow
def test_an_adapter_beside_its_base(model_dir: Path, tmp_path: Path) -> None:
    """LoRA with dropout: loaded by plain PEFT on plain AutoModel its loss is the run's, and so it is once merged, beside the
    same files of sentence-transformers.
    """
    from peft import PeftModel
    from transformers import AutoModel, AutoTokenizer

    data, held_out = write_rows(tmp_path / "train.jsonl", rows()), write_rows(tmp_path / "eval.jsonl", rows(9, first=30))
    result = forge.embed(
        model_path=model_dir, data_path=data, eval_data_path=held_out, ckpt_output_dir=tmp_path / "run", adapter="lora",
        lora_dropout=0.1, pooling="mean", temperature=0.1, **SHORT,
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(result.model_dir)
    model = PeftModel.from_pretrained(AutoModel.from_pretrained(model_dir), str(result.model_dir)).eval()
    loss, *_ = infonce(model, tokenizer, rows(9, first=30), pooling="mean", temperature=0.1)
    assert result.eval_after["eval_loss"] == pytest.approx(loss, rel=1e-5)
    merged = forge.export(tmp_path / "run", merge=True)
    loss, *_ = infonce(AutoModel.from_pretrained(merged).eval(), tokenizer, rows(9, first=30), pooling="mean", temperature=0.1)
    assert result.eval_after["eval_loss"] == pytest.approx(loss, rel=1e-4)
    for name in ("modules.json", "1_Pooling/config.json", "config_sentence_transformers.json"):
        assert (merged / name).read_text() == (Path(result.model_dir) / name).read_text()
    card = (merged / "README.md").read_text()
    assert "AutoModel.from_pretrained" in card
    assert "sentence-similarity" in card
    with pytest.raises(forge.SettingsError, match="format=gguf"):
        forge.export(tmp_path / "run", merge=True, format="gguf")


@pytest.mark.slow
def test_an_encoder_that_looks_both_ways(model_dir: Path, tmp_path: Path) -> None:
    """A masked language model of BERT's kind: the mean of its tokens, texts run alone, exact to 1e-5; its pooler is no part."""
    from transformers import AutoModel, AutoTokenizer, BertConfig, BertForMaskedLM

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    BertForMaskedLM(BertConfig(vocab_size=len(tokenizer), pad_token_id=0, **sizes)).save_pretrained(tmp_path / "bert")
    tokenizer.save_pretrained(tmp_path / "bert")
    data, held_out = write_rows(tmp_path / "train.jsonl", rows()), write_rows(tmp_path / "eval.jsonl", rows(9, first=30))
    result = forge.embed(
        model_path=tmp_path / "bert", data_path=data, eval_data_path=held_out, ckpt_output_dir=tmp_path / "run", **SHORT
    )
    text = (tmp_path / "run" / "config.yaml").read_text()
    assert "pooling: mean  # chosen: a model of the type bert looks at a text from both sides" in text
    model = AutoModel.from_pretrained(result.model_dir, add_pooling_layer=False).eval()
    loss, accuracy, mrr = infonce(model, tokenizer, rows(9, first=30), pooling="mean")
    assert result.eval_after["eval_loss"] == pytest.approx(loss, rel=1e-5)
    assert (result.eval_after["eval_accuracy"], result.eval_after["eval_mrr"]) == pytest.approx((accuracy, mrr))
    assert result.eval_after["eval_loss"] < result.eval_before["eval_loss"]


@pytest.mark.slow
def test_labelled_texts(model_dir: Path, tmp_path: Path) -> None:
    """loss=batch_all_triplet on texts with labels: the loss falls, and texts of one label come together."""
    data = write_rows(tmp_path / "rows.jsonl", labelled())
    result = forge.embed(
        model_path=model_dir, data_path=data, ckpt_output_dir=tmp_path / "run", loss="batch_all_triplet", pooling="mean",
        validation_split=0.25, **SHORT | {"effective_batch_size": 9, "max_steps": 10},
    )  # fmt: skip
    assert result.eval_after["eval_loss"] < result.eval_before["eval_loss"]
    assert 0 <= result.eval_after["eval_accuracy"] <= 1


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ci_keeps(["fsdp2"], ["ddp", "fsdp2"]))
def test_two_ranks_make_the_same_steps(strategy: str, model_dir: Path, tmp_path: Path) -> None:
    """Every step's loss, figures and gradient norm are those of one process, however the steps are cut."""
    data = write_rows(tmp_path / "rows.jsonl", rows())
    given = {"model_path": str(model_dir), "data_path": str(data), "validation_split": 0.25, **SHORT}
    alone = run_verb("embed", {**given, "ckpt_output_dir": str(tmp_path / "alone"), "max_tokens_per_gpu": 1024})
    own = {**given, "ckpt_output_dir": str(tmp_path / "both"), "strategy": strategy, "max_tokens_per_gpu": 96}
    both = run_on_ranks(run_verb, 2, "embed", own, joined=False)[0]
    for name, value in alone["eval_after"].items():
        assert both["eval_after"][name] == pytest.approx(value, rel=1e-3), name
    files = [tmp_path / name / "metrics.jsonl" for name in ("alone", "both")]
    ours, theirs = ([json.loads(line) for line in file.read_text().splitlines()] for file in files)
    steps = [(a, b) for a, b in zip(ours, theirs, strict=True) if "loss" in a]
    assert len(steps) == 6
    assert steps[0][1]["loss"] == pytest.approx(steps[0][0]["loss"], rel=1e-6)
    assert steps[0][1]["grad_norm"] == pytest.approx(steps[0][0]["grad_norm"], rel=1e-5)
    for a, b in steps:
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-3)


@pytest.mark.parametrize(
    ("made", "settings", "message"),
    [
        ([{"query": "a"}], {}, "rows.jsonl:1 has the fields 'query', and no document"),
        ([{"text": "a", "label": "b"}], {}, "loss=batch_all_triplet"),
        (rows(4, negatives=False), {"effective_batch_size": 1}, "effective_batch_size=1 leaves a query alone"),
        (rows(1, negatives=False), {}, "rows.jsonl:1 is the only row to train on, and has no hard negative"),
        (rows(4), {"adapter": "prompt"}, "adapter=prompt puts virtual tokens before a text"),
        (rows(4), {"cp_size": 2}, "cp_size=2 divides a text over ranks"),
        (rows(4), {"margin": 1.0}, "margin has no effect with loss=contrastive"),
        (rows(4), {"kl_base": True, "validation_split": 0.5}, "kl_base is the divergence"),
        (rows(4), {"eval_prompts": ["hello"], "validation_split": 0.5}, "eval_prompts has no effect"),
        (labelled(4), {"loss": "batch_all_triplet", "query_prefix": "q"}, "query_prefix has no effect with loss"),
        (labelled(4), {"loss": "batch_all_triplet", "temperature": 0.1}, "temperature has no effect with loss"),
        ([{"text": "a", "label": "x"}, {"text": "b", "label": "y"}], {"loss": "batch_all_triplet"}, "make no triplet"),
        ([{"text": "a", "labels": ["x"]}] * 4, {"loss": "batch_all_triplet"}, "takes one label a text"),
    ],
)
def test_refused(made: list[dict[str, Any]], settings: dict[str, Any], message: str, model_dir: Path, tmp_path: Path) -> None:
    """One error that says what to do, before a model is trained; nothing is left."""
    data = write_rows(tmp_path / "rows.jsonl", made)
    with pytest.raises((forge.data.DataError, forge.SettingsError), match=message):
        forge.embed(model_path=model_dir, data_path=data, ckpt_output_dir=tmp_path / "run", **SHORT | settings)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_one_held_out_query_proves_nothing(model_dir: Path, tmp_path: Path) -> None:
    """A query among no other documents is right whatever the model does, and the log says so."""
    for negatives in (False, True):
        data = write_rows(tmp_path / "rows.jsonl", rows(6, negatives=negatives))
        held_out = write_rows(tmp_path / "eval.jsonl", rows(1, first=31, negatives=negatives))
        run = tmp_path / f"run{negatives}"
        settings = SHORT | {"max_steps": 1}
        forge.embed(model_path=model_dir, data_path=data, eval_data_path=held_out, ckpt_output_dir=run, **settings)
        said = "WARNING: eval.jsonl:1 is the only held-out row, and has no hard negative" in (run / "log.txt").read_text()
        assert said is not negatives


def test_another_pooling_of_the_model_is_refused(model_dir: Path, tmp_path: Path) -> None:
    """A directory that pools by what is not trained says so, unless `pooling` is given."""
    import shutil

    shutil.copytree(model_dir, tmp_path / "model")
    (tmp_path / "model" / "1_Pooling").mkdir()
    (tmp_path / "model" / "1_Pooling" / "config.json").write_text('{"pooling_mode_max_tokens": true}')
    data = write_rows(tmp_path / "rows.jsonl", rows(6))
    given = {"model_path": tmp_path / "model", "data_path": data, **SHORT, "max_steps": 1}
    with pytest.raises(forge.dist.ModelError, match="pools by pooling_mode_max_tokens; .* set `pooling`"):
        forge.embed(**given, ckpt_output_dir=tmp_path / "run")
    assert forge.embed(**given, pooling="cls", ckpt_output_dir=tmp_path / "other").steps == 1


@pytest.mark.slow
def test_a_dry_run_has_a_memory_plan(model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The plan is computed, with an evaluation, for several micro-batches a step; nothing is written."""
    data = write_rows(tmp_path / "rows.jsonl", rows())
    text = forge.dry_run(
        forge.embed, model_path=model_dir, data_path=data, ckpt_output_dir=tmp_path / "run", validation_split=0.25, **SHORT
    )
    assert text.startswith("forge embed would write")
    said = capsys.readouterr().err
    assert all(phase in said for phase in ("memory on cpu", "  step ", "  evaluation ", "activations"))
    assert not (tmp_path / "run").exists()
