"""Kernels are tried once on each device; what was found is told, and what says nothing of a kernel passes."""

import pytest
import torch

from forge_algos import _kernels, asked_kernels
from forge_algos._kernels import try_kernel


@pytest.fixture(autouse=True)
def _nothing_tried(monkeypatch):
    """Know nothing of any device."""
    monkeypatch.setattr(_kernels, "_found", {})
    asked_kernels()


def test_a_kernel_is_tried_once_for_each_device_and_variant():
    """An answer is kept, also a bad one; whoever asks for what was asked for since gets each once."""
    tried = []

    def found(problem):
        return lambda: tried.append(problem) or problem

    for _ in range(2):
        assert try_kernel("sums", "x:0", found(None), instead="operators")
        assert try_kernel("sums", "x:0", found(None), instead="operators", variant="narrow")
        assert not try_kernel("sums", "x:1", found("it adds 1"), instead="operators", variant="narrow")
    assert tried == [None, None, "it adds 1"]
    assert [str(each) for each in asked_kernels()] == [
        "sums by one kernel, tried on x:0 first",
        "sums by operators, for its kernel was given up on x:1: it adds 1 (narrow)",
    ]
    assert not asked_kernels()
    assert try_kernel("sums", "x:0", found("never tried again"), instead="operators")
    assert len(asked_kernels()) == 1


def raises(error, cause=None):
    """Return a try that raises an error with a cause."""

    def trial():
        raise error from cause

    return trial


def test_whatever_a_try_raises_is_a_reason():
    """Its kind and its first line."""
    error = RuntimeError("\n  no backend\nand more")
    assert not try_kernel("sums", "x:0", raises(error), instead="operators")
    assert asked_kernels()[0].problem == "RuntimeError: no backend"


@pytest.mark.parametrize(
    "error",
    [
        (torch.OutOfMemoryError("Tried to allocate 2.00 MiB"),),
        (ValueError("compiling"), torch.OutOfMemoryError("Tried to allocate 2.00 MiB")),
        (RuntimeError("Triton Error: out of memory. Tried to allocate 2.00 MiB"),),
    ],
)
def test_a_device_without_memory_says_nothing_of_a_kernel(error):
    """The error passes as torch's own, by which a run knows what to say; the kernel is tried again."""
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 2"):
        try_kernel("sums", "x:0", raises(*error), instead="operators")
    assert not asked_kernels()
    assert try_kernel("sums", "x:0", lambda: None, instead="operators")


def test_what_ends_a_run_passes():
    """An error with an exit status is somebody else's; causes that go round end the search for one."""

    class StoppedError(Exception):
        exit_status = 1

    with pytest.raises(StoppedError):
        try_kernel("sums", "x:0", raises(ValueError("compiling"), StoppedError("stalled")), instead="operators")
    looped, cause = ValueError("looped"), ValueError("cause")
    cause.__cause__ = looped
    assert not try_kernel("sums", "x:0", raises(looped, cause), instead="operators")
