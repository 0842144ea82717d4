"""A run's stores are verified once on each node, and nowhere a second time."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from forge import SettingsError
from forge._progress import Reporter
from forge.run._stores import compare_stores, refuse_damaged, verify_on_node
from forge_data import StoreError


class Store:
    """A store that counts how often it is verified."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.verified: list[bool] = []

    def verify(self, *, changed: bool = False) -> None:
        self.verified.append(changed)
        if self.path == "damaged":
            raise StoreError("loss_mask.bin does not hold what was written to it")


def reporter() -> Reporter:
    """A report whose log is nobody's."""
    return Reporter(lambda _: pytest.fail("a line in the log"))


def ranks(rank: int, local_rank: int) -> Any:
    return SimpleNamespace(local_rank=local_rank, is_first=rank == 0)


@pytest.mark.parametrize(("rank", "local_rank", "times"), [(0, 0, 0), (1, 1, 0), (8, 0, 1), (9, 1, 0)])
def test_one_rank_of_each_further_node(rank: int, local_rank: int, times: int) -> None:
    """Of two nodes with eight ranks each the ninth rank reads the stores; both parts of a split have one."""
    train, eval_part, other = Store("train"), Store("train"), Store("eval")
    verify_on_node(ranks(rank, local_rank), *(SimpleNamespace(store=store) for store in (train, eval_part)), None)
    assert len(train.verified) + len(eval_part.verified) == times
    verify_on_node(ranks(rank, local_rank), *(SimpleNamespace(store=store) for store in (train, other)))
    assert len(other.verified) == times


def test_a_damaged_store_says_how_the_run_goes_on() -> None:
    """Before a save only what was written to is read; the error says that nothing was saved, and what to do."""
    whole = Store("train")
    refuse_damaged(SimpleNamespace(store=whole), None)
    assert whole.verified == [True]
    with pytest.raises(StoreError, match=r"loss_mask\.bin .* is stopped before it saves .* same command makes the store again"):
        refuse_damaged(SimpleNamespace(store=Store("damaged")))


@pytest.mark.parametrize(
    ("recorded", "message"),
    [
        (None, "data/train, which its run was made with, cannot be read"),
        ([1], "data/train, which its run was made with, cannot be read"),
        ({"train": 5}, r"\(tokens 5 then, new now\)"),
    ],
)
def test_a_record_of_another_kind_is_no_traceback(recorded: object, message: str, tmp_path: Path) -> None:
    """What run.json holds in the place of fingerprints proves nothing; with the store lost too that is said."""
    (tmp_path / "run.json").write_text(json.dumps({"stores": recorded}))

    def opened(path: Path) -> Any:
        if path.is_relative_to(tmp_path / "data"):
            raise StoreError(f"{path} is gone")
        return SimpleNamespace(path=path, fingerprint="new")

    task: Any = SimpleNamespace(open_store=opened)
    with pytest.raises(SettingsError, match=message):
        compare_stores(task, tmp_path, tmp_path / "prepared", {"train": "data_path"}, reporter())


class Rows:
    """What two stores are compared by: the digest of each sample's tokens, and where it came from."""

    def __init__(self, fingerprint: str, *digests: int) -> None:
        self.path, self.fingerprint, self._digests = Path(fingerprint), fingerprint, np.array(digests)
        self.sha256: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._digests)

    def units(self) -> Any:
        return np.arange(len(self))[:, None], self._digests

    def source(self, index: int) -> str:
        return f"rows.jsonl:{index + 1}"


@pytest.mark.parametrize(
    ("now", "difference"),
    [
        (Rows("new", 7, 5, 4), r"\(1 of 3 differ, first rows\.jsonl:2\)"),
        (Rows("new", 1, 5, 9), r"\(3 of 3 differ, first rows\.jsonl:1\)"),
        (Rows("new", 7, 8), r"\(3 samples then, 2 now\)"),
        (Rows("new", 7, 8, 4), r"\(the same token ids, but other labels, weights or further columns\)"),
    ],
)
def test_other_rows_are_counted(now: Rows, difference: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """How many samples are others, and the first of them: a person finds the row that was edited.

    All tokens are read for it, which is said before, and not in the log of a run that is refused.
    """
    (tmp_path / "run.json").write_text(json.dumps({"stores": {"train": "old"}}))
    old = Rows("old", 7, 8, 4)
    task: Any = SimpleNamespace(open_store=lambda path: old if path.is_relative_to(tmp_path / "data") else now)
    with pytest.raises(SettingsError, match=difference):
        compare_stores(task, tmp_path, tmp_path / "prepared", {"train": "data_path"}, reporter())
    said = "the rows are others than the run's: comparing 3 samples to say which ...\n"
    assert capsys.readouterr().err == said * (len(now) == len(old))
