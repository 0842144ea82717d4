"""What a run holds of a model → what a plain model holds in its place, where an adaptation keeps its changes beside the weights."""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import nn

from forge_dist.exporting._plain import is_added
from forge_dist.strategies.zero._parameters import whole_beside

Plain = Callable[[str, torch.Tensor], torch.Tensor]
"""(name in the model's state, the whole tensor there) → the tensor of a plain model, in the same dtype; the tensor itself where nothing differs."""


def made_plain(plain: Plain | None, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """`plain(name, tensor)`, without gradients; the tensor itself where there is no `plain`.

    Raises:
        ValueError: the shape or the dtype is another one.
    """
    if plain is None:
        return tensor
    with torch.no_grad():
        made = plain(name, tensor).detach()
    if made.shape != tensor.shape or made.dtype != tensor.dtype:
        raise ValueError(
            f"plain gives {made.dtype} {list(made.shape)} for {name}, which is {tensor.dtype} {list(tensor.shape)}: a plain "
            "model holds the same"
        )
    return made


def plain_tensors(
    model: nn.Module, tensors: Iterable[tuple[str, torch.Tensor | None]], plain: Plain | None, without: Sequence[str]
) -> Iterator[tuple[str, torch.Tensor | None]]:
    """The `tensors` that `Strategy.whole` gives of `model`, plain, and none of the modules `without`; collective as they are.

    What `plain` raises on rank 0 is raised at the end: until then the other ranks take part.
    """
    failed: Exception | None = None
    for name, whole in tensors:
        if is_added(name, without):
            continue
        given = whole
        if plain is not None:
            with whole_beside(model, name, without):
                try:
                    given = None if whole is None or failed is not None else made_plain(plain, name, whole)
                except Exception as error:  # noqa: BLE001  raised below
                    failed, given = error, None
        yield name, given
        del given, whole  # or they would stay while the next one is put together
    if failed is not None:
        raise failed
