"""LoRA's first values by PEFT's own initialisations, beside a base that keeps its weights.

PiSSA and OLoRA take a first product out of the base, W' = W - s B₀ A₀, and train s B A beside W'. Here the base stays: the
adapter has twice the rank, A = [A₁; A₀] and B = [B₁, -B₀], of which the second halves keep their values. That is the same
function of A₁ and B₁ with the same gradients, and the form that PEFT itself converts such adapters to. So the adapter switched
off is the base, whatever divides or quantizes the base does not matter, and what is exported is a plain LoRA.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.pytorch_utils import Conv1D

from forge_algos._counted import counted
from forge_algos._errors import AdapterError, OptimizerError
from forge_algos.adaptations.base._adaptation import Context
from forge_algos.adaptations.peft._lora_patterns import alphas_of, pattern_of, ranks_of
from forge_algos.adaptations.peft._quantization import dequantized
from forge_algos.settings._adapter import SUBTRACTED, AdapterSettings
from forge_algos.settings._adapter_table import ADAPTERS

if TYPE_CHECKING:
    from peft import PeftModel

_READ_WEIGHTS = (*SUBTRACTED, "mica")
_RIDGE = 1e-8
"""Added to the diagonal of A Aᵀ before it is inverted, as PEFT does for LoRA-FA."""


@attrs.frozen(kw_only=True)
class Lora:
    """Ranks, scales and first values of LoRA's layers."""

    settings: AdapterSettings
    ranks: Mapping[str, int]
    """Rank of each linear layer among the targets by its full name, without those of rank 0."""
    left_out: Sequence[str]
    """Targets to which rank_pattern gives rank 0."""
    directions: Mapping[str, torch.Tensor]
    """A of each target (init_lora_weights=eva)."""
    arguments: Mapping[str, Any]
    """Arguments of PEFT's configuration."""

    @classmethod
    def of(
        cls, model: nn.Module, settings: AdapterSettings, linear: Sequence[str], experts: Sequence[str], context: Context
    ) -> "Lora":
        """Resolve patterns, refuse what does not fit, and measure what is needed.
        Collective on a divided model.

        Args:
            model: the base, before PEFT.
            settings: of the adapter.
            linear: full names of the linear layers among the targets.
            experts: expert matrices among them, whose rank and scale PEFT takes from its defaults.
            context: what measures the directions of inputs.

        Raises:
            AdapterError: a pattern fits no target; the initialisation needs weights that are nowhere whole, more directions
                than a target has, an even rank, inputs that nobody measured, or linear layers where PEFT has expert matrices.
        """
        every = ranks_of(settings, linear, experts)
        ranks = {name: rank for name, rank in every.items() if rank}
        if not ranks and not experts:
            raise AdapterError("rank_pattern gives every target rank 0, so that nothing would train; leave an entry out")
        check_init(model, settings, ranks, experts, context)
        alphas = alphas_of(settings, list(ranks), experts)
        defaults = _doubled(settings, settings.lora_r, settings.lora_alpha)
        chosen = {name: _doubled(settings, rank, alphas[name]) for name, rank in ranks.items()}
        patterns = {
            f"{pattern}_pattern": pattern_of(model, {name: each[key] for name, each in chosen.items()}, defaults[key])
            for pattern, key in (("rank", "r"), ("alpha", "lora_alpha"))
        }
        directions: Mapping[str, torch.Tensor] = {}
        if settings.init_lora_weights == "eva" and context.directions is not None and not _is_outline(model, ranks):
            directions = context.directions(ranks)
        return cls(
            settings=settings,
            ranks=ranks,
            left_out=[name for name in every if name not in ranks],
            directions=directions,
            arguments={
                **defaults,
                **{name: pattern for name, pattern in patterns.items() if pattern},
                **({"init_lora_weights": "gaussian"} if settings.init_lora_weights == "gaussian" else {}),
            },
        )

    @property
    def notes(self) -> list[str]:
        """Lines for the log."""
        init, lines = self.settings.init_lora_weights, []
        if self.left_out:
            lines.append(f"no target: rank_pattern gives {counted(len(self.left_out), 'layers')} rank 0")
        if self.settings.subtracts:
            lines.append(
                f"init_lora_weights={init}: half of each adapter is the first product, which is subtracted and stays: it is "
                "exported as a LoRA of twice the rank, on the unchanged base"
            )
        elif init != "default":
            lines.append(f"init_lora_weights={init}" + (": B stays, A trains" if init == "mica" else ""))
        return [*lines, *(["lora_fa: A stays, B trains"] if self.settings.lora_fa else [])]

    def initialise(self, model: "PeftModel", *, stored: bool = False) -> "Halves | None":
        """Give the layers of PEFT's model their first values, and keep what does not train.
        Collective on a divided model.

        Args:
            model: with the layers as PEFT attached them.
            stored: whether the values of what trains are read afterwards, so that only those of what is subtracted count.

        Returns:
            What keeps the halves that are subtracted; None where nothing is.
        """
        init, base = self.settings.init_lora_weights, model.get_base_model()
        outline = _is_outline(base, self.ranks)
        for name, rank in self.ranks.items():
            layer: Any = base.get_submodule(name)
            A, B = layer.lora_A["default"], layer.lora_B["default"]
            with torch.no_grad():
                if init == "eva" and not outline:
                    A.weight.copy_(self.directions[name])
                elif init not in ("default", "gaussian") and not outline and (self.settings.subtracts or not stored):
                    below, scale = layer.get_base_layer(), layer.scaling["default"]
                    first, second = _same_on_all(below.weight, *_drawn(below, init, rank, scale))
                    if self.settings.subtracts:
                        first, second = torch.cat([first, first]), torch.cat([second, -second], dim=1)
                    A.weight.copy_(first)
                    B.weight.copy_(second)
            if init == "mica":
                _keep_whole(B)
            if self.settings.lora_fa:
                _keep_whole(A)
                B.forward = partial(_by_nearest_gradient, B, A, layer.scaling["default"])
        return Halves(base, self.ranks) if self.settings.subtracts else None


def check_init(
    model: nn.Module, settings: AdapterSettings, ranks: Mapping[str, int], experts: Sequence[str], context: Context
) -> None:
    """Refuse an initialisation that does not fit the targets.

    Args:
        model: the base, before PEFT.
        settings: of the adapter.
        ranks: rank of each linear layer among the targets by its full name.
        experts: expert matrices among them.
        context: what measures the directions of inputs.

    Raises:
        AdapterError: the initialisation, the target, and what would do.
    """
    init = settings.init_lora_weights
    chosen = "lora_fa=True" if settings.lora_fa else f"init_lora_weights={init}"
    if experts and (settings.lora_fa or init not in ("default", "gaussian")):
        more = len(experts) - 1
        others = f" and {counted(more, 'others')} are expert matrices," if more else " is an expert matrix,"
        raise AdapterError(
            f"{chosen}: {experts[0]}{others} of which PEFT keeps the factors of all "
            "experts in one matrix: leave it out, or name linear layers in target_modules"
        )
    for name, rank in ranks.items():
        layer: Any = model.get_submodule(name)
        shape = _shape(layer)
        most = {"eva": shape[1], **dict.fromkeys(_READ_WEIGHTS, min(shape))}.get(init, rank)
        if rank > most:
            raise AdapterError(
                f"{chosen}: {name} is {list(shape)} and has {most} directions, and its rank is {rank}: lower lora_r, or "
                "rank_pattern for it"
            )
        if init == "orthogonal" and rank % 2:
            raise AdapterError(f"{chosen} needs an even rank, and {name} has {rank}: set lora_r or rank_pattern to an even one")
        weight = layer.weight
        nowhere = not weight.numel() or hasattr(weight, "ds_id") or (0 in weight.stride() and not weight.is_meta)
        if init in _READ_WEIGHTS and nowhere:
            raise AdapterError(
                f"{chosen} reads the base's weights as it begins, and strategy=hsdp and zero3 have them nowhere whole then: "
                "use strategy=fsdp2, ddp or zero2, or another initialisation"
            )
    if init == "eva" and context.directions is None and not _is_outline(model, ranks):
        raise AdapterError(
            "init_lora_weights=eva begins in directions of the inputs: measure them with eva_directions and pass them to adapt "
            "as directions=..."
        )


def _doubled(settings: AdapterSettings, rank: int, alpha: float) -> dict[str, Any]:
    """Return PEFT's r and lora_alpha: twice the rank, at the same scale, if half is subtracted."""
    if not settings.subtracts:
        return {"r": rank, "lora_alpha": alpha}
    rslora = ADAPTERS[settings.adapter].options.get("use_rslora")
    return {"r": 2 * rank, "lora_alpha": alpha * (2**0.5 if rslora else 2)}


class Halves:
    """Second halves of LoRA's matrices, of the subtracted product, which keep their values."""

    def __init__(self, model: nn.Module, ranks: Mapping[str, int]) -> None:
        self._linear: list[tuple[nn.Module, int, int]] = []
        for name, rank in ranks.items():
            layer: Any = model.get_submodule(name)
            for dim, linear in enumerate((layer.lora_A["default"], layer.lora_B["default"])):
                # Rows of A, columns of B: without a gradient, however the model is divided.
                linear.forward = partial(_first_half_learns, linear, rank, dim)
                self._linear.append((linear, rank, dim))
        self._decays = False
        self._kept: list[torch.Tensor] = []

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise OptimizerError where a decay of these halves could not be undone."""
        self._decays = any(group.get("weight_decay") for group in optimizer.param_groups)
        if self._decays and callable(getattr(optimizer, "eval", None)):
            raise OptimizerError(
                "optimizer=schedule_free keeps averages of the weights, from which a decay of what this init_lora_weights "
                "subtracts cannot be taken back: set weight_decay=0, or optimizer=adamw"
            )

    def before_step(self) -> None:
        """Keep their values, before a decay moves them for the first time."""
        if self._decays and not self._kept:
            self._kept = [_second_half(*each).clone() for each in self._linear]

    def after_step(self) -> None:
        """Undo their decay."""
        for each, kept in zip(self._linear, self._kept, strict=False):
            _second_half(*each).copy_(kept)


def _second_half(linear: nn.Module, rank: int, dim: int) -> torch.Tensor:
    weight: Any = linear.weight
    return weight.detach().narrow(dim, rank, rank)


def _first_half_learns(linear: Any, rank: int, dim: int, x: torch.Tensor) -> torch.Tensor:
    first, second = linear.weight.split(rank, dim=dim)
    weight = torch.cat([first, second.detach()], dim=dim)
    return nn.functional.linear(x.to(weight.dtype), weight)


def _kept_whole(linear: Any, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.linear(x, linear.weight.to(x.dtype))


def _keep_whole(linear: Any) -> None:
    """Make a matrix a buffer: without gradient and optimizer state, in full states and exports."""
    weight = linear.weight.detach().clone()
    del linear.weight
    linear.register_buffer("weight", weight)
    linear.forward = partial(_kept_whole, linear)


def _by_nearest_gradient(B: Any, A: Any, scale: float, x: torch.Tensor) -> torch.Tensor:
    """Compute B x; B's gradient is multiplied by (A Aᵀ)⁻¹ / s² (LoRA-FA, arXiv 2308.03303)."""
    weight = B.weight.to(x.dtype) if not torch.is_autocast_enabled(x.device.type) else B.weight
    if torch.is_grad_enabled() and weight.requires_grad:
        weight = _Nearest.apply(weight, A.weight, scale)
    return nn.functional.linear(x, weight, None if B.bias is None else B.bias.to(weight.dtype))


class _Nearest(torch.autograd.Function):
    """The identity of B [N, r], whose gradient is taken to the nearest of the whole matrix's."""

    @staticmethod
    def forward(ctx: Any, B: torch.Tensor, A: torch.Tensor, scale: float) -> torch.Tensor:  # pyrefly: ignore[bad-override]
        ctx.save_for_backward(A)
        ctx.scale = scale
        return B.view_as(B)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (A,), (grad,) = ctx.saved_tensors, grads
        with torch.autocast(grad.device.type, enabled=False):
            square = A.float() @ A.float().T
            square = square + _RIDGE * torch.eye(len(square), device=A.device)
            # Symmetric: from the right it is the transposed solution. Nothing here waits for the device.
            nearest = torch.linalg.solve_ex(square, grad.float().T).result.T / ctx.scale**2
        return nearest.to(grad.dtype), None, None


def _drawn(base: Any, init: str, rank: int, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return A [r, M] and B [N, r] as PEFT initialises them beside a plain layer of this weight."""
    from peft import LoraConfig, inject_adapter_in_model

    weight = whole_weight(base)
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    alone: Any = nn.ModuleDict({"layer": linear})
    # lora_alpha = scale · rank, whatever the adapter's own rule is.
    config = LoraConfig(r=rank, lora_alpha=scale * rank, target_modules=["layer"], init_lora_weights=init)  # pyrefly: ignore
    inject_adapter_in_model(config, alone)
    layer = alone["layer"]
    return layer.lora_A["default"].weight.detach(), layer.lora_B["default"].weight.detach()


def whole_weight(base: Any) -> torch.Tensor:
    """Return the weight [N, M] of a linear layer or embedding in float32, whole, as a copy.
    Collective where it is divided.
    """
    weight: Any = base.weight.detach()
    if isinstance(weight, DTensor):
        moved: Any = weight.to(weight.device_mesh.device_type)
        weight = moved.full_tensor()
    if hasattr(base.weight, "quant_state"):
        from bitsandbytes.functional import dequantize_4bit

        weight = dequantize_4bit(base.weight.data, base.weight.quant_state)
    elif weight.dtype == torch.int8:
        weight = dequantized(weight, base.scales, torch.float32)
    return (weight.T if isinstance(base, Conv1D) else weight).to(torch.float32, copy=True).contiguous()


def _same_on_all(weight: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the first rank's tensors where ranks divide the weight.
    Singular vectors differ by processor.
    """
    mesh = getattr(weight, "device_mesh", None)
    if mesh is None:
        return tensors
    found = [tensor.to(mesh.device_type).contiguous() for tensor in tensors]
    for tensor in found:
        for dim in range(mesh.ndim):
            group = mesh.get_group(dim)
            torch.distributed.broadcast(tensor, torch.distributed.get_global_rank(group, 0), group=group)
    return tuple(found)


def _shape(layer: Any) -> tuple[int, int]:
    """Return [N, M] of a linear layer, also quantized or as a Conv1D."""
    if isinstance(layer, Conv1D):
        return layer.nf, layer.nx
    return layer.out_features, layer.in_features


def _is_outline(model: nn.Module, ranks: Mapping[str, int]) -> bool:
    """Return whether the targets hold no numbers, as those of a model on the meta device."""
    layers: list[Any] = [model.get_submodule(name) for name in ranks]
    bases: list[Any] = [getattr(layer, "base_layer", layer) for layer in layers]
    return any(base.weight.is_meta for base in bases)
