"""The family of errors."""

import pickle

import pytest

import forge_data
from forge_data import BadPairError, DataError, ForgeDataError, StoreError, TemplateError, TokenizerError


@pytest.mark.parametrize("kind", [BadPairError, DataError, StoreError, TemplateError, TokenizerError])
def test_family(kind):
    """Each is a ForgeDataError and a ValueError, ends a command with status 2, and pickles."""
    error = kind("train.jsonl:7: what, and what to do")
    assert isinstance(error, ForgeDataError)
    assert isinstance(error, ValueError)
    assert error.exit_status == 2
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert copy.args == error.args


@pytest.mark.parametrize("kind", [BadPairError, DataError, StoreError, TemplateError, TokenizerError])
def test_a_message_cannot_control_a_terminal(kind):
    """Escape sequences, line feeds and marks that reorder text, as the name of a file may hold them, are shown as escapes."""
    assert str(kind("a\x1b[2J\n\u202e\x9b日é.jsonl is empty")) == r"a\x1b[2J\n\u202e\x9b日é.jsonl is empty"


def test_the_reason_travels():
    """The reason of a bad pair survives pickling."""
    error = pickle.loads(pickle.dumps(BadPairError("a:1: what", reason="same_answers")))
    assert (str(error), error.reason) == ("a:1: what", "same_answers")
    assert isinstance(error, DataError)


def test_the_tree_names_them_all():
    """The tree in the module's docstring has every class."""
    drawn = __import__("forge_data._errors", fromlist=["x"]).__doc__
    assert all(name in drawn for name in forge_data.__all__ if name.endswith("Error"))
