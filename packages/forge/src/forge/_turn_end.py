"""Model and its tokenizer → a model that stops where its chat template ends a turn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import forge_data

TURN_END = "turn_end"
"""Entry of run.json: the token that ends an answer beside the EOS, which a run that is resumed keeps."""


def former_turn_end(run: Path) -> str | None:
    """Return the token that ends answers of a run beside the EOS; None of an earlier version's."""
    try:
        found = json.loads((run / "run.json").read_text(encoding="utf-8")).get(TURN_END)
    except (OSError, ValueError, AttributeError):
        return None
    return found if isinstance(found, str) else None


def stop_at_turn_end(model: Any, tokenizer: Any, token: str | None = None) -> str | None:
    """Add the token that ends a turn of the chat template to those that end an answer.

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
