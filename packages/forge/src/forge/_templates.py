"""Template files of this package and values → text; in HTML and SVG every value is escaped."""

from __future__ import annotations

import math
import re
from functools import cache
from importlib import resources
from typing import Any, cast

import jinja2

from forge._counted import counted

_CONTROLS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f\u202a-\u202e\u2066-\u2069]")


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("forge", "."),
        autoescape=jinja2.select_autoescape(("html", "svg")),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    # `tojson` escapes what could end a script element; NaN, which JSON lacks, is an error instead of a page that does not run.
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    environment.filters["visible"] = visible
    environment.filters["counted"] = cast("Any", counted)
    environment.filters["duration"] = duration
    environment.filters["size"] = size
    environment.filters["number"] = number
    return environment


def render(template: str, **values: object) -> str:
    """Render a template, such as `reports/pages/osft.html`; a value that it names must be given."""
    return _environment().get_template(template).render(values)


def source(name: str) -> str:
    """Read a file of this package that is part of pages as it is: a style or a script."""
    return (resources.files("forge") / name).read_text(encoding="utf-8")


def visible(text: str) -> str:
    r"""Write characters that control a screen, or turn a text's direction, as their numbers.

    >>> print(visible("a\x1b[2J\u202eb\n"), end="")
    a⟨U+001B⟩[2J⟨U+202E⟩b
    """
    return _CONTROLS.sub(lambda found: f"⟨U+{ord(found[0]):04X}⟩", text)


def duration(seconds: float) -> str:
    """Write a time as `2 h 05 min`, `3 min 10 s` or `4.2 s`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def size(count: float) -> str:
    """Write bytes as `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:,.4g} TiB"


def figure(value: float | None, name: str) -> str:
    """Write a figure of metrics.jsonl: memory as a size, anything else as a number."""
    return size(value) if name == "memory" and value is not None and math.isfinite(value) else number(value)


def number(value: float | None) -> str:
    """Write a figure in five digits; a dash for none."""
    if value is None or not math.isfinite(value):
        return "–"
    return (
        f"{value:,}" if isinstance(value, int) else f"{value:,.5g}" if 1e-4 <= abs(value) < 1e7 or not value else f"{value:.3e}"
    )
