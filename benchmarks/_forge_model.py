"""A job -> the model as `forge.sft` loads it: the machine's choices from forge_accel, the loading by forge_dist."""

from typing import Any, NamedTuple


class Loaded(NamedTuple):
    """`accelerator` is forge_accel's; `device` and `dtype` are torch's."""

    model: Any
    accelerator: Any
    device: Any
    dtype: Any


def load(job: dict[str, Any]) -> Loaded:
    """What is trained is held in fp32, a frozen base in the dtype it is computed in; attention as the machine's shim decides."""
    import torch

    from forge_accel import accelerator
    from forge_dist import load_model

    machine = accelerator(job["device"])
    device, dtype = machine.device.value, machine.dtype(job["dtype"]).value
    attention = machine.attention(job["attention"], dtype).value
    model = load_model(
        job["model"],
        dtype=torch.float32 if job["adapter"] == "none" else dtype,
        device=device,
        attention=attention.name,
        attention_function=attention.function,
    )
    return Loaded(model, machine, device, dtype)
