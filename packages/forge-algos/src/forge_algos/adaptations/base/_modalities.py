"""Parts of a model of several modalities that an adaptation is for."""

from typing import NamedTuple

from torch import nn

from forge_algos._modules import language_modules


class Parts(NamedTuple):
    """Parts of a model of several modalities in which targets are looked for."""

    language: bool = True
    """Whether the language part is one; of a model of text alone, the model."""
    beside: tuple[str, ...] = ()
    """Full names of modules beside it, such as those of a vision tower."""

    def modules(self, model: nn.Module) -> set[nn.Module]:
        """Return the modules of these parts."""
        found = language_modules(model) if self.language else set()
        named = dict(model.named_modules())
        return found.union(*(named[name].modules() for name in self.beside if name in named))


LANGUAGE = Parts()
