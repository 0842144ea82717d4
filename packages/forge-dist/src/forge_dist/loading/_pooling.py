"""Directory of an embedding model → which hidden states of a text are its embedding."""

import json
from pathlib import Path
from typing import Any, Literal

from forge_dist._errors import ModelError
from forge_dist.loading._load import LOADING_ERRORS
from forge_dist.loading._model_path import expand_user, is_hub_name
from forge_dist.loading._unwrap import base_of, unwrapped

Pool = Literal["last", "mean", "cls"]

_FILE = "1_Pooling/config.json"
_MODES: dict[str, Pool] = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    # Newer versions of sentence-transformers name one mode.
    "lasttoken": "last",
    "mean": "mean",
    "cls": "cls",
}


def model_pooling(model_path: str) -> tuple[Pool, str]:
    """Return which hidden states of a text are its embedding, and why.

    What 1_Pooling/config.json of a sentence-transformers directory says; without one the mean of a model of a type that has
    masked language models (BERT, XLM-R, ModernBERT), and the last token's of any other.

    Raises:
        ModelError: the file cannot be read, or names another way of pooling; the configuration cannot be read.
    """
    import transformers

    file = _pooling_file(model_path)
    if file is not None:
        return _stored(file), f"{_FILE} of the model says so"
    try:
        config = transformers.AutoConfig.from_pretrained(expand_user(model_path), trust_remote_code=False)
    except LOADING_ERRORS as error:
        raise ModelError(f"model_path {model_path}: its configuration cannot be read: {error}") from error
    if type(config) in transformers.MODEL_FOR_MASKED_LM_MAPPING:
        return "mean", f"a model of the type {config.model_type} looks at a text from both sides"
    return "last", "the last token of a causal model has seen the whole text"


def hidden_size(model: Any) -> int:
    """Return the width of a model's hidden states, bare, wrapped or with an adapter."""
    return int(base_of(unwrapped(model)).config.get_text_config().hidden_size)


def _pooling_file(model_path: str) -> Path | None:
    if not is_hub_name(model_path):
        file = Path(expand_user(model_path)) / _FILE
        return file if file.is_file() else None
    from transformers.utils import cached_file

    # A model without the file is the rule, and offline the hub cannot be asked for it.
    quietly = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    found = cached_file(model_path, _FILE, **quietly)
    return None if found is None else Path(found)


def _stored(file: Path) -> Pool:
    try:
        config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        named = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
        named += [config["pooling_mode"]] if isinstance(config.get("pooling_mode"), str) else []
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(f"{file} cannot be read: {error}; correct it, or set `pooling`") from error
    if len(named) != 1 or named[0] not in _MODES:
        raise ModelError(
            f"{file} pools by {', '.join(map(str, named)) or 'nothing'}; embeddings are trained by the last token, the mean or "
            "the first (cls): set `pooling` to one of them"
        )
    return _MODES[named[0]]
