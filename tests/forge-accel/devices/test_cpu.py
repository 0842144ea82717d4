"""The CPU accelerator: what it decides for which processor, and what it measures."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch

from forge_accel import AccelError, CPUAccelerator, accelerator, document_attention
from forge_accel.devices import _cpu

AVX2 = "fpu avx avx2 fma"
AVX512_BF16 = AVX2 + " avx512f avx512_bf16"
AMX = AVX512_BF16 + " amx_tile amx_bf16"


@pytest.fixture
def cpu_with(tmp_path, monkeypatch):
    """An accelerator of a machine whose /proc says what the test says."""

    def make(flags, field="flags"):
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nmodel name\t: Test CPU\n{field}\t\t: {flags}\n\nprocessor\t: 1\n")
        (tmp_path / "meminfo").write_text("MemFree: 1 kB\nMemTotal:       8388608 kB\n")
        monkeypatch.setattr("forge_accel.devices._cpuinfo.PROC", tmp_path)
        return CPUAccelerator()

    return make


@pytest.mark.parametrize("flags", [AVX2, AVX512_BF16, AMX, "neon bf16"])
def test_auto_is_float32_on_every_cpu(cpu_with, flags):
    """A run's numbers follow from its settings, not from the processor that it happened to get."""
    assert cpu_with(flags).dtype("auto").value == torch.float32


@pytest.mark.parametrize(
    ("flags", "auto", "asked"),
    [
        (AVX2, "no bf16 matrix units, and bf16 runs about 10 times slower", "WARNING.*10 times slower"),
        (AVX512_BF16, "1.5 and 2.6 times as fast", "compare its speed"),
        ("asimd bf16", "bf16 instructions but no matrix units", "compare its speed"),
        (AMX, "dtype=bfloat16 trained a 135M model 2.0 times as fast", "has bf16 matrix units"),
    ],
)
def test_the_reason_tells_what_the_processor_can_do(cpu_with, flags, auto, asked):
    """float32 by default, bfloat16 where asked for: either way the reason says what it costs on this processor."""
    acc = cpu_with(flags, "Features" if "asimd" in flags else "flags")
    assert acc.dtype("auto").reason.startswith("float32: ")
    assert auto in acc.dtype("auto").reason
    choice = acc.dtype("bfloat16")
    assert choice.value == torch.bfloat16
    assert choice.reason.startswith("bfloat16: asked for")
    assert re.search(asked, choice.reason)


def test_float32_asked_for_is_float32():
    """The reason is the request."""
    assert CPUAccelerator().dtype("float32") == accelerator("cpu").dtype("float32")
    assert CPUAccelerator().dtype("float32").value == torch.float32


def test_an_unknown_dtype_names_those_that_exist():
    """The error lists the choices."""
    with pytest.raises(AccelError, match="float16.*auto, float32, bfloat16"):
        CPUAccelerator().dtype("float16")


@pytest.mark.parametrize(
    ("own", "files", "gibibytes"),
    [
        ("0::/\n", {}, 8),
        ("0::/\n", {"memory.max": "max"}, 8),
        ("0::/\n", {"memory.max": 3 * 2**30}, 3),
        ("0::/system.slice/job_7/step_0\n", {"system.slice/job_7/memory.max": 2 * 2**30, "memory.max": 4 * 2**30}, 2),
        ("0::/kubepods/pod1\n", {"memory.max": 2**30}, 1),
        ("4:cpuset,memory:/a/b\n1:cpu:/\n0::/\n", {"memory/a/memory.limit_in_bytes": 5 * 2**30}, 5),
        ("4:memory:/a\n", {"memory/a/memory.limit_in_bytes": 9223372036854771712}, 8),
    ],
)
def test_a_container_s_limit_is_the_memory(cpu_with, tmp_path, monkeypatch, own, files, gibibytes):
    """A pod of 16 GiB on a host of 1 TiB is planned for 16: its own group's limit, or of any group around it."""
    machine = cpu_with(AVX2)
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text(own)
    monkeypatch.setattr("forge_accel.devices._cpuinfo.GROUPS", tmp_path / "groups")
    for name, limit in files.items():
        file = tmp_path / "groups" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{limit}\n")
    assert machine.memory_limit_bytes() == gibibytes * 2**30


def test_a_limit_of_the_address_space_is_one(cpu_with, monkeypatch):
    """`ulimit -v` ends what a process may take before the machine does."""
    resource = pytest.importorskip("resource")
    machine = cpu_with(AVX2)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (2**30, resource.RLIM_INFINITY))
    assert machine.memory_limit_bytes() == 2**30


def test_the_machine_line_names_processor_and_memory(cpu_with):
    """One line for a log."""
    assert cpu_with(AMX).machine == "Test CPU (amx_bf16, avx512_bf16, avx512f, avx2), 8.0 GiB"


def test_a_system_without_proc_still_answers(tmp_path, monkeypatch):
    """Without /proc (macOS) torch says what the processor has, getrusage the peak, and the peak cannot be reset."""
    monkeypatch.setattr("forge_accel.devices._cpuinfo.PROC", tmp_path / "none")
    acc = CPUAccelerator()
    assert acc.dtype("auto").value == torch.float32
    assert "GiB" not in acc.machine
    assert acc.peak_memory_bytes() > 1_000_000
    assert acc.reset_peak_memory() is False


def test_the_attention_that_is_requested():
    """auto and documents bring the function along; sdpa and eager are transformers' own; anything else is refused by name."""
    acc = CPUAccelerator()
    for requested in ("auto", "documents"):
        choice = acc.attention(requested, torch.float32)
        assert (choice.value.name, choice.value.function) == ("documents", document_attention)
        assert choice.reason.startswith("documents: ")
    for requested in ("sdpa", "eager"):
        choice = acc.attention(requested, torch.float32)
        assert (choice.value.name, choice.value.function) == (requested, None)
        assert choice.reason.startswith(f"{requested}: asked for")
    with pytest.raises(AccelError, match="flash.*auto, documents, flash3, flash4, sdpa, eager"):
        acc.attention("flash", torch.float32)


def test_autocast_is_nothing_for_float32_and_bf16_for_bf16():
    """float32 runs as it is; bfloat16 computes products in bf16 from float32 weights."""
    acc = CPUAccelerator()
    assert isinstance(acc.autocast(torch.float32), nullcontext)
    x = torch.ones(2, 2)
    with acc.autocast(torch.float32):
        assert (x @ x).dtype == torch.float32
    with acc.autocast(torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16


def test_seed_and_rng_state_repeat_the_draws():
    """The same seed, or a state put back, gives the same numbers."""
    acc = CPUAccelerator()
    with torch.random.fork_rng(devices=[]):
        acc.seed(7)
        first, state, then = torch.rand(3), acc.rng_state(), torch.rand(3)
        acc.set_rng_state(state)
        assert torch.equal(torch.rand(3), then)
        acc.seed(7)
        assert torch.equal(torch.rand(3), first)
        acc.seed(8)
        assert not torch.equal(torch.rand(3), first)


def test_a_foreign_rng_state_is_refused():
    """A state of another kind of device is an error before anything is changed."""
    acc = CPUAccelerator()
    before = torch.get_rng_state()
    with pytest.raises(AccelError, match="cpu, gpu"):
        acc.set_rng_state({"cpu": torch.zeros(1, dtype=torch.uint8), "gpu": torch.zeros(1)})
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("seed", [-1, 2**64, 1.5, True, "7"])
def test_a_seed_that_is_none_is_refused(seed):
    """torch would take a negative seed or a float for another one."""
    with pytest.raises(AccelError, match="seed"):
        CPUAccelerator().seed(seed)


def test_the_peak_counts_what_was_held_and_let_go():
    """The peak grows with an allocation and stays after it; a reset, where it is allowed, forgets it."""
    acc = CPUAccelerator()
    acc.reset_peak_memory()
    before = acc.peak_memory_bytes()
    held = torch.ones(40 * 2**20)  # 160 MiB, touched
    del held
    after = acc.peak_memory_bytes()
    assert after - before > 100 * 2**20
    if acc.reset_peak_memory():
        assert acc.peak_memory_bytes() < after - 100 * 2**20


def test_memory_that_malloc_keeps_is_not_held():
    """What a run says that it held when there was no more is without the freed tensors of the steps before."""
    acc = CPUAccelerator()
    before = acc.held_bytes()
    held = torch.ones(40 * 2**20)  # 160 MiB, touched
    during = acc.held_bytes()
    del held
    assert during - before > 100 * 2**20
    assert acc.held_bytes() < during - 100 * 2**20


def test_a_malloc_that_keeps_no_large_blocks_keeps_those_that_it_can(monkeypatch):
    """glibc before 2.35 refuses more than 32 MiB; where nothing is set, nothing is given back either."""
    asked = []

    class Library:
        def __init__(self, name):
            assert name is None

        def mallopt(self, parameter, value):
            asked.append((parameter, value))
            return int(parameter == -1 or value <= 2**25)

    for name in _cpu._CONFIGURED:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(_cpu.ctypes, "CDLL", Library)
    monkeypatch.setattr(_cpu.sys, "platform", "linux")
    assert _cpu._keep_freed_memory.__wrapped__() is True
    assert asked == [(-3, 2**30), (-3, 2**25), (-1, 2**31 - 1)]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc's malloc")
@pytest.mark.parametrize(("variables", "kept"), [({}, True), ({"MALLOC_TRIM_THRESHOLD_": "131072"}, False)])
def test_a_freed_tensor_s_memory_is_kept_for_the_next(variables, kept):
    """Tensors of 24 MiB take the pages of those before them: the system gives none; who configured malloc keeps that."""
    code = """
import resource, torch
from forge_accel import CPUAccelerator
CPUAccelerator()
def pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    [torch.ones(6 * 2**20) for _ in range(4)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print([pages() for _ in range(5)][-1])
"""
    env = {name: value for name, value in os.environ.items() if name not in _cpu._CONFIGURED} | variables
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert (int(done.stdout) < 100) is kept


def test_compiled_products_that_are_kept_are_bounded(monkeypatch):
    """128 of oneDNN's and of torch's, or what the caller's variables say."""
    monkeypatch.delenv("LRU_CACHE_CAPACITY", raising=False)
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "7")
    CPUAccelerator()
    assert os.environ["LRU_CACHE_CAPACITY"] == "128"
    assert os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "7"


def test_compiled_products_are_counted(monkeypatch):
    """In bfloat16, up to as many as are kept: a short run with rows of few lengths keeps few."""
    for name, number in _cpu._PRIMITIVES.items():
        monkeypatch.setenv(name, number)
    acc = CPUAccelerator()
    found = [acc.compiled_bytes(torch.bfloat16, lengths) // 2**20 for lengths in (1, 2, 6, 7, 100)]
    assert found == [20, 40, 120, 128, 128]
    assert acc.compiled_bytes(torch.float32, 100) == 0
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "300")
    assert acc.compiled_bytes(torch.bfloat16, 100) == 300 * 2**20


def test_its_other_properties():
    """Backend, optimizer, tokens; no table of FLOP/s; nothing to wait for; one device without a number."""
    acc = CPUAccelerator()
    acc.synchronize()
    assert acc.device.value == torch.device("cpu")
    assert acc.collective_backend.value == "gloo"
    assert acc.fused_optimizer.value is True
    assert acc.default_tokens == acc.most_tokens == 1024
    assert acc.peak_flops(torch.float32) is None
    assert repr(acc) == "<CPUAccelerator cpu, float32>"
    with pytest.raises(AccelError, match="cpu:1"):
        CPUAccelerator(index=1)


def test_the_fused_optimizer_it_advises_exists():
    """torch takes `fused=True` for CPU weights and steps them."""
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], fused=CPUAccelerator().fused_optimizer.value)
    weight.grad = torch.ones(3)
    optimizer.step()
    assert (weight < 1).all()
