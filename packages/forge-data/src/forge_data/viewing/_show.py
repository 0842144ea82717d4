"""Store → text or page for a person: tokens, what is learned, roles, and what was left out."""

import itertools
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, cast

from forge_data._errors import StoreError
from forge_data._paths import expand_user
from forge_data._values import counted
from forge_data.store._fetch import local_directory
from forge_data.store._manifest import MANIFEST, PROMPTS
from forge_data.viewing._prompts import prompt_lines
from forge_data.viewing._terminal import lines, visible
from forge_data.viewing._view import chosen_indices, held_out_line, views

if TYPE_CHECKING:
    from forge_data.store._prompt_store import PromptStore
    from forge_data.store._token_store import TokenStore

ON_SCREEN = 5
ON_PAGE = 200
_LISTED = 10
"""Dropped rows and findings that a terminal lists; more are only counted."""


def show(
    store: "TokenStore | PromptStore | str | os.PathLike[str]",
    indices: int | slice | Iterable[int] | None = None,
    *,
    html: str | os.PathLike[str] | None = None,
) -> Path | None:
    """Show what is trained on, read from the store's arrays; nothing is tokenised again.

    On the terminal learned tokens are coloured and underlined (⟦marked⟧ where there is no colour), roles are at the left,
    blanks and special tokens are visible, and dropped rows are listed with the reason. `html` writes the same as one page that
    needs no network.

    Args:
        store: a token store, a store of prompts, its directory, or that of a run.
        indices: which samples: a number, a slice, or numbers; the first few (5, or 200 on a page) by default.
        html: file of the page. None writes to the terminal.

    Returns:
        The page's path, if there is one.

    Raises:
        StoreError: no store there, or the page cannot be written.
        DataError: a sample that the store does not have.
    """
    if isinstance(store, (str, os.PathLike)):
        store = opened(store)
    if html is not None:
        from forge_data.viewing._page import write_page

        return write_page(store, chosen_indices(store, indices, ON_PAGE), expand_user(html, StoreError))
    chosen = chosen_indices(store, indices, ON_SCREEN)
    for line in text_of(store, chosen, colour=wants_colour(sys.stdout), width=shutil.get_terminal_size((100, 24)).columns):
        write_line(sys.stdout, line)
    return None


def opened(directory: str | os.PathLike[str]) -> "TokenStore | PromptStore":
    """Open the store in a directory, of samples or of prompts; of a run its training data.

    Raises:
        StoreError: there is none.
    """
    from forge_data.store._open import open_store

    return open_store(store_in(directory))


def store_in(directory: str | os.PathLike[str]) -> Path:
    """Return the directory of the store that a path, a run directory or a URL stands for.

    Raises:
        StoreError: nothing can be fetched from a URL.
    """
    place = local_directory(directory)
    of_run = place / "data" / "train"
    return of_run if (of_run / MANIFEST).is_file() and not (place / MANIFEST).exists() else place


def text_of(store: "TokenStore | PromptStore", indices: list[int], *, colour: bool, width: int) -> Iterator[str]:
    """Write samples, findings on them, and dropped rows, as lines."""
    yield from _legend(colour)
    if store.kind == PROMPTS:
        yield from prompt_lines(cast("PromptStore", store), indices, colour=colour, width=width)
    else:
        yield from _samples(cast("TokenStore", store), indices, colour=colour, width=width)
    yield ""
    yield str(store.accounting)
    yield from filter(None, [held_out_line(store)])
    yield from _dropped(store)
    yield f"fingerprint {store.fingerprint}"


def wants_colour(stream: TextIO) -> bool:
    """Tell whether to use colour: on a terminal, unless NO_COLOR is set or it cannot.

    FORCE_COLOR turns it on everywhere (no-color.org, force-color.org).
    """
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def write_line(stream: TextIO, line: str) -> None:
    """Write one line; a character that the stream's encoding lacks is escaped, never an error."""
    encoding = stream.encoding or "utf-8"
    stream.write(line.encode(encoding, "backslashreplace").decode(encoding) + "\n")


def plain(text: str) -> str:
    """Escape text of a file for one line of a terminal."""
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
        for name, text in zip(("learned here", "as it will be asked"), finding.texts or (), strict=False):
            yield plain(f"  {name}: {text!r}")
    if len(here) > _LISTED:
        yield f"and {counted(len(here) - _LISTED, 'more findings')} on these rows"


def _dropped(store: "TokenStore | PromptStore") -> Iterator[str]:
    for row in itertools.islice(store.dropped(), _LISTED):
        length = f", {counted(row['tokens'], 'tokens')}" if row.get("tokens") else ""
        yield plain(f"  {row['place']} {row['reason']}{length}")
    left = sum(store.accounting.dropped.values()) - _LISTED
    if left > 0:
        yield plain(f"  and {left:,} more, in {store.path.name}/dropped.jsonl")
