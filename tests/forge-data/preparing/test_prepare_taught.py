"""A store with a teacher's tokens: each sample's text in another vocabulary and template, and what both cut alike."""

from pathlib import Path

import numpy as np
import pytest

from forge_data import DataError, InMemoryRows, StoreError, TemplateError, TokenStore, prepare, prepare_taught
from forge_data.aligning._spelling import Spelling

from ..families import FAMILIES

TEXTS = ("The capital is Paris. It is naïve to ask.", "  def f(x):\n    return x + 1\n", "0 1 2 3 中文 🙂")


def rows(chat):
    return [
        chat(("user", "What is the capital of France?"), ("assistant", TEXTS[0])),
        chat(("user", "code"), ("assistant", TEXTS[1]), ("user", "and then"), ("assistant", TEXTS[2])),
        chat(("system", "Be brief."), ("user", "hello there"), ("assistant", "hi, what now?")),
    ]


@pytest.mark.parametrize(
    ("student", "teacher"),
    [("qwen3", "llama-3"), ("llama-2", "qwen2.5"), ("qwen2.5", "gemma"), ("qwen3", "chatml"), ("gemma", "llama-2")],
)
def test_spans_spell_the_same(student, teacher, write_rows, chat, tmp_path):
    """Samples are those of `prepare`; the teacher's texts are of its own template, and all learned text is aligned."""
    own, other = FAMILIES[student].tokenizer(), FAMILIES[teacher].tokenizer()
    data = write_rows(rows(chat)[: 2 if teacher == "gemma" or student == "gemma" else 3])
    store = prepare_taught(data, own, other, tmp_path / "both", progress=False)
    alone = prepare(data, own, tmp_path / "alone", progress=False)
    assert len(store) == len(alone)
    covered = b""
    ends = {tuple(pair) for pair in store.teacher_ends}
    for index in range(len(store)):
        example = store[index]
        assert np.array_equal(example.input_ids, alone[index].input_ids)
        assert np.array_equal(example.labels, alone[index].labels)
        texts, spans = store.taught(index)
        flat = np.concatenate(texts)
        assert (store.teacher_lengths[index], store.span_counts[index]) == (len(flat), len(spans))
        assert (example.labels[np.concatenate([np.arange(a, b) for a, b in spans[:, :2]])] != -100).all()
        for a, b, c, d in spans.tolist():
            ours, theirs = b"".join(Spelling(own).of(example.input_ids[a:b])), b"".join(Spelling(other).of(flat[c:d]))
            if (int(example.input_ids[b - 1]), int(flat[d - 1])) not in ends:
                assert ours.strip() == theirs.strip()
                covered += ours
        assert ((spans[1:, 0] >= spans[:-1, 1]) & (spans[1:, 2] >= spans[:-1, 3])).all()
    for text in TEXTS:
        assert b" ".join(text.encode().split()) in b" ".join(covered.split())
    alignment = store.settings["alignment"]
    assert alignment["tokens"] == sum(int((s[:, 1] - s[:, 0]).sum()) for _, s in map(store.taught, range(len(store))))
    assert (alignment["spans"], alignment["left_out"]) == (store.span_counts.sum(), 0)
    assert alignment["tokens"] > 0.95 * alignment["learned"]
    assert ends


def test_is_opened_again_verified_and_viewed(write_rows, chat, tmp_path):
    """A store that was made from the same is opened again, of another teacher it is made anew; views and hashes know of it."""
    own, other = FAMILIES["qwen3"].tokenizer(), FAMILIES["llama-3"].tokenizer()
    data, place = write_rows(rows(chat)), tmp_path / "store"
    store = prepare_taught(data, own, other, place, progress=False)
    before = (place / "store.json").stat().st_ino
    again = prepare_taught(data, own, other, place, progress=False)
    assert (place / "store.json").stat().st_ino == before
    assert again.fingerprint == store.fingerprint
    view = store.select([2, 0])
    assert np.array_equal(view.taught(0)[1], store.taught(2)[1])
    assert view.span_counts.tolist() == store.span_counts[[2, 0]].tolist()
    store.verify()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    changed = prepare_taught(data, own, FAMILIES["llama-2"].tokenizer(), place, progress=False)
    assert changed.fingerprint != store.fingerprint
    plain = prepare(data, own, place, progress=False)
    assert not plain.has_teacher
    assert plain.span_counts.sum() == 0
    with pytest.raises(StoreError, match="has no teacher's tokens"):
        plain.taught(0)
    taught = prepare_taught(data, own, other, place, progress=False)
    spans = Path(taught.path, "spans.bin")
    spans.write_bytes(bytes(len(spans.read_bytes())))
    with pytest.raises(StoreError, match=r"spans\.bin does not hold what was written"):
        TokenStore.open(place).verify()


def test_rows_that_only_one_can_have_are_counted(write_rows, chat, tmp_path):
    """A row that is too long for the teacher alone stays, without spans, and is named."""
    own, other = FAMILIES["qwen3"].tokenizer(), FAMILIES["llama-2"].tokenizer()
    bracketed = chat(("user", "x"), ("assistant", "<think>" * 30))
    data = write_rows([*rows(chat)[:1], bracketed])
    longest = [prepare(data, each, tmp_path / name, progress=False).lengths for each, name in ((own, "a"), (other, "b"))]
    limit = int(longest[0].max())
    assert longest[1][1] > limit >= longest[1][0]
    store = prepare_taught(data, own, other, tmp_path / "both", max_seq_len=limit, progress=False)
    assert store.span_counts[1] == 0 < store.span_counts[0]
    assert store.settings["alignment"]["left_out"] == 1
    assert store.settings["alignment"]["first_left_out"] == "train.jsonl:2"


def test_what_cannot_be_aligned_is_refused(write_rows, chat, tmp_path):
    """Token ids, preferences, splitting, streams, and texts of which nothing is alike."""
    own, other = FAMILIES["qwen3"].tokenizer(), FAMILIES["llama-3"].tokenizer()
    ids = write_rows([{"input_ids": [1, 2], "labels": [1, 2]}], "ids.jsonl")
    with pytest.raises(DataError, match=r"ids\.jsonl:1: rows of token ids"):
        prepare_taught(ids, own, other, tmp_path / "store", progress=False)
    pairs = write_rows([{"prompt": "a", "chosen": "b", "rejected": "c"}], "pairs.jsonl")
    with pytest.raises(DataError, match="rows of the kind preference"):
        prepare_taught(pairs, own, other, tmp_path / "store", progress=False)
    with pytest.raises(DataError, match="`on_overflow` is split"):
        prepare_taught(ids, own, other, tmp_path / "store", on_overflow="split", max_seq_len=9, progress=False)
    with pytest.raises(DataError, match="was read already"):
        prepare_taught(InMemoryRows.of(iter(rows(chat))), own, other, tmp_path / "store", progress=False)
    apart = [chat(("user", "x"), ("assistant", f"{mark} " * 30)) for mark in ("<think>", "<|python_tag|>")]
    with pytest.raises(DataError, match="of no row do both tokenizers have the same learned text"):
        prepare_taught(apart, own, other, tmp_path / "store", max_seq_len=120, progress=False)
    with pytest.raises(DataError, match="by the tokenizer of the teacher: .*no row is left"):
        prepare_taught(apart[:1], own, other, tmp_path / "store", max_seq_len=120, progress=False)
    other.chat_template = None
    with pytest.raises(TemplateError, match="by the tokenizer of the teacher, whose chat template stands in its directory"):
        prepare_taught(apart, own, other, tmp_path / "store", progress=False)
    assert not (tmp_path / "store").exists()


def test_each_template_gets_the_arguments_that_it_reads(write_rows, chat, tmp_path):
    """Whether the student thinks is not the teacher's to know; what neither template reads is refused."""
    own, other = FAMILIES["qwen3"].tokenizer(), FAMILIES["llama-3"].tokenizer()
    data, given = write_rows(rows(chat)), {"enable_thinking": False}
    store = prepare_taught(data, own, other, tmp_path / "one", chat_template_kwargs=given, progress=False)
    alone = prepare(data, own, tmp_path / "alone", chat_template_kwargs=given, progress=False)
    assert [store[at].input_ids.tolist() for at in range(len(store))] == [
        alone[at].input_ids.tolist() for at in range(len(alone))
    ]
    swapped = prepare_taught(data, other, own, tmp_path / "other", chat_template_kwargs=given, progress=False)
    assert swapped.settings["alignment"]["tokens"] > 0
    with pytest.raises(TemplateError, match="has 'enable_thinking', and the chat template reads no such argument"):
        prepare_taught(data, other, FAMILIES["llama-2"].tokenizer(), tmp_path / "x", chat_template_kwargs=given, progress=False)
