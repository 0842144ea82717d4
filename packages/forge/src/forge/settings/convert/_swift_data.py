"""Data sets of an ms-swift configuration → paths, columns and the format of their rows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forge.settings.convert._data_sets import entries as in_one
from forge.settings.convert._draft import Draft

ON_HF: dict[str, str] = {
    there: here
    for there, _, here in (
        pair.partition("=")
        for pair in """
    swift/self-cognition=modelscope/self-cognition AI-ModelScope/alpaca-gpt4-data-zh=llm-wizard/alpaca-gpt4-data-zh
    AI-ModelScope/alpaca-gpt4-data-en=vicgalle/alpaca-gpt4 swift/RLAIF-V-Dataset=openbmb/RLAIF-V-Dataset
    MTEB/scidocs-reranking=mteb/scidocs-reranking AI-ModelScope/LongAlpaca-12k=Yukang/LongAlpaca-12k
    AI-ModelScope/LaTeX_OCR=linxy/LaTeX_OCR AI-ModelScope/function-calling-chatml=Locutusque/function-calling-chatml
    AI-ModelScope/clevr_cogen_a_train=leonardPKU/clevr_cogen_a_train swift/VideoChatGPT=lmms-lab/VideoChatGPT
    liucong/Chinese-DeepSeek-R1-Distill-data-110k-SFT=Congliu/Chinese-DeepSeek-R1-Distill-data-110k-SFT
    swift/TextCaps=HuggingFaceM4/TextCaps AI-ModelScope/coco=detection-datasets/coco swift/chinese-c4=shjwudp/chinese-c4
    lvjianjin/AdvertiseGen=shibing624/AdvertiseGen AI-ModelScope/orpo-dpo-mix-40k=mlabonne/orpo-dpo-mix-40k
    AI-ModelScope/chartqa_digit_r1v_format=zyang39/chartqa_digit_r1v_format AI-ModelScope/NuminaMath-TIR=AI-MO/NuminaMath-TIR
    LLM-Research/xlam-function-calling-60k=Salesforce/xlam-function-calling-60k
    hjh0119/shareAI-Llama3-DPO-zh-en-emoji=shareAI/DPO-zh-en-emoji AI-ModelScope/alpaca-cleaned=yahma/alpaca-cleaned
    AI-ModelScope/OpenO1-SFT=O1-OPEN/OpenO1-SFT swift/ultrachat_200k=HuggingFaceH4/ultrachat_200k
    swift/SlimOrca=Open-Orca/SlimOrca
    swift/OpenHermes-2.5=teknium/OpenHermes-2.5 swift/no_robots=HuggingFaceH4/no_robots
    swift/Infinity-Instruct=BAAI/Infinity-Instruct
    AI-ModelScope/CodeAlpaca-20k=HuggingFaceH4/CodeAlpaca_20K AI-ModelScope/MathInstruct=TIGER-Lab/MathInstruct
    AI-ModelScope/tulu-v2-sft-mixture=allenai/tulu-v2-sft-mixture
    AI-ModelScope/databricks-dolly-15k=databricks/databricks-dolly-15k
    swift/orca_dpo_pairs=Intel/orca_dpo_pairs AI-ModelScope/zhihu_rlhf_3k=liyucheng/zhihu_rlhf_3k
    AI-ModelScope/stack-exchange-paired=lvwerra/stack-exchange-paired
    """.split()
    )
}
"""Data set of ModelScope's hub → the same on Hugging Face's, by ms-swift's own register, where the names differ."""
_SAME = (
    "AI-MO/",
    "lmms-lab/",
    "open-thoughts/",
    "sentence-transformers/",
    "clip-benchmark/",
    "linxy/",
    "OpenGVLab/",
    "tatsu-lab/",
)
"""Beginnings of names that are those of Hugging Face's hub."""
_FILE = re.compile(r"(\.{0,2}|~)/.*|.*\.(jsonl?|csv|tsv|parquet|arrow|txt)(\.\w+)?")
_HUB = re.compile(r"(?:(HF|MS)::)?([^:#]+)(?::([^:#]*))?(?:#(\d+))?", re.IGNORECASE)
_FORMATTED = ("sft", "osft", "distill")
"""Verbs whose rows have every form that ms-swift reads."""
_COLUMNS = {"classify": {"query": "text"}, "embed": {"response": "document"}}
"""Verb → what columns are called here that ms-swift calls otherwise."""


def datasets(draft: Draft) -> None:
    """Read the paths of data sets, and how many rows of each are taken."""
    for key, setting in (("dataset", "data_path"), ("val_dataset", "eval_data_path")):
        given = draft.left.pop(key, None)
        entries = [str(each) for each in (given if isinstance(given, list) else [given] if given else [])]
        if not entries:
            continue
        counts = list[int | None]()
        paths = [_path(each, key, counts, draft) for each in entries]
        own = [{} if count is None else {"random_rows": count} for count in counts]
        draft.found[setting] = in_one(list(zip(paths, own, strict=True)), key, draft.lost)
        if any(own):
            draft.comments[setting] = "so many rows at random, but others than ms-swift's"
    if draft.left.pop("cached_dataset", None) and "data_path" not in draft.found:
        draft.lost.append("cached_dataset: tokens of ms-swift's are not read: give the rows that it was made of in data_path")
    draft.left.pop("cached_val_dataset", None)
    _columns(draft)


def _path(entry: str, key: str, counts: list[int | None], draft: Draft) -> str:
    """Return the path of one data set; add the number of its rows to `counts`."""
    name, sign, number = entry.rpartition("#")
    if Path(entry).exists():
        counts.append(None)
        return entry
    if "/" not in name + entry and not _FILE.fullmatch(name or entry):
        draft.lost.append(f"{key}: {entry}: a name of ms-swift's register: give the files that it stands for")
        counts.append(None)
        return name if sign and number.isdigit() else entry
    if _FILE.fullmatch(entry) or (sign and number.isdigit() and _FILE.fullmatch(name)):
        taken = sign and number.isdigit()
        counts.append(int(number) if taken else None)
        return name if taken else entry
    found = _HUB.fullmatch(entry)
    if found is None:
        counts.append(None)
        return entry
    hub, dataset, subset, number = found.groups()
    counts.append(int(number) if number else None)
    here = ON_HF.get(dataset, dataset) if (hub or "").upper() != "HF" and not _on_hf(draft) else dataset
    if here == dataset and not dataset.startswith(_SAME) and (hub or "").upper() != "HF" and not _on_hf(draft):
        draft.lost.append(
            f"{key}: {dataset}: a name of ModelScope's hub: forge reads files and Hugging Face's: give the files where the "
            "name is another there"
        )
    if dataset == "swift/self-cognition":
        draft.lost.append(
            f"{key}: {dataset}: ms-swift puts model_name and model_author in for {{{{NAME}}}} and {{{{AUTHOR}}}}: do it "
            "with preprocess"
        )
    if subset:
        draft.lost.append(
            f"{key}: {dataset}:{subset}: a part of ms-swift's own register, which may read its columns in a way of its own: "
            "look at the first rows with `forge data show`"
        )
    return f"{here}:train"


def _on_hf(draft: Draft) -> bool:
    return draft.left.get("use_hf") is True


def _columns(draft: Draft) -> None:
    """Read names of columns, and choose the format whose rules are ms-swift's."""
    names = draft.left.pop("columns", None)
    renamed: dict[str, Any] = {}
    if isinstance(names, Mapping):
        ours = _COLUMNS.get(draft.verb, {})
        renamed = {str(theirs): ours.get(str(name), str(name)) for theirs, name in names.items() if name != "_"}
    elif names:
        draft.lost.append(f"columns: {names!r}: give rename_columns, a mapping of their names to ours")
    if draft.verb == "kto":
        renamed.setdefault("label", "kto_tag")
        draft.comments["rename_columns"] = "what ms-swift calls label"
    if renamed:
        draft.found["rename_columns"] = renamed
    if draft.verb in _FORMATTED and draft.library == "ms-swift":
        draft.found["data_format"] = "ms_swift"
        draft.comments["data_format"] = "rows by ms-swift's rules; leave it out for other rows"
