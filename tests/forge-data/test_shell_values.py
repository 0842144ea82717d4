"""Words of a shell as mappings: paths with weights, columns with names."""

import pytest

from forge_data import DataError
from forge_data._shell_values import columns_of, paths_of


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["a.jsonl"], "a.jsonl"),
        (["a.jsonl", "b.jsonl"], ["a.jsonl", "b.jsonl"]),
        (["a.jsonl=0.7", "b/*.parquet=3e-1"], {"a.jsonl": 0.7, "b/*.parquet": 0.3}),
        (["org/name:train=2"], {"org/name:train": 2.0}),
        (["year=2024/*.jsonl"], "year=2024/*.jsonl"),
        (["https://host/a.jsonl?version=2"], "https://host/a.jsonl?version=2"),
        (["https://host/a.jsonl=2"], {"https://host/a.jsonl": 2.0}),
        (["=2"], "=2"),
        (['a={"turns": "history"}', "a", "b=c"], [{"path": "a", "turns": "history"}, {"path": "a"}, {"path": "b=c"}]),
        (["a=0.5", "a=2"], [{"path": "a", "weight": 0.5}, {"path": "a", "weight": 2.0}]),
        (['a={"data_format": "alpaca"}', "b"], {"a": {"data_format": "alpaca"}, "b": {}}),
        (['a={"rename_columns": {"x=y": "text"}}'], {"a": {"rename_columns": {"x=y": "text"}}}),
        (['https://host/a?version=2={"weight": 1}'], {"https://host/a?version=2": {"weight": 1}}),
    ],
)
def test_paths(words, expected):
    """What follows the last = is a weight if it is a number, and not part of a query."""
    assert paths_of(words) == expected


def test_what_exists_is_a_path(tmp_path, monkeypatch):
    """A name that contains = is a file's where there is one; without it the same word has a weight."""
    monkeypatch.chdir(tmp_path)
    assert paths_of(["rows=1"]) == {"rows": 1.0}
    (tmp_path / "rows=1").touch()
    assert paths_of(["rows=1"]) == "rows=1"
    assert paths_of(["rows=1=0.5"]) == {"rows=1": 0.5}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a=0.5", "b"], "^a has the weight 0.5, and b has none; give every path a weight, or no path one"),
        (["b", "a=0.5"], "^a has the weight 0.5, and b has none"),
        (['a={"data_format": "alpaca"'], '^behind a stands \'{"data_format": "alpaca"\', which is no JSON'),
        (["a={data_format: alpaca}"], "^behind a stands '{data_format: alpaca}', which is no JSON"),
    ],
)
def test_paths_refused(words, message):
    """Every path has one weight, or none has any."""
    with pytest.raises(DataError, match=message):
        paths_of(words)


def test_columns():
    """A column's name may contain =, the name that it gets does not."""
    assert columns_of(["question=prompt", "a=b=completion"]) == {"question": "prompt", "a=b": "completion"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["question"], "`rename_columns` holds 'question'; write COLUMN=NAME"),
        (["=prompt"], "`rename_columns` holds '=prompt'"),
        (["question="], "`rename_columns` holds 'question='"),
        (["a=prompt", "a=text"], "the column 'a' two names, 'prompt' and 'text'"),
    ],
)
def test_columns_refused(words, message):
    """A word names one column and one name, and a column is named once."""
    with pytest.raises(DataError, match=message):
        columns_of(words)
