"""Table of row formats: name → where its `Format` is defined.

Reading the names imports no format.
"""

import warnings
from typing import TYPE_CHECKING, NamedTuple

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


def is_axolotl(name: object) -> bool:
    """Tell whether a format is one of Axolotl's types, such as `axolotl:alpaca`."""
    return isinstance(name, str) and name.startswith(AXOLOTL) and name.removeprefix(AXOLOTL) in AXOLOTL_TYPES


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


def is_known(name: object) -> bool:
    """Tell whether a format is called `name`.

    Entry points are read only for a name that is not built in.
    """
    return name == AUTO or name in BUILT_IN or is_axolotl(name) or name in plug_ins()
