"""GPU of a Mac with Apple silicon: `torch.mps`; no float64, no collectives, no peak.

After https://docs.pytorch.org/docs/stable/mps.html.
"""

from __future__ import annotations

import platform

import torch

from forge_accel._choice import Choice
from forge_accel._dtypes import bfloat16, dtype_named, float32
from forge_accel._errors import AccelError
from forge_accel.attention._attention import Attention
from forge_accel.attention._documents import document_attention
from forge_accel.devices._accelerator import Accelerator, tokens_for
from forge_accel.devices._quantization import choose_quantization


class MPSAccelerator(Accelerator):
    """GPU of this Mac. Takes no index but 0."""

    name = "mps"
    priority = 80
    support = Choice(
        "declared",
        "declared: from torch's documentation; runs are tested on a made-up device of this kind, computed by the CPU",
    )

    def __init__(self, *, index: int | None = None, why: str = "asked for by name") -> None:
        if index not in (None, 0):
            raise AccelError(f"device='mps:{index}': a Mac has one GPU: use device=mps.")
        super().__init__(why=why)

    @classmethod
    def available(cls) -> Choice[bool]:
        """Decide by what torch was built for and sees."""
        if not torch.backends.mps.is_built():
            return Choice(value=False, reason=f"torch {torch.__version__} is built without MPS")
        if not torch.backends.mps.is_available():
            return Choice(value=False, reason="torch sees no GPU for MPS: it needs macOS on Apple silicon")
        return Choice(value=True, reason="torch sees this Mac's GPU")

    @classmethod
    def possible(cls) -> bool:
        """Return whether torch is built for MPS."""
        return torch.backends.mps.is_built()

    @property
    def device(self) -> Choice[torch.device]:
        """Device `mps:0`."""
        return Choice(torch.device("mps", 0), f"mps: {self._why}")

    @property
    def machine(self) -> str:
        """Processor and the memory that its GPU may take."""
        return f"{platform.processor() or platform.machine()} GPU, {self._memory() / 2**30:.0f} GiB of the Mac's memory"

    @staticmethod
    def _memory() -> int:
        return int(torch.mps.recommended_max_memory())

    @property
    def collective_backend(self) -> Choice[str]:
        """Gloo, which moves tensors of the CPU alone: `check_ranks` refuses several processes."""
        return Choice("gloo", "gloo: torch has no collectives on MPS, and a Mac has one GPU")

    def check_ranks(self, number: int) -> None:
        """Refuse several processes."""
        if number > 1:
            raise AccelError(
                f"{number} processes on mps: a Mac has one GPU, and torch has no collectives on it. Run one process "
                "(nproc_per_node=1), or use device=cpu."
            )

    @property
    def fused_optimizer(self) -> Choice[bool]:
        """True: torch has the fused kernels for MPS."""
        return Choice(value=True, reason="fused: torch's fused AdamW has a kernel for MPS")

    @property
    def default_tokens(self) -> int:
        """128 a GiB that the GPU may take, as on CUDA."""
        return tokens_for(self._memory())

    def dtype(self, requested: str = "auto") -> Choice[torch.dtype]:
        """Choose float32; bfloat16 where asked for, from macOS 14 on."""
        if requested == "auto":
            return Choice(float32, "float32: the exact choice; how fast bfloat16 is on this GPU has not been measured")
        dtype = dtype_named(requested)
        if dtype == bfloat16 and not torch.backends.mps.is_macos_or_newer(14, 0):
            raise AccelError("dtype=bfloat16: MPS computes it from macOS 14 on: use dtype=float32.")
        return Choice(dtype, f"{requested}: asked for")

    def _documents(self, dtype: torch.dtype) -> Choice[Attention]:  # noqa: ARG002 - the same in every dtype
        return Choice(
            Attention("documents", document_attention),
            "documents: causal SDPA for each packed sample by itself, exact but a call a sample, because MPS has no "
            "variable-length kernel",
        )

    def quantization(self, quant_type: str) -> Choice[str]:
        """Choose 4 or 8 bits by bitsandbytes: its kernels from macOS 26 on, plain torch before."""
        return choose_quantization(quant_type, ("nf4", "fp4", "int8"), self.name)

    def seed(self, seed: int) -> None:
        """Seed the generators of the CPU and the GPU."""
        super().seed(seed)
        torch.mps.manual_seed(seed)

    def rng_state(self) -> dict[str, torch.Tensor]:
        """Read the states of the CPU's generator and the GPU's."""
        return {**super().rng_state(), "mps": torch.mps.get_rng_state().cpu()}

    def set_rng_state(self, state: dict[str, torch.Tensor]) -> None:
        """Restore the states of both generators."""
        super().set_rng_state(state)
        torch.mps.set_rng_state(state["mps"].cpu())

    def synchronize(self) -> None:
        """Wait until the GPU has done all that was queued."""
        torch.mps.synchronize()

    def peak_memory_bytes(self) -> int | None:
        """Return None: MPS keeps no peak."""
        return None

    def reset_peak_memory(self) -> bool:
        """Return False: MPS keeps no peak."""
        return False

    def memory_limit_bytes(self) -> int | None:
        """Read the memory that Metal advises the GPU to take at most."""
        return self._memory()

    def held_bytes(self) -> int | None:
        """Read the memory of tensors on the GPU."""
        return int(torch.mps.current_allocated_memory())

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Return whether an error says that the GPU, or the host beside it, has no memory left."""
        return super().is_out_of_memory(error) or (
            isinstance(error, RuntimeError) and "MPS backend out of memory" in str(error)
        )

    def peak_flops(self, dtype: torch.dtype) -> float | None:  # noqa: ARG002 - unknown for every dtype
        """Return None: Apple gives no peak for matrix products in bfloat16."""
        return None
