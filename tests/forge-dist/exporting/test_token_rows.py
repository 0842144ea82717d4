"""A model with rows for new tokens: beside transformers' resizing, in plain files."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from forge_dist import ModelError, check_model, load_model, write_with_token_rows


def test_new_rows_are_the_mean_and_nothing_else_changes(save_base, architecture, tokenizer, tmp_path):
    """Every architecture, tied or not, grows by the missing rows alone, to what transformers' resizing gives without its noise;
    plain transformers loads it.
    """
    path, new = save_base(architecture), tmp_path / "new"
    assert write_with_token_rows(path, new, [61, 62, 63], tokenizer=tokenizer) == 64
    ours, theirs = (AutoModelForCausalLM.from_pretrained(each) for each in (new, path))
    before = {name: tensor.clone() for name, tensor in theirs.state_dict().items()}
    theirs.resize_token_embeddings(64, mean_resizing=False)
    assert ours.config.vocab_size == 64
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for name, tensor in ours.state_dict().items():
        old = before[name]
        assert torch.equal(tensor[: len(old)], old)
        if tensor.shape != old.shape:
            mean = old.double().mean(0).float()
            assert torch.equal(tensor[61:], mean.expand(3, -1))
    changed = {name for name, tensor in ours.state_dict().items() if tensor.shape != before[name].shape}
    assert changed == {name for name, tensor in theirs.state_dict().items() if tensor.shape != before[name].shape}
    assert len(AutoTokenizer.from_pretrained(new)) == len(tokenizer)


def test_spare_rows_are_used_first(save_base, tokenizer, tmp_path):
    """Rows beyond the tokenizer's ids take new tokens before the embedding grows; the mean is that of the rows in use."""
    path = save_base("llama-untied")
    old = load_model(path, dtype=torch.float32, device="cpu").state_dict()
    assert write_with_token_rows(path, tmp_path / "new", [59, 60], tokenizer=tokenizer) == 61
    new = load_model(str(tmp_path / "new"), dtype=torch.float32, device="cpu").state_dict()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(new[name][:59], old[name][:59])
        assert torch.equal(new[name][59:], old[name][:59].double().mean(0).float().expand(2, -1))


def test_files_without_such_rows_are_links(save_base, tokenizer, tmp_path, make_model):
    """Of a model in several files only those with the embedding or the head are written; dtypes stay, and so does the index."""
    path = tmp_path / "sharded"
    make_model("llama-untied").to(torch.bfloat16).save_pretrained(path, max_shard_size="2KB")
    write_with_token_rows(str(path), tmp_path / "new", [61], tokenizer=tokenizer)
    places = json.loads((tmp_path / "new" / "model.safetensors.index.json").read_text())["weight_map"]
    written = {places["model.embed_tokens.weight"], places["lm_head.weight"]}
    files = sorted((tmp_path / "new").glob("*.safetensors"))
    assert len(files) > len(written)
    assert {file.name for file in files if not file.is_symlink()} == written
    new = AutoModelForCausalLM.from_pretrained(tmp_path / "new")
    assert new.dtype == torch.bfloat16
    assert new.get_input_embeddings().num_embeddings == 62


def test_a_reward_model(base, tokenizer, tmp_path):
    """A causal directory that becomes a reward model keeps its class, and its embedding grows."""
    write_with_token_rows(base, tmp_path / "new", [61], tokenizer=tokenizer, task="reward")
    assert check_model(str(tmp_path / "new"), task="reward") == 62
    found = AutoModelForSequenceClassification.from_pretrained(tmp_path / "new", num_labels=1)
    assert found.get_input_embeddings().num_embeddings == 62


def test_nothing_is_left_where_it_cannot_be_done(base, tokenizer, tmp_path, monkeypatch):
    """Where the rows of tokens are not found in the files the message says what to do, and nothing is written."""
    monkeypatch.setattr("forge_dist.exporting._token_rows._end", lambda name: name[:1])
    monkeypatch.setattr("forge_dist.exporting._token_rows.read_directory", lambda _: {})
    with pytest.raises(ModelError, match="resize it with transformers"):
        write_with_token_rows(base, tmp_path / "new", [61], tokenizer=tokenizer)
    assert not list(Path(tmp_path).glob("*new*"))
