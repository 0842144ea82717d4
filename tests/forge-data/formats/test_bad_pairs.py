"""Rows of preferences that prefer nothing: an error by default, or left out and counted."""

import re

import pytest

from forge_data import BadPairError, DataError, lint, prepare
from forge_data.cli import _parser as _cli
from forge_data.preparing import _job as _work, _pipeline

USER = {"role": "user", "content": "count"}
GOOD = [
    {
        "prompt": [USER],
        "chosen": [{"role": "assistant", "content": f"{n}!"}],
        "rejected": [{"role": "assistant", "content": f"{n}?"}],
    }
    for n in range(6)
]
SAME = GOOD[0] | {"rejected": GOOD[0]["chosen"]}
TRIMMED = {
    "prompt": [USER],
    "chosen": [{"role": "assistant", "content": "4"}],
    "rejected": [{"role": "assistant", "content": "4  "}],
}
TWO = {"prompt_chosen": [USER], "prompt_rejected": [USER, USER], "chosen": GOOD[0]["chosen"], "rejected": GOOD[0]["rejected"]}
EMPTY = GOOD[0] | {"chosen": [{"role": "assistant", "content": ""}]}
GONE = {"prompt": [USER], "chosen": GOOD[0]["chosen"], "rejected": None}
LONG = {
    "prompt": [USER],
    "chosen": [{"role": "assistant", "content": "a b c " * 40 + "x"}],
    "rejected": [{"role": "assistant", "content": "a b c " * 40 + "y"}],
}
BAD = {
    "same": (SAME, "same_answers"),
    "same tokens": (TRIMMED, "same_answers"),
    "prompts": (TWO, "prompts_differ"),
    "empty": (EMPTY, "empty_answer"),
    "gone": (GONE, "empty_answer"),
    "cut": (LONG, "same_answers_within_max_seq_len"),
}
SETTINGS = {"max_seq_len": 60, "on_overflow": "truncate", "progress": False}


@pytest.fixture
def trims(with_template):
    """A template that strips contents, as Llama-3's does."""
    return with_template(
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] | trim + '<|im_end|>' + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )


@pytest.mark.parametrize("rows", [1, 512])
@pytest.mark.parametrize("kind", BAD)
def test_an_error_by_default(kind, rows, write_rows, trims, tmp_path, monkeypatch):
    """The first bad row ends it with its place and reason, for any batch size, and leaves nothing behind."""
    monkeypatch.setattr(_work, "_ROWS", rows)
    row, reason = BAD[kind]
    with pytest.raises(BadPairError, match=r"^train.jsonl:3: ") as caught:
        prepare(write_rows([*GOOD[:2], row, SAME, *GOOD[2:]]), trims, tmp_path / "store", **SETTINGS)
    assert caught.value.reason == reason
    assert [each.name for each in tmp_path.iterdir()] == ["train.jsonl"]


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 300, 1 << 20])
@pytest.mark.parametrize("workers", [1, 2])
def test_left_out_and_counted(chunk, workers, write_rows, trims, tmp_path, monkeypatch):
    """Under "skip" each is left out by its reason and place; rows and tokens add up, and the lint warns of each."""
    monkeypatch.setattr(_pipeline, "_CHUNK_BYTES", chunk)
    rows = [row for pair in zip(GOOD, [row for row, _ in BAD.values()], strict=True) for row in pair]
    store = prepare(write_rows(rows), trims, tmp_path / "store", on_bad_pair="skip", num_proc=workers, **SETTINGS)
    books = store.accounting
    assert (books.read, books.kept, books.samples) == (12, 6, 12)
    assert books.dropped == {"same_answers": 2, "prompts_differ": 1, "empty_answer": 2, "same_answers_within_max_seq_len": 1}
    assert [row["place"] for row in store.dropped()] == [f"train.jsonl:{2 * n}" for n in range(1, 7)]
    assert [row["reason"] for row in store.dropped()] == [reason for _, reason in BAD.values()]
    assert [store.source(at) for at in range(0, 12, 2)] == [f"train.jsonl:{n}" for n in range(1, 13, 2)]
    message = sorted((each.row, each.rule, each.severity) for each in store.lint.findings if each.row % 2 == 0)
    rules = [reason.removesuffix("_within_max_seq_len") for _, reason in BAD.values()]
    assert [each for each in message if each[1] != "lost_to_length"] == [
        (2 * n, rule, "warn") for n, rule in enumerate(rules, 1)
    ]
    assert not store.lint.stops
    assert store.settings["on_bad_pair"] == "skip"


def test_the_setting_is_named_at_the_first_row_too(write_rows, chatml_tokenizer, tmp_path):
    """Rows behind it are not known yet, and equal answers are common where answers were drawn from a model."""
    with pytest.raises(BadPairError, match=r"take the row out, or mend it \(on_bad_pair=skip leaves such rows out\)$"):
        prepare(write_rows([SAME, *GOOD]), chatml_tokenizer, tmp_path / "store", progress=False)


def test_both_ways_make_the_same_store(write_rows, chatml_tokenizer, tmp_path):
    """Where no row is bad, the option makes no difference to what is trained on."""
    path = write_rows(GOOD)
    one, other = (prepare(path, chatml_tokenizer, tmp_path / how, on_bad_pair=how) for how in ("error", "skip"))
    assert one.fingerprint == other.fingerprint
    assert one.inputs != other.inputs


def test_nothing_but_bad_pairs(write_rows, chatml_tokenizer, tmp_path):
    """A file of which nothing is left is refused with the reasons."""
    with pytest.raises(DataError, match="no row is left to train on: kept 0 of 2 rows; dropped 2 same_answers"):
        prepare(write_rows([SAME, SAME]), chatml_tokenizer, tmp_path / "store", on_bad_pair="skip")


def test_an_answer_alone(write_rows, chatml_tokenizer, tmp_path):
    """An empty unpaired answer is as bad, wanted or not."""
    rows = [
        {"prompt": "a", "completion": text, "label": label}
        for text, label in (("b", True), ("", False), (" ", True), ("c", False))
    ]
    with pytest.raises(BadPairError, match="train.jsonl:2: field completion is empty"):
        prepare(write_rows(rows), chatml_tokenizer, tmp_path / "store")
    store = prepare(write_rows(rows), chatml_tokenizer, tmp_path / "store", on_bad_pair="skip")
    assert store.desirable.tolist() == [True, False]
    assert store.accounting.dropped == {"empty_answer": 2}


def test_the_verbs(write_rows, chatml_tokenizer, tmp_path, capsys):
    """In a shell a bad pair is one line and status 2; with --on-bad-pair skip it is counted, and linted as a warning."""
    chatml_tokenizer.save_pretrained(tmp_path / "model")
    rows, model, store = str(write_rows([*GOOD, SAME])), str(tmp_path / "model"), str(tmp_path / "store")
    words = ["prepare", rows, "--tokenizer", model, "--store-dir", store, "--quiet"]
    assert _cli.main(words) == 2
    assert (
        capsys.readouterr().err
        == "forge-data: train.jsonl:7: field rejected is the same as chosen; take the row out, or mend it (--on-bad-pair skip "
        "leaves such rows out)\n"
    )
    assert _cli.main([*words, "--on-bad-pair", "skip"]) == 0
    assert "kept 6 of 7 rows as 12 samples; dropped 1 same_answers" in capsys.readouterr().out
    assert [_cli.main(["lint", rows, "--tokenizer", model, *more]) for more in ([], ["--on-bad-pair", "skip"])] == [1, 0]
    assert _cli.main(["lint", store]) == 0
    assert "warn same_answers (1)" in capsys.readouterr().out


def test_the_lint_goes_on(write_rows, trims):
    """`lint` reports every bad pair once, as a stop; where they are skipped, as a warning."""
    path = write_rows([*GOOD, *(row for row, _ in BAD.values())])
    for how, severity in (("error", "stop"), ("skip", "warn")):
        report = lint(path, trims, on_bad_pair=how, max_seq_len=60, on_overflow="truncate")
        found = [each for each in report.findings if each.rule in ("same_answers", "prompts_differ", "empty_answer")]
        assert sorted((each.row, each.severity) for each in found) == [(row, severity) for row in range(7, 13)]
        assert all(re.match("chosen|rejected|prompt_chosen", each.field) for each in found)


def test_an_argument_that_is_none(chatml_tokenizer, tmp_path):
    """A value other than the two is refused with both."""
    with pytest.raises(DataError, match="`on_bad_pair` is 'drop'; allowed: error, skip"):
        prepare("x.jsonl", chatml_tokenizer, tmp_path / "store", on_bad_pair="drop")
