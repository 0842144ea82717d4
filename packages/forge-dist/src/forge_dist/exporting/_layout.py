"""A model, whole or divided → what its export will hold: names, shapes and types, known before one tensor is put together.

Everything is asked of tensors on the meta device, which have no data, so every rank can compute it for itself.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import torch

from forge_dist.exporting._dtype import stored_dtype
from forge_dist.exporting._plain import left

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Whole = Iterator[tuple[str, torch.Tensor | None]]
"""What `Strategy.whole` gives."""

_LAYER = re.compile(r".*?\.\d+(?=\.)")


@attrs.frozen(kw_only=True, eq=False)
class Layout:
    """What an export holds, and which tensors of the model it is made of."""

    files: dict[str, torch.Tensor]
    """Name in the files → tensor on the meta device, in the order in which transformers divides them into files."""

    sources: dict[str, torch.Tensor]
    """Name in the model's state → tensor on the meta device, in the type that the export holds; tied weights once."""

    aliases: dict[str, str]
    """Every name of a tensor in the model's state → the one of its names that `sources` has."""

    blocks: dict[str, tuple[str, ...]]
    """Each name in `sources` → the names, itself among them, that an architecture's internal layout needs together to be turned back."""


def layout_of(model: "PreTrainedModel", dtype: torch.dtype | None, without: Sequence[str] = ()) -> Layout:
    """The layout of an export of `model` as `dtype` (None: as it is in memory), without the modules `without`.

    Raises:
        ValueError: a tensor is on the meta device: its data is elsewhere.
        RuntimeError: tensors share memory in a way that no safetensors file can hold.
    """
    stored, owners = stored_dtype(model, dtype), owners_of(model)
    state = {}
    for name, tensor in left(model.state_dict(), without).items():
        if tensor.is_meta:
            raise ValueError(f"the tensor {name} is offloaded (meta device); load the model whole to export it")
        # ZeRO-3 leaves empty tensors behind, and notes on them what they were.
        owner: Any = owners[name]
        shape = owner.ds_shape if hasattr(owner, "ds_shape") else tensor.shape
        state[name] = torch.empty(shape, dtype=stored(name, tensor), device="meta")
    sources = kept_once(model, state)
    chosen = {id(owners[name]): name for name in sources}
    aliases = {name: chosen[id(owners[name])] for name in state if id(owners[name]) in chosen}
    files = as_stored(model, sources)
    return Layout(files=files, sources=sources, aliases=aliases, blocks=_blocks(model, sources, files))


def owners_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Name → parameter or buffer itself, so that tied weights are one object under several names; a state holds copies of their handles."""
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))


def kept_once(model: "PreTrainedModel", state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`state` without what the architecture leaves out of its files, and tied weights once, under the name that loading expects."""
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    return remove_tied_weights_from_state_dict({name: t for name, t in state.items() if name not in ignored}, model)


def as_stored(model: "PreTrainedModel", state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`state` with an architecture's internal layout (experts in one tensor, for example) turned back into that of its files."""
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, state)


def _blocks(
    model: "PreTrainedModel", sources: dict[str, torch.Tensor], files: Mapping[str, torch.Tensor]
) -> dict[str, tuple[str, ...]]:
    """The finest of three divisions that gives the files the whole does: tensor by tensor, layer by layer, all together."""
    ways: tuple[Callable[[str], str], ...] = (str, _layer)
    for way in ways:
        members: dict[str, list[str]] = {}
        for name in sources:
            members.setdefault(way(name), []).append(name)
        found: dict[str, torch.Tensor] = {}
        try:
            for names in members.values():
                found |= as_stored(model, {name: sources[name] for name in names})
        except (ValueError, RuntimeError, KeyError, IndexError, TypeError):
            continue  # a conversion that misses its other parts
        if _described(found) == _described(files):
            return {name: tuple(names) for names in members.values() for name in names}
    return dict.fromkeys(sources, tuple(sources))


def _layer(name: str) -> str:
    found = _LAYER.match(name)
    return found.group() if found else name


def _described(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


def first_names(model: torch.nn.Module) -> dict[str, str]:
    """Every name in the model's state → the first name of the same tensor, under which `Strategy.whole` gives it."""
    owners = owners_of(model)
    first: dict[int, str] = {}
    # What bitsandbytes notes beside a weight in 4 bits is in the state, and neither parameter nor buffer.
    return {name: first.setdefault(id(owners.get(name, name)), name) for name in model.state_dict()}


def in_file_layout(model: "PreTrainedModel", layout: Layout, tensors: Whole) -> Iterator[tuple[str, torch.Tensor]]:
    """(name in the files, tensor) on rank 0, of what `whole` gives, held no longer than an architecture's conversion needs it.

    Floats have the type that the layout says.
    """
    held: dict[str, torch.Tensor] = {}
    for given, tensor in tensors:
        name = layout.aliases.get(given)
        if name is None or tensor is None:
            continue
        held[name] = tensor.to(layout.sources[name].dtype)
        del tensor  # or it would stay while the next one is put together
        block = layout.blocks[name]
        if all(member in held for member in block):
            yield from _emptied(as_stored(model, {member: held.pop(member) for member in block}))
    if held:
        raise ValueError(f"a tensor that belongs with {min(held)} never came")


def _emptied(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    for name in list(tensors):
        yield name, tensors.pop(name)
