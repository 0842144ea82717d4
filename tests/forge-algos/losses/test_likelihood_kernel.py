"""The kernel of the losses gives the operators' numbers, and is used only where it was tried and did."""

import importlib.util
import json
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from forge_algos import _kernels, asked_kernels, losses
from forge_algos.losses import _score_rows as kernel, nll
from forge_algos.losses._likelihood import Likelihood, score_in_place

SCRIPT = Path(__file__).with_name("interpreted_kernel.py")
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="Triton, which comes with builds of torch for GPUs, is not installed: hatch run triton:test",
)


@pytest.mark.lane
@needs_triton
def test_the_interpreted_kernel_gives_the_numbers_of_operators():
    """Every variant, weights, odd sizes and far logits, against float64; slopes in 32 and 16 bits; whole losses."""
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    # Triton's interpreter cuts off what bfloat16 does not hold, where a GPU rounds to the nearest.
    assert found["single"].pop("bfloat16") < 2**-7
    assert found["single"].pop("float16") < 2**-10
    assert set(found["single"]) == {"loss", "nll", "correct", "float32"}
    assert max(found["single"].values()) < 1e-5, found
    assert found["whole"].pop("bfloat16") < 2**-7
    assert found["whole"].pop("float16 in variants") < 2**-9
    # The slope is float32 in these, and rounded after what softcap, scale and bias do with it.
    assert found["whole"].pop("softcap") < 2**-9
    assert found["whole"].pop("scale") < 2**-9
    assert found["whole"].pop("bias") < 2**-9
    assert set(found["whole"]) == {"float32 weighted", "no_grad", "inference_mode"}
    assert max(found["whole"].values()) < 1e-5, found
    assert found["tried"]
    assert found["outside"]
    assert found["impossible"]


@pytest.fixture
def by_operators(monkeypatch):
    """Let operators stand in for the launch, and be taken everywhere; return the dtypes of logits and slopes."""
    seen = []

    def launch(tensors, numbers, *, weighted, slope):
        logits, targets, weights, out, *into = tensors
        dft, smoothing, z_loss = numbers
        seen.append((out.dtype, out is logits or out.data_ptr() == logits.data_ptr(), slope, weighted))
        likelihood = Likelihood(dft=bool(dft), label_smoothing=smoothing, z_loss=z_loss)
        scored = logits.clone()
        score_in_place(scored, targets, likelihood, weights if weighted else None, tuple(into), slope=slope)
        if slope:
            out.copy_(scored)

    monkeypatch.setattr(kernel, "launch", launch)
    monkeypatch.setattr(kernel, "_has_kernel", lambda *_: True)
    return seen


@pytest.mark.parametrize(
    ("dtype", "bias", "options", "slope"),
    [
        (torch.bfloat16, False, {}, torch.bfloat16),
        (torch.float16, False, {"dft": True, "label_smoothing": 0.1, "z_loss": 1e-3}, torch.float16),
        (torch.float32, False, {"token_weights": torch.linspace(0, 2, 9)}, torch.float32),
        (torch.bfloat16, False, {"softcap": 3.0}, torch.float32),
        (torch.bfloat16, False, {"scale": 0.25}, torch.float32),
        (torch.bfloat16, True, {}, torch.float32),
    ],
)
def test_a_slope_is_narrow_where_nothing_else_is_done_with_it(dtype, bias, options, slope, request):
    """It goes into the product's dtype where softcap, scale and bias leave it alone, and else into the logits' memory.
    Sum, figures and gradients are those without the kernel either way.
    """
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randn(*size, generator=generator) for size in ((9, 6), (30, 6), (30,))]
    targets = torch.randint(0, 30, (9,), generator=generator)

    def scored():
        hidden, weight, b = (each.to(dtype, copy=True).requires_grad_() for each in drawn)
        terms = nll(hidden, weight, targets, bias=b if bias else None, chunk_rows=4, **options)
        terms.sum.backward()
        return [terms.sum, *terms.stats.values(), *(each.grad for each in (hidden, weight, b) if each.grad is not None)]

    expected = scored()
    seen = request.getfixturevalue("by_operators")
    for ours, theirs in zip(scored(), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert seen == [(slope, slope == torch.float32, True, "token_weights" in options)] * 3


def test_without_gradients_no_slope_is_written(by_operators):
    """An evaluation scores its rows and leaves their logits."""
    with torch.no_grad():
        nll(torch.eye(4), torch.eye(4), torch.arange(4))
    assert by_operators == [(torch.float32, True, False, False)]


def test_a_slope_is_given_back_before_the_next_one_is_made(by_operators, monkeypatch):
    """One chunk's slope at a time is held beside the logits, as by operators."""
    made, most, empty_like = [], [], torch.empty_like

    def counted(tensor, **how):
        slope = empty_like(tensor, **how)
        if how.get("dtype") == torch.bfloat16:
            made.append(weakref.ref(slope))
            most.append(sum(each() is not None for each in made))
        return slope

    monkeypatch.setattr(kernel.torch, "empty_like", counted)
    hidden, weight = torch.randn(9, 6).bfloat16().requires_grad_(), torch.randn(30, 6).bfloat16()
    nll(hidden, weight, torch.arange(9), chunk_rows=4)
    assert most == [1, 1, 1]


def device(monkeypatch, capability=(9, 0)):
    """Let the CPU pass for a device with a capability; return the tries of the kernel."""
    tries = []
    monkeypatch.setattr(_kernels, "_found", {})
    module = SimpleNamespace(get_device_capability=lambda _device: capability)
    monkeypatch.setattr(torch, "get_device_module", lambda _device: module)
    monkeypatch.setattr(kernel, "agrees", lambda *how, **more: tries.append((how, more)) or True)
    return tries


def test_the_kernel_is_tried_once_for_each_kind_of_slope(monkeypatch):
    """What was tried with one dtype says nothing of another, or of weights."""
    tries = device(monkeypatch)
    for _ in range(2):
        assert kernel._works("x:0", torch.bfloat16, False)
        assert kernel._works("x:0", None, True)
    assert tries == [(("x:0", torch.bfloat16), {"weighted": False}), (("x:0", None), {"weighted": True})]


@pytest.mark.parametrize("capability", [None, {"architecture": 5}])
def test_other_vendors_devices_go_by_operators(monkeypatch, capability):
    """Where the device's module has no pair of numbers, or torch is built for HIP, nothing is tried."""
    tries = device(monkeypatch, capability)
    assert not kernel._works("x:0", None, False)
    device(monkeypatch)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not kernel._works("x:0", None, False)
    assert not tries


def test_a_kernel_that_fails_or_differs_is_not_used(monkeypatch):
    """Without Triton, and with a launch that raises or writes other numbers, operators go on."""
    agrees = kernel.agrees
    device(monkeypatch)
    monkeypatch.setattr(kernel, "agrees", agrees)
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "forge_algos.losses._likelihood_kernel", raising=False)
    monkeypatch.delattr(losses, "_likelihood_kernel", raising=False)
    asked_kernels()
    assert not kernel._works("cpu", torch.bfloat16, False)
    (told,) = map(str, asked_kernels())
    assert told.startswith("losses by operators, for its kernel was given up on cpu: ModuleNotFoundError: ")
    assert "(slope in torch.bfloat16)" in told

    wrong, told = [], []

    def launch(tensors, numbers, *, weighted, slope):
        logits, targets, _, out, *into = tensors
        dft, smoothing, z_loss = numbers
        likelihood = Likelihood(dft=bool(dft), label_smoothing=smoothing, z_loss=z_loss)
        scored = logits.clone()
        score_in_place(scored, targets, likelihood, None, tuple(into), slope=slope)
        if wrong and likelihood == wrong[0]:
            scored[3] *= 1.01
        out.copy_(scored)

    monkeypatch.setattr(kernel, "launch", launch)
    for planted in (None, Likelihood(dft=True, z_loss=1e-4), Likelihood(label_smoothing=0.1)):
        wrong[:] = [planted] if planted else []
        monkeypatch.setattr(_kernels, "_found", {})
        assert kernel._works("cpu", torch.bfloat16, False) is (planted is None)
        told.append(str(asked_kernels()[0]))
    assert told[0] == "losses by one kernel, tried on cpu first"
    assert all(each.endswith("its numbers are not those of the operators (slope in torch.bfloat16)") for each in told[1:])


def test_a_device_without_memory_is_tried_again(monkeypatch):
    """Running out of memory in the trial is the run's matter, as anywhere else, and says nothing of the kernel."""
    device(monkeypatch)

    def full(*_how, **_more):
        raise torch.OutOfMemoryError("Tried to allocate 2.00 MiB")

    monkeypatch.setattr(kernel, "agrees", full)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        kernel._works("x:0", torch.bfloat16, False)
    monkeypatch.setattr(kernel, "agrees", lambda *_how, **_more: True)
    assert kernel._works("x:0", torch.bfloat16, False)


def test_only_large_float32_logits_with_numbers_are_scored_by_it(monkeypatch):
    """Not on a CPU, not in float64, not a small vocabulary, no logits whose rows are scattered, and none without data."""
    monkeypatch.setattr(kernel, "_works", lambda *_: True)
    assert not kernel._has_kernel(torch.empty(2, 2048), None, None)
    # The meta device stands for one that is no CPU; its tensors are of the usual type.
    on = {"device": "meta"}
    assert kernel._has_kernel(torch.empty(2, 2048, **on), None, None)
    assert not kernel._has_kernel(torch.empty(2, 1024, **on), None, None)
    assert not kernel._has_kernel(torch.empty(0, 2048, **on), None, None)
    assert not kernel._has_kernel(torch.empty(2, 2048, dtype=torch.float64, **on), None, None)
    assert not kernel._has_kernel(torch.empty(2048, 2, **on).t(), None, None)
    with FakeTensorMode():
        assert not kernel._has_kernel(torch.empty(2, 2048, **on), None, None)
