"""Texts of settings' fields for the command line's help."""

from __future__ import annotations

import sys
import types

import attrs

from forge.cli._options import field_texts


def test_the_text_of_a_field_is_the_docstring_under_it():
    """Inherited fields and classes within functions too; a class without a file, as in a notebook, has none."""

    @attrs.frozen
    class Base:
        first: int = 1
        """First of
        two."""
        bare: int = 2

    @attrs.frozen
    class Derived(Base):
        second: int = 3
        """Second."""

    assert field_texts(Derived) == {"first": "First of two.", "second": "Second."}
    module = types.ModuleType("typed_at_a_prompt")
    sys.modules[module.__name__] = module
    try:
        exec("import attrs\n@attrs.frozen\nclass Typed:\n    a: int = 1\n    'Text.'", vars(module))
        assert field_texts(module.Typed) == {}
    finally:
        del sys.modules[module.__name__]
