"""New tokens from the settings to plain transformers: every verb, adapters, ranks, resume, bad input."""

from __future__ import annotations

import json
import shutil
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import forge
from forge._errors import SettingsError
from forge_dist import ModelError

from ..lanes import ci_keeps
from ..ranks import run_on_ranks
from .conftest import conversations, write_rows
from .starts import sft
from .verbs import SHORT, settings_of

TOKENS = {"add_tokens": ("very red", "<date>"), "add_special_tokens": ("<mood>",)}


@pytest.fixture(scope="module")
def untied(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a head of its own."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    path = tmp_path_factory.mktemp("untied") / "model"
    shutil.copytree(model_dir, path)
    config = AutoConfig.from_pretrained(model_dir)
    config.tie_word_embeddings = False
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Conversations in which the new tokens stand."""
    found = conversations()
    for row in found:
        for message in row["messages"]:
            message["content"] = message["content"].replace("the ", "the <date>")
    return write_rows(tmp_path / "rows.jsonl", found)


def losses(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def logits_of(model: Any, ids: Any) -> Any:
    import torch

    with torch.no_grad():
        return model.eval()(input_ids=ids).logits


@pytest.mark.slow
@pytest.mark.parametrize("verb", ci_keeps(["distill", "osft", "ppo"], ["pretrain", "distill", "osft", "dpo", "reward", "ppo"]))
def test_every_verb_takes_new_tokens(verb: str, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokenizer, data, embedding, export: plain transformers loads what a run with new tokens wrote, whatever the verb."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "forge_test_rewards", raising=False)
    given = settings_of(verb, model_dir, tmp_path)
    given |= {"add_tokens": ("the ", "red."), "max_steps": 2}
    if verb == "osft":
        given["osft_train_rest"] = ("embeddings",)
    if verb == "distill":
        # Its teacher has to know the tokens: the starting point of a run with the same ones.
        first = settings_of("sft", model_dir, tmp_path) | {"add_tokens": ("the ", "red."), "max_steps": 1}
        with pytest.raises(SettingsError, match="It lacks 'the ' of add_tokens"):
            forge.distill(**given, ckpt_output_dir=tmp_path / "refused")
        given["teacher_path"] = str(forge.sft(**first, ckpt_output_dir=tmp_path / "learned").model_dir)
    found = getattr(forge, verb)(**given, ckpt_output_dir=tmp_path / "run")
    tokenizer = AutoTokenizer.from_pretrained(found.model_dir)
    old = len(AutoTokenizer.from_pretrained(model_dir))
    ids = tokenizer("the red.", return_tensors="pt", add_special_tokens=False).input_ids
    assert ids.tolist() == [[old, old + 1]]
    kind = AutoModelForSequenceClassification if verb == "reward" else AutoModelForCausalLM
    model = kind.from_pretrained(found.model_dir)
    assert model.config.vocab_size == model.get_input_embeddings().num_embeddings == old + 2 == len(tokenizer)
    store = tmp_path / "run" / "data" / "train"
    assert len(AutoTokenizer.from_pretrained(store / "tokenizer")) == old + 2
    if verb != "reward":
        assert model.generate(ids, max_new_tokens=2, do_sample=False).shape[1] > 2


@pytest.mark.slow
@pytest.mark.parametrize(("whole", "tied"), ci_keeps([(False, True), (True, False)], list(product((False, True), repeat=2))))
def test_lora_with_new_tokens_loads_in_plain_peft_and_merges(
    tied: bool, whole: bool, model_dir: Path, untied: Path, rows: Path, tmp_path: Path
) -> None:
    """The exported adapter beside the run's base_model, beside the resized original, and merged: the same logits."""
    from peft import AutoPeftModelForCausalLM, PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = model_dir if tied else untied
    names = {"modules_to_save": ("embed_tokens",) if tied else ("embed_tokens", "lm_head")} if whole else {}
    given: dict[str, Any] = {**SHORT, "model_path": path, "data_path": rows, "adapter": "lora", **TOKENS, **names}
    found = forge.sft(**given, ckpt_output_dir=tmp_path / "run")
    said = (tmp_path / "run" / "log.txt").read_text()
    assert "new tokens: 3" in said
    assert "WARNING: the new tokens' rows" not in said
    tokenizer = AutoTokenizer.from_pretrained(found.model_dir)
    ids = tokenizer("what <date>is very red<mood>", return_tensors="pt").input_ids
    merged = AutoModelForCausalLM.from_pretrained(forge.export(tmp_path / "run", tmp_path / "merged", merge=True))
    assert merged.config.tie_word_embeddings is tied
    wanted = logits_of(merged, ids)
    resized = AutoModelForCausalLM.from_pretrained(path)
    resized.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    for model in (
        AutoPeftModelForCausalLM.from_pretrained(found.model_dir),
        PeftModel.from_pretrained(resized, found.model_dir),
    ):
        assert (logits_of(model, ids) - wanted).abs().max() < 1e-5
    assert len(AutoTokenizer.from_pretrained(tmp_path / "merged")) == merged.config.vocab_size
    assert "with new tokens" in (tmp_path / "merged" / "README.md").read_text()


LORA: dict[str, Any] = {"adapter": "lora"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        # Both ways at once: the embedding trains whole, the head's new rows beside it.
        ("fsdp2", {**LORA, "modules_to_save": ("embed_tokens",)}),
        pytest.param("fsdp2", {}, marks=pytest.mark.lane),
        pytest.param("fsdp2", LORA, marks=pytest.mark.lane),
        pytest.param("zero3", LORA, marks=pytest.mark.lane),
        pytest.param("zero3", {**LORA, "modules_to_save": ("embed_tokens",)}, marks=pytest.mark.lane),
    ],
)
def test_two_ranks_are_one(strategy: str, options: dict[str, Any], untied: Path, rows: Path, tmp_path: Path) -> None:
    """New tokens on two ranks that divide the model give the losses of one process, and an export that was loaded back."""
    given: dict[str, Any] = {**SHORT, "model_path": untied, "data_path": rows, **TOKENS, **options}
    forge.sft(**given, ckpt_output_dir=tmp_path / "one")
    run_on_ranks(sft, 2, {**given, "ckpt_output_dir": tmp_path / "two", "strategy": strategy}, joined=False)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    assert "exported" in (tmp_path / "two" / "log.txt").read_text()


@pytest.mark.slow
def test_a_resumed_run_has_the_same_tokens(untied: Path, rows: Path, tmp_path: Path) -> None:
    """Two steps and two more are four at once, also where base_model was removed; other tokens are refused by name."""
    given: dict[str, Any] = {**SHORT, "model_path": untied, "data_path": rows, "adapter": "lora", **TOKENS}
    given |= {"lr_scheduler": "constant", "resume": "auto", "keep_full_state": True}
    forge.sft(**given, ckpt_output_dir=tmp_path / "once")
    forge.sft(**{**given, "max_steps": 2}, ckpt_output_dir=tmp_path / "twice")
    shutil.rmtree(tmp_path / "twice" / "base_model")
    forge.sft(**given, ckpt_output_dir=tmp_path / "twice")
    assert losses(tmp_path / "twice") == losses(tmp_path / "once")
    with pytest.raises(SettingsError, match=r"add_tokens"):
        forge.sft(**{**given, "add_tokens": ("<date>",), "max_steps": 6}, ckpt_output_dir=tmp_path / "twice")
    assert losses(tmp_path / "twice") == losses(tmp_path / "once")


def test_other_tokens_replace_those_of_a_run_without_a_step(model_dir: Path, rows: Path, tmp_path: Path) -> None:
    """It starts from a model of its own: the former's, which lies there, has no row for them."""
    from transformers import AutoTokenizer

    run = tmp_path / "run"
    given = {"model_path": model_dir, "data_path": rows, "ckpt_output_dir": run, "max_steps": 1}
    forge.sft(**given, add_tokens=("very red",))
    for name in ("full_state", "hf_format"):
        shutil.rmtree(run / name, ignore_errors=True)
    (run / "result.json").unlink()
    (run / "metrics.jsonl").write_text("")
    found = forge.sft(**given, add_tokens=("<date>",))
    vocabulary = AutoTokenizer.from_pretrained(found.model_dir).get_vocab()
    assert "<date>" in vocabulary
    assert "very red" not in vocabulary
    assert (run / "base_model").is_dir()


def test_tokens_that_are_there_keep_their_rows(model_dir: Path, rows: Path, tmp_path: Path) -> None:
    """A token that the tokenizer has is noted, and starts no model of its own."""
    given: dict[str, Any] = {**SHORT, "model_path": model_dir, "data_path": rows, "max_steps": 1}
    forge.sft(**given, add_special_tokens=("<|im_end|>",), ckpt_output_dir=tmp_path / "run")
    assert "'<|im_end|>' is a token already, with id 2, and keeps its row" in (tmp_path / "run" / "log.txt").read_text()
    assert not (tmp_path / "run" / "base_model").exists()


def larger_tokenizer(model_dir: Path, path: Path) -> Path:
    """The tiny model beside a tokenizer with one token more than it has rows."""
    from transformers import AutoTokenizer

    shutil.copytree(model_dir, path)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    tokenizer.add_tokens(["<extra>"])
    tokenizer.save_pretrained(path)
    return path


def test_a_tokenizer_larger_than_the_embedding(model_dir: Path, rows: Path, tmp_path: Path) -> None:
    """It is refused before anything is written, though no row has the id; add_tokens gives the tokens rows."""
    path = larger_tokenizer(model_dir, tmp_path / "model")
    given: dict[str, Any] = {**SHORT, "model_path": path, "data_path": rows, "max_steps": 1}
    with pytest.raises(ModelError, match=r"1 token without a row .* 362 rows: the first is '<extra>' with id 362"):
        forge.sft(**given, ckpt_output_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    forge.sft(**given, add_tokens=("<extra>",), ckpt_output_dir=tmp_path / "run")
    assert "new tokens: 1 ('<extra>' 362)" in (tmp_path / "run" / "log.txt").read_text()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"add_tokens": ("<a>", "")}, "add_tokens must not hold an empty string"),
        ({"add_tokens": ("<a>", "<a>")}, "add_tokens names '<a>' twice"),
        ({"add_tokens": ("<a>",), "add_special_tokens": ("<a>",)}, "both name '<a>'"),
        ({"add_tokens": ("<a>",), "adapter": "prefix"}, "adapter=prefix: the new tokens' rows would stay"),
        ({"add_tokens": ("<a>",), "adapter": "osft"}, r"osft_train_rest=\[embeddings, head\]"),
        ({"add_tokens": ("<a>",), "adapter": "ia3"}, "name the embedding and the head in modules_to_save"),
        ({"add_tokens": ("<a>",), "adapter": "oft"}, "name the embedding and the head in modules_to_save"),
        ({"modules_to_save": ("lm_head",)}, "modules_to_save=.* has no effect with adapter='none'"),
    ],
)
def test_bad_settings(settings: dict[str, Any], message: str, model_dir: Path, chats: Path, tmp_path: Path) -> None:
    """Empty strings, duplicates and adapters that would not train the rows: one error, and nothing written."""
    given: dict[str, Any] = {**SHORT, "model_path": model_dir, "data_path": chats}
    with pytest.raises(SettingsError, match=message):
        forge.sft(**given, **settings, ckpt_output_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()
