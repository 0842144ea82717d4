"""Model or export, and its tokenizer → one that stops where its chat template ends a turn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import forge_data

if TYPE_CHECKING:
    from forge._progress import Reporter

_FILE = "generation_config.json"
TURN_END = "turn_end"
"""Entry of run.json: the token that ends an answer beside the EOS, which a run that is resumed keeps."""


def former_turn_end(run: Path) -> str | None:
    """Return the token that ends answers of a run beside the EOS; None of an earlier version's."""
    try:
        found = json.loads((run / "run.json").read_text(encoding="utf-8")).get(TURN_END)
    except (OSError, ValueError, AttributeError):
        return None
    return found if isinstance(found, str) else None


def trained_turn_end(directory: str | Path) -> str | None:
    """Return the token that ends answers of the run that exported a directory, or None."""
    return former_turn_end(Path(directory).expanduser().absolute().parent.parent)


def stop_at_turn_end(model: Any, tokenizer: Any, token: str | None = None) -> str | None:
    """Add the token that ends an answer to those that do already.

    They stand in `generation_config`, which is written beside the weights: transformers, vLLM and GGUF stop there.

    Args:
        model: the model.
        tokenizer: its tokenizer, with the chat template.
        token: the token, where it is known; by default what the template says.

    Returns:
        The token, or None where nothing was added: no such token, or one of the model's EOS.

    """
    token = token or forge_data.turn_end(getattr(tokenizer, "chat_template", None), tokenizer)
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


def stop_as_trained(s: Any, model: Any, tokenizer: Any, report: Reporter, token: str | None) -> None:
    """Let the model of a run stop at the token that ends its answers, and log it."""
    if token and (end := stop_at_turn_end(model, tokenizer, token)) is not None:
        where = f"{_FILE} of an export names it"
        if s.adapter.adapter not in ("none", "osft"):
            where = "forge and a merged export stop there; to ask the adapter elsewhere, give it as a stop token"
        report.note(f"{setting_of_end(s)}: {end} ends a turn and was no EOS of the model; {where}")


def setting_of_end(s: Any) -> str:
    """Return the setting that a token which ends answers comes from."""
    return "chat_template" if getattr(s.data, "turn_end", None) is None else "turn_end"


def write_turn_end(directory: Path, tokenizer: Any, token: str | None) -> str | None:
    """Add that token to the `generation_config.json` of an export that another library wrote.

    Returns:
        The token, or None where nothing was added.

    """
    from transformers import AutoConfig, GenerationConfig

    if token is None or not (directory / "config.json").is_file():
        return None
    if (directory / _FILE).is_file():
        found = GenerationConfig.from_pretrained(directory)
    else:
        found = GenerationConfig.from_model_config(AutoConfig.from_pretrained(directory))
    model: Any = _Generating(found)
    end = stop_at_turn_end(model, tokenizer, token)
    if end is not None:
        found.save_pretrained(directory)
    return end


class _Generating:
    """Stand-in for a model, with what it generates by."""

    def __init__(self, generation_config: Any) -> None:
        self.generation_config = generation_config


def not_named(s: Any, directory: Path) -> str | None:
    """Say that an export does not name the end of a turn of its template.

    None where it does, or has no need to: an adapter has no such file, and what cannot be read is not judged.
    """
    named, given = getattr(s.data, "chat_template", None), getattr(s.data, "turn_end", None)
    if named is given is None or (directory / "adapter_config.json").is_file() or not (directory / "config.json").is_file():
        return None
    row = forge_data.chat_templates().get(named or "")
    try:
        tokenizer = forge_data.load_tokenizer(str(directory))
        end = given or (forge_data.turn_end(tokenizer.chat_template, tokenizer) if row is None else row.end)
        numbers = [] if end is None else tokenizer.encode(end, add_special_tokens=False)
        place = directory / (_FILE if (directory / _FILE).is_file() else "config.json")
        ends = json.loads(place.read_text(encoding="utf-8")).get("eos_token_id")
    except (forge_data.ForgeDataError, OSError, ValueError, AttributeError):
        return None
    if len(numbers) != 1 or numbers[0] in (ends if isinstance(ends, list) else [ends]):
        return None
    return (
        f"WARNING: {setting_of_end(s)}: {end} ends a turn, and {place}, which backend={s.backend.backend} wrote, does not name "
        f"it as EOS: add {numbers[0]} to eos_token_id there, or give {end} as a stop token"
    )
