"""A model without the effect of its adaptation, while a block runs."""

import pytest
import torch

from forge_algos import AdapterError, AdapterSettings, adapt
from forge_algos.adaptations._switched_off import switched_off

from ..oracle import make
from ..osft import STRICT, osft, run, steps

IDS = torch.arange(3, 12)[None]


class Wrapped(torch.nn.Module):
    """A wrapper like DistributedDataParallel."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, **inputs):
        return self.module(**inputs)


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


@pytest.mark.parametrize("wrap", [lambda model: model, Wrapped], ids=["bare", "wrapped"])
@pytest.mark.parametrize("rule", STRICT)
def test_osft_off_is_exactly_the_base(rule, wrap):
    """Inside the block the model is the base to the bit, outside as trained, after an error too.
    Leaving an inner block does not end the outer one.
    """
    adaptation = osft(**STRICT[rule])
    run(adaptation, steps(10))
    model = wrap(adaptation.model)
    on, base = logits(model), logits(make())
    assert (on - base).abs().max() > 1e-2
    with switched_off(model):
        assert torch.equal(logits(model), base)
        with switched_off(model):
            pass
        assert torch.equal(logits(model), base)
    assert torch.equal(logits(model), on)
    with pytest.raises(KeyError), switched_off(model):
        raise KeyError
    assert torch.equal(logits(model), on)


def test_pefts_adapter_off_is_the_base():
    """The same call switches off PEFT's adapters."""
    model = adapt(make(), AdapterSettings(adapter="lora", lora_r=3)).model
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    base = logits(make())
    assert (logits(model) - base).abs().max() > 1e-2
    with switched_off(model):
        torch.testing.assert_close(logits(model), base, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"osft_rule": "paper"}, "osft_rule='paper' moves"),
        ({"unfreeze_rank_ratio": 1.0}, "all of whose directions are free moves"),
        ({"rank_pattern": ("q_proj=16",)}, "all of whose directions are free moves"),
        ({"osft_train_rest": ("norms", "embeddings")}, "osft_train_rest=norms,embeddings moves"),
    ],
)
def test_weights_that_moved_themselves_cannot_be_switched_off(changes, words):
    """Where the model's own weights train, the error names them and what to do."""
    model = osft(**changes).model
    with pytest.raises(AdapterError, match=f"{words} the model's own weights; set reference='stored'"), switched_off(model):
        pass


def test_a_model_without_an_adaptation_is_refused():
    """A model without an adaptation is refused by its class."""
    with pytest.raises(AdapterError, match="LlamaForCausalLM carries no adapter"), switched_off(make()):
        pass
