"""Rows that are refused: an error by default, or left out, counted and listed, up to a share."""

import json
import re

import pytest

from forge_data import DataError, DataSettings, TokenStore, lint, prepare, prepare_prompts
from forge_data._bad_rows import BadRows
from forge_data.cli import _parser
from forge_data.cli._commands import with_flags
from forge_data.preparing import _job, _pipeline
from forge_data.tokenizing._encode_apart import encode_apart

USER = {"role": "user", "content": "count"}


def good(n):
    """Make a row that can be read."""
    return {"messages": [USER, {"role": "assistant", "content": f"{n} ."}]}


BAD = [
    ('{"messages": [', "unreadable_row"),
    ({"words": "x"}, "unreadable_row"),
    ({"messages": [{"role": "bot", "content": "x"}]}, "unknown_role"),
    ({"messages": [USER, {"role": "assistant", "content": "a\ud800"}]}, "broken_unicode"),
    ({"messages": [USER, {"role": "assistant", "content": None}]}, "empty_turn"),
    ({"messages": [{"role": "system", "content": "refuse"}, *good(0)["messages"]]}, "template_refuses"),
    ('["no object"]', "unreadable_row"),
    ({"messages": [USER, {"role": "assistant", "content": "1 2 3 " * 40}]}, "longer_than_max_seq_len"),
    ({"messages": [{"role": "system", "content": "fail"}, *good(0)["messages"]]}, "unreadable_row"),
    ({"messages": [USER, {"role": "assistant", "content": " "}]}, "empty_turn"),
]
ROWS = [row for n, (row, _) in enumerate(BAD) for row in (good(n), row)] + [good(10), good(11)]
SETTINGS = {"on_bad_row": "skip", "max_bad_rows": 0.5, "max_seq_len": 90, "on_overflow": "error", "progress": False}


@pytest.fixture
def refusing(with_template):
    """A template that refuses a system message that says so."""
    return with_template(
        "{% for m in messages %}{% if m['content'] == 'refuse' %}{{ raise_exception('no') }}{% endif %}"
        "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )


@pytest.fixture
def path(tmp_path):
    """Good rows, with a bad one after each; half of a surrogate pair is written as JSON writes it."""
    file = tmp_path / "train.jsonl"
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in ROWS))
    return file


def stops_at(row):
    """Refuse a row as a user's function may; a lambda could not be sent to workers."""
    if row.get("messages", [{}])[0].get("content") == "fail":
        raise KeyError("fail")
    return row


@pytest.mark.parametrize("chunk", [1, 400, 1 << 20])
@pytest.mark.parametrize("rows", [1, 512])
def test_left_out_and_listed(path, refusing, tmp_path, monkeypatch, chunk, rows):
    """What is kept are the good rows; the bad ones are counted by reason and listed in order with their errors."""
    monkeypatch.setattr(_pipeline, "_CHUNK_BYTES", chunk)
    monkeypatch.setattr(_job, "_ROWS", rows)
    store = prepare(path, refusing, tmp_path / "store", preprocess=stops_at, **SETTINGS)
    books, listed = store.accounting, list(store.dropped())
    assert (books.read, books.kept) == (len(ROWS), len(ROWS) - len(BAD))
    assert [store.source(at) for at in range(len(store))] == [f"train.jsonl:{n}" for n in (*range(1, 20, 2), 21, 22)]
    assert [(row["place"], row["reason"]) for row in listed] == [
        (f"train.jsonl:{2 * n}", reason) for n, (_, reason) in enumerate(BAD, 1)
    ]
    assert all(row["error"].startswith(row["place"]) for row in listed)
    assert "preprocess" in listed[-2]["error"]
    assert books.dropped == {reason: sum(row["reason"] == reason for row in listed) for _, reason in BAD}
    assert sum(books.tokens_lost.values()) == books.tokens_read - books.tokens_kept == listed[7]["tokens"] + listed[9]["tokens"]
    found = {each.row: each.severity for each in store.lint.findings if not each.row % 2 and each.row < 21}
    assert found == {2 * n: "warn" for n in range(1, len(BAD) + 1)}
    assert not store.lint.stops


@pytest.mark.parametrize("share", [0.5, 0.3])
def test_an_answer_that_is_empty_is_a_bad_row(tmp_path, chatml_tokenizer, share):
    """Left out and counted, up to the share; kept for the lint to stop at where bad rows are an error."""
    rows = [{"prompt": f"{n}", "completion": answer} for n, answer in enumerate(["one", "", "two", " \n"])]
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert prepare(file, chatml_tokenizer, tmp_path / "all").lint.stops == 2
    settings = {"on_bad_row": "skip", "max_bad_rows": share, "progress": False}
    if share < 0.5:
        with pytest.raises(DataError, match=r"2 of 4 rows .* 2 empty_turn.*train.jsonl:2: field completion"):
            prepare(file, chatml_tokenizer, tmp_path / "store", **settings)
        return
    store = prepare(file, chatml_tokenizer, tmp_path / "store", **settings)
    assert [row["place"] for row in store.dropped()] == ["train.jsonl:2", "train.jsonl:4"]
    assert not store.lint.stops


@pytest.mark.slow
def test_any_number_of_processes(path, refusing, tmp_path, monkeypatch):
    """The bytes of the store do not depend on who reads the rows, and the good rows alone are trained on."""
    monkeypatch.setattr(_pipeline, "_CHUNK_BYTES", 300)
    made = [prepare(path, refusing, tmp_path / f"{n}", num_proc=n, **SETTINGS) for n in (1, 2)]
    assert made[0].sha256 == made[1].sha256
    (tmp_path / "good.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS if row not in [bad for bad, _ in BAD]))
    assert (
        prepare(tmp_path / "good.jsonl", refusing, tmp_path / "good").sha256["input_ids.bin"]
        == (prepare(path, refusing, tmp_path / "store", preprocess=stops_at, **SETTINGS).sha256["input_ids.bin"])
    )


@pytest.mark.parametrize("share", [0.0, 0.19])
def test_too_many(write_rows, chatml_tokenizer, tmp_path, share):
    """More of them than the share end it with their number, reasons and first errors, and leave nothing behind."""
    file = write_rows([good(n) for n in range(16)] + [{"words": "x"}, "{", {"messages": 1}, "{"])
    settings = {"on_bad_row": "skip", "max_bad_rows": share}
    with pytest.raises(DataError) as caught:
        prepare(file, chatml_tokenizer, tmp_path / "store", **settings)
    message = str(caught.value)
    assert message.startswith(f"4 of 20 rows (20.0%) are refused: 4 unreadable_row; `max_bad_rows` allows {share:.1%}.")
    assert "The first of them (and 1 more): train.jsonl:17 has the fields 'words'" in message
    assert message.index("train.jsonl:18 is not valid JSON") < message.index("train.jsonl:19: field messages is int 1")
    assert [each.name for each in tmp_path.iterdir()] == ["train.jsonl"]
    assert prepare(file, chatml_tokenizer, tmp_path / "store", on_bad_row="skip", max_bad_rows=0.2).accounting.kept == 16
    counts = lint(file, chatml_tokenizer, **settings).counts
    assert (counts["too_many_bad_rows"], counts["unreadable_row"]) == (1, 4)
    assert "too_many_bad_rows" not in lint(file, chatml_tokenizer, on_bad_row="skip", max_bad_rows=0.2).counts


def test_none_is_left(write_rows, chatml_tokenizer, tmp_path):
    """A file of which no row can be kept is refused as any other."""
    with pytest.raises(DataError, match="2 of 2 rows"):
        prepare(write_rows(["{", "{"]), chatml_tokenizer, tmp_path / "store", on_bad_row="skip", max_bad_rows=0.9)


def test_bad_pairs(write_rows, chatml_tokenizer, tmp_path):
    """A pair that prefers nothing is a bad row too; where those are skipped anyhow, the share does not count them."""
    pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
    file = write_rows([pair, pair | {"rejected": "b"}])
    with pytest.raises(DataError, match=r"1 of 2 rows .* 1 same_answers"):
        prepare(file, chatml_tokenizer, tmp_path / "store", on_bad_row="skip")
    store = prepare(file, chatml_tokenizer, tmp_path / "store", on_bad_row="skip", on_bad_pair="skip")
    assert store.accounting.dropped == {"same_answers": 1}
    assert ["error" in row for row in store.dropped()] == [False]


def test_prompts(write_rows, chatml_tokenizer, tmp_path):
    """Prompts that are refused are left out in the same way."""
    asked = [{"prompt": f"p {n}"} for n in range(6)]
    file = write_rows([*asked[:3], {"prompt": 7}, "{", {"text": "x"}, *asked[3:]])
    with pytest.raises(DataError, match="train.jsonl:4: field prompt is int 7"):
        prepare_prompts(file, chatml_tokenizer, tmp_path / "store")
    with pytest.raises(DataError, match=r"3 of 9 rows \(33.3%\) are refused: 3 unreadable_row"):
        prepare_prompts(file, chatml_tokenizer, tmp_path / "store", on_bad_row="skip")
    store = prepare_prompts(file, chatml_tokenizer, tmp_path / "store", on_bad_row="skip", max_bad_rows=0.5)
    assert [store[at].prompt for at in range(len(store))] == [row["prompt"] for row in asked]
    assert [(row["place"], row["reason"]) for row in store.dropped()] == [
        (f"train.jsonl:{n}", "unreadable_row") for n in (4, 5, 6)
    ]


def test_the_verbs(path, refusing, tmp_path, capsys):
    """In a shell the first bad row is status 2; with --on-bad-row skip all are counted."""
    refusing.save_pretrained(tmp_path / "model")
    words = ["prepare", str(path), "--tokenizer", str(tmp_path / "model"), "--store-dir", str(tmp_path / "store"), "--quiet"]
    assert _parser.main(words) == 2
    assert "train.jsonl:2 is not valid JSON" in capsys.readouterr().err
    assert _parser.main([*words, "--on-bad-row", "skip"]) == 2
    assert "--max-bad-rows allows 1.0%" in capsys.readouterr().err
    assert _parser.main([*words, "--on-bad-row", "skip", "--max-bad-rows", "0.5"]) == 0
    assert TokenStore.open(tmp_path / "store").accounting.dropped["template_refuses"] == 1
    assert _parser.main([*words, "--max-bad-rows", "0.5"]) == 2
    assert "--max-bad-rows (0.5) has no effect unless --on-bad-row is skip" in capsys.readouterr().err


@pytest.mark.parametrize("more", [{"max_bad_rows": 0.5}, {"on_bad_row": "drop"}, {"on_bad_row": "skip", "max_bad_rows": 1.0}])
def test_settings(more, write_rows, chatml_tokenizer, tmp_path):
    """A share without its choice, and values that are none, are refused by name, in settings and in arguments."""
    with pytest.raises(ValueError, match="^(max_bad_rows|on_bad_row)"):
        DataSettings(data_path="a", **more)
    with pytest.raises(DataError, match="^`(max_bad_rows|on_bad_row)`"):
        prepare(write_rows([good(1)]), chatml_tokenizer, tmp_path / "store", **more)


@pytest.mark.parametrize("bad", [[0], [7], [3, 4], [0, 2, 4, 6], list(range(8))])
def test_apart(bad):
    """Each sample comes back encoded or with its own error, in order, and none is encoded after the last that is asked for."""
    calls = []

    def encode(samples):
        calls.append(samples)
        for sample in samples:
            if sample in bad:
                raise DataError(str(sample))
        return [-sample for sample in samples]

    found = list(encode_apart(encode, list(range(8)), DataError(str(bad[0]))))
    assert [int(str(each)) if isinstance(each, DataError) else -each for each in found] == list(range(8))
    assert [isinstance(each, DataError) for each in found] == [at in bad for at in range(8)]
    calls.clear()
    next(encode_apart(encode, list(range(8)), DataError("")))
    assert all(len(call) <= 4 and call[0] == 0 for call in calls)


REMEDY = "(on_bad_row=skip leaves such rows out; `max_bad_rows` is the share of all rows that they may be, 0.01 if not set)"


@pytest.mark.parametrize(("row", "reason"), BAD)
def test_the_error_of_a_row_names_the_setting_that_leaves_it_out(row, reason, refusing, tmp_path):
    """Where a row before it could be used; not where every row is as bad, which no setting lets go on."""
    options = {"max_seq_len": 90, "on_overflow": "error", "progress": False, "preprocess": stops_at}
    text = row if isinstance(row, str) else json.dumps(row)
    for name, before in (("one", [json.dumps(good(1))]), ("none", [])):
        file = tmp_path / f"{name}.jsonl"
        file.write_text("\n".join([*before, text]) + "\n")
        if reason == "empty_turn" and row["messages"][-1]["content"] == " ":
            continue  # refused after all rows, with what was found in all of them
        with pytest.raises(Exception) as caught:  # whatever the row is refused for
            prepare(file, refusing, tmp_path / f"{name}_store", **options)
        assert str(caught.value).count(REMEDY) == (name == "one")
        assert str(caught.value).startswith(f"{name}.jsonl:{len(before) + 1}")


def test_the_error_of_a_prompt_names_it_too(chatml_tokenizer, tmp_path):
    """In Python as a setting, on the command line as a flag."""
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": "1 + 1"}) + "\n{}\n")
    with pytest.raises(DataError, match=rf"^prompts.jsonl:2.*{re.escape(REMEDY)}$") as caught:
        prepare_prompts(file, chatml_tokenizer, tmp_path / "store")
    flags = "(--on-bad-row skip leaves such rows out; --max-bad-rows is the share of all rows that they may be, "
    assert flags in with_flags(str(caught.value))


def test_the_remedy_lets_a_short_file_go_on(refusing, tmp_path):
    """With both settings a file goes on of which one row in twenty is bad; with the first alone its limit is named."""
    file = tmp_path / "short.jsonl"
    file.write_text("\n".join([*(json.dumps(good(at)) for at in range(19)), "{}"]) + "\n")
    with pytest.raises(DataError, match="`max_bad_rows` allows 1.0%"):
        prepare(file, refusing, tmp_path / "store", on_bad_row="skip", progress=False)
    assert (
        prepare(file, refusing, tmp_path / "store", on_bad_row="skip", max_bad_rows=0.1, progress=False).accounting.kept == 19
    )


@pytest.mark.parametrize(("bad", "rows", "share"), [(1, 3, "0.34"), (29, 100, "0.3"), (1, 20, "0.05")])
def test_a_limit_that_is_passed_names_the_share_that_is_not(bad, rows, share):
    """1 of 3 rows was told of 0.1, which is refused too; 0.29 of 100 is less than 29 in floating point."""
    seen = BadRows()
    for _ in range(bad):
        seen.add("unreadable_row", "a")
    with pytest.raises(DataError, match=rf"or raise `max_bad_rows` to {share}$"):
        seen.check(rows, 0.01)
    seen.check(rows, float(share))
    with pytest.raises(DataError, match="mend these rows$"):
        seen.check(bad, 0.5)  # every row is refused
