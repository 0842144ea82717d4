"""forge.mini has the names, the order and the defaults of the mini-trainer that is installed."""

from __future__ import annotations

import dataclasses
import inspect
from enum import Enum

import attrs
import pytest

from forge import mini
from forge.mini._command import _DEFAULTS, _OWN

theirs = pytest.importorskip("mini_trainer.training_types", reason="mini-trainer is not installed")


@pytest.mark.parametrize("name", ["TrainingArgs", "PretrainingConfig", "TorchrunArgs"])
def test_arguments(name: str) -> None:
    """Field by field."""
    wanted = dataclasses.fields(getattr(theirs, name))
    found = attrs.fields(getattr(mini, name))
    assert [field.name for field in found] == [field.name for field in wanted]
    for ours, other in zip(found, wanted, strict=True):
        default = other.default if other.default_factory is dataclasses.MISSING else other.default_factory()
        mine = ours.default.factory() if isinstance(ours.default, attrs.Factory) else ours.default  # type: ignore[arg-type]
        if default is dataclasses.MISSING:
            assert mine is attrs.NOTHING
        else:
            assert (mine.value if isinstance(mine, Enum) else mine) == (default.value if isinstance(default, Enum) else default)


def test_modes() -> None:
    """The same members and values."""
    assert {mode.name: mode.value for mode in mini.TrainingMode} == {mode.name: mode.value for mode in theirs.TrainingMode}


def test_the_command_has_their_options_and_defaults() -> None:
    """Every option of mini_trainer.train, with the default of the command; the final export is always made."""
    train = pytest.importorskip("mini_trainer.train")
    wanted = {name: each.default for name, each in inspect.signature(train.main).parameters.items()}
    wanted = {name: default for name, default in wanted.items() if default is not ...}
    del wanted["serialized_callbacks"], wanted["save_final_checkpoint"]
    fields = attrs.fields_dict(mini.TrainingArgs)
    for name, default in wanted.items():
        if name == "block_size":
            assert default is None
            continue
        ours = _OWN[name][1] if name in _OWN else _DEFAULTS.get(name, fields[name].default)
        assert ours == (default.value if isinstance(default, Enum) else default), name
