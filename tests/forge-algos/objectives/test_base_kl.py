"""KL divergence of a model from its base, at the learned tokens of packed rows."""

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from forge_algos import AdapterError, AdapterSettings, BaseKL, LossError, adapt, evaluate, token_changes

from ..oracle import CPU, make, pack, samples

LENGTHS = (5, 1, 9, 2, 7, 13)
EXAMPLES = samples(LENGTHS)
ADAPTERS = {
    "lora": AdapterSettings(adapter="lora", lora_r=4),
    "osft": AdapterSettings(adapter="osft", unfreeze_rank_ratio=0.5),
    "osft-factors": AdapterSettings(adapter="osft", unfreeze_rank_ratio=0.5, osft_form="factors"),
}


def disturbed(model, seed=0):
    """Move every trainable weight a little."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p += 0.05 * torch.randn(p.shape, generator=generator)
    return model


def naive(model, base, examples):
    """Sum p₀·log(p₀/p) over the vocabulary, token by token, one sample at a time, in float64; and both losses."""
    rows = []
    for ids, labels in examples:
        with torch.no_grad():
            ours, theirs = (m.eval()(input_ids=torch.tensor(ids)[None]).logits[0].double() for m in (model, base))
        for at, target in enumerate(labels[1:]):
            if target == -100:
                continue
            total = 0.0
            p, q = theirs[at].softmax(0).tolist(), ours[at].softmax(0).tolist()
            for mine, other in zip(p, q, strict=True):
                total += mine * (math.log(mine) - math.log(other))
            rows.append((total, -math.log(p[target]), -math.log(q[target])))
    return np.array(rows)


@pytest.mark.parametrize("name", ["llama-tied", "gemma2", "granite"])
def test_equals_a_naive_double_loop(name):
    """Mean, figures and each token's numbers are those of a loop over tokens and vocabulary."""
    base = make(name)
    model = disturbed(copy.deepcopy(base))
    expected = naive(model, base, EXAMPLES)
    found = evaluate(model, [pack(EXAMPLES)], objective=BaseKL(base=base))
    assert found.loss_count == len(expected)
    assert found.loss == pytest.approx(expected[:, 0].mean(), rel=1e-4)
    assert found.loss > 1e-3
    assert found.figures == pytest.approx({"base_nll": expected[:, 1].mean(), "nll": expected[:, 2].mean()}, rel=1e-5)
    (changes,) = token_changes(model, [pack(EXAMPLES)], base=base)
    mine = np.stack([changes.kl, changes.before, changes.after], axis=1)
    np.testing.assert_allclose(mine, expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_an_adapter_switched_off_is_the_base(adapter):
    """Without a second model, the figure equals that from a copy made before the adapter; 0 before it moves."""
    base = make()
    model = adapt(copy.deepcopy(base), ADAPTERS[adapter]).model
    off = BaseKL(base="adapter_off")
    assert evaluate(model, [pack(EXAMPLES)], objective=off).loss == pytest.approx(0, abs=1e-6)
    disturbed(model)
    found = evaluate(model, [pack(EXAMPLES)], objective=off)
    assert found.loss > 1e-3
    assert found.loss == pytest.approx(evaluate(model, [pack(EXAMPLES)], objective=BaseKL(base=base)).loss, rel=1e-4)


@given(cut=st.lists(st.booleans(), min_size=len(EXAMPLES) - 1, max_size=len(EXAMPLES) - 1))
def test_no_cut_changes_it(cut):
    """However samples are cut into rows, the mean is the same."""
    rows, model, base = [[EXAMPLES[0]]], MOVED[1], MOVED[0]
    for example, new in zip(EXAMPLES[1:], cut, strict=True):
        rows.append([example]) if new else rows[-1].append(example)
    found = evaluate(model, [pack(row) for row in rows], objective=BaseKL(base=base))
    assert found.loss == pytest.approx(evaluate(model, [pack(EXAMPLES)], objective=BaseKL(base=base)).loss, rel=1e-5)


MOVED = (make(), disturbed(make()))


def test_a_head_under_the_adapter_is_held_with_its_base():
    """A head that the adapter changes is scored for the base without the adapter."""
    base = make("granite")
    settings = AdapterSettings(adapter="lora", lora_r=4, target_modules=("lm_head",))
    model = disturbed(adapt(copy.deepcopy(base), settings).model)
    found = evaluate(model, [pack(EXAMPLES)], objective=BaseKL(base="adapter_off"))
    assert found.loss == pytest.approx(naive(model, base, EXAMPLES)[:, 0].mean(), rel=1e-3)
    assert found.loss > 1e-3


def test_what_has_no_base_is_refused():
    """The model itself, a model without an adapter, and an OSFT that moves the weights themselves are no base."""
    model = make()
    with pytest.raises(LossError, match="the model itself"):
        BaseKL(base=model).bind(model, device=CPU)
    with pytest.raises(AdapterError, match="no adapter"):
        BaseKL(base="adapter_off").bind(model, device=CPU)
    paper = adapt(make(), AdapterSettings(adapter="osft", osft_rule="paper")).model
    with pytest.raises(AdapterError, match="cannot be switched off"):
        BaseKL(base="adapter_off").bind(paper, device=CPU)
