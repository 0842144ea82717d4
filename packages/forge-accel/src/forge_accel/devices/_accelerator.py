"""Accelerator: the abstract class of every kind of device, built in or from a plug-in.

`torch.accelerator` raises on a CPU for nearly everything, and knows neither RNG state, nor collective backend, nor the cost of
a dtype; hence a class of our own.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar

import torch

from forge_accel._choice import Choice
from forge_accel._dtypes import dtype_name, float32
from forge_accel._errors import AccelError
from forge_accel.attention._attention import BUILT_IN, FLASH, Attention, check_attention
from forge_accel.attention._documents import document_attention
from forge_accel.devices._memory import MemoryMeter, host_is_out_of_memory
from forge_accel.devices._quantization import check_quant_type, refuse_quantization
from forge_accel.fused._choices import choose_compile, choose_kernels


class Accelerator(ABC):
    """Device of this machine, with what it can do. `accelerator()` finds one.

    A plug-in subclasses this and names its class under the entry-point group `forge.accelerators`.

    Args:
        index: Number of the device among those of its kind; None lets the class decide. This class does not store it: a
            subclass does, or refuses one.
        why: Reason for which this accelerator was picked, for the reason of `device`.

    """

    name: ClassVar[str]
    """Value of the setting `device` that selects it."""

    priority: ClassVar[int]
    """Rank among the available accelerators under device=auto, the highest first: the CPU has 0, CUDA 100."""

    support: ClassVar[Choice[str]] = Choice("declared", "declared: by a package of its own, which says what it was tried on")
    """`exercised` where forge's tests have run on such a device, else `declared`: written from its documentation."""

    def __init__(self, *, index: int | None = None, why: str = "asked for by name") -> None:  # noqa: ARG002 - for subclasses
        self._why = why

    @classmethod
    @abstractmethod
    def available(cls) -> Choice[bool]:
        """Decide whether this machine has such a device; the reason says what torch sees.

        Must not raise or initialise a device.
        """

    @classmethod
    def possible(cls) -> bool:
        """Return whether this torch, or an installed library, knows such devices at all.

        Where they are missing all the same, device=auto says why.
        """
        return True

    @classmethod
    def count(cls) -> int:
        """Count the devices that can each serve a process; 0 for one that all processes share."""
        return 1

    @property
    @abstractmethod
    def device(self) -> Choice[torch.device]:
        """Device to put tensors on."""

    @property
    @abstractmethod
    def machine(self) -> str:
        """Chip, count and memory, in one line for a log."""

    @property
    @abstractmethod
    def collective_backend(self) -> Choice[str]:
        """Backend of `torch.distributed` for the device, and for the CPUs beside it.

        For instance `gloo`, or `cpu:gloo,cuda:nccl`.
        """

    def check_ranks(self, number: int) -> None:  # noqa: B027 - most devices compute in any number of processes
        """Check that `number` processes can compute together on this kind of device.

        Raises:
            AccelError: they cannot; the message says why.

        """

    def collective_traces(self, prefix: str) -> dict[str, str]:  # noqa: ARG002 - a device with a recorder names files by it
        """Return the environment variables under which the collective backend records its calls.

        Set before the process group is made. What is written to PREFIX{RANK}.pipe has rank RANK write its last collectives to
        PREFIX{RANK}. Empty for a backend without a recorder.
        """
        return {}

    @property
    @abstractmethod
    def fused_optimizer(self) -> Choice[bool]:
        """Whether torch's optimizers should be made with `fused=True` here."""

    @property
    @abstractmethod
    def default_tokens(self) -> int:
        """Suggested tokens of a micro-batch: a cautious start, not a limit."""

    @property
    def most_tokens(self) -> int | None:
        """Tokens of a micro-batch beyond which more only take memory; None: as many as fit."""
        return None

    @property
    def head_rows(self) -> int:
        """Suggested rows whose logits a loss holds at once, of 4 bytes a token of the vocabulary."""
        return 512

    @property
    def pins_memory(self) -> bool:
        """Whether copies to the device go through page-locked memory, for which nobody waits.

        Only where `torch.Tensor.pin_memory` serves this device.
        """
        return False

    @abstractmethod
    def dtype(self, requested: str = "auto") -> Choice[torch.dtype]:
        """Choose the dtype of the computation.

        Args:
            requested: `auto`, `float32` or `bfloat16`.

        Raises:
            AccelError: no such dtype.

        """

    def attention(self, requested: str, dtype: torch.dtype) -> Choice[Attention]:
        """Choose the attention implementation of a model computed in `dtype`.

        Args:
            requested: `auto`, `documents`, `flash3`, `flash4`, `sdpa` or `eager`.
            dtype: The dtype that `dtype()` chose.

        Raises:
            AccelError: no such attention, or its kernels are not there.

        """
        check_attention(requested)
        if requested in BUILT_IN:
            return Choice(Attention(requested), BUILT_IN[requested])
        return self._flash(requested, dtype) if requested in FLASH else self._documents(dtype)

    def _flash(self, requested: str, dtype: torch.dtype) -> Choice[Attention]:  # noqa: ARG002 - where there are such kernels
        kernels = f"FlashAttention {requested[-1]} kernels"
        raise AccelError(f"attention={requested}: there are no {kernels} for {self.name}: set attention=documents.")

    def _documents(self, dtype: torch.dtype) -> Choice[Attention]:  # noqa: ARG002 - a faster kernel depends on it
        return Choice(
            Attention("documents", document_attention),
            "documents: causal SDPA for each packed sample by itself, exact, with no dense mask to fill or to pay for",
        )

    def quantization(self, quant_type: str) -> Choice[str]:
        """Choose the type in which bitsandbytes holds a frozen base model.

        This class refuses: a subclass whose devices bitsandbytes has kernels for overrides it.

        Args:
            quant_type: `nf4` (4-bit NormalFloat, arXiv 2305.14314), `fp4` (4-bit floats) or `int8` (2208.07339).

        Returns:
            The type; the reason says what computes with it.

        Raises:
            AccelError: no such type, no kernels for this device, or (where there are kernels) no bitsandbytes.

        """
        check_quant_type(quant_type)
        raise refuse_quantization(quant_type, self.name)

    def with_threads(self, number: int | None) -> AbstractContextManager[None]:  # noqa: ARG002
        """Enclose what is estimated for a process of so many threads; None: of this one's.

        A CPU's estimates depend on them.
        """
        return nullcontext()

    def compiling(self, requested: str = "auto", *, operations: float = 0.0) -> Choice[str | None]:  # noqa: ARG002
        """Choose the backend of `torch.compile` for a model's repeated blocks.

        Args:
            requested: `auto`, `blocks` or `off`.
            operations: floating-point operations that this process will compute with them, in which compilation has to pay.

        Returns:
            The backend for `CompiledBlocks`; None: nothing is compiled.

        Raises:
            AccelError: no such value, or this machine cannot compile.

        """
        return choose_compile(requested, auto=f"nobody has measured that it wins on {self.name}", device=self.device.value.type)

    def kernels(self, requested: str = "auto") -> Choice[str | None]:
        """Choose the library of fused kernels for a model's layers.

        Args:
            requested: `auto`, `liger` or `none`.

        Returns:
            `liger`, for `use_liger`; None: torch's own kernels.

        Raises:
            AccelError: no such value, or the library is missing or has nothing for this device.

        """
        return choose_kernels(
            requested, auto=f"nobody has measured that they win on {self.name}", device=self.device.value.type
        )

    def autocast(self, dtype: torch.dtype) -> AbstractContextManager[object]:
        """Return the context in which float32 weights compute in `dtype`; empty for float32."""
        if dtype == float32:
            return nullcontext()
        return torch.autocast(self.device.value.type, dtype=dtype)

    def seed(self, seed: int) -> None:
        """Seed torch's random generators of every device, not those of Python and numpy.

        Raises:
            AccelError: `seed` is not an integer from 0 to 2**64 - 1.

        """
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**64:
            raise AccelError(f"seed must be an integer from 0 to 2**64 - 1, not {seed!r}.")
        torch.manual_seed(seed)

    def rng_state(self) -> dict[str, torch.Tensor]:
        """Read the states of torch's random generators.

        Returns:
            uint8 tensors on the CPU by the name of the generator, fit for a safetensors file.

        """
        return {"cpu": torch.get_rng_state()}

    def set_rng_state(self, state: dict[str, torch.Tensor]) -> None:
        """Restore the states that `rng_state` read.

        Raises:
            AccelError: the state was read on another kind of accelerator.

        """
        expected = set(self.rng_state())
        if set(state) != expected:
            raise AccelError(
                f"this RNG state is of {', '.join(sorted(state)) or 'nothing'}, but {self.name} has generators "
                f"for {', '.join(sorted(expected))}: resume on the kind of device that wrote it."
            )
        torch.set_rng_state(state["cpu"].cpu())

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the device has done all that was queued, as a time measurement needs."""

    @abstractmethod
    def peak_memory_bytes(self) -> int | None:
        """Read the peak memory since the last reset or the start, in bytes; None if unknown."""

    def peak_reserved_bytes(self) -> int | None:
        """Read the peak of what the device's allocator holds, its cache included, in bytes.

        That is what other processes of the device have to leave free. None where it is no other figure than
        `peak_memory_bytes`.
        """
        return None

    @abstractmethod
    def reset_peak_memory(self) -> bool:
        """Reset the peak memory; False where the system does not allow it, and the old peak stays."""

    def memory_limit_bytes(self) -> int | None:
        """Return the memory that a process may fill, in bytes; None if unknown."""
        return None

    def held_bytes(self) -> int | None:
        """Read the memory that this process holds now, in bytes; None if unknown."""
        return None

    def allocated_bytes(self, size: int) -> int:
        """Return the bytes that the allocator takes for a tensor of `size` bytes."""
        return size

    def library_bytes(self) -> int:
        """Return the bytes that libraries of kernels hold from their first use on, beside tensors.

        They are taken by the first call: before anything else is computed.
        """
        return 0

    def compiled_bytes(self, dtype: torch.dtype, lengths: int) -> int:  # noqa: ARG002 - none keeps them by default
        """Return the bytes, at most, of compiled products that libraries keep beside all allocators.

        Args:
            dtype: what is computed in.
            lengths: how many lengths the rows have.
        """
        return 0

    def product_scratch(self, products: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[int]:
        """Return the bytes that matrix products take for themselves and give back.

        Args:
            products: the two factors of each, of whose tensors only shape, strides and dtype are read.
        """
        return [0] * len(products)

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Return whether an error says that the device, or the host beside it, has no memory left."""
        return isinstance(error, torch.OutOfMemoryError) or host_is_out_of_memory(error)

    def meter(self) -> MemoryMeter | None:
        """Return what measures the worst moment of tensors' memory; None where nothing does."""
        return None

    @abstractmethod
    def peak_flops(self, dtype: torch.dtype) -> float | None:
        """Return the chip's dense peak of matrix products in `dtype`, in FLOP/s; None if unknown."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.device.value}, {dtype_name(self.dtype().value)}>"


def tokens_for(size: int) -> int:
    """Suggest the tokens of a micro-batch on a chip with `size` bytes of memory.

    128 a GiB, rounded down to a power of two from 1,024 to 16,384.
    """
    tokens = int(128 * size // 2**30)
    return min(16384, max(1024, 1 << (tokens.bit_length() - 1))) if tokens else 1024


def local_rank() -> int:
    """Read LOCAL_RANK, this process' number on its machine; 0 where it is unset (no torchrun).

    Raises:
        AccelError: it is no number.

    """
    text = os.environ.get("LOCAL_RANK", "0")
    if not (text.isascii() and text.isdigit()):
        raise AccelError(f"LOCAL_RANK={text!r} is no number: it is the process' place on this machine, from 0.")
    return int(text)
