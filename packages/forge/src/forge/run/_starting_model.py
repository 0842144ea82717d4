"""Model path and new tokens → the model directory that a run starts from, checked."""

from __future__ import annotations

from typing import Any, NamedTuple

import forge_data
import forge_dist
from forge._counted import counted
from forge._errors import SettingsError
from forge._progress import Reporter
from forge.run._run_directory import RunDirectory
from forge.tasks._task import Task

BASE = "base_model"
"""Folder of a run with new tokens: the model as it starts, with rows for them, and its tokenizer."""

_SHOWN = 8


class Start(NamedTuple):
    """Model that a run starts from; as JSON the same on every rank."""

    path: str
    """Directory or hub name: `model_path`, or the run's own `base_model`."""
    new_ids: tuple[int, ...] = ()
    """Ids of the new tokens, ascending."""


def starting_model(task: Task, s: Any, out: RunDirectory, report: Reporter, *, weights: bool = True) -> tuple[Start, Any]:
    """Check a model against its class and tokenizer, and add new tokens; on the first rank.

    Args:
        task: the verb.
        s: its settings.
        out: the run directory.
        report: gets a line on new tokens, and on weights that are not here.
        weights: whether they must be here; without, the configuration suffices.

    Returns:
        Where the run starts, and the tokenizer.

    Raises:
        forge_dist.ModelError: no such class, weights of another one, or a tokenizer of more ids than the embedding has rows.
        forge_data.TokenizerError: there is no tokenizer, or it cannot read a new token as one.
        SettingsError: the adapter cannot train rows of new tokens.

    """
    path = s.model.model_path
    # First, since transformers reads config.json for the tokenizer too: what is wrong there would be said of the tokenizer.
    rows = forge_dist.check_model(path, task=task.model_task(s), weights=weights)
    if not weights and forge_dist.has_no_weights(path):
        report.note(f"{path} holds no weights: shapes are those of its config.json, and no check is made that weights fit it")
    tokenizer = forge_data.load_tokenizer(path)
    added = forge_data.add_tokens(tokenizer, s.model.add_tokens, special=s.model.add_special_tokens)
    # A token that the tokenizer has and the model has no row for is new to the model.
    new = {token: number for token, number in added.ids.items() if token in added.new or number >= rows}
    _check_rows(path, rows, tokenizer, new)
    for token in added.known:
        if token not in new:
            report.note(f"add_tokens: {token!r} is a token already, with id {added.ids[token]}, and keeps its row")
    if not new:
        return Start(path), tokenizer
    _check_trained(s)
    ids = tuple(sorted(new.values()))
    folder = out.place(BASE)
    if not folder.exists():
        forge_dist.write_with_token_rows(path, folder, ids, tokenizer=tokenizer, task=task.model_task(s))
    size = forge_dist.check_model(str(folder), task=task.model_task(s))
    grown = f"the embedding grows from {rows:,} to {size:,} rows" if size > rows else f"of the {rows:,} rows some were unused"
    shown = [f"{token!r} {number}" for token, number in new.items()]
    more = ["..."] if len(shown) > _SHOWN else []
    report.note(
        f"new tokens: {len(new):,} ({', '.join([*shown[:_SHOWN], *more])}); {grown}; theirs begin as the mean of the others; "
        f"the run starts from {folder}"
    )
    return Start(str(folder), ids), tokenizer


def _check_rows(path: str, rows: int, tokenizer: Any, new: dict[str, int]) -> None:
    """Raise ModelError for a tokenizer with ids beyond the embedding, but for new tokens."""
    over = {number: token for token, number in tokenizer.get_vocab().items() if number >= rows and token not in new}
    if over:
        first = min(over)
        raise forge_dist.ModelError(
            f"model_path {path}: its tokenizer has {counted(len(over), 'tokens')} without a row in the embedding of its "
            "model, which has "
            f"{rows:,} rows: the first is {over[first]!r} with id {first}. Give the tokenizer that belongs to the model, or "
            "name these tokens in add_tokens or add_special_tokens, which adds rows for them."
        )


def _check_trained(s: Any) -> None:
    """Raise SettingsError for an adapter beside which new tokens' rows would not be trained."""
    kind = s.adapter.adapter
    lora = "take adapter=lora, which trains them beside its matrices"
    remedy = {
        "osft": "osft_train_rest=[embeddings, head] trains them, and all other rows",
        "ia3": f"name the embedding and the head in modules_to_save, or {lora}",
    }.get(kind, f"{lora}, or adapter=none")
    trained = {
        "osft": bool({"embeddings", "all"} & set(s.adapter.osft_train_rest)),
        "ia3": s.adapter.modules_to_save is not None,
    }
    if not trained.get(kind, kind not in ("prefix", "prompt", "adapter_prompt")):
        raise SettingsError(
            f"add_tokens with adapter={kind}: the new tokens' rows would stay the mean of the others: {remedy}."
        )


def untrained(model: Any) -> str | None:
    """Name the layer in which the new tokens' rows do not train; None where both do."""
    for name, layer in (("embedding", model.get_input_embeddings()), ("head", model.get_output_embeddings())):
        if layer is not None and not any(p.requires_grad for p in layer.parameters()):
            return name
    return None
