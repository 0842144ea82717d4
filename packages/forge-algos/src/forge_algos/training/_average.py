"""Exponential moving average of the trained weights, kept beside the optimizer's state."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from forge_algos._errors import OptimizerError
from forge_algos._modules import causal_model, free_gathered, unwrap
from forge_algos.optimizers._divided import local, rows_here
from forge_algos.optimizers._rounding import round_stochastically_, rounding_key

_KEY = "average"
"""Entry of the optimizer's state of a parameter; it is saved, divided and restored with it."""
_SEED = 0x57EAD1
"""Of the random bits by which averages are rounded: others than those of an optimizer's steps."""
_AT_ONCE = 1 << 24
"""Most numbers that are held in float32 at a time."""
_INERT = re.compile(
    r"^_|_token_id$|dtype$|dropout|_pdrop$|^initializer_|^(architectures|transformers_version|use_cache|id2label|label2id)$"
)
"""Entries of a model's configuration on which no forward in evaluation depends."""


class WeightAverage:
    """Moving average a ← a + rate · (w - a) of an optimizer's parameters.

    It begins as the weights at the first step, or as those of another model (`begin_as`), and follows each step that moves
    them, or each `every`-th step. Each parameter's average lies in the optimizer's state of it, in the shape and on the ranks
    of the parameter, so that whoever saves the one saves the other. In bfloat16 it is rounded stochastically: a small rate's
    moves are less than half of its spacing.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, rate: float, *, every: int | None = None) -> None:
        """Take an optimizer before its first step, or with the state of a run that is resumed.

        Args:
            optimizer: holds the weights.
            rate: above 0, at most 1.
            every: moves after the steps whose number is a multiple of it, whether or not these moved the weights.

        Raises:
            OptimizerError: the optimizer keeps no state of its own for each parameter.
        """
        if not isinstance(getattr(optimizer, "state", None), dict):
            raise OptimizerError(
                f"{type(optimizer).__name__} keeps no state for each parameter, beside which an average could be kept"
            )
        self._optimizer, self._rate, self._every = optimizer, rate, every
        self._parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        # Of parameters without a state, which an optimizer makes at their first gradient, and only where there is none yet.
        self._began: dict[nn.Parameter, torch.Tensor] = {}

    @torch.no_grad()
    def begin_as(self, model: nn.Module, other: nn.Module, *, after: int = 0) -> None:
        """Begin as the weights of another model, where no restored state holds the average.

        Args:
            model: the trained model, whose parameters the optimizer holds.
            other: of the same weights, in the same shapes and on the same ranks; only read.
            after: steps that were made before, where a run is resumed: the moves that followed them are made again.

        Raises:
            OptimizerError: the models differ in an entry of their configurations that code reads, in a weight's name, its
                shape, or how ranks divide it, or in a weight that is not trained; or `after` of an average that follows no
                `every`-th step.
        """
        if after and self._every is None:
            raise OptimizerError("begin_as(after=...): which steps moved the average is not known; give WeightAverage every=")
        theirs = dict(unwrap(other).named_parameters())
        names = {p: name for name, p in unwrap(model).named_parameters()}
        if unlike := sorted(theirs.keys() ^ set(names.values())):
            raise OptimizerError(f"only one of both models has the weight {unlike[0]}")
        here, there = _configuration(model), _configuration(other)
        if here != there:
            words = _words_of_code(model)
            here, there = _kept(here, words), _kept(there, words)
        if different := sorted(key for key in here.keys() | there.keys() if here.get(key) != there.get(key)):
            key = different[0]
            raise OptimizerError(f"its configuration has {key}={there.get(key)}, and that of the trained model {here.get(key)}")
        trained = set(self._parameters)
        for p, name in names.items():
            if _layout(p) != _layout(theirs[name]):
                raise OptimizerError(
                    f"its weight {name} is {_layout(theirs[name])}, and that of the trained model {_layout(p)}"
                )
            if p not in trained and not torch.equal(local(theirs[name]).to(p.dtype), local(p)):
                raise OptimizerError(
                    f"its weight {name} differs from the trained model's, where it is frozen, so that no average of it is kept"
                )
        for number, p in enumerate(self._parameters):
            if _KEY not in self._optimizer.state.get(p, {}):
                self._began[p] = theirs[names[p]].detach().to(p.dtype, copy=True)
                for step in range(self._every or 1, after + 1, self._every or 1):
                    self._move(self._began[p], p, number, step)

    def before_step(self) -> None:
        """Keep the weights that the average begins with."""
        for p in self._parameters:
            if p not in self._began and _KEY not in self._optimizer.state.get(p, {}):
                self._began[p] = p.detach().clone()

    def after_step(self, step: int, *, moved: bool) -> None:
        """Move the average towards the weights, where it follows the step of this number."""
        due = moved if self._every is None else step % self._every == 0
        for number, p in enumerate(self._parameters):
            state = self._optimizer.state.get(p)
            if state and _KEY not in state:
                state[_KEY] = self._began.pop(p)
            average = state[_KEY] if state else self._began.get(p)
            if due and average is not None:
                self._move(average, p, number, step)

    def _move(self, average: torch.Tensor, parameter: nn.Parameter, number: int, step: int) -> None:
        if average.dtype == torch.bfloat16:
            self._move_rounded(average, parameter, rounding_key(_SEED, number, step))
        else:
            average.lerp_(parameter.detach().to(average.dtype), self._rate)

    def _move_rounded(self, average: torch.Tensor, parameter: nn.Parameter, key: int) -> None:
        """Move an average in bfloat16, whatever its ranks hold of it."""
        first, count = rows_here(parameter, type(self._optimizer).__name__)
        if not count:
            return  # of a matrix with fewer rows than ranks
        into, weight = (local(each).view(count, -1) for each in (average, parameter))
        at_once = max(1, _AT_ONCE // max(1, into.shape[1]))
        for begin in range(0, count, at_once):
            rows = slice(begin, begin + at_once)
            exact = into[rows].float().lerp_(weight[rows].float(), self._rate).contiguous()
            round_stochastically_(into[rows], exact, first_row=first + begin, key=key)

    @contextmanager
    def exchanged(self, model: nn.Module) -> Iterator[None]:
        """Exchange the weights for their averages in the block; then they are back to the bit."""
        free_gathered(model)
        self._exchange()
        try:
            yield
        finally:
            free_gathered(model)
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for p in self._parameters:
            average = self._optimizer.state.get(p, {}).get(_KEY, self._began.get(p))
            if average is not None:
                before = p.detach().clone()
                p.copy_(average)
                average.copy_(before)
        # An autocast that is open would go on with its casts of the former weights.
        torch.clear_autocast_cache()


def _configuration(model: nn.Module) -> dict[str, Any]:
    """Return what a model's forward depends on in evaluation, beside its weights."""

    def read(found: dict[str, Any]) -> dict[str, Any]:
        kept = {key: value for key, value in found.items() if not _INERT.search(str(key))}
        return {key: read(value) if isinstance(value, dict) else value for key, value in kept.items()}

    config: Any = getattr(causal_model(model), "config", None)
    return {} if config is None else read(config.to_dict())


def _words_of_code(model: nn.Module) -> set[str]:
    """Return every word in the source of a model, its configuration and what models share.

    An entry of config.json that is none of them, such as another library's version, is read by nothing.
    """
    causal = causal_model(model)
    kinds = {kind for module in causal.modules() for kind in type(module).__mro__}
    kinds |= set(type(getattr(causal, "config", None)).__mro__)
    shared = (
        name for name in sys.modules if re.match(r"transformers\.(modeling|masking|configuration|integrations|cache)", name)
    )
    names = {kind.__module__ for kind in kinds} | set(shared)
    words: set[str] = set()
    for name in names:
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is not None and file.endswith(".py"):
            words.update(re.findall(r"\w+", Path(file).read_text(encoding="utf-8")))
    return words


def _kept(found: dict[str, Any], words: set[str]) -> dict[str, Any]:
    """Return the entries of a configuration that are among the words, in nested ones too."""
    kept = {key: value for key, value in found.items() if str(key) in words}
    return {key: _kept(value, words) if isinstance(value, dict) else value for key, value in kept.items()}


def _layout(weight: torch.Tensor) -> str:
    """Describe a weight's shape, and how ranks divide it."""
    divided = f" as {weight.placements} over {weight.device_mesh}" if isinstance(weight, DTensor) else ""
    return f"{tuple(weight.shape)}{divided}"
