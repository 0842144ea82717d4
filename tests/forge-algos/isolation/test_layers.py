"""Layers with a state run the documents of a packed row apart, while the rest of the model sees the row."""

import copy
import re

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from forge_algos import SFT, PackedBatchError, evaluate, guard_packed, keep_documents_apart, shares_prompts
from forge_algos.adaptations import osft_importance
from forge_algos.batches._packed import packed_inputs
from forge_algos.isolation import _rows
from forge_algos.isolation._alone import runs_alone
from forge_algos.isolation._layers import divide_layers, divided_layers, undivide_layers
from forge_algos.online import GenerateSampler

from ..oracle import CPU, assert_other_calls_are_equal, make, naive, pack, samples

LENGTHS = (5, 2, 9, 5, 17, 1, 40)
_SHAPE = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "initializer_range": 0.3,
}
_DELTA = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_hidden_layers": 3,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
}
# Four convolutions a layer, of which two stand in its attention.
_INKLING = _SHAPE | {
    "num_hidden_layers": 2,
    "layer_types": ["hybrid_sliding", "hybrid"],
    "mlp_layer_types": ["sparse", "sparse"],
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 4,
    "sliding_window_size": 6,
    "d_rel": 4,
    "rel_extent": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
}
CONFIGS = {
    "gated delta net": lambda: transformers.Qwen3NextConfig(
        **_SHAPE, **_DELTA, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8, shared_expert_intermediate_size=8
    ),
    "state space beside attention": lambda: transformers.FalconH1Config(
        **_SHAPE, num_hidden_layers=2, mamba_d_ssm=16, mamba_n_heads=4, mamba_d_head=4, mamba_d_state=4, mamba_n_groups=1
    ),
    "state space, then attention": lambda: transformers.BambaConfig(
        **_SHAPE,
        num_hidden_layers=2,
        attn_layer_indices=[1],
        mamba_n_heads=4,
        mamba_d_head=8,
        mamba_d_state=4,
        mamba_n_groups=1,
    ),
    "linear recurrence": lambda: transformers.RecurrentGemmaConfig(
        **_SHAPE, num_hidden_layers=3, lru_width=16, attention_window_size=8
    ),
    "state space that is told nothing": lambda: transformers.JambaConfig(
        **_SHAPE,
        num_hidden_layers=2,
        attn_layer_period=2,
        attn_layer_offset=1,
        num_experts=2,
        expert_layer_period=2,
        mamba_d_state=4,
        mamba_dt_rank=4,
        use_mamba_kernels=False,
    ),
    "several convolutions beside attention": lambda: transformers.InklingTextConfig(**_INKLING),
    "lightning attention": lambda: transformers.MiniMaxConfig(
        **_SHAPE,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        num_local_experts=4,
        num_experts_per_tok=2,
        block_size=8,
    ),
}


def hybrid(name="gated delta net", **settings):
    """Return a model of attention and of layers that carry one document of a row into the next."""
    torch.manual_seed(0)
    config = CONFIGS[name]()
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", **settings).train()


def gradients(model):
    """Return the gradients by name, and forget them."""
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_losses_and_gradients_are_those_of_each_document_by_itself(name):
    """A row that the model alone would mix is packed, and its sum and gradients are those of unpadded forwards."""
    model, examples = hybrid(name), samples(LENGTHS)
    with pytest.raises(PackedBatchError):
        SFT().bind(model, device=CPU)
    packed, why = keep_documents_apart(model, device=CPU)
    assert packed, why
    assert re.search(rf"{divided_layers(model)} layers? with a state or a convolution, run document by document", why)
    assert not runs_alone(model)
    with guard_packed(model):
        terms = SFT().bind(model, device=CPU)(pack(examples), [])
    terms.sum.backward()
    found = gradients(model)
    expected, count = naive(model, examples)
    expected.backward()
    assert terms.count == count
    torch.testing.assert_close(terms.sum, expected, rtol=1e-5, atol=1e-5)
    norm = sum(float(gradient.pow(2).sum()) for gradient in gradients_of(model).values()) ** 0.5
    for parameter, gradient in gradients_of(model).items():
        assert float((found[parameter] - gradient).norm()) <= 1e-5 * norm, parameter


def gradients_of(model):
    """Return the gradients by name."""
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("small", [1, 256])
def test_forwards_of_other_ranks_and_any_lines_give_the_same(small, monkeypatch):
    """Whatever documents share a forward, and however many forwards other ranks need, sum and gradients stay."""
    monkeypatch.setattr(_rows, "_SMALL", small)
    found, asked = [], []

    def more(number):
        asked.append(number)
        return number + 3

    for agree in (lambda number: number, more):
        model = hybrid()
        keep_documents_apart(model, device=CPU, agree=agree)
        bound = SFT().bind(model, device=CPU)
        asked.clear()
        terms = bound(pack(samples(LENGTHS)), [])
        terms.sum.backward()
        found.append((terms.sum.detach(), gradients(model)))
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-4)
    # Once a row, not once a layer.
    assert len(asked) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["gated delta net", "state space that is told nothing", "several convolutions beside attention"]
)
def test_checkpointed_layers_find_their_documents_again(name):
    """Two rows run forward before either runs backward, and each layer is run anew in its own row's documents.

    Also where the layer itself is not told where they begin, for as many steps as there are, and after it is undivided.
    """
    found = []
    for checkpointed in (False, True):
        model = hybrid(name)
        keep_documents_apart(model, device=CPU)
        if checkpointed:
            model.activation_checkpointing_enable({"use_reentrant": False})
        bound = SFT().bind(model, device=CPU)
        for _ in range(2):
            model.zero_grad()
            first, second = bound(pack(samples(LENGTHS)), []), bound(pack(samples((11, 3, 30))), [])
            (first.sum + second.sum).backward()
        found.append(gradients(model))
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)
    layer = model.model.layers[0]
    assert layer._gradient_checkpointing_func.func is not torch.utils.checkpoint.checkpoint
    undivide_layers(model)
    assert layer._gradient_checkpointing_func.func is torch.utils.checkpoint.checkpoint


def test_two_models_on_one_row():
    """A reference model, with ranks of its own, is asked for itself on the tensors of the same row."""
    row = packed_inputs(torch.arange(9), torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 4]), torch.tensor([0, 4, 9]), 5)
    for _ in range(2):
        model, asked = hybrid(), []
        keep_documents_apart(model, device=CPU, agree=lambda number, asked=asked: asked.append(number) or number)
        asked.clear()
        model(**row)
        assert asked == [1]


def test_importance_is_that_of_the_documents_tokens():
    """OSFT's importance of a layer with a state counts neither padding nor forwards that are made for other ranks."""
    targets = ["model.layers.0.linear_attn.out_proj", "model.layers.1.self_attn.o_proj", "model.layers.2.linear_attn.out_proj"]
    examples, model = samples((40, 3, 5, 2, 6)), hybrid()
    keep_documents_apart(model, device=CPU, packing="off")
    expected = osft_importance(model, [pack([example]) for example in examples], targets=targets)
    for agree in (lambda number: number, lambda number: number + 2):
        model = hybrid()
        keep_documents_apart(model, device=CPU, agree=agree)
        assert osft_importance(model, [pack(examples)], targets=targets) == pytest.approx(expected, rel=1e-4)


def test_an_evaluation_and_a_copy():
    """`evaluate` gives the mean over documents by themselves; a copy runs its own layers."""
    model, examples = hybrid().eval(), samples(LENGTHS)
    keep_documents_apart(model, device=CPU)
    with torch.no_grad():
        expected, count = naive(model, examples)
    again = copy.deepcopy(model)
    nn.init.zeros_(again.model.layers[0].linear_attn.out_proj.weight)
    assert evaluate(model, [pack(examples)], objective=SFT()).loss == pytest.approx(float(expected) / count, rel=1e-5)
    with torch.no_grad():
        expected, count = naive(again, examples)
    assert evaluate(again, [pack(examples)], objective=SFT()).loss == pytest.approx(float(expected) / count, rel=1e-5)


def test_other_calls_are_as_before():
    """A padded batch under a mask, and a cache, reach the layers unchanged."""
    plain, model = hybrid().eval(), hybrid().eval()
    keep_documents_apart(model, device=CPU)
    assert_other_calls_are_equal(model, plain)


def test_completions_do_not_share_a_prompt():
    """A completion begins with the state that its prompt leaves behind, which a row with the prompt once does not have."""
    model = hybrid()
    keep_documents_apart(model, device=CPU)
    can, why = shares_prompts(model, device=CPU)
    assert not can, why


def test_nothing_to_divide():
    """A model without such layers is left alone, one whose documents still mix is as it was, and so is one undivided."""
    assert divide_layers(make()) == []
    assert divided_layers(make()) == 0
    model = hybrid()
    model.model.norm.register_forward_hook(lambda _module, _args, output: output + output.cumsum(1) * 0.1)
    packed, why = keep_documents_apart(model, device=CPU)
    assert not packed
    assert "documents are run alone" in why
    assert divided_layers(model) == 0
    model = hybrid()
    assert divide_layers(model) == ["model.layers.0.linear_attn", "model.layers.2.linear_attn"]
    undivide_layers(model)
    with pytest.raises(PackedBatchError, match="cannot run a packed row"):
        SFT().bind(model, device=CPU)


def test_packing_on_is_taken():
    """packing=on no longer refuses a model whose layers can be divided; packing=off leaves them as they are."""
    assert keep_documents_apart(hybrid(), device=CPU, packing="on")[0]
    model = hybrid()
    assert not keep_documents_apart(model, device=CPU, packing="off")[0]
    assert divided_layers(model) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lightning attention", "gated delta net"])
def test_prompts_are_sampled_as_each_alone(name):
    """Beside prompts of other lengths a prompt gets the completions that plain transformers gives it by itself."""
    model, plain = hybrid(name), hybrid(name)
    keep_documents_apart(model, device=CPU)
    prompts = [np.arange(length) * 7 % 50 + 3 for length in (3, 11, 2, 30)]

    def sample(model, asked, numbers=None):
        sampler = GenerateSampler(model, eos_ids=[2], pad_id=0, batch_tokens=4096)
        settings = {"num_generations": 2, "max_new_tokens": 6, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": 1}
        return [made.ids.tolist() for made in sampler.sample(asked, **settings, numbers=numbers)]

    alone = [ids for number, prompt in enumerate(prompts) for ids in sample(plain, [prompt], [number])]
    assert sample(model, prompts) == alone
