"""Model and rows with images, videos or audio → how many documents a row holds, and how."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import attrs
import numpy as np

import forge_algos
import forge_data
from forge._errors import SettingsError
from forge.settings._backends import FORGE
from forge.settings._settings import row_tokens
from forge.tasks._parts import check_any_media, chosen_parts
from forge.tasks._reward_model import check_reward_media
from forge.tasks.items._items import VIRTUAL, padding
from forge.tasks.items._media import media_names
from forge.tasks.items._media_tokens import check_texts_beside_media
from forge.tasks.items._own_answers import OwnAnswers
from forge.tasks.items._pairs import LoneAnswers, Pairs
from forge.tasks.items._prompts import Prompts
from forge.tasks.items._samples import Conversations, Samples
from forge.tasks.items._text_pairs import TextPairs, texts_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from forge._progress import Reporter
    from forge.tasks._task import Run
    from forge.tasks.items._media import MediaRows

_TRIED = 64
"""Samples with media, of each part, that are looked at for two to test a model on."""
_TRIED_KINDS = 1024
"""As many where rows have media of several kinds."""


def has_media(*stores: Any) -> bool:
    """Return whether samples of token stores have media."""
    return any(getattr(store, "has_media", False) for store in stores if store is not None)


def media_join(s: Any, *stores: Any) -> bool:
    """Return whether the processor allows for several samples with media of stores in a forward."""
    return media_inputs(s).joins_of({kind for store in stores for kind in getattr(store, "media_kinds", ())})


def check_media(s: Any, *stores: Any) -> None:
    """Refuse settings with which rows with images cannot be trained.

    Raises:
        SettingsError: the one that stands against them, and what to do.
    """
    check_any_media(s, stores[0])
    if not has_media(*stores):
        return
    what = media_names(*stores)
    if any(store.kind == "preference" for store in stores if store is not None) and not media_join(s, *stores):
        raise SettingsError(
            f"pairs of answers with {what}: the processor of this model makes arrays that are not joined, or joined in a way "
            "of its own, so that it is given one sample at a time, and the two answers of a pair are computed together. Learn "
            "the chosen answers with sft, or take another model."
        )
    if s.backend.backend != FORGE:
        raise SettingsError(
            f"backend={s.backend.backend} and rows with {what}: it trains on text alone. Leave backend out, or take the "
            f"{what} out."
        )
    if s.adapter.adapter in VIRTUAL:
        raise SettingsError(
            f"adapter={s.adapter.adapter} and rows with {what}: virtual tokens move their places. Use adapter=lora."
        )
    if s.strategy.cp_size > 1:
        raise SettingsError(
            f"cp_size={s.strategy.cp_size} and rows with {what}: ranks cannot share such a row. Leave cp_size out."
        )


def one_text_at_a_time(store: forge_data.PromptStore, why: str) -> str:
    """Say that a model takes one text with images a forward, and what to do."""
    return (
        f"queries and documents with {media_names(store)}: {why}, so that it is given one text at a time, and the texts of a "
        "row are computed together. Take another model, or texts with labels (loss=batch_all_triplet)."
    )


def check_media_texts(s: Any, *stores: Any) -> None:
    """Refuse rows without images that have a token of one, beside rows with images.

    The lint stops them too, where it is on.

    Raises:
        forge_data.DataError: the first such row.
    """
    if has_media(*stores):
        check_texts_beside_media(media_inputs(s).token_ids, *stores)


def check_marks(s: Any, report: Reporter, *stores: Any) -> None:
    """Refuse, or warn of, what stands for media in texts without any that no lint looks at.

    Of a model that takes media a token of one is refused. A mark (`<image>`) is learned as letters, and may be meant so: HTML
    has elements of these names.

    Raises:
        forge_data.DataError: the first text with such a token.
    """
    given = [store for store in stores if store is not None]
    try:
        inputs = media_inputs(s)
    except forge_data.TokenizerError:
        return  # a model of text, to which all of this is letters
    of_template = given[0].tokenizer().convert_tokens_to_ids([*inputs.placeholders])
    unknown = (None, given[0].tokenizer().unk_token_id)
    check_texts_beside_media({*inputs.token_ids, *(each for each in of_template if each not in unknown)}, *given)
    for kind in inputs.kinds:
        mark = f"<{kind}>"
        for store in given:
            if (row := store.first_with(mark)) is not None:
                report.note(
                    f"WARNING: {store.source(row)}: has {mark} in its text and no {kind} in the row, so that the model reads "
                    f"the letters. Give the row a column of {kind}s (one under another name: rename_columns), or take the "
                    "mark out."
                )
                break


def check_prompt_media(s: Any, report: Reporter, *stores: Any) -> None:
    """Refuse settings with which prompts with images cannot be answered and rewarded.

    Raises:
        SettingsError: the one that stands against them, and what to do.
        forge_data.DataError: as of `check_marks`.
    """
    check_marks(s, report, *stores)
    if not has_media(*stores):
        return
    check_media(s, *stores)
    own = s.objective
    if media_inputs(s).marks:
        raise SettingsError(
            f"prompts with {media_names(*stores)}: this model's prompt sees what is ahead of it, and its completions do not "
            "(PaliGemma), which is not sampled here while training. Train it on answers: forge sft, distill, dpo or kto."
        )
    _check_plain_prompts(own, *stores)
    if getattr(own, "sampler", "transformers") != "transformers":
        if own.sampler == "sglang" and any("video" in store.media_kinds for store in stores if store is not None):
            raise SettingsError(
                f"sampler=sglang and prompts with {media_names(*stores)}: it is not known here how SGLang takes frames that "
                "the model's processor chooses. Take sampler=vllm, or leave sampler out."
            )
        if s.parts.beside:
            _check_served_parts(s)
    if getattr(own, "reward_model_path", None) is not None:
        check_reward_media(own.reward_model_path, *stores)


def _check_plain_prompts(own: Any, *stores: Any) -> None:
    """Refuse plain text with media for a server or a reward model, which take conversations."""
    sampler, rewards = getattr(own, "sampler", "transformers"), getattr(own, "reward_model_path", None)
    if sampler == "transformers" and rewards is None:
        return
    for store in stores:
        rows = store.media_counts[:, 0].nonzero()[0].tolist() if has_media(store) else ()
        if (plain := next((row for row in rows if isinstance(store[row].prompt, str)), None)) is not None:
            which = f"sampler={sampler}" if rewards is None else f"reward_model_path {rewards}"
            raise SettingsError(
                f"{which} and {store.source(plain)}: its prompt is plain text with {media_names(store)}, and conversations "
                f"alone are given to it with them. Make prompts lists of messages, or leave "
                f"{which.partition('=')[0].partition(' ')[0]} out."
            )


def _check_served_parts(s: Any) -> None:
    """Refuse a server that would compute media by another tower or projector than the trained."""
    sampler, chosen = s.objective.sampler, chosen_parts(s)
    if s.adapter.adapter != "none":
        raise SettingsError(
            f"{chosen} with adapter={s.adapter.adapter} and sampler={sampler}: servers load adapters of the language part "
            "alone. Leave it out, or leave sampler out."
        )
    if sampler == "sglang":
        raise SettingsError(
            f"{chosen} and sampler=sglang: SGLang keeps what its former weights made of an image or a clip. Leave it out, or "
            "take sampler=vllm, or leave sampler out."
        )


def media_documents(s: Any, tokenizer: Any, *parts: Any) -> list[forge_algos.MediaDocument]:
    """Return documents with media on which rows are tried.

    They are two, one or none, and one of each further mixture of kinds; short ones. Where arrays are padded to the
    largest, the first has the least tokens of media and the others have the most that fit into a row: what a model makes of
    padding is seen there, if anywhere.
    """
    given = [items for items in parts if items is not None]
    stores = [items.store for items in given]
    if not has_media(*stores):
        return []
    inputs, found = media_inputs(s, tokenizer), []
    key = inputs, *((str(store.path), store.fingerprint) for store in stores)
    if key in _tried:
        return _tried[key]
    for items, store in zip(given, stores, strict=True):
        if has_media(store):
            tried = _TRIED if len(store.media_kinds) == 1 else _TRIED_KINDS
            with_some = store.media_counts[:, 0].nonzero()[0]
            by_size = with_some[np.argsort(store.media_counts[with_some, 1], kind="stable")]
            rows = dict.fromkeys([*with_some[:tried].tolist(), *by_size[[0, -1]].tolist()])
            found += [text for row in rows for text in _texts(items, row)]
    found += _of_other_kinds([sample for sample, _ in found], given)
    found.sort(key=lambda each: len(each[0].input_ids))
    # One with most kinds, as each other one is tried beside it.
    first = min(found, key=lambda each: (-len(_mixture(each)), _size(each) if inputs.pads else 0))
    if inputs.pads:
        room = row_tokens(s) - 3 * len(first[0].input_ids)  # its words stand before both, too
        found.sort(key=lambda each: -_size(each) if len(each[0].input_ids) <= room else len(each[0].input_ids))
    others = {_mixture(each): each for each in reversed(found) if each is not first}
    chosen = [first, *sorted(others.values(), key=lambda each: _mixture(each) != _mixture(first))]
    _tried.clear()
    _tried[key] = [
        forge_algos.MediaDocument(
            sample.input_ids, inputs(sample, place), [(each.start, each.stop) for each in sample.media], inputs.marks
        )
        for sample, place in chosen
    ]
    return _tried[key]


def _size(found: tuple[Any, str]) -> int:
    """Count the tokens that stand for media of a sample."""
    return sum(medium.stop - medium.start for medium in found[0].media)


def _mixture(found: tuple[Any, str]) -> frozenset[str]:
    """Return the kinds of media of a sample."""
    return frozenset(medium.kind for medium in found[0].media)


def _texts(items: Any, row: int) -> list[tuple[Any, str]]:
    """Return what of a row with media is computed by itself, and its source.

    That is a sample, or those of its texts that have media.
    """
    sample, place = items.store[row], items.store.source(row)
    return [(each, place) for each in (texts_of(sample) if isinstance(items, TextPairs) else [sample]) if each.media]


def _of_other_kinds(known: Sequence[Any], parts: Sequence[Any]) -> list[tuple[Any, str]]:
    """Return samples, and sources, with the kinds of media that the known ones have not."""
    kinds, found = {each.kind for sample in known for each in sample.media}, []
    for items in parts:
        store = items.store
        rows = iter(store.media_counts[:, 0].nonzero()[0].tolist() if has_media(store) else ())
        while not kinds.issuperset(store.media_kinds) and (row := next(rows, None)) is not None:
            for each in _texts(items, row):
                if own := {medium.kind for medium in each[0].media} - kinds:
                    found.append(each)
                    kinds |= own
    return found


_tried: dict[Any, list[forge_algos.MediaDocument]] = {}
"""Processor and stores of this process's run → the documents, which are asked for twice."""
_known: dict[str, tuple[Any, forge_data.MediaInputs]] = {}
"""Model path of this process's run → its tokenizer, and what makes the arguments of its images; loading it takes seconds."""


def media_inputs(s: Any, tokenizer: Any = None) -> forge_data.MediaInputs:
    """Return what makes the arguments of images, with `tokenizer`, or with whichever there is."""
    path = s.model.model_path
    known, inputs = _known.get(path, (None, None))
    if inputs is None or (known is not None and tokenizer is not None and known is not tokenizer):
        _known.clear()
        inputs = forge_data.MediaInputs(path, tokenizer=tokenizer)
    elif known is None and tokenizer is not None:
        inputs = inputs.using(tokenizer)
    _known[path] = known if tokenizer is None else tokenizer, inputs
    return inputs


def pads_media(s: Any, tokenizer: Any) -> bool:
    """Return whether the arrays of images that share a micro-batch are padded to the largest."""
    return media_inputs(s, tokenizer).pads


def single_media(s: Any, tokenizer: Any, items: Samples) -> Samples:
    """Return samples with their images, one a row where some have images: any model takes those."""
    return items.with_media(media_inputs(s, tokenizer), "single") if has_media(items.store) else items


def sampled_media(run: Run) -> forge_algos.online.SampledMedia | None:
    """Return what the sampler must know of a run's images; None where no prompt has any."""
    if not isinstance(run.train, OwnAnswers | Prompts) or run.train.media is None:
        return None
    inputs = media_inputs(run.settings, run.tokenizer)
    return forge_algos.online.SampledMedia(
        documents=media_documents(run.settings, run.tokenizer, run.train, run.held_out),
        token_ids=inputs.token_ids,
        joins=media_join(run.settings, run.train.store, run.held_out and run.held_out.store),
        join=inputs.join,
        join_more=partial(inputs.join, more=True),
    )


class MediaRead(NamedTuple):
    """How the samples of a run are given their images."""

    inputs: forge_data.MediaInputs
    rows: MediaRows
    why: str
    """Why rows are made so."""

    def of(self, items: Any) -> Any:
        """Return items with images read for their rows; others as they are."""
        return items.with_media(self.inputs, self.rows) if hasattr(items, "with_media") else items


def with_media(run: Run) -> Run:
    """Return the run with images read for its rows.

    They are padded, or of one sample each, where the model must have them so. Every rank calls this.
    """
    media = media_of(run)
    if media is None:
        return run
    names = media_names(run.train.store, run.held_out and run.held_out.store)
    run.report.note(f"{names.replace('audio clips', 'audio')}: {_ROWS[media.rows]}: {media.why}")
    return _reading(run, media)


def media_of(run: Run) -> MediaRead | None:
    """Return how the model of a run takes samples with images; None where no sample has any.

    Every rank calls this.

    Raises:
        SettingsError: a setting asks for other rows, or they hold one sample, and items have several.
    """
    documents = media_documents(run.settings, run.tokenizer, run.train, run.held_out)
    if not documents:
        return None
    inputs = media_inputs(run.settings, run.tokenizer)
    rows, why = _rows(run, documents)
    if rows != "packed" and run.settings.packing.packing == "on" and not run.settings.origins["packing"].startswith("chosen"):
        raise SettingsError(f"packing=on: {why}. With packing=auto samples with media are in no packed row.")
    if rows == "single" and any(isinstance(items, Conversations) for items in (run.train, run.held_out)):
        raise SettingsError(
            "turns=auto makes several samples of a row, and this model takes one sample with media in a row; set "
            f"turns=history ({why})"
        )
    if rows == "single" and isinstance(run.train, TextPairs):
        raise SettingsError(one_text_at_a_time(run.train.store, why))
    if rows == "single" and isinstance(run.train, Pairs) and not isinstance(run.train, LoneAnswers):
        raise SettingsError(
            f"pairs of answers with {media_names(run.train.store)}: {why}, and the two answers of a pair are computed "
            "together. Learn the chosen answers with sft, or take another model."
        )
    return MediaRead(inputs, rows, why)


def with_rehearsed_media(run: Any, rows: MediaRows | None) -> Any:
    """Return a run without numbers with images read for its rows.

    Where those are not known, they are packed if any may be. It is a Run, or one as it is planned.
    """
    stores = run.train.store, run.held_out and run.held_out.store
    if not has_media(*stores):
        return run
    alone = "lines" if isinstance(run.train, Pairs | Prompts | TextPairs) else "single"
    inputs = media_inputs(run.settings, run.tokenizer)
    rows = rows or (alone if run.settings.packing.packing == "off" or not media_join(run.settings, *stores) else "packed")
    return _reading(run, MediaRead(inputs, rows, ""))


def _reading(run: Any, media: MediaRead) -> Any:
    read: dict[str, Any] = {"train": media.of(run.train), "held_out": media.of(run.held_out)}
    if isinstance(run.train, Prompts):
        return attrs.evolve(run, **read)  # the plan divides prompts, and rollouts their completions
    padded = padding(run.settings, read["train"]) or {"widths": None}
    return attrs.evolve(run, plan=run.plan.padded(**padded), **read)


_ROWS = {"packed": "several in a row", "lines": "several in a forward, padded", "single": "one sample a row"}


def _rows(run: Run, documents: list[forge_algos.MediaDocument]) -> tuple[MediaRows, str]:
    """Return what rows with images the model takes, and why."""
    if not media_join(run.settings, run.train.store, run.held_out and run.held_out.store):
        forge_algos.lay_texts_alike(run.model, alike=True)
        return "single", "the model's processor makes arrays that are not joined, or joined in a way of its own"
    with run.strategy.computing(run.model):
        way, why = take_media(run.settings, run.model, documents, device=run.device, autocast=run.autocast)
    return "single" if way is None else "lines" if way == "lines" else "packed", why


def take_media(
    s: Any,
    model: Any,
    documents: Sequence[forge_algos.MediaDocument],
    *,
    device: Any,
    autocast: Callable[[], AbstractContextManager[Any]],
) -> tuple[str | None, str]:
    """Have a model take rows of several documents with images: `forge_algos.pack_media`."""
    return forge_algos.pack_media(
        model,
        documents if documents[1:] else [*documents] * 2,
        packing=s.packing.packing != "off",
        join=partial(media_inputs(s).join, more=True),
        device=device,
        autocast=autocast,
    )
