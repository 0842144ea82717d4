"""Layout of an export: names, shapes and dtypes, known before a tensor is gathered.

Computed from tensors on the meta device, which have no data, so every rank can do it by itself.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import torch

from forge_dist.exporting._dtype import stored_dtype
from forge_dist.exporting._plain import without_added
from forge_dist.loading._mxfp4 import BLOCKS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WholeTensors = Iterator[tuple[str, torch.Tensor | None]]
"""(name in the model's state, tensor on rank 0), as `Strategy.whole` gives them."""

_LAYER = re.compile(r".*?\.\d+(?=\.)")


@attrs.frozen(kw_only=True, eq=False)
class Layout:
    """Tensors that an export holds, and the tensors of the model that they are made of."""

    files: dict[str, torch.Tensor]
    """Name in the files → tensor on the meta device, in the order in which transformers distributes them over files."""

    sources: dict[str, torch.Tensor]
    """Name in the model's state → tensor on the meta device, in the type that the export holds; tied weights once."""

    aliases: dict[str, str]
    """Every name of a tensor in the model's state → the one of its names that `sources` has."""

    blocks: dict[str, tuple[str, ...]]
    """Name in `sources` → the names, itself included, that are converted to the files' layout together."""

    made: dict[str, tuple[str, ...]]
    """Name in `sources` → the names in `files` that its block becomes."""


def layout_of(model: "PreTrainedModel", dtype: torch.dtype | None, without: Sequence[str] = ()) -> Layout:
    """Return the layout of an export as `dtype` (None: as in memory), without some modules.

    Raises:
        ValueError: a tensor is on the meta device: its data is elsewhere.
        RuntimeError: tensors share memory in a way that no safetensors file can hold.
    """
    stored, owners = stored_dtype(model, dtype), owners_of(model)
    state = {}
    for name, tensor in without_added(model.state_dict(), without).items():
        if tensor.is_meta:
            raise ValueError(f"the tensor {name} is offloaded (meta device); load the model whole to export it")
        # ZeRO-3 leaves empty tensors, with their whole shape as an attribute.
        owner: Any = owners[name]
        shape = owner.ds_shape if hasattr(owner, "ds_shape") else tensor.shape
        state[name] = torch.empty(shape, dtype=stored(name, tensor), device="meta")
    sources = kept_once(model, state)
    chosen = {id(owners[name]): name for name in sources}
    aliases = {name: chosen[id(owners[name])] for name in state if id(owners[name]) in chosen}
    files = as_stored(model, sources)
    blocks, made = _blocks(model, sources, files)
    return Layout(files=files, sources=sources, aliases=aliases, blocks=blocks, made=made)


def owners_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return name → parameter or buffer itself: tied weights are one object under several names.

    The tensors of a state_dict are new objects.
    """
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))


def kept_once(model: "PreTrainedModel", state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return `state` without what the architecture does not save, tied weights once.

    Those are under the name that loading expects.
    """
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    return remove_tied_weights_from_state_dict({name: t for name, t in state.items() if name not in ignored}, model)


def as_stored(model: "PreTrainedModel", state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Convert `state` from the layout in memory (experts in one tensor, say) to that of files."""
    from transformers.core_model_loading import revert_weight_conversion

    # transformers 5.23 would name a dequantized tensor as the MXFP4 blocks that it was read from.
    return {
        plain if (plain := name.removesuffix(BLOCKS)) in state else name: tensor
        for name, tensor in revert_weight_conversion(model, state).items()
    }


def _blocks(
    model: "PreTrainedModel", sources: dict[str, torch.Tensor], files: Mapping[str, torch.Tensor]
) -> tuple[dict[str, tuple[str, ...]], dict[str, tuple[str, ...]]]:
    """Find the smallest blocks that can be converted apart, and what each becomes.

    They are tensors, layers, or all.
    """
    ways: tuple[Callable[[str], str], ...] = (str, _layer)
    for way in ways:
        members: dict[str, list[str]] = {}
        for name in sources:
            members.setdefault(way(name), []).append(name)
        found: dict[str, torch.Tensor] = {}
        made: dict[str, tuple[str, ...]] = {}
        try:
            for names in members.values():
                block = as_stored(model, {name: sources[name] for name in names})
                found |= block
                made |= dict.fromkeys(names, tuple(block))
        except (ValueError, RuntimeError, KeyError, IndexError, TypeError):
            continue  # a conversion that lacks its other tensors
        if _shapes(found) == _shapes(files):
            return {name: tuple(names) for names in members.values() for name in names}, made
    return dict.fromkeys(sources, tuple(sources)), dict.fromkeys(sources, tuple(files))


def _layer(name: str) -> str:
    found = _LAYER.match(name)
    return found.group() if found else name


def _shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


def first_names(model: torch.nn.Module) -> dict[str, str]:
    """Return name in the state → the first name of the same tensor, as in `Strategy.whole`."""
    owners = owners_of(model)
    first: dict[int, str] = {}
    # bitsandbytes' constants beside a quantized weight are in the state, and neither parameter nor buffer.
    return {name: first.setdefault(id(owners.get(name, name)), name) for name in model.state_dict()}


def in_file_layout(model: "PreTrainedModel", layout: Layout, tensors: WholeTensors) -> Iterator[tuple[str, torch.Tensor]]:
    """Convert whole tensors to (name in the files, tensor), on rank 0.

    They are held no longer than the conversion needs them. Floats have the layout's dtype.
    """
    held: dict[str, torch.Tensor] = {}
    for given, tensor in tensors:
        name = layout.aliases.get(given)
        if name is None or tensor is None:
            continue
        held[name] = tensor.to(layout.sources[name].dtype)
        del tensor  # or it would stay while the next one is gathered
        block = layout.blocks[name]
        if all(member in held for member in block):
            yield from _popped(as_stored(model, {member: held.pop(member) for member in block}))
    if held:
        raise ValueError(f"a tensor that belongs with {min(held)} never came")


def _popped(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    for name in list(tensors):
        yield name, tensors.pop(name)
