"""Views → the page's data."""

import json

from hypothesis import given, strategies as st

from forge_data._example import ROLES
from forge_data.findings._finding import Finding
from forge_data.viewing._page_data import as_script, page_data
from forge_data.viewing._view import views

from ..viewed import Store, chat, example


def test_the_data_is_the_sample(chatml_tokenizer):
    """The data alone gives back ids, texts, mask, segments and findings of each sample."""
    samples = [chat(chatml_tokenizer, ("user", "Hi 日本"), ("assistant", text)) for text in ("one", "two 日本")]
    store = Store(samples, chatml_tokenizer)
    finding = Finding("empty_turn", "stop", "train.jsonl", 2, "messages[0]", "what", "fix", texts=("a", "b"))
    shown = list(views(store, [0, 1]))
    data = json.loads(as_script(page_data(shown, [finding])))
    assert len({token for token, _, _ in data["vocabulary"]}) == len(data["vocabulary"])
    for message, sample, view in zip(data["samples"], samples, shown, strict=True):
        rows = [data["vocabulary"][number] for number in message["tokens"]]
        assert [row[0] for row in rows] == sample.input_ids.tolist()
        texts = [message["shared"].get(str(place), row[1]) for place, row in enumerate(rows)]
        assert "".join(texts) == chatml_tokenizer.decode(sample.input_ids)
        assert message["inside"] == [place for place, within in enumerate(view.inside) if within] != []
        mask = [False] * len(sample)
        for start, stop in zip(message["learned"][::2], message["learned"][1::2], strict=True):
            mask[start:stop] = [True] * (stop - start)
        assert mask == (sample.labels != -100).tolist()
        assert message["segments"][::2] == sample.segments[:, 0].tolist()
        assert [ROLES[number] for number in message["segments"][1::2]] == list(sample.roles)
    assert [message["findings"] for message in data["samples"]] == [[], [0]]
    assert data["findings"][0]["rule"] == "empty_turn"
    assert data["findings"][0]["texts"] == ["a", "b"]


@given(text=st.text(st.characters() | st.sampled_from("<>&/!-\u2028\u2029\ud800\udce2\"'\\")))
def test_nothing_ends_the_script(text):
    """Whatever the texts contain, the JSON cannot end its element or start another, is UTF-8, and reads back the same."""
    written = as_script({"text": text})
    assert not set("<>&\u2028\u2029") & set(written)
    written.encode("utf-8")
    assert json.loads(written)["text"] == text


def test_a_mask_that_cuts_a_character(chatml_tokenizer):
    """Where a mask begins inside a character, the data has which token begins it and which are inside."""
    ids = chatml_tokenizer("日", add_special_tokens=False)["input_ids"]
    sample = example(chatml_tokenizer, ("user", ids[:1], False), ("assistant", ids[1:], True))
    (message,) = page_data(views(Store([sample], chatml_tokenizer), [0]), [])["samples"]
    assert message["shared"] == {0: "日", 1: "", 2: ""}
    assert message["inside"] == [1, 2]
    assert message["learned"] == [1, 3]
