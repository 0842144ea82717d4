"""Stochastic rounding to bfloat16: unbiased, the same wherever a number lies, and nothing but its two neighbours."""

import pytest
import torch
from hypothesis import given, strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from forge_algos import _kernels, asked_kernels
from forge_algos.memory._tracker import Tracker
from forge_algos.optimizers import _adamw_8bit, _rounding
from forge_algos.optimizers._rounding import random_bits, round_stochastically_, rounding_key

BITS = 2**16


def rounded(exact, *, first_row=0, key=0):
    into = torch.empty(exact.shape, dtype=torch.bfloat16)
    round_stochastically_(into, exact.clone(), first_row=first_row, key=key)
    return into


def bits(rows, columns, key, first=0):
    return random_bits(torch.arange(first, first + rows, dtype=torch.int32), torch.arange(columns, dtype=torch.int32), key)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("share", [1 / 512, 0.25, 0.5, 0.999])
def test_the_mean_is_the_number(share, sign):
    """Of a million copies the part that is rounded up is the number's place between its neighbours.

    Within five standard deviations; rounding to the nearest is off by hundreds.
    """
    below, above = 1.0, 1.0 + 2**-7
    number = sign * (below + share * (above - below))
    found = rounded(torch.full((1000, 1000), number), key=rounding_key(42, 3, 1)).float().abs()
    assert set(found.unique().tolist()) == {below, above}
    part = (found == above).double().mean().item()
    assert abs(part - share) < 5 * (share * (1 - share) / 1e6) ** 0.5


def test_nan_stays_nan():
    """Whatever bits of it are set, as all are on a GPU: what is drawn may not carry into the sign, which would make it -0."""
    patterns = [0x7FFFFFFF, 0x7FC00000, 0x7F800001, -1, -0x400000, -0x7FFFFF]
    exact = torch.tensor(patterns, dtype=torch.int32).view(torch.float32).expand(200, -1).contiguous()
    assert rounded(exact, key=rounding_key(1, 2, 3)).isnan().all()


def test_small_steps_arrive():
    """A thousand steps of a thousandth of the spacing move weights by a spacing on average; to the nearest by nothing."""
    weights = torch.ones(64, 256, dtype=torch.bfloat16)
    nearest = weights.clone()
    for step in range(1000):
        exact = weights.float() + 2**-7 / 1000
        round_stochastically_(weights, exact, first_row=0, key=rounding_key(0, 0, step))
        nearest.copy_(nearest.float() + 2**-7 / 1000)
    assert torch.equal(nearest, torch.ones_like(nearest))
    moved = (weights.double() - 1).mean().item() / 2**-7
    # The number of spacings is a sum of draws of probability 1/1000: its deviation is 1, over 16,384 weights 1/128.
    assert abs(moved - 1) < 5 / 128


@given(st.floats(width=32, allow_nan=False), st.integers(0, 2**32 - 1))
def test_a_number_goes_to_one_of_its_neighbours(number, key):
    """What bfloat16 has stays; anything else becomes the one below or the one above; infinities stay."""
    exact = torch.tensor([[number]])
    found = rounded(exact, key=key)
    low = exact.view(torch.int32).bitwise_and(-BITS)
    high = torch.where(low == exact.view(torch.int32), low, low + BITS)
    assert found.float().view(torch.int32).item() in (low.item(), high.item())


@given(st.integers(0, 2**63), st.integers(0, 500), st.integers(1, 10**6))
def test_a_part_of_the_rows_gets_its_bits(seed, parameter, step):
    """Rows alone draw what they draw in the whole matrix: it may be divided in any way."""
    key = rounding_key(seed, parameter, step)
    whole = bits(9, 17, key)
    assert torch.equal(whole[4:], bits(5, 17, key, first=4))
    assert torch.equal(whole[:, :6], bits(9, 6, key))


def test_bits_are_as_good_as_random():
    """Each of 16 bits is set half of the time, alone and with its neighbours, rows, columns, steps and parameters."""
    draws = {
        name: bits(512, 512, rounding_key(*key))
        for name, key in {"one": (1, 0, 1), "step": (1, 0, 2), "parameter": (1, 1, 1), "seed": (2, 0, 1)}.items()
    }
    one = draws["one"]
    assert 0 <= one.min() <= one.max() < BITS
    others = {
        **{name: drawn for name, drawn in draws.items() if name != "one"},
        "rows": one.roll(1, 0),
        "columns": one.roll(1, 1),
        "both": one.roll(1, 0) ^ one.roll(1, 1) ^ one.roll((1, 1), (0, 1)),
        "transposed": one.T,
    }
    number = one.numel()
    for place in range(16):
        bit = (one >> place) & 1
        assert abs(bit.double().mean().item() - 0.5) < 5 * 0.5 / number**0.5, place
        for name, other in others.items():
            same = (bit == ((other >> place) & 1)).double().mean().item()
            # The transposed has each pair twice, and its diagonal equals itself.
            assert abs(same - 0.5) < 8 * 0.5 / number**0.5 + (name == "transposed") / 512, (place, name)


@pytest.mark.parametrize("problem", [None, "its bits are others"])
def test_a_memory_plan_counts_what_a_device_rounds_by(problem, monkeypatch):
    """Where the kernel was given up, the operators' tensors of a matrix are counted, as those that a real one takes."""

    def taken(matrix):
        with Tracker() as tracker:
            into = torch.empty_like(matrix, dtype=torch.bfloat16)
            round_stochastically_(into, matrix, first_row=0, key=1)
            return tracker.peak().bytes - into.nbytes

    tried = {"kernel": "stochastic rounding", "device": "meta", "instead": "operators", "problem": problem}
    monkeypatch.setitem(_kernels._found, ("stochastic rounding", "meta", ""), _kernels.TriedKernel(**tried))
    with FakeTensorMode():
        matrix = torch.empty(300, 700, device="meta")
    assert taken(matrix) == (0 if problem is None else taken(torch.zeros(300, 700)))
    assert taken(torch.zeros(300, 700)) > 2 * matrix.nbytes


def test_a_device_is_tried_before_a_memory_plan_asks(monkeypatch):
    """When the optimizer is made, where bitsandbytes' kernels move bfloat16 weights; on a CPU there is nothing to try."""
    pytest.importorskip("bitsandbytes")
    tried = []
    monkeypatch.setattr(_adamw_8bit, "try_rounding", tried.append)
    for dtype, there in ((torch.bfloat16, True), (torch.float32, False), (torch.bfloat16, False)):
        monkeypatch.setattr(_adamw_8bit, "_has_kernel", lambda _, there=there: there)
        weights = [torch.nn.Parameter(torch.zeros(16, 256, dtype=dtype))]
        _adamw_8bit.AdamW8bit([{"params": weights}], lr=1.0, betas=(0.9, 0.95), eps=1e-8)
    assert tried == [torch.device("cpu")]
    monkeypatch.setattr(_rounding, "_rounding_on", lambda kind: pytest.fail(kind))
    _rounding.try_rounding(torch.device("cpu"))


def test_keys_differ():
    """Seeds, parameters and steps give other keys, of 32 bits."""
    keys = {rounding_key(seed, parameter, step) for seed in (0, 1, 2**40) for parameter in range(40) for step in range(40)}
    assert len(keys) == 3 * 40 * 40
    assert all(0 <= key < 2**32 for key in keys)


@pytest.fixture
def traced(monkeypatch):
    """Let what is compiled for a device be traced, and computed by the operators that it is made of; returns the graphs."""
    graphs, compile_ = [], torch.compile

    def backend(graph, _):
        graphs.append(graph)
        return graph

    monkeypatch.setattr(torch, "compile", lambda function, **how: compile_(function, backend=backend, fullgraph=True, **how))
    monkeypatch.setattr(_kernels, "_found", {})
    _rounding._compiled.cache_clear()
    yield graphs
    _rounding._compiled.cache_clear()


@pytest.mark.slow
def test_one_kernel_has_the_same_bits(traced):
    """Compiled, as on a GPU, it is one graph for matrices of any size, places and keys; 0 and 1 have their own."""
    compiled = _rounding._rounding_on("cpu")
    assert compiled is not _rounding._round_
    for rows, columns in ((8, 4096), (777, 33), (64, 64)):
        for number, key in enumerate((0, 1, 2**31, 2**32 - 1)):
            exact = torch.randn(rows, columns)
            into = torch.empty(rows, columns, dtype=torch.bfloat16)
            compiled(into, exact.clone(), number, *_rounding.keys_of_places(key))
            assert torch.equal(into, rounded(exact, first_row=number, key=key))
    assert len(traced) <= 3


def test_other_bits_are_not_used(monkeypatch):
    """A compiler whose kernel draws other bits, or that fails, leaves the operators in its place."""

    def fails(function, **_):
        def run(*_args):
            raise RuntimeError("no compiler")

        return run

    for compile_ in (lambda function, **_: lambda into, *_args: into.zero_(), fails):
        monkeypatch.setattr(torch, "compile", compile_)
        monkeypatch.setattr(_kernels, "_found", {})
        _rounding._compiled.cache_clear()
        assert _rounding._rounding_on("cpu") is _rounding._round_
        assert "stochastic rounding by operators" in str(asked_kernels()[-1])
    _rounding._compiled.cache_clear()


def test_a_rehearsal_on_a_device_allocates_nothing():
    """On tensors without data of a device other than the CPU it is a call that takes no memory and no compiler."""
    exact, into = torch.empty(3, 4, device="meta"), torch.empty(3, 4, device="meta", dtype=torch.bfloat16)
    round_stochastically_(into, exact, first_row=0, key=5)
