"""Run, model or adapter directory → an export that was compared with it, with a model card."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import forge_accel
import forge_data
import forge_dist
from forge._counted import counted
from forge._disk import is_everywhere, known_remedy, write_remedy
from forge._errors import SettingsError
from forge._progress import Reporter
from forge._turn_end import stop_at_turn_end, trained_turn_end
from forge.exporting._model_card import model_card
from forge.exporting._request import DType, ExportRequest, Format
from forge.saving._exports import compared_by
from forge.saving._sentence_transformers import copy_sentence_transformers
from forge.saving._system_prompt import copy_system_prompt

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
    """Write a model to hand on, with a model card (README.md), loaded back and compared before.

    Args:
        run: A run directory (its last export), or a model or adapter directory.
        output: The directory to write, which must not exist; of a run by default one in its `exports/`.
        merge: Add an adapter's updates to the weights of its base, which makes a plain model of it.
        dtype: Type of the weights, with gguf also q8_0, q5_1, q5_0, q4_1, q4_0 or, of experts, mxfp4; by default as they are
            stored, merged ones as those of the base, and with gguf what the run's `qat` rounded them to.
        format: hf for a directory that plain transformers (or plain PEFT) loads, gguf for a file that llama.cpp runs.

    Returns:
        The directory, or with gguf the file in it.

    Raises:
        SettingsError, RunDirectoryError: the request is wrong; nothing was written.
        forge_dist.ModelError: an adapter that cannot be merged, a base that is missing or not the one that was trained on, a
            model or tokenizer that GGUF cannot hold, or the package gguf is not installed.
        forge_dist.ExportError: what was written, or merged, does not compute what it should, or cannot be written.

    """
    request = ExportRequest.of(run, output, merge=merge, dtype=dtype, format=format)
    if format == "gguf":
        forge_dist.require_gguf()
    report = Reporter(lambda _: None)
    if format == "gguf" and request.trained_for not in (None, request.dtype):
        report.note(
            f"WARNING: the file will be {request.dtype}, which is not the type that the run trained for (qat "
            f"{request.trained_for}): its held-out figures are of weights rounded to {request.trained_for}. Without a dtype "
            f"the file is {request.trained_for}."
        )
    # Begun before anything is read: who comes second to the same place is refused at once.
    with forge_dist.atomic_directory(request.output) as folder:
        request = request.read()
        with report.taking(f"loading the tokenizer of {request.folder}"):
            tokenizer = _tokenizer(request)
        if format == "gguf":
            file = request.output / f"{request.name}-{request.dtype}.gguf"
            with report.taking("looking whether GGUF can hold the model", "found that GGUF can hold the model"):
                given: Any = {"dtype": request.dtype, "task": request.task, "adapter": request.adapter}
                forge_dist.refuse_gguf(request.base, tokenizer=tokenizer, where=file, **given)
        rows = _rows(request.vocabulary(tokenizer))
        proofs = []
        model: Any
        beside = " beside its base" if merge else ""
        with report.taking(f"loading {request.folder}{beside}", f"loaded {request.folder}"):
            if merge:
                merged = forge_dist.merge_adapter(request.folder, rows, task=request.task, doing=report.doing)
                model = merged.model
                proofs.append(
                    f"Merged: on {merged.tokens} tokens its logits are those of the adapter beside its base within "
                    f"{merged.difference:.1e} of the largest."
                    + (f" {counted(merged.apart, 'layers')} that no text reaches: compared one by one." if merged.apart else "")
                )
            else:
                model = forge_dist.load_trained(str(request.folder), dtype=forge_accel.float32, device="cpu", task=request.task)
        if tokenizer is not None:
            stop_at_turn_end(model, tokenizer, trained_turn_end(request.folder))
        _check_range(request, model)
        try:
            if format == "gguf":
                file, proof = _write_gguf(request, model, tokenizer, rows, folder, report)
            else:
                report.doing(f"writing {request.output.name} and loading it back")
                file, proof = None, _write_hf(request, model, tokenizer, rows, folder)
        except forge_dist.ForgeDistError as error:  # it names the temporary directory
            text = str(error).replace(str(folder), str(request.output))
            raise type(error)(f"{text}. {_instead(error)}" if known_remedy(error) else text) from error
        except OSError as error:
            raise _unwritable(request.output, error) from error
        trained: Any = model
        text = model_card(
            request,
            file=file,
            proofs=[*proofs, proof],
            architecture=type(trained if merge or not request.adapter else trained.get_base_model()).__name__,
            chat_template=tokenizer is not None and bool(tokenizer.chat_template),
        )
        try:
            (folder / "README.md").write_text(text, encoding="utf-8")
        except OSError as error:
            raise _unwritable(request.output / "README.md", error) from error
    return request.output if file is None else request.output / file


def _unwritable(place: Path, error: OSError) -> forge_dist.ExportError:
    return forge_dist.ExportError(f"{place} cannot be written: {error.strerror or error}. {_instead(error)}")


def _instead(error: Exception) -> str:
    return f"Nothing is there: {write_remedy(error)}{'' if is_everywhere(error) else ', or give another output'}."


def _tokenizer(request: ExportRequest) -> Any:
    """Load the tokenizer of the model or of an adapter's base; None where neither has one."""
    for place in (str(request.folder), request.base):
        try:
            return forge_data.load_tokenizer(place)
        except forge_data.TokenizerError as error:
            refused = error
    if request.format == "gguf":
        raise refused
    return None


def _rows(vocabulary: int) -> list[list[int]]:
    """Draw rows of token ids from the whole vocabulary, always the same."""
    draw = np.random.default_rng(0)
    return [draw.integers(0, vocabulary, length).tolist() for length in _ROWS]


_FLOAT16_OVERFLOW = 65520.0
"""Smallest number that float16 rounds to infinity."""


def _check_range(request: ExportRequest, model: Any) -> None:
    """Raise SettingsError where float16 overflows; `export_gguf` looks itself."""
    if request.dtype != "float16" or request.format == "gguf" or (request.adapter and not request.merge):
        return
    for name, tensor in model.state_dict().items():
        largest = tensor.abs().max().item() if tensor.numel() else 0.0
        if _FLOAT16_OVERFLOW <= largest < math.inf:
            raise SettingsError(
                f"dtype={request.dtype}: the weight {name} has a number of {largest:g}, which overflows float16 (at most "
                "65504). Take dtype=bfloat16."
            )


def _write_hf(request: ExportRequest, model: Any, tokenizer: Any, rows: Sequence[Sequence[int]], folder: Path) -> str:
    """Write a Hugging Face directory and load it back; return a sentence on how it was compared."""
    written = forge_dist.export_model(model, folder / "model", tokenizer=tokenizer, dtype=getattr(forge_accel, request.dtype))
    check = forge_dist.check_export(model, written, [(row, row) for row in rows])
    for file in sorted(written.iterdir()):
        file.rename(folder / file.name)
    written.rmdir()
    copy_sentence_transformers(request.folder, folder)
    copy_system_prompt(request.folder, folder)
    return (
        f"Read back: {check.tensors} tensors, each the one in memory, written as {request.dtype}; loaded by plain "
        f"{'PEFT' if request.adapter and not request.merge else 'transformers'}, its {compared_by(request.task)} on "
        f"{check.loss_tokens} random tokens is {check.reloaded:.4f}, {check.in_memory:.4f} in memory."
    )


def _write_gguf(
    request: ExportRequest, model: Any, tokenizer: Any, rows: Sequence[Sequence[int]], folder: Path, report: Reporter
) -> tuple[str, str]:
    """Write a GGUF file and read it back; return its name and a sentence on how it was compared."""
    name = request.name
    file = f"{name}-{request.dtype}.gguf"
    given: Any = {"tokenizer": tokenizer, "dtype": request.dtype, "name": name}
    report.doing(f"writing {file}")
    forge_dist.export_gguf(model, folder / file, **given, progress=report.progress("tensors written"))
    report.doing(f"reading {file} back, tensor by tensor")
    compared = report.progress("tensors compared")
    check = forge_dist.check_gguf(model, folder / file, rows, **given, progress=compared, doing=report.doing)
    others = {kind: count for kind, count in check.matrices.items() if kind not in (request.dtype, "float16")}
    said = [f"{count} as {kind}" for kind, count in others.items()]
    said += [f"{check.halves} of them as float16, for their rows are no multiple of 32 long"] if check.halves else []
    apart = f" ({', '.join(said)})" if said else ""
    return file, (
        f"Read back: {check.tensors} tensors, each the one in memory, matrices written as {request.dtype}{apart}; loaded "
        f"from the file into transformers, its logits are those in memory within {check.difference:.1e} of the largest, and "
        f"within {check.exact:.1e} with the unrounded weights. Its tokenizer gives {check.texts} the ids of the model's own."
    )
