"""Stand-in for Intel's habana_frameworks.torch: importing it gives torch its module `torch.hpu`."""

import stand_ins
import torch

from habana_frameworks.torch.utils import internal as internal

if not hasattr(getattr(torch, "hpu", None), "_chips"):
    stand_ins.put_in_torch(stand_ins.Chips("hpu", name="GAUDI2", gib=96))
