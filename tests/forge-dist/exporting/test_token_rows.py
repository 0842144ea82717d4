"""A model with rows for new tokens: beside transformers' resizing, in plain files."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from forge_dist import ModelError, check_model, export_model, load_model, write_with_token_rows
from forge_dist.exporting._token_rows import _check_ids

from ..conftest import SIZES


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


WINDOWS = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
VISION = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 14}


def per_layer(name, rows=61):
    """A tiny Gemma 3n or 4, whose second table by token id has `rows` rows."""
    sizes = {**SIZES, **WINDOWS, "head_dim": 4, "hidden_size_per_layer_input": 4, "num_kv_shared_layers": 0}
    sizes |= {"vocab_size_per_layer_input": rows}
    torch.manual_seed(0)
    if name == "gemma4":
        return transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(global_head_dim=4, **sizes))
    extra = {"laurel_rank": 4, "activation_sparsity_pattern": [0.0, 0.0]}
    return transformers.Gemma3nForCausalLM(transformers.Gemma3nTextConfig(**sizes, **extra))


@pytest.mark.parametrize("name", ["gemma3n", "gemma4"])
def test_a_table_of_inputs_to_each_layer_grows_too(name, tokenizer, tmp_path):
    """Its new rows are the mean of its own; shapes and settings are those of transformers' resizing, and a new id is read."""
    theirs = per_layer(name)
    theirs.save_pretrained(tmp_path / "base")
    old = theirs.model.embed_tokens_per_layer.weight.detach().clone()
    assert write_with_token_rows(str(tmp_path / "base"), tmp_path / "new", [61, 62], tokenizer=tokenizer) == 63
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "new")
    theirs.resize_token_embeddings(63, mean_resizing=False)
    assert ours.config.vocab_size_per_layer_input == theirs.config.vocab_size_per_layer_input == 63
    assert {key: t.shape for key, t in ours.state_dict().items()} == {key: t.shape for key, t in theirs.state_dict().items()}
    table = ours.model.embed_tokens_per_layer.weight
    assert torch.equal(table[:61], old)
    assert torch.equal(table[61:], old.double().mean(0).float().expand(2, -1))
    with torch.no_grad():
        both = ours(input_ids=torch.tensor([[3, 61], [3, 62]])).logits
    assert torch.isfinite(both).all()
    assert torch.equal(both[0], both[1])


@pytest.mark.parametrize("name", ["gemma3n", "gemma4"])
def test_a_table_of_inputs_to_each_layer_that_is_shorter(name, tokenizer, tmp_path):
    """Ids between its end and the embedding's have no row of their own: nothing is written; ids below it may be added."""
    per_layer(name, rows=60).save_pretrained(tmp_path / "base")
    with pytest.raises(ModelError, match=r"60 rows \(vocab_size_per_layer_input\) beside the embedding's 61, .* new id 61"):
        write_with_token_rows(str(tmp_path / "base"), tmp_path / "new", [59, 61], tokenizer=tokenizer)
    assert not list(tmp_path.glob("*new*"))
    assert write_with_token_rows(str(tmp_path / "base"), tmp_path / "new", [59], tokenizer=tokenizer) == 61


def test_ids_that_a_class_reads_as_of_another_modality():
    """Gemma 3n's own ids of images and sounds end its vocabulary: a token behind them would be read as a sound."""
    config = transformers.Gemma3nConfig(text_config={"vocab_size": 80}, vision_config={"vocab_offset": 70}, audio_config={})
    _check_ids(config, 80, 69, "m")
    with pytest.raises(ModelError, match=r"from 70 on for those of vision \(vision_config.vocab_offset\), and the new id 70"):
        _check_ids(config, 80, 70, "m")


@pytest.fixture
def images(tmp_path):
    """Path of a tiny Gemma 3 with images, as published: its number of tokens is the class's default, and left out."""
    text = {**SIZES, **WINDOWS, "hidden_size": 4, "head_dim": 4}
    del text["vocab_size"]
    config = transformers.Gemma3Config(text_config=text, vision_config={**VISION, "image_size": 28}, mm_tokens_per_image=4)
    torch.manual_seed(0)
    transformers.Gemma3ForConditionalGeneration(config).to(torch.bfloat16).save_pretrained(tmp_path / "images")
    file = tmp_path / "images" / "config.json"
    written = json.loads(file.read_text())
    del written["text_config"]["vocab_size"]
    written["vision_config"]["vocab_size"] = 7
    file.write_text(json.dumps(written))
    return tmp_path / "images"


def test_the_configuration_of_the_language_part_alone_changes(images, tokenizer, tmp_path):
    """A number of tokens that config.json leaves out is written, and that of another part stays."""
    rows = transformers.Gemma3TextConfig().vocab_size
    before = json.loads((images / "config.json").read_text())
    assert write_with_token_rows(str(images), tmp_path / "new", [rows], tokenizer=tokenizer) == rows + 1
    after = json.loads((tmp_path / "new" / "config.json").read_text())
    assert after["text_config"].pop("vocab_size") == rows + 1
    assert after == before


def test_processor_files_come_along(images, tokenizer, tmp_path):
    """What makes images into tensors stands beside the new rows and in the export; the tokenizer's own files stay its own."""
    for name in ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json", "chat_template.jinja"):
        (images / name).write_text(json.dumps({"of": name}))
    write_with_token_rows(str(images), tmp_path / "new", [5], tokenizer=tokenizer)
    model = load_model(str(tmp_path / "new"), dtype=torch.float32, device="cpu")
    export = export_model(model, tmp_path / "export", tokenizer=tokenizer, dtype=torch.bfloat16)
    for folder in (tmp_path / "new", export):
        for name in ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"):
            assert json.loads((folder / name).read_text()) == {"of": name}
        assert (folder / "chat_template.jinja").read_text() == tokenizer.chat_template
