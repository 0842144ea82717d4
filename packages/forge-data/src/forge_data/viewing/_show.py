"""A store to what a person sees of it: tokens, what is learned of them, whose they are, and what was left out."""

import itertools
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, cast

from forge_data._errors import StoreError
from forge_data._paths import at_home
from forge_data.store._manifest import PROMPTS, holds_prompts
from forge_data.viewing._prompts import prompt_lines
from forge_data.viewing._terminal import lines, visible
from forge_data.viewing._view import chosen_indices, views

if TYPE_CHECKING:
    from forge_data.store._prompt_store import PromptStore
    from forge_data.store._token_store import TokenStore

ON_SCREEN = 5
ON_PAGE = 200
_LISTED = 10
"""How many dropped rows and findings a terminal lists before it only counts."""


def show(
    store: "TokenStore | PromptStore | str | os.PathLike[str]",
    indices: int | slice | Iterable[int] | None = None,
    *,
    html: str | os.PathLike[str] | None = None,
) -> Path | None:
    """What is trained on, read from the store's arrays; nothing is tokenised again.

    On the terminal learned tokens are coloured and underlined (⟦marked⟧ where there is no colour), roles stand at the left,
    blanks and special tokens are visible, and what was dropped is said with its reason. `html` writes the same as one
    page that needs no network.

    Args:
        store: a token store, a store of prompts, or its directory.
        indices: which samples: a number, a slice, or numbers; the first few (5, or 200 on a page) by default.
        html: the page's file. None writes to the terminal.

    Returns:
        The page's path, if there is one.

    Raises:
        StoreError: no store there, or the page cannot be written; of prompts there is none.
        DataError: a sample that the store does not have.
    """
    if isinstance(store, (str, os.PathLike)):
        store = opened(store)
    if html is not None:
        if store.kind == PROMPTS:
            raise StoreError(f"{store.path} is a store of prompts, of which there is no page; show them without html")
        from forge_data.viewing._page import write_page

        return write_page(cast("TokenStore", store), chosen_indices(store, indices, ON_PAGE), at_home(html, StoreError))
    chosen = chosen_indices(store, indices, ON_SCREEN)
    for line in text_of(store, chosen, colour=wants_colour(sys.stdout), width=shutil.get_terminal_size((100, 24)).columns):
        write_line(sys.stdout, line)
    return None


def opened(directory: str | os.PathLike[str]) -> "TokenStore | PromptStore":
    """The store of a directory, whichever of the two it is.

    Raises:
        StoreError: there is none.
    """
    from forge_data.store._prompt_store import PromptStore
    from forge_data.store._token_store import TokenStore

    return PromptStore.open(directory) if holds_prompts(at_home(directory, StoreError)) else TokenStore.open(directory)


def text_of(store: "TokenStore | PromptStore", indices: list[int], *, colour: bool, width: int) -> Iterator[str]:
    """The lines that `show` writes: samples, then findings on them, dropped rows, and the arrays' SHA-256."""
    yield from _legend(colour)
    if store.kind == PROMPTS:
        yield from prompt_lines(cast("PromptStore", store), indices, colour=colour, width=width)
    else:
        yield from _samples(cast("TokenStore", store), indices, colour=colour, width=width)
    yield ""
    yield str(store.accounting)
    yield from _dropped(store)
    yield ""
    for name, digest in store.sha256.items():
        yield f"sha256 {digest} {name}"


def wants_colour(stream: TextIO) -> bool:
    """On a terminal, unless NO_COLOR says otherwise or it cannot; FORCE_COLOR has it everywhere (no-color.org, force-color.org)."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def write_line(stream: TextIO, line: str) -> None:
    """One line; a letter that the stream's encoding lacks is escaped, never an error."""
    encoding = stream.encoding or "utf-8"
    stream.write(line.encode(encoding, "backslashreplace").decode(encoding) + "\n")


def plain(text: str) -> str:
    """Words from a file, safe on one line of a terminal."""
    return "".join(letter if letter == " " else shown for letter in text for shown, _ in visible(letter))


def _legend(colour: bool) -> Iterator[str]:
    learned = "\x1b[4;38;5;32mlearned\x1b[0m" if colour else "⟦learned⟧"
    special = "\x1b[7mspecial token\x1b[0m" if colour else "⟪special token⟫"
    yield f"{learned}  {special}  · blank  ↵ new line  ⇥ tab"


def _samples(store: "TokenStore", indices: list[int], *, colour: bool, width: int) -> Iterator[str]:
    places = set()
    for view in views(store, indices):
        places.add(view.place)
        yield ""
        yield from lines(view, colour=colour, width=width)
    yield from _findings(store, places)


def _findings(store: "TokenStore", places: set[str]) -> Iterator[str]:
    here = [finding for finding in store.lint.findings if finding.place in places]
    if here:
        yield ""
    for finding in here[:_LISTED]:
        yield plain(f"{finding.severity} {finding.rule}: {finding}")
    if len(here) > _LISTED:
        yield f"and {len(here) - _LISTED:,} more findings on these rows"


def _dropped(store: "TokenStore | PromptStore") -> Iterator[str]:
    for row in itertools.islice(store.dropped(), _LISTED):
        length = f", {row['tokens']:,} tokens" if row.get("tokens") else ""
        yield plain(f"  {row['place']} {row['reason']}{length}")
    left = sum(store.accounting.dropped.values()) - _LISTED
    if left > 0:
        yield f"  and {left:,} more, in {store.path.name}/dropped.jsonl"
