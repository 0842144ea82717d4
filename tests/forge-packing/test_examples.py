"""What the README and the docstrings show is what happens."""

import doctest
import importlib
from pathlib import Path

import forge_packing

README = Path(__file__).parents[2] / "packages" / "forge-packing" / "README.md"


def test_readme():
    """The README's examples run, its foreign training loop among them."""
    result = doctest.testfile(str(README), module_relative=False)
    assert result.attempted > 10
    assert result.failed == 0


def test_docstrings():
    """The examples in docstrings run; each public function has one."""
    modules = {name: importlib.import_module(f"forge_packing.{name}") for name in forge_packing._MODULE_OF.values()}
    results = {name: doctest.testmod(module) for name, module in modules.items()}
    assert [name for name, result in results.items() if result.failed] == []
    assert [
        name
        for name in (
            "planning._plan",
            "dividing._divide",
            "dividing._pack_rows",
            "collating._collate",
            "_settings",
            "collating._blocks",
            "dividing._cost",
        )
        if not results[name].attempted
    ] == []
