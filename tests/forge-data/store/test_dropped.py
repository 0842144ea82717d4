"""Rows that were left out, written and read back."""

import json

from forge_data import prepare
from forge_data.store._dropped import dropped_rows
from forge_data.store._manifest import SourceFile


def test_dropped_places(chatml_tokenizer, tmp_path, chat):
    """A dropped row is named as messages name it: a line from 1, an item of an array from 0; in the file too."""
    rows = [chat(("user", "Hi"), ("assistant", "Hello")), chat(("user", "Hi"))]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = [tmp_path / "rows.json", tmp_path / "lines.jsonl"]
    store = prepare(files, chatml_tokenizer, tmp_path / "of both", progress=False)
    lines = [json.loads(line) for line in (store.path / "dropped.jsonl").read_text().splitlines()]
    assert [row["place"] for row in lines] == ["rows.json[1]", "lines.jsonl:2"]
    assert list(store.dropped()) == lines


def test_dropped_places_of_an_older_store(tmp_path):
    """Before 0.2.1 no place was written: it is computed."""
    sources = [SourceFile("a.json", "/a.json", 1, indexed=True), SourceFile("b.jsonl", "/b.jsonl", 0)]
    rows = [{"file": name, "row": 3, "reason": "preprocess", "tokens": 0} for name in ("a.json", "b.jsonl")]
    (tmp_path / "dropped.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [row["place"] for row in dropped_rows(tmp_path, sources)] == ["a.json[3]", "b.jsonl:3"]
