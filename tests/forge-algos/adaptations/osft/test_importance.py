"""Importance of each target, measured on packed rows."""

import copy

import numpy as np
import pytest
import torch

from forge_algos import AdapterError, UnevenRanksError, osft_importance
from forge_algos.adaptations.base._targets import resolve_targets

from ...oracle import VOCAB, make, pack, samples
from ...threads import on_threads

ROWS = samples([5, 9, 3, 7])


def naive(model, examples, name):
    """Return the mean cosine over all tokens of a square target or of its decoder layer.
    One document at a time.
    """
    module, cosines = model.get_submodule(name), []
    square = module.in_features == module.out_features
    layer = int(name.split(".")[2])
    for ids, _ in examples:
        fed = []
        handle = module.register_forward_pre_hook(lambda _, args, fed=fed: fed.append(args[0]))
        with torch.no_grad():
            body = model.model
            # The last of `hidden_states` has been through the last norm: the layer's own output is caught by hand.
            made = []
            other = body.layers[layer].register_forward_hook(lambda _m, args, out, made=made: made.extend([args[0], out]))
            model(input_ids=torch.tensor(ids)[None], use_cache=False)
        handle.remove()
        other.remove()
        before, after = (fed[0], fed[0] @ module.weight.T) if square else made
        cosines.append(torch.cosine_similarity(before, after, dim=-1).flatten())
    return torch.cat(cosines).mean().item()


@pytest.mark.parametrize("architecture", ["llama-tied", "gemma2"])
def test_equals_the_naive_way(architecture):
    """Packed rows give the values of documents one by one.
    Each kind has mean 1, negative means become 0, and a bias is not part of W X.
    """
    model = make(architecture).eval()
    targets = resolve_targets(model, None)
    model.model.layers[0].self_attn.q_proj.bias = torch.nn.Parameter(torch.full((16,), 3.0))
    found = osft_importance(model, [pack(ROWS[:2]), pack(ROWS[2:])], targets=targets)
    assert list(found) == targets
    square = [name for name in targets if name.endswith(("q_proj", "o_proj"))]
    raw = {name: max(0.0, naive(model, ROWS, name)) for name in targets}
    assert 0.0 in raw.values()
    for kind in (square, [name for name in targets if name not in square]):
        mean = sum(raw[name] for name in kind) / len(kind)
        assert [found[name] for name in kind] == pytest.approx([raw[name] / mean for name in kind], rel=1e-4, abs=1e-6)
        assert sum(found[name] for name in kind) == pytest.approx(len(kind))


def test_leaves_no_trace():
    """Modes, weights, gradients and hooks are as before."""
    model = make()
    model.model.layers[1].eval()
    before = copy.deepcopy(model.state_dict())
    osft_importance(model, [pack(ROWS)], targets=resolve_targets(model, ["attention"]))
    assert model.training
    assert not model.model.layers[1].training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_ranks_add_up():
    """Two ranks with a row each get the same bits, and the values of one process with both rows."""
    models = [make(), make()]
    targets = resolve_targets(models[0], None)
    rows = [pack(ROWS[:2]), pack(ROWS[2:])]
    first, second = on_threads(lambda r: osft_importance(models[r.rank], [rows[r.rank]], targets=targets, parallel=r), 2)
    assert first == second
    assert first == pytest.approx(osft_importance(models[0], rows, targets=targets), rel=1e-5)


def test_uneven_ranks_are_refused():
    """Ranks with different numbers of rows all raise before the first forward.
    They would wait for each other without end.
    """
    model = make()
    targets = resolve_targets(model, None)
    with pytest.raises(UnevenRanksError, match="1 row and others not|2 rows and others not"):
        on_threads(lambda r: osft_importance(model, [pack(ROWS)] * (1 + r.rank), targets=targets, parallel=r), 2)


def test_no_row_is_refused():
    """Without rows there is nothing to measure on."""
    with pytest.raises(AdapterError, match="was given none"):
        osft_importance(make(), [], targets=["model.layers.0.mlp.up_proj"])


def test_nan_hidden_states_are_refused():
    """Hidden states that are NaN are reported here, not later as a rank that is NaN."""
    model = make()
    # Not among those that packing is tried with.
    token = int(ROWS[0][0][0])
    assert token not in (np.arange(12) * 7 + VOCAB // 3) % VOCAB
    with torch.no_grad():
        model.model.embed_tokens.weight[token] = float("nan")
    with pytest.raises(AdapterError, match="hidden states hold NaN"):
        osft_importance(model, [pack(ROWS)], targets=["model.layers.1.mlp.up_proj"])


def test_outside_of_layers_and_unvisited_count_as_one():
    """The head and an expert that no token visited have the mean importance, 1.
    The head lies in no layer, and an unvisited expert has no cosine.
    """
    model = make("llama-untied")
    model.model.layers[0].spare = torch.nn.Linear(16, 16)
    found = osft_importance(model, [pack(ROWS)], targets=["lm_head", "model.layers.0.spare", "model.layers.0.self_attn.q_proj"])
    assert found["lm_head"] == found["model.layers.0.spare"] == 1.0
