"""Model or configuration → the positions that it was made for, and whether it goes beyond."""

from typing import TYPE_CHECKING

from torch import nn

from forge_dist._errors import ModelError
from forge_dist._third_party_logs import quiet_transformers
from forge_dist.loading._load import LOADING_ERRORS
from forge_dist.loading._model_path import Task, expand_user
from forge_dist.loading._task import task_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_OFFSET = 4
"""Rows that a table may have beside those of its positions: OPT's and RoBERTa's begin at 2."""


def max_positions(model_path: str, *, task: Task = "causal") -> int | None:
    """Read a configuration's max_position_embeddings; None where it names none.

    Raises:
        ModelError: there is no configuration that transformers can read.
    """
    path = expand_user(model_path)
    try:
        with quiet_transformers(bars=False):
            config = task_config(path, task)
    except LOADING_ERRORS as error:
        raise ModelError(f"model_path {model_path}: its configuration cannot be read: {error}") from error
    return _named(config)


def position_table(model: "PreTrainedModel") -> int | None:
    """Count the positions that a model looks up in a table; None where it computes them.

    Beyond the last row of a table nothing can be read: GPT-2, OPT, GPT-Neo, BioGPT and others have learned one, GPT-J and
    CodeGen keep theirs of rotary angles. Rotary positions that are computed, ALiBi and states have no end.

    Args:
        model: loaded or an outline, bare or with an adapter.
    """
    inner: PreTrainedModel = getattr(model, "get_base_model", lambda: model)()
    limit = _named(inner.config)
    if limit is None:
        return None
    words = inner.get_input_embeddings()
    found = [
        module.num_embeddings
        - int(getattr(module, "offset", 0))
        - (0 if module.padding_idx is None else module.padding_idx + 1)
        for module in inner.modules()
        if isinstance(module, nn.Embedding) and module is not words and limit <= module.num_embeddings <= limit + _OFFSET
    ]
    found += [
        len(table)
        for module in inner.modules()
        # XGLM makes its table anew where a text is longer.
        if not hasattr(module, "make_weights")
        for name, table in module.named_buffers(recurse=False)
        if "pos" in name and table.dim() == 2 and len(table) == limit
    ]
    return min(found, default=None)


def _named(config: object) -> int | None:
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    found = getattr(text, "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else None
