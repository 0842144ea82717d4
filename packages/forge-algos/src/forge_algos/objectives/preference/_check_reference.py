"""Test whether the first batches' references are those of the model that is to be trained."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from forge_algos._errors import ReferenceMismatchError
from forge_algos._modules import causal_model, decoder, language_modules, mode
from forge_algos._parallel import ALONE, Parallel
from forge_algos.isolation._guard import guard_packed
from forge_algos.objectives._objective import BeginsSteps
from forge_algos.objectives.preference._dpo import DPO
from forge_algos.objectives.preference._kto import KTO

_FINE, _COARSE = 1e-4, 5e-2
_SHOWN = 5


def check_reference(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    objective: DPO | KTO,
    device: torch.device | None = None,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    parallel: Parallel = ALONE,
) -> float:
    """Compare the loss before the first step with that of the right reference, and return it.

    A model that is its own reference has ln 2 with DPO's `sigmoid` and ½ with KTO. The means of the two have to agree within
    1e-4 (of the loss where that is above 1; 5e-2 where the model or the forward has less than float32), and no single term may
    be off by ten times that: shuffled references can have the right mean. Each rank gives batches of its own, all equally many,
    empty ones where it has nothing; all ranks decide alike.
    """
    device = next(model.parameters()).device if device is None else device
    # A vision tower in 16 bits takes no part. Weights in float32 may be gathered in 16 bits: what they compute shows it.
    computing = [p for module in language_modules(model) for p in module.parameters(recurse=False)]
    coarse = any(torch.finfo(p.dtype).eps > 1e-6 for p in computing if p.is_floating_point())
    found_dtypes: set[torch.dtype] = set()
    body = decoder(model)
    body = causal_model(model) if body is None else body
    hook = body.register_forward_hook(lambda _module, _args, output: found_dtypes.update(_dtypes(output)))
    try:
        return _compare(model, batches, objective, device, autocast, parallel, coarse=coarse, found_dtypes=found_dtypes)
    finally:
        hook.remove()


def _dtypes(output: Any) -> Iterator[torch.dtype]:
    """Yield the float dtypes of a forward's tensors."""
    tensors = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple) else [output]
    yield from (tensor.dtype for tensor in tensors if isinstance(tensor, torch.Tensor) and tensor.is_floating_point())


def _compare(
    model: nn.Module,
    batches: Iterable[Any],
    objective: DPO | KTO,
    device: torch.device,
    autocast: Callable[[], AbstractContextManager[Any]],
    parallel: Parallel,
    *,
    coarse: bool,
    found_dtypes: set[torch.dtype],
) -> float:
    """Compare the losses; `found_dtypes` fills with those of the forwards."""
    totals, wrong = torch.zeros(3, dtype=torch.float64), []
    with torch.no_grad(), mode(model, training=False), guard_packed(model):
        with autocast():
            bound: Any = objective.bind(model, device=device)
            if isinstance(bound, BeginsSteps):
                batches = list(batches)
                bound.begin([batch if objective.count(batch) else None for batch in batches], parallel)
        for number, batch in enumerate(batches):
            mine = objective.count(batch) > 0
            with autocast():
                coarse = coarse or torch.is_autocast_enabled(torch.device(device).type)
                found, expected, nats = (
                    values.cpu().double() for values in bound.at_start(batch if mine else objective.idle())
                )
            coarse = coarse or any(torch.finfo(dtype).eps > 1e-6 for dtype in found_dtypes)
            if not mine:
                continue
            totals += torch.stack([found.sum(), expected.sum(), torch.tensor(float(len(found)), dtype=torch.float64)])
            limit = 10 * _tolerance(coarse=coarse, loss=expected.abs())
            # Not "larger than": NaN must count as off.
            off = (~((found - expected).abs() <= limit)).nonzero().flatten().tolist()
            wrong += [(nats[k].item(), f"batch {number}, {_NAMES[objective.unit]} {k}") for k in off]
    loss, expected_loss, count, elsewhere = parallel.sum([*totals.tolist(), len(wrong)])
    loss, expected_loss = loss / max(count, 1), expected_loss / max(count, 1)
    limit = float(_tolerance(coarse=coarse, loss=torch.tensor(abs(expected_loss))))
    if not elsewhere and abs(loss - expected_loss) <= limit:
        return loss
    shown = "; ".join(f"{where} by {nats:.4g} nats" for nats, where in sorted(wrong, reverse=True)[:_SHOWN])
    raise ReferenceMismatchError(
        f"the loss before the first step is {loss:.6g}, and {expected_loss:.6g} (within {limit:.2g}) where the reference is "
        f"the model that training starts from; {int(elsewhere)} of {int(count)} terms are off{f': {shown}' if shown else ''}. "
        "The reference's log-probabilities come from another model, other data or another order: compute them anew with this "
        "model"
    )


_NAMES = {"pairs": "pair", "completions": "completion"}


def _tolerance(*, coarse: bool, loss: torch.Tensor) -> torch.Tensor:
    return (_COARSE if coarse else _FINE) * loss.clamp(min=1)
