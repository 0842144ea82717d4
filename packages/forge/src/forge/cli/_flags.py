"""Error message about settings → the same message about flags.

Messages spell a setting as Python and recipes do, `max_seq_len=40`. On the command line they name the flag: `--max-seq-len 40`.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Mapping

_VALUE = r"""'[^']*'|"[^"]*"|\[[^]]*]|\([^()]*\)|[^\s,;:()\]]*[^\s,;:()\].]"""
# Not part of a path, of a dotted name, of a mapping or of a quotation.
_BEFORE, _AFTER = r"""(?<![\w./\\='"{-])""", r"""(?![\w/\\='"(]|\.\w)"""

_ENTRY = re.compile(r"\bthe entry (?!point)")
OF_AN_ENTRY = frozenset({
    "data_format", "rename_columns", "preprocess", "train_on", "train_on_turn_end", "turns", "system_prompt",
    "chat_template_kwargs", "on_overflow", "max_samples", "random_rows", "random_seed",
})  # fmt: skip
"""Settings that an entry of `data_path` may have of its own: forge_data's, which is not loaded for a message."""


def as_flags(message: str, flags: Mapping[str, str]) -> str:
    """Spell the settings in a message as flags.

    A message about a recipe is left as it is, for there the settings have their own names. So have those of an entry of
    `--data-path`, which a shell gives as JSON.

    Args:
        message: of an error.
        flags: setting → flag, or whatever names it on this command line.

    >>> as_flags("max_seq_len=40 drops every row: raise max_seq_len", {"max_seq_len": "--max-seq-len"})
    '--max-seq-len 40 drops every row: raise --max-seq-len'
    >>> as_flags("90 tokens, and `max_seq_len` is 40", {"max_seq_len": "--max-seq-len"})
    '90 tokens, and --max-seq-len is 40'
    >>> as_flags("give add_special_tokens=['<|im_end|>']", {"add_special_tokens": "--add-special-tokens"})
    "give --add-special-tokens '<|im_end|>'"
    >>> as_flags("data_path: of the entry a turns=x", {"data_path": "--data-path", "turns": "--turns"})
    '--data-path: of the entry a turns=x'

    """
    if _ENTRY.search(message):
        flags = {name: flag for name, flag in flags.items() if name not in OF_AN_ENTRY}
    if not flags or "(recipe " in message:
        return message
    by_length = sorted(flags, key=len, reverse=True)
    names = "|".join(map(re.escape, by_length))
    # A single word, such as `seed`, may be meant as a word: it names a setting before its value, or at the beginning of a line.
    compound = "|".join(re.escape(name) for name in by_length if "_" in name) or r"(?!)"
    pattern = (
        rf"`(?P<marked>{names})`|{_BEFORE}(?P<assigned>{names})=(?P<value>{_VALUE})"
        rf"|{_BEFORE}(?P<bare>{compound}){_AFTER}"
        rf"|^(?P<quote>'?)(?P<first>{names})(?P=quote)(?= must | has no effect|: | is required| is empty)"
    )

    def spelled(found: re.Match[str]) -> str:
        if found["assigned"]:
            return _with_value(flags[found["assigned"]], found["value"])
        return flags[found["marked"] or found["bare"] or found["first"]]

    return re.sub(pattern, spelled, message, flags=re.MULTILINE)


def _with_value(flag: str, value: str) -> str:
    """Write a flag with its value: `--keep-best`, `--lr 1`, `--target-modules q_proj v_proj`."""
    if value in ("True", "true"):
        return flag
    if value in ("False", "false"):
        return f"--no-{flag.removeprefix('--')}"
    if value[0] in "[(":
        try:
            parts = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            return f"{flag} {value}"
        return " ".join([flag, *(_word(str(part)) for part in (parts if isinstance(parts, (list, tuple)) else [parts]))])
    return f"{flag} {_word(value.strip(chr(39) + chr(34)))}"


def _word(text: str) -> str:
    """Quote what a shell would take for more than one word, or for its own: `<|im_end|>`."""
    return shlex.quote(text) if re.search(r"[<>|&;$\s]", text) else text
