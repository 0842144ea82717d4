"""Rows whose documents have images → the arguments of a forward.

What a processor makes of an image (pixels, grids, token types) is given to the forward beside the tokens that stand for it.
A row is given to the model as a plain forward gives it one document, unless the model was shown to keep the documents of such
a row apart (`isolation.pack_media`).
"""

import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from forge_algos._errors import PackedBatchError
from forge_algos._modules import causal_model, language_modules
from forge_algos.batches._copies import to_device

MediaInputs = Mapping[str, NDArray[Any]]
"""Arguments of a forward for one document beside its ids, as a processor gives them for one text.
Of each token ([1, S]), or of all its images; {} for a document without images."""
Way = Literal["bounds", "positions", "lines"]
"""How a model is told where the documents of a row with images begin: by boundaries and positions, by positions alone, or by
lines of their own, padded on the right under a mask."""
LINES = "media_lines"
"""Argument of a row that is to be laid out in lines: the names of the arrays of its tokens. It is no argument of a model."""

_packed: WeakKeyDictionary[nn.Module, Way] = WeakKeyDictionary()
"""Causal model that keeps the documents of a row with images apart → how it is told where they begin."""

_texts_alike: WeakSet[nn.Module] = WeakSet()
"""Causal models that rows of text alone are laid out for as rows with media are."""


def packs_media(model: nn.Module) -> Way | None:
    """Return how rows with images may hold several documents; None: they hold one."""
    return _packed.get(causal_model(model))


def pack_media_like(model: nn.Module, other: nn.Module) -> None:
    """Have `model` take rows with images as `other` does, a model of the same kind."""
    set_packed(model, _packed.get(causal_model(other)))
    lay_texts_alike(model, alike=causal_model(other) in _texts_alike)


def set_packed(model: nn.Module, way: Way | None) -> None:
    """Let later rows with images hold several documents, or one each (None)."""
    if way is None:
        _packed.pop(causal_model(model), None)
    else:
        _packed[causal_model(model)] = way


def lay_texts_alike(model: nn.Module, *, alike: bool) -> None:
    """Lay out rows of text alone as rows with media.

    For a model that runs their documents alone otherwise: there ranks agree on how many forwards they make, and a rank whose
    row has media makes one without asking the others.
    """
    (_texts_alike.add if alike else _texts_alike.discard)(causal_model(model))


def with_media(model: nn.Module, row: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Add a row's images, if it has some, to a forward's arguments.

    Args:
        model: bare or wrapped.
        row: `media_inputs()` gives for each document, or each completion with its prompt, what a processor does.
        inputs: those of the same row without images.

    Raises:
        PackedBatchError: as `media_row_inputs`, or completions that share prompts.
    """
    media = getattr(row, "media_inputs", None)
    if media is None and inputs.get("kv_rows") is None and (causal := causal_model(model)) in _texts_alike:
        several = len(row.cu_seqlens) - 1
        media = (lambda: [{}] * several) if several == 1 or causal in _packed else None
    if media is None:
        return inputs
    if inputs.get("kv_rows") is not None:
        raise PackedBatchError(
            "a row with media has completions that share a prompt (kv_rows), whose tokens may stand for others: collate "
            "with share_prompt=False and share_prefix=False"
        )
    boundaries = np.asarray(row.cu_seqlens).tolist()
    ids, on_host = inputs["input_ids"][0], np.asarray(row.input_ids)
    return media_row_inputs(model, ids, boundaries, media(), packed=inputs, on_host=on_host)


def media_row_inputs(
    model: nn.Module,
    ids: torch.Tensor,
    boundaries: Sequence[int],
    documents: Sequence[MediaInputs],
    *,
    packed: Mapping[str, Any],
    on_host: NDArray[Any] | None = None,
) -> dict[str, Any]:
    """Build the forward's arguments for one row whose documents have images.

    Args:
        model: bare or wrapped.
        ids: int64[T], on the device.
        boundaries: where documents begin, and T.
        documents: of each document the arguments that a processor gives.
        packed: the arguments of the same row without images, `packed_inputs`; {} for a prompt, of which the model finds the
            positions itself.
        on_host: the same ids, so that nothing is read back from the device.

    Raises:
        PackedBatchError: several documents for a model that was not shown to keep them apart, or arrays that fit no row.
    """
    if len(documents) != len(boundaries) - 1:
        raise PackedBatchError(
            f"media_inputs must give one mapping for each of {len(boundaries) - 1} documents, got {len(documents)}"
        )
    dtype = _pixel_dtype(model)
    own_ids = ids.cpu() if on_host is None else torch.tensor(on_host, dtype=torch.int64)
    if len(documents) == 1:
        inputs = {"input_ids": ids[None], "use_cache": False}
        if packed and any(not is_of_tokens(name, array, len(ids)) for name, array in documents[0].items()):
            positions = _positions(model, own_ids, [len(ids)], documents)
            # Some models (Qwen-Omni) count images in two dimensions only where they are given a mask.
            inputs |= {} if positions is None else {"position_ids": positions[1:].to(ids.device, non_blocking=True)}
        return inputs | {name: _on(ids.device, array, dtype) for name, array in documents[0].items()}
    way = _packed.get(causal_model(model))
    if way is None:
        raise PackedBatchError(
            f"a row of {len(documents)} documents has media, and {type(causal_model(model)).__name__} was not shown to keep "
            "such documents apart: give each a row of its own, or call forge_algos.pack_media first"
        )
    lengths = np.diff(boundaries).tolist()
    joined = _joined(documents, lengths)
    arrays = {name: _on(ids.device, array, dtype) for name, array in joined.items()}
    if way == "lines":
        of_tokens = tuple(name for name, array in joined.items() if is_of_tokens(name, array, len(ids)))
        return {**packed, **arrays, LINES: of_tokens}
    positions = _positions(model, own_ids, lengths, documents)
    inputs = dict(packed) if way == "bounds" else {name: packed[name] for name in ("input_ids", "position_ids", "use_cache")}
    if positions is not None:
        inputs["position_ids"] = positions.to(ids.device, non_blocking=True)
    return inputs | arrays


def line_inputs(
    model: nn.Module, documents: Sequence[MediaInputs], lengths: Sequence[int], device: torch.device
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Build a forward's arguments for the images of documents in lines, padded on the left.

    Returns:
        tuple: those of tokens, [B, width] with zeros at padding, and those of images.

    Raises:
        PackedBatchError: arrays of unlike sizes.
    """
    dtype, width = _pixel_dtype(model), max(lengths)
    of_tokens: dict[str, torch.Tensor] = {}
    of_media: dict[str, torch.Tensor] = {}
    for name, array in _joined(documents, lengths).items():
        if is_of_tokens(name, array, sum(lengths)):
            lines = np.zeros((len(lengths), width), array.dtype)
            for line, values in zip(lines, np.split(array[0], np.cumsum(lengths)[:-1]), strict=True):
                line[width - len(values) :] = values
            of_tokens[name] = _on(device, lines, dtype)
        else:
            of_media[name] = _on(device, array, dtype)
    return of_tokens, of_media


def continued(media: MediaInputs, prompt: int, length: int) -> dict[str, NDArray[Any]]:
    """Return a prompt's arguments for the prompt with a completion, of `length` tokens.

    Of the tokens behind those of the prompt none stands for an image. They see the images that its last one sees.
    """
    more = (0, 0), (0, length - prompt)
    return {
        name: np.pad(array, more)
        if is_of_tokens(name, array, prompt)
        else np.pad(array, (*more, *((0, 0),) * (array.ndim - 2)), mode="edge")
        if is_seen(array, prompt)
        else array
        for name, array in media.items()
    }


def is_of_tokens(name: str, array: NDArray[Any], length: int) -> bool:
    """Return whether an array says of each of `length` tokens what it is a part of.

    Such are the `mm_token_type_ids` and `token_type_ids` of processors. By its shape alone a mask of as many frames of a clip
    would be one.
    """
    return name.endswith("token_type_ids") and array.shape == (1, length)


def is_seen(array: NDArray[Any], length: int) -> bool:
    """Return whether an array says which images each of `length` tokens sees.

    So does Mllama's `cross_attention_mask` [1, S, I, tiles]. An array of images has fewer of them than tokens: for each stands
    one at least.
    """
    return array.ndim > 2 and array.dtype.kind in "iub" and array.shape[:2] == (1, length)


def _joined(documents: Sequence[MediaInputs], lengths: Sequence[int]) -> dict[str, NDArray[Any]]:
    """Join the arguments of all documents: of tokens along them, of images behind each other."""
    joined: dict[str, NDArray[Any]] = {}
    for name in dict.fromkeys(name for document in documents for name in document):
        given = [document.get(name) for document in documents]
        if all(each is None or is_of_tokens(name, each, length) for each, length in zip(given, lengths, strict=True)):
            dtype = next(each.dtype for each in given if each is not None)
            parts = [np.zeros((1, n), dtype) if each is None else each for each, n in zip(given, lengths, strict=True)]
            joined[name] = np.concatenate(parts, axis=1)
            continue
        parts = [each for each in given if each is not None]
        if any(part.shape[1:] != parts[0].shape[1:] for part in parts):
            shapes = ", ".join(str(list(part.shape)) for part in parts)
            raise PackedBatchError(
                f"media_inputs {name} of the row's documents are of unlike sizes, {shapes}: give each a row of its own"
            )
        joined[name] = np.concatenate(parts)
    return joined


def _positions(
    model: nn.Module, ids: torch.Tensor, lengths: Sequence[int], documents: Sequence[MediaInputs]
) -> torch.Tensor | None:
    """Return positions int64[4, 1, T] of a model that counts images in two dimensions.

    None where it counts tokens. The first are those of the text, by which documents are told apart; the others are the model's
    own of each document.
    """
    body: Any = causal_model(model).base_model
    if not callable(of_document := getattr(body, "get_rope_index", None)):
        return None
    names = inspect.signature(of_document).parameters
    found, start = [], 0
    for length, given in zip(lengths, documents, strict=True):
        own = ids[start : start + length][None]
        start += length
        text = torch.arange(length)[None, None]
        if not given:
            found.append(text.expand(4, 1, length))
            continue
        try:
            made: Any = of_document(input_ids=own, **_of_positions(names, given, own))
            positions = made[0].to(torch.int64)
        except Exception as error:
            # Qwen-Omni looks for a clip behind each mark of one, and a sampled completion may have a mark.
            known = own[0, : _stop_of_media(body, own[0])][None]
            if known.shape == own.shape:
                raise PackedBatchError(
                    f"{type(body).__name__} counts no positions of a document with media: {error}"
                ) from error
            again: Any = of_document(input_ids=known, **_of_positions(names, given, known))
            before = again[0].to(torch.int64)
            behind = before.max() + 1 + torch.arange(length - known.shape[1])
            positions = torch.cat([before, behind.expand(3, 1, -1)], dim=-1)
        found.append(torch.cat([text, positions]))
    return torch.cat(found, dim=-1)


def _stop_of_media(body: Any, ids: torch.Tensor) -> int:
    """Return the place behind the last token of media and its closing mark: text follows."""
    kinds = [getattr(body.config, f"{kind}_token_id", None) for kind in ("image", "video", "audio")]
    places = torch.isin(ids, torch.tensor([kind for kind in kinds if kind is not None], dtype=ids.dtype)).nonzero()
    return min(len(ids), int(places[-1]) + 2) if len(places) else len(ids)


def _of_positions(names: Collection[str], media: MediaInputs, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return those of the arguments `names` that tokens [B, S] with media have."""
    found = {name: torch.as_tensor(array) for name, array in media.items() if name in names}
    if "audio_seqlens" in names and (heard := media.get("feature_attention_mask")) is not None:
        # Of clips beside images: a forward counts them so itself (Qwen-Omni).
        found["audio_seqlens"] = torch.as_tensor(heard).sum(dim=1)
    if "second_per_grids" in names and (seconds := media.get("video_second_per_grid")) is not None:
        found["second_per_grids"] = torch.as_tensor(seconds)
    if "attention_mask" in names:
        found["attention_mask"] = torch.ones_like(ids)
    return found


def go_by_lines(model: nn.Module, ids: torch.Tensor, media: MediaInputs) -> bool:
    """Return whether a model's positions of a document's images depend on the lines before it.

    HunYuan-VL of transformers 5.24 counts images through a batch. What this changes may be less than rounding in few digits.

    Args:
        model: bare or wrapped.
        ids: int64[S], on the host.
        media: of the document.
    """
    body: Any = causal_model(model).base_model
    if not media or not callable(of_lines := getattr(body, "get_rope_index", None)):
        return False
    twice, two = {name: np.concatenate([array] * 2) for name, array in media.items()}, ids[None].expand(2, -1)
    arguments = _of_positions(inspect.signature(of_lines).parameters, twice, two)
    positions: Any = of_lines(input_ids=two, **arguments)
    return not torch.equal(positions[0][:, 0], positions[0][:, 1])


_pixel_dtypes: WeakKeyDictionary[nn.Module, torch.dtype] = WeakKeyDictionary()
"""Causal model → dtype of what computes on pixels."""


def _pixel_dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype of what computes on pixels: the model's part beside the language."""
    causal = causal_model(model)
    if (known := _pixel_dtypes.get(causal)) is None:
        language = language_modules(model)
        others = (module for module in causal.modules() if module not in language)
        weights = (weight for module in others for weight in module.parameters(recurse=False) if weight.is_floating_point())
        known = next((weight.dtype for weight in weights), torch.float32)
        _pixel_dtypes[causal] = known
    return known


def _on(device: torch.device, array: NDArray[Any], dtype: torch.dtype) -> torch.Tensor:
    # Seconds of videos and the like are no pixels.
    floats = array.dtype.kind == "f" and array.ndim > 1
    return to_device(array, device, dtype if floats else torch.from_numpy(array[:0]).dtype)
