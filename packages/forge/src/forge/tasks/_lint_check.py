"""Findings of the data's lint → lines of the run's log, or a refusal before training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

import forge_data
from forge._counted import counted
from forge._errors import DataLintError, SettingsError
from forge.settings._data_sets import own_of
from forge.tasks._system_message import shared_beginning

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forge._progress import Reporter
    from forge.tasks._answers import Asked

_LISTED = 3
_LOOKED_AT = 100
_SKIPPED = "empty_turn"
"""Rule of the lint whose rows on_bad_row=skip leaves out; what else that leaves out is refused before there is a lint."""
_PLAIN_TEXT = {"prompt", "completion"}
"""Roles of the segments of a row whose prompt and answer are text."""


VERB_OF_KIND = {"supervised": "sft", "preference": "dpo", "unpaired_preference": "kto", "prompts": "grpo"}
"""Kind of a store's rows → the verb that is named to someone who has such rows."""


def check_kind(verb: str, store: forge_data.TokenStore, kind: str, wanted: str) -> None:
    """Raise SettingsError unless the rows of a store are of a kind."""
    if store.kind != kind:
        which = "eval_data_path" if store.path.name == "eval" else "data_path"
        raise SettingsError(
            f"{which} holds {store.kind.replace('_', ' ')} rows ({store.source(0)}), and forge {verb} takes {wanted}. For rows "
            f"of this kind there is `forge {VERB_OF_KIND[store.kind]}`."
        )


def warn_of_plain_text(tokenizer: Any, data: Any, store: Any, report: Reporter) -> None:
    """Warn of rows that are learned without the chat template that the model is asked with.

    Args:
        tokenizer: of the model; what its `chat_template` holds is what chats and servers ask with.
        data: settings of the rows; their `chat_template`, if any, wins over the tokenizer's own.
        store: token store of the rows; of other stores nothing is said. Of each entry of data_path the first samples are read.
        report: gets the warning.

    """
    if not (getattr(data, "chat_template", None) or tokenizer.chat_template) or not isinstance(store, forge_data.TokenStore):
        return
    plain = next((first[0] for first in _first_samples(store) if all(_is_plain(store[at]) for at in first)), None)
    if plain is None:
        return
    remedy = "give prompt and answers as lists of messages"
    if store.kind == "supervised":
        remedy = "rows of messages, or columns instruction and output (rename_columns: prompt=instruction completion=output)"
    if (named := _format_of(data, int(store.sources[plain]))).startswith("axolotl:"):  # it writes the text itself
        kind = named.removeprefix("axolotl:")
        remedy = f"leave out data_format {'axolotl:{...}' if kind.startswith('{') else named}, which asks in Axolotl's text"
        remedy += ", or give alpaca" if kind.startswith("alpaca") else "; rows need messages then, or instruction and output"
    report.note(
        f"WARNING: prompt and answer of {store.source(plain)} and others are text, and are learned without the chat template "
        f"with which `forge chat`, `forge generate` and servers ask. To learn them as they will be asked: {remedy}"
    )


def _format_of(data: Any, entry: int) -> str:
    """Return the `data_format` that an entry of data_path is read in."""
    return str(own_of(data.data_path, entry).get("data_format") or getattr(data, "data_format", "auto"))


def _first_samples(store: forge_data.TokenStore) -> list[list[int]]:
    """Return the first samples of each entry of data_path, a hundred of all or one of each."""
    sources = np.asarray(store.sources)
    entries = np.bincount(sources).nonzero()[0][:_LOOKED_AT]  # not np.unique, which sorts all
    starts = [int((sources == entry).argmax()) for entry in entries]
    each = _LOOKED_AT // max(1, len(starts))
    return [[at for at in range(start, min(start + each, len(store))) if sources[at] == sources[start]] for start in starts]


def _is_plain(sample: forge_data.TokenizedExample) -> bool:
    """Return whether prompt and answer of a sample are text."""
    return set(sample.roles) <= _PLAIN_TEXT and "prompt" in sample.roles


def check_system_prompt(s: Any, account: forge_data.Accounting) -> None:
    """Refuse a system_prompt that no training row is given.

    Raises:
        SettingsError: every row has a system message of its own.

    """
    given = getattr(s.data, "system_prompt", None)
    if given is not None and account.forms and not account.forms.get("with_system_prompt"):
        raise SettingsError(
            "system_prompt has no effect: every row has a system message of its own, which it keeps, and the model would be "
            "asked with one that it was not trained with. Leave it out, or take the rows' own out with preprocess."
        )


def warn_of_system_message(prompts: Sequence[Asked], store: Any, report: Reporter) -> None:
    """Say that prompts of `eval_prompts` lack the system message that all rows have."""
    bare = [each for each in prompts if isinstance(each.prompt, str) or each.prompt[0]["role"] != "system"]
    if bare and isinstance(store, forge_data.TokenStore) and shared_beginning(store) is not None:
        report.note(
            f"WARNING: {counted(len(bare), 'prompts')} of eval_prompts will be asked without the system message of the "
            "training rows. To ask with it, give a .jsonl file whose rows have `messages`, the system message first."
        )


def check_lint(s: Any, report: Reporter, train: forge_data.TokenStore, held_out: forge_data.TokenStore | None) -> None:
    """Log what the lint found, and refuse rows that would teach something wrong.

    Raises:
        DataLintError: a finding stops the run, and `lint` is not off.

    """
    reports = [forge_data.lint(train, eval_data=held_out)]
    if held_out is not None and held_out.path != train.path:
        reports.append(held_out.lint)
    stops = sum(found.stops for found in reports)
    refused = stops > 0 and s.data.lint != "off"
    for found in reports:
        if found.counts:  # the error says what stops
            report.note(f"lint: {found.summary() if refused else found}", short=f"lint: {found.summary()}")
    if not stops:
        return
    if not refused:
        report.note(f"WARNING: lint=off: training goes on in spite of {counted(stops, 'findings')} that would stop it.")
        return
    listed = [str(finding) for found in reports for finding in found.findings if finding.severity == "stop"]
    more = f"\n  ... and {stops - _LISTED:,} more" if stops > _LISTED else ""
    skipped = sum(found.stop_counts.get(_SKIPPED, 0) for found in reports)
    remedy = ""
    if skipped == stops and s.data.on_bad_row != "skip":
        share = "`max_bad_rows` is the share of all rows that they may be, 0.01 if not set"
        remedy = f"on_bad_row=skip leaves such rows out; {share}; "
    raise DataLintError(
        f"the lint of the data found {counted(stops, 'reasons')} not to train on it ({remedy}lint=off overrules it; `forge "
        "data lint` lists all):\n  " + "\n  ".join(listed[:_LISTED]) + more
    )
