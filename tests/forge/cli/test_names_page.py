"""The page of other libraries' names is the one that the table gives."""

from __future__ import annotations

from pathlib import Path

from forge.cli._names_page import names_page

ROOT = Path(__file__).resolve().parents[3]


def test_the_page_is_up_to_date() -> None:
    """docs/names.md is what `hatch run names` writes."""
    assert (ROOT / "docs" / "names.md").read_text() == names_page()
