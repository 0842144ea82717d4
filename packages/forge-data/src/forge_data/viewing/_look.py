"""Files of the package → the style and the scripts of a page."""

from importlib import resources


def page_look() -> tuple[str, str]:
    """Return the style and the script that all pages share.

    The script is that of the button for dark and light.

    >>> [len(part) > 100 for part in page_look()]
    [True, True]
    """
    return page_file("look.css"), page_file("theme.js")


def page_file(name: str) -> str:
    """Read a style, a script or a template of the token page."""
    return (resources.files("forge_data") / "viewing" / "page" / name).read_text(encoding="utf-8")
