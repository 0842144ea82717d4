"""DataSettings: defaults, limits, and what is refused."""

import ast
import inspect
from typing import get_args

import attrs
import pytest

from forge_data import DataSettings, PreferenceDataSettings, PretrainDataSettings, PromptDataSettings
from forge_data._formats import BUILT_IN
from forge_data._options import ON_BAD_PAIR, ON_LONG_PROMPT, ON_OVERFLOW, TURNS
from forge_data._settings import Format, OnBadPair, OnLongPrompt, OnOverflow, TrainOn, TurnsForm


def test_defaults():
    """Only the data is required."""
    made = DataSettings(data_path="train.jsonl")
    assert attrs.asdict(made) == {
        "data_path": "train.jsonl",
        "eval_data_path": None,
        "validation_split": 0.0,
        "max_seq_len": None,
        "data_format": "auto",
        "train_on": "assistant",
        "turns": "auto",
        "turn_end": None,
        "train_on_turn_end": "turn",
        "chat_template": None,
        "chat_template_kwargs": None,
        "system_prompt": None,
        "on_overflow": "drop",
        "preprocess": None,
        "rename_columns": None,
        "on_bad_row": "error",
        "max_bad_rows": 0.01,
        "max_samples": None,
        "num_proc": None,
        "lint": "on",
    }
    with pytest.raises(TypeError):
        DataSettings()


@pytest.mark.parametrize("path", ["a.jsonl", ["a", "b"], {"a": 1, "b": 0.5}])
@pytest.mark.parametrize("field", ["data_path", "eval_data_path"])
def test_paths(field, path):
    """One path, a list of them, or a mapping to weights; a list becomes a tuple, which cannot be changed."""
    assert getattr(DataSettings(**({"data_path": "x"} | {field: path})), field) == (
        tuple(path) if isinstance(path, list) else path
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("data_path", ""),
        ("data_path", []),
        ("data_path", ["a", ""]),
        ("data_path", {}),
        ("data_path", {"a": 0}),
        ("data_path", {"a": float("nan")}),
        ("data_path", {"a": float("inf")}),
        ("eval_data_path", ""),
        ("validation_split", 1.0),
        ("validation_split", -0.1),
        ("validation_split", float("nan")),
        ("validation_split", float("inf")),
        ("max_seq_len", 0),
        ("max_seq_len", -5),
        ("num_proc", 0),
        ("data_format", ""),
        ("data_format", "mesages"),
        ("train_on", "robot"),
        ("on_overflow", "cut"),
        ("lint", "maybe"),
        ("preprocess", "function"),
        ("preprocess", "a.b:"),
        ("preprocess", "a-b:c"),
    ],
)
def test_out_of_range(field, value):
    """A value out of range is a ValueError that names the field."""
    with pytest.raises(ValueError, match=field):
        DataSettings(**({"data_path": "x"} | {field: value}))


@pytest.mark.parametrize(
    ("field", "value"),
    [("data_path", None), ("data_path", 3), ("data_path", ["a", 3]), ("data_path", {"a": "1"}), ("data_path", {"a": True}),
     ("eval_data_path", True), ("validation_split", True), ("validation_split", "0.1"), ("max_seq_len", True),
     ("max_seq_len", 512.0), ("max_seq_len", "512"), ("num_proc", 2.0), ("train_on", 1), ("lint", 1), ("preprocess", len),
     ("data_format", None)],
)  # fmt: skip
def test_wrong_type(field, value):
    """A value of another type is a TypeError that names the field; a bool is no number."""
    with pytest.raises(TypeError, match=field):
        DataSettings(**({"data_path": "x"} | {field: value}))


def test_an_integer_is_a_number():
    """A whole number is accepted where a fraction is wanted."""
    assert DataSettings(data_path="x", validation_split=0).validation_split == 0


def test_held_out_rows_as_a_number():
    """A whole number counts samples; a float of it is refused, as a share of 1 would leave nothing."""
    assert DataSettings(data_path="x", validation_split=200).validation_split == 200
    with pytest.raises(ValueError, match="less than 1, or a whole number of samples, got 200.0"):
        DataSettings(data_path="x", validation_split=200.0)


def test_one_source_of_held_out_rows():
    """A file of held-out rows and a share of the training rows exclude each other."""
    with pytest.raises(ValueError, match="eval_data_path .* and validation_split .* give one of them"):
        DataSettings(data_path="x", eval_data_path="y", validation_split=0.1)
    assert DataSettings(data_path="x", eval_data_path="y").eval_data_path == "y"


@pytest.mark.parametrize(
    ("settings", "data_path", "message"),
    [
        (DataSettings, {"a": {"data_format": "mesages"}}, "data_path: data_format of the entry a is .*did you mean 'messages'"),
        (DataSettings, {"a": {"weight": 1}, "b": {}}, "data_path: a has the weight 1, and b has none"),
        (
            DataSettings,
            {"a": {"max_seq_len": 9}},
            "data_path: the entry a has 'max_seq_len', which is not known; the memory of",
        ),
        (DataSettings, {"a": {"train_on": "al"}}, "data_path: of the entry a train_on must be one of assistant, last"),
        (DataSettings, {"a": {"on_overflow": "split"}}, "of the entry a on_overflow='split' has no effect without a limit"),
        (
            DataSettings,
            {"a": {"train_on": "all", "train_on_turn_end": "last"}},
            "of the entry a train_on_turn_end='last' has no",
        ),
        (DataSettings, {"a": {"preprocess": "rows"}}, "of the entry a preprocess must name a function"),
        (DataSettings, {"a": {"system_prompt": "file:no/such"}}, "system_prompt of the entry a names the file 'no/such'"),
        (PreferenceDataSettings, {"a": {"train_on": "all"}}, "of the entry a train_on='all' learns the prompt too"),
        (
            PromptDataSettings,
            {"a": {"train_on": "last"}},
            'a has {"train_on": "last"} of its own, and rows of this use have no',
        ),
        (
            PromptDataSettings,
            {"a": {"data_format": "alpaca"}},
            'data_path: the entry a has {"data_format": "alpaca"} of its own',
        ),
        (DataSettings, [{"path": "a", "weight": 1}, {"path": "a", "turns": "auto"}], "a#1 has the weight 1, and a#2 has none"),
        (DataSettings, [{"path": "a"}, {"path": "a", "train_on": "al"}], "of the entry a#2 train_on must be one of"),
        (DataSettings, [{"path": "a"}, {"path": "a", "turn": "auto"}], "the entry a#2 has 'turn', which is not known"),
        (DataSettings, [{"pth": "a"}], "data_path: entry 1 has 'pth', and no path; did you mean 'path'.; known: path, weight,"),
        (DataSettings, ["a", {"train_on": "last"}], "data_path: entry 2 has 'train_on', and no path; known"),
        (DataSettings, {"path": "a", "train_on": "last"}, "paths as its keys, and here 'path' is 'a': put it into a list"),
        (PretrainDataSettings, {"a": {"data_format": "text"}}, "rows of this use have no data_format"),
        (
            PreferenceDataSettings,
            {"a": {"data_format": "alpaca"}},
            "data_path: of the entry a data_format='alpaca' holds no preferences",
        ),
    ],
)
def test_data_sets_with_settings_of_their_own(settings, data_path, message):
    """What no rows of the use have is refused, and what is not known; the rest is kept as it was given."""
    with pytest.raises(ValueError, match=message):
        settings(data_path=data_path)
    assert settings(data_path={"a": {"rename_columns": {"x": "y"}}}).data_path == {"a": {"rename_columns": {"x": "y"}}}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("data_format", "alpaca"),
        ("rename_columns", {"q": "instruction"}),
        ("preprocess", "rows:change"),
        ("train_on", "last"),
        ("train_on_turn_end", "none"),
        ("turns", "history"),
        ("system_prompt", "Be brief."),
    ],
)
def test_a_setting_that_every_data_set_has_of_its_own(name, value):
    """Refused, for it has no effect; not where one data set, held-out ones too, has none."""
    own = {"a": {name: value}}
    with pytest.raises(ValueError, match=f"^{name}=.* has no effect: each entry of data_path has one of its own"):
        DataSettings(data_path=own, eval_data_path=own, **{name: value})
    for more in ({"data_path": own | {"b": {}}}, {"data_path": own, "eval_data_path": "x"}):
        assert getattr(DataSettings(**more, **{name: value}), name) == value


def test_no_dead_setting():
    """What becomes of rows that are too long has no effect without a limit: refused."""
    with pytest.raises(ValueError, match="on_overflow='split' has no effect without a limit"):
        DataSettings(data_path="x", on_overflow="split")
    assert DataSettings(data_path="x", on_overflow="split", max_seq_len=9).on_overflow == "split"


def test_the_same_words():
    """Settings and `prepare` accept the same values."""
    assert get_args(get_args(TrainOn)[0]) == ("assistant", "last", "completion", "all")
    assert get_args(OnOverflow) == ON_OVERFLOW
    assert get_args(TurnsForm) == TURNS
    assert get_args(get_args(Format)[0]) == ("auto", *BUILT_IN)


CLASSES = (DataSettings, PreferenceDataSettings, PretrainDataSettings, PromptDataSettings)


def test_every_setting_has_help():
    """Each field has a docstring below it, where it is written: the command line's help is made from them."""
    homes = {home for found in CLASSES for home in found.__mro__ if attrs.has(home)}
    written = []
    for home in homes:
        body = ast.parse(inspect.getsource(home)).body[0].body
        for field in (node for node in body if isinstance(node, ast.AnnAssign)):
            after = body[body.index(field) + 1]
            assert isinstance(after, ast.Expr), field.target.id
            assert after.value.value.endswith(".")
            written.append(field.target.id)
    assert set(written) == {field.name for found in CLASSES for field in attrs.fields(found)}
    # No field is written twice, but for what becomes of too long a prompt, which has other choices than too long a sample.
    assert sorted(written) == sorted([*set(written), "on_overflow"])


def test_only_what_has_an_effect():
    """Documents have no limit, train_on and format; prompts have nothing that is learned."""
    rows = {"data_path", "eval_data_path", "validation_split", "preprocess", "rename_columns", "on_bad_row"}
    rows |= {"max_bad_rows", "max_samples"}
    named = {found: {field.name for field in attrs.fields(found)} for found in CLASSES}
    assert named[PretrainDataSettings] == rows | {"num_proc", "lint"}
    template = {"chat_template", "chat_template_kwargs", "system_prompt"}
    assert named[PromptDataSettings] == rows | template | {"max_prompt_len", "on_overflow"}
    assert named[PreferenceDataSettings] == named[DataSettings] | {"on_bad_pair"}


@pytest.mark.parametrize("found", CLASSES)
def test_held_out_rows_have_one_source_everywhere(found):
    """In every class, two ways of holding rows out exclude each other."""
    with pytest.raises(ValueError, match="give one of them"):
        found(data_path="x", eval_data_path="y", validation_split=0.1)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            {"data_format": "messages"},
            "data_format='messages' holds no preferences: use auto or preference or unpaired_preference",
        ),
        ({"train_on": "all"}, "train_on='all' learns the prompt too"),
        ({"on_overflow": "split", "max_seq_len": 9}, "on_overflow='split' cannot cut a preference into several"),
        ({"on_overflow": "truncate"}, "on_overflow='truncate' has no effect without a limit: set max_seq_len"),
        ({"on_bad_pair": "drop"}, "on_bad_pair must be one of error, skip"),
    ],
)
def test_settings_of_preferences(given, expected):
    """Values that preferences cannot have are refused by name before any row is read."""
    with pytest.raises(ValueError, match=expected):
        PreferenceDataSettings(data_path="x", **given)
    assert PreferenceDataSettings(data_path="x", on_bad_pair="skip", data_format="unpaired_preference").on_bad_pair == "skip"


def test_settings_of_prompts():
    """A prompt is never cut, and what becomes of one that is too long has no effect without a limit."""
    assert PromptDataSettings(data_path="x", max_prompt_len=5, on_overflow="error").on_overflow == "error"
    with pytest.raises(ValueError, match="on_overflow must be one of drop, error"):
        PromptDataSettings(data_path="x", max_prompt_len=5, on_overflow="truncate")
    with pytest.raises(ValueError, match="on_overflow='error' has no effect without a limit: set max_prompt_len"):
        PromptDataSettings(data_path="x", on_overflow="error")
    assert get_args(OnLongPrompt) == ON_LONG_PROMPT
    assert get_args(OnBadPair) == ON_BAD_PAIR
