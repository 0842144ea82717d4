"""Comparisons of made-up rows, judged by the dtype of products, decided alike on all ranks.

What a test does next depends on what it found, each forward of a divided model is collective, and near a bound ranks may find
different things: one that compared layer by layer alone would leave the others waiting.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from forge_algos._errors import PackedBatchError
from forge_algos._modules import causal_model
from forge_algos.isolation._by_layers import Run, apart_by_layers

REFUSALS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""Exceptions by which a model refuses a row that it cannot run."""

Decide = Callable[[int], int]
"""Number of this rank → the largest of all ranks."""

_HOLDS, _FAILS, _REFUSES = 0, 1, 2

_decides: WeakKeyDictionary[nn.Module, Decide] = WeakKeyDictionary()


def decide_by(model: nn.Module, decide: Decide) -> None:
    """Let tests of a model that every rank makes be decided by all of them."""
    _decides[causal_model(model)] = decide


def decides(model: nn.Module) -> Decide:
    """Return what decides the tests of a model that every rank makes."""
    return _decides.get(causal_model(model), int)


class Compare:
    """Comparisons of one test, within a `with` block around its forwards.

    Args:
        model: bare or wrapped.
        decide: by which ranks answer alike.
    """

    def __init__(self, model: nn.Module, decide: Decide = int) -> None:
        self._model, self._decide = model, decide
        self._eps = 0.0
        self._hooks = ExitStack()

    def __enter__(self) -> "Compare":
        for module in self._model.modules():
            if _multiplies(module):
                self._hooks.callback(module.register_forward_hook(self._see).remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.close()

    def _see(self, module: nn.Module, _args: Any, output: Any) -> None:
        output = output[0] if isinstance(output, tuple) else output
        # bitsandbytes' layers give their product back in the dtype of what they were given.
        for found in (output, getattr(module, "compute_dtype", None)):
            dtype = found.dtype if isinstance(found, torch.Tensor) else found
            if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
                self._eps = max(self._eps, torch.finfo(dtype).eps)

    def fine(self, states: torch.Tensor) -> bool:
        """Return whether states are computed in float32 or finer: they, and all products before."""
        return max(self._eps, torch.finfo(states.dtype).eps) < 1e-6 and not is_autocast(states.device)

    def holds(self, answer: Callable[[], bool]) -> bool:
        """Return whether an answer, with the forwards that it takes, is yes on all ranks.

        Raises:
            PackedBatchError: another rank cannot run a forward.
            Exception: one of `REFUSALS`, by which this rank cannot.
        """
        refusal = None
        try:
            found = _HOLDS if answer() else _FAILS
        except torch.OutOfMemoryError:
            raise
        except REFUSALS as error:
            refusal, found = error, _REFUSES
        worst = self._decide(found)
        if refusal is not None:
            raise refusal
        if worst == _REFUSES:
            raise PackedBatchError("another rank cannot run it")
        return worst == _HOLDS

    def equal(self, ours: Callable[[], torch.Tensor], theirs: Callable[[], torch.Tensor], *, own: int = 0) -> bool:
        """Compare states [S, D] within rounding, on all ranks; the last `own` by themselves too."""

        def found() -> bool:
            one, other = ours(), theirs()
            fine = self.fine(one)
            return equal_within_rounding(one, other, fine=fine) and (
                not own or equal_within_rounding(one[-own:], other[-own:], fine=fine)
            )

        return self.holds(found)

    def by_layers(self, states: Callable[[], torch.Tensor], packed: Run, alone: Run, changed: Run, *, own: int = 0) -> bool:
        """Compare as `apart_by_layers`, on all ranks; False where `states` are fine."""
        # The dtypes are the same on all.
        return not self.fine(states()) and self.holds(lambda: apart_by_layers(self._model, packed, alone, changed, own=own))


def _multiplies(module: nn.Module) -> bool:
    """Return whether a module has a matrix of its own that it multiplies by."""
    own = module.parameters(recurse=False)
    # ZeRO-3 leaves nothing of a weight but its shape.
    return not isinstance(module, nn.Embedding) and any(len(getattr(weight, "ds_shape", weight.shape)) > 1 for weight in own)


def is_autocast(device: torch.device) -> bool:
    """Return whether autocast is on for a device."""
    kind = torch.device(device).type
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def equal_within_rounding(ours: torch.Tensor, theirs: torch.Tensor, *, fine: bool) -> bool:
    """Compare within rounding: at all tokens in float32, at half of them in fewer digits.

    The bound is relative to the largest value: 1e-4 in float32 (1e-3 where torch multiplies it in fewer digits, as TF32), 0.05
    below it. Rounding makes about 1e-6 in float32; weights that are small make a leak small too. In few digits an expert may
    change with nothing but the shape of a product; a leak or a wrong position shows at all tokens, by parts of the values
    themselves. Rounding alone may exceed 0.05 in few digits after dozens of layers: there `apart_by_layers` decides.
    """
    error = (ours.float() - theirs.float()).abs().amax(dim=-1) / theirs.float().abs().max()
    whole = torch.get_float32_matmul_precision() == "highest"
    # Not "larger than": NaN must not pass.
    within = error <= ((1e-4 if whole else 1e-3) if fine else 0.05)
    return bool(within.all() if fine else within.float().mean() >= 0.5)
