"""Size and direction of OSFT's changes, against projections written out in full."""

import pytest
import torch

from forge_algos import AdapterError
from forge_algos.adaptations import osft_moved, osft_portrait
from forge_algos.adaptations.base._adaptation import OneRank
from forge_algos.adaptations.osft._bases import bases_of

SHAPES = [(12, 12), (20, 9), (9, 20)]


def planned_weight(shape, free, *, seed=0):
    """Return a weight, its plan, and the projectors [N, N] and [M, M] on protected directions."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    protected = min(shape) - free
    bases = bases_of({"a": weight}, {"a": protected}, svd="exact", cache=None, ranks=OneRank())["a"]
    U, _, Vh = torch.linalg.svd(weight.double())
    planned = {"shape": list(shape), "free": free, "protected": protected, "bases": bases.fingerprint, "error": bases.error}
    return weight, planned, U[:, :protected] @ U[:, :protected].T, Vh[:protected].T @ Vh[:protected]


def moved_of(weight, after, planned, **options):
    return osft_moved("a", weight, after, planned, **{"svd": "exact", "cache": None, **options})


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("svd", ["exact", "randomized"])
def test_shares_are_those_of_the_projections(shape, svd):
    """Each share is the norm of the projected change over that of the change.
    The size is the norm of the change over the weight's.
    """
    weight, planned, P, Q = planned_weight(shape, 4)
    after = weight + 0.1 * torch.randn(shape)
    delta = after.double() - weight.double()
    found = moved_of(weight, after, planned, svd=svd)
    assert found.moved == pytest.approx(float(delta.norm() / weight.double().norm()), rel=1e-9)
    for share, projected in ((found.outputs, P @ delta), (found.inputs, delta @ Q), (found.both, P @ delta @ Q)):
        assert share == pytest.approx(float(projected.norm() / delta.norm()), rel=1e-4)
    assert found.leak("strict") == max(found.outputs, found.inputs)
    assert found.leak("paper") == found.both


@pytest.mark.parametrize("shape", SHAPES)
def test_a_transposed_weight_is_named_by_its_own_sides(shape):
    """What a Conv1D, whose weight has a row for each input, sends to protected outputs stands under outputs."""
    weight, planned, P, Q = planned_weight(shape, 4)
    after = weight + 0.1 * torch.randn(shape)
    delta = after.double() - weight.double()
    found = moved_of(weight, after, planned | {"transposed": True})
    assert (found.shape, found.transposed) == (shape[::-1], True)
    for share, projected in ((found.inputs, P @ delta), (found.outputs, delta @ Q), (found.both, P @ delta @ Q)):
        assert share == pytest.approx(float(projected.norm() / delta.norm()), rel=1e-4)


@pytest.mark.parametrize("shape", SHAPES)
def test_changes_within_the_rule_leak_only_rounding(shape):
    """A change within the free directions leaks no more than float32 rounds, as predicted."""
    weight, planned, P, Q = planned_weight(shape, 4)
    free = (torch.eye(shape[0]) - P) @ torch.randn(shape).double() @ (torch.eye(shape[1]) - Q)
    exact = weight.double() + 1e-3 * free
    found = moved_of(weight, exact.float(), planned)
    assert found.leak("strict") < 4 * found.rounding
    actual = float((exact.float().double() - exact).norm() / (1e-3 * free).norm())
    assert found.rounding == pytest.approx(actual, rel=0.4)
    # The paper's rule allows one protected side.
    half = weight.double() + 1e-3 * P @ torch.randn(shape).double() @ (torch.eye(shape[1]) - Q)
    found = moved_of(weight, half.float(), planned)
    assert found.leak("paper") < 4 * found.rounding
    assert found.leak("strict") == pytest.approx(1.0, abs=1e-4)


def test_targets_without_two_parts_and_at_rest():
    """Where all is free nothing leaks, where all is protected everything does.
    A target that did not change has zeros.
    """
    weight, planned, *_ = planned_weight((6, 6), 3)
    after = weight + 1
    assert moved_of(weight, after, {**planned, "free": 6}).leak("strict") == 0
    assert moved_of(weight, after, {**planned, "free": 0}).leak("paper") == 1
    rest = moved_of(weight, weight, planned)
    assert (rest.moved, rest.outputs, rest.rounding) == (0, 0, 0)


def test_singular_vectors_of_another_run_are_marked():
    """Vectors whose fingerprint is not the plan's are marked; another shape is refused."""
    weight, planned, *_ = planned_weight((8, 6), 3)
    assert not moved_of(weight, weight + 1, planned).anew
    assert moved_of(weight, weight + 1, {**planned, "bases": "0" * 64}).anew
    with pytest.raises(AdapterError, match="not its models"):
        moved_of(weight[:5], weight[:5], planned)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_portrait_holds_all_of_the_change(shape):
    """The energies of the portrait's fields are those of the blocks of UᵀΔW V.
    Together they are the whole change.
    """
    weight, _, P, Q = planned_weight(shape, 4)
    after = weight + torch.randn(shape)
    delta = after.double() - weight.double()
    found = osft_portrait(weight, after, protected=min(shape) - 4, bands=5)
    assert (found.rows[-1], found.columns[-1]) == shape
    assert {min(shape) - 4, min(shape)} <= {*found.rows} & {*found.columns}
    assert found.rms.shape == (len(found.rows) - 1, len(found.columns) - 1)
    sizes = torch.tensor(found.rows).diff()[:, None] * torch.tensor(found.columns).diff()
    assert float((found.rms.square() * sizes).sum()) == pytest.approx(float(delta.norm() ** 2), rel=1e-9)
    both = found.share(outputs=True, inputs=True)
    assert both == pytest.approx(float((P @ delta @ Q).norm() ** 2 / delta.norm() ** 2), rel=1e-9)
    shares = [found.share(outputs=o, inputs=i) for o in (True, False) for i in (True, False)]
    assert sum(shares) == pytest.approx(1.0, rel=1e-9)
    assert found.singular_values.tolist() == pytest.approx(torch.linalg.svdvals(weight.double()).tolist(), rel=1e-9)
