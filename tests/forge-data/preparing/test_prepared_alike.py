"""A store does not depend on how it is made: any number of workers gives the same bytes."""

import json
import random

import pytest

from forge_data import TokenStore, prepare
from forge_data.formats._registry import convert
from forge_data.tokenizing._encoder import Encoder

from ..families import FAMILIES
from ..nasty import BLANKS, LOOK_ALIKES, WORDS


def nasty_rows(seed, size):
    """Conversations full of look-alikes, `size` bytes together; some too long, some with reasoning."""
    draw, rows, written = random.Random(seed), [], 0
    pieces = [*LOOK_ALIKES, *WORDS * 4, *BLANKS * 3]

    def text(longest):
        return "".join(draw.choices(pieces, k=draw.randint(1, longest)))

    while written < size:
        pairs = draw.choice([1, 1, 2, 3])
        longest = draw.choice([8, 60, 60, 400])
        messages = [{"role": role, "content": "So " + text(longest)} for _ in range(pairs) for role in ("user", "assistant")]
        if draw.random() < 0.2:
            messages[-1]["content"] = "<think>\nWhy\n</think>\n\n" + messages[-1]["content"]
        rows.append({"messages": messages})
        written += len(json.dumps(rows[-1], ensure_ascii=False).encode()) + 1
    return rows


def of_row(encoder, row):
    """Return the examples of a row, one for each learned turn where its turns are tokenized apart."""
    (encoded,) = encoder.encode([convert("messages", "row", row, encoder.vocabulary)])
    return encoded.examples


def contents(store):
    """Return every file of a store that a trainer reads, and its accounting."""
    arrays = {path.name: path.read_bytes() for path in sorted(store.path.glob("*.bin"))}
    return {**arrays, "dropped": (store.path / "dropped.jsonl").read_bytes()}, store.accounting, store.fingerprint


@pytest.mark.slow
def test_any_number_of_workers_and_one_row_alone(tmp_path):
    """One worker and three write the same bytes over several chunks; rows add up, and each sample is its row's."""
    rows, limit = nasty_rows("qwen3", 2_300_000), 1_500
    data = tmp_path / "train.jsonl"
    data.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    tokenizer = FAMILIES["qwen3"].tokenizer()
    stores = [
        prepare(data, tokenizer, tmp_path / f"store-{workers}", max_seq_len=limit, num_proc=workers, progress=False)
        for workers in (1, 3)
    ]
    first, *others = [contents(store) for store in stores]
    assert all(other == first for other in others)
    message = stores[0].accounting
    assert message.kept + sum(message.dropped.values()) == message.read == len(rows)
    assert message.kept
    assert message.dropped["longer_than_max_seq_len"]
    store = TokenStore.open(tmp_path / "store-3")
    encoder = Encoder(tokenizer)
    alone = (example for row in rows for example in of_row(encoder, row) if len(example) <= limit)
    for number, example in zip(range(150), alone, strict=False):
        assert store[number].input_ids.tolist() == example.input_ids.tolist()
        assert store[number].labels.tolist() == example.labels.tolist()
        assert store[number].segments.tolist() == example.segments.tolist()
        assert tuple(store[number].roles) == tuple(example.roles)
