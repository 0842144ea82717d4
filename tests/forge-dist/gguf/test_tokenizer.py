"""Byte-level tokenizers as the fields of a GGUF file."""

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from forge_dist import ModelError
from forge_dist.gguf._tokenizer import PRE_TOKENIZERS, PROBES, reader_of, same_texts, tokenizer_fields

from ..gguf_models import phi3_tokenizer, pieces_tokenizer, tokenizer_of

HERE = Path("model.gguf")


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("rule", PRE_TOKENIZERS)
def test_the_fields_make_the_same_tokenizer(rule, begins):
    """The rule is found by what it does, and the fields alone give the ids of every probe."""
    tokenizer = tokenizer_of(rule, begins=begins)
    fields = tokenizer_fields(tokenizer, 400, HERE)
    assert fields["tokenizer.ggml.pre"] == rule
    assert fields["tokenizer.ggml.add_bos_token"] is begins
    read = reader_of(fields)
    for text in (*PROBES, "<|im_start|>user\n<think>12</think><|im_end|>"):
        assert read(text) == tokenizer(text, add_special_tokens=False).input_ids


@pytest.mark.parametrize("prefix", [False, True])
def test_sentencepiece_by_its_fields(prefix):
    """Scores take the place of merges: the ids of every probe, characters of which there is no token among them."""
    tokenizer = pieces_tokenizer(prefix)
    fields = tokenizer_fields(tokenizer, 400, HERE)
    assert fields["tokenizer.ggml.model"] == "llama"
    assert fields["tokenizer.ggml.add_space_prefix"] is prefix
    assert "tokenizer.ggml.merges" not in fields
    read = reader_of(fields)
    for text in (*PROBES, "<|im_start|>user\n\n\n<think>12</think> <|im_end|>", "a  b   c"):
        assert read(text) == tokenizer(text, add_special_tokens=False).input_ids
    assert {6} == {fields["tokenizer.ggml.token_type"][number] for number in read("\N{SNOWMAN}")[prefix:]}


@pytest.mark.parametrize(
    ("template", "texts", "prefix"),
    [
        ("{{ bos_token }}{{ messages[0]['content'] }}", "texts that begin with a special token", False),
        (None, "texts of no added tokens that begin with no space", True),
    ],
)
def test_a_space_before_the_first_piece_alone(template, texts, prefix):
    """Readers put a space before each piece or before none: the prompts of a template decide, and what is proved is said."""
    tokenizer = pieces_tokenizer(metaspace="first")
    tokenizer.chat_template = template
    assert same_texts(tokenizer) == texts
    fields = tokenizer_fields(tokenizer, 400, HERE)
    assert fields["tokenizer.ggml.add_space_prefix"] is prefix
    text = "<|begin|>the dog<|im_end|> and the dog" if template else "the dog sleeps"
    assert reader_of(fields)(text) == tokenizer(text, add_special_tokens=False).input_ids
    assert reader_of(fields)(" the dog") != tokenizer(" the dog", add_special_tokens=False).input_ids or not prefix


def test_a_space_after_special_tokens_alike_is_refused():
    """Unless there is one: readers put a second one there."""
    with pytest.raises(ModelError, match="is more than GGUF can say"):
        tokenizer_fields(pieces_tokenizer(metaspace="always"), 400, HERE)


def test_merges_that_need_not_be_ignored():
    """A rule that applies merges to every piece is that of a tokenizer which does not, where they make the same token."""
    tokenizer = tokenizer_of("gpt-4o")
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    backend["model"]["ignore_merges"] = True
    given = {"bos_token": "<|begin|>", "eos_token": "<|im_end|>", "pad_token": "<|im_start|>"}
    whole = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(backend)), **given)
    assert tokenizer_fields(whole, 400, HERE)["tokenizer.ggml.pre"] == "gpt-4o"
    backend["model"]["vocab"]["quickbrown"] = len(backend["model"]["vocab"]) + 1
    lost = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(backend)), **given)
    with pytest.raises(ModelError, match="splits text by a rule"):
        tokenizer_fields(lost, 400, HERE)


def test_kinds_of_tokens():
    """Special ones control, added ones are the user's, ids that only the model has are unused."""
    fields = tokenizer_fields(tokenizer_of(), 395, HERE)
    kinds = fields["tokenizer.ggml.token_type"]
    assert kinds[:3] == [3, 3, 3]
    assert kinds[fields["tokenizer.ggml.tokens"].index("<think>")] == 4
    unused = [token for token, kind in zip(fields["tokenizer.ggml.tokens"], kinds, strict=True) if kind == 5]
    assert unused == [f"[PAD{395 - len(unused) + index}]" for index in range(len(unused))]
    assert set(kinds) == {1, 3, 4, 5}


def test_more_tokens_than_the_model_are_refused():
    """An id without an embedding."""
    with pytest.raises(ModelError, match="the model 300 embeddings"):
        tokenizer_fields(tokenizer_of(), 300, HERE)


def test_a_special_token_without_embedding_is_left_out():
    """Gemma 3's for images, where the model has text alone; one that prompts have is refused as others are."""
    tokenizer = pieces_tokenizer()
    size = len(tokenizer)
    tokenizer.add_special_tokens({"extra_special_tokens": ["<image>"]})
    fields = tokenizer_fields(tokenizer, size, HERE)
    assert len(fields["tokenizer.ggml.tokens"]) == size
    assert "<image>" not in fields["tokenizer.ggml.tokens"]
    tokenizer.chat_template = "<image>{{ messages[0]['content'] }}"
    with pytest.raises(ModelError, match=f"the tokenizer has the id {size}, and the model {size} embeddings"):
        tokenizer_fields(tokenizer, size, HERE)


def _fast(model=None, pre=None, normalizer=None):
    made = Tokenizer(model or models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    made.pre_tokenizer = pre or pre_tokenizers.ByteLevel(add_prefix_space=False)
    if normalizer is not None:
        made.normalizer = normalizer
    return PreTrainedTokenizerFast(tokenizer_object=made)


@pytest.mark.parametrize(
    ("tokenizer", "match"),
    [
        (lambda: _fast(models.WordLevel({"a": 0}, unk_token="a")), "its tokenizer is WordLevel"),
        (lambda: _fast(models.Unigram([("a", 0.0)])), "its tokenizer is Unigram, and only BPE"),
        (lambda: _fast(models.BPE(vocab={"a": 0}, merges=[], byte_fallback=True)), "no token for the byte <0x00>"),
        (lambda: _fast(pre=pre_tokenizers.Whitespace()), "splits text by a rule .* known here"),
        (lambda: _fast(pre=pre_tokenizers.ByteLevel(add_prefix_space=True)), "splits text by a rule"),
        (lambda: _fast(normalizer=normalizers.Lowercase()), "changes text first"),
    ],
)
def test_other_tokenizers_are_refused_by_what_they_do(tokenizer, match):
    """Each with the rule that is not known, and the way out."""
    with pytest.raises(ModelError, match=match):
        tokenizer_fields(tokenizer(), 400, HERE)


def test_what_the_fields_cannot_say_is_found():
    """An added token that swallows the space before it, as GGUF's never do, gives other ids, and is refused with the text."""
    tokenizer = tokenizer_of()
    tokenizer.add_tokens([AddedToken("<swallows>", lstrip=True, rstrip=True, normalized=False)])
    with pytest.raises(ModelError, match="is more than GGUF can say"):
        tokenizer_fields(tokenizer, 400, HERE)


@pytest.mark.parametrize(
    ("made", "name", "written"),
    [
        (phi3_tokenizer, "mine", "Phi-3 mine"),
        (phi3_tokenizer, "my-phi-3", "my-phi-3"),
        (lambda: phi3_tokenizer(strips=False), "my-Phi3", "my-Phi 3"),
        (tokenizer_of, "phi-3-against-others", "phi 3-against-others"),
        (tokenizer_of, "phi-4", "phi-4"),
    ],
)
def test_the_name_says_whether_white_space_is_taken_away(made, name, written):
    """llama.cpp takes it away behind added tokens of models named Phi-3, and loads none of that name without their tokens."""
    tokenizer = made()
    fields = tokenizer_fields(tokenizer, 400, HERE, name)
    assert fields["general.name"] == written
    for text in ("<|user|>\n how many?<|end|>\n<|assistant|>\n <s> x", "<|im_start|> a<think> b"):
        assert reader_of(fields)(text) == tokenizer(text, add_special_tokens=False).input_ids


def _changed(change):
    tokenizer = pieces_tokenizer()
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    change(backend)
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(backend)), bos_token="<|begin|>")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            lambda backend: backend["normalizer"]["normalizers"].append(
                {"type": "Replace", "pattern": {"String": "zq"}, "content": "a"}
            ),
            r"changes text first \(Replace \{'String': 'zq'\}\)",
        ),
        (lambda backend: backend["model"]["vocab"].update(zq=395), "'zq' becomes other ids"),
    ],
)
def test_what_no_probe_has_in_it_is_looked_at(change, match):
    """Another replacement of text, and a token that readers would join though the tokenizer has no merge for it."""
    with pytest.raises(ModelError, match=match):
        tokenizer_fields(_changed(change), 400, HERE)


def test_no_token_stands_twice():
    """An unused id gets another name where a token has that: llama.cpp ends where two tokens have one text."""
    tokenizer = tokenizer_of()
    tokenizer.add_tokens(["[PAD399]"])
    tokens = tokenizer_fields(tokenizer, 400, HERE)["tokenizer.ggml.tokens"]
    assert "[PAD399]" in tokens
    assert len(set(tokens)) == 400


@pytest.mark.parametrize("made", [tokenizer_of, pieces_tokenizer])
def test_tokens_that_overlap_are_refused(made):
    """Of "abcd" the tokenizer takes "ab", which comes first, and readers "bcd", which is longer."""
    tokenizer = made()
    tokenizer.add_tokens(["ab", "bcd"])
    with pytest.raises(ModelError, match="'abcd' becomes other ids"):
        tokenizer_fields(tokenizer, 420, HERE)
    tokenizer = made()
    tokenizer.add_tokens(["<ab>", "<cd>", "  ", "    "])
    assert reader_of(tokenizer_fields(tokenizer, 420, HERE))("<cd>     <ab>")


def test_a_tokenizer_without_tokenizer_json_is_refused():
    """One error, not that of a missing attribute."""
    with pytest.raises(ModelError, match="its tokenizer is a ByT5Tokenizer, which has no tokenizer.json"):
        tokenizer_fields(ByT5Tokenizer(), 400, HERE)
