"""Entry of LLaMA-Factory's `dataset_info.json` → its file or split, its rows.

The semantics are those of `llamafactory/data/parser.py` and `converter.py` (0.9.5): only the columns that an entry names are
read, roles have the names of its tags, and instruction and input are joined by a new line.
"""

import hashlib
import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import attrs

from forge_data._errors import DataError
from forge_data._values import describe, from_json, nearest, parsed_json
from forge_data.reading._record import CHUNK_BYTES, ChunkOfChunk, Reader, Record, Refused, WithoutNulls

FILE = "dataset_info.json"
_ENTRY = re.compile(rf"(?P<path>(?:.*?[/{re.escape(os.sep)}])?{re.escape(FILE)})(?::(?P<name>.*))?", re.DOTALL)
"""`PATH/dataset_info.json:NAME`; a name may hold colons, and a directory too."""
_HUB = "hf_hub_url"
_OTHER_HUBS = ("ms_hub_url", "om_hub_url")
_ELSEWHERE = ("script_url", "cloud_file_name")
_IGNORED = ("file_sha1", "split", "subset", "folder")
_ALPACA = {"prompt": "instruction", "query": "input", "response": "output"}
_SHAREGPT = {"messages": "conversations"}
_COLUMNS = (*_ALPACA, *_SHAREGPT, *"history system tools images videos audios chosen rejected kto_tag".split())
_TAGS = {
    "role_tag": "from",
    "content_tag": "value",
    "user_tag": "human",
    "assistant_tag": "gpt",
    "observation_tag": "observation",
    "function_tag": "function_call",
    "system_tag": "system",
}
"""Tag → its name where an entry gives none."""
_ROLES = {"user_tag": "user", "assistant_tag": "assistant", "observation_tag": "tool", "system_tag": "system"}
_OF_TURNS = ("from", "value", "role", "content")
"""Names of roles and texts in the formats that turns are handed to."""
_FORMATTINGS = ("alpaca", "sharegpt", "openai")


@attrs.frozen
class Description:
    """What an entry of `dataset_info.json` says of its rows. It pickles."""

    path: str
    """File or directory of the rows, or `org/name:split` of the Hub."""
    formatting: str
    ranking: bool
    columns: Mapping[str, str | None]
    """What the entry calls a column → its name in the rows; None where it is not read."""
    tags: Mapping[str, str | None]
    """Tag → its name in the turns; None of a role that no row has."""
    place: str
    """`PATH/dataset_info.json: NAME`, for messages."""
    name: str
    """`DIRECTORY/NAME`, which tells it from entries that read the same file otherwise."""
    asked: tuple[str, ...]
    """Columns that the entry itself names; without `columns` none."""
    directory: str = ""
    """Directory of `dataset_info.json`, where the paths of images begin."""
    num_samples: int | None = None
    """Rows that are read, chosen at random; None for all."""

    def digest(self) -> str:
        """Hash what decides how rows are read: SHA-256 in hex."""
        read = [self.formatting, self.ranking, dict(self.columns), dict(self.tags)]
        return hashlib.sha256(json.dumps(read, sort_keys=True).encode()).hexdigest()

    def described(self, fields: Mapping[str, Any]) -> WithoutNulls:
        """Return a row in the fields of `alpaca`, `sharegpt`, `messages`, `text` or a preference.

        What is not as the entry says stays as it is, for the format to refuse.
        """
        nulls = getattr(fields, "nulls", ())
        named = {ours: column for ours, column in self.columns.items() if column is not None}
        row = {ours: fields[column] for ours, column in named.items() if column in fields}
        absent = {ours for ours, column in named.items() if column in nulls}
        for side in () if self.ranking else ("chosen", "rejected"):
            row.pop(side, None)
            absent.discard(side)
        return self._alpaca(row, absent) if self.formatting == "alpaca" else self._conversation(row, absent)

    def _alpaca(self, row: dict[str, Any], absent: set[str]) -> WithoutNulls:
        asked = [row.pop(name) for name in ("prompt", "query") if name in row]
        wrong = [part for part in asked if not isinstance(part, str)]
        question = wrong[0] if wrong else "\n".join(part for part in asked if part)
        if self.columns.get("response") is None and not self.ranking:
            return WithoutNulls({"text": question} if asked else {}, {"text"} if "prompt" in absent else ())
        if asked:
            row["instruction"] = question
        answer = row.pop("response", None)
        if answer is not None and not self.ranking:
            row["output"] = answer
        return WithoutNulls(row, {_ALPACA.get(name, name) for name in absent - {"query"}} - row.keys())

    def _conversation(self, row: dict[str, Any], absent: set[str]) -> WithoutNulls:
        given, openai = from_json(row.pop("messages", None)), self.formatting == "openai"
        name = "messages" if openai else "conversations"
        for side in ("chosen", "rejected"):
            if isinstance(answer := from_json(row.get(side)), dict) and self.tags["role_tag"] in answer:
                row[side] = self._turn(answer)
        if not isinstance(given, list):
            return WithoutNulls(row | ({} if given is None else {name: given}), absent | ({name} if given is None else set()))
        turns = [self._turn(turn) if isinstance(turn, dict) else turn for turn in given]
        first = turns[0] if turns and isinstance(turns[0], dict) else {}
        if "system" in (first.get("role"), first.get("from")):
            row.pop("system", None)  # the turn wins
        elif openai and row.get("system"):
            turns.insert(0, {"role": "system", "content": row.pop("system")})
        return WithoutNulls({**row, name: turns}, absent)

    def _turn(self, turn: dict[str, Any]) -> dict[str, Any]:
        """Return a turn with the names of roles and fields that the format reads.

        What the turn itself has under these names is not what the tags say.
        """
        named = [str(self.tags[tag]) for tag in ("role_tag", "content_tag")]
        role, content = (turn.get(name) for name in named)
        rest = {name: value for name, value in turn.items() if name not in (*named, *_OF_TURNS)}
        known = {name: tag for tag, name in self.tags.items() if tag in (*_ROLES, "function_tag") and name is not None}
        tag = known.get(role) if isinstance(role, str) else None
        if self.formatting == "sharegpt":
            return {**rest, "from": _TAGS.get(tag or "", role), "value": content}
        if tag == "function_tag" and not rest.get("tool_calls"):
            calls = from_json(content)
            return {**rest, "role": "assistant", "content": None, "tool_calls": calls if isinstance(calls, list) else [calls]}
        return {**rest, "role": _ROLES.get(tag or "", role), "content": content}


def is_described(entry: str) -> bool:
    """Tell whether an entry names a data set of `dataset_info.json`, or the file alone."""
    found = _ENTRY.fullmatch(entry)
    return found is not None and "://" not in found["path"]


def description(entry: str) -> Description | None:
    """Read what `PATH/dataset_info.json:NAME` describes; None for any other entry.

    Raises:
        DataError: the file cannot be read, has no data set of this name, or says of it what is not known; or its rows are on
            another hub than Hugging Face's.
    """
    found = _ENTRY.fullmatch(entry)
    if found is None or not is_described(entry):
        return None
    path, name = found["path"], found["name"] or ""
    file = Path(path).expanduser().absolute()
    try:
        known = parsed_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        why = f"be read: {error.strerror}; check the path" if isinstance(error, OSError) else f"be read as JSON: {error}"
        raise DataError(f"{path} cannot {why}") from error
    if not isinstance(known, dict):
        raise DataError(f"{path} is {describe(known)}; it must be an object: names of data sets, and what each is")
    if name not in known:
        listed = ", ".join(map(repr, known)) or "none"
        which = f"has no data set {name!r}{nearest(name, known)}" if name else f"describes data sets; name one: {path}:NAME"
        raise DataError(f"{path} {which}; it has {listed}")
    return _read(f"{path}: {name}", name, known[name], file.parent)


def _read(place: str, name: str, entry: Any, directory: Path) -> Description:
    if not isinstance(entry, dict):
        raise DataError(f"{place} is {describe(entry)}; it must be an object with file_name")
    _check_names(
        place,
        entry,
        ("file_name", "formatting", "ranking", "columns", "tags", "num_samples", *_IGNORED, _HUB, *_OTHER_HUBS, *_ELSEWHERE),
    )
    path = _on_hub(place, entry) if entry.get(_HUB) else None
    for key in (*_OTHER_HUBS, *_ELSEWHERE) if path is None else ():
        if entry.get(key):
            _refuse_elsewhere(place, key, entry)
    number = entry.get("num_samples")
    if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
        raise DataError(f"{place}: num_samples is {describe(number)}; it must be a whole number of rows")
    path = _file(place, entry, directory) if path is None else path
    formatting, ranking = entry.get("formatting", "alpaca"), entry.get("ranking", False)
    if formatting not in _FORMATTINGS:
        raise DataError(
            f"{place}: formatting is {describe(formatting)}; allowed: {', '.join(_FORMATTINGS)}"
            f"{nearest(formatting, _FORMATTINGS)}"
        )
    if not isinstance(ranking, bool):
        raise DataError(f"{place}: ranking is {describe(ranking)}; it must be true or false")
    columns = _names(place, "columns", entry.get("columns"), _COLUMNS)
    # An entry with columns reads those alone; the others are not there.
    asked = () if columns is None else tuple(name for name in columns.values() if name is not None)
    columns = {**_ALPACA, **_SHAREGPT} if columns is None else columns
    if ranking and not (columns.get("chosen") and columns.get("rejected")):
        raise DataError(f"{place}: ranking is true, and its columns lack chosen or rejected; name both")
    wanted = "prompt" if formatting == "alpaca" else "messages"
    if not columns.get(wanted):
        raise DataError(f"{place}: its columns lack {wanted}, which {formatting} rows are read from; name it")
    tags = _names(place, "tags", entry.get("tags"), tuple(_TAGS))
    tags = {**_TAGS, **(tags or {})}
    if formatting != "alpaca":
        _check_tags(place, tags)
    return Description(path, formatting, ranking, columns, tags, place, f"{directory}/{name}", asked, str(directory), number)


def _on_hub(place: str, entry: Mapping[str, Any]) -> str:
    """Return the split of the Hub that an entry names, which it takes even beside a file."""
    if entry.get("folder"):
        raise DataError(
            f"{place}: folder is {describe(entry['folder'])}, a part of the data set on the Hub by its directory; give the "
            "files of it, or a data set that is this part"
        )
    named = [entry[_HUB], entry.get("subset"), entry.get("split") or "train"]
    if not all(part is None or isinstance(part, str) for part in named):
        raise DataError(f"{place}: {_HUB}, subset and split must be names, such as org/name, en and train")
    return ":".join(part for part in named if part)


def _file(place: str, entry: Mapping[str, Any], directory: Path) -> str:
    """Return the file that an entry names."""
    if entry.get("split", "train") != "train":
        raise DataError(f"{place}: split is {describe(entry['split'])}, and a file has none; give the rows that are meant")
    file = entry.get("file_name")
    if file is None:
        raise DataError(f"{place} has no file_name, beside which nothing says where its rows are; give one")
    if not isinstance(file, str) or not file.strip():
        raise DataError(
            f"{place}: file_name is {describe(file)}; it must be the name of a file or a directory of rows, as seen from "
            f"{directory}"
        )
    return str(directory / file)


def _check_tags(place: str, tags: Mapping[str, str | None]) -> None:
    """Refuse tags by which two fields of a turn, or two roles, are one.

    Raises:
        DataError: naming both, or the field that no turn is read without.
    """
    fields, roles = ("role_tag", "content_tag"), (*_ROLES, "function_tag")
    for tag in fields:
        if tags[tag] is None:
            raise DataError(
                f"{place}: tags: {tag} is null, and no turn is read without it; name the field, or leave the tag out"
            )
    for names, what, remedy in (
        (fields, "fields of a turn", "a name of its own"),
        (roles, "roles", "a name of its own, or null for a role that no row has"),
    ):
        for one, other in itertools.combinations([tag for tag in names if tags[tag] is not None], 2):
            if tags[one] == tags[other]:
                said = " and ".join(f"{tag}{' (its default)' if tags[tag] == _TAGS[tag] else ''}" for tag in (one, other))
                raise DataError(f"{place}: tags: {said} are both {tags[one]!r}, two {what} under one name; give each {remedy}")


def _names(place: str, field: str, given: Any, known: tuple[str, ...]) -> dict[str, Any] | None:
    """Check a mapping of names to names; None where there is none."""
    if given is None:
        return None
    if not isinstance(given, dict) or not all(name is None or isinstance(name, str) for name in given.values()):
        raise DataError(f"{place}: {field} is {describe(given)}; it must be an object with a name for each of its fields")
    _check_names(f"{place}: {field}", given, known)
    return given


def _check_names(place: str, given: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for name in given:
        if name not in known:
            raise DataError(f"{place} has {name!r}, which is not known{nearest(name, known)}; known: {', '.join(known)}")


def _refuse_elsewhere(place: str, key: str, entry: Mapping[str, Any]) -> NoReturn:
    """Say what to give instead of rows that are in no file beside the description."""
    url = entry[key]
    if key == "cloud_file_name":
        raise DataError(f"{place} is a file elsewhere; give its URL, {str(url)!r}, in the place of this")
    raise DataError(f"{place}: {key} is {describe(url)}, which is not read; write its rows to a file, and give file_name")


@attrs.frozen(eq=False)
class DescribedChunk(ChunkOfChunk):
    """Rows of a chunk in the fields that a description gives them."""

    description: Description

    def records(self, refused: Refused | None = None) -> Iterator[Record]:
        """Yield the rows; errors as of the chunk."""
        for record in self.chunk.records(refused):
            yield record._replace(fields=self.description.described(record.fields))


@attrs.frozen
class DescribedRows:
    """Reader of a file whose rows are in the fields that a description gives them."""

    reader: Reader
    description: Description

    @property
    def indexed(self) -> bool:
        """Whether rows are named `file[index]` and not `file:row`."""
        return self.reader.indexed

    def check_columns(self) -> None:
        """Refuse a column that the entry names and that no row has.

        Its text would be left out without a word. It reads one row, and more only where that one lacks a column.
        What cannot be read is left to `chunks`.

        Raises:
            DataError: naming the column of the rows that is spelled most like it.
        """
        missing, seen = set(self.description.asked), dict[str, None]()
        try:
            for chunk in self.reader.chunks(CHUNK_BYTES):
                for record in chunk.records(lambda *_: None):
                    seen |= dict.fromkeys([*record.fields, *getattr(record.fields, "nulls", ())])
                    if missing <= seen.keys():
                        return
        except DataError:
            return
        for ours, column in self.description.columns.items() if seen else ():
            if column in missing - seen.keys():
                near, has = nearest(column, seen), ", ".join(map(repr, seen))
                raise DataError(
                    f"{self.description.place}: columns says {ours!r} is {column!r}, which no row of {self.description.path} "
                    f"has{near}{' The' if near else '; the'} rows have {has}"
                )

    def chunks(self, size: int) -> Iterator[DescribedChunk]:
        """Yield the file in chunks of about `size` bytes."""
        for chunk in self.reader.chunks(size):
            yield DescribedChunk(chunk, self.description)

    def count(self) -> int | None:
        """Return the number of the last row, for progress; None if that needs a slow pass."""
        return self.reader.count()

    def digest(self) -> str | None:
        """Hash content and description: SHA-256 in hex; None where the content is read only once."""
        digest = self.reader.digest()
        return None if digest is None else hashlib.sha256(f"{digest} {self.description.digest()}".encode()).hexdigest()
