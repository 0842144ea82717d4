"""Small tokenizers, trained on the spot, and chat templates of several families, each with a second, hand-written account of
what it writes and which of that an assistant has to learn. No model, no network, no torch.
"""

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from . import pictured

CORPUS = [
    "What is the capital of France? The capital of France is Paris.",
    "### Human:\nHow are you today?\n### Assistant:\nI am fine, thank you.\n### End\n\n",
    "USER: hello there ASSISTANT: hi </s> [INST] what now [/INST] nothing",
    "user\nassistant\nsystem\nmodel\n\n\n  def f(x):\n    return x + 1\n.\n\n.\n",
    "<|user|>\n<|assistant|>\n<think>\n\n</think>\n\nanswer 0 1 2 3 4 5 6 7 8 9",
] * 4


def byte_level(special, *, trim_offsets, **names):
    """A byte-level BPE tokenizer, as GPT-2's, Llama-3's and SmolLM2's are, of some 400 tokens."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=trim_offsets)
    backend.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False))
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **names)


BLOCK = "{% for m in messages %}"

CHATML = (
    BLOCK + "{% if loop.first and m['role'] != 'system' %}<|im_start|>system\nYou are Bot<|im_end|>\n{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}"
    + BLOCK
    + "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}" + BLOCK + "{% if m['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\n' + m['content'] | trim + "
    "'<end_of_turn>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
ZEPHYR = (
    BLOCK
    + "{% if m['role'] in ['user', 'system', 'assistant'] %}{{ '<|' + m['role'] + '|>\n' + m['content'] + eos_token + '\n' "
    "}}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
VICUNA = (
    BLOCK
    + "{% if m['role'] == 'system' %}{{ m['content'] + ' ' }}{% elif m['role'] == 'user' %}{{ 'USER: ' + m['content'] + ' ' }}"
    "{% else %}{{ 'ASSISTANT: ' + m['content'] + '</s>' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' "
    "}}{% endif %}"
)
# Writes no generation prompt at all: the header of the assistant's turn is the end of the user's.
LLAMA2 = (
    BLOCK + "{% if m['role'] == 'assistant' %}{{ ' ' + m['content'] | trim + ' ' + eos_token }}"
    "{% else %}{{ bos_token + '[INST] ' + m['content'] | trim + ' [/INST]' }}{% endif %}{% endfor %}"
)
# Closes a turn in plain text: no token of it is special.
PLAIN = (
    BLOCK
    + "{{ '### ' + ('Assistant' if m['role'] == 'assistant' else 'Human') + ':\n' + m['content'] + '\n### End\n\n' }}{% endfor "
    "%}"
    "{% if add_generation_prompt %}{{ '### Assistant:\n' }}{% endif %}"
)
MARKED = (
    BLOCK
    + "{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>' "
    "}}"
    "{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As Qwen3's: an empty reasoning block in the last turn only, and reasoning dropped from all earlier ones.
QWEN3 = (
    BLOCK + "{% set c = m['content'].split('</think>')[-1].lstrip('\n') %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and loop.last %}{{ m['content'] if '</think>' in m['content'] else "
    "'<think>\n\n</think>\n\n' + c }}"
    "{% else %}{{ c }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' "
    "}}{% endif %}"
)


def chatml(messages):
    if messages[0]["role"] != "system":
        yield "<|im_start|>system\nYou are Bot<|im_end|>\n", False
    yield from marked(messages)


def marked(messages):
    for m in messages:
        yield f"<|im_start|>{m['role']}\n", False
        yield m["content"] + "<|im_end|>", m["role"] == "assistant"
        yield "\n", False


def llama3(messages):
    yield "<|begin_of_text|>", False
    for m in messages:
        yield f"<|start_header_id|>{m['role']}<|end_header_id|>\n\n", False
        yield m["content"].strip() + "<|eot_id|>", m["role"] == "assistant"


def gemma(messages):
    yield "<bos>", False
    for m in messages:
        yield f"<start_of_turn>{'model' if m['role'] == 'assistant' else 'user'}\n", False
        yield m["content"].strip() + "<end_of_turn>", m["role"] == "assistant"
        yield "\n", False


def zephyr(messages):
    for m in messages:
        yield f"<|{m['role']}|>\n", False
        yield m["content"] + "</s>", m["role"] == "assistant"
        yield "\n", False


def vicuna(messages):
    for m in messages:
        match m["role"]:
            case "system":
                yield m["content"] + " ", False
            case "user":
                yield f"USER: {m['content']} ", False
            case _:
                yield "ASSISTANT:", False
                yield f" {m['content']}</s>", True


def llama2(messages):
    for m in messages:
        if m["role"] == "assistant":
            yield f" {m['content'].strip()} </s>", True
        else:
            yield f"<s>[INST] {m['content'].strip()} [/INST]", False


def plain(messages):
    for m in messages:
        yield f"### {'Assistant' if m['role'] == 'assistant' else 'Human'}:\n", False
        yield m["content"] + "\n### End", m["role"] == "assistant"
        yield "\n\n", False


@dataclass(frozen=True)
class Family:
    """A template, its tokens, and the second account of it."""

    template: str
    pieces: Callable
    special: tuple[str, ...]
    eos: str
    bos: str | None = None
    roles: tuple[str, ...] = ("system", "developer", "user", "assistant", "tool")

    def tokenizer(self, *, trim_offsets=True):
        names = {"eos_token": self.eos} | ({"bos_token": self.bos} if self.bos else {})
        made = byte_level(self.special, trim_offsets=trim_offsets, **names)
        made.chat_template = self.template
        return made


_CHATML_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
FAMILIES = {
    "chatml": Family(CHATML, chatml, _CHATML_TOKENS, "<|im_end|>"),
    # The same template where the turn ends with another token than the text.
    "chatml, other EOS": Family(CHATML, chatml, _CHATML_TOKENS, "<|endoftext|>"),
    "llama-3": Family(
        LLAMA3,
        llama3,
        ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|end_of_text|>",
        "<|begin_of_text|>",
    ),
    "gemma": Family(
        GEMMA, gemma, ("<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"), "<eos>", "<bos>", ("user", "assistant")
    ),
    "zephyr": Family(ZEPHYR, zephyr, ("<s>", "</s>"), "</s>", "<s>", ("system", "user", "assistant")),
    "vicuna": Family(VICUNA, vicuna, ("<s>", "</s>"), "</s>", "<s>", ("system", "user", "assistant")),
    "llama-2": Family(LLAMA2, llama2, ("<s>", "</s>"), "</s>", "<s>", ("user", "assistant")),
    "plain closing": Family(PLAIN, plain, ("</s>",), "</s>"),
    "generation marks": Family(MARKED, marked, _CHATML_TOKENS, "<|im_end|>"),
}


@pytest.fixture(scope="session")
def families():
    """Name → Family."""
    return FAMILIES


@pytest.fixture(scope="session")
def tokenizers():
    """(family name, trim_offsets) → tokenizer."""
    return {(name, trim): family.tokenizer(trim_offsets=trim) for name, family in FAMILIES.items() for trim in (True, False)}


@pytest.fixture(scope="session")
def chatml_tokenizer(tokenizers):
    """A ChatML tokenizer whose <|im_end|> is its EOS."""
    return tokenizers["chatml", True]


@pytest.fixture
def logged():
    """`logged(level)`: a list that fills with the messages which `forge_data` logs from now on, of that level and above."""
    logger, before = logging.getLogger("forge_data"), logging.getLogger("forge_data").level
    handlers = []

    def listen(level=logging.WARNING):
        messages = []
        handler = logging.Handler()
        handler.emit = lambda record: messages.append(record.getMessage())
        handlers.append(handler)
        logger.addHandler(handler)
        logger.setLevel(level)
        return messages

    yield listen
    logger.setLevel(before)
    for handler in handlers:
        logger.removeHandler(handler)


@pytest.fixture
def with_template(chatml_tokenizer):
    """A ChatML tokenizer with another template, or with none."""

    def make(template):
        made = FAMILIES["chatml"].tokenizer()
        made.chat_template = template
        return made

    return make


@pytest.fixture(scope="session")
def qwen3():
    """A tokenizer whose template drops reasoning from earlier turns."""
    made = FAMILIES["chatml"].tokenizer()
    made.chat_template = QWEN3
    return made


@pytest.fixture
def write_rows(tmp_path):
    """Write rows to a JSONL file and return its path; a string is written as a line as it is."""

    def write(rows, name="train.jsonl"):
        path = tmp_path / name
        lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
        path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        return path

    return write


def _conversation(*turns):
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


@pytest.fixture(scope="session")
def chat():
    """chat(("user", "hi"), ("assistant", "ho")) is a row."""
    return _conversation


@pytest.fixture(scope="session")
def small_chats():
    """Twelve rows of different lengths."""
    return [_conversation(("user", f"count to {n}"), ("assistant", " ".join(map(str, range(n + 1))))) for n in range(12)]


@pytest.fixture(scope="session")
def gemma3_directory(tmp_path_factory):
    """The processor of a tiny Gemma 3; skipped where Pillow and torch are missing, as in the package's own environment."""
    pytest.importorskip("PIL")
    pytest.importorskip("torch")
    return pictured.gemma3(tmp_path_factory.mktemp("gemma3"))
