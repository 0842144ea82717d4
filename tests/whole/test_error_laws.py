"""Every package's errors are one family that the facade can read by shape and a process can hand to another."""

from __future__ import annotations

import importlib
import inspect
import pickle
from pathlib import Path

import pytest

import forge

from .repository import PACKAGES, ROOT


def family(folder: str) -> dict[str, type[Exception]]:
    """Name → exception of a package's `_errors.py`."""
    module = importlib.import_module(f"{PACKAGES[folder].import_name}._errors")
    return {
        name: found
        for name, found in vars(module).items()
        if inspect.isclass(found) and issubclass(found, Exception) and found.__module__ == module.__name__
    }


def root_of(error: type[Exception]) -> type[Exception]:
    """The oldest ancestor that the same file defines."""
    return [base for base in error.__mro__ if base.__module__ == error.__module__][-1]


def example(error: type[Exception]) -> Exception:
    """An instance, whatever its constructor asks for."""
    parameters = inspect.signature(error.__init__).parameters.values() if "__init__" in vars(error) else []
    needed = [p for p in parameters if p.name != "self" and p.kind in {p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD}]
    keywords = {p.name: "value" for p in parameters if p.kind is p.KEYWORD_ONLY}
    return (
        error(*["value" for _ in needed], **keywords)
        if needed or keywords
        else error("train.jsonl:417: what was found; what to do")
    )


@pytest.mark.parametrize("folder", PACKAGES)
def test_one_family_a_package(folder: str) -> None:
    """All errors of a package descend from one root, which carries the exit status; all of them are public."""
    errors = family(folder)
    assert errors
    (root,) = {root_of(error) for error in errors.values()}
    assert isinstance(vars(root)["exit_status"], int)
    public = set(importlib.import_module(PACKAGES[folder].import_name).__all__)
    assert set(errors) <= public


@pytest.mark.parametrize("folder", PACKAGES)
def test_no_error_is_raised_from_elsewhere(folder: str) -> None:
    """A package's public exceptions are all in its family's file."""
    module = importlib.import_module(PACKAGES[folder].import_name)
    public = {
        name
        for name in module.__all__
        if inspect.isclass(getattr(module, name)) and issubclass(getattr(module, name), BaseException)
    }
    assert public == set(family(folder))


@pytest.mark.parametrize("folder", PACKAGES)
def test_the_family_is_drawn(folder: str) -> None:
    """The module's docstring names every member of the family."""
    text = importlib.import_module(f"{PACKAGES[folder].import_name}._errors").__doc__ or ""
    assert [name for name in family(folder) if name not in text] == []


@pytest.mark.parametrize("folder", PACKAGES)
def test_an_error_is_also_a_standard_one(folder: str) -> None:
    """An error can be caught as ValueError, OSError, ...: each but a bare root has a standard ancestor below Exception."""
    for error in family(folder).values():
        standard = [
            base for base in error.__mro__ if base.__module__ == "builtins" and base not in {Exception, BaseException, object}
        ]
        assert standard or error is root_of(error), error


@pytest.mark.parametrize("folder", PACKAGES)
def test_an_error_survives_a_process_border(folder: str) -> None:
    """An error pickles and comes back the same: type, message, fields, exit status between 1 and 125."""
    for error in family(folder).values():
        sent = example(error)
        back = pickle.loads(pickle.dumps(sent))
        assert type(back) is error
        assert str(back) == str(sent)
        assert back.args == sent.args
        assert vars(back) == vars(sent)
        assert 1 <= back.exit_status <= 125


def test_one_thing_to_catch() -> None:
    """`forge.ERRORS` is the base of each package's family, no more and no less; the page names each."""
    assert set(forge.ERRORS) == {root_of(error) for folder in PACKAGES for error in family(folder).values()}
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    short = {folder: "forge" if folder == "forge" else f"forge.{folder.removeprefix('forge-')}" for folder in PACKAGES}
    roots = {f"`{short[folder]}.{root_of(error).__name__}`" for folder in PACKAGES for error in family(folder).values()}
    assert [name for name in roots if name not in page] == []


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ({"data_path": "none.jsonl"}, "DataError"),
        ({"data_path": "bad.jsonl"}, "DataError"),
        ({"model_path": "empty"}, "ModelError"),
        ({"lora_r": 8}, "SettingsError"),
    ],
)
def test_bad_input_is_caught_at_once(
    given: dict[str, object], kind: str, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing file, a bad row, a directory without a model and a setting are each one of `forge.ERRORS`."""
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("good.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n')
    Path("bad.jsonl").write_text('{"messages": 3}\n')
    with pytest.raises(forge.ERRORS) as caught:
        forge.sft(**{"model_path": model_dir, "data_path": "good.jsonl", "ckpt_output_dir": "run", **given})
    assert type(caught.value).__name__ == kind
    assert caught.value.exit_status == 2
