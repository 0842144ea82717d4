"""Table of row formats: name → where its `Format` is defined.

Reading the names imports no format.
"""

import json
import warnings
from functools import cache
from string import Formatter
from typing import TYPE_CHECKING, NamedTuple

from forge_data._values import nearest

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

AUTO = "auto"
"""The format is detected from the fields of the rows."""

GROUP = "forge.formats"
"""Entry-point group of formats from other packages: the name is what `format` calls it, the value a `forge_data.Format`."""


class BuiltIn(NamedTuple):
    """A format of this package."""

    where: str
    """`module:attribute` of its `Format`."""
    preferences: bool = False
    """Whether its rows are preferences."""


BUILT_IN = {
    "messages": BuiltIn("forge_data.formats._chat:MESSAGES"),
    "sharegpt": BuiltIn("forge_data.formats._sharegpt:SHAREGPT"),
    "alpaca": BuiltIn("forge_data.formats._alpaca:ALPACA"),
    "ms_swift": BuiltIn("forge_data.formats._ms_swift:MS_SWIFT"),
    "prompt_completion": BuiltIn("forge_data.formats._prompt_completion:PROMPT_COMPLETION"),
    "text": BuiltIn("forge_data.formats._documents:TEXT"),
    "preference": BuiltIn("forge_data.formats._preference:PREFERENCE", preferences=True),
    "unpaired_preference": BuiltIn("forge_data.formats._prompt_completion:UNPAIRED_PREFERENCE", preferences=True),
    "tokenised": BuiltIn("forge_data.formats._tokenised:TOKENISED"),
    "document": BuiltIn("forge_data.formats._documents:DOCUMENT"),
}
"""Every format of this package. A new one is a file in `formats/` and a row here."""


AXOLOTL = "axolotl:"
"""Begins the names of formats that are types of data sets in Axolotl, in whose own text they ask."""
_STYLES = ("", ":instruct", ":chat", ":chatml", ":phi")
AXOLOTL_TYPES = (
    *(name + style for name in ("alpaca", "gpteacher", "oasst", "jeopardy", "explainchoice") for style in _STYLES),
    *("alpaca_instruct", "alpaca_instruct.load_no_prompt", "alpaca_chat", "alpaca_chat.load_concise"),
    *("alpaca_chat.load_no_prompt", "alpaca_chat.load_qa", "alpaca_chat.load_camel_ai", "alpaca_w_system"),
    *("alpaca_w_system.load_chat", "alpaca_w_system.load_instruct", "alpaca_w_system.load_open_orca"),
    *("alpaca_w_system.load_open_orca_chatml", "orcamini", "concisechoice", "summarizetldr", "context_qa"),
    *("context_qa.load_404", "context_qa.load_v2", "input_output"),
)
"""Those types; `formats/_axolotl.py` has what each reads and writes."""


USER_DEFINED = {
    "system_prompt": "",
    "field_system": "system",
    "field_instruction": "instruction",
    "field_input": "input",
    "field_output": "output",
    "format": "{instruction} {input} ",
    "no_input_format": "{instruction} ",
    "system_format": "{system}",
}
"""Keys of a type that a file of Axolotl defines itself, and its defaults."""
_PLACES = {"format": ("instruction", "input"), "no_input_format": ("instruction",), "system_format": ("system",)}


def user_defined(name: object) -> dict[str, str] | None:
    """Read a format with fields and texts of its own, `axolotl:{...}`; None for any other name.

    >>> user_defined('axolotl:{"field_instruction": "q", "format": "{instruction}"}')["field_instruction"]
    'q'

    Raises:
        ValueError: it is no JSON, or holds what is not known.
    """
    if not isinstance(name, str) or not name.startswith(AXOLOTL + "{"):
        return None
    return dict(_defined(name))


@cache
def _defined(name: str) -> dict[str, str]:
    try:
        given = json.loads(name.removeprefix(AXOLOTL))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"what stands behind {AXOLOTL!r} is no JSON: {error}") from error
    for key, value in given.items():
        if key not in USER_DEFINED:
            raise ValueError(f"{key!r} is not known behind {AXOLOTL!r}; known: {', '.join(USER_DEFINED)}")
        if not isinstance(value, str) or (key.startswith("field_") and not value):
            raise ValueError(f"{key} behind {AXOLOTL!r} is {value!r}; it must be a text")
        try:
            parts = list(Formatter().parse(value)) if key in _PLACES else []
        except ValueError as error:
            raise ValueError(f"{key} behind {AXOLOTL!r} is {value!r}, in which a brace stands alone: {error}") from error
        if any(part is not None and (part not in _PLACES[key] or form or spec) for _, part, spec, form in parts):
            places = " and ".join(f"{{{place}}}" for place in _PLACES[key])
            raise ValueError(f"{key} behind {AXOLOTL!r} is {value!r}; it may have {places}, and {{{{ for a brace")
    return USER_DEFINED | given


def is_axolotl(name: object) -> bool:
    """Tell whether a format is a type of Axolotl's, by its name or as one that is defined."""
    try:
        known = isinstance(name, str) and name.startswith(AXOLOTL) and name.removeprefix(AXOLOTL) in AXOLOTL_TYPES
        return known or user_defined(name) is not None
    except ValueError:
        return False


def plug_ins() -> "dict[str, EntryPoint]":
    """Find the formats that installed packages add; warn of a name that is taken, and ignore it."""
    from importlib.metadata import entry_points

    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=GROUP):
        if entry.name == AUTO or entry.name in BUILT_IN or is_axolotl(entry.name) or entry.name in found:
            # A package that is merely installed must not change what rows are read as.
            warnings.warn(
                f"{GROUP}: the entry point {entry.name} = {entry.value} is ignored: that name is taken",
                RuntimeWarning,
                stacklevel=2,
            )
        else:
            found[entry.name] = entry
    return found


def names() -> tuple[str, ...]:
    """List what `format` may be: `auto`, built-in, of Axolotl, and of installed packages."""
    return (AUTO, *BUILT_IN, *(AXOLOTL + kind for kind in AXOLOTL_TYPES), *plug_ins())


def listed() -> str:
    """Write what `format` may be for a message, Axolotl's types in short."""
    return ", ".join((AUTO, *BUILT_IN, f"{AXOLOTL}TYPE (such as {AXOLOTL}alpaca)", *plug_ins()))


def fault_of(name: object) -> str:
    """Say why a format is not known, or what there is; to end a message with."""
    try:
        user_defined(name)
    except ValueError as error:
        return str(error)
    return f"allowed: {listed()}{nearest(name, names())}"


def is_known(name: object) -> bool:
    """Tell whether a format is called `name`.

    Entry points are read only for a name that is not built in.
    """
    return name == AUTO or name in BUILT_IN or is_axolotl(name) or name in plug_ins()
