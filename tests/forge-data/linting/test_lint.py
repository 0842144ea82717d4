"""The lint of rows and stores, against a corpus of seeded defects and against clean rows."""

import json
from random import Random

import pytest
from tokenizers import processors

from forge_data import DataError, TokenStore, prepare
from forge_data.findings._rules import RULES, SET_RULES
from forge_data.linting._lint import lint

from ..defects import DEFECTS
from ..families import FAMILIES
from ..lint_rows import TOOLED, clean, completion, preference, tokenizer, tokens, tooled, turn, words


@pytest.fixture(scope="module")
def tokenizers():
    made = {}

    def of(template):
        if template not in made:
            made[template] = tokenizer(template)
        return made[template]

    return of


@pytest.fixture
def lines(tmp_path):
    """Write lines, surrogates included, and return the path."""

    def write(rows, name="train.jsonl"):
        path = tmp_path / name
        path.write_text("".join(row + "\n" for row in rows), encoding="utf-8")
        return path

    return write


@pytest.mark.parametrize("defect", DEFECTS, ids=[each.name for each in DEFECTS])
def test_every_defect_is_found(defect, tokenizers, lines):
    """All twenty rows of each defect are found by rule, severity, row and field; no other row stops or has that rule."""
    rows, planted = defect.file(0)
    report = lint(lines(rows), tokenizers(defect.template), **defect.settings)
    expected = {
        (finding.row, finding.field)
        for finding in report.findings
        if (finding.rule, finding.severity) == (defect.rule, defect.severity)
    }
    assert expected >= set(planted.items())
    strangers = [finding for finding in report.findings if finding.row not in planted]
    # A template without turn ends is a fault of every row.
    if defect.rule != "untrained_turn_end":
        assert not [str(finding) for finding in strangers if finding.severity == "stop" or finding.rule == defect.rule]
    assert report.rows == len(rows)
    assert all(finding.what and finding.fix and finding.file == "train.jsonl" for finding in report.findings)


MEDIA_RULES = {rule for kind in ("image", "video", "audio") for rule in (f"lossy_{kind}", f"{kind}_mark_in_text")}


def test_the_corpus_is_large_enough():
    """There are at least fifteen defects, twenty rows each; with the tests of whole sets and of images they cover all rules."""
    assert len(DEFECTS) >= 15
    assert all(len(defect.file(0)[1]) == 20 for defect in DEFECTS)
    assert {defect.rule for defect in DEFECTS} | {*SET_RULES, *MEDIA_RULES} == set(RULES)


@pytest.mark.parametrize("make", [clean, tooled, completion, preference, tokens])
def test_clean_rows(make, tokenizers, lines):
    """Clean rows of every format have no finding."""
    rng = Random(make.__name__)
    rows = [json.dumps(make(rng)) for _ in range(300)]
    assert str(lint(lines(rows), tokenizers(TOOLED))) == "0 stops, 0 warnings in 300 rows"


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_clean_rows_of_every_family(family, lines):
    """Whatever a vendor's template writes (BOS, headers, turn ends, default system prompts), clean rows have no finding."""
    rng = Random(family.name)
    rows = [clean(rng)["messages"] for _ in range(20)]
    expected = [json.dumps({"messages": [each for each in row if each["role"] != "system"]}) for row in rows]
    assert str(lint(lines(expected), family.tokenizer())) == "0 stops, 0 warnings in 20 rows"


@pytest.mark.parametrize("seed", range(20))
def test_repeated_rows(seed, tokenizers, lines):
    """Each repetition is reported as one of the first."""
    rng = Random(seed)
    rows = [json.dumps(clean(rng)) for _ in range(40)]
    again = sorted(rng.sample(range(40), 5))
    rows += [rows[at] for at in again]
    report = lint(lines(rows), tokenizers(TOOLED))
    assert [(each.row, each.what.rpartition(":")[2]) for each in report.findings] == [
        (41 + n, str(at + 1)) for n, at in enumerate(again)
    ]
    assert report.counts == {"duplicate_row": 5}
    assert report.stops == 0


MARKED = {
    "unpaired": [{"prompt": "a?", "completion": "b", "label": label} for label in (True, False, True, False)],
    "pairs": [{"prompt": "a?", "chosen": "b", "rejected": "c", "margin": margin} for margin in (1, 0.1, 1.0, 0.1)],
    "texts": [{"text": "good film", "label": label} for label in ("1", "no", 1, "no")],
    "labels": [{"text": "good film", "labels": labels} for labels in (["a", "b"], ["a"], ["b", "a"], ["a"])],
}


@pytest.mark.parametrize("kind", MARKED)
def test_labels_that_contradict_each_other(kind, tokenizers, lines, tmp_path):
    """The same text with another label is none of the repetitions, which are those of the row that has its label."""
    data, tokenizer = lines([json.dumps(row) for row in MARKED[kind]]), tokenizers(TOOLED)
    reports = [lint(data, tokenizer)]
    if kind in ("unpaired", "pairs"):
        store = prepare(data, tokenizer, tmp_path / "store", progress=False)
        reports += [store.lint, lint(store)]
    for report in reports:
        found = [(each.rule, each.row, each.what.partition(",")[0][-1]) for each in report.findings]
        assert found == [("conflicting_labels", 2, "1"), ("duplicate_row", 3, "1"), ("duplicate_row", 4, "2")]


@pytest.mark.parametrize("seed", range(20))
def test_rows_of_the_evaluation_that_are_trained_on(seed, tokenizers, lines, tmp_path):
    """Held-out rows that are trained on are stops, whether given as rows or as a store."""
    rng = Random(seed)
    train, held_out = ([clean(rng) for _ in range(30)] for _ in range(2))
    places = sorted(rng.sample(range(30), 3))
    for place in places:
        held_out[place] = rng.choice(train)
    paths = [lines(map(json.dumps, rows), name) for rows, name in ((train, "train.jsonl"), (held_out, "eval.jsonl"))]
    report = lint(paths[0], tokenizers(TOOLED), eval_data=paths[1])
    assert [(each.file, each.row) for each in report.findings if each.severity == "stop"] == [
        ("eval.jsonl", place + 1) for place in places
    ]
    if seed == 0:
        stores = [prepare(path, tokenizers(TOOLED), tmp_path / path.stem, progress=False) for path in paths]
        found = lint(stores[0], eval_data=stores[1]).findings
        assert [(each.rule, each.file, each.row) for each in found if each.severity == "stop"] == [
            ("train_eval_overlap", "eval.jsonl", place + 1) for place in places
        ]


@pytest.mark.parametrize("seed", range(20))
def test_tokens_lost_to_length(seed, tokenizers, lines, tmp_path):
    """The loss is reported once, with the longest row; under `error` each row is a stop."""
    rng = Random(seed)
    rows = [clean(rng) for _ in range(40)]
    place = rng.randrange(40)
    rows[place]["messages"].append(turn("user", words(rng)))
    rows[place]["messages"].append(turn("assistant", words(rng, 400, 500)))
    path = lines(map(json.dumps, rows))
    (finding,) = lint(path, tokenizers(TOOLED), max_seq_len=1000).findings
    assert (finding.rule, finding.severity, finding.row) == ("lost_to_length", "warn", place + 1)
    assert "% of all tokens" in finding.what
    (finding,) = lint(path, tokenizers(TOOLED), max_seq_len=1000, on_overflow="error").findings
    assert (finding.rule, finding.severity, finding.row) == ("lost_to_length", "stop", place + 1)
    if seed < 3:
        overflow = ("drop", "truncate", "split")[seed]
        store = prepare(path, tokenizers(TOOLED), tmp_path / "store", max_seq_len=1000, on_overflow=overflow, progress=False)
        assert ("lost_to_length" in store.lint.counts) == (overflow != "split")


def test_two_formats_in_one_file(tokenizers, lines):
    """A row of another format than the rows before it is reported, and the lint continues after it."""
    rng = Random(1)
    rows = [clean(rng), clean(rng), completion(rng), clean(rng)]
    (finding,) = lint(lines(map(json.dumps, rows)), tokenizers(TOOLED)).findings
    assert (finding.rule, finding.severity, finding.row) == ("unreadable_row", "stop", 3)
    assert "prompt_completion" in finding.what


def test_preprocess_runs_first(tokenizers, lines):
    """Rows are linted as the user's function returns them; where it fails, the row is named."""
    rng = Random(1)
    rows = [{"chat": clean(rng)["messages"]} for _ in range(5)] + [{"talk": []}]
    report = lint(lines(map(json.dumps, rows)), tokenizers(TOOLED), preprocess=lambda row: {"messages": row["chat"]})
    assert [(each.rule, each.row) for each in report.findings] == [("unreadable_row", 6)]
    assert "KeyError" in report.findings[0].what


def test_a_store_brings_what_was_found_while_it_was_prepared(tokenizers, lines, tmp_path):
    """A store and its rows have the same findings; a view has its own of the rules about whole sets."""
    rng = Random(5)
    rows = [clean(rng) for _ in range(30)]
    rows[3]["messages"][-1]["content"] = " "
    rows[9] = rows[8]
    path = lines(map(json.dumps, rows))
    store = prepare(path, tokenizers(TOOLED), tmp_path / "store", progress=False)
    assert store.lint == lint(path, tokenizers(TOOLED)) == lint(store)
    assert store.lint.counts == {"empty_turn": 1, "duplicate_row": 1}
    assert lint(store.select(range(9))).counts == {"empty_turn": 1}


def test_a_store_of_tokens_is_looked_at_with_a_tokenizer(tokenizers, lines, tmp_path):
    """Token ids that came without a tokenizer are linted as soon as one is given."""
    rng = Random(5)
    rows = [tokens(rng) for _ in range(10)]
    rows[2] = {"input_ids": [420, 420, 30, 31, 422], "labels": [-100, -100, 30, 31, 422], "len": 5}
    rows[4] = {"input_ids": [40, 41, 42], "labels": [-100, 41, 42], "len": 3}
    store = TokenStore.from_jsonl(lines(map(json.dumps, rows)), tmp_path / "store")
    assert lint(store).counts == {}
    found = lint(store, tokenizers(TOOLED)).findings
    assert {(each.rule, each.row) for each in found} == {("double_bos", 3), ("missing_eos", 5)}


def test_the_tokenizer_of_a_store_is_loaded_only_to_read_rows(tokenizers, lines, tmp_path, monkeypatch):
    """Its samples were linted when it was prepared; only held-out rows, not those of a store, are read with it."""
    path = lines([json.dumps(clean(Random(seed))) for seed in range(3)])
    store = prepare(path, tokenizers(TOOLED), tmp_path / "store")
    load, loads = TokenStore.tokenizer, []
    monkeypatch.setattr(TokenStore, "tokenizer", lambda store: loads.append(store.path) or load(store))
    lint(store)
    lint(store, eval_data=store)
    assert loads == []
    assert lint(store, eval_data=path).counts["train_eval_overlap"] == 3
    assert loads == [store.path]


@pytest.mark.parametrize(
    "expected",
    [{"max_seq_len": 8}, {"on_overflow": "split"}, {"train_on": "all"}, {"format": "messages"}, {"preprocess": "json:loads"}],
)
def test_what_is_said_of_rows_where_there_are_none(expected, tokenizers, lines, tmp_path):
    """Arguments for rows are refused by name for a store, unless rows of the evaluation are read."""
    path = lines([json.dumps(clean(Random(seed))) for seed in range(3)])
    store = prepare(path, tokenizers(TOOLED), tmp_path / "store")
    (name,) = expected
    with pytest.raises(DataError, match=f"`{name}` is for rows, and .*store is a token store, which was prepared already"):
        lint(store, **expected)
    with pytest.raises(DataError, match=name):
        lint(store, eval_data=store, **expected)
    assert lint(store, eval_data=path, train_on="all").counts["train_eval_overlap"] == 3


def test_bos_of_tokenizer_and_text(lines):
    """A BOS that the row writes before the tokenizer's own is found in plain text too."""
    made = tokenizer()
    made._tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 420)]
    )
    rows = [{"prompt": "<|endoftext|>why ", "completion": "so"}, {"prompt": "why ", "completion": "so"}]
    assert [(each.rule, each.row, each.field) for each in lint(lines(map(json.dumps, rows)), made).findings] == [
        ("double_bos", 1, "prompt")
    ]


def test_rows_want_a_tokenizer(lines):
    """Rows without a tokenizer are refused; an unknown format is refused by name."""
    path = lines([json.dumps({"text": "so"})])
    with pytest.raises(DataError, match="give a `tokenizer`"):
        lint(path)
    with pytest.raises(DataError, match="did you mean 'messages'"):
        lint(path, tokenizer(), format="message")
