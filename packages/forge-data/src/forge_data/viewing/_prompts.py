"""Prompts → lines for a terminal: the tokens of each, and the row's other fields."""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from forge_data.viewing._terminal import lines, visible
from forge_data.viewing._token_text import TokenTexts, characters
from forge_data.viewing._view import Segment, View, stored_tokenizer

if TYPE_CHECKING:
    from forge_data.store._prompt_store import Prompt, PromptStore


def prompt_lines(store: "PromptStore", indices: list[int], *, colour: bool, width: int) -> Iterator[str]:
    """Write each prompt with its place, and its further fields as JSON, a line each."""
    texts = TokenTexts(stored_tokenizer(store))
    for index in indices:
        prompt = store[index]
        head, *body = lines(_view(texts, index, store.source(index), prompt), colour=colour, width=width)
        yield ""
        yield head.replace(f"sample {index}", f"prompt {index}").replace(", 0 learned (0%)", "")
        yield from body
        for name, value in prompt.columns.items():
            text = json.dumps(value, ensure_ascii=False)
            yield "".join(letter if letter == " " else shown for letter in f"  {name}: {text}" for shown, _ in visible(letter))


def _view(texts: TokenTexts, index: int, place: str, prompt: "Prompt") -> View:
    ids = prompt.input_ids.tolist()
    pieces = texts.of(ids)
    shown, inside = characters(pieces)
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
    )
