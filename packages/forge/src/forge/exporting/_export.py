"""A run, or what one exported → a directory to hand on: merged or not, as Hugging Face or as GGUF files, proved, with a model card."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import forge_accel
import forge_data
import forge_dist
from forge._errors import SettingsError
from forge.exporting._model_card import Exported, model_card
from forge.exporting._request import Asked, DType, Format

_ROWS = (5, 17, 33, 64)
"""Lengths in tokens of the rows on which logits are compared."""


def export(
    run: str | Path,
    output: str | Path | None = None,
    *,
    merge: bool = False,
    dtype: DType | None = None,
    format: Format = "hf",  # noqa: A002 - what users call it
) -> Path:
    """Write a model to hand on, loaded back and compared before it is there, with a model card (README.md).

    Args:
        run: A run directory (its last export), or a model or adapter directory.
        output: The directory to write, which must not exist; of a run by default one in its `exports/`.
        merge: Add an adapter's updates to the weights of its base, which makes a plain model of it.
        dtype: What the weights are written as: float32, float16, bfloat16, with gguf also q8_0; by default as they are stored,
            merged ones as those of the base.
        format: hf for a directory that plain transformers (or plain PEFT) loads, gguf for a file that llama.cpp and its kin run.

    Returns:
        The directory, or with gguf the file in it.

    Raises:
        SettingsError, RunDirectoryError: the request is wrong; nothing was written.
        forge_dist.ModelError: an adapter that cannot be merged, a base that is not there or not the one that was trained on, a model or
            tokenizer that GGUF cannot hold.
        forge_dist.ExportError: what was written, or merged, does not compute what it should, or the disk refused it.

    """
    asked = Asked.of(run, output, merge=merge, dtype=dtype, format=format)
    tokenizer = _tokenizer(asked)
    rows = _rows(asked.vocabulary(tokenizer))
    loaded = forge_dist.merge_adapter(asked.folder, rows, task=asked.task) if merge else None
    model: Any = (
        loaded.model
        if loaded is not None
        else forge_dist.load_trained(str(asked.folder), dtype=forge_accel.float32, device="cpu", task=asked.task)
    )
    proofs = (
        []
        if loaded is None
        else [
            f"Merged: on {loaded.tokens} tokens its logits are those of the adapter beside its base within {loaded.difference:.1e} of the largest."
        ]
    )
    _check_range(asked, model)
    with forge_dist.atomic_directory(asked.output) as folder:
        try:
            if format == "gguf":
                file, proof = _write_gguf(asked, model, tokenizer, rows, folder)
            else:
                file, proof = None, _write_hf(asked, model, tokenizer, rows, folder)
        except forge_dist.ForgeDistError as error:  # it names the place that is there for the while
            raise type(error)(str(error).replace(str(folder), str(asked.output))) from error
        except OSError as error:
            raise _unwritable(asked.output, error) from error
        card = Exported(
            run=asked.run,
            folder=asked.folder,
            merged=merge,
            adapter=asked.adapter,
            base=asked.base,
            dtype=asked.dtype,
            file=file,
            proofs=(*proofs, proof),
            architecture=type(model if merge or not asked.adapter else model.get_base_model()).__name__,
            template=tokenizer is not None and bool(tokenizer.chat_template),
        )
        text = model_card(card)
        try:
            (folder / "README.md").write_text(text, encoding="utf-8")
        except OSError as error:
            raise _unwritable(asked.output / "README.md", error) from error
    return asked.output if file is None else asked.output / file


def _unwritable(place: Path, error: OSError) -> forge_dist.ExportError:
    return forge_dist.ExportError(
        f"{place} cannot be written: {error.strerror or error}. Nothing is there; make room, or give another output."
    )


def _tokenizer(asked: Asked) -> Any:
    """What lies beside the model, or beside an adapter's base; None where neither has one."""
    for place in (str(asked.folder), asked.base):
        try:
            return forge_data.load_tokenizer(place)
        except forge_data.TokenizerError as error:
            refused = error
    if asked.format == "gguf":
        raise refused
    return None


def _rows(vocabulary: int) -> list[list[int]]:
    """Rows of token ids drawn from the whole vocabulary, always the same."""
    draw = np.random.default_rng(0)
    return [draw.integers(0, vocabulary, length).tolist() for length in _ROWS]


_BEYOND_HALF = 65520.0
"""The least number that float16 rounds to infinity."""


def _check_range(asked: Asked, model: Any) -> None:
    """Raise SettingsError where float16, which q8_0 falls back to for some rows, cannot hold a weight."""
    if asked.dtype not in ("float16", "q8_0") or (asked.adapter and not asked.merge):
        return
    for name, tensor in model.state_dict().items():
        if asked.format == "gguf" and (tensor.ndim < 2 or (asked.dtype == "q8_0" and tensor.shape[-1] % 32 == 0)):
            continue
        largest = tensor.abs().max().item() if tensor.numel() else 0.0
        if _BEYOND_HALF <= largest < math.inf:
            raise SettingsError(
                f"dtype={asked.dtype}: the weight {name} has a number of {largest:g}, which overflows float16 (at most 65504). Take dtype=bfloat16."
            )


def _write_hf(asked: Asked, model: Any, tokenizer: Any, rows: Sequence[Sequence[int]], folder: Path) -> str:
    written = forge_dist.export_model(model, folder / "model", tokenizer=tokenizer, dtype=getattr(forge_accel, asked.dtype))
    check = forge_dist.check_export(model, written, [(row, row) for row in rows])
    for file in sorted(written.iterdir()):
        file.rename(folder / file.name)
    written.rmdir()
    what = "mean reward" if asked.task == "reward" else "loss"
    return (
        f"Read back: {check.tensors} tensors, each the one in memory, written as {asked.dtype}; loaded by plain "
        f"{'PEFT' if asked.adapter and not asked.merge else 'transformers'}, its {what} on {check.loss_tokens} random tokens is "
        f"{check.reloaded:.4f}, {check.in_memory:.4f} in memory."
    )


def _write_gguf(asked: Asked, model: Any, tokenizer: Any, rows: Sequence[Sequence[int]], folder: Path) -> tuple[str, str]:
    name = asked.name
    file = f"{name}-{asked.dtype}.gguf"
    given: Any = {"tokenizer": tokenizer, "dtype": asked.dtype, "name": name}
    forge_dist.export_gguf(model, folder / file, **given)
    check = forge_dist.check_gguf(model, folder / file, rows, **given)
    halves = f" ({check.halves} of them as float16, for their rows are no multiple of 32 long)" if check.halves else ""
    return file, (
        f"Read back: {check.tensors} tensors, each the one in memory, matrices written as {asked.dtype}{halves}; loaded by transformers from the file, its logits are "
        f"those in memory within {check.difference:.1e} of the largest, and within {check.exact:.1e} with the unrounded weights."
    )
