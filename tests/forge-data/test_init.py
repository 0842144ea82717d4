"""Public API: names, lazy imports, no torch anywhere."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import forge_data

SOURCE = Path(forge_data.__file__).parent


def python(code, **environment):
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done


def test_public_names():
    """__all__ is sorted and matches the table of modules; each name is found there and in dir()."""
    assert forge_data.__all__ == sorted(forge_data.__all__) == sorted(forge_data._MODULE_OF)
    for name in forge_data.__all__:
        assert getattr(forge_data, name).__module__ == f"forge_data.{forge_data._MODULE_OF[name]}"
    assert set(forge_data.__all__) <= set(dir(forge_data))


def test_type_checkers_see_the_same_names():
    """The imports for type checkers name every public name, from its module."""
    tree = ast.parse((SOURCE / "__init__.py").read_text(encoding="utf-8"))
    (guarded,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {alias.name: node.module.removeprefix("forge_data.") for node in guarded.body for alias in node.names}
    assert seen == forge_data._MODULE_OF


def test_unknown_name():
    """An unknown name is an AttributeError."""
    with pytest.raises(AttributeError, match="module 'forge_data' has no attribute 'pack'"):
        _ = forge_data.pack


@pytest.mark.slow
def test_import_is_free():
    """Importing the package loads nothing; reading its settings loads attrs and no more."""
    loaded = "[m for m in ('attrs', 'numpy', 'pyarrow', 'datasets', 'transformers', 'jinja2', 'torch') if m in sys.modules]"
    assert python(f"import sys, forge_data; print({loaded})").stdout.strip() == "[]"
    code = f"import sys, forge_data; forge_data.DataSettings(data_path='x'); print({loaded})"
    assert python(code).stdout.strip() == "['attrs']"


@pytest.mark.slow
def test_tokens_without_torch(chatml_tokenizer, small_chats, write_rows, tmp_path):
    """Where torch cannot be imported, a tokenizer loads and a file is prepared, without a warning."""
    chatml_tokenizer.save_pretrained(tmp_path / "model")
    rows = write_rows(small_chats)
    code = f"""
import importlib.util, sys
sys.modules["torch"] = None
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name.split(".")[0] == "torch" else found(name, package)
import forge_data
store = forge_data.prepare({str(rows)!r}, {str(tmp_path / "model")!r}, {str(tmp_path / "store")!r})
print(len(store), sys.modules["torch"])
"""
    done = python(code)
    assert done.stdout.split() == ["12", "None"]
    assert "PyTorch" not in done.stderr


def test_source_imports_only_what_is_declared():
    """Every import in every file is of the standard library, of a declared package or extra, or of this one."""
    declared = tomllib.loads((Path(__file__).parents[2] / "packages" / "forge-data" / "pyproject.toml").read_text("utf-8"))[
        "project"
    ]
    wanted = [*declared["dependencies"], *(each for extra in declared["optional-dependencies"].values() for each in extra)]
    names = {re.match(r"\w+", requirement)[0].replace("Pillow", "PIL") for requirement in wanted}
    assert "torch" not in names
    allowed = {*sys.stdlib_module_names, *names, "forge_data"}
    for file in SOURCE.glob("**/*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            found = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            found += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            assert {name.split(".")[0] for name in found} <= allowed, file.name
