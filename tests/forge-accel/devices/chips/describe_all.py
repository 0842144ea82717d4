"""Print what each vendor's class decides on stand-ins for its module, and what it calls, as JSON. In a process of its own.

torch's private device takes the name npu for good, and torch.xpu and torch.mps get other functions.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import stand_ins
import torch

import forge_accel
from forge_accel import AccelError, DeviceSettings, accelerator

HERE = Path(__file__).parent
CLASSES = {
    "hpu": forge_accel.HPUAccelerator,
    "mps": forge_accel.MPSAccelerator,
    "npu": forge_accel.NPUAccelerator,
    "xpu": forge_accel.XPUAccelerator,
}


def refusal(function, *arguments):
    """Return the message of the refusal; None where there is none."""
    try:
        function(*arguments)
    except AccelError as error:
        return str(error)
    return None


def look(kind):
    """Describe the device, and use all of it once."""
    # A launcher counts the devices: that must not take one of them.
    chips = getattr(getattr(torch, kind, None), "_chips", None)
    before = len(chips.calls) if chips else 0
    count = forge_accel.device_count(kind)
    counting = sorted({name for name, _ in getattr(torch, kind)._chips.calls[before:]})
    machine = accelerator(kind)
    machine.seed(7)
    state = machine.rng_state()
    machine.set_rng_state(state)
    machine.synchronize()
    return {
        "rows": [list(row) for row in forge_accel.describe(machine, DeviceSettings(device=kind))],
        "bfloat16": str(machine.dtype("bfloat16").value),
        "states": {name: (str(each.dtype), str(each.device)) for name, each in state.items()},
        "peak": machine.peak_memory_bytes(),
        "reserved": machine.peak_reserved_bytes(),
        "reset": machine.reset_peak_memory(),
        "limit": machine.memory_limit_bytes(),
        "held": machine.held_bytes(),
        "count": count,
        "counting": counting,
        "index": refusal(accelerator, f"{kind}:5"),
        "quantization": {name: refusal(machine.quantization, name) for name in ("nf4", "fp4", "int8")},
        "ranks": refusal(machine.check_ranks, 2),
        "compiling": [machine.compiling(asked).value for asked in ("auto", "blocks", "off")],
        "full": [
            machine.is_out_of_memory(RuntimeError(text))
            for text in (
                "NPU out of memory. Tried to allocate 2.00 GiB",
                "FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed for size::1073741824 (1024)MB",
                "level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
                "MPS backend out of memory",
                "shapes do not fit",
            )
        ],
        "calls": sorted({name for name, _ in getattr(torch, kind)._chips.calls}),
        "text": repr(machine),
    }


def main():
    """Print one object."""
    found = {"before": {kind: refusal(accelerator, kind) for kind in CLASSES}, "auto": accelerator().name}
    for kind in ("hpu", "npu"):
        sys.path.append(str(HERE / "libraries" / kind))
    found["no driver"] = {kind: refusal(accelerator, kind) for kind in ("hpu", "npu")}
    forge_accel.HPUAccelerator.nodes = forge_accel.NPUAccelerator.nodes = (__file__,)
    torch.utils.rename_privateuse1_backend("npu")
    found["imported by asking"] = [
        name for name in ("torch_npu", "habana_frameworks") if CLASSES["npu"].available() and name in sys.modules
    ]
    for kind in ("xpu", "mps"):
        stand_ins.put_in_torch(stand_ins.Chips(kind, name={"xpu": "Intel Data Center GPU Max 1550", "mps": "M4"}[kind]))
    found["lazy"] = []
    for mode in ("1", "2"):
        os.environ["PT_HPU_LAZY_MODE"] = mode
        found["lazy"].append(refusal(accelerator, "hpu"))
    del os.environ["PT_HPU_LAZY_MODE"]
    for kind in CLASSES:
        found[kind] = look(kind)
    torch.npu._chips.bf16 = False
    found["old npu"] = [str(accelerator("npu").dtype().value), refusal(accelerator("npu").dtype, "bfloat16")]
    torch.xpu._chips.number = 0
    found["gone"] = refusal(accelerator, "xpu")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
