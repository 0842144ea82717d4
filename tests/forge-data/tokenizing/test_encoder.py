"""Samples → examples: plain text, EOS, and tokenizers of other types."""

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from forge_data import DataError, TokenizerError, tokenize
from forge_data.formats._samples import Chat, Document, Preference, Text, Tokens, Unpaired
from forge_data.tokenizing._encoder import Encoder


def learned(tokenizer, example):
    """Return the learned text."""
    return tokenizer.decode(example.labels[example.labels != -100].tolist())


def words(*, post=None, **names):
    """A word-level tokenizer, whose tokens can be counted by eye."""
    vocabulary = {word: i for i, word in enumerate(["<unk>", "<s>", "</s>", "a", "b", "c", "user", "assistant", ":"])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["<s>", "</s>"])
    if post:
        backend.post_processor = processors.TemplateProcessing(single=post, special_tokens=[("<s>", 1), ("</s>", 2)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", **names)


def metaspace(template):
    """A tokenizer as Llama-2's: blanks written as ▁, one put before the text, unknown bytes spelled out."""
    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))], show_progress=False
    )
    backend.train_from_iterator(["hello there what is this it is a test of words and answers"] * 3, trainer)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    made.chat_template = template
    return made


def test_the_tokenizers_own_special_tokens():
    """Text gets the tokenizer's BOS, not learned, and one EOS at the end, learned."""
    example = tokenize({"prompt": "a b ", "completion": "c"}, words(post="<s> $A", bos_token="<s>", eos_token="</s>"))
    assert example.input_ids.tolist() == [1, 3, 4, 5, 2]
    assert example.labels.tolist() == [-100, -100, -100, 5, 2]


@pytest.mark.parametrize("completion", ["c", "c</s>", ""])
def test_eos_once(completion):
    """Where the tokenizer or the completion ends with the EOS, there is no second one."""
    ends = tokenize({"prompt": "a ", "completion": completion}, words(post="$A </s>", eos_token="</s>"))
    plain = tokenize({"prompt": "a ", "completion": completion}, words(eos_token="</s>"))
    assert plain.input_ids.tolist() == [3, *([5] if "c" in completion else []), 2]
    assert plain.labels.tolist() == [-100, *plain.input_ids.tolist()[1:]]
    if completion != "c</s>":
        assert ends.input_ids.tolist() == plain.input_ids.tolist()
    assert ends.labels[-1] == 2


def test_an_eos_of_the_prompt_is_none_of_the_completion():
    """A prompt that ends with the EOS does not replace the completion's."""
    example = tokenize({"prompt": "a</s>", "completion": ""}, words(eos_token="</s>"))
    assert example.input_ids.tolist() == [3, 2, 2]
    assert example.labels.tolist() == [-100, -100, 2]


def test_no_eos():
    """A tokenizer without EOS is refused, since a completion could not learn to end."""
    with pytest.raises(
        TokenizerError,
        match="has no EOS token, so a completion could never learn to end; name one as eos_token in its tokenizer_config.json",
    ):
        tokenize({"prompt": "a", "completion": "b"}, words())


def test_a_token_that_merges_over_the_border(chatml_tokenizer):
    """Prompt and completion are tokenised as one text; a token of both is learned."""
    ids = chatml_tokenizer("assistant")["input_ids"]
    assert len(ids) == 1
    example = tokenize({"prompt": "assis", "completion": "tant"}, chatml_tokenizer)
    assert example.labels.tolist() == [ids[0], chatml_tokenizer.eos_token_id]


def test_blanks_that_are_added_tokens_end_no_turn(with_template, chat):
    """Some vocabularies have runs of blanks as added tokens (Gemma, GPT-NeoX); the one after the turn end is not learned."""
    tokenizer = with_template(
        "{% for m in messages %}{{ m['role'] + ':' + m['content'] + '<|im_end|>\n\n' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    tokenizer.add_tokens([AddedToken("\n\n", normalized=False)])
    example = tokenize(chat(("user", "x"), ("assistant", "a\n\nb")), tokenizer)
    assert tokenizer.decode(example.labels[example.labels != -100].tolist()) == "a\n\nb<|im_end|>"


def test_a_header_token_that_swallows_blanks(with_template, chat):
    """Phi-3's header tokens take the blanks after them along; they are not learned, the ids are the template's."""
    tokenizer = with_template(
        "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
    )
    tokenizer.add_tokens(
        [AddedToken(f"<|{role}|>", normalized=False, rstrip=True) for role in ("user", "assistant")], special_tokens=True
    )
    row = chat(("user", "x"), ("assistant", "\n  a"))
    example = tokenize(row, tokenizer)
    assert example.input_ids.tolist() == tokenizer.apply_chat_template(row["messages"])["input_ids"]
    assert tokenizer.decode(example.labels[example.labels != -100].tolist()) == "a<|im_end|>"


def test_metaspace(chat):
    """Llama-2's type of tokenizer: ids as its template gives them, answers and their EOS learned, also of unknown text."""
    tokenizer = metaspace(
        "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ ' ' + m['content'] + ' </s>' }}"
        "{% else %}{{ '<s>[INST] ' + m['content'] + ' [/INST]' }}{% endif %}{% endfor %}"
    )
    row = chat(("user", "what is this"), ("assistant", "it is é 🙂"), ("user", "<s> hello"), ("assistant", "a test"))
    example = tokenize(row, tokenizer)
    assert example.input_ids.tolist() == tokenizer.apply_chat_template(row["messages"])["input_ids"]
    text = tokenizer.decode(example.labels[example.labels != -100].tolist())
    assert (
        text.split() == ["it", "is", "é", "🙂", "</s>a", "test", "</s>"]
        or text.split() == "it is é 🙂 </s> a test </s>".split()
    )


def _told(made):
    """Return everything that a sample became, to compare."""
    return [
        (example.input_ids.tolist(), example.labels.tolist(), example.segments.tolist(), example.roles)
        for example in made.examples
    ], made.desirable


def test_a_default_system_turn(chatml_tokenizer, chat):
    """A default system turn is the template's; the user's segment begins with the user's own header."""
    row = chat(("user", "hi"), ("assistant", "ho"), ("user", "so"), ("assistant", "ha"))
    batch = Encoder(chatml_tokenizer).encode([Chat(f"f:{number}", row["messages"]) for number in range(3)])
    for example in (tokenize(row, chatml_tokenizer), *(made.examples[0] for made in batch)):
        expected = [
            chatml_tokenizer.decode(example.input_ids[start:stop].tolist()) for start, stop in example.segments.tolist()
        ]
        assert list(zip(example.roles, expected, strict=True)) == [
            ("template", "<|im_start|>system\nYou are Bot<|im_end|>\n"),
            ("user", "<|im_start|>user\nhi<|im_end|>\n"),
            ("assistant", "<|im_start|>assistant\nho<|im_end|>\n"),
            ("user", "<|im_start|>user\nso<|im_end|>\n"),
            ("assistant", "<|im_start|>assistant\nha<|im_end|>\n"),
        ]


def test_a_batch_of_many_kinds(chatml_tokenizer, chat):
    """Samples of all types in one batch keep their order, and each becomes what it becomes alone."""
    expected = Chat("f:1", chat(("user", "hi"), ("assistant", "ho"))["messages"])
    text = Text("f:2", "a ", "b")
    samples = [
        text, expected, Document("f:3", "paper"), Tokens("f:4", np.array([5, 6], np.int32), np.array([False, True])),
        Preference("f:5", expected, Chat("f:5", chat(("user", "hi"), ("assistant", "no"))["messages"])),
        Unpaired("f:6", text, desirable=False),
    ]  # fmt: skip
    encoded = Encoder(chatml_tokenizer).encode(samples)
    alone = [Encoder(chatml_tokenizer).encode([sample])[0] for sample in samples]
    assert [_told(made) for made in encoded] == [_told(made) for made in alone]
    assert [len(made.examples) for made in encoded] == [1, 1, 1, 1, 2, 1]
    assert [made.desirable for made in encoded] == [None, None, None, None, None, False]
    message = [[learned(chatml_tokenizer, example) for example in made.examples] for made in encoded]
    assert message[:3] == [["b<|im_end|>"], ["ho<|im_end|>"], ["paper<|im_end|>"]]
    assert message[4:] == [["ho<|im_end|>", "no<|im_end|>"], ["b<|im_end|>"]]
    assert encoded[3].examples[0].labels.tolist() == [-100, 6]
    roles = [made.examples[0].roles for made in encoded]
    assert roles == [
        ("prompt", "completion"),
        ("template", "user", "assistant"),
        ("document",),
        ("tokens",),
        ("template", "user", "assistant"),
        ("prompt", "completion"),
    ]
    for made in encoded:
        for example in made.examples:
            bounds = example.segments
            assert bounds.dtype == np.int32
            assert bounds[0, 0] == 0
            assert bounds[-1, 1] == len(example)
            assert (bounds[1:, 0] == bounds[:-1, 1]).all()


def test_an_empty_batch(chatml_tokenizer):
    """No samples become no examples."""
    assert Encoder(chatml_tokenizer).encode([]) == []


@pytest.mark.parametrize("sample", [Text("f:1", "a ", "b"), Document("f:1", "a b")])
def test_every_token(chatml_tokenizer, chat, sample):
    """Under `all` every token is learned, the template's own too."""
    expected = Chat("f:2", chat(("user", "hi"), ("assistant", "ho"))["messages"])
    for made in Encoder(chatml_tokenizer, "all").encode([sample, expected]):
        assert (made.examples[0].labels == made.examples[0].input_ids).all()


def test_what_has_no_completion(chatml_tokenizer):
    """Documents and token ids have no last turn and no completion: refused by place."""
    for sample in (Document("f:1", "a"), Tokens("f:1", np.array([5], np.int32), np.array([True]))):
        for train_on in ("last", "completion"):
            with pytest.raises(DataError, match=f"f:1: `train_on` is '{train_on}', and the row"):
                Encoder(chatml_tokenizer, train_on).encode([sample])


def test_documents_begin_and_end_as_text(chat):
    """A document gets the tokenizer's BOS and one EOS, all of it learned."""
    made = Encoder(words(post="<s> $A", bos_token="<s>", eos_token="</s>")).encode([Document("f:1", "a b")])
    assert made[0].examples[0].input_ids.tolist() == [1, 3, 4, 2]
    assert made[0].examples[0].labels.tolist() == [1, 3, 4, 2]
    empty = Encoder(words(eos_token="</s>")).encode([Document("f:1", "")])
    assert empty[0].examples[0].labels.tolist() == [2]


def test_a_batch_is_its_rows(chatml_tokenizer, small_chats):
    """A batch gives what its rows give one by one."""
    batch = Encoder(chatml_tokenizer).encode([Chat("f:1", row["messages"]) for row in small_chats])
    for row, encoded in zip(small_chats, batch, strict=True):
        (example,) = encoded.examples
        alone = tokenize(row, chatml_tokenizer)
        assert example.input_ids.tolist() == alone.input_ids.tolist()
        assert example.labels.tolist() == alone.labels.tolist()
