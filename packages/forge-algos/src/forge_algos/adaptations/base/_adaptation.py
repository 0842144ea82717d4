"""Adaptation: base class of what limits which weights of a model move."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import attrs
import torch
from torch import nn

from forge_algos._modules import language_modules
from forge_algos.adaptations.base._modalities import LANGUAGE, Parts
from forge_algos.adaptations.base._parts import numbers_by_part, score
from forge_algos.adaptations.base._unfrozen import freeze_others
from forge_algos.settings._adapter import AdapterSettings


class Ranks(Protocol):
    """Processes that share a model, as far as an adaptation needs them.
    `forge_dist.Ranks` is an implementation.
    """

    @property
    def rank(self) -> int:
        """Number of this process, from 0."""
        ...

    @property
    def world_size(self) -> int:
        """Number of processes."""
        ...

    def barrier(self) -> None:
        """Wait for all processes."""
        ...


class OneRank:
    """A single process."""

    rank = 0
    world_size = 1

    def barrier(self) -> None:
        """Return at once."""


Importance = Callable[[Sequence[str]], dict[str, float]]
"""Names of targets → importance of each, mean 1; see `osft_importance`."""


Directions = Callable[[Mapping[str, int]], Mapping[str, torch.Tensor]]
"""Targets with a rank → float32[rank, M] for each, orthonormal rows; see `eva_directions`."""


Moments = Callable[[Mapping[str, Sequence[str]]], Mapping[str, torch.Tensor]]
"""Name → layers with its weight → the second moment float[M, M] of their inputs; see `osft_moments`. Collective."""


@attrs.frozen(kw_only=True)
class Context:
    """Arguments of `adapt` beside model and settings; each adaptation reads what it needs."""

    cache: Path | None = None
    """Directory of singular vectors (OSFT)."""
    ranks: Ranks = attrs.field(factory=OneRank)
    """Processes that share the model."""
    importance: Importance | None = None
    """Measures the importance of targets (OSFT with osft_rank=adaptive)."""
    moments: Moments | None = None
    """Measures the inputs of targets (OSFT with osft_directions=inputs)."""
    rows: str = ""
    """What the rows that it measures on, and the model, are known by."""
    free: Mapping[str, int] | None = None
    """Free directions of each target, of a run that is resumed (OSFT)."""
    tokenizer_path: str | None = None
    """Tokenizer of the text that virtual tokens are initialised from (adapter=prompt)."""
    directions: Directions | None = None
    """Measures the directions in which the inputs of targets vary (init_lora_weights=eva)."""
    new_tokens: tuple[int, ...] = ()
    """Ids of new tokens, whose rows train beside an adapter of PEFT."""
    parts: Parts = LANGUAGE
    """Parts of a model of several modalities that the adaptation is for."""


class Adaptation:
    """Model of which everything moves; base class of the other adaptations.

    `train` calls `before_step` between a step's last backward pass and the measuring of its gradients, and `after_step` right
    after the optimizer has moved. Both are collective where the model is divided over ranks.
    """

    writes: Literal["model", "adapter"] = "model"
    """Kind of its export: a plain model, or an adapter directory beside its base."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        """The module that is called and trained: the model itself, or PEFT's wrapper around it."""

    @property
    def additions(self) -> Sequence[str]:
        """Names of the modules that it added and that a plain model does not have."""
        return ()

    @property
    def attach(self) -> Callable[[Any, str, str], Any] | None:
        """Function (base, folder, name) that reads its export onto a divided base.
        None where PEFT's own `PeftModel.from_pretrained` does.
        """
        return None

    @property
    def identity(self) -> str:
        """Fingerprint of what its state depends on beside model and settings.
        Singular vectors are an example.

        A full state with another identity is refused.
        """
        return ""

    def describe(self) -> list[str]:
        """Return lines for the log: what trains, by name and number, and what does not.

        The last lines are a table: how many parameters train of each part of the model.
        """
        parts = numbers_by_part(self.model)
        whole = [sum(numbers) for numbers in zip(*parts.values(), strict=True)] or [0, 0]
        rows = [f"  {part:<10} {_share(*numbers)}" for part, numbers in parts.items()]
        return [f"trains {_share(*whole, of='parameters ')}", *rows]

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise OptimizerError where `after_step` could not undo what the optimizer does."""

    def before_step(self) -> None:
        """Remove from the gradients what may not move."""

    def after_step(self) -> None:
        """Remove from the weights what may not have moved."""

    def plain(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor that a plain model holds under a name of `model.state_dict()`.

        Args:
            name: key in the state of the trained model.
            tensor: the whole tensor there, on any device.

        Returns:
            torch.Tensor: `tensor` itself, or where the plain model's differs a new one in its dtype.
        """
        del name
        return tensor

    def plain_state(self) -> dict[str, torch.Tensor]:
        """Return the state of a plain model by name, where one process holds the whole model.

        It is for `model.save_pretrained(folder, state_dict=...)`. With writes="adapter" save the adapter instead, with PEFT's
        own `save_pretrained`.
        """
        own = tuple(f"{name}." for name in self.additions)
        return {name: self.plain(name, tensor) for name, tensor in self.model.state_dict().items() if not name.startswith(own)}


def _share(trained: int, total: int, *, of: str = "") -> str:
    return f"{trained:,} of {total:,} {of}({100 * trained / max(total, 1):.2f} %)"


def train_all(model: nn.Module, settings: AdapterSettings, context: Context) -> Adaptation:
    """Let every parameter train, or those that are named (adapter=none).

    The scoring layer of a reward model or classifier trains in any case, for it begins without meaning.
    """
    if not context.parts.language:
        top = score(model)
        for module in language_modules(model) - ({top} if top is not None else set()):
            for parameter in module.parameters(recurse=False):
                parameter.requires_grad = False
    if settings.unfrozen_parameters is not None:
        freeze_others(model, settings.unfrozen_parameters)
    return Adaptation(model)
