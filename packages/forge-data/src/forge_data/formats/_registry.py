"""Row → its format, detected or chosen by name → `Sample`.

The table of names is `forge_data._formats`.
"""

import difflib
import hashlib
import re
import warnings
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from forge_data._errors import DataError, ForgeDataError
from forge_data._formats import AUTO, BUILT_IN, GROUP, fault_of, is_axolotl, is_known, plug_ins
from forge_data._media import ONE
from forge_data._media_values import placed
from forge_data._own_reading import misspelt_in
from forge_data._values import describe
from forge_data.formats._axolotl import named as axolotl_type
from forge_data.formats._chat import MEDIA_FIELDS
from forge_data.formats._format import Fields, Format
from forge_data.formats._messages import LIKENESS, MEDIA_ELSEWHERE
from forge_data.formats._rated import rated
from forge_data.formats._samples import Chat, Preference, Sample, Text, Tokens, Unpaired
from forge_data.formats._system_prompt import sample_with_system_prompt
from forge_data.formats._tokenised import check_vocabulary
from forge_data.formats._unread import is_empty, leaves_out_system
from forge_data.formats._weights import weighted

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

_MASKS = "masks are not read: give input_ids and labels, and write the mask into labels as -100"
_FOR_TEMPLATES = "for chat templates, which this format does not use"
# Fields that change what a row means: to ignore one would train something else than the row says.
_CHANGES_MEANING = {
    "tools": f"tool definitions are {_FOR_TEMPLATES}",
    "documents": f"documents are {_FOR_TEMPLATES}",
    "chat_template_kwargs": f"they are {_FOR_TEMPLATES}",
    "unmask": f"it is {_FOR_TEMPLATES}",
    "functions": "function definitions are read from tools, as OpenAI's newer format has them",
    **dict.fromkeys(MEDIA_FIELDS, MEDIA_ELSEWHERE),
    "margin": "margins are read of rows with chosen and rejected",
    "loss_mask": _MASKS,
    "completion_mask": _MASKS,
    "assistant_masks": _MASKS,
    "position_ids": "positions are counted from 0 in every row: one row, one sample",
    "token_type_ids": "token types are not passed to the model",
    "seq_lengths": "packing is done while training: one row, one sample",
}

_NO_SYSTEM = ("messages", "prompt_completion", "unpaired_preference", "preference")
"""Formats that have their system prompt among the messages or in the text; ShareGPT and Alpaca rows have a field for it."""

# What rows of other data sets call the fields of a prompt, of its answer, and of a conversation.
_OTHER_NAMES = {
    **dict.fromkeys(("question", "query", "problem", "input", "instruction"), "prompt"),
    **dict.fromkeys(("answer", "response", "solution", "output", "target"), "completion"),
    **dict.fromkeys(("conversation", "dialogue", "dialog", "turns", "chat"), "messages"),
}
_TURNS = ({"role", "content"}, {"from", "value"})
"""Fields of a conversation's turns, by which a list of them is told from a list of rows."""
_SWIFT = ("query", "response")
_WORD = re.compile(r"\w+")


@cache
def formats() -> dict[str, Format]:
    """Load every format, built in or from another package; warn of one that cannot be loaded."""
    found = {name: built_in(name) for name in BUILT_IN}
    for name, entry in plug_ins().items():
        try:
            found[name] = _loaded(entry)
        except DataError as error:
            warnings.warn(f"{GROUP}: {error}. Going on without it.", RuntimeWarning, stacklevel=2)
    return found


@cache
def built_in(name: str) -> Format:
    """Load a format of this package."""
    module, _, attribute = BUILT_IN[name].where.partition(":")
    return getattr(import_module(module), attribute)


@cache
def format_named(name: str) -> Format:
    """Load one format.

    Raises:
        DataError: a package adds it and it cannot be loaded.
    """
    if is_axolotl(name):
        return axolotl_type(name)
    return built_in(name) if name in BUILT_IN else _loaded(plug_ins()[name])


def check_name(format: str) -> None:  # noqa: A002 - what it is called everywhere else
    """Refuse a name that is no format's.

    Raises:
        DataError: naming the nearest, or why a format of another package cannot be loaded.
    """
    if not is_known(format):
        raise DataError(f"`format` is {format!r}; {fault_of(format)}")
    if format != AUTO:
        format_named(format)


def detect(place: str, fields: Fields) -> str:
    """Name the one format that matches a row.

    Raises:
        DataError: no format matches, or several do.
    """
    return _detected(place, fields, formats())


def convert(
    format: str,  # noqa: A002 - what it is called everywhere else
    place: str,
    fields: Fields,
    vocabulary: int | None,
    *,
    media: bool = False,
    directory: str | None = None,
    system_prompt: str | None = None,
) -> Sample:
    """Read a row of a known format.

    Args:
        format: name of the format.
        place: place of the row.
        fields: its fields.
        vocabulary: number of token ids; None if not known.
        media: whether media are trained; otherwise a row that has one is refused.
        directory: where relative paths of media begin; None where the rows lie in no directory of this machine.
        system_prompt: first message of a conversation that has no system message.

    Raises:
        DataError: the row lacks what the format needs, or has a field that is not what it should be, or one that would be
            ignored although it changes what is learned.
    """
    row = format_named(format)
    if not any(fits is not None and fits(fields) for fits in (row.matches, row.accepts, row.chosen)):
        _check_nulls(place, fields, [row])
        has = f"{place} has the fields {_named(fields)}, but the format {format} needs {row.needs}"
        wanted = _wanted(fields, [row])
        raise DataError(f"{has}{_renaming(fields, wanted, _misspelt(fields, wanted))}")
    for field, why in _refused(format, media).items():
        if field in fields and _is_set(fields[field]):
            raise DataError(f"{place}: field {field} is {describe(fields[field])}, and {why}; take it out of the rows")
    reads_system = format not in _NO_SYSTEM or (format != "messages" and rated(fields) is not None)
    if is_axolotl(format):
        reads_system = "system" in row.reads
    if not reads_system and leaves_out_system(fields):
        raise DataError(
            f"{place}: field system is {describe(fields['system'])}, which would be passed over; make it the first message (in "
            "text, the beginning of the prompt) with `preprocess`, or take it out of the rows"
        )
    made = (
        row.convert(place, fields) if format in BUILT_IN or is_axolotl(format) else _made_by_plug_in(format, row, place, fields)
    )
    if not isinstance(made, Sample):
        known = {name: built_in(name) for name in BUILT_IN}
        made = {"weight": fields["weight"], **made} if "weight" in fields else made
        name = _detected(f"{place}, rewritten by the format {format},", made, known)
        return convert(name, place, made, vocabulary, media=media, directory=directory, system_prompt=system_prompt)
    if isinstance(made, Chat | Text):
        made = _with_paths(place, made, media, directory)
    elif isinstance(made, Preference):
        chosen, rejected = (_with_paths(place, side, media, directory) for side in (made.chosen, made.rejected))
        made = attrs.evolve(made, chosen=chosen, rejected=rejected)
    elif isinstance(made, Unpaired):
        made = attrs.evolve(made, answer=_with_paths(place, made.answer, media, directory))
    if isinstance(made, Tokens):
        check_vocabulary(made, vocabulary)
    made = sample_with_system_prompt(made, system_prompt)
    return weighted(place, made, fields["weight"]) if fields.get("weight") is not None else made


def plug_in_identity(format: str) -> dict[str, list[str | None]]:  # noqa: A002
    """Describe the plug-in formats that may read rows, for the fingerprint of a store.

    Each is described by its entry point, its package's version and the SHA-256 of its file.
    """
    entries = plug_ins()
    chosen = entries if format == AUTO else {format} & entries.keys()
    return {name: _identity(entries[name]) for name in sorted(chosen)}


def _identity(entry: "EntryPoint") -> list[str | None]:
    spec = find_spec(entry.module)
    file = Path(spec.origin) if spec is not None and spec.origin is not None else None
    digest = hashlib.sha256(file.read_bytes()).hexdigest() if file is not None and file.is_file() else None
    return [entry.value, entry.dist.version if entry.dist is not None else None, digest]


@cache
def _refused(format: str, media: bool) -> dict[str, str]:  # noqa: A002
    """Fields that change what is learned and that are not read, each with the reason."""
    read = {name for name in format_named(format).reads if media or name not in MEDIA_FIELDS}
    refused = {field: why for field, why in _CHANGES_MEANING.items() if field not in read}
    if media:
        # Who trains media is not to be told of who does.
        refused |= {name: f"rows of {format} are trained on text alone" for name in MEDIA_FIELDS if name in refused}
    return refused


def _with_paths(place: str, part: Chat | Text, media: bool, directory: str | None) -> Any:
    """Make the paths of media absolute; refuse media where they are not trained."""
    if not part.media:
        return part
    if not media:
        raise DataError(
            f"{place}: field {part.media[0].field} is {ONE[part.media[0].kind]}, and {MEDIA_ELSEWHERE}; take the row out"
        )
    return attrs.evolve(part, media=tuple(placed(place, medium, directory) for medium in part.media))


def _loaded(entry: "EntryPoint") -> Format:
    try:
        found = entry.load()
    except Exception as error:
        raise DataError(f"`format` {entry.name!r}: {entry.value} could not be loaded: {error}") from error
    if not isinstance(found, Format):
        raise DataError(f"`format` {entry.name!r}: {entry.value} is {describe(found)} and no forge_data.Format")
    return found


def _made_by_plug_in(name: str, row: Format, place: str, fields: Fields) -> Sample | Fields:
    """Call another package's `convert`; whatever it raises names the row and the format."""
    try:
        made = row.convert(place, fields)
    except ForgeDataError:
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise DataError(
            f"{place}: the format {name} raised {what}; correct the row, or the package that adds the format"
        ) from error
    if not isinstance(made, (Sample, Mapping)):
        raise DataError(f"{place}: the format {name} returned {describe(made)}; it must return the fields of a built-in format")
    return made


def _detected(place: str, fields: Fields, known: dict[str, Format]) -> str:
    candidates = {name: row for name, row in known.items() if row.detected}
    matching = [name for name, row in candidates.items() if row.matches(fields)]
    # One side of a preference may be null, which is a fault of the row and not of its format.
    matching = matching or [name for name, row in candidates.items() if row.accepts is not None and row.accepts(fields)]
    if len(matching) == 1:
        return matching[0]
    has = f"{place} has the fields {_named(fields)}"
    if matching:
        raise DataError(
            f"{has}, which fit more than one format: {' and '.join(matching)}; say which is meant with `format`, such as "
            f"{matching[0]}, or keep the fields of one"
        )
    _check_nulls(place, fields, candidates.values())
    listed = "; ".join(f"{name} ({row.needs})" for name, row in candidates.items())
    if (wrong := misspelt_in(fields)) is not None:
        raise DataError(f"{has}, which are no known format; as an entry of `data_path` it has {wrong} Formats: {listed}")
    wanted = _wanted(fields, candidates.values())
    misspelt = _misspelt(fields, wanted)
    begun = f"did you mean {' and '.join(map(repr, misspelt.values()))}? Known" if misspelt else "known"
    remedy = _hint(fields, misspelt) or _renaming(fields, wanted, misspelt)
    raise DataError(f"{has}, which are no known format; {begun}: {listed}{remedy}")


def _check_nulls(place: str, fields: Fields, candidates: Iterable[Format]) -> None:
    """Refuse a row that would be of a format if fields that it has were not null.

    Raises:
        DataError: naming them.
    """
    nulls = getattr(fields, "nulls", frozenset())
    for row in candidates if nulls else ():
        null = [name for name in _WORD.findall(row.needs) if name in nulls]
        if null and row.matches({**fields, **dict.fromkeys(null, "")}):
            which = f"field {null[0]} is" if len(null) == 1 else f"fields {' and '.join(null)} are"
            raise DataError(f"{place}: {which} null; give a value, or take the row out")


def _named(fields: Iterable[str]) -> str:
    return ", ".join(map(repr, fields)) or "(none)"


def _wanted(fields: Fields, candidates: Iterable[Format]) -> set[str]:
    """Return the fields that formats need and a row lacks."""
    wanted = {name for row in candidates for name in _WORD.findall(row.needs)} - {"or", *fields}
    # Who has neither field of ms-swift's is not to be told to name another field so.
    return wanted if fields.keys() & set(_SWIFT) else wanted - set(_SWIFT)


def _misspelt(fields: Fields, wanted: set[str]) -> dict[str, str]:
    """Return the fields that look misspelt, each with the wanted one that it resembles."""
    meant: dict[str, str] = {}
    for name in fields:
        if near := difflib.get_close_matches(name.lower(), sorted(wanted - set(meant.values())), 1, LIKENESS):
            meant[name] = near[0]
    return meant


def _renaming(fields: Fields, wanted: set[str], misspelt: dict[str, str]) -> str:
    """Say that fields may be renamed, with those that look misspelt or have other names."""
    meant = dict(misspelt)
    for name in fields:
        other = _other_name(name)
        if other is not None and name not in meant and other in wanted - set(meant.values()):
            meant[name] = other
    pairs = _pairs(meant) or "question=instruction answer=output"
    turns = {"prompt": "instruction", "completion": "output"}
    both = {name: meant.get(name, name) for name in fields if name in meant or name in turns}
    if meant and set(both.values()) == set(turns) and all(isinstance(fields[name], str) for name in both):
        # Who has questions and answers means to ask: as prompt and completion they would be learned without the chat template.
        asked = _pairs({name: turns[each] for name, each in both.items()})
        pairs = f"{asked} (asked and answered in the chat template) or {pairs} (text as it stands)"
    return f"; where fields only have other names, give them with `rename_columns`, such as {pairs}"


def _other_name(name: str) -> str | None:
    """Return the field of a format that a field of another name most likely is."""
    near = difflib.get_close_matches(name.strip().lower(), _OTHER_NAMES, 1, LIKENESS)
    return _OTHER_NAMES[near[0]] if near else None


def _pairs(meant: Mapping[str, str]) -> str:
    return " ".join(f"{name}={each}" for name, each in meant.items() if name != each)


def _is_set(value: object) -> bool:
    return not is_empty(value) and (isinstance(value, np.ndarray) or bool(value))


def _hint(fields: Fields, misspelt: Collection[str] = ()) -> str:
    if "input_ids" in fields:
        return "; give labels beside input_ids: the id where a token is learned, -100 elsewhere"
    if "prompt" in fields and not misspelt and not any(_other_name(name) == "completion" for name in fields):
        return "; a prompt without an answer is for `forge data show --prompts` and for verbs that sample answers, such as grpo"
    inside = [name for name, value in fields.items() if isinstance(value, list) and value and isinstance(value[0], dict)]
    inside = [name for name in inside if name not in misspelt and not any(turn <= fields[name][0].keys() for turn in _TURNS)]
    if len(fields) <= 3 and inside:
        return f"; if the rows stand inside {inside[0]}, write one of them a line (`jq -c '.{inside[0]}[]'` does)"
    return ""
