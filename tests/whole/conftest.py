"""A tiny chat model on disk and a few conversations: what the end-to-end tests train."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest

from .repository import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
FRUITS = ["apple", "pear", "plum", "cherry", "melon", "quince", "fig", "date"]


def conversations(number: int = 24) -> list[dict[str, list[dict[str, str]]]]:
    """`number` short conversations of ragged lengths, every third with a second turn."""
    rows = []
    for index in range(number):
        fruit = FRUITS[index % len(FRUITS)]
        turns = [
            ("user", f"what colour has the {fruit} number {index}?"),
            ("assistant", f"the {fruit} is " + "very " * (index % 5) + "red."),
        ]
        if index % 3 == 0:
            turns += [("user", "and why?"), ("assistant", f"because the {fruit} likes the sun.")]
        rows.append({"messages": [{"role": role, "content": content} for role, content in turns]})
    return rows


def write_rows(path: Path, rows: list[dict]) -> Path:
    """Write rows as JSONL."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_model(directory: Path) -> Path:
    """A tiny Llama with a byte-level tokenizer and a ChatML template, as a plain Hugging Face directory."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    texts = [message["content"] for row in conversations() for message in row["messages"]]
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = CHATML
    fast.save_pretrained(directory)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(fast),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that the end-to-end tests train."""
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def larger_model(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 34 MB, beside which what Python holds is little."""
    from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

    path = tmp_path_factory.mktemp("larger")
    shutil.copytree(model_dir, path, dirs_exist_ok=True)
    shape = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 4}
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    vocabulary = AutoConfig.from_pretrained(model_dir).vocab_size
    AutoModelForCausalLM.from_config(LlamaConfig(**shape, **ids, vocab_size=vocabulary)).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 conversations as JSONL."""
    return write_rows(tmp_path_factory.mktemp("data") / "chats.jsonl", conversations())


@pytest.fixture(scope="module", autouse=True)
def _unguarded() -> Iterator[None]:
    """Let runs in this process do without the guard beside them, a sixth of a tiny run; ranks and commands have theirs."""
    if "torch" not in sys.modules:  # nothing here has run yet, and some modules run nothing
        yield
        return
    from forge_dist.ranks import _ranks

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_ranks, "under_guard", lambda *_, **__: nullcontext())
        yield


@pytest.fixture
def unchecked_exports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs write their exports and do not read them back: a seventh of a tiny run, for tests that look at what it left."""
    import forge_dist

    found = forge_dist.ExportCheck(in_memory=1.0, reloaded=1.0, difference=0.0, tolerance=1.0, loss_tokens=1, tensors=1)
    monkeypatch.setattr(forge_dist, "check_export", lambda *_, **__: found)


@pytest.fixture
def hanging(tmp_path: Path) -> Any:
    """`(variables, mark)`: of `variables(rank, step, how)` that rank stands still (`hang.py`); `mark` is there once it does."""
    site, mark = tmp_path / "site", tmp_path / "hangs"
    site.mkdir()
    shutil.copyfile(ROOT / "tests" / "whole" / "hang.py", site / "sitecustomize.py")

    def variables(rank: int, step: int, how: str) -> dict[str, str]:
        path = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
        return {"FORGE_TEST_HANG": f"{rank} {step} {how} {mark}", "PYTHONPATH": path}

    return variables, mark


@pytest.fixture(scope="module")
def with_held_out(model_dir: Path, chats: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The model, the conversations, and six others to measure on."""
    held_out = write_rows(tmp_path_factory.mktemp("held_out") / "held_out.jsonl", conversations(30)[24:])
    return {"model_path": str(model_dir), "data_path": str(chats), "eval_data_path": str(held_out)}


@pytest.fixture(scope="module")
def measured(with_held_out: dict[str, Any]) -> dict[str, Any]:
    """Steps of six rows, a measurement and an export after every second, and a best model."""
    return with_held_out | {
        "eval_every_steps": 2,
        "keep_best": True,
        "effective_batch_size": 6,
        "max_tokens_per_gpu": 256,
        "learning_rate": 1e-2,
        "save_samples": 12,
        "logging_steps": 100,
    }


@pytest.fixture
def browser() -> Iterator[Any]:
    """A headless Chromium, as the tests of forge-data's page have it."""
    place = importlib.util.spec_from_file_location("page_browser", ROOT / "tests" / "forge-data" / "browser.py")
    assert place is not None
    assert place.loader is not None
    module = importlib.util.module_from_spec(place)
    place.loader.exec_module(module)
    if module.CHROMIUM is None:
        pytest.skip("no Chromium on this machine: the page is not looked at")
    opened = module.Browser()
    yield opened
    opened.close()
    sys.modules.pop("page_browser", None)


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A directory of the tiny model of a name in `tiny`, with a tokenizer of its vocabulary."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    from . import tiny

    made: dict[str, Path] = {}
    words = WordLevel({f"word{number}": number for number in range(tiny.VOCABULARY)}, unk_token="word3")
    ends = {"pad_token": "word0", "bos_token": "word1", "eos_token": "word2"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), unk_token="word3", **ends)

    def directory(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("saved")
            tiny.save(name, made[name])
            tokenizer.save_pretrained(made[name])
        return made[name]

    return directory
