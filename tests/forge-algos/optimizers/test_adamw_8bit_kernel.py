"""The kernel of AdamW with moments in 8 bits, interpreted by Triton on a CPU: beside bitsandbytes' and the nearest codes.

Run by `hatch run triton:test`, whose environment holds Triton. That a device without it takes bitsandbytes' kernels, and that
one whose kernel is wrong does, is tested without.
"""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

from forge_algos import _kernels, asked_kernels
from forge_algos.optimizers import _adamw_8bit
from forge_algos.optimizers._adamw_8bit import BLOCK, ZEROS, AdamW8bit
from forge_algos.optimizers._rounding import keys_of_places, round_stochastically_, rounding_key

bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes is an optional package")

THERE = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
GROUP = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def interpreted(test):
    """Mark a test that runs the kernel."""
    return pytest.mark.lane(pytest.mark.skipif(not THERE, reason="needs triton and TRITON_INTERPRET=1")(test))


def values(*, signed):
    return bitsandbytes.functional.create_dynamic_map(signed=signed)


@interpreted
@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_the_nearest(signed):
    """Of numbers over eight decades each gets the code whose value is nearest, but for ties by the last digit."""
    import triton
    import triton.language as tl

    from forge_algos.optimizers._adamw_8bit_kernel import _place

    number, generator = 1 << 14, torch.Generator().manual_seed(0)
    drawn = torch.rand(number, generator=generator)
    x = torch.where(torch.arange(number) % 2 == 0, drawn, 10 ** (-8 * drawn))
    own = values(signed=signed)[ZEROS[0] if signed else 0 :]
    x[: len(own)] = own
    found = torch.zeros(number, dtype=torch.int32)
    globals().update(tl=tl, triton=triton, _place=_place)
    triton.jit(_places)[(1,)](x, found, number, 1 if signed else 2)
    apart = (x.double()[:, None] - own.double()[None]).abs()
    excess = apart.gather(1, found.long()[:, None])[:, 0] - apart.amin(1)
    assert (excess <= 3e-7 * x).all()
    assert torch.equal(found[: len(own)], torch.arange(len(own), dtype=torch.int32))
    assert found.unique().numel() == len(own)


def _places(x_at, found_at, number: tl.constexpr, first: tl.constexpr):  # noqa: F821 - Triton's, there when it is compiled
    at = tl.arange(0, number)  # noqa: F821
    tl.store(found_at + at, _place(tl.load(x_at + at), first))  # noqa: F821


@interpreted
@pytest.mark.parametrize("width", [256, 300, 1024])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_is_bitsandbytes(width, dtype):
    """Weights and scales are those of bitsandbytes' kernel, stochastic rounding's bits included; codes as near."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(9, width, generator=generator).to(dtype)
    codes = [torch.full((9, width), zero, dtype=torch.uint8) for zero in ZEROS]
    scales = [torch.zeros(9, -(-width // BLOCK)) for _ in ZEROS]
    maps = [values(signed=signed) for signed in (True, False)]
    for step in range(1, 5):
        grad = torch.randn(9, width, generator=generator) * torch.logspace(-6, 0, 9)[:, None] * (step != 3)
        places = keys_of_places(rounding_key(3, 5, step))
        padding = -width % BLOCK
        pads = [torch.nn.functional.pad(each, (0, padding)) for each in (weight.float(), grad.to(dtype).float())]
        theirs = [torch.nn.functional.pad(each, (0, padding), value=zero) for each, zero in zip(codes, ZEROS, strict=True)]
        their_scales = [each.clone() for each in scales]
        optimizer = AdamW8bit([{"params": [torch.nn.Parameter(torch.zeros(1))]}], **GROUP)
        optimizer._update(*pads, theirs, their_scales, step, GROUP)
        expected = pads[0][:, :width].contiguous()
        if dtype == torch.bfloat16:
            into = torch.empty_like(weight)
            round_stochastically_(into, expected, first_row=11, key=rounding_key(3, 5, step))
            expected = into
        _adamw_8bit._move_at_once(weight, grad.to(dtype), *codes, *scales, *maps, *_adamw_8bit._rates(step, GROUP), 11, *places)
        same = (weight == expected).float().mean() if dtype == torch.bfloat16 else torch.tensor(1.0)
        assert same > 0.999, step
        torch.testing.assert_close(weight, expected, rtol=1e-2 if dtype == torch.bfloat16 else 2e-6, atol=1e-6)
        for ours, other in zip(scales, their_scales, strict=True):
            torch.testing.assert_close(ours, other, rtol=1e-6, atol=1e-30)
        for code, other, value, scale in zip(codes, theirs, maps, scales, strict=True):
            wide = scale.repeat_interleave(BLOCK, 1)[:, :width]
            apart = (value[code.long()] - value[other[:, :width].long()]) * wide
            # bitsandbytes' kernel for CPUs does not always find the nearest.
            assert (apart.norm() / wide.norm()) < 3e-3, step


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # the interpreter's numpy speaks of NaN
@interpreted
def test_rows_of_any_width_and_numbers_that_are_none(monkeypatch):
    """A row with more programs than a dimension of CUDA's grids takes (an expert of Mixtral's) moves whole; NaN stays NaN."""
    from forge_algos.optimizers import _adamw_8bit_kernel

    generator = torch.Generator().manual_seed(0)
    drawn, grad = torch.randn(2, 5, 6000, generator=generator)
    # Not a number, as a GPU writes it.
    grad[2, 3000] = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    maps, found = [values(signed=signed) for signed in (True, False)], []
    for most in (_adamw_8bit_kernel.MOST_PROGRAMS, 4, 1):
        monkeypatch.setattr(_adamw_8bit_kernel, "MOST_PROGRAMS", most)
        codes = [torch.full((5, 6000), zero, dtype=torch.uint8) for zero in ZEROS]
        held = drawn.bfloat16(), grad, *codes, *(torch.zeros(5, 24) for _ in ZEROS)
        _adamw_8bit._move_at_once(*held, *maps, *_adamw_8bit._rates(1, GROUP), 0, 3, -5)
        assert held[0].isnan().nonzero().tolist() == [[2, 3000]]
        assert (held[0] != drawn.bfloat16()).float().mean(1).min() > 0.05
        assert (held[4] > 0).all()
        found.append([each.nan_to_num() for each in held])
    assert all(torch.equal(*pair) for other in found[1:] for pair in zip(found[0], other, strict=True))


@interpreted
def test_the_trial_finds_a_kernel_that_is_right_and_one_that_is_wrong(monkeypatch):
    """What is made up for a device is moved as AdamW moves it; a kernel that moves by another rate is not taken."""
    assert _adamw_8bit.kernel_problem("cpu") is None
    from forge_algos.optimizers import _adamw_8bit_kernel

    right = _adamw_8bit_kernel.launch

    def wrong(weight, grad, codes, scales, maps, rates, place):
        right(weight, grad, codes, scales, maps, (*rates[:3], rates[3] * 1.01, *rates[4:]), place)

    monkeypatch.setattr(_adamw_8bit_kernel, "launch", wrong)
    assert "not AdamW's" in _adamw_8bit.kernel_problem("cpu")


@interpreted
def test_runs_are_as_with_bitsandbytes(monkeypatch):
    """An optimizer moves by the kernel as near to AdamW as by bitsandbytes', rows by themselves, and resumes to the bit."""
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(20, 600, generator=generator)
    grads = [torch.randn(20, 600, generator=generator) * 0.1 for _ in range(4)]

    def run(kind, *, rows=slice(None), kernel=True, halfway=False, **options):
        monkeypatch.setattr(_adamw_8bit, "_has_kernel", lambda _: kernel)
        parameter = torch.nn.Parameter(first[rows].clone())
        optimizer = kind([parameter] if kind is torch.optim.AdamW else [{"params": [parameter]}], **{**GROUP, **options})
        for number, grad in enumerate(grads):
            if halfway and number == 2:
                state, optimizer = optimizer.state_dict(), kind([{"params": [parameter]}], **{**GROUP, **options})
                optimizer.load_state_dict(state)
            parameter.grad = grad[rows].clone()
            optimizer.step()
        return parameter.detach()

    exact, ours, theirs = run(torch.optim.AdamW), run(AdamW8bit), run(AdamW8bit, kernel=False)
    assert (ours - exact).norm() < 1.1 * (theirs - exact).norm()
    assert torch.equal(ours, torch.cat([run(AdamW8bit, rows=slice(0, 9)), run(AdamW8bit, rows=slice(9, 20))]))
    assert torch.equal(ours, run(AdamW8bit, halfway=True))


def test_a_kernel_that_cannot_run_is_not_taken(monkeypatch):
    """Where Triton is missing, or has no backend, bitsandbytes' kernels move the weights: nothing is raised, and it is told."""
    monkeypatch.setattr(_kernels, "_found", {})
    asked_kernels()
    assert not _adamw_8bit._has_kernel(torch.device("cpu"))
    assert not asked_kernels()
    # The meta device stands for one that is no CPU; its tensors are of the usual type, and have no numbers to compare.
    assert not _adamw_8bit._has_kernel(torch.device("meta"))
    (told,) = map(str, asked_kernels())
    assert told.startswith("adamw_8bit by bitsandbytes' kernels, for its kernel was given up on meta: ")
