"""Huawei's Ascend NPUs: `torch.npu`, which the library torch_npu adds to torch.

After https://www.hiascend.com/document (torch_npu.npu, "the same as torch.cuda") and github.com/Ascend/pytorch, torch_npu/npu.
"""

from __future__ import annotations

from forge_accel._choice import Choice
from forge_accel.devices._memory import BLOCK_BYTES
from forge_accel.devices._module import ModuleAccelerator


class NPUAccelerator(ModuleAccelerator):
    """NPU of Huawei: `index`, else the one of the process' LOCAL_RANK, else the first."""

    name = "npu"
    priority = 90
    vendor = "Ascend NPU"
    library = "torch_npu"
    imports = ("torch_npu",)
    install = "pip install torch-npu, in the version of this torch, beside CANN"
    nodes = ("/dev/davinci[0-9]*",)
    collectives = "hccl"
    out_of_memory = ("NPU out of memory",)

    def _total_bytes(self) -> int:
        return int(self._torch().get_device_properties(self._index).total_memory)

    def _has_bfloat16(self) -> bool:
        return bool(self._torch().is_bf16_supported())

    @property
    def fused_optimizer(self) -> Choice[bool]:
        """False: torch_npu documents no kernel for torch's fused optimizers."""
        return Choice(value=False, reason="not fused: torch_npu documents no kernel for torch's fused AdamW")

    def peak_reserved_bytes(self) -> int | None:
        """Read the peak of what the caching allocator took from the chip."""
        return self._torch().max_memory_reserved(self._index)

    def allocated_bytes(self, size: int) -> int:
        """Round up to blocks of 512 bytes, as torch_npu's allocator does."""
        return -(-size // BLOCK_BYTES) * BLOCK_BYTES
