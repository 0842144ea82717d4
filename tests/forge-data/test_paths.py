"""Home directories of known and unknown users."""

from pathlib import Path

import pytest

import forge_data
from forge_data._errors import StoreError
from forge_data._paths import expand_user

AWAY = "~nouser-of-this-machine/x"


def test_at_home(monkeypatch):
    """`~` is the user's own directory; other paths stay as they are."""
    monkeypatch.setenv("HOME", "/where/i/live")
    assert expand_user("~/a", StoreError) == Path("/where/i/live/a")
    assert expand_user("/a/~b", StoreError) == Path("/a/~b")


def test_nobody(tmp_path):
    """An unknown user is an error of the given class, by name, wherever a store is named."""
    for call in (
        lambda: expand_user(AWAY, StoreError),
        lambda: forge_data.TokenStore.open(AWAY),
        lambda: forge_data.prepare(tmp_path / "rows.jsonl", "model", AWAY),
        lambda: forge_data.TokenStore.from_jsonl(tmp_path / "rows.jsonl", AWAY),
    ):
        with pytest.raises(StoreError, match="'~nouser-of-this-machine/x' begins with the home of a user"):
            call()
