"""Every package has one public API: lazy, sorted, documented, and imported in an instant."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from .repository import FACADE, LEAVES, PACKAGES

HEAVY = {"accelerate", "datasets", "numba", "peft", "torch", "transformers", "trl"}


def init_of(folder: str) -> ast.Module:
    """Syntax tree of a package's `__init__.py`."""
    (found,) = [s.tree for s in PACKAGES[folder].sources if s.path == PACKAGES[folder].source_dir / "__init__.py"]
    return found


def module_of(folder: str) -> dict[str, str]:
    """Public name → module that it comes from, by the lazy tables of an `__init__.py`."""
    package = importlib.import_module(PACKAGES[folder].import_name)
    own = {name: f"{package.__name__}.{module}" for name, module in package._MODULE_OF.items()}
    whole = getattr(package, "_PACKAGES", {})
    return own | (whole if isinstance(whole, dict) else {name: f"{package.__name__}.{name}" for name in whole})


def loaded(code: str, *arguments: str) -> set[str]:
    """Top-level modules that a fresh interpreter has imported after `code`, or after a script that is named instead."""
    command = (
        [sys.executable, "-X", "importtime", *arguments] if arguments else [sys.executable, "-X", "importtime", "-c", code]
    )
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    assert done.returncode == 0, "\n".join(line for line in done.stderr.splitlines() if line not in set(lines))
    return {line.rpartition("|")[2].strip().partition(".")[0] for line in lines}


@pytest.mark.parametrize("folder", PACKAGES)
def test_all_is_sorted_and_is_the_lazy_table(folder: str) -> None:
    """`__all__` is sorted, lists nothing twice, and is what the lazy table can load, no more and no less."""
    module = importlib.import_module(PACKAGES[folder].import_name)
    assert list(module.__all__) == sorted(set(module.__all__))
    assert set(module.__all__) - {"__version__"} == set(module_of(folder))
    assert set(module.__all__) <= set(dir(module))


@pytest.mark.parametrize("folder", PACKAGES)
def test_the_type_checker_sees_the_same_names(folder: str) -> None:
    """The imports under `TYPE_CHECKING` and the lazy table name the same things from the same files."""
    name = PACKAGES[folder].import_name
    seen = {}
    for block in init_of(folder).body:
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING":
            for node in block.body:
                for alias in node.names:
                    if isinstance(node, ast.Import):
                        seen[alias.asname or alias.name] = alias.name
                    else:
                        module = ".".join(filter(None, [name if node.level else "", node.module]))
                        seen[alias.asname or alias.name] = f"{name}.{alias.name}" if module == name else module
    public = module_of(folder)
    assert {key: value for key, value in seen.items() if key in public} == public


@pytest.mark.parametrize("folder", PACKAGES)
def test_every_public_name_loads_and_is_documented(folder: str) -> None:
    """Each name of `__all__` imports, comes from the file that the table names, and has a docstring of its own."""
    module = importlib.import_module(PACKAGES[folder].import_name)
    assert module_of(folder), "no public names"
    bare = []
    for name in module_of(folder):
        value = getattr(module, name)
        if inspect.isclass(value):
            text = vars(value).get("__doc__")
            if text and text.startswith(f"{value.__name__}("):  # what NamedTuple and dataclass write themselves
                text = None
        elif callable(value) or inspect.ismodule(value):
            text = value.__doc__
        else:
            text = documented_constants(folder).get(name)
        if not (text or "").strip():
            bare.append(name)
    assert bare == []


def documented_constants(folder: str) -> dict[str, str]:
    """Module-level name → the bare string under its assignment."""
    found = {}
    for source in PACKAGES[folder].sources:
        for node, after in zip(source.tree.body, source.tree.body[1:], strict=False):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
            if targets and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                found |= {target.id: str(after.value.value) for target in targets if isinstance(target, ast.Name)}
    return found


@pytest.mark.parametrize("folder", PACKAGES)
def test_an_unknown_name_is_an_attribute_error(folder: str) -> None:
    """A lazy package refuses a name that it does not have, as any module does."""
    module = importlib.import_module(PACKAGES[folder].import_name)
    with pytest.raises(AttributeError, match="no_such_name"):
        module.no_such_name  # noqa: B018


@pytest.mark.parametrize("folder", PACKAGES)
def test_one_version_a_package(folder: str) -> None:
    """The package's `__version__` heads its CHANGELOG, below what is not released yet."""
    version = importlib.import_module(PACKAGES[folder].import_name).__version__
    changelog = (PACKAGES[folder].source_dir.parents[1] / "CHANGELOG.md").read_text()
    headings = [line.removeprefix("## ") for line in changelog.splitlines() if line.startswith("## ")]
    headings = headings[1:] if headings[0] == "Unreleased" else headings
    assert headings[0].split()[0] == version


@pytest.mark.slow
def test_the_probe_sees_what_is_loaded() -> None:
    """The tests below can fail: a heavy import is seen, however deep."""
    assert "numpy" in loaded("def f():\n    import numpy.linalg\nf()")


@pytest.mark.slow
@pytest.mark.parametrize("folder", PACKAGES)
def test_a_package_is_imported_in_an_instant(folder: str) -> None:
    """Importing a package loads nothing heavy, numpy included: its modules load when they are used."""
    assert loaded(f"import {PACKAGES[folder].import_name}") & (HEAVY | {"numpy", "attrs", "rich", "cyclopts"}) == set()


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["sft", "--help"],
        ["generate", "--help"],
        ["export", "--help"],
        ["data", "--help"],
        ["plan", "--help"],
        ["--version"],
    ],
)
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    """`forge --help`, and the help of each command, answers without torch, transformers, trl or numba."""
    command = Path(sysconfig.get_path("scripts")) / "forge"
    assert command.is_file()
    seen = loaded("", str(command), *arguments)
    assert "forge" in seen
    assert seen & HEAVY == set()


@pytest.mark.slow
@pytest.mark.parametrize("folder", LEAVES)
def test_settings_are_read_without_a_framework(folder: str) -> None:
    """A leaf's settings can be read, for help and recipes, with nothing heavy loaded."""
    name = PACKAGES[folder].import_name
    settings = [key for key in importlib.import_module(name).__all__ if key.endswith("Settings")]
    assert settings
    seen = loaded(f"import {name} as package\n[getattr(package, key) for key in {settings!r}]")
    assert seen & (HEAVY | {"numpy"}) == set()


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["forge-data", "forge-packing"])
def test_the_packages_without_torch_load_none(folder: str) -> None:
    """Every public name of forge_data and forge_packing loads without torch, even where torch is installed."""
    name = PACKAGES[folder].import_name
    seen = loaded(f"import {name} as package\n[getattr(package, key) for key in package.__all__]")
    assert name in seen
    assert "torch" not in seen


def test_the_facade_hands_out_the_leaves() -> None:
    """`forge.data` is `forge_data`, and so on: one object under two names."""
    facade = importlib.import_module(PACKAGES[FACADE].import_name)
    for leaf in LEAVES:
        package = importlib.import_module(PACKAGES[leaf].import_name)
        assert getattr(facade, leaf.removeprefix("forge-")) is package
