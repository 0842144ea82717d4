"""Prompts → lines for a terminal: the tokens of each, and the row's other fields."""

import json
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from forge_data.viewing._terminal import lines, visible
from forge_data.viewing._token_text import TokenTexts, characters
from forge_data.viewing._view import Segment, View, show_media, stored_tokenizer

if TYPE_CHECKING:
    from forge_data.store._prompt_store import Prompt, PromptStore


def prompt_lines(store: "PromptStore", indices: list[int], *, colour: bool, width: int) -> Iterator[str]:
    """Write each prompt with its place, and its further fields as JSON, a line each."""
    for view in prompt_views(store, indices):
        yield ""
        yield from view_lines(view, colour=colour, width=width)


def view_lines(view: View, *, colour: bool, width: int) -> Iterator[str]:
    """Write one prompt, and its further fields, a line each."""
    head, *body = lines(view, colour=colour, width=width)
    yield head.replace(f"sample {view.index}", f"prompt {view.index}").replace(", 0 learned (0%)", "")
    yield from body
    for name, text in view.columns:
        yield "".join(letter if letter == " " else shown for letter in f"  {name}: {text}" for shown, _ in visible(letter))


def prompt_views(store: "PromptStore", indices: Iterable[int]) -> Iterator[View]:
    """Make one view a prompt."""
    texts, held_out = TokenTexts(stored_tokenizer(store)), store.held_out
    for index in indices:
        yield _view(texts, index, store.source(index), store[index], held_out=index in held_out)


def _view(texts: TokenTexts, index: int, place: str, prompt: "Prompt", *, held_out: bool) -> View:
    ids = prompt.input_ids.tolist()
    pieces = texts.of(ids)
    shown, inside = characters(pieces)
    show_media(prompt.media, shown, inside)
    return View(
        index=index,
        place=place,
        ids=ids,
        pieces=pieces,
        texts=shown,
        inside=inside,
        learned=np.zeros(len(ids), dtype=np.bool_),
        loss_count=0,
        segments=[Segment(0, len(ids), "prompt")],
        held_out=held_out,
        columns=[(name, json.dumps(value, ensure_ascii=False, default=_size)) for name, value in prompt.columns.items()],
        media=[(medium.start, medium.stop) for medium in prompt.media],
    )


def _size(data: bytes) -> str:
    """Show an image that the row holds."""
    return f"{len(data):,} bytes"
