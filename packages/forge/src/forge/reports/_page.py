"""Template, styles, scripts and data → one HTML page that needs no network.

The page has a policy that the browser enforces: nothing is loaded, and only the style and the script whose hashes are in the
policy are used. Values are escaped by the template, so no text of a run can do anything but be read.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jinja2

import forge_data
import forge_dist
from forge._errors import ForgeError, SettingsError
from forge._templates import render, source

_FOLDER = "reports/pages/"
PLOTS = ("language.js", "vendor/uPlot.iife.min.js", "plots.js")
"""Scripts of a page with charts."""


def page(
    template: str, *, styles: Sequence[str] = (), scripts: Sequence[str] = (), data: dict[str, Any] | None = None, **values: Any
) -> str:
    """Render a page.

    Args:
        template: in reports/pages/, extends base.html.
        styles: files there, beside what all pages share.
        scripts: files there that run after the button for dark and light.
        data: what the scripts read, as JSON.
        values: of the template.

    """
    look, theme = forge_data.page_look()
    style = "".join((look, *(source(_FOLDER + name) for name in ("reports.css", *styles))))
    script = '"use strict";\n' + "\n".join((*(source(_FOLDER + name) for name in scripts), theme))
    text = render(
        f"{_FOLDER}{template}",
        style=style,
        style_hash=_hash(style),
        script=script,
        script_hash=_hash(script),
        data=data,
        **values,
    )
    return text.encode(errors="replace").decode()  # JSON may hold half of a pair of surrogates, which no file can


@contextmanager
def reading(*runs: Path) -> Iterator[None]:
    """Turn what a page meets in damaged files into an error that names the run.

    Raises:
        SettingsError: a file of a run holds what no run writes.

    """
    try:
        yield
    except ForgeError:
        raise
    except (TypeError, ValueError, ArithmeticError, AttributeError, LookupError, jinja2.TemplateError) as error:
        raise SettingsError(
            f"{', '.join(map(str, runs))}: a JSON file there holds what no run writes ({error}). Put the run's own back."
        ) from error


def write_page(file: Path, text: str, setting: str) -> Path:
    """Write a page at once or not at all. Raises SettingsError that names the setting."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        forge_dist.write_text_atomically(file, text)
    except (OSError, forge_dist.ForgeDistError) as error:
        said = str(error).removeprefix(f"{file} cannot be written: ")
        raise SettingsError(f"{setting}={file}: cannot be written: {said}. Give another path.") from error
    return file


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
