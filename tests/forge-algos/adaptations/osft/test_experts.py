"""OSFT of expert matrices: each by itself, as if it were a linear layer, in every family's layout."""

import pytest
import torch

from forge_algos import AdapterError, keep_documents_apart
from forge_algos.adaptations import osft_moved, switched_off

from ....lanes import quick_keeps
from ...experts import E, mixture, stack_of, with_linear_experts
from ...oracle import CPU
from ...osft import RULES, STRICT, leaks, osft, run, settings_of, steps, trained, values, weight_of

ONLY = {"target_modules": ("experts",)}
KEYS = ("gate_up_proj", "down_proj")
IDS = torch.arange(3, 14)[None]


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


@pytest.mark.parametrize("rule", RULES)
def test_stacks_are_trained_as_linear_layers_one_by_one(rule):
    """Four steps of AdamW with weight decay and clipping move a stack's matrices where they move linear layers.
    The oracle is OSFT of the same model with a linear layer for each matrix.
    """
    stacked = osft(mixture(), **ONLY, **RULES[rule])
    linear = osft(with_linear_experts(mixture()), **ONLY, **RULES[rule])
    assert (len(stacked.plan), len(linear.plan)) == (4, 4 * E)
    outputs = [run(adaptation, steps(4)) for adaptation in (stacked, linear)]
    for ours, theirs in zip(*outputs, strict=True):
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-5)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-4)
    begun = values(mixture())
    oracle = with_linear_experts(mixture())
    oracle.load_state_dict(linear.plain_state())
    after = stacked.plain_state()
    for layer in (0, 1):
        for key in KEYS:
            name = f"model.layers.{layer}.mlp.experts.{key}"
            move, expected = after[name] - begun[name], stack_of(oracle, layer, key).detach() - begun[name]
            assert expected.norm() > 1e-2
            assert (move - expected).norm() < 1e-3 * expected.norm()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("family", quick_keeps(["qwen3_moe", "gpt_oss"], ["qwen3_moe", "gpt_oss", "llama4_text", "jetmoe"]))
def test_no_expert_moves_in_its_protected_directions(family, rule):
    """What a run adds to each matrix keeps its rule, whichever of inputs and outputs come first.
    A plain model with the plain state computes the same.
    """
    before = values(mixture(family))
    adaptation = osft(mixture(family), **RULES[rule])
    keep_documents_apart(adaptation.model, device=CPU)
    run(adaptation, steps(3))
    left, right, both = leaks(adaptation, before)
    assert both < 1e-5
    if rule in STRICT:
        assert max(left, right) < 1e-5
    plain = mixture(family)
    plain.load_state_dict(adaptation.plain_state())
    assert adaptation.plain_state().keys() == before.keys()
    torch.testing.assert_close(logits(plain), logits(adaptation.model), rtol=0, atol=1e-4)


@pytest.mark.parametrize("form", STRICT)
def test_switched_off_it_is_the_base(form):
    """Inside `switched_off` the experts compute with their own weights, to the bit; afterwards as before."""
    base = logits(mixture())
    adaptation = osft(mixture(), **STRICT[form])
    run(adaptation, steps(2))
    moved = logits(adaptation.model)
    with switched_off(adaptation.model):
        assert torch.equal(logits(adaptation.model), base)
    assert torch.equal(logits(adaptation.model), moved)
    assert (moved - base).abs().max() > 1e-3
    experts = adaptation.model.model.layers[0].mlp.experts
    assert isinstance(experts.gate_up_proj, torch.nn.Parameter)


def test_all_and_some_directions():
    """Ratio 1 trains the stacks as they are, `rank_pattern` names them, and too high a number is refused."""
    whole = osft(mixture(), **ONLY, unfreeze_rank_ratio=1.0)
    assert trained(whole.model) == {f"model.layers.{layer}.mlp.experts.{key}" for layer in (0, 1) for key in KEYS}
    mixed = osft(mixture(), **ONLY, rank_pattern=("experts.down_proj=0", "gate_up_proj=3"))
    assert {entry["free"] for name, entry in mixed.plan.items() if name.endswith("down_proj")} == {0}
    entry = mixed.plan["model.layers.0.mlp.experts.gate_up_proj"]
    assert (entry["shape"], entry["free"], entry["protected"]) == ([E, 24, 16], 3, 13)
    with pytest.raises(AdapterError, match="is .24, 16. and has 16 directions"):
        osft(mixture(), **ONLY, rank_pattern=("gate_up_proj=17",))


def test_what_is_kept_and_measured(tmp_path):
    """The log says what lies beside the weights; a matrix has a file of its own; a broken one is named.
    A stack's change is measured over its matrices.
    """
    adaptation = osft(mixture(), **ONLY)
    assert "4 targets (16 expert matrices among them, each decomposed by itself)" in adaptation.describe()[0]
    kept = sum(b.nbytes for m in adaptation.model.modules() for b in m.buffers(recurse=False) if "Direct" in type(m).__name__)
    assert f"{kept / 2**20:,.1f} MiB of singular vectors" in adaptation.describe()[2]
    before, plan = values(mixture()), adaptation.plan
    run(adaptation, steps(3), settings_of())
    after = adaptation.plain_state()
    for name, entry in plan.items():
        key = weight_of(name, entry)
        found = osft_moved(name, before[key], after[key], entry, svd="exact", cache=tmp_path)
        delta = after[key].double() - before[key].double()
        assert (found.shape, found.experts, found.anew) == (tuple(entry["shape"][1:]), E, False)
        assert found.most == max(range(E), key=lambda e: delta[e].norm())
        assert found.moved == pytest.approx(float(delta.norm() / before[key].double().norm()))
        assert 0 < found.leak("strict") < 1e-4
        U = torch.linalg.svd(before[key].double()).U[..., : entry["protected"]]
        drawn = before[key] + torch.randn_like(before[key])
        drawn_delta = drawn.double() - before[key].double()
        other = osft_moved(name, before[key], drawn, entry, svd="exact", cache=tmp_path)
        assert other.outputs == pytest.approx(float((U.mT @ drawn_delta).norm() / drawn_delta.norm()), rel=1e-4)
    assert len(list(tmp_path.glob("*.safetensors"))) == 4 * E
    broken = mixture()
    with torch.no_grad():
        broken.model.layers[1].mlp.experts.down_proj[2, 0, 0] = torch.nan
    with pytest.raises(AdapterError, match=r"experts.down_proj\[2\] holds NaN"):
        osft(broken, **ONLY)
