"""The examples of the README, of the documentation's page and of the docstrings run as they stand."""

import doctest
import importlib
from pathlib import Path

import pytest

import forge_packing

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("page", "examples"), [("packages/forge-packing/README.md", 8), ("docs/packing.md", 15)])
def test_pages(page, examples):
    """The examples of both pages run, a training loop without torch among them."""
    result = doctest.testfile(str(ROOT / page), module_relative=False)
    assert result.attempted >= examples
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
