"""docs/migrating/training-hub.md follows the table."""

from pathlib import Path

from forge.hub._page import renewed
from forge.hub._table import FUNCTIONS

PAGE = Path(__file__).resolve().parents[3] / "docs" / "migrating" / "training-hub.md"


def test_the_page_is_what_the_table_says():
    """Made by `python -m forge.hub._page docs/migrating/training-hub.md`; every parameter is on it."""
    page = PAGE.read_text(encoding="utf-8")
    assert page == renewed(page)
    for name, table in FUNCTIONS.items():
        section = page.partition(f"### `{name}`")[2].partition("\n## ")[0].partition("\n### ")[0]
        assert all(f"`{each.name}`" in section for each in table)
