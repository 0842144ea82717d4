"""Numbers of a store, against counting one sample at a time."""

import json
from collections import Counter
from random import Random

import attrs
import numpy as np
import pytest

from forge_data import TokenStore, prepare
from forge_data._example import IGNORED
from forge_data.viewing._stats import stats

from ..lint_rows import clean, completion, preference, tokenizer, tokens


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stats")
    rng = Random(3)
    for name, count in (("a.jsonl", 20), ("b.jsonl", 13)):
        (folder / name).write_text("".join(json.dumps(clean(rng)) + "\n" for _ in range(count)), encoding="utf-8")
    return prepare([folder / "a.jsonl", folder / "b.jsonl"], tokenizer(), folder / "store", progress=False)


def counted(store):
    """Count samples, tokens and learned tokens by role and by source, one token at a time."""
    roles, sources = Counter(), Counter()
    for index in range(len(store)):
        example, seen = store[index], set()
        file = store.source(index).partition(":")[0]
        for (start, stop), role in zip(example.segments.tolist(), example.roles, strict=True):
            learned = sum(int(label != IGNORED) for label in example.labels[max(start, 1) : stop])
            roles[role, "tokens"] += stop - start
            roles[role, "learned"] += learned
            roles[role, "samples"] += role not in seen
            seen.add(role)
            sources[file, "tokens"] += stop - start
            sources[file, "learned"] += learned
        sources[file, "samples"] += 1
    return roles, sources


@pytest.mark.parametrize("view", [None, [5], [30, 2, 2, 17, 31], range(20, 33)])
def test_shares_of_roles_and_sources(store, view):
    """A store and a view, with a sample that occurs twice, give what counting gives."""
    store = store if view is None else store.select(view)
    made, (roles, sources) = stats(store), counted(store)
    for shares, expected in ((made.roles, roles), (made.sources, sources)):
        message = {(share.name, name): getattr(share, name) for share in shares for name in ("samples", "tokens", "learned")}
        assert message == {key: expected[key] for key in message}
        assert sum(share.tokens for share in shares) == made.tokens == store.lengths.sum()
        assert sum(share.learned for share in shares) == made.learned == store.loss_counts.sum()


def test_percentiles_are_lengths_that_there_are(store):
    """Percentiles are lengths that occur, from the least to the most."""
    made = stats(store)
    assert (made.lengths[0], made.lengths[100]) == (store.lengths.min(), store.lengths.max())
    assert set(made.lengths.values()) <= set(store.lengths.tolist())
    assert made.lengths[50] == np.sort(store.lengths)[len(store) // 2]
    assert set(made.learned_lengths.values()) <= set(store.loss_counts.tolist())


def test_as_text_and_as_json(store):
    """Text is a table, and JSON has the same numbers."""
    made = stats(store)
    text = str(made)
    assert f"33 samples (supervised), {made.tokens:,} tokens" in text
    assert all(word in text for word in ("assistant", "user", "a.jsonl", "b.jsonl", "median", "kept 33 of 33 rows"))
    assert len({len(line) for line in text.splitlines() if line.startswith(("tokens a sample", "all ", "learned "))}) == 1
    plain = json.loads(json.dumps(made.as_dict()))
    assert plain["tokens"] == made.tokens
    assert plain["accounting"]["kept"] == 33
    assert 0 < made.learned_share < 1


@pytest.mark.parametrize(("make", "kind"), [(completion, "supervised"), (preference, "preference"), (tokens, "supervised")])
def test_every_kind_of_store(make, kind, tmp_path):
    """Plain text, preferences and token ids have their numbers too."""
    rng = Random(1)
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(make(rng)) + "\n" for _ in range(10)), encoding="utf-8")
    store = prepare(path, tokenizer(), tmp_path / "store", progress=False)
    made = stats(store)
    assert made.kind == kind
    assert made.samples == len(store) == (20 if kind == "preference" else 10)
    assert sum(share.tokens for share in made.roles) == made.tokens
    assert sum(share.learned for share in made.roles) == made.learned


def test_tokens_without_a_tokenizer(tmp_path):
    """A store from JSONL has the role of tokens only."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"input_ids": [1, 2, 3], "labels": [-100, 2, 3], "len": 3}\n', encoding="utf-8")
    (share,) = stats(TokenStore.from_jsonl(path, tmp_path / "store")).roles
    assert (share.name, share.tokens, share.learned) == ("tokens", 3, 2)


def test_media_of_several_kinds(store):
    """Kinds of media are listed as a sentence lists them."""
    made = attrs.evolve(stats(store), media=3, image_tokens=9, samples_with_media=2, media_kinds=("image", "video", "audio"))
    assert "3 images, videos and audio clips in 2 samples, for which 9 tokens stand" in str(made)
    assert "3 images and videos in 2 samples" in str(attrs.evolve(made, media_kinds=("image", "video")))
