"""TRL's SFTTrainer prepares the same ids and labels as we do: text, prompt and completion, chat, assistant turns alone."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

import forge_data

from .data_families import FAMILIES

trl = pytest.importorskip("trl", reason="TRL is not installed here: `hatch run peers:test`")

# What TRL 1.16 and its libraries warn about while a trainer is made; none of it is about the rows.
pytestmark = pytest.mark.filterwarnings("ignore")

WORDS = "What is the capital of France Paris hello 🙂 é 12, 3. (x)\n def f(x): <b> don't".split(" ")
TRAINED = ["gemma", "llama-3", "phi-3", "qwen2.5", "qwen3"]
"""Families for which TRL has a training template with {% generation %}; it swaps it in by itself."""


def prepared(rows: list[dict[str, Any]], tokenizer: Any, tmp_path: Path, **settings: Any) -> list[dict[str, list[int]]]:
    """The rows of the dataset that TRL's trainer would train on."""
    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
    )
    arguments = trl.SFTConfig(
        output_dir=str(tmp_path / "out"),
        max_length=None,
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        **settings,
    )
    trainer = trl.SFTTrainer(
        model=LlamaForCausalLM(config), args=arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer
    )
    return [{"input_ids": row["input_ids"], "labels": row["labels"]} for row in trainer.train_dataset]


def same(rows: list[dict[str, Any]], theirs: list[dict[str, list[int]]], tokenizer: Any, **settings: Any) -> None:
    """Hold our ids and labels against TRL's, row by row."""
    assert len(theirs) == len(rows)
    for row, wanted in zip(rows, theirs, strict=True):
        ours = forge_data.tokenize(row, tokenizer, **settings)
        assert ours.input_ids.tolist() == wanted["input_ids"], row
        assert ours.labels.tolist() == wanted["labels"], row


def text(draw: random.Random) -> str:
    """Words that begin and end with a letter."""
    return " ".join(["So", *draw.choices(WORDS, k=draw.randint(0, 25)), "end"])


def chats(seed: str, count: int = 24) -> list[dict[str, Any]]:
    """Conversations of one to three questions and answers."""
    draw = random.Random(seed)
    pairs = [draw.randint(1, 3) for _ in range(count)]
    return [
        {"messages": [{"role": role, "content": text(draw)} for _ in range(n) for role in ("user", "assistant")]} for n in pairs
    ]


@pytest.mark.parametrize("family", ["chatml", "llama-3", "llama-2", "gemma"])
def test_text(family: str, tmp_path: Path) -> None:
    """Documents: every token, and one EOS at the end, no second one."""
    tokenizer, draw = FAMILIES[family].tokenizer(), random.Random(family)
    rows = [{"text": text(draw)} for _ in range(24)]
    rows += [{"text": " blanks \n"}, {"text": text(draw) + tokenizer.eos_token}]
    same(rows, prepared(rows, tokenizer, tmp_path), tokenizer)


@pytest.mark.parametrize("family", ["chatml", "llama-3", "llama-2", "gemma"])
def test_prompt_and_completion(family: str, tmp_path: Path) -> None:
    """Strings: the completion and one EOS are learned, and a token that holds characters of both."""
    tokenizer, draw = FAMILIES[family].tokenizer(), random.Random(family)
    rows = [
        {"prompt": f"{text(draw)}{gap}", "completion": text(draw)} for gap in (" ", "\n", ": ", "", "?\n") for _ in range(6)
    ]
    rows += [{"prompt": "x", "completion": f"y{tokenizer.eos_token}"}]
    same(rows, prepared(rows, tokenizer, tmp_path), tokenizer)


def test_a_prompt_whose_own_tokens_change(tmp_path: Path) -> None:
    """Where the prompt alone has other tokens, TRL learns them (with a warning); here they are the prompt's, not learned."""
    tokenizer = FAMILIES["chatml"].tokenizer()
    row = {"prompt": "So:\n\n", "completion": "end"}
    (theirs,) = prepared([row], tokenizer, tmp_path)
    ours = forge_data.tokenize(row, tokenizer)
    assert ours.input_ids.tolist() == theirs["input_ids"]
    kept = [label for label in ours.labels.tolist() if label != -100]
    assert tokenizer.decode(kept) == "end<|im_end|>"
    assert tokenizer.decode([label for label in theirs["labels"] if label != -100]) == "\n\nend<|im_end|>"


@pytest.mark.parametrize("family", ["llama-3", "llama-2", "phi-4", "command-r"])
def test_prompt_and_completion_as_messages(family: str, tmp_path: Path) -> None:
    """Messages: what comes after the prompt is learned, where the template ends a turn with its turn end."""
    tokenizer = FAMILIES[family].tokenizer()
    rows = [{"prompt": row["messages"][:-1], "completion": row["messages"][-1:]} for row in chats(family)]
    same(rows, prepared(rows, tokenizer, tmp_path), tokenizer)


@pytest.mark.parametrize("family", ["chatml", "llama-3", "gemma", "qwen3"])
def test_chat(family: str, tmp_path: Path) -> None:
    """Conversations, every token of them: TRL's default is our `train_on="all"`."""
    tokenizer, rows = FAMILIES[family].tokenizer(), chats(family)
    same(rows, prepared(rows, tokenizer, tmp_path, assistant_only_loss=False), tokenizer, train_on="all")


@pytest.mark.parametrize("family", TRAINED)
def test_assistant_only_loss(family: str, tmp_path: Path) -> None:
    """With TRL's own training templates, whose {% generation %} marks say what is learned."""
    tokenizer, rows = FAMILIES[family].tokenizer(), chats(family)
    theirs = prepared(rows, tokenizer, tmp_path, assistant_only_loss=True)
    swapped = FAMILIES[family].tokenizer()
    swapped.chat_template = trl.get_training_chat_template(processing_class=tokenizer)
    assert "generation" in swapped.chat_template
    same(rows, theirs, swapped)


@pytest.mark.parametrize("family", ["llama-3"])
def test_the_vendors_own_template_needs_no_marks(family: str, tmp_path: Path) -> None:
    """From the template as the vendor ships it we learn what TRL learns from its marked one."""
    tokenizer, rows = FAMILIES[family].tokenizer(), chats(family)
    same(rows, prepared(rows, tokenizer, tmp_path, assistant_only_loss=True), FAMILIES[family].tokenizer())
