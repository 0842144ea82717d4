"""A model trained with a chat template by name, of a file or its own: whoever loads it asks, and stops, as it was trained."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

import forge
import forge_data
from forge._turn_end import former_turn_end, not_named, stop_at_turn_end, write_turn_end
from forge.talking._model import AnsweringModel
from forge_data.tokenizing._named_templates import text_of

from .conftest import CHATML
from .verbs import SHORT

LLAMA3 = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")


@pytest.fixture
def base(model_dir: Path, tmp_path: Path) -> Path:
    """The tiny model without a template, and whose tokenizer has a BOS."""
    path = tmp_path / "base"
    shutil.copytree(model_dir, path, ignore=shutil.ignore_patterns("chat_template*"))
    config = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps(config | {"bos_token": "<|endoftext|>"}))
    return path


def test_a_token_that_the_tokenizer_has_not_ends_nothing(model_dir: Path) -> None:
    """A tokenizer whose own template is that of a name may write its marks in pieces, which have no id."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    tokenizer.chat_template = text_of("llama3")
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=2))
    assert stop_at_turn_end(model, tokenizer) is None
    assert model.generation_config.eos_token_id == 2


@pytest.mark.parametrize("kept", [True, False])
def test_an_export_of_another_library_stops_there(kept: bool, base: Path) -> None:
    """Its generation_config.json, or a new one, names the end of a turn once; without a token nothing changes."""
    from transformers import AutoTokenizer, GenerationConfig

    file = base / "generation_config.json"
    if kept:
        GenerationConfig(eos_token_id=2, max_length=77).save_pretrained(base)
    else:
        file.unlink(missing_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_special_tokens({"additional_special_tokens": list(LLAMA3)})
    tokenizer.chat_template = text_of("llama3")
    end = tokenizer.convert_tokens_to_ids("<|eot_id|>")
    asked = (None, "<|eot_id|>", "<|eot_id|>")
    assert [write_turn_end(base, tokenizer, token) for token in asked] == [None, "<|eot_id|>", None]
    found = json.loads(file.read_text())
    assert found["eos_token_id"][-1] == end
    assert found["eos_token_id"].count(end) == 1
    assert not kept or (found["eos_token_id"], found["max_length"]) == ([2, end], 77)


@pytest.fixture
def marked(base: Path) -> Path:
    """The same with another EOS than the token that ends a turn of its own template, which no template by name is."""
    from transformers import GenerationConfig

    config = json.loads((base / "tokenizer_config.json").read_text())
    (base / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": "<|endoftext|>"}))
    (base / "chat_template.jinja").write_text(text_of("chatml") + "{# my own #}")
    GenerationConfig(eos_token_id=0).save_pretrained(base)
    return base


@pytest.mark.parametrize("form", ["own", "file"])
def test_the_end_of_a_turn_of_any_template(form: str, marked: Path, chats: Path, tmp_path: Path) -> None:
    """A tokenizer's own template and one of a file end answers as one by name does, in the export and in `forge chat`."""
    from transformers import AutoTokenizer, GenerationConfig

    given = {**SHORT, "max_steps": 1, "model_path": marked, "data_path": chats}
    if form == "file":
        given["chat_template"] = (marked / "chat_template.jinja").rename(tmp_path / "mine.jinja")
    found = forge.sft(**given, ckpt_output_dir=tmp_path / "run")
    assert found.model_dir is not None
    end = AutoTokenizer.from_pretrained(found.model_dir).convert_tokens_to_ids("<|im_end|>")
    assert GenerationConfig.from_pretrained(found.model_dir).eos_token_id == [0, end]
    assert AnsweringModel(found.model_dir)._model.generation_config.eos_token_id == [0, end]
    assert "<|im_end|> ends a turn and was no EOS of the model" in (tmp_path / "run" / "log.txt").read_text()


def test_the_token_of_turn_end(model_dir: Path, chats: Path, tmp_path: Path) -> None:
    """A token by the setting turn_end ends answers as one of the template does: in `forge chat` and in every export."""
    from transformers import GenerationConfig

    (tmp_path / "open.jinja").write_text(CHATML.replace("<|im_end|>", ""))
    given = {**SHORT, "max_steps": 1, "model_path": model_dir, "data_path": chats, "adapter": "lora", "lint": "off"}
    given |= {"chat_template": tmp_path / "open.jinja", "turn_end": "<|endoftext|>", "ckpt_output_dir": tmp_path / "run"}
    found = forge.sft(**given)
    assert "turn_end: <|endoftext|> ends a turn and was no EOS of the model" in (tmp_path / "run" / "log.txt").read_text()
    assert (
        former_turn_end(tmp_path / "run") == "<|endoftext|>"
    )  # which backends with a loop of their own write to their exports
    assert AnsweringModel(found.model_dir)._model.generation_config.eos_token_id == [2, 0]
    merged = forge.export(tmp_path / "run", tmp_path / "merged", merge=True)
    assert GenerationConfig.from_pretrained(merged).eos_token_id == [2, 0]
    s = SimpleNamespace(
        data=SimpleNamespace(chat_template=None, turn_end="<|endoftext|>"), backend=SimpleNamespace(backend="own")
    )
    assert not_named(s, merged) is None
    GenerationConfig(eos_token_id=2).save_pretrained(merged)
    assert "WARNING: turn_end: <|endoftext|> ends a turn" in str(not_named(s, merged))


@pytest.mark.parametrize(("known", "named"), [(True, False), (False, False), (False, True)])
def test_a_run_that_is_resumed_ends_answers_as_it_did(
    known: bool, named: bool, marked: Path, chats: Path, tmp_path: Path
) -> None:
    """What a run of an earlier version samples ended without the token, but with a template of a name; so it does elsewhere."""
    from transformers import GenerationConfig

    given = {**SHORT, "model_path": marked, "data_path": chats, "lr_scheduler": "constant", "keep_full_state": True}
    given |= {"chat_template": "chatml"} if named else {}
    run = tmp_path / "run"
    forge.sft(**given | {"max_steps": 1}, ckpt_output_dir=run)
    record = json.loads((run / "run.json").read_text())
    assert record["turn_end"] == "<|im_end|>"
    if not known:
        del record["turn_end"]
        (run / "run.json").write_text(json.dumps(record))
    begun = {**given, "resume": run / "full_state" / "step_1"}
    for resumed in (
        forge.sft(**begun | {"max_steps": 2}, ckpt_output_dir=tmp_path / "elsewhere"),
        forge.sft(**given | {"max_steps": 2}, ckpt_output_dir=run),
    ):
        assert resumed.steps == 2
        assert resumed.model_dir is not None
        ends = GenerationConfig.from_pretrained(resumed.model_dir).eos_token_id
        assert (ends != 0) == (known or named)


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_asked_and_stopped_as_trained(adapter: str, base: Path, chats: Path, tmp_path: Path) -> None:
    """The template is in the export, and the token that ends a turn ends an answer of transformers and of `forge chat`."""
    from transformers import AutoTokenizer, GenerationConfig

    given = {**SHORT, "model_path": base, "data_path": chats, "adapter": adapter, "chat_template": "llama3"}
    with pytest.raises(forge_data.TemplateError, match="add_special_tokens="):
        forge.sft(**given, ckpt_output_dir=tmp_path / "refused")
    run = tmp_path / "run"
    found = forge.sft(**given, add_special_tokens=LLAMA3, ckpt_output_dir=run)
    assert found.model_dir is not None
    tokenizer = AutoTokenizer.from_pretrained(found.model_dir)
    end = tokenizer.convert_tokens_to_ids("<|eot_id|>")
    said = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True)
    assert said.endswith("hi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n")
    where = "generation_config.json of an export names it" if adapter == "none" else "elsewhere, give it as a stop token"
    (line,) = [line for line in (run / "log.txt").read_text().splitlines() if "<|eot_id|> ends a turn and was no EOS" in line]
    assert line.endswith(where)
    assert "chat_template: llama3" in (run / "config.yaml").read_text()
    places = [found.model_dir] if adapter == "none" else [forge.export(run, tmp_path / "merged", merge=True)]
    for place in places:
        assert GenerationConfig.from_pretrained(place).eos_token_id == [2, end]
    assert AnsweringModel(run)._model.generation_config.eos_token_id == [2, end]
