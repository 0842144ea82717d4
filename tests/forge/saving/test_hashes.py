"""The record of an export's files, and how it is compared with them."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from forge.saving import _hashes

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("after", [0, 1])
def test_an_export_is_hashed_without_threads_where_none_can_be_started(
    after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no memory is left for a thread's stack a finished run stays finished: its files are read one by one."""
    for name in ("a", "b", "c"):
        (tmp_path / name).write_text(name * 1000)
    expected = _hashes.hash_export(tmp_path)
    assert sorted(expected) == ["a", "b", "c"]
    start, started = threading.Thread.start, []

    def full(thread: threading.Thread) -> None:
        if len(started) >= after:
            raise RuntimeError(_hashes.NO_THREAD)
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", full)
    assert _hashes.hash_export(tmp_path) == expected
    (tmp_path / "b").write_text("other")
    assert list(_hashes.damaged_files(tmp_path, expected)) == ["b"]


def test_another_error_of_a_file_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A RuntimeError of what reads is not taken for a thread that could not be started."""
    (tmp_path / "a").write_text("a")

    def fails(_: Path) -> None:
        raise RuntimeError("torn")

    monkeypatch.setattr("forge_dist.file_hash", fails)
    with pytest.raises(RuntimeError, match="torn"):
        _hashes.hash_export(tmp_path)
