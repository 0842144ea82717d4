"""Rows and prompts longer than a model's positions → an error, or a warning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import forge_accel
import forge_data
import forge_dist
from forge._counted import counted
from forge._errors import SettingsError
from forge._progress import Reporter
from forge.tasks._task import Task
from forge.tasks.items._items import VIRTUAL, Items, longest_row

_SHORTER_TABLE = 4
"""Positions that a table may have less than the configuration says."""


def check_positions(task: Task, s: Any, path: str, parts: Sequence[Items], asked: Mapping[str, int], report: Reporter) -> None:
    """Refuse what is beyond a table of positions, and warn where a model was made for fewer.

    Args:
        task: the verb.
        s: its settings.
        path: directory or hub name of the model that the run starts from.
        parts: the training and the held-out items.
        asked: place of each of `eval_prompts` → its tokens.
        report: gets the warning.

    Raises:
        SettingsError: a row, or a prompt with its answer, is longer than such a table.

    """
    virtual = s.adapter.num_virtual_tokens if s.adapter.adapter in VIRTUAL else 0
    longest = max(int(items.longest.max()) for items in parts) + virtual
    answered = max(asked.values(), default=0) + s.evaluation.eval_max_new_tokens + virtual if asked else 0
    if (limit := _exceeded(task, s, path, max(longest, answered))) is not None:
        table = _table(task.model_task(s), path)
        if table is not None:
            _refuse_rows(parts, table - virtual, f"model_path {s.model.model_path}")
            _refuse_prompts(s, asked, table - virtual)
        elif over := sum(int((items.longest + virtual > limit).sum()) for items in parts):
            shorter = max(parts, key=lambda items: int(items.longest.max())).shorter
            report.note(
                f"WARNING: {counted(over, 'samples')} with more tokens than the {limit:,} positions this model was made for "
                f"(max_position_embeddings), the longest of them {longest_row(parts)}; "
                f"{f'max_seq_len={limit} would drop them' if 'max_seq_len' in shorter else shorter}."
            )
    for name, other in task.row_readers(s).items():
        if (
            _exceeded(task, s, other, longest - virtual) is not None
            and (table := _table(task.model_task(s), other)) is not None
        ):
            _refuse_rows(parts, table, f"{name} {other}")
    for name, other in task.text_readers(s).items():
        if not _is_adapter(other) and (table := _table("reward", other)) is not None:
            _refuse_texts(parts, forge_data.load_tokenizer(other), table, f"{name} {other}")


def _exceeded(task: Task, s: Any, path: str, longest: int) -> int | None:
    """Return the positions that a configuration names, if a text is about as long or longer."""
    limit = forge_dist.max_positions(path, task=task.model_task(s))
    return limit if limit is not None and longest > limit - _SHORTER_TABLE else None


def _table(kind: Any, path: str) -> int | None:
    request = forge_dist.LoadRequest(model_path=path, dtype=forge_accel.float32, attention="eager", task=kind)
    return forge_dist.position_table(forge_dist.outline_model(request))


def _is_adapter(path: str) -> bool:
    """Return whether a path holds an adapter, whose base is known once it is loaded."""
    return (Path(path).expanduser() / "adapter_config.json").is_file()


def _refuse_texts(parts: Sequence[Items], tokenizer: Any, table: int, model: str) -> None:
    """Refuse prompts that leave no room in the table of a model with another tokenizer.

    A completion's tokens are taken for as many of that model's.
    """
    for items in parts:
        for row in range(len(items)):
            prompt, room = items.store[row].prompt, int(items.longest[row] - items.store.lengths[row])
            if isinstance(prompt, str):
                ids = tokenizer(prompt)["input_ids"]
            else:
                asked = [*prompt, {"role": "assistant", "content": ""}]
                ids = tokenizer.apply_chat_template(asked, tokenize=True, return_dict=False)
            if len(ids) + room > table:
                raise SettingsError(
                    f"{items.source(row)}: the prompt has {len(ids):,} tokens, and a completion of max_new_tokens={room:,} may "
                    f"follow; {model} has a table of {table:,} positions, beyond which it reads nothing. Take a reward model "
                    f"with more positions, or {items.shorter}."
                )


def _refuse_rows(parts: Sequence[Items], table: int, model: str) -> None:
    for items in parts:
        over = int((items.longest > table).sum())
        if not over:
            continue
        row = int(items.longest.argmax())
        shorter = items.shorter if items.shorter.startswith("lower") else f"set {items.shorter}"
        raise SettingsError(
            f"{items.source(row)} has a text of {int(items.longest[row]):,} tokens, and {model} has a table of {table:,} "
            f"positions, beyond which it reads nothing; {over:,} of {len(items):,} are longer. Take a model with more "
            f"positions, or {shorter} (at most {table:,} tokens)."
        )


def _refuse_prompts(s: Any, asked: Mapping[str, int], table: int) -> None:
    for where, tokens in asked.items():
        if tokens + s.evaluation.eval_max_new_tokens > table:
            raise SettingsError(
                f"eval_prompts {where}: has {tokens:,} tokens, and an answer of eval_max_new_tokens="
                f"{s.evaluation.eval_max_new_tokens:,} may follow; model_path {s.model.model_path} has a table of {table:,} "
                "positions, beyond which it reads nothing. Lower eval_max_new_tokens, or shorten the prompt."
            )
