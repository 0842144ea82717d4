"""AMD's GPUs under ROCm, which torch calls `cuda`; what differs is what was tried on them."""

from __future__ import annotations

import torch

from forge_accel._choice import Choice
from forge_accel.attention._attention import Attention
from forge_accel.attention._documents import document_attention
from forge_accel.devices._accelerator import Accelerator
from forge_accel.devices._cuda import CUDAAccelerator
from forge_accel.devices._quantization import check_quantization, held


class ROCMAccelerator(CUDAAccelerator):
    """GPU of AMD, whose torch device is `cuda`: `index`, else the one of LOCAL_RANK."""

    name = "rocm"
    support = Choice(
        "declared", "declared: no GPU of AMD has run forge yet; tests put stand-ins in the places of torch.cuda's functions"
    )
    _toolkit = "ROCm"

    @staticmethod
    def _toolkit_version() -> str | None:
        return torch.version.hip

    @property
    def collective_backend(self) -> Choice[str]:
        """RCCL, which has NCCL's name in torch, beside gloo for tensors on the CPU."""
        found = super().collective_backend
        return Choice(found.value, f"{found.reason} (RCCL, under the name of NCCL)") if "nccl" in found.value else found

    def _documents(self, dtype: torch.dtype) -> Choice[Attention]:  # noqa: ARG002 - the same in every dtype
        return Choice(
            Attention("documents", document_attention),
            "documents: causal SDPA for each packed sample by itself, exact but a call a sample, because torch's "
            "variable-length flash kernel is untried on ROCm",
        )

    def compiling(self, requested: str = "auto", *, operations: float = 0.0) -> Choice[str | None]:
        """Choose the backend of `torch.compile`; by default nothing is compiled."""
        return Accelerator.compiling(self, requested, operations=operations)

    def quantization(self, quant_type: str) -> Choice[str]:
        """Choose 4 or 8 bits by bitsandbytes' kernels for ROCm."""
        found = check_quantization(quant_type)
        chip = self._properties.name
        return Choice(quant_type, f"{held(quant_type, found)} on {chip}; untried on ROCm")
