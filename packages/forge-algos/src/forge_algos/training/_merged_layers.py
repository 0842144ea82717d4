"""PEFT's LoRA layers that compute with the merged weight, rounded.

The rounded weight W lies in the place of the base's. A layer returns x·W: what A and B add is in it. Their gradients are those
of the unrounded sum of base and product at x·W (arXiv 1308.3432): the product is added to a constant, less itself.
"""

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from forge_algos._errors import OptimizerError
from forge_algos._modules import causal_model
from forge_algos.optimizers._divided import rows_here


class Rounded(NamedTuple):
    """One parameter that is rounded, and the layer whose product is added before."""

    parameter: nn.Parameter
    layer: "MergedLayer | None" = None


def rounded_parameters(model: nn.Module, name: str) -> list[Rounded]:
    """Return the parameters that make up a weight of the merged model; [] of no such weight.

    A copy that trains in the place of a module, rows of tokens beside the whole, or a layer with LoRA.

    Raises:
        OptimizerError: an adapter of another form.
    """
    place, _, attribute = name.rpartition(".")
    try:
        module: Any = causal_model(model).get_submodule(place)
    except AttributeError:
        return []
    if hasattr(module, "modules_to_save"):
        module = module.modules_to_save[module.active_adapters[0]]
    elif hasattr(module, "token_adapter"):
        tokens = module.token_adapter
        return [Rounded(tokens.base_layer.weight), Rounded(tokens.trainable_tokens_delta[tokens.active_adapters[0]])]
    elif hasattr(module, "base_layer"):
        merged = MergedLayer(module, place)
        return [Rounded(merged.base.weight, merged)]
    found = module._parameters.get(attribute)
    return [] if found is None else [Rounded(found)]


class MergedLayer:
    """One of PEFT's LoRA layers around a linear layer, with a magnitude (DoRA) or without."""

    def __init__(self, layer: Any, name: str) -> None:
        """Take the layer.

        Raises:
            OptimizerError: PEFT computes otherwise here than with the merged weight, or ranks divide what DoRA reads.
        """
        from peft.tuners.lora import Linear
        from peft.tuners.lora.variants import DoraLinearVariant

        why = None
        if not isinstance(layer, Linear) or not isinstance(layer.base_layer, nn.Linear):
            why = "what adapts it is not LoRA on a linear layer; leave it out of target_modules"
        elif len(layer.active_adapters) != 1:
            why = f"{len(layer.active_adapters)} adapters are active on it"
        else:
            self._adapter = layer.active_adapters[0]
            self._variant = layer.lora_variant.get(self._adapter)
            if not isinstance(layer.lora_dropout[self._adapter], nn.Identity):
                why = "its adapter has dropout, which is of inputs and not of a weight"
            elif layer.lora_bias[self._adapter]:
                why = "its adapter adds a bias of its own"
            elif not isinstance(self._variant, DoraLinearVariant | None):
                why = f"PEFT computes it as a {type(self._variant).__name__}"
            elif _columns_divided(layer.base_layer.weight):
                why = "ranks divide the columns of its weight: leave tp_size out"
            elif self._variant is not None and isinstance(layer.base_layer.weight, DTensor):
                why = "ranks divide its weight, which the gradient of DoRA's magnitude reads whole: use strategy=ddp, or lora"
        if why is not None:
            raise OptimizerError(f"{name} cannot compute with its merged weight: {why}")
        self.layer: Any = layer
        self.base: Any = layer.base_layer
        self._lengths: torch.Tensor | None = None

    def merged(self, base: torch.Tensor) -> torch.Tensor:
        """Return the weight that PEFT's merge writes: the rows that this process holds.

        Collective where ranks divide A and B: every rank needs all of them.

        Args:
            base: [outputs here, inputs], of any dtype.

        Returns:
            float32[outputs here, inputs].
        """
        first, count = rows_here(self.base.weight, "qat")
        a, b = (_whole(factors[self._adapter].weight) for factors in (self.layer.lora_A, self.layer.lora_B))
        # In the order of PEFT's own sums, so that the bits are those of its merge.
        added = b[first : first + count] @ a * self.layer.scaling[self._adapter]
        if self._variant is None:
            return base.float() + added
        magnitude = self.layer.lora_magnitude_vector[self._adapter]
        self._lengths = magnitude.get_weight_norm(base.float(), added, scaling=1)
        return (magnitude.weight.detach() / self._lengths).view(-1, 1) * (base.float() + added)

    def forward(self, base: torch.Tensor, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Compute with the weight in the base's place; `base` is the base's own, unrounded."""
        result = self.layer.base_layer(x, *args, **kwargs)
        if not torch.is_grad_enabled() or self.layer.disable_adapters:
            return result
        # Detached: the gradient of the input is that of the rounded weight alone.
        a, b = self.layer.lora_A[self._adapter], self.layer.lora_B[self._adapter]
        x = self.layer._cast_input_dtype(x.detach(), a.weight.dtype)
        added = b(a(x)) * self.layer.scaling[self._adapter]
        if self._lengths is not None:
            magnitude = self.layer.lora_magnitude_vector[self._adapter].weight
            added = magnitude / self._lengths * (nn.functional.linear(x, base.to(x.dtype)) + added)
        return result + (added - added.detach()).to(result.dtype)


def _whole(weight: torch.Tensor) -> torch.Tensor:
    """Return all of an adapter's matrix, float32."""
    held = weight.detach()
    return (held.full_tensor() if isinstance(held, DTensor) else held).float()


def _columns_divided(weight: torch.Tensor) -> bool:
    return isinstance(weight, DTensor) and any(getattr(placement, "dim", 0) not in (0, -2) for placement in weight.placements)
