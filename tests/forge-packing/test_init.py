"""The public API: its names, lazy imports, and no import that is not declared."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import forge_packing

SOURCE = Path(forge_packing.__file__).parent


def python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_public_names():
    """__all__ is sorted, and is the table of modules; each name is found there and in dir()."""
    assert forge_packing.__all__ == sorted(forge_packing.__all__) == sorted(forge_packing._MODULE_OF)
    for name in forge_packing.__all__:
        module, value = f"forge_packing.{forge_packing._MODULE_OF[name]}", getattr(forge_packing, name)
        assert getattr(value, "__module__", module) == module  # a number has none
        assert getattr(sys.modules[module], name) is value
    assert set(forge_packing.__all__) <= set(dir(forge_packing))


def test_type_checkers_see_the_same_names():
    """The imports for type checkers have every public name, from the module that defines it."""
    tree = ast.parse((SOURCE / "__init__.py").read_text())
    (guarded,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {alias.name: node.module.removeprefix("forge_packing.") for node in guarded.body for alias in node.names}
    assert seen == forge_packing._MODULE_OF


def test_unknown_name():
    """A name that is not there is an AttributeError, as in any module."""
    with pytest.raises(AttributeError, match="module 'forge_packing' has no attribute 'unpack'"):
        _ = forge_packing.unpack


@pytest.mark.slow
def test_import_is_free():
    """Importing the package loads neither numpy nor attrs; reading its settings loads no numpy."""
    loaded = "[m for m in ('numpy', 'attrs', 'torch') if m in sys.modules]"
    assert python(f"import sys, forge_packing; print({loaded})") == "[]"
    assert python(f"import sys, forge_packing; forge_packing.PlanSettings(); print({loaded})") == "['attrs']"


@pytest.mark.slow
def test_use_loads_no_torch_and_no_sibling():
    """Planning, saving, loading and collating load neither torch nor another package of forge."""
    code = """
import sys, tempfile, pathlib, forge_packing
made = forge_packing.plan([3, 4, 5], batch_size=2, max_tokens=9, loss_counts=[1, 1, 1])
with tempfile.TemporaryDirectory() as folder:
    made.save(pathlib.Path(folder) / "plan.npz")
    forge_packing.BatchPlan.load(pathlib.Path(folder) / "plan.npz").summary()
forge_packing.collate([([1, 2], [1, 2])])
forge_packing.split_documents([3, 4], 3)
foreign = {"torch", "transformers", "numba", "forge"}
print([m for m in sys.modules if m in foreign or m.startswith("forge_") and m.split(".")[0] != "forge_packing"])
"""
    assert python(code) == "[]"


def test_source_imports_only_what_is_declared():
    """Every import in every file is of the standard library, numpy, numba, attrs, or this package."""
    allowed = {*sys.stdlib_module_names, "numpy", "numba", "attrs", "forge_packing"}
    files = list(SOURCE.rglob("*.py"))
    assert len(files) > 30
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            assert {name.split(".")[0] for name in names} <= allowed, file.name
