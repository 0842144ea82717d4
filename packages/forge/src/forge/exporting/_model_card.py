"""Export, and the run that it comes from → README.md: what the model is and how to load it.

It names no path of this machine: paths are reduced to their last part, and addresses lose their user and their query.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from forge._counted import counted
from forge._errors import SettingsError
from forge._redact import is_hub_form, last_part, redact
from forge._templates import render
from forge.exporting._request import ExportRequest, read_json
from forge.run._resume import DIVISION
from forge.run._starting_model import BASE
from forge.saving._directories import run_values

_OMITTED = DIVISION | {"model_path", "ckpt_output_dir", "data_path", "eval_data_path"}
"""Settings that say where files lie or how the work was divided: they change no step, or stand elsewhere in the card."""
_ORIGIN = re.compile(r"^(\w+): .*  # ((?:(?!  # ).)*)$", re.MULTILINE)
_PATH_SETTING = re.compile(r"(_path|_cache|_dir)$|^preprocess$")
"""Settings whose whole value is a path, or a list of them."""
_COUNTS = ("_tokens", "_pairs", "_answers", "_prompts", "_samples", "_queries", "_texts")
"""Ends of held-out figures that count instead of measuring."""

_PIPELINES = {"causal": "text-generation", "reward": None, "embedding": "sentence-similarity"}
"""Task → the Hub's name of it."""
_PROCESSOR = ("processor_config.json", "preprocessor_config.json")
"""Files of a directory whose model takes media."""
_TAKES = {"images": "image_processor", "videos": "video_processor", "audio": "sampling_rate"}
"""What a model takes → what its processor's files name."""
_PACKAGES = ("forge", "forge_data", "forge_packing", "forge_accel", "forge_dist", "forge_algos")
_OTHERS = ("torch", "transformers", "peft", "gguf")


def model_card(
    request: ExportRequest, *, file: str | None, proofs: Sequence[str], architecture: str, chat_template: bool
) -> str:
    """Write README.md in the form of the Hugging Face Hub: a head in YAML, then text.

    Args:
        request: what was exported.
        file: the GGUF file beside the card.
        proofs: sentences on how the export was compared with the model.
        architecture: class of the model.
        chat_template: whether the tokenizer has a chat template.

    """
    run = request.run
    verb = "" if run is None else str(read_json(run / "run.json").get("verb", ""))
    reward = _auto_class(architecture) == "AutoModelForSequenceClassification"
    # What was trained: an adapter's base, or the model that the run began with.
    origin, own_base = request.base, run is not None and Path(request.base) == Path(os.path.abspath(run)) / BASE
    if run is not None and (own_base or not request.adapter):
        origin = str(run_values(run)["model_path"])
    what = "A whole model"
    if request.adapter:
        what = f"{'An adapter merged into its base,' if request.merge else 'An adapter for'} {last_part(origin)}"
        what += " with new tokens" if own_base else ""
    samples = request.folder.name.removeprefix("samples_") if run is not None else ""
    steps, figures = (0, []) if run is None else _figures(run, samples)
    media = _media_of(request.folder)
    return render(
        "exporting/templates/model_card.md",
        head=_head(request, verb, origin, media=media),
        title=f"{last_part(origin)}, " + ("exported by forge" if run is None else f"trained by forge {verb}".rstrip()),
        what=what,
        started_from="" if request.adapter or run is None else last_part(origin),
        samples=f"{int(samples):,}" if samples.isdigit() else "",
        verb=verb,
        architecture=architecture,
        dtype=request.dtype,
        steps=f"{steps:,}",
        figures=figures,
        data=[] if run is None else _data(run),
        settings=[] if run is None else _settings(run),
        qat=_qat(request),
        file=None if file is None else shlex.quote(file),
        chat_template=chat_template,
        peft=request.adapter and not request.merge,
        auto_class=_auto_class(architecture),
        reward=reward,
        media=media and ", ".join(["text", *media[:-1]]) + f" and {media[-1]}",
        labels=len(labels) if (labels := getattr(request.task, "labels", ())) else 0,
        base=last_part(request.base),
        proofs=proofs,
        versions=_versions(),
    )


def _qat(request: ExportRequest) -> str:
    """Say what quantization-aware training has to do with an export; "" of a run without."""
    if (kind := request.trained_for) is None:
        return ""
    trained = f"Quantization-aware training: weights were rounded to {kind} wherever the model computed."
    if request.format != "gguf":
        return (
            f"{trained} These are the unrounded ones, and held-out figures are of rounded ones, as `forge export --format "
            "gguf` writes them from the run."
        )
    if request.dtype == kind:
        return f"{trained} Held-out figures are those of the numbers in this file."
    return (
        f"{trained} This file is {request.dtype}, which is not the type that the run trained for: held-out figures are of "
        f"numbers in {kind}, as `forge export --format gguf` writes them from the run without `--dtype`."
    )


def _media_of(folder: Path) -> list[str]:
    """Return what the processor of a directory takes beside text; [] without one."""
    written = [(folder / name).read_text(encoding="utf-8") for name in _PROCESSOR if (folder / name).is_file()]
    found = [name for name, key in _TAKES.items() if any(key in text for text in written)]
    return found or ["images"] * bool(written)


def _auto_class(architecture: str) -> str:
    """Return the name of transformers' auto class that loads a class of models."""
    for end, name in (("ForSequenceClassification", "SequenceClassification"), ("ForConditionalGeneration", "MultimodalLM")):
        if end in architecture:
            return f"AutoModelFor{name}"
    return "AutoModel" if architecture.endswith("Model") and "LMHead" not in architecture else "AutoModelForCausalLM"


def _head(request: ExportRequest, verb: str, origin: str, *, media: Sequence[str]) -> str:
    """Write the metadata that the Hub reads, as YAML."""
    from huggingface_hub import ModelCardData

    peft, gguf = request.adapter and not request.merge, request.format == "gguf"
    on_hub = is_hub_form(origin) and not os.path.exists(origin)
    if request.run is not None:
        on_hub = on_hub and str(read_json(request.run / "run.json").get("model")).startswith("hub:")
    data = ModelCardData(
        # The Hub knows no other base than its own.
        base_model=origin if on_hub else None,
        library_name="gguf" if gguf else "peft" if peft else "transformers",
        pipeline_tag=f"{media[0].removesuffix('s')}-text-to-text"
        if media and not gguf and request.task == "causal"
        else _PIPELINES.get(request.task, "text-classification"),
        tags=["forge", *([verb] if verb else []), *(["gguf"] if gguf else [])],
    )
    return data.to_yaml().strip()


def _figures(run: Path, samples: str) -> tuple[int, list[tuple[str, str, str]]]:
    """Read from metrics.jsonl the steps up to an export, and (name, first, last) of each figure."""
    most = int(samples) if samples.isdigit() else None
    held: list[dict[str, Any]] = []
    steps: list[dict[str, Any]] = []
    step = 0
    for line in _lines(run / "metrics.jsonl"):
        if not isinstance(line.get("step"), int):
            continue
        if isinstance(line.get("samples"), int):
            if most is not None and line["samples"] > most:
                break
            steps.append(line)
            step = line["step"]
        elif line["step"] <= step:
            held.append(line)
    rows = [("training loss", steps[0].get("loss"), steps[-1].get("loss"))] if steps else []
    for name in held[-1] if held else {}:
        plain = name.removeprefix("exported_")
        if plain.startswith("eval_") and not name.endswith(_COUNTS):
            rows.append((name, held[0].get(plain) if held[0]["step"] == 0 else None, held[-1][name]))
    rows += _scores(run, samples)
    return step, [(name, _number(first), _number(last)) for name, first, last in rows]


def _scores(run: Path, samples: str) -> list[tuple[str, Any, Any]]:
    """Read what `forge eval` measured: (task and metric, of the base, of this export)."""
    before, after = (read_json(run / "evals" / f"{name}.json").get("results", {}) for name in ("before", f"samples_{samples}"))
    return [
        (f"{task}: {metric}", before.get(task, {}).get(metric), value)
        for task, found in after.items()
        for metric, value in found.items()
        if not metric.partition(" ")[0].endswith("_stderr")
    ]


def _number(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def _data(run: Path) -> list[str]:
    """Describe each token store of a run: rows, tokens, sources, fingerprint."""
    lines = []
    for file in sorted((run / "data").glob("*/store.json")):
        try:
            store = json.loads(file.read_text(encoding="utf-8"))
            account = store.get("accounting") or {}
            lost = "".join(f", dropped {count:,} ({reason})" for reason, count in (account.get("dropped") or {}).items())
            names = ", ".join(last_part(str(source.get("name"))) for source in store.get("sources") or [])
            lines.append(
                f"{file.parent.name}: {counted(account.get('read', 0), 'rows')} read, {account.get('kept', 0):,} kept{lost}; "
                f"{counted(store.get('tokens', 0), 'tokens')}; from {names}; fingerprint `{store.get('fingerprint')}`"
            )
        except (OSError, ValueError, AttributeError, TypeError) as error:
            raise SettingsError(f"{file}: is not what a run writes ({error}). It is damaged; put it back.") from error
    return lines


def _settings(run: Path) -> list[tuple[str, str, str]]:
    """Return (name, value, origin) of the settings that were given or chosen."""
    origins = dict(_ORIGIN.findall((run / "config.yaml").read_text(encoding="utf-8")))
    return [
        (name, _cell(_public(name, value)), _cell(_public_origin(origins.get(name, ""))))
        for name, value in run_values(run).items()
        if origins.get(name) != "default" and value is not None and name not in _OMITTED
    ]


def _public(name: str, value: Any) -> Any:
    """Reduce the value of a path setting to its last part."""
    if _PATH_SETTING.search(name) is None:
        return value
    return [last_part(str(each)) for each in value] if isinstance(value, list) else last_part(str(value))


def _public_origin(origin: str) -> str:
    """Reduce the path of a recipe to its last part."""
    kind, _, place = origin.partition(" ")
    return f"recipe {last_part(place)}" if kind == "recipe" and place else origin


def _cell(value: Any) -> str:
    """Write a value as a cell of a Markdown table, without paths of this machine."""
    return str(redact(value)).replace("|", "\\|").replace("\n", " ")


def _versions() -> list[str]:
    found = [f"{name} {import_module(name).__version__}" for name in _PACKAGES]
    for name in _OTHERS:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return found


def _lines(file: Path) -> list[dict[str, Any]]:
    """Read the JSON objects of a JSONL file; a line that a kill tore is left out."""
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    found = []
    for line in text.splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return [line for line in found if isinstance(line, dict)]
