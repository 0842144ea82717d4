"""Fields that nobody reads are no error; those that are misspelt are named."""

import pytest

from forge_data import DataError, lint, prepare, tokenize
from forge_data.formats._unread import is_empty

ROW = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}
HARMLESS = [
    ROW | {"score": float("nan"), "meta": {"x": float("inf"), "y": [float("nan")]}, "id": 7, "annotations": [], "none": None},
    {"messages": [ROW["messages"][0] | {"id": "m1", "country": "Utopia"}, ROW["messages"][1] | {"annotations": []}]},
    {"messages": [each | {"name": None, "refusal": None, "audio": {}, "logprobs": float("nan")} for each in ROW["messages"]]},
    {"messages": [each | {"tool_calls": [], "tool_call_id": "", "reasoning": None} for each in ROW["messages"]]},
    ROW | {"margin": float("nan"), "images": [], "tools": []},
    {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi", "annotations": [], "image": {"path": None}}]},
            ROW["messages"][1],
        ]
    },
    {"conversations": [{"from": "human", "value": "hi", "id": 3}, {"from": "gpt", "value": "ho", "markdown": None}]},
]


def test_deep_metadata():
    """A field nested deeper than Python follows is passed over as any other."""
    deep: dict = {}
    for _ in range(100_000):
        deep = {"x": deep}
    assert not is_empty(deep)
    while deep:  # Python frees what is so deep by following it
        deep = deep["x"]


def test_harmless(write_rows, chatml_tokenizer, tmp_path):
    """Rows with metadata, empty fields and numbers that are none become the tokens of the row without them."""
    plain = tokenize(ROW, chatml_tokenizer).labels.tolist()
    for row in HARMLESS:
        assert tokenize(row, chatml_tokenizer).labels.tolist() == plain
    store = prepare(write_rows(HARMLESS[:-1]), chatml_tokenizer, tmp_path / "store")
    assert [example.labels.tolist() for example in store] == [plain] * (len(HARMLESS) - 1)
    assert lint(write_rows([HARMLESS[0]]), chatml_tokenizer).stops == 0


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [{"role": "user", "contents": "hi"}]}, r"messages\[0\].contents is .*; did you mean 'content'\?"),
        (
            {"messages": [ROW["messages"][0], {"role": "assistant", "content": "", "reasoning_contents": "x"}]},
            r"messages\[1\].reasoning_contents is .*; did you mean 'reasoning_content'\?",
        ),
        ({"conversations": [{"from": "human", "values": "hi"}]}, r"conversations\[0\].values is .*; did you mean 'value'\?"),
        ({"mesages": []}, "no known format; .* with `rename_columns`, such as mesages=messages$"),
        (
            {"promt": "a", "response": "b"},
            r"such as promt=instruction response=output .* or promt=prompt response=completion \(text",
        ),
        (
            {"prompt": "a", "response": "b"},
            r"such as prompt=instruction response=output .* or response=completion \(text",
        ),
        ({"query": "a", "completion": "b"}, r"such as query=instruction completion=output \(asked .* or query=prompt \(text"),
        (
            {"instruction": "a", "respons": "b"},
            r"such as respons=output .* or instruction=prompt respons=completion \(",
        ),
        ({"prompt": "a", "id": 1}, "a prompt without an answer is for"),
        (ROW | {"tools": [{"x": float("nan")}]}, r"field tools\[0\].x is nan, which is not a JSON number"),
        (ROW | {"chat_template_kwargs": {"x": float("inf")}}, "field chat_template_kwargs.x is inf"),
        ({"input_ids": [1, float("nan")], "labels": [1, 2]}, r"field input_ids\[1\] is float nan"),
        ({"messages": [{"role": "user", "content": "a", "thoughts": "b"}]}, r"messages\[0\].thoughts is .*would be ignored"),
    ],
)
def test_named(row, message, chatml_tokenizer):
    """A field that says something and would be ignored is refused, with the known one that is spelled like it."""
    with pytest.raises(DataError, match=message):
        tokenize(row, chatml_tokenizer)


def test_a_chosen_format(chatml_tokenizer):
    """A row that lacks the fields of the format that was chosen is told how to rename those that it has."""
    with pytest.raises(DataError, match="but the format messages needs messages; .*`rename_columns`, such as mesages=messages"):
        tokenize({"mesages": []}, chatml_tokenizer, format="messages")
