"""Rows, prompts and answers longer than a model's positions: one clear error before anything is trained."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BioGptConfig,
    BloomConfig,
    CodeGenConfig,
    GPT2Config,
    GPTJConfig,
    GPTNeoConfig,
    LlamaConfig,
    OPTConfig,
    XGLMConfig,
)

import forge
import forge_dist

from .conftest import write_rows
from .verbs import settings_of

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedConfig

LIMIT = 48
NARROW: dict[str, Any] = {"hidden_size": 32, "vocab_size": 99}
TWO: dict[str, Any] = {**NARROW, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": LIMIT}
GPT: dict[str, Any] = {"n_layer": 1, "n_embd": 32, "n_positions": LIMIT, "vocab_size": 99}
GLOBAL: dict[str, Any] = {"num_layers": 1, "num_heads": 2, "attention_types": [[["global"], 1]]}
TABLES: dict[str, tuple[PreTrainedConfig, int | None]] = {
    "gpt2": (GPT2Config(**GPT, n_head=2), LIMIT),
    "gpt_neo": (GPTNeoConfig(**NARROW, **GLOBAL, max_position_embeddings=LIMIT), LIMIT),
    "opt": (OPTConfig(**TWO, ffn_dim=32, word_embed_proj_dim=32), LIMIT),
    "biogpt": (BioGptConfig(**TWO, intermediate_size=32), LIMIT),
    "gptj": (GPTJConfig(**GPT, n_head=2, rotary_dim=8), LIMIT),
    "codegen": (CodeGenConfig(**GPT, n_head=4, rotary_dim=4), LIMIT),
    "llama": (LlamaConfig(**TWO, intermediate_size=32), None),
    "bloom": (BloomConfig(**NARROW, n_layer=1, n_head=2), None),
    "xglm": (
        XGLMConfig(num_layers=1, d_model=32, ffn_dim=32, attention_heads=2, max_position_embeddings=LIMIT, vocab_size=99),
        None,
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_ends_where_the_model_does(name: str) -> None:
    """Oracle: a forward of so many tokens, and of one more."""
    config, expected = TABLES[name]
    model = AutoModelForCausalLM.from_config(config).eval()
    assert forge_dist.position_table(model) == expected
    with torch.no_grad():
        model(torch.full((1, LIMIT), 7), use_cache=False)
        if expected is None:
            model(torch.full((1, LIMIT + 8), 7), use_cache=False)
            return
        with pytest.raises((IndexError, RuntimeError)):
            model(torch.full((1, LIMIT + 1), 7), use_cache=False)


@pytest.fixture(scope="module")
def gpt2(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny GPT-2 of 48 positions, with the tests' tokenizer."""
    path = tmp_path_factory.mktemp("gpt2")
    shutil.copytree(model_dir, path, dirs_exist_ok=True)
    (path / "model.safetensors").unlink()
    vocabulary = AutoConfig.from_pretrained(model_dir).vocab_size
    config = GPT2Config(
        n_layer=1, n_embd=32, n_head=2, n_positions=LIMIT, vocab_size=vocabulary, bos_token_id=1, eos_token_id=2
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


LONG = "a long answer " * 20
ROWS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "sft": ({"prompt": "a", "completion": LONG}, {}, "set max_seq_len to drop longer rows"),
    "pretrain": ({"text": LONG}, {"block_size": 64}, "lower block_size"),
    "dpo": ({"prompt": "a", "chosen": LONG, "rejected": "b"}, {}, "set max_seq_len to drop longer answers"),
    "kto": ({"prompt": "a", "completion": LONG, "label": True}, {}, "set max_seq_len to drop longer answers"),
    "grpo": ({"prompt": "a", "fruit": "fig"}, {"max_new_tokens": 64}, "lower max_new_tokens or max_prompt_len"),
}


@pytest.mark.slow
@pytest.mark.parametrize("verb", ROWS)
def test_a_row_longer_than_the_table_is_refused(verb: str, gpt2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the run and by the dry run, in the same words, with the row's place and what to set; nothing is left behind."""
    row, more, remedy = ROWS[verb]
    monkeypatch.syspath_prepend(tmp_path)
    given = settings_of(verb, gpt2, tmp_path) | {"model_path": gpt2, "validation_split": 0.0} | more
    given = {name: value for name, value in given.items() if name not in ("max_tokens_per_gpu", "eval_every_steps")}
    given["data_path"] = write_rows(tmp_path / "long.jsonl", [row, row | ({"label": False} if verb == "kto" else {})] * 2)
    said = []
    for call in (getattr(forge, verb), lambda **settings: forge.dry_run(getattr(forge, verb), **settings)):
        with pytest.raises(forge.SettingsError, match=r"long\.jsonl:1 has a text of .* a table of 48 positions") as caught:
            call(**given, ckpt_output_dir=tmp_path / "run")
        said.append(str(caught.value))
    assert said[0] == said[1]
    assert remedy in said[0]
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_prompts_and_answers_are_counted_together(gpt2: Path, tmp_path: Path) -> None:
    """An eval prompt with its answer, and a prompt of `forge generate` with its own."""
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "a", "completion": "b"}] * 4)
    asked = tmp_path / "asked.txt"
    asked.write_text("\nwhat?\n")
    given: dict[str, Any] = {"model_path": gpt2, "data_path": rows, "max_steps": 1, "effective_batch_size": 2}
    with pytest.raises(forge.SettingsError, match=r"asked\.txt:2: has .* eval_max_new_tokens=64 may follow.* 48 positions"):
        forge.sft(**given, ckpt_output_dir=tmp_path / "run", eval_prompts=[str(asked)])
    result = forge.sft(**given, ckpt_output_dir=tmp_path / "run", eval_prompts=[str(asked)], eval_max_new_tokens=8)
    assert forge.generate(result.model_dir, "a", max_new_tokens=8) is not None
    with pytest.raises(forge.SettingsError, match=r"Set max_new_tokens to \d+ or less"):
        forge.generate(result.model_dir, "a", max_new_tokens=48)
    with pytest.raises(forge.SettingsError, match="Shorten the conversation"):
        forge.generate(result.model_dir, "a b c " * 40)


def test_a_teacher_of_fewer_positions_is_named(gpt2: Path, model_dir: Path, tmp_path: Path) -> None:
    """The student computes its positions, the teacher does not."""
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "a", "completion": LONG}] * 4)
    with pytest.raises(forge.SettingsError, match=r"rows\.jsonl:1 .* teacher_path .* has a table of 48 positions"):
        forge.distill(model_path=model_dir, teacher_path=gpt2, data_path=rows, ckpt_output_dir=tmp_path / "run", max_steps=1)


@pytest.mark.slow
@pytest.mark.parametrize("chat", [False, True])
def test_a_reward_model_of_fewer_positions_is_named(
    chat: bool, gpt2: Path, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt is counted in its own tokens, with room for a completion; where all fits, the run is made."""
    monkeypatch.syspath_prepend(tmp_path)
    judge = tmp_path / "judge"
    shutil.copytree(gpt2, judge)
    config = AutoConfig.from_pretrained(gpt2, num_labels=1, pad_token_id=0)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(judge)
    row = {"prompt": [{"role": "user", "content": "fig"}] if chat else "fig", "fruit": "fig"}
    more = {"reward_model_path": judge, "ckpt_output_dir": tmp_path / "run", "max_steps": 1}
    given = settings_of("grpo", model_dir, tmp_path) | {"model_path": model_dir, "validation_split": 0.0} | more
    given = {name: value for name, value in given.items() if name != "eval_every_steps"}
    given["data_path"] = write_rows(tmp_path / "prompts.jsonl", [row] * 4)
    for call in (forge.grpo, lambda **settings: forge.dry_run(forge.grpo, **settings)):
        with pytest.raises(forge.SettingsError, match=r"prompts\.jsonl:1: .* reward_model_path .* has a table of 48 positions"):
            call(**given | {"max_new_tokens": LIMIT})
        assert not (tmp_path / "run").exists()
    assert forge.grpo(**given | {"max_new_tokens": 4}).steps == 1


OWN: dict[str, Any] = {"on_policy": 1, "max_tokens_per_gpu": 2048}


@pytest.mark.parametrize(
    ("verb", "more", "remedy"),
    [
        ("dpo", {}, "max_seq_len=16 would drop them"),
        ("pretrain", {}, "lower block_size"),
        ("distill", {**OWN, "max_new_tokens": 100}, "lower max_new_tokens, which is counted with each prompt"),
        pytest.param("distill", {**OWN, "max_new_tokens": 1}, "max_seq_len=16 would drop them", marks=pytest.mark.slow),
    ],
)
def test_more_positions_than_a_model_was_made_for(
    verb: str, more: dict[str, Any], remedy: str, model_dir: Path, tmp_path: Path
) -> None:
    """Rotary positions have no end: a warning, which names a setting that the verb has."""
    path = tmp_path / "model"
    shutil.copytree(model_dir, path)
    config = AutoConfig.from_pretrained(path)
    config.max_position_embeddings = 16
    config.save_pretrained(path)
    run = tmp_path / "run"
    getattr(forge, verb)(**{**settings_of(verb, path, tmp_path), "max_steps": 1, **more}, ckpt_output_dir=run)
    (warning,) = [line for line in (run / "log.txt").read_text().splitlines() if "WARNING" in line and "was made for" in line]
    assert warning.endswith(f"; {remedy}.")
