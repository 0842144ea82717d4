"""Table of training_hub's parameters → the tables of docs/migrating/training-hub.md.

`python -m forge.hub._page docs/migrating/training-hub.md` writes them anew.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from forge.hub._parameter import REQUIRED, Parameter
from forge.hub._table import FUNCTIONS

_ABOUT = {
    "sft": "`forge.sft`; with `is_pretraining` `forge.pretrain`.",
    "osft": "`forge.osft`; with `is_pretraining` `forge.pretrain` with `adapter=osft`.",
    "lora_sft": "`forge.sft` with `adapter=lora`. It learns the assistant's turns, as `sft` does; training_hub's learns every "
    "token, which is `train_on=all` here.",
    "lora_grpo": "`forge.grpo` with `adapter=lora`.",
    "grpo": "`forge.grpo`.",
    "embedding_sft": "`forge.embed`; with `loss_type=mnrl` rows are pairs, which training_hub makes of every two texts of a "
    "label.",
}

_FIRST, _LAST = "what differs.\n\n", "## Names\n"


def tables() -> str:
    """Return a heading and a table for each function."""
    return "".join(f"### `{name}`\n\n{_ABOUT[name]}\n\n{_table(each)}\n" for name, each in FUNCTIONS.items())


def renewed(page: str) -> str:
    """Return the page with its tables as they are now."""
    before, _, rest = page.partition(_FIRST)
    return f"{before}{_FIRST}{tables()}{_LAST}{rest.partition(_LAST)[2]}"


def _table(parameters: Iterable[Parameter]) -> str:
    """Return the rows of a function; those of the same kind are one row."""
    rows: list[tuple[list[str], str, str]] = []
    for each in parameters:
        default = "" if each.default in (None, REQUIRED) or each.refused else f"{each.default} where it is left out"
        note = "; ".join(filter(None, (each.note or _refusal(each), default)))
        settings = _settings(each)
        same = not note and each.ours == each.name
        if rows and not note and rows[-1][1:] == (_SAME if same else settings, note):
            rows[-1][0].append(each.name)
        else:
            rows.append(([each.name], _SAME if same else settings, note))
    lines = [f"| {_quoted(names)} | {_quoted(names) if ours == _SAME else ours} | {note} |" for names, ours, note in rows]
    return "\n".join(["| training_hub | forge | difference |", "|---|---|---|", *lines, ""])


_SAME = "the same"


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _settings(parameter: Parameter) -> str:
    if parameter.ours:
        return _quoted(parameter.ours.split(", "))
    if parameter.name == "is_pretraining":
        return "`forge pretrain`"
    return "refused" if parameter.refused and True not in parameter.neutral else "not needed"


def _refusal(parameter: Parameter) -> str:
    return parameter.refused if parameter.refused and not parameter.note else ""


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(renewed(file.read_text(encoding="utf-8")), encoding="utf-8")
