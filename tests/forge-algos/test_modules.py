"""Parts of a model, found through PEFT's and other wrappers."""

import pytest
import torch
import transformers

from forge_algos import AdapterError, AdapterSettings, OptimizerSettings, adapt, first_dropout, make_optimizer
from forge_algos._cache_argument import cache_argument
from forge_algos._modules import (
    causal_model,
    decoder,
    embeddings,
    head,
    headless,
    language_modules,
    mode,
    text_config,
    trainable,
    unwrap,
    vocabulary,
)

from .oracle import VOCAB, make


class Wrapper(torch.nn.Module):
    """A wrapper that forwards attributes to the model, as DeepSpeed's engine does."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


def test_the_parts_of_a_model():
    """Causal model, decoder, head and vocabulary are found through every wrapper.
    And None where there is none.
    """
    model = make("llama-untied")
    for seen in (model, adapt(make("llama-untied"), AdapterSettings(adapter="lora")).model):
        assert type(causal_model(seen)) is type(model)
        assert decoder(seen) is causal_model(seen).model
        assert head(seen) is causal_model(seen).lm_head
        assert vocabulary(seen) == VOCAB
        wrapped = Wrapper(Wrapper(seen))
        assert unwrap(wrapped) is seen
        assert causal_model(wrapped) is causal_model(seen)
        assert (decoder(wrapped), head(wrapped), vocabulary(wrapped)) == (decoder(seen), head(seen), VOCAB)
    plain = torch.nn.Linear(2, 2)
    assert (decoder(plain), head(plain), vocabulary(plain), causal_model(plain)) == (None, None, None, plain)
    assert decoder(model.model) is model.model  # hidden states and no more, as AutoModel loads it
    assert headless(model.model)
    assert not headless(model)


def test_a_head_that_is_called_decoder():
    """What transformers finds by that name is the head, and the decoder is the model below it."""
    shape = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.ModernBertDecoderForCausalLM(transformers.ModernBertDecoderConfig(**shape, pad_token_id=0))
    assert (decoder(model), head(model)) == (model.model, model.decoder)


TEXT = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
}
TOWER = {
    "hidden_size": 8,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def gemma3():
    """A Gemma 3 whose vision tower has projections called as the language model's."""
    config = transformers.Gemma3Config(text_config=TEXT, vision_config=TOWER, mm_tokens_per_image=4, image_token_id=60)
    return transformers.Gemma3ForConditionalGeneration(config)


def llama4():
    """A Llama 4, whose language model is a causal model of its own."""
    vision = TOWER | {"vision_output_dim": 8, "projector_input_dim": 8, "projector_output_dim": 8}
    text = TEXT | {"intermediate_size_mlp": 24, "num_local_experts": 2, "interleave_moe_layer_step": 2}
    config = transformers.Llama4Config(text_config=text, vision_config=vision, image_token_index=60)
    return transformers.Llama4ForConditionalGeneration(config)


def test_the_parts_of_a_model_of_several_modalities():
    """The decoder is the outermost module that ends in the hidden states that the head is fed; the language part lies apart."""
    model = gemma3()
    assert decoder(model) is model.model
    assert language_modules(model) == {*model.model.language_model.modules(), model.lm_head}
    assert text_config(model) is model.config.text_config
    nested = llama4()
    assert decoder(nested) is nested.language_model.model
    assert head(nested) is nested.language_model.lm_head
    assert embeddings(nested) is nested.language_model.model.embed_tokens
    assert language_modules(nested) == set(nested.language_model.modules())
    # transformers 5.24 asks Llama 4's text model for images.
    runs = (model, nested) if cache_argument() == "past_key_values" else (model,)
    for one in runs:
        seen = []
        handle = decoder(one).register_forward_hook(lambda _module, _args, output, seen=seen: seen.append(output))
        logits = one(input_ids=torch.arange(5)[None], use_cache=False).logits
        handle.remove()
        assert torch.equal(head(one)(seen[0].last_hidden_state), logits)
    plain = make("llama-untied")
    assert language_modules(plain) == set(plain.modules())
    assert text_config(plain) is plain.config
    assert text_config(torch.nn.Linear(1, 1)) is None


@pytest.mark.parametrize("adapter", ["lora", "osft"])
@pytest.mark.parametrize("targets", [None, ("q_proj",), ("attention",), ("*.q_proj",)])
def test_targets_are_of_the_language_part(adapter, targets):
    """Whatever selects them, targets lie in the language part; so does all that an optimizer holds."""
    model = gemma3()
    language = {id(p) for module in language_modules(model) for p in module.parameters()}
    tower = {id(p) for p in model.parameters()} - language
    names = set(model.model.vision_tower.state_dict())
    assert any(name.endswith("q_proj.weight") for name in names)
    rest = {"osft_train_rest": ("embeddings", "norms")} if adapter == "osft" else {}
    adapted = adapt(model, AdapterSettings(adapter=adapter, target_modules=targets, **rest)).model
    optimizer = make_optimizer(adapted, OptimizerSettings())
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held
    assert not held & tower
    assert set(model.model.vision_tower.state_dict()) == names


def test_a_target_outside_of_the_language_part():
    """It would never learn from text, so it matches nothing, by its full name either."""
    target = "model.vision_tower.encoder.layers.0.self_attn.q_proj"
    model = gemma3()
    assert isinstance(model.get_submodule(target), torch.nn.Linear)
    with pytest.raises(AdapterError, match="matches no linear layer"):
        adapt(model, AdapterSettings(adapter="lora", target_modules=(target,)))


def test_trainable():
    """Parameters that need a gradient are trainable."""
    model = torch.nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    assert [id(p) for p in trainable(model)] == [id(model.weight)]


def test_modes_are_restored_one_by_one():
    """After the block each module has its mode again, after an error too."""
    model = make()
    model.lm_head.eval()
    before = [m.training for m in model.modules()]
    try:
        with mode(model, training=False):
            assert not any(m.training for m in model.modules())
            raise KeyError
    except KeyError:
        pass
    assert [m.training for m in model.modules()] == before


def test_dropout_is_found_where_it_is_not_zero():
    """As a module of an adapter, as a number of an attention layer, or not at all."""
    assert first_dropout(make()) is None
    settings = AdapterSettings(adapter="lora", lora_r=2, lora_dropout=0.1)
    assert first_dropout(adapt(make(), AdapterSettings(adapter="lora", lora_r=2)).model) is None
    name, share = first_dropout(adapt(make(), settings).model)
    assert name.endswith("lora_dropout.default")
    assert share == 0.1
    attention = make()
    attention.model.layers[1].self_attn.attention_dropout = 0.2
    assert first_dropout(attention) == ("model.layers.1.self_attn.attention_dropout", 0.2)
    block = make()
    block.model.layers[1].resid_pdrop = 0.3
    assert first_dropout(block) == ("model.layers.1.resid_pdrop", 0.3)
    noisy = make()
    noisy.model.layers[0].mlp.router_jitter_noise = 0.01
    assert first_dropout(noisy) == ("model.layers.0.mlp.router_jitter_noise", 0.01)
