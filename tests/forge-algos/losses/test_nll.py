"""The chunked loss is cross entropy: same value, same gradients, less memory."""

import pytest
import torch
from hypothesis import given, strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from forge_algos import LossError
from forge_algos.losses import _wide_sums, nll, nll_of_logits, token_logps
from forge_algos.losses._rows import even_chunks


def problem(T, D, V, *, dtype=torch.float64, seed=0, bias=False, masked=0.4, size=1.0):
    g = torch.Generator().manual_seed(seed)
    hidden = (torch.randn(T, D, generator=g, dtype=torch.float64) * size).to(dtype).requires_grad_()
    weight = torch.randn(V, D, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    b = torch.randn(V, generator=g, dtype=torch.float64).to(dtype).requires_grad_() if bias else None
    targets = torch.randint(0, V, (T,), generator=g)
    targets[torch.rand(T, generator=g) < masked] = -100
    return hidden, weight, b, targets


def full(hidden, weight, bias, targets, scale=1.0, softcap=None):
    """Return the loss from all logits at once."""
    logits = torch.nn.functional.linear(hidden, weight, bias) * scale
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    return torch.nn.functional.cross_entropy(logits, targets, reduction="sum", ignore_index=-100)


def grads_of(value, tensors):
    return torch.autograd.grad(value, [t for t in tensors if t is not None], allow_unused=False)


@given(
    T=st.integers(1, 13),
    D=st.integers(1, 7),
    V=st.integers(1, 17),
    chunk_rows=st.integers(1, 15),
    bias=st.booleans(),
    scale=st.sampled_from([1.0, 0.125, -3.0]),
    softcap=st.sampled_from([None, 2.0, 30.0]),
    upstream=st.sampled_from([1.0, 1 / 7, -2.5, 0.0]),
    seed=st.integers(0, 99),
)
def test_equals_cross_entropy(T, D, V, chunk_rows, bias, scale, softcap, upstream, seed):
    """Value and every gradient equal cross entropy's, for any sizes, chunk and transform.
    At odd sizes, with any upstream gradient.
    """
    hidden, weight, b, targets = problem(T, D, V, seed=seed, bias=bias)
    terms = nll(hidden, weight, targets, bias=b, scale=scale, softcap=softcap, chunk_rows=chunk_rows)
    expected = full(hidden, weight, b, targets, scale, softcap)
    assert terms.count == int((targets != -100).sum())
    torch.testing.assert_close(terms.sum, expected, rtol=1e-10, atol=1e-10)
    ours = grads_of(terms.sum * upstream, (hidden, weight, b))
    for mine, theirs in zip(ours, grads_of(expected * upstream, (hidden, weight, b)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("chunk_rows", [7, 64, 512])
def test_float32_is_as_good_as_torch(chunk_rows):
    """In float32 the loss is within 1e-6 and gradients within 1e-5 of float64's."""
    hidden, weight, _, targets = problem(129, 48, 1009, dtype=torch.float32)
    terms = nll(hidden, weight, targets, chunk_rows=chunk_rows)
    exact = full(hidden.double(), weight.double(), None, targets)
    assert terms.sum.dtype == torch.float32
    assert abs(terms.sum.item() / exact.item() - 1) < 1e-6
    for mine, theirs in zip(grads_of(terms.sum, (hidden, weight)), grads_of(exact, (hidden, weight)), strict=True):
        assert float((mine - theirs).norm() / theirs.norm()) < 1e-5


def test_far_apart_logits_stay_finite():
    """A target 500 nats behind costs 500, one 500 ahead costs 0 and has no gradient."""
    hidden, weight = torch.tensor([[500.0], [500.0]], requires_grad=True), torch.tensor([[1.0], [0.0]], requires_grad=True)
    terms = nll(hidden, weight, torch.tensor([1, 0]), chunk_rows=1)
    terms.sum.backward()
    assert terms.sum.item() == pytest.approx(500.0)
    torch.testing.assert_close(hidden.grad, torch.tensor([[1.0], [0.0]]))
    assert weight.grad.isfinite().all()


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that an operation makes.
    Views of the inputs are as large as these.
    """

    def __init__(self):
        super().__init__()
        self.numel, self.names = 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.names.add(func.overloadpacket.__name__)
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


def test_never_holds_all_logits():
    """No tensor of forward or backward comes near [T, V].
    torch's own cross entropy makes one, so the measure works.
    """
    hidden, weight, _, targets = problem(400, 4, 300, dtype=torch.float32, masked=0.0)
    with Largest() as chunked:
        nll(hidden, weight, targets, chunk_rows=16).sum.backward()
    with Largest() as whole:
        full(hidden, weight, None, targets).backward()
    assert whole.numel == 400 * 300
    assert chunked.numel <= 16 * 300


def test_only_labelled_rows_are_scored():
    """Rows without a target are not multiplied with the head."""
    hidden, weight, _, targets = problem(100, 4, 300, dtype=torch.float32, masked=0.0)
    targets[5:] = -100
    with Largest() as seen:
        terms = nll(hidden, weight, targets, chunk_rows=512)
        terms.sum.backward()
    assert terms.count == 5
    assert seen.numel <= 5 * 300
    assert hidden.grad[5:].abs().max() == 0


@pytest.mark.parametrize(("train_hidden", "train_weight"), [(True, False), (False, True)])
def test_a_frozen_side_costs_nothing(train_hidden, train_weight):
    """A frozen head or frozen hidden states get no gradient and no work for one.
    The other side's gradient is right.
    """
    hidden, weight, _, targets = problem(9, 4, 11)
    expected = grads_of(full(hidden, weight, None, targets), (hidden, weight))
    hidden.requires_grad_(train_hidden)
    weight.requires_grad_(train_weight)
    with Largest() as seen:
        nll(hidden, weight, targets, ignore_index=-100).sum.backward()
    assert (hidden.grad is not None, weight.grad is not None) == (train_hidden, train_weight)
    assert ("addmm_" in seen.names) == train_weight
    torch.testing.assert_close(hidden.grad if train_hidden else weight.grad, expected[0 if train_hidden else 1])


def test_without_gradients_there_is_no_graph():
    """Under no_grad only the value is computed."""
    hidden, weight, _, targets = problem(9, 4, 11)
    with torch.no_grad(), Largest() as seen:
        terms = nll(hidden, weight, targets)
    assert not terms.sum.requires_grad
    assert not {"addmm_", "scatter_add_"} & seen.names
    torch.testing.assert_close(terms.sum, full(hidden, weight, None, targets).detach())


def test_nothing_to_learn_is_zero():
    """Without labelled rows the loss is 0 over 0 terms, with gradients of zero."""
    hidden, weight, _, targets = problem(5, 4, 11, dtype=torch.float32, masked=1.1)
    terms = nll(hidden, weight, targets)
    terms.sum.backward()
    assert (terms.sum.item(), terms.count) == (0.0, 0)
    assert hidden.grad.abs().max() == weight.grad.abs().max() == 0


def test_every_row_has_a_target():
    """ignore_index=None scores all rows without a search, so the host does not wait."""
    hidden, weight, _, targets = problem(9, 4, 11, masked=0.0)
    with Largest() as seen:
        terms = nll(hidden, weight, targets, ignore_index=None)
    assert terms.count == 9
    assert "nonzero" not in seen.names
    torch.testing.assert_close(terms.sum, full(hidden, weight, None, targets))


def test_a_second_backward_is_refused():
    """A second backward is an error: the gradients were given away by the first.
    It would scale them twice.
    """
    hidden, weight, _, targets = problem(5, 4, 11)
    terms = nll(hidden, weight, targets)
    terms.sum.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="run the forward again"):
        terms.sum.backward()


@pytest.mark.parametrize("way", ["weights", "autocast"])
def test_bfloat16(way):
    """bfloat16 by weights or autocast: a float32 sum near the float32 one.
    Gradients have the tensors' own dtypes.
    """
    hidden, weight, _, targets = problem(64, 32, 101, dtype=torch.float32, size=0.3)
    exact = full(hidden, weight, None, targets)
    expected = grads_of(exact, (hidden, weight))
    if way == "weights":
        hidden, weight = (t.detach().bfloat16().requires_grad_() for t in (hidden, weight))
    with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
        terms = nll(hidden, weight, targets, chunk_rows=10)
    terms.sum.backward()
    assert terms.sum.dtype == torch.float32
    assert abs(terms.sum.item() / exact.item() - 1) < 5e-3
    for tensor, theirs in zip((hidden, weight), expected, strict=True):
        assert tensor.grad.dtype == tensor.dtype
        assert float((tensor.grad.float() - theirs).norm() / theirs.norm()) < 2e-2


@given(M=st.integers(1, 9), V=st.integers(1, 17), chunk_rows=st.integers(1, 10), upstream=st.sampled_from([1.0, -0.3, 0.0]))
def test_logits_that_a_model_made(M, V, chunk_rows, upstream):
    """nll_of_logits has the same value and gradients from logits."""
    g = torch.Generator().manual_seed(M * V)
    logits = torch.randn(M, V, generator=g, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, V, (M,), generator=g)
    before = logits.detach().clone()
    terms = nll_of_logits(logits, targets, chunk_rows=chunk_rows)
    expected = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
    torch.testing.assert_close(terms.sum, expected)
    (mine,) = torch.autograd.grad(terms.sum * upstream, logits)
    (theirs,) = torch.autograd.grad(expected * upstream, logits)
    torch.testing.assert_close(mine, theirs)
    torch.testing.assert_close(logits.detach(), before, rtol=0, atol=0)


def test_logits_in_bfloat16_are_summed_in_float32():
    """bfloat16 logits have a float32 loss and a gradient in bfloat16."""
    logits = torch.randn(8, 33, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    targets = torch.arange(8)
    terms = nll_of_logits(logits, targets, chunk_rows=3)
    terms.sum.backward()
    expected = torch.nn.functional.cross_entropy(logits.float(), targets, reduction="sum")
    torch.testing.assert_close(terms.sum, expected)
    assert logits.grad.dtype == torch.bfloat16


@given(rows=st.integers(0, 100), at_most=st.integers(1, 40))
def test_chunks_are_few_and_even(rows, at_most):
    """Chunks hold every row once and in order, as few as possible, even in size.
    None is above the limit, and sizes differ by one chunk's rounding at most.
    """
    found = even_chunks(rows, at_most)
    assert [i for s in found for i in range(s.start, s.stop)] == list(range(rows))
    assert all(s.stop - s.start <= at_most for s in found)
    assert len(found) == -(-rows // at_most)


@given(
    T=st.integers(1, 13),
    V=st.integers(1, 17),
    chunk_rows=st.integers(1, 15),
    softcap=st.sampled_from([None, 2.0]),
    dft=st.booleans(),
    label_smoothing=st.sampled_from([0.0, 0.1, 0.7]),
    z_loss=st.sampled_from([0.0, 1e-2, 1.0]),
    upstream=st.sampled_from([1.0, -0.3]),
    seed=st.integers(0, 99),
)
def test_variants_equal_their_formulas(T, V, chunk_rows, softcap, dft, label_smoothing, z_loss, upstream, seed):
    """DFT, label smoothing and z-loss equal their formulas, alone and together.
    Values, stats and gradients, from hidden states and from logits.
    """
    hidden, weight, b, targets = problem(T, 3, V, seed=seed, bias=True)
    rows = targets != -100
    logits = torch.nn.functional.linear(hidden, weight, b) * 0.7
    logits = (logits if softcap is None else torch.tanh(logits / softcap) * softcap)[rows]
    plain = torch.nn.functional.cross_entropy(logits, targets[rows], reduction="none")
    losses = torch.nn.functional.cross_entropy(logits, targets[rows], reduction="none", label_smoothing=label_smoothing)
    losses = losses * (-plain).exp().detach() if dft else losses
    expected = (losses + z_loss * logits.logsumexp(1).square()).sum()
    variant = {"dft": dft, "label_smoothing": label_smoothing, "z_loss": z_loss, "chunk_rows": chunk_rows}
    wanted = torch.autograd.grad(expected * upstream, (hidden, weight, b), retain_graph=True)
    for terms in (
        nll(hidden, weight, targets, bias=b, scale=0.7, softcap=softcap, **variant),
        nll_of_logits(logits, targets[rows], **variant),
    ):
        torch.testing.assert_close(terms.sum, expected, rtol=1e-9, atol=1e-10)
        torch.testing.assert_close(terms.stats["nll"], plain.sum().detach(), rtol=1e-9, atol=1e-10)
        assert terms.stats["correct"] == (logits.argmax(1) == targets[rows]).sum()
        assert not any(stat.requires_grad for stat in terms.stats.values())
        for mine, theirs in zip(grads_of(terms.sum * upstream, (hidden, weight, b)), wanted, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        ({"label_smoothing": 1.0}, "label_smoothing: a finite number from 0 and below 1 is wanted, not 1.0"),
        ({"label_smoothing": -0.1}, "label_smoothing"),
        ({"z_loss": -1e-4}, "z_loss: a finite number from 0 is wanted, not -0.0001"),
        ({"z_loss": float("nan")}, "z_loss"),
        ({"chunk_rows": 0}, "chunk_rows: a finite number from 1 is wanted, not 0"),
        ({"token_weights": torch.tensor([1.0, -0.5])}, "token_weights: finite numbers from 0"),
        ({"token_weights": torch.tensor([1.0, float("nan")])}, "token_weights: finite numbers from 0"),
    ],
)
def test_numbers_out_of_range_are_refused(variant, message):
    """Numbers out of range are refused by name, with what was found."""
    hidden, weight, _, targets = problem(2, 3, 5)
    with pytest.raises(LossError, match=message):
        nll(hidden, weight, targets, **variant)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda targets: torch.cat([targets, targets[:1]]), r"each row of hidden is wanted, int64\[4\], not int64\[5\]"),
        (lambda targets: targets[1:], r"int64\[4\], not int64\[3\]. Where the last position is left out"),
        (lambda targets: targets[None], r"int64\[4\], not int64\[1, 4\]"),
        (lambda targets: targets.float(), r"a tensor of int64 is wanted, not float32\[4\]"),
        (lambda targets: targets.numpy(), "a tensor of int64 is wanted, not ndarray"),
    ],
)
def test_targets_are_one_a_row(change, message):
    """Labels that are not shifted as the hidden states are would be learned at the wrong positions, without an error."""
    hidden, weight, _, _ = problem(4, 3, 5)
    targets = torch.tensor([1, -100, 2, -100])
    for score in (nll, token_logps):
        with pytest.raises(LossError, match=message):
            score(hidden, weight, change(targets))
    with pytest.raises(LossError, match=message.replace("hidden", "logits")):
        nll_of_logits(hidden @ weight.T, change(torch.tensor([1, 0, 2, 3])))


def weight_gradient(chunk_rows, size=2048):
    """The gradient of a head in bfloat16 over rows in chunks, and the one in float64."""
    hidden, weight, _, targets = problem(size, 16, 23, dtype=torch.float32, size=0.3, masked=0.0)
    hidden, weight = (t.detach().bfloat16().requires_grad_() for t in (hidden, weight))
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    full(*exact, None, targets).backward()
    nll(hidden, weight, targets, chunk_rows=chunk_rows).sum.backward()
    return weight.grad, exact[1].grad


def test_chunks_add_up_in_float32():
    """Over 64 chunks the gradient of a head in bfloat16 is as near the exact one as in a single product: added up in bfloat16
    it would be several times as far.
    """
    errors = {}
    for chunk_rows in (2048, 32):
        found, exact = weight_gradient(chunk_rows)
        assert found.dtype == torch.bfloat16
        errors[chunk_rows] = float((found.double() - exact).norm() / exact.norm())
    assert errors[32] < 1.5 * errors[2048] < 1e-2


def test_products_are_added_unrounded_where_the_device_can(monkeypatch):
    """Where `addmm` takes an out_dtype, which is tried, it adds each chunk's product; elsewhere the product is made first."""
    calls, plain, product = [], torch.addmm, torch.mm

    def mm(left, right, *, out, out_dtype=None):
        return (
            product(left, right, out=out) if out_dtype is None else out.copy_(product(left.to(out_dtype), right.to(out_dtype)))
        )

    def addmm(total, left, right, *, out_dtype, beta, out):
        calls.append((left.dtype, out_dtype, beta))
        return out.copy_(plain(total, left.to(out_dtype), right.to(out_dtype), beta=beta))

    expected, _ = weight_gradient(512)
    _wide_sums._adds.cache_clear()
    monkeypatch.setattr(torch, "addmm", addmm)
    monkeypatch.setattr(torch, "mm", mm)
    found, exact = weight_gradient(512)
    assert calls[0][2] == 1, "the trial adds to what is there"
    assert calls[1:] == [(torch.bfloat16, torch.float32, beta) for beta in (0, 1, 1, 1)]
    assert (found.double() - exact).norm() <= (expected.double() - exact).norm() * 1.01
    monkeypatch.setattr(torch, "addmm", lambda *args, **kwargs: kwargs["out"].zero_())
    _wide_sums._adds.cache_clear()
    assert not _wide_sums.adds_wide(torch.device("cpu"), torch.bfloat16, torch.float32), "a wrong sum is not used"
    _wide_sums._adds.cache_clear()


def test_a_sum_is_rehearsed_without_its_kernel():
    """Shapes of the kernel's own call are no business of torch's: it has none for them in 2.11."""
    total, left, right = (torch.empty(size, dtype=torch.bfloat16, device="meta") for size in ((4, 3), (4, 2), (2, 3)))
    for first in (True, False):
        _wide_sums.add_product(total.float(), left, right, first=first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_of_equal_logits_the_first_is_the_likeliest(dtype):
    """Accuracy is argmax's, as greedy decoding takes tokens: ties, of which bfloat16 has many, are no hits."""
    logits = torch.randn(64, 40, generator=torch.Generator().manual_seed(5)).mul_(2).round_()
    # The first of the likeliest in half of the rows, the last in the others: another one where there are several.
    targets = logits.argmax(1)
    targets[1::2] = 39 - logits[1::2].flip(1).argmax(1)
    hits = (logits.argmax(1) == targets).sum()
    assert 32 < hits < 60
    assert nll_of_logits(logits, targets).stats["correct"] == hits
    # By a head whose logits are the same numbers.
    found = nll(torch.eye(64, dtype=dtype), logits.T.contiguous().to(dtype), targets, chunk_rows=7)
    assert found.stats["correct"] == hits
    collapsed = nll(torch.zeros(64, 3, dtype=dtype), torch.randn(40, 3).to(dtype), targets)
    assert collapsed.stats["correct"] == (targets == 0).sum()
