"""Model or export, and its tokenizer → one that stops where its chat template ends a turn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import forge_data

if TYPE_CHECKING:
    from forge._progress import Reporter

_FILE = "generation_config.json"


def stop_at_turn_end(model: Any, tokenizer: Any) -> str | None:
    """Add the token that ends a turn of a named chat template to those that end an answer.

    They stand in `generation_config`, which is written beside the weights: transformers, vLLM and GGUF stop there.

    Returns:
        The token, or None where nothing was added: another template, or one whose turns the model's EOS ends.

    """
    token = forge_data.turn_end(getattr(tokenizer, "chat_template", None))
    generation = getattr(model, "generation_config", None)
    if token is None or generation is None:
        return None
    ends = generation.eos_token_id
    ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
    # A tokenizer with such a template of its own may write the token in pieces.
    numbers = tokenizer.encode(token, add_special_tokens=False)
    if len(numbers) != 1 or numbers[0] in ends:
        return None
    generation.eos_token_id = [*ends, *numbers]
    return token


def end_of(s: Any) -> str | None:
    """Return the token that ends a turn of a run's named template.

    None where it names no template, or the EOS ends a turn.
    """
    name = getattr(s.data, "chat_template", None)
    row = forge_data.chat_templates().get(name) if isinstance(name, str) else None
    return None if row is None else row.end


def stop_as_trained(s: Any, model: Any, tokenizer: Any, report: Reporter) -> None:
    """Let the model of a run stop where its named template ends a turn, and log it.

    Not by the tokenizer's own text: what earlier versions sampled ended without it, and their runs are resumed.
    """
    named = getattr(s.data, "chat_template", None) in forge_data.chat_templates()
    if named and (end := stop_at_turn_end(model, tokenizer)) is not None:
        where = f"{_FILE} of an export names it"
        if s.adapter.adapter not in ("none", "osft"):
            where = "forge and a merged export stop there; to ask the adapter elsewhere, give it as a stop token"
        report.note(f"chat_template: {end} ends a turn and was no EOS of the model; {where}")


def write_turn_end(s: Any, directory: Path, tokenizer: Any) -> str | None:
    """Add that token to the `generation_config.json` of an export that another library wrote.

    Returns:
        The token, or None where nothing was added.

    """
    from transformers import AutoConfig, GenerationConfig

    if end_of(s) is None or not (directory / "config.json").is_file():
        return None
    if (directory / _FILE).is_file():
        found = GenerationConfig.from_pretrained(directory)
    else:
        found = GenerationConfig.from_model_config(AutoConfig.from_pretrained(directory))
    model: Any = _Generating(found)
    token = stop_at_turn_end(model, tokenizer)
    if token is not None:
        found.save_pretrained(directory)
    return token


class _Generating:
    """Stand-in for a model, with what it generates by."""

    def __init__(self, generation_config: Any) -> None:
        self.generation_config = generation_config


def not_named(s: Any, directory: Path) -> str | None:
    """Say that an export does not name the end of a turn of the run's template.

    None where it does, or has no need to: an adapter has no such file, and what cannot be read is not judged.
    """
    end = end_of(s)
    if end is None or (directory / "adapter_config.json").is_file() or not (directory / "config.json").is_file():
        return None
    try:
        tokenizer = forge_data.load_tokenizer(str(directory))
        numbers = tokenizer.encode(end, add_special_tokens=False)
        place = directory / (_FILE if (directory / _FILE).is_file() else "config.json")
        ends = json.loads(place.read_text(encoding="utf-8")).get("eos_token_id")
    except (forge_data.ForgeDataError, OSError, ValueError, AttributeError):
        return None
    if len(numbers) != 1 or numbers[0] in (ends if isinstance(ends, list) else [ends]):
        return None
    return (
        f"WARNING: chat_template: {end} ends a turn, and {place}, which backend={s.backend.backend} wrote, does not name it "
        f"as EOS: add {numbers[0]} to eos_token_id there, or give {end} as a stop token"
    )
