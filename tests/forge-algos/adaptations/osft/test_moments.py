"""OSFT that protects what layers are given on rows of earlier tasks: moments, directions, and what stays."""

import copy
import sys
import types
from functools import partial

import numpy as np
import pytest
import torch

from forge_algos import AdapterError, AdapterSettings, adapt, osft_moments
from forge_algos.adaptations.base._adaptation import OneRank
from forge_algos.adaptations.base._targets import resolve_targets
from forge_algos.adaptations.osft._bases import Inputs, decompose_inputs, walk_bases

from ...experts import mixture
from ...oracle import make, pack, samples
from ...osft import learns, moved, run, steps, values
from .test_attach import gpt2

EARLIER = samples([5, 9, 3, 7], seed=8)
INPUTS = {"adapter": "osft", "osft_directions": "inputs"}


def protecting(model, rows=EARLIER, *, cache=None, free=None, known_by="", calls=None, **changes):
    """Return the model under OSFT that protects its inputs on `rows`; `calls` gets the targets of each measurement."""

    def measured(targets):
        if calls is not None:
            calls.append(list(targets))
        return _moments(model, [pack(rows[:2]), pack(rows[2:])] if len(rows) > 1 else [pack(rows)], targets)

    return adapt(model, AdapterSettings(**{**INPUTS, **changes}), cache=cache, moments=measured, rows=known_by, free=free)


def _moments(model, batches, targets):
    return osft_moments(model, batches, targets=targets)


def logits(model, rows):
    with torch.no_grad():
        return [model(input_ids=torch.tensor(ids)[None], use_cache=False).logits for ids, _ in rows]


def naive(model, name):
    """Return E[x xᵀ] of a target over all tokens, one document at a time."""
    fed = []
    handle = model.get_submodule(name).register_forward_pre_hook(lambda _, args: fed.append(args[0][0].double()))
    logits(model, EARLIER)
    handle.remove()
    tokens = torch.cat(fed)
    return tokens.T @ tokens / len(tokens)


@pytest.mark.parametrize("architecture", ["llama-tied", "gemma2"])
def test_equals_the_naive_way(architecture):
    """Packed rows give the moments of documents one by one; layers with one input have one moment."""
    model = make(architecture).eval()
    names = resolve_targets(model, None)
    found = osft_moments(model, [pack(EARLIER[:2]), pack(EARLIER[2:])], targets={name: [name] for name in names})
    assert list(found) == names
    for name, moment in found.items():
        torch.testing.assert_close(moment, naive(model, name), rtol=1e-5, atol=1e-6)
    layer = "model.layers.0.self_attn"
    assert torch.equal(found[f"{layer}.q_proj"], found[f"{layer}.k_proj"])


@pytest.mark.parametrize(
    "error",
    [TypeError("Cannot convert a MPS Tensor to float64"), RuntimeError("Required aspect fp64 is not supported on the device")],
)
def test_a_device_without_float64_measures_in_float32(monkeypatch, error):
    """MPS and some GPUs of Intel say so in words of their own; another error stays one."""

    def double(_self):
        raise error

    name = "model.layers.0.mlp.up_proj"
    exact = osft_moments(make().eval(), [pack(EARLIER)], targets={name: [name]})[name]
    monkeypatch.setattr(torch.Tensor, "double", double)
    found = osft_moments(make().eval(), [pack(EARLIER)], targets={name: [name]})[name]
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, exact.float(), rtol=1e-4, atol=1e-5)
    error.args = ("out of memory",)
    if isinstance(error, RuntimeError):
        with pytest.raises(RuntimeError, match="out of memory"):
            osft_moments(make().eval(), [pack(EARLIER)], targets={name: [name]})


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("N", "M"), [(12, 12), (20, 9), (9, 20)])
def test_directions_are_principal_components(N, M, transposed):
    """Inputs' directions diagonalise C, outputs' W C Wᵀ, in falling order; the share outside is what is left of the trace."""
    random = torch.Generator().manual_seed(1)
    W, X = (torch.randn(*shape, generator=random, dtype=torch.float64) for shape in ((N, M), (200, M)))
    X[:, : M // 2] *= 5
    C = X.T @ X / len(X)
    weight = (W.T if transposed else W).float().contiguous()
    found = decompose_inputs(weight, Inputs(moment=C, name="a", transposed=transposed), protected=4)
    U, V = (found.Vh.T, found.U) if transposed else (found.U, found.Vh.T)
    W = weight.double().T if transposed else weight.double()
    for basis, moment in ((U.double(), W @ C @ W.T), (V.double(), C)):
        torch.testing.assert_close(basis.T @ basis, torch.eye(min(N, M), dtype=torch.float64), rtol=0, atol=1e-6)
        rotated = basis.T @ moment @ basis
        along = rotated.diagonal()
        assert (rotated - along.diag()).abs().max() < 1e-5 * along.max()
        assert bool((along.diff() <= 1e-6 * along.max()).all())
    assert found.error == pytest.approx(1 - float((V.T.double() @ C @ V.double()).diagonal()[:4].sum() / C.trace()), abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "make_model", [make, partial(make, "qwen3"), partial(gpt2, linear=False)], ids=["llama", "qwen3", "gpt2"]
)
def test_what_was_measured_stays_and_the_rest_is_learned(make_model):
    """Where inputs span fewer directions than are protected, 60 steps change no logit of the measured row, and all others."""
    model = make_model()
    before, kept, others = values(model), EARLIER[2:3], samples([6, 8], seed=3)
    told = [logits(model, rows) for rows in (kept, others)]
    adaptation = protecting(model, kept, unfreeze_rank_ratio=0.5)
    outputs = run(adaptation, steps(60))
    assert learns(outputs)
    assert all(move.norm() > 0 for move in moved(adaptation, before).values())
    for old, new in zip(told[0], logits(adaptation.model, kept), strict=True):
        torch.testing.assert_close(new, old, rtol=1e-4, atol=1e-4)
    for old, new in zip(told[1], logits(adaptation.model, others), strict=True):
        assert (new - old).abs().max() > 1e-2


def test_singular_vectors_do_not_protect_inputs():
    """The same run with osft_directions=weights changes the measured row: the test above can fail."""
    model = make()
    told = logits(model, EARLIER[2:3])
    adaptation = adapt(model, AdapterSettings(adapter="osft", unfreeze_rank_ratio=0.5))
    run(adaptation, steps(60))
    assert (logits(adaptation.model, EARLIER[2:3])[0] - told[0]).abs().max() > 1e-2


@pytest.mark.parametrize("rule", ["strict", "paper"])
def test_no_move_is_in_what_the_rule_forbids(rule):
    """Under the strict rule ΔW has no part on either protected side, under the paper's none from one to the other."""
    model = make()
    before = values(model)
    found = osft_moments(make().eval(), [pack(EARLIER)], targets={n: [n] for n in resolve_targets(make(), None)})
    adaptation = protecting(model, osft_rule=rule)
    run(adaptation, steps(20))
    for name, move in moved(adaptation, before).items():
        bases = decompose_inputs(
            before[f"{name}.weight"], Inputs(moment=found[name], name=name), protected=adaptation.plan[name]["protected"]
        )
        k = adaptation.plan[name]["protected"]
        U, V = bases.U[:, :k].double(), bases.Vh[:k].T.double()
        parts = (U.T @ move @ V,) if rule == "paper" else (U.T @ move, move @ V)
        assert max(float(part.norm() / move.norm()) for part in parts) < 1e-4


def test_directions_are_kept_and_known_by_their_rows(tmp_path):
    """The same rows read the files; other rows find them useless, say so, and write their own."""
    first = protecting(make(), cache=tmp_path)
    files = {file: file.stat().st_mtime_ns for file in tmp_path.iterdir()}
    again = protecting(make(), cache=tmp_path)
    assert again.identity == first.identity
    assert {file: file.stat().st_mtime_ns for file in tmp_path.iterdir()} == files
    other = protecting(make(), samples([30, 20, 25], seed=5), cache=tmp_path)
    assert other.identity != first.identity
    assert any("of other rows: computed anew" in line for line in other.describe())


def test_one_large_direction_hides_no_other_rows(tmp_path):
    """Where nearly all of E‖x‖² is in one direction the share outside tells nothing: files of other rows are known all the
    same, and those of the same rows but for rounding are used.
    """
    random = torch.Generator().manual_seed(3)
    weight = torch.randn(8, 6, generator=random)

    def found(rows, *, fixed=False):
        inputs = {"a": Inputs(moment=rows.T @ rows / len(rows), name="a")}
        walked = walk_bases({"a": weight}, {"a": 3}, svd="exact", cache=tmp_path, ranks=OneRank(), inputs=inputs, fixed=fixed)
        return dict(walked)["a"]

    scales = torch.tensor([1e4, 2, 2, 0.1, 0.1, 0.1], dtype=torch.float64)
    rows = torch.randn(500, 6, generator=random, dtype=torch.float64) * scales
    first = found(rows)
    rounded = rows * (1 + 1e-3 * torch.randn(rows.shape, generator=random, dtype=torch.float64))
    assert found(rounded).fingerprint == first.fingerprint
    others = rows[:, [0, 3, 4, 1, 2, 5]]
    with pytest.raises(AdapterError, match="^a: what this run protects was measured on other rows"):
        found(others, fixed=True)
    assert found(rows, fixed=True).fingerprint == first.fingerprint
    other = found(others)
    assert other.error < 1e-4
    assert first.error < 1e-4
    assert other.fingerprint != first.fingerprint
    assert "of other rows: computed anew" in other.note


def test_a_run_that_goes_on_keeps_its_directions(tmp_path):
    """With the free directions of a plan other rows are refused by name, and the files are as they were."""
    first = protecting(make(), cache=tmp_path)
    free = {name: target["free"] for name, target in first.plan.items()}
    files = {file: file.read_bytes() for file in tmp_path.iterdir()}
    rows = samples([30, 20, 25], seed=5)
    with pytest.raises(AdapterError, match="put back the rows that it began with"):
        protecting(make(), rows, cache=tmp_path, free=free)
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == files
    assert protecting(make(), cache=tmp_path, free=free).identity == first.identity


def test_what_cannot_be_is_refused(monkeypatch):
    """Settings of singular vectors, no rows, no function, experts and numbers that are not finite are refused by name."""
    for name, value in (("osft_form", "factors"), ("osft_svd", "randomized"), ("osft_cache", "a")):
        with pytest.raises(ValueError, match=f"{name}='{value}' is of singular vectors"):
            AdapterSettings(**INPUTS, **{name: value})
    with pytest.raises(AdapterError, match="nothing measures that"):
        adapt(make(), AdapterSettings(**INPUTS))
    with pytest.raises(AdapterError, match="was given none"):
        osft_moments(make(), [], targets={})
    with pytest.raises(AdapterError, match="stack of experts.*target_modules=attention.*or leave both of these out"):
        protecting(mixture(), target_modules=("attention", "experts"))
    # Before a model is loaded its outline says so.
    with pytest.raises(AdapterError, match="stack of experts"):
        adapt(mixture().to("meta"), AdapterSettings(**INPUTS, target_modules=("attention", "experts")))
    model = make()
    with torch.no_grad():
        model.model.embed_tokens.weight[:] = np.inf
    # Which refuses such a model by itself, where its own ids meet the number.
    monkeypatch.setattr("forge_algos.adaptations.osft._moments.require_isolation", lambda *_, **__: None)
    with pytest.raises(AdapterError, match="NaN or infinity"):
        osft_moments(model, [pack(EARLIER)], targets={"model.layers.0.mlp.up_proj": ["model.layers.0.mlp.up_proj"]})


def test_divided_weights_are_whole_in_their_forward_alone(monkeypatch):
    """Weights that ZeRO-3 has partitioned, before there is an engine, are gathered by layer and partitioned again; a run on
    two ranks is a lane's.
    """
    model = make()
    expected = naive(model.eval(), "model.layers.1.mlp.down_proj")
    whole = {id(parameter): parameter.data for parameter in model.parameters()}
    held = []

    class Gathered:
        def __init__(self, parameters):
            self.parameters = parameters

        def __enter__(self):
            held.append(len(self.parameters))
            for parameter in self.parameters:
                parameter.data = whole[id(parameter)]

        def __exit__(self, *_):
            held.pop()
            for parameter in self.parameters:
                parameter.data = torch.empty(0)

    zero = types.SimpleNamespace(GatheredParameters=Gathered)
    monkeypatch.setitem(sys.modules, "deepspeed", types.SimpleNamespace(zero=zero))
    monkeypatch.setattr("forge_algos.adaptations.osft._moments.require_isolation", lambda *_, **__: None)
    for parameter in model.parameters():
        parameter.ds_id, parameter.data = id(parameter), torch.empty(0)
    name = "model.layers.1.mlp.down_proj"
    found = osft_moments(model, [pack(EARLIER)], targets={name: [name]})[name]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert not held
    assert all(parameter.numel() == 0 for parameter in model.parameters())


def test_a_copy_is_left_alone():
    """Measuring leaves no hook and no changed mode."""
    model = make()
    before = copy.deepcopy(model.state_dict())
    osft_moments(model, [pack(EARLIER)], targets={"model.layers.0.mlp.up_proj": ["model.layers.0.mlp.up_proj"]})
    assert model.training
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("change", "measures"),
    [("nothing", False), ("other rows", True), ("no name", True), ("one altered", True), ("one cut", True), ("one gone", True)],
)
def test_what_was_measured_is_measured_once(change, measures, tmp_path):
    """Directions in the cache of the same rows are taken as they are; where one is not whole, or of others, all are measured.
    They are the same to the bit.
    """
    calls = []
    began = protecting(make("llama-tied"), cache=tmp_path, known_by="rows a", calls=calls)
    assert len(calls) == 1
    file = sorted(tmp_path.iterdir())[1]
    if change == "one altered":
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    elif change == "one cut":
        file.write_bytes(file.read_bytes()[:-1])
    elif change == "one gone":
        file.unlink()
    known_by = {"other rows": "rows b", "no name": ""}.get(change, "rows a")
    free = {name: target["free"] for name, target in began.plan.items()}
    again = protecting(make("llama-tied"), cache=tmp_path, known_by=known_by, calls=calls, free=free)
    assert len(calls) == 1 + measures
    assert {name: target["bases"] for name, target in again.plan.items()} == {
        name: target["bases"] for name, target in began.plan.items()
    }
