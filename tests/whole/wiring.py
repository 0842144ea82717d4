"""The leaf packages wired together as the facade wires them, without any arithmetic."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

import forge_accel
import forge_algos
import forge_dist
import forge_packing

from .reference import Gradients, Sample

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

ATTENTIONS = ("documents", "sdpa", "eager")
"""Every attention path that forge_accel offers on a CPU; `test_every_attention_path_is_covered` keeps it so."""

CPU = forge_accel.accelerator("cpu")
FLOAT32 = CPU.dtype("float32").value

LORA = forge_algos.AdapterSettings(adapter="lora", lora_r=4, lora_alpha=12.0)
SCALING = 3.0  # lora_alpha / lora_r, written out


def load(directory: str, attention: str) -> PreTrainedModel:
    """The saved model as forge loads it on a CPU, with one of its attention paths."""
    chosen = CPU.attention(attention, FLOAT32).value
    return forge_dist.load_model(
        directory, dtype=FLOAT32, device=CPU.device.value, attention=chosen.name, attention_function=chosen.function
    )


def with_adapter(model: PreTrainedModel, seed: int = 3) -> Any:
    """The model with forge's LoRA and random B: with the initial zeros A would have no gradient."""
    CPU.seed(seed)
    wrapped = forge_algos.adapt(model, LORA).model
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return wrapped


def plain_name(name: str) -> str:
    """A parameter's name in a forge model, full or LoRA -> its name in the reference."""
    name = name.removeprefix("base_model.model.").replace(".base_layer.", ".frozen.")
    return name.replace(".lora_A.default.weight", ".A").replace(".lora_B.default.weight", ".B")


def rows(samples: Sequence[Sample], max_tokens: int) -> list[Any]:
    """The samples in packed rows of at most `max_tokens`, as forge_packing divides and collates one step."""
    (micro_batches,) = forge_packing.divide([len(sample.input_ids) for sample in samples], max_tokens=max_tokens)
    return [forge_packing.collate([samples[index] for index in indices]) for indices in micro_batches]


class Recorder(torch.optim.Optimizer):
    """An optimizer that updates nothing and records its gradients."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.named = {plain_name(name): p for name, p in model.named_parameters() if p.requires_grad}
        self.seen: list[Gradients] = []
        super().__init__(list(self.named.values()), {"lr": 1.0})

    def step(self, closure: Any = None) -> None:
        """Record a copy of every gradient, zeros where there is none."""
        self.seen.append({name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in self.named.items()})


def record(model: torch.nn.Module, steps: Sequence[Sequence[Any]]) -> tuple[list[Any], list[Gradients]]:
    """Run forge_algos.train without updates; its outputs, and the gradients of the steps with a loss."""
    recorder = Recorder(model)
    constant = torch.optim.lr_scheduler.LambdaLR(recorder, lambda _: 1.0)
    outputs = forge_algos.train(
        model,
        steps,
        objective=forge_algos.SFT(),
        optimizer=recorder,
        scheduler=constant,
        max_grad_norm=0.0,
        device=CPU.device.value,
        autocast=partial(CPU.autocast, FLOAT32),
    )
    return list(outputs), recorder.seen
