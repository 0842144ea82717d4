"""The words that explain the settings come from the settings."""

from __future__ import annotations

from pathlib import Path

from forge._reference import field_texts, settings_page
from forge._settings import SFTSettings, flat_fields, groups

ROOT = Path(__file__).resolve().parents[2]


def test_every_setting_is_explained() -> None:
    """Help has a sentence for every option, taken from the docstring under the field."""
    for group, field in flat_fields(SFTSettings):
        assert len(field_texts(groups(SFTSettings)[group])[field.name]) > 10, field.name


def test_the_page_is_current() -> None:
    """docs/settings.md is what `hatch run docs` writes."""
    assert (ROOT / "docs" / "settings.md").read_text() == settings_page()
