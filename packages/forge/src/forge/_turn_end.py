"""Model and its tokenizer → a model that stops where its chat template ends a turn."""

from __future__ import annotations

from typing import Any

import forge_data


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
