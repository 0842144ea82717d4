"""What a machine compiles and which kernels it takes: nothing that nobody measured, and refusals by name."""

from __future__ import annotations

import math

import pytest

from forge_accel import AccelError, Choice, accelerator
from forge_accel.attention._flash import missing_flash
from forge_accel.devices import _cpu
from forge_accel.fused import _liger
from forge_accel.fused._choices import choose_kernels

CPU = accelerator("cpu")


def test_auto_takes_nothing_that_nobody_measured():
    """`auto` compiles nothing and takes torch's own kernels, and says why."""
    assert CPU.compiling().value is None
    assert CPU.kernels().value is None
    for choice in (CPU.compiling(), CPU.kernels()):
        assert "measured" in choice.reason
    assert (CPU.compiling("off").reason, CPU.kernels("none").reason) == ("off: asked for", "none: asked for")


def test_blocks_need_a_compiler(monkeypatch, tmp_path):
    """`compile=blocks` takes inductor where a C++ compiler is, and is refused where none is."""
    (tmp_path / "g++").write_text("#!/bin/sh\n")
    (tmp_path / "g++").chmod(0o755)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert CPU.compiling("blocks").value == "inductor"
    (tmp_path / "g++").unlink()
    with pytest.raises(AccelError, match="a C\\+\\+ compiler, and there is none.*compile=off"):
        CPU.compiling("blocks")
    monkeypatch.setenv("CXX", "nothing++")
    with pytest.raises(AccelError, match="CXX=nothing\\+\\+ is not found"):
        CPU.compiling("blocks")


def test_a_cpu_compiles_long_runs(monkeypatch):
    """Above half an hour of work by this process' threads, estimated, not measured; with a compiler alone."""
    monkeypatch.setattr(_cpu, "missing_compiler", lambda: "")
    monkeypatch.setattr(_cpu.torch, "get_num_threads", lambda: 2)
    half_an_hour = 30 * 60 * 2 * 1e11
    assert CPU.compiling(operations=0.99 * half_an_hour).value is None
    assert "runs above 30 minutes" in CPU.compiling(operations=0.99 * half_an_hour).reason
    found = CPU.compiling(operations=5 * half_an_hour)
    assert found == Choice("inductor", found.reason)
    assert found.reason.endswith("the run is of about 2.5 hours by 2 threads")
    assert CPU.compiling("off", operations=math.inf).value is None
    monkeypatch.setattr(_cpu, "missing_compiler", lambda: "there is none")
    assert CPU.compiling(operations=math.inf) == Choice(None, "off: there is none")


@pytest.mark.parametrize(("ask", "wrong"), [("compiling", "all"), ("kernels", "unsloth")])
def test_unknown_values_are_refused(ask, wrong):
    """The message names the values that there are."""
    with pytest.raises(AccelError, match=f"{wrong}.*known are auto"):
        getattr(CPU, ask)(wrong)


def test_liger_is_refused_where_it_cannot_be(monkeypatch):
    """Without the package, on devices without Triton, and on a CPU unless Triton is asked to interpret."""
    installed = {"liger-kernel": "0.6.4"}

    def version(name):
        if name not in installed:
            raise _liger.PackageNotFoundError(name)
        return installed[name]

    there = []
    monkeypatch.setattr(_liger, "version", version)
    monkeypatch.setattr(_liger, "find_spec", lambda name: name if name in there else None)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(AccelError, match="kernels=liger needs liger-kernel and Triton.*kernels=none"):
        CPU.kernels("liger")
    there.append("triton")
    for device in ("hpu", "mps"):
        with pytest.raises(AccelError, match=f"no kernels for {device}: set kernels=none"):
            choose_kernels("liger", auto="", device=device)
    for device in ("cuda", "xpu", "npu"):
        assert choose_kernels("liger", auto="", device=device).value == "liger"
    with pytest.raises(AccelError, match="Triton has no kernels for CPUs.*kernels=none"):
        CPU.kernels("liger")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert CPU.kernels("liger").value == "liger"


@pytest.mark.parametrize("name", ["flash3", "flash4"])
def test_newer_flash_kernels_are_refused_by_name(name):
    """On a CPU there are none; on a GPU the chip and the package are named."""
    with pytest.raises(AccelError, match=f"attention={name}: there are no FlashAttention {name[-1]} kernels for cpu"):
        CPU.attention(name, CPU.dtype("bfloat16").value)
    assert "this chip is not" in missing_flash(name, 8)
    assert "this chip is not" in missing_flash(name, None)
    assert "is not installed" in missing_flash(name, 9)
