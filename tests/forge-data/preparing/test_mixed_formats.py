"""Files of several formats in one store, and what came of each file."""

import json

import pytest

from forge_data import DataError, TokenStore, lint, prepare, stats

CHATS = [{"messages": [{"role": "user", "content": f"count {n}"}, {"role": "assistant", "content": "0 1 2"}]} for n in range(4)]
PAIRS = [{"prompt": "a", "completion": f"b {n}"} for n in range(3)]
ALPACA = [{"instruction": "a", "input": "", "output": f"c {n}"} for n in range(2)]
PREFERRED = [{"prompt": "a", "chosen": "b", "rejected": f"c {n}"} for n in range(2)]


@pytest.mark.parametrize("workers", [None, pytest.param(2, marks=pytest.mark.slow)])
def test_one_store(write_rows, chatml_tokenizer, tmp_path, workers):
    """Each file has its own format, and the store is that of the files one after the other."""
    rows = {"a": [*CHATS, {"messages": CHATS[0]["messages"][:1]}], "b": PAIRS, "c": ALPACA}
    paths = [write_rows(each, f"{name}.jsonl") for name, each in rows.items()]
    store = prepare(paths, chatml_tokenizer, tmp_path / "store", num_proc=workers)
    alone = [prepare(path, chatml_tokenizer, tmp_path / path.stem) for path in paths]
    assert [example.labels.tolist() for example in store] == [each.labels.tolist() for one in alone for each in one]
    assert store.settings["format"] == "messages, prompt_completion, alpaca"
    counted = stats(store)
    assert [(each.name, each.format, each.read, each.kept, each.samples) for each in counted.sources] == [
        ("a.jsonl", "messages", 5, 4, 4),
        ("b.jsonl", "prompt_completion", 3, 3, 3),
        ("c.jsonl", "alpaca", 2, 2, 2),
    ]
    assert sum(each.read for each in counted.sources) == store.accounting.read
    assert sum(each.kept for each in counted.sources) == store.accounting.kept
    assert "rows read  kept             format" in str(counted)
    assert not lint(paths, chatml_tokenizer).stops


def test_a_file_of_which_nothing_is_kept(write_rows, chatml_tokenizer, tmp_path):
    """A file without a sample is counted as well, but not in a view."""
    paths = [write_rows(PAIRS, "a.jsonl"), write_rows([{"messages": CHATS[0]["messages"][:1]}], "b.jsonl")]
    store = prepare(paths, chatml_tokenizer, tmp_path / "store")
    assert [(each.read, each.kept, each.samples) for each in stats(store).sources] == [(3, 3, 3), (1, 0, 0)]
    assert [each.name for each in stats(store.select([0])).sources] == ["a.jsonl"]


@pytest.mark.parametrize("order", [1, -1])
def test_two_kinds(write_rows, chatml_tokenizer, tmp_path, order):
    """Preferences and rows to imitate are not trained together; lint says it too."""
    paths = [write_rows(PAIRS, "a.jsonl"), write_rows(PREFERRED, "b.jsonl")][::order]
    with pytest.raises(DataError, match=r"jsonl:1 becomes \w+ samples and \w.jsonl:1 \w+ samples, which are not trained"):
        prepare(paths, chatml_tokenizer, tmp_path / "store")
    report = lint(paths, chatml_tokenizer, on_bad_row="skip")
    assert report.counts["unreadable_row"] == len({1: PREFERRED, -1: PAIRS}[order])
    assert report.stops >= report.counts["unreadable_row"]


def test_a_store_without_counts(write_rows, chatml_tokenizer, tmp_path):
    """A store of an earlier version, which does not say what came of each file, opens and is counted."""
    path = prepare(write_rows(PAIRS), chatml_tokenizer, tmp_path / "store").path / "store.json"
    manifest = json.loads(path.read_text())
    for source in manifest["sources"]:
        for name in ("format", "read", "kept"):
            del source[name]
    path.write_text(json.dumps(manifest))
    (share,) = stats(TokenStore.open(path.parent)).sources
    assert (share.samples, share.format, share.read, share.kept) == (3, None, None, None)
