"""Help texts and docs/settings.md are generated from the settings classes."""

from __future__ import annotations

from pathlib import Path

import pytest

from forge.cli._options import field_texts
from forge.cli._settings_page import settings_page
from forge.settings._settings import flat_fields, groups
from forge.verbs._registry import VERBS, task_of

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("name", VERBS)
def test_every_setting_is_explained(name: str) -> None:
    """Help has a sentence for every option, taken from the docstring under the field."""
    settings = task_of(name).settings
    for group, field in flat_fields(settings):
        assert len(field_texts(groups(settings)[group])[field.name]) > 10, field.name


def test_the_page_is_current() -> None:
    """docs/settings.md is what `hatch run settings` writes."""
    assert (ROOT / "docs" / "settings.md").read_text() == settings_page()
