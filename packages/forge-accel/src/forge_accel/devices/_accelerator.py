"""What any accelerator answers: the abstract class that CPU, CUDA and plug-ins fill in.

`torch.accelerator` raises on a CPU for nearly everything, and knows neither RNG state, nor collective backend, nor
what a dtype costs; hence an object of our own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar

import torch

from forge_accel._choice import Choice
from forge_accel._dtypes import dtype_name, float32
from forge_accel._errors import AccelError
from forge_accel.attention._attention import BUILT_IN, Attention, check_wish
from forge_accel.attention._documents import document_attention
from forge_accel.devices._quantization import check_quantization, refuse_quantization


class Accelerator(ABC):
    """A machine's device and what it can do. Ask `accelerator()` for one.

    A plug-in subclasses this and names its class under the entry-point group `forge.accelerators`.

    Args:
        index: Which device of this kind; None lets the class decide. This class keeps none: a subclass does, or refuses one.
        why: Why this accelerator was picked, for the reason of `device`.

    """

    name: ClassVar[str]
    """What `device=` calls it."""

    priority: ClassVar[int]
    """`auto` takes the available accelerator of the highest priority: the CPU has 0, CUDA 100."""

    def __init__(self, *, index: int | None = None, why: str = "asked for by name") -> None:  # noqa: ARG002 - for subclasses
        self._why = why

    @classmethod
    @abstractmethod
    def available(cls) -> Choice[bool]:
        """Say whether this machine has such a device, and what torch sees. Must not raise or initialise a device."""

    @classmethod
    def count(cls) -> int:
        """How many of these devices this machine has, each fit for a process of its own; 0 for what all processes share."""
        return 1

    @property
    @abstractmethod
    def device(self) -> Choice[torch.device]:
        """The device to put tensors on."""

    @property
    @abstractmethod
    def machine(self) -> str:
        """Chip, count and memory, in one line for a log."""

    @property
    @abstractmethod
    def collective_backend(self) -> Choice[str]:
        """What `torch.distributed` should speak on this device, and between the CPUs beside it: `gloo`, `cpu:gloo,cuda:nccl`."""

    @property
    @abstractmethod
    def fused_optimizer(self) -> Choice[bool]:
        """Whether torch's optimizers should be made with `fused=True` here."""

    @property
    @abstractmethod
    def default_tokens(self) -> int:
        """Suggested size of a micro-batch, in tokens: a cautious start, not a limit."""

    @abstractmethod
    def dtype(self, wish: str = "auto") -> Choice[torch.dtype]:
        """Decide the number format of the computation.

        Args:
            wish: `auto`, `float32` or `bfloat16`.

        Raises:
            AccelError: no such dtype.

        """

    def attention(self, wish: str, dtype: torch.dtype) -> Choice[Attention]:
        """Decide how a model computed in `dtype` attends.

        Args:
            wish: `auto`, `documents`, `sdpa` or `eager`.
            dtype: What `dtype()` decided.

        Raises:
            AccelError: no such attention.

        """
        check_wish(wish)
        if wish in BUILT_IN:
            return Choice(Attention(wish), BUILT_IN[wish])
        return self._documents(dtype)

    def _documents(self, dtype: torch.dtype) -> Choice[Attention]:  # noqa: ARG002 - what a faster kernel depends on
        return Choice(
            Attention("documents", document_attention),
            "documents: causal SDPA for each packed sample by itself, exact, with no dense mask to fill or to pay for",
        )

    def quantization(self, quant_type: str) -> Choice[str]:
        """Decide how a frozen base model is held in 4 bits on this device, through bitsandbytes. This class cannot: a subclass may.

        Args:
            quant_type: `nf4` (4-bit NormalFloat, arXiv 2305.14314) or `fp4` (4-bit floats).

        Returns:
            The type, and what computes with it.

        Raises:
            AccelError: no such type, no bitsandbytes, or no kernels for this device; the message names what has them.

        """
        check_quantization(quant_type)
        raise refuse_quantization(quant_type, self.name)

    def autocast(self, dtype: torch.dtype) -> AbstractContextManager[object]:
        """Make the context in which float32 weights compute in `dtype`; it does nothing for float32."""
        if dtype == float32:
            return nullcontext()
        return torch.autocast(self.device.value.type, dtype=dtype)

    def seed(self, seed: int) -> None:
        """Seed torch's generators of every device. Python's and numpy's are their owners' business.

        Raises:
            AccelError: `seed` is not an integer from 0 to 2**64 - 1.

        """
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**64:
            raise AccelError(f"seed must be an integer from 0 to 2**64 - 1, not {seed!r}.")
        torch.manual_seed(seed)

    def rng_state(self) -> dict[str, torch.Tensor]:
        """Read torch's generators.

        Returns:
            uint8 tensors on the CPU by the name of the generator, fit for a safetensors file.

        """
        return {"cpu": torch.get_rng_state()}

    def set_rng_state(self, state: dict[str, torch.Tensor]) -> None:
        """Put torch's generators back to what `rng_state` read.

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
        """Wait until all that was asked of the device is done: what a clock needs to be honest."""

    @abstractmethod
    def peak_memory_bytes(self) -> int | None:
        """Read the most memory held since the last reset (or since the start): None where the system does not say."""

    @abstractmethod
    def reset_peak_memory(self) -> bool:
        """Start measuring the peak anew; False where the system does not allow it, and the peak goes on from the start."""

    @abstractmethod
    def peak_flops(self, dtype: torch.dtype) -> float | None:
        """Look up the chip's dense peak for matrix products in `dtype`, in FLOP/s; None where it is not known."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.device.value}, {dtype_name(self.dtype().value)}>"
