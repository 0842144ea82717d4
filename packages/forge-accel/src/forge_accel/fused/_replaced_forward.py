"""Replacement of one module's forward, which its hooks run around as before."""

from __future__ import annotations

from types import MethodType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn


class ReplacedForward:
    """Forward of one module in place of its class's, with no effect on names of parameters.

    It stands in the module's own attribute `forward`, so hooks (which gather weights, for instance) run around it. A deep copy
    of the module, and one that was pickled, compute by their class's forward again.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """Class's own forward of the module, whose signature this has."""
        return MethodType(type(self.module).forward, self.module)

    def install(self) -> None:
        """Put this in place of the module's forward."""
        self.module.forward = self

    def remove(self) -> None:
        """Give the module its class's forward back."""
        if vars(self.module).get("forward") is self:
            del self.module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute what the module's own forward does."""
        return type(self.module).forward(self.module, *args, **kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[nn.Module, str]]:
        return getattr, (self.module, "forward")


def may_replace(module: nn.Module) -> bool:
    """Return whether a module computes by its class's forward, and nobody else replaced it."""
    own = vars(module).get("forward")
    # A copy of a module whose forward was replaced has its class's as an attribute.
    return own is None or own == MethodType(type(module).forward, module)
