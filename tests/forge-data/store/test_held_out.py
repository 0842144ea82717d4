"""Samples that a run holds out of its training store, and how they are told apart."""

import json

import pytest

import forge_data
from forge_data import StoreError
from forge_data.viewing._page_summary import figures
from forge_data.viewing._stats import stats


@pytest.fixture
def store(chatml_tokenizer, small_chats, write_rows, tmp_path):
    """A training store where a run has it."""
    made = forge_data.prepare(write_rows(small_chats), chatml_tokenizer, tmp_path / "run/data/train", progress=False)
    assert made.held_out == frozenset()
    return made


def test_what_is_held_out_is_marked_everywhere(store, tmp_path, capsys):
    """Samples, their number and the page of a run say what is not trained on; a view by itself does not."""
    train, held_out = store.split(0.25, seed=3)
    held_out.record_as_held_out()
    places = {held_out.source(i) for i in range(len(held_out))}
    assert {store.source(i) for i in store.held_out} == places
    assert (train.held_out, held_out.held_out) == (frozenset(), frozenset())
    forge_data.show(tmp_path / "run", slice(None))
    text = capsys.readouterr().out
    heads = [line for line in text.splitlines() if " · sample " in line]
    assert {head.partition(" · ")[0] for head in heads if head.endswith(" · held out")} == places
    assert len(heads) == len(store)
    assert f"held out: {len(held_out)} of {len(store)}, measured and not trained on" in text
    found = stats(store)
    assert (found.held_out, found.learned - found.held_out_learned) == (len(held_out), int(train.loss_counts.sum()))
    assert f"{int(train.loss_counts.sum()):,} of the learned tokens are trained on" in str(found)
    assert "Held out" in figures(store)
    page = forge_data.show(store, html=tmp_path / "page.html").read_text()
    assert page.count('"heldOut":true') == len(held_out)


@pytest.mark.parametrize("content", ["{", "[]", "[99]", "[true]", '"0"', "[-1]"])
def test_a_damaged_file_is_one_error(store, content):
    """By its name, with what to do."""
    whole = content if content in ("{", "[]") else f'{{"store": "{store.fingerprint}", "samples": {content}}}'
    (store.path.parent / "train.held_out.json").write_text(whole)
    with pytest.raises(StoreError, match=r"train\.held_out\.json .*remove it"):
        store.held_out  # noqa: B018 - a property that raises


def test_files_of_others_are_not_read(store, small_chats, chatml_tokenizer, write_rows):
    """Neither rows that somebody calls held out and keeps there, nor what was written of another store in this place."""
    (store.path.parent / "held_out.json").write_text("rows of somebody")
    store.split(0.25, seed=3)[1].record_as_held_out()
    assert store.held_out
    other = forge_data.prepare(write_rows(small_chats[1:]), chatml_tokenizer, store.path, progress=False)
    assert other.held_out == frozenset()


def test_a_store_of_no_run_has_none(store):
    """Without the file nothing is held out, and the table does not speak of it."""
    assert "held out" not in str(stats(store))
    assert json.loads(json.dumps(stats(store).as_dict()))["held_out"] == 0


def test_it_is_known_however_the_store_is_opened(store, tmp_path, monkeypatch):
    """By `.`, and through a link of another name."""
    store.split(0.25, seed=3)[1].record_as_held_out()
    (tmp_path / "linked").symlink_to(store.path)
    monkeypatch.chdir(store.path)
    assert {forge_data.TokenStore.open(place).held_out for place in (".", tmp_path / "linked")} == {store.held_out}
