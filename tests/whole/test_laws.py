"""Laws that can be read in the source: who may import what, who may know a device, what no package may do."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from .repository import FACADE, LEAVES, PACKAGES, called, docstrings, imports, nodes, prose

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .repository import Package

DEVICES = re.compile(r"\b(cuda|nccl|hpu|hccl|mps|xpu|xccl|npu|rocm|rccl)\b", re.IGNORECASE)
UNSAFE_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
UNSAFE_CALLS = {"torch.load", "eval", "exec", "os.system", "yaml.unsafe_load", "yaml.full_load"}
FIRST_LINE = 90
WITH_TORCH = {"triton"}
"""Comes with torch's builds for GPUs and can be declared for no others: imported where it is used, as an extra is.
A file of kernels, `*_kernel.py`, may begin with it, and is imported so itself then."""


def undeclared_imports(package: Package, tree: ast.Module, *, kernels: bool = False) -> Iterator[str]:
    """Imports of anything but the package itself, the standard library and what it declares (extras only where deferred)."""
    own = sys.stdlib_module_names | {"__future__", package.import_name} | package.required | (WITH_TORCH if kernels else set())
    optional = package.optional | (WITH_TORCH if "torch" in package.required else set())
    for found in imports(tree):
        if found.name in own or (found.name in optional and found.deferred):
            continue
        why = "an extra, imported at module level" if found.name in optional else "declared nowhere"
        yield f"{found.line}: {found.name} ({why})"


def device_words(tree: ast.Module) -> Iterator[str]:
    """What names a kind of accelerator: an attribute, a keyword or a string, documentation aside."""
    documentation = prose(tree)
    for node in nodes(tree):
        texts = []
        if isinstance(node, ast.Attribute):
            texts = [node.attr]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            texts = [node.value]
        elif isinstance(node, ast.keyword) and node.arg:
            texts = [node.arg]
        elif isinstance(node, ast.Import | ast.ImportFrom):
            texts = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
        for text in texts:
            if DEVICES.search(text.replace("_", " ")):
                yield f"{node.lineno if hasattr(node, 'lineno') else node.value.lineno}: {text!r}"


def long_first_lines(tree: ast.Module) -> Iterator[str]:
    """Docstrings of modules, classes and functions whose first line is longer than a summary may be."""
    for line, text in docstrings(tree):
        first = text.partition("\n")[0]
        if len(first) > FIRST_LINE:
            yield f"{line}: {len(first)} characters: {first}"


def unsafe(tree: ast.Module) -> Iterator[str]:
    """What runs code out of a user's file: pickles, `torch.load`, remote model code, `eval`."""
    for found in imports(tree):
        if found.name in UNSAFE_MODULES:
            yield f"{found.line}: import {found.name}"
    for node in nodes(tree):
        if isinstance(node, ast.Call):
            if called(node) in UNSAFE_CALLS:
                yield f"{node.lineno}: {called(node)}(...)"
            for keyword in node.keywords:
                off = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                if keyword.arg in {"trust_remote_code", "allow_pickle", "shell"} and not off:
                    yield f"{node.lineno}: {keyword.arg}={ast.unparse(keyword.value)}"


def test_the_scan_sees_every_package() -> None:
    """The laws below look at files that are there: every package of the folder, its `__init__` and more in each."""
    on_disk = {path.parent.name for path in (next(iter(PACKAGES.values())).source_dir.parents[2]).glob("*/pyproject.toml")}
    assert on_disk == set(PACKAGES)
    for package in PACKAGES.values():
        names = {source.path.name for source in package.sources}
        assert len(names) >= 3, f"{package.folder}: only {names}"
        assert "__init__.py" in names
        assert (package.source_dir / "py.typed").is_file()


@pytest.mark.parametrize("folder", LEAVES)
def test_a_leaf_imports_no_other_package(folder: str) -> None:
    """Leaves know neither each other nor the facade: no import of another `forge_*`, not even a deferred one."""
    package = PACKAGES[folder]
    others = {other.import_name for other in PACKAGES.values()} - {package.import_name}
    found = [f"{s.where}:{i.line}: {i.name}" for s in package.sources for i in imports(s.tree) if i.name in others]
    assert found == []
    assert not others & (package.required | package.optional)


@pytest.mark.parametrize("folder", PACKAGES)
def test_a_package_imports_only_what_it_declares(folder: str) -> None:
    """Whatever a package imports, its pyproject.toml declares; an extra is imported only where it is used."""
    package = PACKAGES[folder]
    found = ((s.where, undeclared_imports(package, s.tree, kernels=is_of_kernels(s.where, s.tree))) for s in package.sources)
    assert [f"{where}:{line}" for where, lines in found for line in lines] == []


def is_of_kernels(where: str, tree: ast.Module) -> bool:
    """Return whether a file begins with Triton, and holds kernels by its name; one that defers Triton is a file like any."""
    return where.endswith("_kernel.py") and any(found.name in WITH_TORCH and not found.deferred for found in imports(tree))


def named_at_import(tree: ast.Module) -> set[str]:
    """Last parts of the modules that a file imports when it is imported, and of what it takes from them."""
    found = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    modules = {node.module or "" for node in found if isinstance(node, ast.ImportFrom)}
    return {name.rpartition(".")[2] for name in modules | {alias.name for node in found for alias in node.names}}


@pytest.mark.parametrize("folder", PACKAGES)
def test_files_of_kernels_are_imported_where_they_are_used(folder: str) -> None:
    """Without Triton a package is imported all the same."""
    sources = PACKAGES[folder].sources
    kernels = {Path(s.where).stem for s in sources if is_of_kernels(s.where, s.tree)}
    assert [s.where for s in sources if named_at_import(s.tree) & kernels] == []


@pytest.mark.parametrize("planted", ["from a import _b_kernel", "from a._b_kernel import f", "import a._b_kernel as k"])
def test_a_kernel_that_is_imported_with_its_package_is_found(planted: str) -> None:
    """However it is spelled; in a function it is imported where it is used."""
    assert "_b_kernel" in named_at_import(ast.parse(planted))
    assert "_b_kernel" not in named_at_import(ast.parse(f"def f():\n    {planted}"))
    assert is_of_kernels("a/_b_kernel.py", ast.parse("import triton.language as tl"))
    assert not is_of_kernels("a/_b_kernel.py", ast.parse("def f():\n    import triton"))


@pytest.mark.parametrize("folder", ["forge-data", "forge-packing"])
def test_the_packages_without_torch_declare_none(folder: str) -> None:
    """Whoever wants tokens or a plan installs no torch."""
    assert not {"torch", "accelerate", "peft"} & (PACKAGES[folder].required | PACKAGES[folder].optional)


@pytest.mark.parametrize("folder", [folder for folder in PACKAGES if folder != "forge-accel"])
def test_only_forge_accel_knows_devices(folder: str) -> None:
    """What differs by device is known in forge_accel alone: no `torch.cuda`, "cuda" or "nccl" elsewhere."""
    assert [f"{s.where}:{line}" for s in PACKAGES[folder].sources for line in device_words(s.tree)] == []


def test_forge_accel_knows_its_devices() -> None:
    """The scan for device words is not blind: the package that may use them does."""
    found = " ".join(line for s in PACKAGES["forge-accel"].sources for line in device_words(s.tree))
    assert "cuda" in found
    assert "nccl" in found


@pytest.mark.parametrize("folder", PACKAGES)
def test_no_file_of_a_user_is_executed(folder: str) -> None:
    """No pickle, no `torch.load`, no `trust_remote_code`, no `eval`: data and models are read, never run."""
    assert [f"{s.where}:{line}" for s in PACKAGES[folder].sources for line in unsafe(s.tree)] == []


def test_only_the_facade_prints() -> None:
    """A leaf returns and logs; only the facade writes to the terminal."""
    found = [
        f"{source.where}:{node.lineno}"
        for folder in LEAVES
        for source in PACKAGES[folder].sources
        for node in nodes(source.tree)
        if isinstance(node, ast.Call) and called(node) == "print"
    ]
    assert found == []


@pytest.mark.parametrize("folder", PACKAGES)
def test_a_docstring_begins_with_a_short_line(folder: str) -> None:
    """The first line of a module's, a class's or a function's docstring is a summary of at most 90 characters."""
    assert [f"{s.where}:{line}" for s in PACKAGES[folder].sources for line in long_first_lines(s.tree)] == []


@pytest.mark.parametrize(
    ("scan", "planted"),
    [
        (long_first_lines, f"'''{91 * 'x'}'''"),
        (long_first_lines, f"class A:\n    '''{91 * 'x'}\n\n    More.\n    '''"),
        (long_first_lines, f"class A:\n    async def f(self):\n        '''{91 * 'x'}'''"),
        (device_words, "torch.cuda.empty_cache()"),
        (device_words, "x = model.cuda()"),
        (device_words, "device = f'cuda:{rank}'"),
        (device_words, "init_process_group(backend='nccl')"),
        (device_words, "from torch import mps"),
        (unsafe, "import pickle"),
        (unsafe, "def f():\n    from pickle import loads"),
        (unsafe, "torch.load(path)"),
        (unsafe, "np.load(path, allow_pickle=True)"),
        (unsafe, "AutoModel.from_pretrained(path, trust_remote_code=trust)"),
    ],
)
def test_the_scans_find_what_is_planted(scan: object, planted: str) -> None:
    """Each scan sees the fault that it is there for."""
    assert list(scan(ast.parse(planted)))


@pytest.mark.parametrize(
    "text", ["'''Runs on CUDA too.'''", "class A:\n    x: int\n    '''On cuda.'''", "# cuda", "accumulated = 1"]
)
def test_prose_may_name_a_device(text: str) -> None:
    """Documentation, and words that contain a device's name, are no device code."""
    assert list(device_words(ast.parse(text))) == []


@pytest.mark.parametrize(
    "text", [f"'''{90 * 'x'}'''", f"def f():\n    '''Short.\n\n    {91 * 'x'}\n    '''", f"x = '''{91 * 'x'}'''"]
)
def test_only_first_lines_are_measured(text: str) -> None:
    """90 characters, long lines further down and strings that are no docstrings are let through."""
    assert list(long_first_lines(ast.parse(text))) == []


@pytest.mark.parametrize(
    ("planted", "allowed"),
    [
        ("import torch", False),
        ("import numpy.linalg", True),
        ("from json import loads", True),
        ("def f():\n    import forge_data", False),
        ("from importlib import import_module\nimport_module('forge_data')", False),
        ("from forge_packing.planning._plan import plan", True),
        ("if TYPE_CHECKING:\n    import pandas", False),
    ],
)
def test_the_import_scan_finds_what_is_planted(planted: str, allowed: bool) -> None:
    """The import law tells a declared import from an undeclared one, wherever it is."""
    assert (not list(undeclared_imports(PACKAGES["forge-packing"], ast.parse(planted)))) is allowed


@pytest.mark.parametrize(
    ("folder", "planted", "allowed"),
    [
        ("forge-algos", "def f():\n    import triton.language", True),
        ("forge-algos", "import triton", False),
        ("forge-packing", "def f():\n    import triton", False),
    ],
)
def test_what_comes_with_torch_is_imported_where_it_is_used(folder: str, planted: str, allowed: bool) -> None:
    """Triton is there for packages that declare torch, and never at module level."""
    assert (not list(undeclared_imports(PACKAGES[folder], ast.parse(planted)))) is allowed


def test_the_facade_declares_every_leaf() -> None:
    """Installing the facade installs the five leaves."""
    assert {PACKAGES[leaf].import_name for leaf in LEAVES} <= PACKAGES[FACADE].required
