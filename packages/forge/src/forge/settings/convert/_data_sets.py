"""Entries of `datasets:` in Axolotl and TRL → paths, and the format and columns of each."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from forge.settings._elsewhere import hint
from forge.settings.convert._draft import Draft

FORMATS = {
    "chat_template": "messages",
    "sharegpt": "sharegpt",
    "completion": "text",
    "chat_template.default": "auto",
    "axolotl.integrations.kd.chat_template": "messages",
}
"""Type of a data set in Axolotl → data_format."""
PROMPTED = ("sft", "osft", "distill")
"""Verbs that learn rows of Axolotl's own prompt types, as `axolotl:TYPE`."""
ROLES = {"user": ("human", "user"), "assistant": ("gpt", "assistant"), "system": ("system",), "tool": ("tool",)}
_AS_ANYWAY: dict[str, tuple[object, ...]] = {
    "roles_to_train": (["assistant"],),
    "message_field_training": ("train",),
    "message_field_training_detail": ("train_detail",),
    "chat_template": ("tokenizer_default",),
    "field": ("text",),
    "text_column": ("text",),
    "field_tools": ("tools",),
    "field_messages": ("messages", "conversations"),
    "field_chosen": ("chosen",),
    "field_rejected": ("rejected",),
    "message_field_role": ("role", "from"),
    "message_field_content": ("content", "value"),
    "message_property_mappings": ({"role": "role", "content": "content"}, {"role": "from", "content": "value"}),
    "trust_remote_code": (False,),
}
"""Key of a data set's entry → values with which forge reads its rows anyway."""
_OF_AN_ENTRY = {
    "shards": "a part of the rows: give random_rows, a share of them",
    "shards_idx": "a part of the rows: give random_rows, a share of them, and a random_seed that chooses others",
    "preprocess_shards": "files are read in constant memory",
    "revision": "the newest revision is read",
    "data_dir": "give the files in data_path",
    "type": "the format is recognised from the rows; or choose data_format",
    "columns": "columns that a format does not read are left out by themselves",
    "chat_template": "one chat_template is that of all data sets",
    "weight": "shares of data sets are a mapping: data_path={'a.jsonl': 0.7, 'b.jsonl': 0.3}",
    "skip": "a part of the rows: shorten the file, or name a slice of the split, org/name:train[1000:]",
    "logprobs_field": "`forge teach --from-rows` reads log-probabilities of rows with token ids",
    **dict.fromkeys(("gen_temperature", "kd_temperature"), "`forge teach --temperature` is that of the teacher"),
    **dict.fromkeys(("drop_system_message", "split_thinking"), "change the messages with preprocess"),
}
"""Key of a data set's entry → what there is instead; other keys are those of the whole file, or name columns."""
_COLUMNS = {
    "field": "text",
    "text_column": "text",
    "field_messages": "messages",
    "field_chosen": "chosen",
    "field_rejected": "rejected",
    "field_tools": "tools",
}
"""Key of a data set's entry that names a column → the name that forge reads."""
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Fields of a message in which reasoning is read."""
FILE = re.compile(r"\.(jsonl?|parquet|csv|arrow)(\.\w+)?$")
_FIRST_ROWS = re.compile(r"train\[:(\d+)(%?)\]")
"""Slice of a split that has its first rows: so many, or a share of them in per cent."""
_ROWS = ("max_samples", "random_rows", "random_seed")
"""Settings of an entry that say which of its rows are read, not how."""


class _DataSet(NamedTuple):
    """A data set of the file."""

    setting: str
    """`data_path` or `eval_data_path`."""
    path: str
    kind: str | None
    """Its type in Axolotl; None where it names none."""
    format: str
    """Format of its rows; `auto` where there is none of that type."""
    columns: dict[str, str]
    """Columns that are read under another name, each with that name."""
    ends: str | None = None
    """Which ends of turns are learned; None where its type does not ask."""
    roles: tuple[str, ...] | None = None
    """Roles whose messages are learned; None where it does not say."""
    own: Mapping[str, object] = {}
    """What it has of its own in any case."""


def data_sets(draft: Draft) -> None:
    """Read the data sets, in formats and with columns of their own where these are not the same."""
    left, found = draft.left, draft.found
    read: list[_DataSet] = []
    for key, setting in (("datasets", "data_path"), ("pretraining_dataset", "data_path"), ("test_datasets", "eval_data_path")):
        given = left.pop(key, None)
        if not given:
            continue
        first = len(read)
        for each in given if isinstance(given, list) else [given]:
            read += _entry(each, key, setting, draft)
        paths = [each.path for each in read[first:]]
        found[setting] = paths[0] if len(paths) == 1 else paths
    # Held-out rows of which nothing is said are read as those that are trained on.
    said = [each for each in read if each.setting == "data_path" or each.kind is not None or each.columns]
    one_format, one_naming = (
        all(getattr(each, name) == getattr(said[0], name) for each in said) for name in ("format", "columns")
    )
    if said and one_format and said[0].format != "auto":
        found["data_format"] = said[0].format
    if said and one_naming and said[0].columns:
        found["rename_columns"] = said[0].columns
    learned = _learned(draft, said)
    inputs = not one_format and left.get("train_on_inputs") is True and draft.verb in PROMPTED
    if inputs:
        del left["train_on_inputs"]
    for setting in dict.fromkeys(each.setting for each in read):
        mixed: list[tuple[str, dict[str, object]]] = []
        for each in read:
            if each.setting != setting:
                continue
            own: dict[str, object] = {} if one_format or each.format == "auto" else {"data_format": each.format}
            own |= {} if one_naming or not each.columns else {"rename_columns": each.columns}
            own |= learned(each) | dict(each.own)
            if inputs:  # of conversations every message is learned there, and of other rows all
                own["train_on"] = ",".join(ROLES) if each.ends is not None else "all"
            mixed.append((each.path, own))
        if any(own for _, own in mixed) or len(dict(mixed)) < len(mixed):
            found[setting] = entries(mixed, "datasets" if setting == "data_path" else "test_datasets", draft.lost)


def entries(mixed: Sequence[tuple[str, Mapping[str, object]]], key: str, lost: list[str]) -> object:
    """Return data sets with what each has of its own in the plainest form; list repeated ones.

    Args:
        mixed: path and settings of each.
        key: what the file calls them.
        lost: what is not carried over; of several that are read alike, which forge refuses, one is taken.

    >>> entries([("a.jsonl", {}), ("b.jsonl", {"train_on": "last"})], "datasets", [])
    {'a.jsonl': {}, 'b.jsonl': {'train_on': 'last'}}
    >>> entries([("a.jsonl", {}), ("a.jsonl", {"train_on": "last"})], "datasets", [])
    [{'path': 'a.jsonl'}, {'path': 'a.jsonl', 'train_on': 'last'}]
    """
    kept: list[tuple[str, Mapping[str, object]]] = []
    times: dict[int, int] = {}
    for path, own in mixed:
        at = next((at for at, (other, its) in enumerate(kept) if other == path and _how(its) == _how(own)), None)
        if at is None:
            kept.append((path, own))
            continue
        times[at] = times.get(at, 1) + 1
        if own == _how(own):
            kept[at] = (path, own)  # all of its rows, rather than a part of them
    for at, count in times.items():
        path, own = kept[at]
        part = "".join(f", {name}={value}" for name, value in own.items() if name in _ROWS)
        lost.append(
            f"{key}: {path}: is there {count} times, and here once{part}: to see its rows more often than others', give each "
            "data set a weight, its share of what is trained on"
        )
    if not any(own for _, own in kept):
        paths = [path for path, _ in kept]
        return paths[0] if len(paths) == 1 else paths
    return dict(kept) if len(dict(kept)) == len(kept) else [{"path": path, **own} for path, own in kept]


def _how(own: Mapping[str, object]) -> dict[str, object]:
    """Return how the rows of an entry are read, without which of them."""
    return {name: value for name, value in own.items() if name not in _ROWS}


def _learned(draft: Draft, said: list[_DataSet]) -> Callable[[_DataSet], dict[str, object]]:
    """Read what is learned of all data sets alike; return what is learned of one otherwise."""
    names = set[str]()
    trained = [each for each in said if each.setting == "data_path"]
    ends, roles = {each.ends for each in said}, {each.roles for each in said}
    if len(ends) == 1 and ends.isdisjoint({None, "turn"}):
        draft.found["train_on_turn_end"] = said[0].ends
    elif len(ends) > 1:
        names.add("train_on_turn_end")
    if len(roles) == 1 and None not in roles:
        draft.left["roles_to_train"] = list(said[0].roles or ())
    elif len(roles) > 1:
        names.add("train_on")
    kinds = {each.kind for each in trained}
    if "on_overflow" in draft.known and kinds == {"completion"}:
        draft.found["on_overflow"] = "split"  # long texts are cut into several there too
    elif "on_overflow" in draft.known and draft.left.get("sequence_len") is not None:
        names.add("on_overflow")

    def of_one(each: _DataSet) -> dict[str, object]:
        split, given = each.kind == "completion", each.roles not in (None, ("assistant",))
        values = {
            "train_on_turn_end": each.ends if each.ends != "turn" else None,
            "train_on": ",".join(each.roles or ()) if given or (each.roles and draft.left.get("roles_to_train")) else None,
            "on_overflow": "split" if split else None,
        }
        return {name: value for name, value in values.items() if name in names and value is not None}

    return of_one


def _entry(each: Any, key: str, setting: str, draft: Draft) -> list[_DataSet]:
    """Read an entry of `datasets`, which may name several files."""
    lost = draft.lost
    if not isinstance(each, Mapping):
        return [_DataSet(setting, str(each), None, "auto", {})]
    own = dict(each)
    path, split, files, config = (own.pop(name, None) for name in ("path", "split", "data_files", "name"))
    kind, named = own.pop("type", None), None
    own.pop("ds_type", None)
    if kind is not None and key != "pretraining_dataset":
        named = _format_of(kind, draft)
        if named is None:
            here = _OF_AN_ENTRY["type"]
            if isinstance(kind, Mapping):
                here += "; columns of other names are read with rename_columns ({question: prompt, answer: completion})"
            lost.append(f"{key}[].type: {kind!r}: {here}")
    if own.get("field_thinking") == own.get("template_thinking_key") in _REASONING:
        del own["field_thinking"], own["template_thinking_key"]  # read under each of these names, and given to the template so
    columns: dict[str, str] = {}
    roles: tuple[str, ...] | None = None
    part: dict[str, object] = {}
    if own.get("shards_idx") == 0:
        del own["shards_idx"]
    eos, eot = own.pop("train_on_eos", None), own.pop("train_on_eot", None)
    chat = str(kind).startswith("chat_template") and draft.verb in PROMPTED
    if chat and None not in (eos, eot) and eos != eot:
        lost.append(f"{key}[].train_on_eos: {eos!r}: a turn has one end, of which train_on_eot says whether it is learned")
    for name, value in own.items():
        if name in _COLUMNS and isinstance(value, str) and value not in _AS_ANYWAY.get(name, ()):
            _name(columns, value, _COLUMNS[name], lost)
        elif name == "roles_to_train" and draft.verb in PROMPTED and (named_roles := roles_of(value)):
            roles = tuple(named_roles)
        elif name == "shards" and isinstance(value, int) and value > 1 and own.get("shards_idx") in (None, 0):
            part["random_rows"] = 1 / value  # at random there too
        elif value not in (None, *_AS_ANYWAY.get(name, ())) and not (name == "roles" and _usual(value)):
            lost.append(f"{key}[].{name}: {value!r}: {_instead(name)}")
    paths = _paths(path, split, files, config)
    if paths and (files is not None or FILE.search(paths[0])):
        part |= rows_of_slice(str(split or "train"), f"{key}[].split", lost, files=len(paths), parted=bool(part))
    if not paths:
        lost.append(f"{key}[]: has no path")
    of_kind = None if kind is None or key == "pretraining_dataset" else str(kind)
    known = named if named is not None and "data_format" in draft.known else "auto"
    ends = str(eot or eos or "turn") if chat else None  # read by no other type there
    return [_DataSet(setting, each, of_kind, known, columns, ends, roles, part) for each in paths]


def _paths(path: Any, split: Any, files: Any, config: Any) -> list[str]:
    """Return the files of an entry, or its data set on the Hub; nothing without a path."""
    if files is not None:
        return [str(file) for file in (files if isinstance(files, list) else [files])]
    if path is None or FILE.search(str(path)):
        return [] if path is None else [str(path)]
    return [":".join([str(path), *([str(config)] if config else []), str(split or "train")])]


def rows_of_slice(split: str, key: str, lost: list[str], *, files: int = 1, parted: bool = False) -> dict[str, object]:
    """Return settings of an entry for the rows in a split's slice; list a slice without any.

    >>> rows_of_slice("train[:100]", "split", []), rows_of_slice("train", "split", [])
    ({'max_samples': 100}, {})
    """
    found = _FIRST_ROWS.fullmatch(split)
    number, share = (int(found.group(1)), bool(found.group(2))) if found else (0, False)
    if split == "train" or (share and number >= 100):
        return {}
    if number == 0 or parted:
        lost.append(f"{key}: {split!r}: all rows of a file are read: give the part in a file, or max_samples, the first ones")
        return {}
    if share:
        lost.append(f"{key}: {split!r}: the first {number} % of the rows there; here as many, chosen at random (random_rows)")
        return {"random_rows": number / 100}
    if files > 1:
        lost.append(f"{key}: {split!r}: the first rows of {files} files together; here so many of each")
    return {"max_samples": number}


def roles_of(value: Any) -> list[str] | None:
    """Return roles in the names that they have here; None where one is not known."""
    names = {theirs: role for role, own in ROLES.items() for theirs in own}
    roles = value if isinstance(value, list) else []
    return sorted({names[role] for role in roles}) if roles and all(role in names for role in roles) else None


def _format_of(kind: Any, draft: Draft) -> str | None:
    """Return the format of a type that Axolotl has or that a file defines; None without one."""
    if isinstance(kind, Mapping):
        kind = json.dumps({name: value for name, value in kind.items() if value is not None}, ensure_ascii=False)
    kind = str(kind)
    if kind in FORMATS:
        return FORMATS[kind]
    field = draft.known.get("data_format")
    if field is None or field.validator is None or draft.verb not in PROMPTED:
        return None
    try:
        field.validator(None, field, f"axolotl:{kind}")
    except ValueError:
        return None
    return f"axolotl:{kind}"


def _usual(roles: Any) -> bool:
    """Whether names of roles are those that are known anyway."""
    return isinstance(roles, Mapping) and all(
        isinstance(names, list) and set(map(str, names)) <= set(ROLES.get(str(role), ())) for role, names in roles.items()
    )


def _instead(name: str) -> str:
    """Say what there is instead of a key of a data set's entry."""
    other = "rename columns with rename_columns" if "field" in name else "forge has nothing of the kind"
    return _OF_AN_ENTRY.get(name) or hint(name, ()) or other


def rename(column: str, ours: str, draft: Draft) -> None:
    """Read a column of all data sets under the name that forge's formats have for it."""
    names = dict(draft.found.get("rename_columns") or {})  # type: ignore[call-overload]
    _name(names, column, ours, draft.lost)
    draft.found["rename_columns"] = names


def _name(names: dict[str, str], column: str, ours: str, lost: list[str]) -> None:
    if names.setdefault(column, ours) != ours:
        lost.append(f"datasets[]: the column {column!r} is {names[column]} of a data set, and {ours} too")
