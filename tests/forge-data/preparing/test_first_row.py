"""The first row of each file, looked at before anything is loaded."""

import json

import pytest

from forge_data import DataError, check_first_row, prepare, prepare_prompts

GOOD = {"prompt": "one", "completion": "two"}


def written(path, rows):
    """Write rows as JSONL."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("rows", "settings"),
    [
        ([{"words": "x"}, GOOD], {}),
        ([{"prompt": 1, "completion": "x"}], {}),
        ([GOOD], {"format": "messages"}),
        ([{"question": "x", "answer": "y"}] * 3, {"rename_columns": {"question": "prompt", "anwser": "completion"}}),
        ([{"question": "x", "answer": "y"}] * 3, {"rename_columns": {"question": "prompt", "answer": "prompt"}}),
    ],
)
def test_it_is_what_prepare_refuses(rows, settings, tmp_path, chatml_tokenizer):
    """Both refuse the file, and neither a file of good rows."""
    file = written(tmp_path / "train.jsonl", rows)
    with pytest.raises(DataError, match=r"train\.jsonl:1|`rename_columns` names the column 'anwser'"):
        check_first_row(file, **settings)
    with pytest.raises(DataError):
        prepare(file, chatml_tokenizer, tmp_path / "store", **settings)
    check_first_row(written(tmp_path / "good.jsonl", [GOOD]))


def test_prompts_have_a_format_of_their_own(tmp_path, chatml_tokenizer):
    """A row without a prompt, and one that ends with the assistant."""
    answered = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}
    for row in ({"question": "x"}, answered):
        file = written(tmp_path / "prompts.jsonl", [row])
        said = []
        for check in (
            lambda: check_first_row(file, prompts=True),  # noqa: B023 - called at once
            lambda: prepare_prompts(file, chatml_tokenizer, tmp_path / "store"),  # noqa: B023 - called at once
        ):
            with pytest.raises(DataError) as caught:
                check()
            said.append(str(caught.value))
        assert said[0] == said[1]
    check_first_row(written(tmp_path / "prompts.jsonl", [{"prompt": "x", "answer": 1}]), prompts=True)


def test_a_column_that_only_later_rows_have_is_there(tmp_path):
    """A null counts as absent, so that the first row may lack what the second has; all are looked at before it is refused."""
    file = written(tmp_path / "train.jsonl", [{"prompt": "x", "completion": "y"}, {"question": "x", "completion": "y"}])
    check_first_row(file, rename_columns={"question": "prompt"})
    with pytest.raises(DataError, match=r"'quest', which no row has; did you mean 'question'"):
        check_first_row(file, rename_columns={"quest": "prompt"})


def test_nothing_is_refused_that_prepare_may_take(tmp_path):
    """Rows that preprocess makes, rows in memory, bad rows that are skipped, places that are not of this machine."""
    file = written(tmp_path / "train.jsonl", [{"words": "x"}, GOOD])
    check_first_row(file, preprocess="rows:made")
    check_first_row(file, on_bad_row="skip")
    check_first_row([{"words": "x"}])
    for place in ("https://host/train.jsonl", "org/name:train", f"{tmp_path}/data:train"):
        check_first_row(place)


def test_one_row_is_read(tmp_path):
    """Whatever follows it."""
    file = written(tmp_path / "train.jsonl", [GOOD])
    with file.open("a") as opened:
        opened.write("no row\n")
    check_first_row(file)


def test_the_line_of_a_csv_that_is_not_utf_8(tmp_path):
    """The line and the byte are named, as in JSONL, although text is decoded in blocks."""
    file = tmp_path / "train.csv"
    file.write_bytes(b"prompt,completion\r\nred,green\r\n" * 1 + b"gr\xfcn,rot\r\n")
    with pytest.raises(
        DataError, match=r"train\.csv:3 is not UTF-8: byte 0xfc at position 3 of the line .*save the file as UTF-8"
    ):
        check_first_row(file)
