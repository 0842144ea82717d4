"""Settings by name → the words of a command line that sets them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress

from forge._errors import SettingsError
from forge.settings._settings import dashed


def as_words(values: Mapping[str, object]) -> list[str]:
    """Write settings as flags; one without a value (None) is left out.

    >>> as_words({"max_seq_len": 40, "keep_best": True, "async_save": False, "target_modules": ["q_proj", "v_proj"]})
    ['--max-seq-len=40', '--keep-best', '--no-async-save', '--target-modules', 'q_proj', 'v_proj']
    >>> as_words({"data_path": {"a.jsonl": 0.7, "b.jsonl": 0.3}})
    ['--data-path', 'a.jsonl=0.7', 'b.jsonl=0.3']
    >>> as_words({"data_path": [{"path": "a.jsonl", "weight": 2}, {"path": "a.jsonl", "weight": 1, "train_on": "all"}]})
    ['--data-path', 'a.jsonl={"weight": 2}', 'a.jsonl={"weight": 1, "train_on": "all"}']

    Raises:
        SettingsError: a value that no flag can carry.

    """
    words: list[str] = []
    for name, value in values.items():
        flag = f"--{dashed(name)}"
        if value is None:
            continue
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{dashed(name)}")
        elif isinstance(value, Mapping):
            words += _listed(flag, name, [f"{key}={_argument(name, each)}" for key, each in value.items()])
        elif isinstance(value, Sequence) and not isinstance(value, str):
            words += _listed(flag, name, [_entry(each) for each in value])
        else:
            # One word, so that a value may begin with a dash.
            words.append(f"{flag}={_text(value)}")
    return words


def literal(text: str) -> str:
    """Escape what Kubernetes would expand in arguments and variables, `$(NAME)`."""
    return text.replace("$", "$$")


def _listed(flag: str, name: str, found: list[str]) -> list[str]:
    """Return the words of a flag that takes several."""
    wrong = next((word for word in found if word.startswith("-")), None)
    if not found or wrong is not None:
        what = "is empty" if wrong is None else f"holds {wrong!r}, which begins with a dash"
        raise SettingsError(f"{name} {what}: a command line cannot say that. Leave it out, or write it otherwise.")
    return [flag, *found]


def _entry(value: object) -> str:
    """Write one value of a list; a data set as its path, and what it has of its own in JSON."""
    if not isinstance(value, Mapping) or "path" not in value:
        return _text(value)
    own = {name: each for name, each in value.items() if name != "path"}
    return f"{value['path']}={json.dumps(own)}" if own else _text(value["path"])


def _argument(name: str, value: object) -> str:
    """Write one value of a mapping; a template's argument that JSON would read is quoted."""
    if name == "chat_template_kwargs" and isinstance(value, str):
        with suppress(ValueError):
            json.loads(value)
            return json.dumps(value)
    return _text(value)


def _text(value: object) -> str:
    """Write one value as the command line reads it."""
    if isinstance(value, float) and math.isinf(value):
        return str(value)  # JSON has no number without end
    return value if isinstance(value, str) else json.dumps(value)
