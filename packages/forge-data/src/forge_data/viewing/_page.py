"""Store and indices → one HTML page that needs no network, and no colour to be read.

The page has a policy that the browser enforces: nothing is loaded, and only the script whose hash is in the policy runs. So no
token text, however hostile, can do anything but be read.
"""

import base64
import hashlib
import os
import re
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, cast

from forge_data._errors import StoreError
from forge_data.store._manifest import PROMPTS
from forge_data.viewing._look import page_file
from forge_data.viewing._page_data import as_script, page_data
from forge_data.viewing._page_summary import details, figures, lede, safe
from forge_data.viewing._prompts import prompt_views, view_lines
from forge_data.viewing._terminal import lines
from forge_data.viewing._view import View, views

if TYPE_CHECKING:
    from forge_data.store._prompt_store import PromptStore
    from forge_data.store._token_store import TokenStore

_STYLES = ("look.css", "page.css")
_SCRIPTS = ("data.js", "samples.js", "filters.js", "inspect.js", "start.js", "theme.js")
_SLOT = re.compile("@([a-z]+)@")
_PLAIN_TOKENS = 50_000
"""Tokens that a page without scripts shows as plain text."""


def write_page(store: "TokenStore | PromptStore", indices: list[int], path: Path) -> Path:
    """Write the page; a file that is there already is replaced when the new one is complete.

    Raises:
        StoreError: the store is damaged, or the page cannot be written.
    """
    if not path.name or store.path.resolve() in path.resolve().parents:
        raise StoreError(f"the page {str(path)!r} cannot be written: it must be a file, and outside of the store {store.path}")
    store.verify()
    text = page(store, indices)
    partial = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            partial.write_text(text, encoding="utf-8", newline="\n")
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise StoreError(f"the page {path} cannot be written: {error.strerror or error}; give another path") from error
    return path


def page(store: "TokenStore | PromptStore", indices: list[int]) -> str:
    """Make the text of the page."""
    prompts = store.kind == PROMPTS
    shown = list(prompt_views(cast("PromptStore", store), indices) if prompts else views(cast("TokenStore", store), indices))
    places = {view.place for view in shown}
    findings = [] if prompts else [finding for finding in cast("TokenStore", store).lint.findings if finding.place in places]
    data = page_data(shown, findings, "prompt" if prompts else "sample")
    style = "".join(page_file(name) for name in _STYLES)
    script = '"use strict";(() => {\n' + "\n".join(page_file(name) for name in _SCRIPTS) + "})();\n"
    slots = {
        "policy": (
            f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; img-src data:; "
            "base-uri 'none'; form-action 'none'"
        ),
        "name": safe(_name(store.path.resolve())),
        "title": "prompts" if prompts else "tokens and labels",
        "style": style,
        "lede": safe(lede(store, indices)),
        "figures": figures(store),
        "details": details(store, places),
        "plain": safe(_plain(shown)),
        "data": as_script(data),
        "script": script,
    }
    # One pass, so that the name of a slot inside a text stays text.
    return _SLOT.sub(lambda found: slots.get(found[1], found[0]), page_file("page.html"))


def _name(path: Path) -> str:
    """Name a store by its directory; one in the data/ of a run by the run too."""
    run = path.parents[1].name if path.parent.name == "data" else ""
    return f"{run}: {path.name}" if run else path.name or "store"


def _plain(shown: list[View]) -> str:
    text, tokens = [], 0
    for view in shown:
        tokens += len(view.ids)
        if tokens > _PLAIN_TOKENS and text:
            text.append("The other samples need scripts; so do folding and filters.")
            break
        write = view_lines if view.segments[0].role == "prompt" else lines
        text += [*write(view, colour=False, width=100), ""]
    return "\n".join(text)


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
