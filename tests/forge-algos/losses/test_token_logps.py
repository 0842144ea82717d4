"""Log-probabilities of targets equal a gather from log_softmax, without [T, V]."""

import pytest
import torch
from hypothesis import given, strategies as st

from forge_algos import LossError
from forge_algos.losses import nll, token_logps
from forge_algos.losses._rows import Given, Projected
from forge_algos.losses._token_logps import logps_and_collision_of_rows, logps_and_entropy_of_rows, logps_of_rows

from .test_nll import Largest, problem


def full(hidden, weight, bias, targets, scale=1.0, softcap=None, temperature=1.0):
    """Return (log-probabilities, entropies, log Σ p²) of the labelled rows from all logits at once."""
    logits = torch.nn.functional.linear(hidden, weight, bias) * scale
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    rows = targets != -100
    logps = (logits / temperature).log_softmax(1)[rows]
    return logps.gather(1, targets[rows, None]).squeeze(1), -(logps.exp() * logps).sum(1), (2 * logps).logsumexp(1)


def uneven_sum(logps):
    """Return a scalar in which each log-probability has another gradient, one of them 0."""
    return (logps.sin() * torch.arange(len(logps))).sum() if len(logps) > 1 else logps.sin().sum()


def grads(value, tensors):
    return torch.autograd.grad(value, [t for t in tensors if t is not None])


@given(
    T=st.integers(1, 13),
    D=st.integers(1, 7),
    V=st.integers(1, 17),
    chunk_rows=st.integers(1, 15),
    bias=st.booleans(),
    scale=st.sampled_from([1.0, 0.125, -3.0]),
    softcap=st.sampled_from([None, 2.0, 30.0]),
    temperature=st.sampled_from([1.0, 0.3, 2.5]),
    seed=st.integers(0, 99),
)
def test_equals_log_softmax(T, D, V, chunk_rows, bias, scale, softcap, temperature, seed):
    """Values, entropies, collisions and every gradient are log_softmax's, for any chunk and temperature.
    At odd sizes, with any transform and upstream gradient.
    """
    hidden, weight, b, targets = problem(T, D, V, seed=seed, bias=bias)
    how = {"scale": scale, "softcap": softcap, "temperature": temperature}
    ours = token_logps(hidden, weight, targets, bias=b, chunk_rows=chunk_rows, **how)
    theirs, entropy, squares = full(hidden, weight, b, targets, **how)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    rows = (targets != -100).nonzero().squeeze(1)
    source = Projected(product=torch.float64, chunk_rows=chunk_rows, **how)
    again, found = logps_and_entropy_of_rows(source, (hidden[rows], weight, b), targets[rows])
    torch.testing.assert_close(found, entropy.detach(), rtol=1e-9, atol=1e-9)
    third, collision = logps_and_collision_of_rows(source, (hidden[rows], weight, b), targets[rows])
    torch.testing.assert_close(collision, squares.detach(), rtol=1e-9, atol=1e-9)
    fourth, learned = logps_and_entropy_of_rows(source, (hidden[rows], weight, b), targets[rows], learned=True)
    assert torch.equal(learned, found)
    theirs, entropy, _ = full(hidden, weight, b, targets, **how)
    for mine, wanted in zip(
        grads(uneven_sum(fourth) + learned.cos().sum(), (hidden, weight, b)),
        grads(uneven_sum(theirs) + entropy.cos().sum(), (hidden, weight, b)),
        strict=True,
    ):
        torch.testing.assert_close(mine, wanted, rtol=1e-8, atol=1e-8)
    theirs, _, _ = full(hidden, weight, b, targets, **how)
    assert not found.requires_grad
    assert not collision.requires_grad
    expected = grads(uneven_sum(theirs), (hidden, weight, b))
    for logps in (ours, again, third):
        for mine, wanted in zip(grads(uneven_sum(logps), (hidden, weight, b)), expected, strict=True):
            torch.testing.assert_close(mine, wanted, rtol=1e-9, atol=1e-9)


@given(
    M=st.integers(1, 9),
    V=st.integers(1, 17),
    chunk_rows=st.integers(1, 10),
    temperature=st.sampled_from([1.0, 0.3, 2.5]),
)
def test_of_logits_that_a_model_made(M, V, chunk_rows, temperature):
    """From logits the results are the same, and the logits are not changed."""
    g = torch.Generator().manual_seed(M * V)
    logits = torch.randn(M, V, generator=g, dtype=torch.float64, requires_grad=True)
    targets, before = torch.randint(0, V, (M,), generator=g), logits.detach().clone()
    ours = logps_of_rows(Given(given=logits.dtype, temperature=temperature, chunk_rows=chunk_rows), (logits,), targets)
    theirs = (logits / temperature).log_softmax(1).gather(1, targets[:, None]).squeeze(1)
    torch.testing.assert_close(ours, theirs)
    (mine,), (wanted,) = grads(uneven_sum(ours), [logits]), grads(uneven_sum(theirs), [logits])
    torch.testing.assert_close(mine, wanted)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("chunk_rows", [7, 64, 512])
def test_float32_is_as_good_as_torch(chunk_rows):
    """In float32 values are within 1e-5 and gradients within 1e-5 relative of float64's."""
    hidden, weight, _, targets = problem(129, 48, 1009, dtype=torch.float32)
    ours = token_logps(hidden, weight, targets, chunk_rows=chunk_rows)
    exact, _, _ = full(hidden.double(), weight.double(), None, targets)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(grads(uneven_sum(ours), (hidden, weight)), grads(uneven_sum(exact), (hidden, weight)), strict=True):
        assert float((mine - theirs).norm() / theirs.norm()) < 1e-5


def test_their_sum_is_nll():
    """The sum is minus the loss of SFT on the same rows, with the same gradients."""
    hidden, weight, b, targets = problem(20, 5, 31, bias=True)
    logps, terms = token_logps(hidden, weight, targets, bias=b), nll(hidden, weight, targets, bias=b)
    torch.testing.assert_close(-logps.sum(), terms.sum)
    for mine, theirs in zip(grads(-logps.sum(), (hidden, weight, b)), grads(terms.sum, (hidden, weight, b)), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_never_holds_all_logits():
    """No tensor of either pass comes near [M, V], and none is kept between them.
    torch's own computation makes one, so the measure works.
    """
    hidden, weight, _, targets = problem(400, 4, 300, dtype=torch.float32, masked=0.0)
    kept = []
    with Largest() as chunked, torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        token_logps(hidden, weight, targets, chunk_rows=16).square().sum().backward()
    with Largest() as whole:
        full(hidden, weight, None, targets)[0].sum().backward()
    assert whole.numel == 400 * 300
    assert chunked.numel <= 16 * 300
    assert max(kept) == 400 * 4


@pytest.mark.parametrize(("train_hidden", "train_weight"), [(True, False), (False, True)])
def test_a_frozen_side_costs_nothing(train_hidden, train_weight):
    """A frozen head or frozen hidden states get no gradient and no work for one.
    The other side's gradient is right.
    """
    hidden, weight, _, targets = problem(9, 4, 11)
    expected = grads(uneven_sum(full(hidden, weight, None, targets)[0]), (hidden, weight))
    hidden.requires_grad_(train_hidden)
    weight.requires_grad_(train_weight)
    with Largest() as seen:
        uneven_sum(token_logps(hidden, weight, targets)).backward()
    assert (hidden.grad is not None, weight.grad is not None) == (train_hidden, train_weight)
    assert ("addmm_" in seen.names) == train_weight
    torch.testing.assert_close(hidden.grad if train_hidden else weight.grad, expected[0 if train_hidden else 1])


def test_the_backward_pass_reads_the_weight_again():
    """The backward pass reads the parameter as it is then, not memory of the forward pass.
    As where a weight is freed and gathered again elsewhere.
    """
    hidden, weight, _, targets = problem(9, 4, 11)
    expected = grads(uneven_sum(full(hidden, weight, None, targets)[0]), (hidden, weight))
    loss = uneven_sum(token_logps(hidden, weight, targets))
    before, weight.data = weight.data, weight.data.clone()
    before.fill_(torch.nan)
    for mine, wanted in zip(grads(loss, (hidden, weight)), expected, strict=True):
        torch.testing.assert_close(mine, wanted)


def test_without_gradients_there_is_no_graph():
    """Under no_grad only the values are computed."""
    hidden, weight, _, targets = problem(9, 4, 11)
    with torch.no_grad():
        logps = token_logps(hidden, weight, targets)
    assert not logps.requires_grad
    torch.testing.assert_close(logps, full(hidden, weight, None, targets)[0].detach())


def test_nothing_to_score():
    """Without labelled rows the result is empty, and gradients are zero."""
    hidden, weight, _, targets = problem(5, 4, 11, dtype=torch.float32, masked=1.1)
    logps = token_logps(hidden, weight, targets)
    logps.sum().backward()
    assert logps.shape == (0,)
    assert hidden.grad.abs().max() == weight.grad.abs().max() == 0


def test_far_apart_logits_stay_finite():
    """A target 500 nats behind has -500, one 500 ahead 0; gradients are finite.
    The entropy of a certain distribution is 0.
    """
    hidden, weight = torch.tensor([[500.0], [500.0]], requires_grad=True), torch.tensor([[1.0], [0.0]], requires_grad=True)
    source = Projected(product=torch.float32)
    logps, entropy = logps_and_entropy_of_rows(source, (hidden, weight, None), torch.tensor([1, 0]))
    logps.sum().backward()
    torch.testing.assert_close(logps.detach(), torch.tensor([-500.0, 0.0]))
    assert torch.equal(entropy, torch.zeros(2))
    torch.testing.assert_close(hidden.grad, torch.tensor([[-1.0], [0.0]]))


@pytest.mark.parametrize("way", ["weights", "autocast"])
def test_bfloat16(way):
    """bfloat16 by weights or by autocast is near float32.
    Autocast is off again when the backward pass runs.
    """
    hidden, weight, _, targets = problem(64, 32, 101, dtype=torch.float32, size=0.3)
    exact, _, _ = full(hidden, weight, None, targets)
    expected = grads(exact.sum(), (hidden, weight))
    if way == "weights":
        hidden, weight = (t.detach().bfloat16().requires_grad_() for t in (hidden, weight))
    with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
        logps = token_logps(hidden, weight, targets, chunk_rows=10)
    logps.sum().backward()
    assert logps.dtype == torch.float32
    assert float((logps - exact).detach().abs().max()) < 0.1
    for tensor, theirs in zip((hidden, weight), expected, strict=True):
        assert tensor.grad.dtype == tensor.dtype
        assert float((tensor.grad.float() - theirs).norm() / theirs.norm()) < 2e-2


def test_a_temperature_of_zero_is_refused():
    """A temperature of 0 is refused."""
    hidden, weight, _, targets = problem(2, 2, 3)
    with pytest.raises(LossError, match="temperature: a finite number above 0 is wanted, not 0"):
        token_logps(hidden, weight, targets, temperature=0)
