"""CUDA devices of NVIDIA; `_rocm.py` has AMD's, which torch calls `cuda` too."""

from __future__ import annotations

import os
from functools import lru_cache, partial
from typing import Any

import torch

from forge_accel._choice import Choice
from forge_accel._dtypes import bfloat16, dtype_name, dtype_named, float32
from forge_accel._errors import AccelError
from forge_accel.attention._attention import Attention
from forge_accel.attention._documents import document_attention
from forge_accel.attention._flash import activate_flash, missing_flash
from forge_accel.attention._varlen import find_kernel, with_grouped_heads
from forge_accel.devices._accelerator import Accelerator, local_rank, tokens_for
from forge_accel.devices._memory import BLOCK_BYTES, CONTEXT_BYTES, AllocatorMeter, MemoryMeter
from forge_accel.devices._peak_flops import peak_of
from forge_accel.devices._quantization import check_quantization, held, refuse_quantization
from forge_accel.fused._choices import INDUCTOR

_HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Variables by which GPUs are hidden; the second and third are ROCm's."""


def gpus_seen(built: str) -> Choice[bool]:
    """Decide whether torch, built for `built`, sees a GPU."""
    if not torch.cuda.is_available():
        hiding = _HIDING if torch.version.hip else _HIDING[:1]
        hidden = [f"{name}={os.environ[name]!r}" for name in hiding if name in os.environ]
        note = f" ({', '.join(hidden)})" if hidden else ""
        return Choice(value=False, reason=f"torch {torch.__version__}, built for {built}, sees no GPU or no driver{note}")
    return Choice(value=True, reason=f"torch sees {torch.cuda.device_count()} GPU(s) through {built}")


_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Variables that configure torch's caching allocator; it reads them once, when a process first uses a GPU."""


def _grow_segments() -> None:
    """Let the allocator grow its segments, unless it is configured already or in use.

    Rows of a run have many lengths, and blocks of one size are too small for the next: without this a fifth of a GPU's memory
    may lie in pieces that nothing fits. Not on ROCm, which does not support it on every chip and warns.
    """
    if torch.version.hip or torch.cuda.is_initialized() or any(name in os.environ for name in _ALLOCATOR):
        return
    # The name that every release since 2.11 reads; workers that this process starts inherit it.
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"


@lru_cache(maxsize=16)
def _library_bytes(index: int) -> int:
    before = torch.cuda.memory_allocated(index)
    with torch.enable_grad(), torch.autocast("cuda", enabled=False):
        factor = torch.ones(64, 64, dtype=bfloat16, device=f"cuda:{index}", requires_grad=True)
        torch.nn.functional.linear(factor, factor, factor[0]).sum().backward()
    torch.cuda.synchronize(index)
    del factor
    return torch.cuda.memory_allocated(index) - before


_grouped = lru_cache(maxsize=4)(with_grouped_heads)


class CUDAAccelerator(Accelerator):
    """GPU of this machine: `index`, else the one of the process' LOCAL_RANK, else the first."""

    name = "cuda"
    priority = 100
    support = Choice("exercised", "exercised: an H200 has run forge's checks for GPUs (benchmarks/results/gpu.md)")
    _toolkit: str = "CUDA"

    def __init__(self, *, index: int | None = None, why: str = "asked for by name") -> None:
        super().__init__(why=why)
        self._index = local_rank() if index is None else index
        count = torch.cuda.device_count()
        if not 0 <= self._index < count:
            asked = f"LOCAL_RANK={self._index}" if index is None else f"device='cuda:{index}'"
            raise AccelError(f"{asked}, but torch sees {count} CUDA device(s), numbered from 0.")
        _grow_segments()
        # NCCL, `synchronize` and the memory statistics use the current device where none is named.
        torch.cuda.set_device(self._index)
        # torch prefers cuDNN's attention on Hopper, which makes a plan for each length that it has not met: samples and a cache
        # that grows have all lengths. Flash and the memory-efficient kernels take any.
        torch.backends.cuda.enable_cudnn_sdp(enabled=False)

    @classmethod
    def available(cls) -> Choice[bool]:
        """Decide by what torch was built for and sees."""
        if not cls._toolkit_version():
            return Choice(value=False, reason=f"torch {torch.__version__} is built without {cls._toolkit}")
        return gpus_seen(f"{cls._toolkit} {cls._toolkit_version()}")

    @classmethod
    def possible(cls) -> bool:
        """Return whether torch is built for these GPUs."""
        return bool(cls._toolkit_version())

    @staticmethod
    def _toolkit_version() -> str | None:
        return torch.version.cuda

    @classmethod
    def count(cls) -> int:
        """Count the GPUs that torch sees."""
        return torch.cuda.device_count()

    @property
    def _properties(self) -> Any:
        return torch.cuda.get_device_properties(self._index)

    @property
    def device(self) -> Choice[torch.device]:
        """Device with its index."""
        return Choice(torch.device("cuda", self._index), f"cuda:{self._index}: {self._why}")

    @property
    def machine(self) -> str:
        """Chip, memory, and the version of what torch was built for."""
        chip, toolkit = self._properties, f"{self._toolkit} {self._toolkit_version()}"
        return f"{chip.name}, {chip.total_memory / 2**30:.0f} GiB, {toolkit}"

    @property
    def collective_backend(self) -> Choice[str]:
        """NCCL, beside gloo for tensors on the CPU; gloo alone where this torch has no NCCL."""
        if torch.distributed.is_available() and torch.distributed.is_nccl_available():
            return Choice("cpu:gloo,cuda:nccl", "nccl: GPUs talk directly")
        return Choice("gloo", "gloo: this torch is built without NCCL, so collectives go through the CPU")

    def collective_traces(self, prefix: str) -> dict[str, str]:
        """Return the variables of torch's flight recorder, which knows NCCL's collectives."""
        if not (torch.distributed.is_available() and torch.distributed.is_nccl_available()):
            return {}
        files = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_PIPE_FILE")
        return {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1", **dict.fromkeys(files, prefix)}

    @property
    def fused_optimizer(self) -> Choice[bool]:
        """True: one kernel a step instead of several passes over the weights."""
        return Choice(value=True, reason="fused: one kernel updates many weights, reading each once")

    @property
    def default_tokens(self) -> int:
        """128 a GiB, rounded down to a power of two from 1,024 to 16,384: 8,192 at 80 GiB."""
        return tokens_for(self._properties.total_memory)

    @property
    def head_rows(self) -> int:
        """2,048 on chips of 32 GiB or more: each chunk reads and writes the head's whole gradient."""
        return 2048 if self._properties.total_memory >= 32 * 2**30 else 512

    @property
    def pins_memory(self) -> bool:
        """True: a larger copy from pageable memory waits for all that the GPU still has to do."""
        return True

    def dtype(self, requested: str = "auto") -> Choice[torch.dtype]:
        """Choose bfloat16 where the chip computes it, float32 where torch would only emulate it."""
        # By default torch counts emulation as support, which it offers on every chip.
        native = torch.cuda.is_bf16_supported(including_emulation=False)
        chip = self._properties.name
        if requested == "auto" and native:
            return Choice(bfloat16, f"bfloat16: {chip} computes it natively, at several times the speed of float32")
        if requested == "auto":
            return Choice(float32, f"float32: {chip} has no bf16 units, and bf16 would be emulated")
        dtype = dtype_named(requested)
        emulated = dtype == bfloat16 and not native
        warning = f"; WARNING: {chip} has no bf16 units and emulates it slowly" if emulated else ""
        return Choice(dtype, f"{requested}: asked for{warning}")

    def _documents(self, dtype: torch.dtype) -> Choice[Attention]:
        kernel = find_kernel()
        if dtype != bfloat16:
            missing = f"torch's variable-length flash kernel does not take {dtype_name(dtype)}"
        elif torch.cuda.get_device_capability(self._index) < (8, 0):
            missing = f"flash kernels need a chip of compute capability 8.0, and {self._properties.name} is older"
        elif kernel is None:
            missing = f"torch {torch.__version__} has no variable-length flash kernel"
        else:
            return Choice(
                Attention("documents", partial(document_attention, varlen_kernel=_grouped(kernel, self.device.value))),
                "documents: torch's variable-length flash kernel, all packed samples in one call",
            )
        return Choice(
            Attention("documents", document_attention),
            f"documents: causal SDPA for each packed sample by itself, exact but a call a sample, because {missing}",
        )

    def _flash(self, requested: str, dtype: torch.dtype) -> Choice[Attention]:
        major = torch.cuda.get_device_capability(self._index)[0]
        missing = missing_flash(requested, None if torch.version.hip else major) or (
            "" if dtype == bfloat16 else f"its kernels do not train in {dtype_name(dtype)}"
        )
        kernel = find_kernel()
        if missing or kernel is None:
            raise AccelError(f"attention={requested}: {missing or 'torch has no varlen kernel'}: set attention=documents.")
        activate_flash(requested)
        # Tried anew: torch's own kernel may have grouped heads where these have not.
        tried = with_grouped_heads(kernel, self.device.value)
        return Choice(
            Attention("documents", partial(document_attention, varlen_kernel=tried)),
            f"{requested}: asked for; documents by the kernels of FlashAttention {requested[-1]}, for all of this process",
        )

    def quantization(self, quant_type: str) -> Choice[str]:
        """Choose 4 or 8 bits by bitsandbytes' CUDA kernels, which need compute capability 6.0."""
        found, chip = check_quantization(quant_type), self._properties.name
        major, minor = torch.cuda.get_device_capability(self._index)
        if (major, minor) < (6, 0):
            raise refuse_quantization(quant_type, f"{chip}, of compute capability {major}.{minor} (6.0 is needed)")
        untried = "; 8 bits are untried on GPUs" if quant_type == "int8" else ""
        return Choice(quant_type, f"{held(quant_type, found)} on {chip}{untried}")

    def rng_state(self) -> dict[str, torch.Tensor]:
        """Read the states of the CPU's generator and this device's."""
        return {**super().rng_state(), "cuda": torch.cuda.get_rng_state(self._index)}

    def set_rng_state(self, state: dict[str, torch.Tensor]) -> None:
        """Restore the states of both generators."""
        super().set_rng_state(state)
        torch.cuda.set_rng_state(state["cuda"].cpu(), self._index)

    def synchronize(self) -> None:
        """Wait until the device has done all that was queued."""
        torch.cuda.synchronize(self._index)

    def peak_memory_bytes(self) -> int | None:
        """Read the peak memory of tensors on the device, without what the allocator caches."""
        return torch.cuda.max_memory_allocated(self._index)

    def peak_reserved_bytes(self) -> int | None:
        """Read the peak of what the caching allocator took from the device."""
        return torch.cuda.max_memory_reserved(self._index)

    def reset_peak_memory(self) -> bool:
        """Reset the peak memory."""
        torch.cuda.reset_peak_memory_stats(self._index)
        return True

    def memory_limit_bytes(self) -> int | None:
        """Read the chip's memory, less what a context takes."""
        return self._properties.total_memory - CONTEXT_BYTES

    def held_bytes(self) -> int | None:
        """Read the memory of tensors on the device."""
        return torch.cuda.memory_allocated(self._index)

    def allocated_bytes(self, size: int) -> int:
        """Round up to torch's blocks of 512 bytes."""
        return -(-size // BLOCK_BYTES) * BLOCK_BYTES

    def compiling(self, requested: str = "auto", *, operations: float = 0.0) -> Choice[str | None]:
        """Choose the backend of `torch.compile`; by default blocks are compiled, which wins."""
        if requested != "auto":
            return super().compiling(requested, operations=operations)
        won = "on an H200 a 1B model trained 1.3 times as fast, LoRA on an 8B model 1.27 times"
        return Choice(INDUCTOR, f"blocks: one graph for all blocks of a kind; {won}")

    def library_bytes(self) -> int:
        """Measure cuBLAS' workspaces: the forward's thread has one, the backward's another."""
        return _library_bytes(self._index)

    def meter(self) -> MemoryMeter:
        """Return the allocator's own statistics."""
        return AllocatorMeter(self)

    def peak_flops(self, dtype: torch.dtype) -> float | None:
        """Look up the chip's peak; None for float32 where torch is set to use TF32 instead."""
        peak = peak_of(self._properties.name)
        if peak is None:
            return None
        if dtype == bfloat16:
            return peak.bfloat16
        exact = torch.get_float32_matmul_precision() == "highest"
        return peak.float32 if dtype == float32 and exact else None
