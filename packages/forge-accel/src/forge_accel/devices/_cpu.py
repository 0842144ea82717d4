"""The CPU: always available, float32 by default; the reasons say what bfloat16 would cost."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import torch

from forge_accel._choice import Choice
from forge_accel._dtypes import bfloat16, dtype_named, float32
from forge_accel._errors import AccelError
from forge_accel.devices import _cpuinfo
from forge_accel.devices._accelerator import Accelerator
from forge_accel.devices._memory import MemoryMeter, ProfilerMeter
from forge_accel.devices._products import product_scratch
from forge_accel.devices._quantization import check_quantization, held
from forge_accel.fused._choices import INDUCTOR, missing_compiler

_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1
"""glibc's numbers of the two parameters of malloc (malloc.h)."""
_LARGEST_KEPT, _MOST_KEPT = (2**30, 2**25), 2**31 - 1
"""Bytes of the largest block that is kept when it is freed (glibc before 2.35 allows no more than the second), and of all that
is kept at the end of the heap.
"""
_CONFIGURED = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")
"""Variables that configure glibc's malloc."""


@cache
def _keep_freed_memory() -> bool:
    """Let malloc keep freed tensors for the next ones; return whether it does.

    Whoever configured it by its variables keeps that.
    glibc gives blocks above 32 MiB and the end of the heap back to the system. Every step would get its activations anew, page
    by page, each zeroed by the kernel first: a sixteenth of a step in float32, an eighth in bfloat16, in a virtual machine.
    """
    if sys.platform != "linux" or any(name in os.environ for name in _CONFIGURED):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    # musl has none.
    if mallopt is None:
        return False
    return any(mallopt(_MMAP_THRESHOLD, size) for size in _LARGEST_KEPT) and bool(mallopt(_TRIM_THRESHOLD, _MOST_KEPT))


_PRIMITIVES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128", "LRU_CACHE_CAPACITY": "128"}
"""Variables with the number of compiled products that oneDNN and torch keep, of 1,024 by default; read at the first product."""


def _keep_fewer_products() -> None:
    """Let oneDNN and torch keep 128 compiled products each, unless their variables differ.

    Each row length has its own in bfloat16, of about a megabyte. A step calls each of its few shapes once a block, and lengths
    seldom come again: with 1,024 a small model of 4 blocks held 1.5 GB after 80 rows of 64 to 1,023 tokens, with 128 0.8 GB,
    as fast.
    """
    for name, number in _PRIMITIVES.items():
        os.environ.setdefault(name, number)


_OPERATIONS_A_SECOND = 1e11
"""Floating-point operations of a training step that a thread computes in a second, about: 1.3e11 in float32 with AVX-512."""
_LONG = 30
"""Minutes of a run in which compiled blocks win more than the half minute that they take to compile: a twentieth of a step."""
_PRODUCT = 2**20
"""Bytes of a compiled product, at most: 0.55 MB at oneDNN and 0.3 MB at torch, of a Llama of width 576 with amx_bf16."""
_PRODUCTS_OF_A_ROW = 20
"""Products of different shapes in a step on one row, forward and backward: a row of another length makes 19 MB of them."""


def _kept_products() -> int:
    """Return how many compiled products oneDNN and torch keep."""
    found = [os.environ.get(name, "") for name in _PRIMITIVES]
    return max(int(number) if number.isdecimal() else 1024 for number in found)


def _give_back() -> None:
    """Give the memory that malloc keeps back to the system, which would count as held."""
    if _keep_freed_memory():
        ctypes.CDLL(None).malloc_trim(0)


class CPUAccelerator(Accelerator):
    """Processor of this machine. Takes no index."""

    name = "cpu"
    priority = 0
    support = Choice("exercised", "exercised: every test of forge runs on CPUs")

    def __init__(self, *, index: int | None = None, why: str = "asked for by name") -> None:
        if index is not None:
            raise AccelError(f"device='cpu:{index}': torch has one CPU: use device=cpu.")
        super().__init__(why=why)
        self._features = _cpuinfo.features()
        _keep_freed_memory()
        _keep_fewer_products()

    @classmethod
    def available(cls) -> Choice[bool]:
        """Return True: there is always a CPU."""
        return Choice(value=True, reason="the CPU is always there")

    @classmethod
    def count(cls) -> int:
        """Return 0: all processes of a machine share its cores."""
        return 0

    @property
    def device(self) -> Choice[torch.device]:
        """Device `cpu`."""
        return Choice(torch.device("cpu"), f"cpu: {self._why}")

    @property
    def machine(self) -> str:
        """Processor, its instruction sets for matrix products, memory."""
        shown = [
            name
            for name in ("amx_bf16", "avx512_bf16", "avx512f", "avx2", "bf16", "sve", "neon", "asimd")
            if name in self._features
        ]
        memory = _cpuinfo.memory_bytes()
        size = "" if memory is None else f", {memory / 2**30:.1f} GiB"
        return f"{_cpuinfo.processor()} ({', '.join(shown) or torch.backends.cpu.get_cpu_capability()}){size}"

    @property
    def collective_backend(self) -> Choice[str]:
        """Gloo."""
        return Choice("gloo", "gloo: what torch speaks between CPU processes everywhere")

    @property
    def fused_optimizer(self) -> Choice[bool]:
        """True: a step of torch's fused AdamW reads each weight once."""
        return Choice(
            value=True, reason="fused: torch's fused AdamW passes over the weights once a step, the unfused ones several times"
        )

    @property
    def default_tokens(self) -> int:
        """1024: fewer keep a CPU busy, and more only take more memory."""
        return 1024

    @property
    def most_tokens(self) -> int:
        """1024, as `default_tokens`."""
        return self.default_tokens

    def dtype(self, requested: str = "auto") -> Choice[torch.dtype]:
        """Choose the requested dtype; `auto` is float32 on every CPU.

        So a run's numbers follow from its settings, not from the processor, nor from a noisy measurement. torch accepts
        bfloat16 everywhere; the reason says what it costs on this processor.
        """
        if requested == "auto":
            return Choice(float32, f"float32: {self._why_float32()}")
        dtype = dtype_named(requested)
        if dtype == float32:
            return Choice(dtype, "float32: asked for")
        return Choice(dtype, f"bfloat16: asked for; {self._bfloat16_cost()}")

    def _why_float32(self) -> str:
        if "amx_bf16" in self._features:
            return (
                "the exact choice; this CPU has bf16 matrix units (amx_bf16), with which dtype=bfloat16 trained a 135M model "
                "2.0 times as fast, at 8 bits of precision"
            )
        if "avx512_bf16" in self._features:
            return (
                "the exact choice; this CPU has bf16 instructions but no matrix units for it; on two such ones dtype=bfloat16 "
                "trained a 135M model 1.5 and 2.6 times as fast, at 8 bits of precision"
            )
        if "bf16" in self._features:
            return (
                "the exact choice; this CPU has bf16 instructions but no matrix units for it, so bf16 may or may not be faster"
            )
        return "this CPU has no bf16 matrix units, and bf16 runs about 10 times slower on it"

    def _bfloat16_cost(self) -> str:
        if "amx_bf16" in self._features:
            return "this CPU has bf16 matrix units (amx_bf16)"
        if self._features & {"avx512_bf16", "bf16"}:
            return "this CPU has bf16 instructions but no matrix units for it: compare its speed with float32"
        return "WARNING: this CPU has no bf16 matrix units, so expect a run about 10 times slower than in float32"

    def quantization(self, quant_type: str) -> Choice[str]:
        """Choose 4 or 8 bits by bitsandbytes; the weights are unpacked for each product."""
        found = check_quantization(quant_type)
        return Choice(
            quant_type,
            f"{held(quant_type, found)} on the CPU, and they are unpacked for each product: less memory, and no less time",
        )

    @contextmanager
    def with_threads(self, number: int | None) -> Iterator[None]:
        """Compute with so many threads in the block; None leaves this process's own."""
        before = torch.get_num_threads()
        torch.set_num_threads(number or before)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def compiling(self, requested: str = "auto", *, operations: float = 0.0) -> Choice[str | None]:
        """Choose the backend of `torch.compile`; by default runs above half an hour compile blocks.

        How long it takes is estimated from its operations and the threads, not measured: a run that is started again is
        compiled as before.
        """
        if requested != "auto":
            return super().compiling(requested)
        threads = torch.get_num_threads()
        minutes = operations / (_OPERATIONS_A_SECOND * threads) / 60
        if minutes < _LONG:
            return Choice(None, f"off: compiling takes half a minute, and was measured to win in runs above {_LONG} minutes")
        if missing := missing_compiler():
            return Choice(None, f"off: {missing}")
        length = f"the run is of about {minutes / 60:,.1f} hours by {threads} threads"
        return Choice(INDUCTOR, f"blocks: a step was measured to take 0.8 to 0.95 of the time, and {length}")

    def synchronize(self) -> None:
        """Do nothing: a CPU's work is done when the call returns."""

    def peak_memory_bytes(self) -> int | None:
        """Read the process' peak resident memory.

        Python, the data, and what malloc keeps for the next tensors are included.
        """
        return _cpuinfo.peak_rss_bytes()

    def reset_peak_memory(self) -> bool:
        """Reset the peak memory to what is held, where Linux allows it."""
        _give_back()
        return _cpuinfo.reset_peak_rss()

    def memory_limit_bytes(self) -> int | None:
        """Read the machine's memory."""
        return _cpuinfo.memory_bytes()

    def held_bytes(self) -> int | None:
        """Read this process' resident memory, without what malloc keeps.

        Python and the data are included.
        """
        _give_back()
        return _cpuinfo.rss_bytes()

    def meter(self) -> MemoryMeter | None:
        """Return a recording of torch's profiler; None where another, which it would end, runs."""
        return None if torch.autograd._profiler_enabled() else ProfilerMeter()

    def compiled_bytes(self, dtype: torch.dtype, lengths: int) -> int:
        """Return a megabyte for each bfloat16 product that is kept, of 20 for each length."""
        return _PRODUCT * min(_kept_products(), _PRODUCTS_OF_A_ROW * lengths) if dtype == bfloat16 else 0

    def product_scratch(self, products: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[int]:
        """Measure the bytes that products in bfloat16 take for themselves, by products like them."""
        return product_scratch(products)

    def peak_flops(self, dtype: torch.dtype) -> float | None:  # noqa: ARG002 - unknown for every dtype
        """Return None: clock, cores and units vary too much for a table."""
        return None
