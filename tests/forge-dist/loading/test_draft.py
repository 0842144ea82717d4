"""A small random model has a layer of each kind, and nothing of the weights."""

import json

import pytest
import torch
import transformers

from forge_dist import LoadRequest, ModelError, draft_model

CPU = torch.device("cpu")
SHAPE = {"vocab_size": 5000, "hidden_size": 64, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}


def saved(config, path):
    """Write a configuration alone, without weights; return the request for it."""
    config.save_pretrained(path)
    return LoadRequest(model_path=str(path), dtype=torch.float32, attention="eager")


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        (transformers.LlamaConfig(**SHAPE, num_hidden_layers=32), 2),
        (transformers.Gemma3TextConfig(**SHAPE, head_dim=16, num_hidden_layers=26, sliding_window=512), 6),
        (transformers.Qwen3_5TextConfig(**SHAPE, head_dim=16, num_hidden_layers=24), 4),
        (transformers.GptOssConfig(**SHAPE, head_dim=16, num_hidden_layers=24, num_local_experts=4), 2),
        (transformers.JambaConfig(**SHAPE, num_hidden_layers=32, attn_layer_period=8, attn_layer_offset=4), 8),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_layers_of_each_kind(config, layers, tmp_path):
    """The first layers, to one of each kind; narrow, short-sighted, and with few ids."""
    before = torch.get_rng_state()
    model = draft_model(saved(config, tmp_path), device=CPU)
    assert torch.equal(before, torch.get_rng_state())
    text = model.config
    assert text.num_hidden_layers == layers
    assert model.get_input_embeddings().num_embeddings == 256
    assert (getattr(text, "sliding_window", None) or 0) <= 16
    assert text.hidden_size == 64
    assert not model.training
    out = model(input_ids=torch.arange(20)[None], use_cache=False)
    assert out.logits.isfinite().all()
    assert set(getattr(text, "layer_types", None) or ()) == set(getattr(config, "layer_types", None) or ())


def test_token_ids_and_shared_caches(tmp_path):
    """Ids that a class must have stay numbers in the small vocabulary; layers that share caches are no obstacle."""
    shape = {**SHAPE, "num_hidden_layers": 4}
    decoder = draft_model(saved(transformers.ModernBertDecoderConfig(**shape), tmp_path / "decoder"), device=CPU)
    assert decoder.config.pad_token_id <= 255
    shared = transformers.Gemma4TextConfig(**shape, head_dim=16, num_kv_shared_layers=2)
    assert draft_model(saved(shared, tmp_path / "shared"), device=CPU) is not None


def test_what_cannot_be_made(tmp_path):
    """A hub name, a class that is not there, and a model that stays large are left alone; a wrong attention is an error."""
    assert draft_model(LoadRequest(model_path="org/name", dtype=torch.float32), device=CPU) is None
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "unheard_of"}))
    assert draft_model(LoadRequest(model_path=str(tmp_path), dtype=torch.float32), device=CPU) is None
    large = transformers.LlamaConfig(hidden_size=32767, num_attention_heads=7, head_dim=4680)
    assert draft_model(saved(large, tmp_path / "large"), device=CPU) is None
    small = saved(transformers.LlamaConfig(**SHAPE), tmp_path / "small")
    wide = draft_model(saved(transformers.LlamaConfig(hidden_size=8192, num_attention_heads=64), tmp_path / "w"), device=CPU)
    assert wide.config.hidden_size < 8192
    assert sum(p.numel() for p in wide.parameters()) <= 60_000_000
    with pytest.raises(ModelError, match="attention 'wrong' is unknown"):
        draft_model(LoadRequest(model_path=small.model_path, dtype=torch.float32, attention="wrong"), device=CPU)
