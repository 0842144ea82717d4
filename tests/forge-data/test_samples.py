"""Which shape a row has, and what is said when it has none."""

import numpy as np
import pytest

from forge_data import DataError
from forge_data._samples import Chat, Text, parse, shape_of
from forge_data._tokenised import Tokens

USER, BOT = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}
ROWS = {
    "messages": {"messages": [USER, BOT], "id": 7},
    "prompt/completion as strings": {"prompt": "a", "completion": "b"},
    "prompt/completion as messages": {"prompt": [USER], "completion": [BOT]},
    "tokenised": {"input_ids": [1, 2], "labels": [-100, 2], "len": 2},
}


@pytest.mark.parametrize("shape", ROWS)
def test_known(shape):
    """Each known shape is recognised, fields that say nothing about the training beside it."""
    assert shape_of("f:1", ROWS[shape] | {"source": "web", "id": 3}) == shape


def test_kinds():
    """Each shape becomes its kind of sample; what is learned of messages begins with the completion."""
    assert parse("messages", "f:1", ROWS["messages"], None) == Chat("f:1", [USER, BOT], 0)
    assert parse("prompt/completion as strings", "f:1", ROWS["prompt/completion as strings"], None) == Text("f:1", "a", "b")
    assert parse("prompt/completion as messages", "f:1", ROWS["prompt/completion as messages"], None) == Chat(
        "f:1", [USER, BOT], 1
    )
    assert isinstance(parse("tokenised", "f:1", ROWS["tokenised"], None), Tokens)


def test_unknown():
    """A row of no known shape is told which fields it has, and which are known."""
    with pytest.raises(
        DataError, match=r"f:9 has the fields 'text', 'id', which are no known shape; known: messages \(messages\); prompt"
    ):
        shape_of("f:9", {"text": "x", "id": 1})
    with pytest.raises(DataError, match=r"f:9 has the fields \(none\)"):
        shape_of("f:9", {})


def test_ambiguous():
    """A row that fits two shapes is not guessed at."""
    with pytest.raises(DataError, match="fit more than one known shape: messages and prompt/completion as strings; keep one"):
        shape_of("f:1", ROWS["messages"] | ROWS["prompt/completion as strings"])


def test_prompt_and_completion_of_two_kinds():
    """A prompt of one kind and a completion of another are refused."""
    with pytest.raises(DataError, match="f:1: prompt is the string 'a' and completion is a list of 1; make both"):
        shape_of("f:1", {"prompt": "a", "completion": [BOT]})


@pytest.mark.parametrize("field", ["tools", "functions", "documents", "chat_template_kwargs", "images", "unmask"])
def test_a_field_that_would_be_passed_over(field):
    """A field that changes what the row means is refused where it says something, and let through where it is empty."""
    with pytest.raises(DataError, match=f"f:1: field {field} is a list of 1, and"):
        shape_of("f:1", ROWS["messages"] | {field: ["x"]})
    assert shape_of("f:1", ROWS["messages"] | {field: []}) == "messages"


@pytest.mark.parametrize("shape", ROWS)
@pytest.mark.parametrize(
    ("field", "what_to_do"),
    [
        ("loss_mask", "write the mask into labels as -100"),
        ("completion_mask", "write the mask into labels as -100"),
        ("assistant_masks", "write the mask into labels as -100"),
        ("position_ids", "one row, one sample"),
        ("token_type_ids", "not passed to the model"),
        ("seq_lengths", "one row, one sample"),
    ],
)
def test_a_column_beside_the_tokens(shape, field, what_to_do):
    """Masks, positions and packing that would be ignored are refused, zeros and arrays too; empty ones say nothing."""
    for value in ([0, 0], np.zeros(2, dtype=int)):
        with pytest.raises(DataError, match=f"f:1: field {field} is .*, and .*{what_to_do}.*; take it out of the rows"):
            shape_of("f:1", ROWS[shape] | {field: value})
    for value in ([], np.zeros(0, dtype=int)):
        assert shape_of("f:1", ROWS[shape] | {field: value}) == shape
