"""Stand-in for Huawei's torch_npu: importing it gives torch its module `torch.npu`."""

import stand_ins
import torch

if not hasattr(getattr(torch, "npu", None), "_chips"):
    stand_ins.put_in_torch(stand_ins.Chips("npu", name="Ascend910B3"))


def npu_fusion_attention(*_: object, **__: object) -> None:
    """Kernel that transformers imports where torch_npu is installed; forge's attention does not call it."""
    raise NotImplementedError
