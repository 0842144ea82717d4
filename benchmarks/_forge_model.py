"""The model of a job, as `forge.sft` loads it: device choices by forge_accel, loading by forge_dist."""

from typing import Any, NamedTuple


class Loaded(NamedTuple):
    """Loaded model; `accelerator` is forge_accel's, `device` and `dtype` are torch's."""

    model: Any
    accelerator: Any
    device: Any
    dtype: Any


def load(job: dict[str, Any]) -> Loaded:
    """Load a trained model in fp32, a frozen base in its compute dtype, with the attention that forge_accel chooses."""
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
