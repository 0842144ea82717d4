"""Data sets of another library's file, and what is learned of their rows → ours."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from forge.settings.convert._draft import Draft

FORMATS = {
    "chat_template": "messages",
    "alpaca": "alpaca",
    "sharegpt": "sharegpt",
    "completion": "text",
    "input_output": "auto",
    "chat_template.default": "auto",
}
"""Type of a data set in Axolotl → data_format."""
_FILE = re.compile(r"\.(jsonl?|parquet|csv|arrow)(\.\w+)?$")


_NAMED = "a template of {library}'s by name; the tokenizer's own is taken, or give a file of the template"


def data(draft: Draft) -> None:
    """Read the paths of data sets, and what becomes of long rows."""
    left, found, lost = draft.left, draft.found, draft.lost
    kinds: list[str] = []
    for key, setting in (("datasets", "data_path"), ("pretraining_dataset", "data_path"), ("test_datasets", "eval_data_path")):
        given = left.pop(key, None)
        if not given:
            continue
        paths: list[str] = []
        for each in given if isinstance(given, list) else [given]:
            paths += _paths(each, key, kinds, lost)
        found[setting] = paths[0] if len(paths) == 1 else paths
    formats = {FORMATS[kind] for kind in kinds if kind in FORMATS}
    if len(set(kinds)) > 1:
        lost.append(
            f"datasets[].type: {', '.join(kinds)}: one data_format holds for all; it is left open, and recognised from the rows"
        )
    elif formats - {"auto"}:
        found["data_format"] = formats.pop()
    for key, setting in (("dataset", "data_path"), ("eval_dataset", "eval_data_path")):
        if isinstance(left.get(key), str):
            names = [name.strip() for name in left.pop(key).split(",")]
            found[setting] = names[0] if len(names) == 1 else names
            if draft.library == "LLaMA-Factory":
                lost.append(f"{key}: {', '.join(names)}: names of dataset_info.json; give the files that they stand for")
    if draft.library == "TRL" and left.get("dataset_name"):
        name, config = str(left.pop("dataset_name")), left.pop("dataset_config", None)
        split = left.pop("dataset_train_split", None) or "train"
        on_hub = [name, *([str(config)] if config else [])]
        found["data_path"] = name if _FILE.search(name) else ":".join([*on_hub, str(split)])
        test = left.pop("dataset_test_split", None) or "test"
        if left.get("eval_strategy") not in (None, "no", False) and not _FILE.search(name):
            found["eval_data_path"] = ":".join([*on_hub, str(test)])
    draft.drop("eval_strategy", when=("no", False))
    share = left.get("val_set_size", left.get("val_size"))
    if isinstance(share, (int, float)) and not 0 < share < 1:
        left.pop("val_set_size", None)
        left.pop("val_size", None)
        if share:
            lost.append(f"val_size: {share}: validation_split is a share of the rows, below 1")
    _long_rows(draft)


def _long_rows(draft: Draft) -> None:
    """Read the length of rows (blocks in pretraining), and what becomes of longer ones."""
    left = draft.left
    for key in ("max_length", "cutoff_len", "sequence_len"):
        if left.get(key) is None:
            continue
        if draft.verb == "pretrain":
            left["block_size"] = left.pop(key)
            if draft.library == "LLaMA-Factory" and left.get("packing") is False:
                draft.lose("packing", "documents are cut into blocks of block_size, and none is cut off at its end")
        elif draft.library == "LLaMA-Factory" or (draft.library == "TRL" and draft.verb != "reward"):
            draft.found["on_overflow"] = "truncate"  # Axolotl drops long rows, as forge does, and TRL long pairs of rewards
    strategy = left.get("excess_length_strategy")
    if strategy in ("drop", "truncate", "raise"):
        del left["excess_length_strategy"]
        if strategy != "drop":
            draft.found["on_overflow"] = {"truncate": "truncate", "raise": "error"}[strategy]
    draft.drop("truncation_mode", when=("keep_start",))


def rows(draft: Draft) -> None:
    """Read how rows are packed, which tokens are learned, and in which template."""
    left = draft.left
    packs = [key for key in ("packing", "sample_packing", "neat_packing") if left.get(key) is True]
    if packs and draft.verb != "pretrain":
        draft.lost.append(
            f"{packs[0]}: True: rows are packed here too; but a batch counts packed rows there, and samples in "
            "effective_batch_size: multiply it by the samples that fill such a row"
        )
    draft.drop("packing", "sample_packing", "neat_packing", "eval_sample_packing", "eval_packing", "pad_to_sequence_len")
    draft.drop("batch_flattening", "padding_free")
    draft.drop("packing_strategy", when=("bfd",))
    draft.drop("pad_to_multiple_of", when=("auto",))
    draft.drop("dataset_text_field", when=("text",))
    draft.drop("roles_to_train", when=(["assistant"],))
    draft.drop("train_on_eos", when=("turn",))
    draft.drop("flash_attention", "flash_attn", "use_flash_attention_2", when=(True, False, "auto", "fa2"))
    if draft.library == "TRL" and draft.verb in ("sft", "osft"):
        _learned(draft)
    _template(draft)


def _learned(draft: Draft) -> None:
    """Read which tokens TRL learns; of conversations all, unless it is told otherwise."""
    left = draft.left
    assistant, completion = left.pop("assistant_only_loss", None), left.pop("completion_only_loss", None)
    if completion is False and not assistant:
        draft.found["train_on"] = "all"
    elif completion is True:
        draft.found["train_on"] = "completion"
    elif not assistant:
        draft.lost.append(
            "assistant_only_loss: not set: of conversations and plain text every token is learned there; for the same, set "
            "train_on: all. Of prompt and completion it is the completion, here too"
        )


def _template(draft: Draft) -> None:
    """Read the chat template: a file, since other libraries' names mean nothing here."""
    left = draft.left
    draft.drop("chat_template", when=("tokenizer_default", "jinja"))
    name = left.get("chat_template")
    if isinstance(name, str) and "." not in name and "/" not in name:
        draft.lose("chat_template", _NAMED.format(library=draft.library))
    source = left.get("chat_template_jinja")
    if isinstance(source, str) and "{" in source:
        del left["chat_template_jinja"]
        draft.lost.append("chat_template_jinja: a template as text: write it to a file, and give chat_template: FILE")


def _paths(each: Any, key: str, kinds: list[str], lost: list[str]) -> list[str]:
    """Return the paths of one entry of `datasets`, and add its type to `kinds`."""
    if not isinstance(each, Mapping):
        return [str(each)]
    own = dict(each)
    path, split, files = own.pop("path", None), own.pop("split", None), own.pop("data_files", None)
    kind = own.pop("type", None)
    own.pop("ds_type", None)
    if kind is not None and key == "datasets":
        kinds.append(str(kind))
        if str(kind) not in FORMATS:
            here = "the format is recognised from the rows; or choose data_format"
            if isinstance(kind, Mapping):
                here += "; columns of other names are read with rename_columns ({question: prompt, answer: completion})"
            lost.append(f"{key}[].type: {kind!r}: {here}")
    if "chat_template" in own:
        lost.append(f"{key}[].chat_template: {own.pop('chat_template')!r}: one chat_template is that of all data sets")
    lost += [f"{key}[].{name}: {value!r}: rename columns with rename_columns" for name, value in own.items()]
    if files is not None:
        return [str(file) for file in (files if isinstance(files, list) else [files])]
    if path is None:
        lost.append(f"{key}[]: has no path")
        return []
    return [str(path) if _FILE.search(str(path)) else f"{path}:{split or 'train'}"]
