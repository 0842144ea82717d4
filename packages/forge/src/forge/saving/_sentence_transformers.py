"""Export of an embedding model → the further files that sentence-transformers reads.

modules.json names the model, 1_Pooling and 2_Normalize; config_sentence_transformers.json has the prefixes as prompts.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

MODULES = "modules.json"
_PROMPTS, _TRANSFORMER = "config_sentence_transformers.json", "sentence_bert_config.json"
_POOLING, _NORMALIZE = "1_Pooling", "2_Normalize"
_MODES = {"cls": "cls_token", "mean": "mean_tokens", "max": "max_tokens", "mean_sqrt": "mean_sqrt_len_tokens",
          "weighted": "weightedmean_tokens", "last": "lasttoken"}  # fmt: skip
"""Ours, and those that it is not, → their names in sentence-transformers."""


def write_sentence_transformers(
    folder: Path,
    *,
    width: int,
    pooling: str,
    max_seq_len: int | None,
    query_prefix: str,
    document_prefix: str,
    messages: Sequence[str] | None = None,
    generation_prompt: bool = False,
) -> None:
    """Write the files by which `SentenceTransformer(folder)` embeds as the model was trained.

    Args:
        folder: of the export.
        width: of the embeddings, D.
        pooling: last, mean or cls.
        max_seq_len: tokens after which a text is cut; None for the model's own limit.
        query_prefix: becomes the prompt "query".
        document_prefix: becomes the prompt "document".
        messages: where every text was the user's message, the kinds of media that it may have; None where it was a string.
        generation_prompt: whether messages ended with the chat template's generation prompt.

    """
    kinds = (("", "Transformer"), (_POOLING, "Pooling"), (_NORMALIZE, "Normalize"))
    modules = [
        {"idx": at, "name": str(at), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for at, (path, kind) in enumerate(kinds)
    ]
    modes = {f"pooling_mode_{theirs}": ours == pooling for ours, theirs in _MODES.items()}
    libraries = {"transformers": version("transformers"), "pytorch": version("torch")}
    prompts = {"query": query_prefix, "document": document_prefix}
    _write(folder / MODULES, modules)
    _write(folder / _POOLING / "config.json", {"word_embedding_dimension": width, **modes, "include_prompt": True})
    _write(
        folder / _PROMPTS,
        {"__version__": libraries, "prompts": prompts, "default_prompt_name": None, "similarity_fn_name": "cosine"},
    )
    limit: dict[str, Any] = {"max_seq_length": max_seq_len} if max_seq_len else {}
    read = {} if messages is None else _as_messages(messages, generation_prompt=generation_prompt)
    _write(folder / _TRANSFORMER, {**limit, "do_lower_case": False, **read})
    (folder / _NORMALIZE).mkdir(exist_ok=True)


_HIDDEN = {"method": "forward", "method_output_name": "last_hidden_state"}


def _as_messages(kinds: Sequence[str], *, generation_prompt: bool) -> dict[str, Any]:
    """Say that every text becomes a message, which the chat template writes.

    Without this strings alone are read.
    """
    return {
        "transformer_task": "feature-extraction",
        "modality_config": {**dict.fromkeys(("text", *kinds), _HIDDEN), "message": {**_HIDDEN, "format": "structured"}},
        "module_output_name": "token_embeddings",
        **({"processing_kwargs": {"chat_template": {"add_generation_prompt": True}}} if generation_prompt else {}),
    }


def copy_sentence_transformers(source: Path, folder: Path) -> None:
    """Copy these files beside another export of the same model; none where `source` has none."""
    if not (source / MODULES).is_file():
        return
    for name in (MODULES, _PROMPTS, _TRANSFORMER):
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    shutil.copytree(source / _POOLING, folder / _POOLING, dirs_exist_ok=True)
    (folder / _NORMALIZE).mkdir(exist_ok=True)


def _write(file: Path, content: Any) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
