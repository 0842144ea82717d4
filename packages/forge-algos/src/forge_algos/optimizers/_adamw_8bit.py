"""AdamW with its moments in 8 bits: kernels over rows, whole or divided.

On GPUs a kernel of our own where Triton has it (`_adamw_8bit_kernel`), bitsandbytes' kernels otherwise.

bitsandbytes' own optimizer counts blocks of 256 numbers through a tensor, and takes none that is divided. Here no block crosses
a row: a rank that holds some rows of a matrix has their blocks whole, so that a run's numbers, and its saved state, are the
same on any number of ranks. Where rows are a multiple of 256 wide, its kernels' steps have the bits of its optimizer.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

# Documented under this name: "Fake tensor" in torch's manual.
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

from forge_algos._errors import MissingPackageError, OptimizerError
from forge_algos._kernels import try_kernel
from forge_algos.optimizers._closure import Numbered
from forge_algos.optimizers._divided import local, rows_here
from forge_algos.optimizers._rounding import keys_of_places, round_stochastically_, try_rounding

BLOCK = 256
"""Numbers of a row that share a scale."""
LEAST = 4096
"""Parameters of fewer numbers keep moments in 32 bits, and so do those whose rows are narrower than a block."""
ZEROS = (127, 0)
"""Codes that stand for 0, of the first moment and of the second."""
_MOMENTS = ("state1", "state2", "absmax1", "absmax2")
_AT_ONCE, _AT_ONCE_ON_A_CPU = 2**25, 2**22
"""Numbers of which a float32 copy is made at a time: a GPU wants many a kernel, and few stay in a processor's caches."""


class AdamW8bit(Numbered):
    """AdamW (arXiv 1711.05101) with moments in 8 bits (2110.02861), by the device's kernels.

    bfloat16 weights are moved in float32 and rounded stochastically: see `_rounding`. A parameter's state is `step`, and
    `state1` and `state2`, the moments: uint8 of the parameter's shape with `absmax1` and `absmax2`, float32[rows, blocks], or
    float32 where it is small. A DTensor's are DTensors.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float = 0.0,
        seed: int = 0,
        numbers: Mapping[nn.Parameter, int] | None = None,
    ) -> None:
        """Take groups of parameters, tried on their devices.

        Args:
            groups: as of torch's optimizers.
            lr: learning rate.
            betas: decay of both moments.
            eps: added to the denominator.
            weight_decay: of groups that name none.
            seed: of stochastic rounding.
            numbers: each parameter's number, that its random bits follow from; by default its place in `groups`.

        Raises:
            MissingPackageError: bitsandbytes is not installed.
            OptimizerError: it cannot take a step on a device that holds parameters, or ranks divide the columns of a matrix.
        """
        _kernels()
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(groups, defaults, name="adamw_8bit", seed=seed, numbers=numbers)
        parameters = [p for group in self.param_groups for p in group["params"]]
        self._maps: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}
        self._by_kernel: dict[torch.device, bool] = {}
        for device in sorted({p.device for p in parameters}, key=str):
            self._try(device)
            # Not in a first step, which may be a memory plan's: none of Triton's kernels is launched there, so that the trial
            # would fail, and be remembered.
            self._by_kernel[device] = _has_kernel(device)
            if not self._by_kernel[device] and any(p.device == device and p.dtype == torch.bfloat16 for p in parameters):
                try_rounding(device)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned, each tensor in the dtype that it had there."""
        super().load_state_dict(state_dict)
        # torch casts a state to its weight's dtype.
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for parameter, number in zip(group["params"], saved["params"], strict=True):
                kept = state_dict["state"].get(number, {})
                for key, value in kept.items():
                    self.state[parameter][key] = value.to(parameter.device, copy=True) if hasattr(value, "to") else value

    def _move(self, parameter: nn.Parameter, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state.update(_new_state(parameter))
        state["step"] += 1
        first, count = rows_here(parameter, "adamw_8bit")
        if not count:
            return  # of a matrix with fewer rows than ranks
        held = [_matrix(each, count) for each in (parameter, *(state[key] for key in _MOMENTS if key in state))]
        # Kernels go through memory in its order, whatever strides say.
        in_order = [each.contiguous() for each in held]
        key = self._key(parameter, state["step"])
        self._move_matrix(in_order, _matrix(gradient, count).contiguous(), (state["step"], group), (first, key))
        for each, moved in zip(held, in_order, strict=True):
            if moved is not each:
                each.copy_(moved)

    def _move_matrix(
        self,
        held: Sequence[torch.Tensor],
        grad: torch.Tensor,
        how: tuple[int, dict[str, Any]],
        place: tuple[int, int],
    ) -> None:
        """Move a matrix [M, D], its moments [M, D] and scales [M, blocks], all of them contiguous."""
        weight, moments, scales = held[0], held[1:3], held[3:]
        (count, width), (first, key) = weight.shape, place
        device = weight.device
        if scales and (self._by_kernel[device] if device in self._by_kernel else _has_kernel(device)):
            values = self._quantiles(device)
            _move_at_once(weight, grad, *moments, *scales, *values, *_rates(*how), first, *keys_of_places(key))
            return
        numbers = _AT_ONCE_ON_A_CPU if device.type == "cpu" else _AT_ONCE
        at_once = max(1, numbers // width) if self._copies(weight, scales) else count
        starts = range(0, count, at_once)
        if isinstance(weight, FakeTensor):
            # Of a memory plan: each part takes and gives back what the first does, and a 7B has 1,600.
            starts = starts[:1]
        for start in starts:
            part = slice(start, start + at_once)
            self._move_rows(
                weight[part],
                grad[part],
                [each[part] for each in moments],
                [each[part] for each in scales],
                how,
                (first + start, key),
            )

    def _copies(self, weight: torch.Tensor, scales: Sequence[torch.Tensor]) -> bool:
        """Return whether kernels get copies of a matrix, and not the matrix itself."""
        return weight.dtype != torch.float32 or bool(scales and weight.shape[1] % BLOCK) or weight.numel() >= 2**31

    def _move_rows(
        self,
        weight: torch.Tensor,
        grad: torch.Tensor,
        moments: Sequence[torch.Tensor],
        scales: Sequence[torch.Tensor],
        how: tuple[int, dict[str, Any]],
        place: tuple[int, int],
    ) -> None:
        """Move rows [M, D], with their moments [M, D] and scales [M, blocks]."""
        width = weight.shape[1]
        padding = -width % BLOCK if scales else 0
        exact, grad, codes = weight.float(), grad.float(), moments
        if padding:
            exact, grad = (nn.functional.pad(each, (0, padding)) for each in (exact, grad))
            codes = [nn.functional.pad(each, (0, padding), value=zero) for each, zero in zip(moments, ZEROS, strict=True)]
        self._update(exact, grad, codes, scales, *how)
        if padding:
            for each, moved in zip(moments, codes, strict=True):
                each.copy_(moved[:, :width])
            exact = exact[:, :width].contiguous()
        if weight.dtype == torch.bfloat16:
            round_stochastically_(weight, exact, first_row=place[0], key=place[1])
        elif exact is not weight:
            weight.copy_(exact)

    def _update(
        self,
        weight: torch.Tensor,
        grad: torch.Tensor,
        moments: Sequence[torch.Tensor],
        scales: Sequence[torch.Tensor],
        step: int,
        group: dict[str, Any],
    ) -> None:
        """Call bitsandbytes' kernel, which changes all but the gradient."""
        beta1, beta2 = group["betas"]
        rate = {"beta1": beta1, "beta2": beta2, "eps": group["eps"], "step": step, "lr": group["lr"]}
        if not scales:
            _kernels().optimizer_update_32bit(
                "adam", grad, weight, moments[0], state2=moments[1], weight_decay=group["weight_decay"], **rate
            )
            return
        values = self._quantiles(weight.device)
        _kernels().optimizer_update_8bit_blockwise(
            "adam",
            grad,
            weight,
            *moments,
            beta3=0.0,
            alpha=0.0,
            qmap1=values[0],
            qmap2=values[1],
            absmax1=scales[0].view(-1),
            absmax2=scales[1].view(-1),
            weight_decay=group["weight_decay"],
            **rate,
        )

    def _quantiles(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the values, float32[256], that the codes of both moments stand for."""
        if device not in self._maps:
            maps = (_kernels().create_dynamic_map(signed=signed).to(device) for signed in (True, False))
            self._maps[device] = tuple(maps)
        return self._maps[device]

    def _try(self, device: torch.device) -> None:
        """Take a step on a made-up matrix."""
        weight, grad = (torch.full((16, BLOCK), float(value), device=device) for value in (0, 1))
        moments = [torch.zeros((16, BLOCK), dtype=torch.uint8, device=device) for _ in range(2)]
        scales = [torch.zeros((16, 1), device=device) for _ in range(2)]
        group = {"lr": 1.0, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}
        remedy = "Use optimizer=adamw, or optimizer=adafactor where memory is short"
        refusal = f"optimizer=adamw_8bit: bitsandbytes does not serve {device}"
        try:
            self._update(weight, grad, moments, scales, 1, group)
            moved = bool((weight != 0).all())
        except torch.OutOfMemoryError:
            raise
        except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            raise OptimizerError(f"{refusal}: {error}. {remedy}") from error
        if not moved:
            raise OptimizerError(f"{refusal}: a step moves nothing. {remedy}")


def _rates(step: int, group: Mapping[str, Any]) -> tuple[float, ...]:
    """Return the numbers of a step, as `_adamw_8bit_kernel.launch` takes them."""
    (beta1, beta2), rate = group["betas"], float(group["lr"])
    decay = 1 - rate * group["weight_decay"]
    return beta1, beta2, group["eps"], rate / (1 - beta1**step), math.sqrt(1 - beta2**step), decay


@torch.library.custom_op("forge_algos::adamw_8bit", mutates_args={"weight", "code1", "code2", "scale1", "scale2"})
def _move_at_once(
    weight: torch.Tensor,
    grad: torch.Tensor,
    code1: torch.Tensor,
    code2: torch.Tensor,
    scale1: torch.Tensor,
    scale2: torch.Tensor,
    values1: torch.Tensor,
    values2: torch.Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    rate: float,
    correction: float,
    decay: float,
    first_row: int,
    row_key: int,
    column_key: int,
) -> None:
    from forge_algos.optimizers._adamw_8bit_kernel import launch

    rates, place = (beta1, beta2, eps, rate, correction, decay), (first_row, row_key, column_key)
    launch(weight, grad, (code1, code2), (scale1, scale2), (values1, values2), rates, place)


@_move_at_once.register_fake
def _(*_: Any) -> None:
    # One kernel, which allocates nothing.
    return


def _has_kernel(device: torch.device) -> bool:
    """Return whether `_move_at_once` serves a device; tried once."""
    if device.type == "cpu":
        return False
    # Tensors without numbers, as of a memory plan, are of another type, and show nothing of the device.
    if type(torch.empty(0, device=device)) is not torch.Tensor:
        return find_spec("triton") is not None
    return try_kernel("adamw_8bit", str(device), partial(kernel_problem, str(device)), instead="bitsandbytes' kernels")


def kernel_problem(device: str) -> str | None:
    """Return why steps with made-up matrices are not AdamW's within the rounding of 8 bits.

    None where they are; whatever Triton lacks on a device is raised.
    """
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
        if not _steps_agree(device, dtype, bound):
            return f"its steps are not AdamW's, with weights in {dtype}"
    return None


def _steps_agree(device: str, dtype: torch.dtype, bound: float) -> bool:
    rows, width = 9, 600
    weight = torch.linspace(-3, 3, rows * width, device=device).sin_().view(rows, width).to(dtype)
    grad = torch.linspace(-50, 40, rows * width, device=device).cos_().view(rows, width)
    codes = [torch.full_like(grad, zero, dtype=torch.uint8) for zero in ZEROS]
    scales = [torch.zeros((rows, -(-width // BLOCK)), device=device) for _ in ZEROS]
    values = [_kernels().create_dynamic_map(signed=signed).to(device) for signed in (True, False)]

    def moments() -> list[torch.Tensor]:
        wide = [scale.repeat_interleave(BLOCK, 1)[:, :width] for scale in scales]
        return [(value[code.long()] * each).double() for value, code, each in zip(values, codes, wide, strict=True)]

    for step in (1, 2):
        first, second = moments()
        rates = _rates(step, {"lr": 0.125, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1})
        beta1, beta2, eps, rate, correction, decay = rates
        first, second = first.lerp(grad.double(), 1 - beta1), second.lerp(grad.double().square(), 1 - beta2)
        exact = weight.double() * decay - rate * first / (second.sqrt() / correction + eps)
        _move_at_once(weight, grad, *codes, *scales, *values, *rates, 5, step, -7)
        found = [(weight, exact, bound), *((a, b, 2e-2) for a, b in zip(moments(), (first, second), strict=True))]
        if any(not (a.double() - b).norm() <= most * b.norm() for a, b, most in found):
            return False
    return True


def _kernels() -> Any:
    try:
        return import_module("bitsandbytes").functional
    except ImportError as error:
        raise MissingPackageError(
            f"optimizer=adamw_8bit needs bitsandbytes ({error}): `pip install 'forge-algos[bitsandbytes]'`, or use "
            "optimizer=adamw"
        ) from error


def _new_state(parameter: nn.Parameter) -> dict[str, Any]:
    """Make the state of a parameter that has not moved; every moment is 0."""
    rows = parameter.shape[0] if parameter.dim() else 1
    width = parameter.numel() // max(1, rows)
    if parameter.numel() < LEAST or width < BLOCK:
        kept = {key: torch.zeros_like(parameter, dtype=torch.float32) for key in ("state1", "state2")}
        return {"step": 0, **kept}
    blocks = -(-width // BLOCK)
    kept = {key: torch.zeros_like(parameter, dtype=torch.uint8) for key in ("state1", "state2")}
    return {"step": 0, **kept, "absmax1": _by_row(parameter, blocks), "absmax2": _by_row(parameter, blocks)}


def _by_row(parameter: nn.Parameter, blocks: int) -> torch.Tensor:
    """Return zeros, float32[rows, blocks], divided as the rows of a parameter are."""
    shape = (parameter.shape[0], blocks)
    held: torch.Tensor = parameter.detach()
    if not isinstance(held, DTensor):
        return torch.zeros(shape, device=held.device)
    local = torch.zeros((rows_here(parameter, "adamw_8bit")[1], blocks), device=held.to_local().device)
    return DTensor.from_local(
        local, held.device_mesh, held.placements, run_check=False, shape=torch.Size(shape), stride=(blocks, 1)
    )


def _matrix(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """Return what this process holds of a tensor as [rows, width], in the same memory."""
    return local(tensor).view(rows, -1)
