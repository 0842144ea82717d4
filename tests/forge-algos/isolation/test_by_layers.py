"""Rounding that grows over many layers is no leak, and leaks of any layer are found beside it."""

from functools import partial

import pytest
import torch
import transformers
from torch import nn

from forge_algos import PackedBatchError, keep_documents_apart, shares_prompts
from forge_algos.batches._packed import packed_inputs
from forge_algos.isolation import _by_layers, _compare, _isolation
from forge_algos.isolation._alone import HOW
from forge_algos.isolation._compare import Compare
from forge_algos.isolation._isolation import (
    hidden_states,
    made_up_ids,
    made_up_lengths,
    require_isolation,
)
from forge_algos.isolation._layers import divided_layers

from ..oracle import CPU
from .test_prompt_sharing import forgetful, gathering

_SHAPE = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    # Products keep the size of their inputs, as those of 4,096 numbers do at the usual 0.02.
    "initializer_range": 0.16,
}
_OLD = {"vocab_size": 97, "hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 64}
CONFIGS = {
    "llama": lambda n: transformers.LlamaConfig(**_SHAPE, num_hidden_layers=n),
    "mixtral": lambda n: transformers.MixtralConfig(**_SHAPE, num_hidden_layers=n, num_local_experts=8),
    "opt": lambda n: transformers.OPTConfig(**_OLD, num_hidden_layers=n, word_embed_proj_dim=64, init_std=0.16, ffn_dim=128),
    "bloom": lambda n: transformers.BloomConfig(vocab_size=97, hidden_size=64, n_layer=n, n_head=4, initializer_range=0.16),
    "short convolutions": lambda n: transformers.Lfm2Config(
        **_SHAPE, layer_types=["conv", "conv", "conv", "full_attention"] * (n // 4), num_hidden_layers=n, conv_L_cache=3
    ),
    "state space beside attention": lambda n: transformers.FalconH1Config(
        **_SHAPE, num_hidden_layers=n, mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, mamba_n_groups=1
    ),
}


def deep(name, *, layers=32, fewer_than=12, attention="sdpa"):
    """Return a model in bfloat16 whose products of fewer rows are added up otherwise, as on a GPU."""
    config = CONFIGS[name](layers)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.bfloat16)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.forward = partial(_linear, module, module.forward, fewer_than)
    return model.eval()


def _linear(module, plain, fewer_than, x):
    """Add a product up in sixteen parts, each of which is rounded, where there are fewer rows."""
    if x.numel() // x.shape[-1] >= fewer_than:
        return plain(x)
    parts = zip(x.chunk(16, -1), module.weight.to(x.dtype).chunk(16, -1), strict=True)
    return sum(part @ weight.T for part, weight in parts) + (0 if module.bias is None else module.bias)


@torch.no_grad()
def rounding_exceeds(model):
    """Return whether a made-up document comes out otherwise than alone in a row that is looked at as a whole."""
    lengths = made_up_lengths(model)
    ids, _ = made_up_ids(model, sum(lengths), CPU)
    positions = torch.cat([torch.arange(length) for length in lengths])
    row = hidden_states(model, packed_inputs(ids, positions, torch.tensor([0, *lengths]).cumsum(0), max(lengths)))
    alone = [hidden_states(model, {"input_ids": each[None], "use_cache": False}) for each in ids.split(lengths)]
    with Compare(model) as compare:
        hidden_states(model, {"input_ids": ids[None], "use_cache": False})
        pairs = zip(row.split(lengths), alone, strict=True)
        return any(not compare.equal(lambda one=one: one, lambda other=other: other) for one, other in pairs)


@pytest.fixture
def by_layers(monkeypatch):
    """Have rows in few digits compared layer by layer, whatever their rounding has grown to."""
    monkeypatch.setattr(_compare, "equal_within_rounding", lambda _ours, _theirs, *, fine: fine)


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_rounding_of_many_layers_is_no_leak(name):
    """A row of which the whole looks otherwise passes, layer by layer; hooks and random state are as before."""
    model = deep(name)
    assert rounding_exceeds(model)
    state = torch.get_rng_state()
    require_isolation(model, device=CPU)
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def whole_row(module, *, both=False):
    """Have an attention layer see all of the row before a token, or behind it as well."""
    plain = module.forward

    def forward(hidden_states, position_embeddings, **_rest):
        see = torch.ones(2 * hidden_states.shape[1:2], dtype=torch.bool)
        see = see if both else see.tril()
        mask = torch.zeros(see.shape, dtype=torch.bfloat16).masked_fill(~see, torch.finfo(torch.bfloat16).min)
        return plain(hidden_states, position_embeddings=position_embeddings, attention_mask=mask[None, None])

    module.forward = forward


def runs_on(module):
    """Have a layer add a tenth of what the token before was given, of whichever document."""

    def leak(_module, args, output):
        before = nn.functional.pad(args[0], (0, 0, 1, 0))[:, : args[0].shape[1]]
        return output + 0.1 * before

    module.register_forward_hook(leak)


LEAKS = {
    "attention of one layer": lambda layers: [whole_row(layers[25].self_attn)],
    "attention of the last layer": lambda layers: [whole_row(layers[-1].self_attn)],
    "a token's state": lambda layers: [runs_on(layers[20])],
}


@pytest.mark.parametrize(("name", "leak"), [*(("llama", leak) for leak in LEAKS), ("mixtral", "attention of one layer")])
def test_a_leak_is_found_beside_rounding(name, leak):
    """What one layer of 32 carries from one document to the next is found."""
    model = deep(name)
    LEAKS[leak](model.model.layers)
    with pytest.raises(PackedBatchError, match="does not keep packed documents apart: the second of two"):
        require_isolation(model, device=CPU)


def test_what_comes_later_is_found():
    """A first document that sees the second is found."""
    model = deep("llama")
    whole_row(model.model.layers[5].self_attn, both=True)
    with pytest.raises(PackedBatchError, match="does not keep packed documents apart: the first of two"):
        require_isolation(model, device=CPU)


@pytest.mark.parametrize("name", ["opt", "short convolutions", "state space beside attention"])
def test_models_that_mix_documents_are_found_beside_rounding(name):
    """Positions that count on, convolutions and states that run over the border are found."""
    with pytest.raises(PackedBatchError, match="does not keep packed documents apart: the second of two"):
        require_isolation(deep(name, layers=8, fewer_than=24), device=CPU)


@pytest.mark.usefixtures("by_layers")
@pytest.mark.parametrize("layers", [2, 12])
def test_a_row_behind_a_prompt_of_the_models_own_is_found(layers):
    """CPM-Ant puts its own prompt before the row and sees all of it: in bfloat16 too it is refused, layer by layer."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "dim_head": 8, "dim_ff": 64, "num_hidden_layers": layers}
    model = transformers.CpmAntForCausalLM(transformers.CpmAntConfig(vocab_size=97, **sizes)).bfloat16().eval()
    with pytest.raises(PackedBatchError, match="does not keep packed documents apart: the first of two"):
        require_isolation(model, device=CPU)


@pytest.mark.usefixtures("by_layers")
def test_positions_that_are_small_beside_tokens_are_found():
    """Positions that count on are seen in what the first layer is given, though they are a twentieth of it."""
    for counts in (False, True):
        model = deep("llama", layers=4)
        table = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)) * 0.16 / 20

        def add(_module, _args, states, counts=counts, table=table):
            return states + table[torch.arange(states.shape[1]) * counts].to(states.dtype)

        model.model.embed_tokens.register_forward_hook(add)
        if not counts:
            require_isolation(model, device=CPU)
    with pytest.raises(PackedBatchError, match="does not keep packed documents apart: the second of two"):
        require_isolation(model, device=CPU)


@pytest.mark.usefixtures("by_layers")
def test_layers_with_a_state_that_are_divided_pass():
    """A model whose layers with a state run document by document is packed."""
    model = deep("state space beside attention", layers=2, fewer_than=24)
    packed, why = keep_documents_apart(model, device=CPU)
    assert packed, why
    assert divided_layers(model) == 2


@pytest.mark.usefixtures("by_layers")
def test_a_block_that_several_layers_share():
    """A block is looked at call by call: what it leaks in its last call alone is found."""
    model, calls = deep("llama", layers=4), []
    layers = model.model.layers
    for number in range(len(layers)):
        layers[number] = layers[0]
    require_isolation(model, device=CPU)

    def leak(_module, args, output):
        calls.append(1)
        return output if len(calls) % len(layers) else output + 0.1 * args[0].cumsum(1)

    layers[0].register_forward_hook(leak)
    with torch.no_grad():
        assert _isolation._problem(model, CPU) == "the second of two comes out otherwise than alone"


@pytest.mark.usefixtures("by_layers")
def test_autocast_has_rounding_of_its_own():
    """Float32 weights under autocast round as bfloat16 does: layers pass so, and a leak of one does not."""
    autocast = partial(torch.autocast, "cpu", torch.bfloat16)
    require_isolation(deep("llama", layers=4).float(), device=CPU, autocast=autocast)
    model = deep("llama", layers=4).float()
    whole_row(model.model.layers[2].self_attn)
    with pytest.raises(PackedBatchError, match="does not keep packed documents apart"):
        require_isolation(model, device=CPU, autocast=autocast)


def test_float32_is_compared_as_a_whole(monkeypatch):
    """In float32 the bound of 1e-4 decides alone."""
    monkeypatch.setattr(_compare, "apart_by_layers", lambda *_: pytest.fail("compared layer by layer"))
    model = deep("llama", layers=4).float()
    model.model.layers[0].register_forward_hook(lambda _module, _args, output: output + 1e-3 * output.cumsum(1))
    with pytest.raises(PackedBatchError, match="does not keep packed documents apart"):
        require_isolation(model, device=CPU)


def test_a_model_whose_blocks_are_not_known_is_compared_as_a_whole(monkeypatch):
    """Without blocks, or with blocks that are given anything but the row, the bound of the whole model decides."""
    monkeypatch.setattr(_by_layers, "repeated_blocks", lambda _model: [])
    with pytest.raises(PackedBatchError, match="does not keep packed documents apart"):
        require_isolation(deep("llama"), device=CPU)
    model = deep("llama")
    monkeypatch.setattr(_by_layers, "repeated_blocks", lambda _model: [model.model.embed_tokens])
    with pytest.raises(PackedBatchError, match="does not keep packed documents apart"):
        require_isolation(model, device=CPU)


@pytest.mark.parametrize("attention", [gathering, forgetful])
def test_prompts_are_shared_beside_rounding(attention):
    """Completions share a prompt where rounding alone tells them from completions alone, and no others do."""
    model = deep("llama", fewer_than=17, attention=f"test_{attention.__name__}")
    can, why = shares_prompts(model, device=CPU)
    assert can == (attention is gathering), why


@pytest.mark.usefixtures("by_layers")
def test_documents_that_are_run_alone_share_forwards():
    """Lines of documents pass, padded or, where a layer sees the padding, equally long."""
    model = deep("bloom", layers=4, attention="eager")
    packed, why = keep_documents_apart(model, device=CPU)
    assert not packed
    assert HOW["padded"] in why
    model = deep("bloom", layers=4, attention="eager")
    model.transformer.h[2].register_forward_hook(
        lambda _module, args, output: (output[0] + args[0].mean(1, keepdim=True), *output[1:])
    )
    assert HOW["equal"] in keep_documents_apart(model, device=CPU)[1]


def test_padding_that_is_seen_is_found_in_long_lines(monkeypatch):
    """A model that sees all of a line is given no padded ones: two places of 157, with a window of 150, would hardly show."""
    plain = nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        nn.functional,
        "scaled_dot_product_attention",
        lambda *given, **how: plain(*given, **{**how, "attn_mask": None, "is_causal": False}),
    )
    model = deep("llama", layers=4)
    model.config.block_size = 150
    model.config.max_position_embeddings = 512
    assert HOW["equal"] in keep_documents_apart(model, device=CPU)[1]
