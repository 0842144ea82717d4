"""Base of devices whose module of torch has `torch.cuda`'s names: xpu, hpu, npu."""

from __future__ import annotations

import sys
from abc import abstractmethod
from glob import glob
from importlib import import_module
from importlib.util import find_spec
from typing import Any, ClassVar

import torch

from forge_accel._choice import Choice
from forge_accel._dtypes import bfloat16, dtype_named, float32
from forge_accel._errors import AccelError
from forge_accel.attention._attention import Attention
from forge_accel.attention._documents import document_attention
from forge_accel.devices._accelerator import Accelerator, local_rank, tokens_for
from forge_accel.devices._memory import CONTEXT_BYTES, AllocatorMeter, MemoryMeter
from forge_accel.devices._quantization import choose_quantization


class ModuleAccelerator(Accelerator):
    """Device of a kind that a module of torch speaks for: `index`, else the one of LOCAL_RANK.

    A vendor's library is imported when such a device is made, not to see whether there is one: that is told from the library
    being installed and from the driver's files in /dev.
    """

    support = Choice(
        "declared",
        "declared: from the vendor's documentation; runs are tested on made-up devices of this kind, computed by the CPU",
    )
    vendor: ClassVar[str]
    """Maker and kind of the chip, for a log."""
    library: ClassVar[str | None] = None
    """Vendor's library that teaches torch the device; None where torch itself knows it."""
    imports: ClassVar[tuple[str, ...]] = ()
    """Modules of that library to import."""
    install: ClassVar[str] = ""
    """Where the library comes from."""
    nodes: ClassVar[tuple[str, ...]] = ()
    """Patterns of the driver's files, one a chip."""
    collectives: ClassVar[str]
    """Backend of `torch.distributed` for this device."""
    out_of_memory: ClassVar[tuple[str, ...]]
    """Texts of the device's errors where its memory is full, beside `torch.OutOfMemoryError`."""
    quant_types: ClassVar[tuple[str, ...]] = ()
    """Types that bitsandbytes documents for this device."""

    def __init__(self, *, index: int | None = None, why: str = "asked for by name") -> None:
        super().__init__(why=why)
        self._load()
        self._index = self._chosen(index)
        self._use()

    @classmethod
    def _torch(cls) -> Any:
        """Return torch's module of this device."""
        return getattr(torch, cls.name)

    @classmethod
    def _load(cls) -> None:
        """Import the vendor's library. Raises AccelError where that fails or where it sees no chip."""
        try:
            for module in cls.imports:
                import_module(module)
            seen = cls._torch().is_available()
        except (ImportError, OSError, AttributeError, RuntimeError, AssertionError) as error:
            # habana_frameworks asserts that torch has its version.
            raise AccelError(
                f"device={cls.name!r}: {cls.library} could not be used: {error}. It has to fit torch {torch.__version__}."
            ) from error
        if not seen:
            raise AccelError(f"device={cls.name!r} is not there: {cls.library or 'torch'} sees none.")

    def _chosen(self, index: int | None) -> int:
        """Return the number of the device. Raises AccelError for one that is not there."""
        number, count = local_rank() if index is None else index, self.count()
        if not 0 <= number < count:
            asked = f"LOCAL_RANK={number}" if index is None else f"device='{self.name}:{index}'"
            raise AccelError(f"{asked}, but torch sees {count} device(s) of {self.name}, numbered from 0.")
        return number

    def _use(self) -> None:
        """Make the device the current one, which collectives use where none is named."""
        self._torch().set_device(self._index)

    @classmethod
    def available(cls) -> Choice[bool]:
        """Decide by the installed library and the driver's files.

        torch is asked where the library is imported already.
        """
        if cls.library is None or cls.library in sys.modules:
            module = getattr(torch, cls.name, None)
            if module is None or not module.is_available():
                return Choice(value=False, reason=f"torch {torch.__version__} sees no {cls.vendor}")
            return Choice(value=True, reason=f"torch sees {module.device_count()} {cls.vendor}(s)")
        if find_spec(cls.library) is None:
            return Choice(value=False, reason=f"{cls.library} is not installed ({cls.install})")
        chips = [node for pattern in cls.nodes for node in glob(pattern)]
        if not chips:
            return Choice(
                value=False,
                reason=f"{cls.library} is installed, but there is no {cls.vendor} here: no file {' or '.join(cls.nodes)}",
            )
        return Choice(value=True, reason=f"{cls.library} is installed, and the driver shows {len(chips)} {cls.vendor}(s)")

    @classmethod
    def possible(cls) -> bool:
        """Return whether the vendor's library is installed."""
        return cls.library in sys.modules or find_spec(str(cls.library)) is not None

    @classmethod
    def count(cls) -> int:
        """Count the devices that torch sees, without opening one."""
        cls._load()
        return cls._torch().device_count()

    @property
    def device(self) -> Choice[torch.device]:
        """Device with its index."""
        return Choice(torch.device(self.name, self._index), f"{self.name}:{self._index}: {self._why}")

    @property
    def machine(self) -> str:
        """Chip and memory."""
        return f"{self._torch().get_device_name(self._index)}, {self._total_bytes() / 2**30:.0f} GiB"

    @abstractmethod
    def _total_bytes(self) -> int:
        """Read the chip's memory in bytes."""

    @abstractmethod
    def _has_bfloat16(self) -> bool:
        """Return whether the chip computes bfloat16 natively."""

    @property
    def collective_backend(self) -> Choice[str]:
        """The vendor's library, beside gloo for tensors on the CPU."""
        return Choice(f"cpu:gloo,{self.name}:{self.collectives}", f"{self.collectives}: the library of {self.vendor}s")

    @property
    def default_tokens(self) -> int:
        """128 a GiB, as on CUDA."""
        return tokens_for(self._total_bytes())

    def dtype(self, requested: str = "auto") -> Choice[torch.dtype]:
        """Choose bfloat16 where the chip computes it."""
        chip, native = self._torch().get_device_name(self._index), self._has_bfloat16()
        if requested == "auto" and native:
            return Choice(bfloat16, f"bfloat16: {chip} computes it natively")
        if requested == "auto":
            return Choice(float32, f"float32: {chip} does not compute bfloat16 natively")
        dtype = dtype_named(requested)
        if dtype == bfloat16 and not native:
            raise AccelError(f"dtype=bfloat16: {chip} does not compute it: use dtype=float32.")
        return Choice(dtype, f"{requested}: asked for")

    def _documents(self, dtype: torch.dtype) -> Choice[Attention]:  # noqa: ARG002 - the same in every dtype
        return Choice(
            Attention("documents", document_attention),
            f"documents: causal SDPA for each packed sample by itself, exact but a call a sample, because torch's "
            f"variable-length flash kernel is untried on {self.name}",
        )

    def quantization(self, quant_type: str) -> Choice[str]:
        """Choose 4 or 8 bits where bitsandbytes documents them for this device."""
        return choose_quantization(quant_type, self.quant_types, self.name)

    def seed(self, seed: int) -> None:
        """Seed the generators of the CPU and of every such device."""
        super().seed(seed)
        self._torch().manual_seed_all(seed)

    def rng_state(self) -> dict[str, torch.Tensor]:
        """Read the states of the CPU's generator and this device's."""
        return {**super().rng_state(), self.name: self._torch().get_rng_state(self.device.value).cpu()}

    def set_rng_state(self, state: dict[str, torch.Tensor]) -> None:
        """Restore the states of both generators."""
        super().set_rng_state(state)
        self._torch().set_rng_state(state[self.name].cpu(), self.device.value)

    def synchronize(self) -> None:
        """Wait until the device has done all that was queued."""
        self._torch().synchronize()

    def peak_memory_bytes(self) -> int | None:
        """Read the peak memory of tensors on the device."""
        return self._torch().max_memory_allocated(self._index)

    def reset_peak_memory(self) -> bool:
        """Reset the peak memory."""
        self._torch().reset_peak_memory_stats(self._index)
        return True

    def memory_limit_bytes(self) -> int | None:
        """Read the chip's memory, less what its libraries take."""
        return self._total_bytes() - CONTEXT_BYTES

    def held_bytes(self) -> int | None:
        """Read the memory of tensors on the device."""
        return self._torch().memory_allocated(self._index)

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Return whether an error says that the device, or the host beside it, has no memory left."""
        return super().is_out_of_memory(error) or (
            isinstance(error, RuntimeError) and any(text in str(error) for text in self.out_of_memory)
        )

    def meter(self) -> MemoryMeter:
        """Return the allocator's own statistics."""
        return AllocatorMeter(self)

    def peak_flops(self, dtype: torch.dtype) -> float | None:  # noqa: ARG002 - unknown for every dtype
        """Return None: no chip of this kind has been measured."""
        return None
