"""Parts of a model, found through PEFT's and other wrappers."""

import torch
import transformers

from forge_algos import AdapterSettings, adapt
from forge_algos._modules import causal_model, decoder, head, mode, trainable, unwrap, vocabulary

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
    assert decoder(model.model) is None


def test_a_head_that_is_called_decoder():
    """What transformers finds by that name is the head, and the decoder is the model below it."""
    shape = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.ModernBertDecoderForCausalLM(transformers.ModernBertDecoderConfig(**shape, pad_token_id=0))
    assert (decoder(model), head(model)) == (model.model, model.decoder)


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
