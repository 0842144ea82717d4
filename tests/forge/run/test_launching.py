"""What is refused before ranks are started."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

import forge
from forge.run._launching import on_ranks
from forge.settings._settings import resolve
from forge.trackers._callbacks import Callbacks

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("file", ["/home/me/train.py", None])
def test_functions_of_the_script_on_several_ranks(file: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that are started have another `__main__`; the form that works is named, and nothing is written."""
    main = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    if file is not None:
        main.__file__ = file
    run = tmp_path / "run"
    given = {"model_path": "m", "data_path": "d", "ckpt_output_dir": str(run), "reward": "__main__:short", "nproc_per_node": 2}
    s = resolve(forge.grpo.task.settings, ("argument", given))
    how = "name it 'train:short', and call forge under" if file is not None else "put it into a file .* name it 'file:short'"
    with pytest.raises(forge.SettingsError, match=f"reward=__main__:short: each of several ranks is a process .*{how}"):
        on_ranks(forge.grpo.task, s, {}, Callbacks(), lambda *_: pytest.fail("no rank is started"))
    assert not run.exists()
