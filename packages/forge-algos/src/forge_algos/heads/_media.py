"""Tests whether a model keeps the documents of a packed row with media apart.

As for rows of text, nothing about an architecture is assumed: two documents of the run's own data are run packed and alone.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.autograd.graph import get_gradient_edge

from forge_algos._errors import PackedBatchError
from forge_algos._modules import attention_of, causal_model, embeddings, language_modules, mode
from forge_algos.batches._media import (
    MediaInputs,
    Way,
    go_by_lines,
    is_of_tokens,
    is_seen,
    lay_texts_alike,
    media_row_inputs,
    set_packed,
)
from forge_algos.batches._packed import packed_inputs
from forge_algos.heads._layout import lay_out
from forge_algos.isolation._alone import runs_alone
from forge_algos.isolation._compare import REFUSALS, Compare, decides
from forge_algos.isolation._isolation import batch_hidden_states, made_up_lengths, run_test, with_and_without_autocast


class MediaDocument(NamedTuple):
    """A document with images."""

    input_ids: Any
    """int[S]."""
    inputs: MediaInputs
    """What a processor makes of its images."""
    spans: Sequence[tuple[int, int]]
    """Tokens [start, stop) that stand for each image."""
    marks: tuple[tuple[str, int], ...] = ()
    """Arguments with a number for each token, and that of a text without images, where it is not 0."""


def pack_media(
    model: nn.Module,
    documents: Sequence[MediaDocument],
    *,
    device: torch.device,
    packing: bool = True,
    join: Callable[[Sequence[MediaInputs]], Sequence[MediaInputs]] = list,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> tuple[Way | None, str]:
    """Have `model` take rows of several documents with images, if it keeps such documents apart.

    Two documents in one row, with documents of text before and between them, must come out as in plain forwards of their own,
    the second whatever the first is. Those of text are there since images at the same places of two documents hide a model that
    looks for the second's where the first has them. More words are put before both, so that they are longer than the windows of
    the model's configuration (up to 160 tokens). Where they do not, documents in lines of their own are tried, padded under a
    mask; not with a mixture of experts, whose routers would count the padding.

    Args:
        model: bare or wrapped; where it is divided over ranks, every rank calls this with the same documents.
        documents: two with images or audio; each further one, of another kind of media, is run behind the first.
        device: where test rows go.
        packing: whether rows may be packed; lines alone are tried otherwise.
        join: makes the arrays of a row's documents alike in size, as rows will have them; alone a document has its own.
        autocast: makes the context that forwards run in; it is tried without, too.

    Returns:
        tuple: how rows may hold several documents with images ("bounds" and "positions": packed, "lines": padded) or None, and
            the reason.
    """
    what, problem = type(causal_model(model)).__name__, "" if packing else "not to be packed"
    least, more = made_up_lengths(model)
    first, *others = documents
    before = longer(first, max(least - len(first.input_ids), 0) + 3)
    pairs = [(before, longer(second, max(more - len(second.input_ids), 0))) for second in others]
    ways: tuple[Way, ...] = (*(("bounds", "positions") if packing else ()), *(() if has_experts(model) else ("lines",)))
    lay_texts_alike(model, alike=False)
    for way in ways:
        if way == "lines" and go_by_lines(model, torch.as_tensor(np.asarray(first.input_ids, np.int64)), first.inputs):
            problem += ("; " if problem else "") + "in lines, positions go by the images of the lines before"
            continue
        set_packed(model, way)
        test = with_and_without_autocast(partial(_problems, pairs=pairs, join=join), autocast)
        try:
            with mode(model, training=False), torch.no_grad():
                found = test(model, device) or ""
        except torch.OutOfMemoryError:
            raise
        except (*REFUSALS, PackedBatchError) as error:
            found = f"it cannot run them: {error}"
        if not found:
            lay_texts_alike(model, alike=way != "bounds" and runs_alone(model))
            how = "in lines of their own, padded" if way == "lines" else "in a row"
            return way, f"{what} keeps documents with media apart {how}{f' ({problem})' if problem and way == 'lines' else ''}"
        problem = problem or f"packed, {found}"
    set_packed(model, None)
    lay_texts_alike(model, alike=runs_alone(model))
    return None, f"{what} does not keep documents with media apart in a row: {problem}"


def require_media(
    model: nn.Module,
    document: MediaDocument,
    *,
    device: torch.device,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> None:
    """Raise unless a model sees the images of a document; arguments as of `pack_media`.

    A model of text may take pixels as an argument and pass over them. So with other pixels it has to compute something else.

    Raises:
        PackedBatchError: it does not, it cannot run the document, or its configuration does not tell the language from the rest
            (Phi-4 multimodal), so that a vision tower would train unasked.
    """
    what = type(causal_model(model)).__name__

    def problem_of(model: nn.Module, device: torch.device) -> str | None:
        # No constant, which a model that standardizes its pixels would take off again. Zeros and ones are a mask (Phi-4).
        floats = {
            name: array + np.resize(np.array([1, -1, 2], array.dtype), array.shape)
            for name, array in document.inputs.items()
            if array.dtype.kind == "f" and not np.isin(array, (0, 1)).all()
        }
        other = document._replace(inputs={**document.inputs, **floats})
        with Compare(model, decides(model)) as compare:
            seen = [_alone(model, each, device) for each in (document, other)]
            if floats and not compare.holds(lambda: not torch.equal(*seen)):
                return "sees no images and hears no audio: other pixels or samples change nothing of what it computes"
        return None

    _require(model, what, with_and_without_autocast(problem_of, autocast), device, "Take a model of text and of these")
    if len(language_modules(model)) == len({*causal_model(model).modules()}):
        raise PackedBatchError(
            f"{what} computes images within its language model, and names no part for them that could stay frozen. Take a "
            "model whose configuration has a text_config of its own"
        )


def has_experts(model: nn.Module) -> bool:
    """Return whether a model is a mixture of experts."""
    return any(name.endswith("experts") for name, _ in causal_model(model).named_modules())


def require_image_attention(
    model: nn.Module,
    document: MediaDocument,
    *,
    device: torch.device,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> None:
    """Raise unless attention of our own computes a document with images as eager does.

    Some models (Gemma 3, PaliGemma) let the tokens of an image see each other, which a mask says and only attention that reads
    masks computes. So the later tokens of an image are changed: the earlier ones may not change with them. What comes out is
    compared with eager attention's too.

    Args:
        model: bare or wrapped, with an attention function that was registered; where it is divided over ranks, every rank calls
            this with the same document.
        document: with images.
        device: where test rows go.
        autocast: makes the context that forwards run in; it is tried without, too.

    Raises:
        PackedBatchError: it does not.
    """
    causal, own = causal_model(model), attention_of(causal_model(model))
    what = f"{type(causal).__name__} with attention {own!r}"

    def problem_of(model: nn.Module, device: torch.device) -> str | None:
        ours = cache(partial(_alone, model, document, device))
        with Compare(model, decides(model)) as compare:
            set_attention(causal, "eager")
            try:
                plain = _alone(model, document, device)
                with _changed_token(model, document) as earlier:
                    changed = _alone(model, document, device)
            finally:
                set_attention(causal, own)
            moved = bool(earlier) and bool((changed - plain)[list(earlier)].abs().max() > 1e-3 * plain.abs().max())
            if not compare.holds(lambda: not moved):
                return "lets the tokens of an image or a clip see those behind them, and this attention is causal"
            if not compare.equal(ours, lambda: plain):
                return "computes a document with media otherwise than eager attention does"
        return None

    _require(model, what, with_and_without_autocast(problem_of, autocast), device, "Use attention=sdpa or eager")


def _require(
    model: nn.Module, what: str, test: Callable[[nn.Module, torch.device], str | None], device: torch.device, remedy: str
) -> None:
    """Raise PackedBatchError where a test with images finds a problem, or cannot run."""
    problem, refusal = run_test(test, model, device)
    if refusal is not None:
        raise PackedBatchError(
            f"{what} cannot run a document with media: {refusal}. They may be too short or too small for it: take such rows out"
        ) from refusal
    if problem:
        raise PackedBatchError(f"{what} {problem}. {remedy}")


def unreached_by_media(
    model: nn.Module,
    document: MediaDocument,
    *,
    device: torch.device,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> list[str]:
    """Return names of trained weights beside the language part that no image or clip reaches.

    LLaVA reads a layer before the last one of its tower, whose last layers and pooling head are of no use then. A forward is
    made, and its graph is followed.

    Args:
        model: bare; where it is divided over ranks, every rank calls this with the same document.
        document: with images.
        device: where it goes.
        autocast: makes the context of the forward.
    """
    language, layer = language_modules(model), embeddings(model)
    places = {
        f"{name}.{own}".lstrip("."): (module, own)
        for name, module in model.named_modules()
        if module not in language
        for own, parameter in module.named_parameters(recurse=False)
        if parameter.requires_grad
    }
    if layer is None or not places:
        return []
    edges: dict[str, Any] = {}

    def note(*_: Any) -> None:
        # By name and within the forward, as `_idle_parts`: ranks may have put gathered weights in these places.
        edges.update({name: get_gradient_edge(getattr(module, own)).node for name, (module, own) in places.items()})

    with mode(model, training=False), torch.enable_grad(), autocast(), layer.register_forward_hook(note):
        hidden = _alone(model, document, device)
    # By the graph alone: a backward pass would need weights that ranks have divided again.
    seen, following = set[Any](), [hidden.grad_fn]
    while following:
        if (node := following.pop()) is not None and node not in seen:
            seen.add(node)
            following += [before for before, _ in node.next_functions]
    return [name for name, node in edges.items() if node not in seen]


def _alone(model: nn.Module, document: MediaDocument, device: torch.device) -> torch.Tensor:
    return run_documents(model, [_on(device, document)], [document.inputs])


def _on(device: torch.device, document: MediaDocument) -> torch.Tensor:
    return torch.tensor(np.asarray(document.input_ids), dtype=torch.int64, device=device)


def set_attention(causal: Any, name: str | None) -> None:
    """Set the attention of the language part, and the one that a model names as a whole."""
    config = causal.config
    text = config.get_text_config()
    own = {key: name for key in config.sub_configs if getattr(config, key, None) is text}
    causal.set_attn_implementation({"": name, **own})


@contextmanager
def _changed_token(model: nn.Module, document: MediaDocument) -> Iterator[range]:
    """Turn the signs of the first image's later tokens inside the block; yield its first ones."""
    first, stop = document.spans[0]
    middle = (first + stop) // 2

    def change(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = kwargs.get("inputs_embeds")
        if given is None:
            raise PackedBatchError("its language part is given no embeddings")
        changed = given.clone()
        changed[:, middle:stop] *= -1
        return args, {**kwargs, "inputs_embeds": changed}

    causal: Any = causal_model(model)
    handle = causal.get_decoder().register_forward_pre_hook(change, with_kwargs=True)
    try:
        yield range(first, middle)
    finally:
        handle.remove()


def longer(document: MediaDocument, more: int) -> MediaDocument:
    """Put as many words before a document, which are its own."""
    ids = np.asarray(document.input_ids)
    words = np.resize(ids[words_of(document)], more)
    inputs = {
        name: np.pad(array, ((0, 0), (more, 0), *((0, 0),) * (array.ndim - 2)))
        if is_of_tokens(name, array, len(ids)) or is_seen(array, len(ids))
        else array
        for name, array in document.inputs.items()
    }
    spans = [(start + more, stop + more) for start, stop in document.spans]
    return document._replace(input_ids=np.concatenate([words, ids]), inputs=inputs, spans=spans)


def words_of(document: MediaDocument) -> NDArray[np.bool_]:
    """Return bool[S], false for tokens that stand for media, or mark them.

    By marks without an image or a clip some models (Qwen3-Omni) cannot count positions. What stands beside a medium may be one.
    """
    ids, plain = np.asarray(document.input_ids), _plain_tokens(document)
    beside = [ids[at] for span in document.spans for at in (span[0] - 1, span[1]) if 0 <= at < len(ids)]
    words = plain & ~np.isin(ids, beside)
    return words if words.any() else plain


def _plain_tokens(document: MediaDocument) -> NDArray[np.bool_]:
    plain = np.ones(len(document.input_ids), dtype=np.bool_)
    for start, stop in document.spans:
        plain[start:stop] = False
    return plain


def _media_places(document: MediaDocument) -> list[int]:
    """Return the tokens that are parts of images, without marks around them where that is known."""
    ids = np.asarray(document.input_ids)
    kinds = [array[0] for name, array in document.inputs.items() if is_of_tokens(name, array, len(ids)) and array.any()]
    inside = ~_plain_tokens(document) & (kinds[0] != 0 if kinds else True)
    return np.flatnonzero(inside).tolist()


def _problems(
    model: nn.Module,
    device: torch.device,
    *,
    pairs: Sequence[tuple[MediaDocument, MediaDocument]],
    join: Callable[[Sequence[MediaInputs]], Sequence[MediaInputs]],
) -> str | None:
    return next(filter(None, (_problem(model, pair, device, join) for pair in pairs)), None)


def _problem(
    model: nn.Module,
    documents: Sequence[MediaDocument],
    device: torch.device,
    join: Callable[[Sequence[MediaInputs]], Sequence[MediaInputs]],
) -> str | None:
    first = _on(device, documents[0])
    words = torch.tensor(words_of(documents[0]), device=device)
    # Other words before the same images.
    changed = first.clone()
    changed[words] = first[words].roll(1)
    plain = first[words].cpu().numpy()
    marks = {name: np.full((1, len(plain)), number, np.int64) for name, number in documents[0].marks}
    text = MediaDocument(plain, marks, ())
    row = [text, documents[0], text, documents[1]]
    ids, media = [_on(device, each) for each in row], join([each.inputs for each in row])
    ends = np.cumsum([0, *map(len, ids)]).tolist()
    places = [list(range(start, stop)) for start, stop in pairwise(ends)]

    packed = cache(partial(run_documents, model, ids, media))
    with Compare(model, decides(model)) as compare:
        for at, name in ((1, "the first of two"), (3, "the second of two"), (2, "text between two")):
            alone, inside = cache(partial(_plain_forward, model, row[at], device)), _media_places(row[at])
            # In few digits half of the tokens may differ by more: those of images, where a leak shows, by themselves too.
            if not compare.equal(lambda at=at: packed()[places[at]], alone) or (
                inside
                and not compare.equal(
                    lambda at=at, inside=inside: packed()[places[at]][inside],
                    lambda alone=alone, inside=inside: alone()[inside],
                )
            ):
                return f"{name} comes out otherwise than alone"
        other = partial(run_documents, model, [ids[0], changed, *ids[2:]], media)
        if not compare.equal(lambda: packed()[places[3]], lambda: other()[places[3]]):
            return "the second of two changes with the first"
    return None


def _plain_forward(model: nn.Module, document: MediaDocument, device: torch.device) -> torch.Tensor:
    """Run a document as transformers' processor gives it to a model: with a mask, no positions."""
    ids = _on(device, document)
    inputs = media_row_inputs(model, ids, (0, len(ids)), [document.inputs], packed={})
    return batch_hidden_states(model, inputs | {"attention_mask": torch.ones_like(ids)[None]})[0]


def run_documents(model: nn.Module, documents: Sequence[torch.Tensor], media: Sequence[MediaInputs]) -> torch.Tensor:
    """Run documents in one row; returns hidden states (or logits) float[T, D]."""
    lengths = [len(document) for document in documents]
    ids, boundaries = torch.cat(list(documents)), [0, *np.cumsum(lengths).tolist()]
    positions = torch.cat([torch.arange(length) for length in lengths]).to(ids.device)
    packed = packed_inputs(ids, positions, torch.tensor(boundaries), max(lengths))
    layout = lay_out(model, media_row_inputs(model, ids, boundaries, media, packed=packed))
    return layout.packed(batch_hidden_states(model, layout.inputs))[0]
