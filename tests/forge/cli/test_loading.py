"""The line about torch, before a command's own first line."""

from __future__ import annotations

import sys
import time
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from forge.cli import _loading
from forge.cli._loading import telling_of_torch

SAID = "forge sft: loading torch ...\n"


@pytest.mark.parametrize(
    ("loading", "rank", "quiet", "said"),
    [
        (True, "0", False, SAID),
        (False, "0", False, ""),
        (True, "1", False, ""),
        (True, "0", True, ""),
        (None, "0", False, ""),
    ],
)
def test_a_slow_import_is_told_once(
    loading: bool | None, rank: str, quiet: bool, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On stderr, by the first rank, where it takes long; not with quiet, not once torch is there, not where nobody loads it."""
    monkeypatch.setattr(_loading, "_PATIENCE_SECONDS", 0.05)
    monkeypatch.setattr(_loading, "_POLL_SECONDS", 0.01)
    monkeypatch.setenv("RANK", rank)
    torch: Any = ModuleType("torch")
    torch.__spec__ = SimpleNamespace(_initializing=loading)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    with telling_of_torch("sft", quiet=quiet):
        if loading is not None:
            monkeypatch.setitem(sys.modules, "torch", torch)
        time.sleep(0.4)
    with telling_of_torch("sft", quiet=quiet):
        time.sleep(0.1)
    found = capsys.readouterr()
    assert (found.out, found.err) == ("", said)
