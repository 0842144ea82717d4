"""Template files of this package and values → text; in HTML and SVG every value is escaped."""

from __future__ import annotations

from functools import cache

import jinja2


@cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.PackageLoader("forge", "."),
        autoescape=jinja2.select_autoescape(("html", "svg")),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def render(template: str, **values: object) -> str:
    """Render a template, such as `reports/pages/osft.html`; a value that it names must be given."""
    return _environment().get_template(template).render(values)
