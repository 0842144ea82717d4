"""Activation checkpointing: what is computed twice, and that nothing else changes."""

import pytest
import torch
import transformers
from torch.nn.attention import varlen  # noqa: F401 - registers its operator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

from forge_dist import StrategyError, StrategySettings, make_strategy
from forge_dist.strategies._wrappers import _PRODUCTS, _policy

from ..training import alone

CPU = torch.device("cpu")
LAYERS, PRODUCTS = 2, 7  # of a llama's layer: queries, keys, values, output; gate, up, down


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A llama of two layers."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=16, intermediate_size=24, num_hidden_layers=LAYERS, num_attention_heads=2
    )
    folder = tmp_path_factory.mktemp("llama")
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


class Calls(TorchDispatchMode):
    """Counts the calls of kernels by name."""

    def __init__(self):
        super().__init__()
        self.found = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func).split(".")[1]
        self.found[name] = self.found.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def passed(path, attention="sdpa", **options):
    """Return loss, gradients, and the calls of a forward and of its backward pass."""
    with alone() as ranks:
        strategy = make_strategy(StrategySettings(strategy="single", **options), ranks, device=CPU, adapter=False)
        model = strategy.load(path, dtype=torch.float32, attention=attention)
        model, _ = strategy.wrap(model, lambda model: torch.optim.SGD(model.parameters()))
        model.train()
        ids = torch.arange(12)[None]
        with Calls() as forward:
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        with Calls() as backward:
            strategy.backward(loss)
    return loss.detach(), [p.grad for p in model.parameters()], forward.found, backward.found


def test_what_is_computed_twice(path):
    """full computes the products of the layers twice, selective none, and its attention once; losses and gradients are equal.

    Of the rest (norms, rotations, the gate) selective computes as much again as full does.
    """
    loss, gradients, forward, backward = passed(path)
    attention = next(name for name in forward if name.startswith("_scaled_dot_product"))
    again = {}
    for kind in ("full", "selective"):
        loss_again, gradients_again, forward_again, found = passed(path, activation_checkpointing=kind)
        assert torch.equal(loss_again, loss)
        assert all(map(torch.equal, gradients_again, gradients))
        assert forward_again["mm"] == forward["mm"]
        again[kind] = {name: found.get(name, 0) - backward.get(name, 0) for name in ("mm", attention, "rsqrt", "silu")}
    # What follows the last product of a layer is not needed again, nor is that product itself.
    assert again["full"] == {"mm": LAYERS * (PRODUCTS - 1), attention: LAYERS, "rsqrt": 2 * LAYERS, "silu": LAYERS}
    assert again["selective"] == {"mm": 0, attention: 0, "rsqrt": 2 * LAYERS, "silu": LAYERS}


def test_biases_of_experts_are_added_to_no_kept_product(tmp_path):
    """gpt-oss adds them in place: selective computes those products again, and losses and gradients are equal."""
    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        vocab_size=61,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_local_experts=2,
        num_experts_per_tok=1,
    )
    transformers.GptOssForCausalLM(config).save_pretrained(tmp_path)
    loss, gradients, *_ = passed(str(tmp_path), "eager")
    loss_again, gradients_again, *_ = passed(str(tmp_path), "eager", activation_checkpointing="selective")
    assert torch.equal(loss_again, loss)
    assert all(map(torch.equal, gradients_again, gradients))


def test_attention_of_packed_rows_on_a_gpu_is_kept():
    """The kernel for variable lengths, which is no operator of aten, is one of those whose outputs are kept."""
    assert _policy(_PRODUCTS, None, torch.ops.torch_attn._varlen_attn.default) == CheckpointPolicy.MUST_SAVE
    assert _policy(_PRODUCTS, None, torch.ops.aten.silu.default) == CheckpointPolicy.PREFER_RECOMPUTE


def test_inputs_of_layers_go_to_the_host(path, monkeypatch):
    """With activation_offloading what the layers keep goes through torch's `save_on_cpu`, and gradients are the same."""
    packed = []
    own = torch.autograd.graph.save_on_cpu

    class Seen(own):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **{**kwargs, "pin_memory": False})  # which takes an accelerator
            pack = self.pack_hook
            self.pack_hook = lambda tensor: packed.append(tensor.shape) or pack(tensor)

    monkeypatch.setattr(transformers.modeling_utils, "save_on_cpu", Seen)
    found = []
    for offloads in (False, True):
        with alone() as ranks:
            settings = StrategySettings(strategy="single", activation_checkpointing="full")
            strategy = make_strategy(settings, ranks, device=CPU, adapter=False)
            object.__setattr__(strategy.settings, "activation_offloading", offloads)  # a cpu takes no such setting
            model, _ = strategy.wrap(
                strategy.load(path, dtype=torch.float32), lambda model: torch.optim.SGD(model.parameters())
            )
            model.train()
            ids = torch.arange(12)[None]
            strategy.backward(model(input_ids=ids, labels=ids, use_cache=False).loss)
            found.append([p.grad for p in model.parameters()])
        assert bool(packed) == offloads
    assert packed.count((1, 12, 16)) == LAYERS
    assert all(map(torch.equal, *found))


def test_offloading_on_the_host_is_refused():
    """A cpu's activations are in the host's memory: refused before a model is read. So is offloading without checkpointing."""
    with alone() as ranks, pytest.raises(StrategyError, match="activation_offloading has no effect on the cpu"):
        settings = StrategySettings(strategy="single", activation_checkpointing=True, activation_offloading=True)
        make_strategy(settings, ranks, device=CPU, adapter=False)
    for kind in ("none", "selective", "auto"):
        with pytest.raises(ValueError, match=f"no effect with activation_checkpointing={kind}"):
            StrategySettings(activation_checkpointing=kind, activation_offloading=True)


def test_true_and_false_are_words():
    """true is full and false is none; what is still to be chosen cannot be wrapped."""
    kinds = {value: StrategySettings(activation_checkpointing=value).activation_checkpointing for value in (True, False)}
    assert kinds == {True: "full", False: "none"}
    with pytest.raises(ValueError, match="activation_checkpointing must be one of none, full, selective, auto"):
        StrategySettings(activation_checkpointing="yes")
    with alone() as ranks:
        strategy = make_strategy(StrategySettings(activation_checkpointing="auto"), ranks, device=CPU, adapter=False)
        with pytest.raises(StrategyError, match="is chosen by who has a memory plan"):
            strategy.checkpoint_activations(torch.nn.Linear(1, 1))
