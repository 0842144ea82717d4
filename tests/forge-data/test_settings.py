"""DataSettings: defaults, limits, and what is refused."""

import ast
import inspect

import pytest

from forge_data import DataSettings


def test_defaults():
    """Only the file is required."""
    made = DataSettings(data_path="train.jsonl")
    assert (made.eval_data_path, made.validation_split, made.max_seq_len) == (None, 0.0, None)
    with pytest.raises(TypeError):
        DataSettings()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("data_path", ""),
        ("eval_data_path", ""),
        ("validation_split", 1.0),
        ("validation_split", -0.1),
        ("validation_split", float("nan")),
        ("validation_split", float("inf")),
        ("max_seq_len", 0),
        ("max_seq_len", -5),
    ],
)
def test_out_of_range(field, value):
    """A value out of range is a ValueError that names the field."""
    with pytest.raises(ValueError, match=field):
        DataSettings(**({"data_path": "x"} | {field: value}))


@pytest.mark.parametrize(
    ("field", "value"),
    [("data_path", None), ("data_path", 3), ("eval_data_path", True), ("validation_split", True), ("validation_split", "0.1"),
     ("max_seq_len", True), ("max_seq_len", 512.0), ("max_seq_len", "512")],
)  # fmt: skip
def test_wrong_type(field, value):
    """A value of another type is a TypeError that names the field; a bool is no number."""
    with pytest.raises(TypeError, match=field):
        DataSettings(**({"data_path": "x"} | {field: value}))


def test_an_integer_is_a_number():
    """A whole number is accepted where a fraction is wanted."""
    assert DataSettings(data_path="x", validation_split=0).validation_split == 0


def test_one_source_of_held_out_rows():
    """A file of held-out rows and a share of the training rows exclude each other."""
    with pytest.raises(ValueError, match="eval_data_path .* and validation_split .* give one of them"):
        DataSettings(data_path="x", eval_data_path="y", validation_split=0.1)
    assert DataSettings(data_path="x", eval_data_path="y").eval_data_path == "y"


def test_every_setting_has_help():
    """Each field has a docstring below it: the command line's help is made from them."""
    body = ast.parse(inspect.getsource(DataSettings)).body[0].body
    fields = [node for node in body if isinstance(node, ast.AnnAssign)]
    assert len(fields) == 4
    for field in fields:
        after = body[body.index(field) + 1]
        assert isinstance(after, ast.Expr), field.target.id
        assert after.value.value.endswith(".")
