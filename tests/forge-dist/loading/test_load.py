"""A directory into memory, every weight read, or an error."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, MarianConfig, MarianForCausalLM, T5Config

from forge_dist import ModelError, load_model


def load(path, **options):
    return load_model(path, **({"dtype": torch.float32, "device": "cpu"} | options))


def test_what_transformers_loads(save_base, architecture, state_of):
    """Weights, attention, mode and configuration are those of plain from_pretrained; the cache setting is the directory's."""
    path = save_base(architecture)
    model, expected = load(path), AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert type(model) is type(expected)
    assert model.state_dict().keys() == expected.state_dict().keys()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)
    assert model.config.use_cache is True
    assert model.config._attn_implementation == "sdpa"
    assert not model.training


def test_what_the_architecture_freezes_stays_frozen(tmp_path):
    """Marian's sinusoids do not learn: transformers reads them as if they did, and divided they do not."""
    shape = {"vocab_size": 61, "d_model": 16, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 24}
    config = MarianConfig(**shape, decoder_vocab_size=61, max_position_embeddings=32, pad_token_id=0, is_decoder=True)
    MarianForCausalLM(config).save_pretrained(tmp_path)
    plain, model = AutoModelForCausalLM.from_pretrained(tmp_path), load(str(tmp_path))
    frozen = [name for name, weight in model.named_parameters() if not weight.requires_grad]
    assert frozen == ["model.decoder.embed_positions.weight"]
    assert torch.equal(model.get_parameter(frozen[0]), plain.get_parameter(frozen[0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_dtype_is_what_was_asked(save_base, dtype):
    """Whatever the files hold, the floats in memory are `dtype`."""
    model = load(save_base(dtype=torch.float16), dtype=dtype)
    assert {tensor.dtype for tensor in model.parameters()} == {dtype}


def test_eager_is_eager(base):
    """The attention that is asked for is the one that runs."""
    assert load(base, attention="eager").config._attn_implementation == "eager"


def rewrite(path, change):
    """Load the weights of a directory, change the dict, save them again."""
    file = Path(path) / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), r"lacks weight model\.norm\.weight:"),
        (
            lambda t: [t.pop(name) for name in list(t) if "q_proj" in name],
            r"lacks weight model\.layers\.0\.self_attn\.q_proj\.weight and 1 other[,:;]",
        ),
        (lambda t: t.update({"score.weight": torch.zeros(2)}), r"unexpected weight score\.weight"),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(5)}),
            r"another shape of weight model\.norm\.weight \(\[5\] in the file, \[16\] in the model\)",
        ),
    ],
)
def test_weights_that_do_not_fit_are_an_error(base, change, message):
    """A missing, left-over or misshapen tensor, of which transformers would only warn, is refused by name."""
    rewrite(base, change)
    with pytest.raises(ModelError, match=message) as caught:
        load(base)
    assert base in str(caught.value)


def test_an_untied_head_must_be_there(save_base):
    """Where the embeddings are not tied, a missing head is a missing weight."""
    path = save_base("llama-untied")
    rewrite(path, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ModelError, match=r"lacks weight lm_head\.weight"):
        load(path)


def test_a_pickle_beside_is_never_read(base):
    """torch.load is not reached: a pickle that would run code does not."""
    (Path(base) / "model.safetensors").rename(Path(base) / "pytorch_model.bin")
    with pytest.raises(ModelError, match="pickles"):
        load(base)


def test_an_unknown_type_is_refused(base, edit_config):
    """A model_type that transformers does not know is a ModelError; no remote code is run for it."""
    edit_config(base, model_type="nosuchmodel", auto_map={"AutoModelForCausalLM": "modeling.Nothing"})
    (Path(base) / "modeling.py").write_text("raise SystemExit('remote code ran')")
    with pytest.raises(ModelError, match="cannot be loaded"):
        load(base)


def test_a_type_without_causal_model_is_refused(base):
    """An encoder-decoder directory that hides it is refused by transformers' own table."""
    config = T5Config(d_model=16, d_kv=4, num_layers=1, num_heads=2, vocab_size=10).to_dict()
    config |= {"architectures": ["T5ForCausalLM"], "is_encoder_decoder": False}
    (Path(base) / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="cannot be loaded"):
        load(base)


def test_a_hub_that_does_not_answer(monkeypatch):
    """A hub name with no network is a ModelError that names it (tests run offline)."""
    with pytest.raises(ModelError, match="nobody/no-such-model cannot be loaded"):
        load("nobody/no-such-model")


def test_a_path_that_is_none():
    """Bad paths are refused before transformers is asked."""
    with pytest.raises(ModelError, match="neither a directory here"):
        load("/no/such/model")
