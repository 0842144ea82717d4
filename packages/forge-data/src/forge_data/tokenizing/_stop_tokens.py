"""Tokenizer, and a turn end of the user's choice → the tokens that stop the model's answers."""

import json
from typing import TYPE_CHECKING, Any

from forge_data._errors import TokenizerError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FILES = ("generation_config.json", "config.json")
"""Files beside a tokenizer that name the model's EOS tokens; generating reads the first that does."""


def stop_tokens(tokenizer: "PreTrainedTokenizerBase", turn_end: str | None) -> tuple[str, ...]:
    """List the tokens that stop an answer: the given one, or those of the model's EOS list.

    Raises:
        TokenizerError: what is given is not one of the tokenizer's special tokens.
    """
    added = {number: token.content for number, token in tokenizer.added_tokens_decoder.items()}
    if turn_end is None:
        return tuple(added[number] for number in _eos_ids(str(tokenizer.name_or_path or "")) if number in added)
    if turn_end not in added.values():
        raise TokenizerError(
            f"`turn_end` is {turn_end!r}, which is no special token of the tokenizer; give one of those that stop the model"
        )
    return (turn_end,)


def _eos_ids(name: str) -> list[int]:
    """Return the ids that a model's files name as its EOS; none where there are no files."""
    if not name:
        return []
    from transformers.utils.hub import cached_file

    for file in _FILES:
        try:
            # What is not on this machine was not loaded with the tokenizer either.
            path = cached_file(name, file, local_files_only=True, _raise_exceptions_for_missing_entries=False)
            if path is None:
                continue
            with open(path, encoding="utf-8") as text:
                found: Any = json.load(text).get("eos_token_id")
        except (OSError, ValueError, AttributeError):
            continue
        ids = found if isinstance(found, list) else [found]
        if found is not None and all(isinstance(number, int) for number in ids):
            return ids
    return []
