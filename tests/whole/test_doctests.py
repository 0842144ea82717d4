"""The examples in docstrings and READMEs are true."""

from __future__ import annotations

import doctest
import importlib
import logging

import pytest

from .house import PACKAGES, ROOT

MODULES = [source.module for package in PACKAGES.values() for source in package.sources if ">>>" in source.path.read_text()]
READMES_AND_DOCS = (*ROOT.glob("packages/*/README.md"), *ROOT.glob("docs/**/*.md"))
PAGES = [path.relative_to(ROOT).as_posix() for path in sorted(READMES_AND_DOCS) if ">>>" in path.read_text()]


def test_there_are_examples() -> None:
    """The tests below look at something."""
    assert MODULES


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module(name: str) -> None:
    """What a docstring's example shows is what it prints."""
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted
    assert result.failed == 0


@pytest.mark.parametrize("page", PAGES)
def test_the_examples_of_a_page(page: str) -> None:
    """A README's `>>>` examples run as they stand."""
    # A page may make a model with transformers alone, which imports DeepSpeed wherever it is, whose import writes to standard output.
    logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno >= logging.ERROR)
    result = doctest.testfile(str(ROOT / page), module_relative=False)
    assert result.attempted
    assert result.failed == 0
