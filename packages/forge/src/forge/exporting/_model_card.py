"""What was exported, and the run that it comes from → README.md, with which a stranger can tell what the model is and load it.

It names no place on this machine: paths become their last part, and addresses lose their user and their query.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import attrs
import yaml

from forge._errors import SettingsError
from forge.exporting._redact import is_hub_form, nameless, place_name
from forge.run._directories import run_values
from forge.run._resume import DIVISION

_ELSEWHERE = frozenset({"model_path", "ckpt_output_dir", "data_path", "eval_data_path"})
_ORIGIN = re.compile(r"^(\w+): .*  # ((?:(?!  # ).)*)$", re.MULTILINE)
_PLACE = re.compile(r"(_path|_cache|_dir)$|^preprocess$")
"""Settings whose whole value is a path, or a list of them."""

_PACKAGES = ("forge", "forge_data", "forge_packing", "forge_accel", "forge_dist", "forge_algos")
_OTHERS = ("torch", "transformers", "peft", "gguf")


@attrs.frozen(kw_only=True)
class Exported:
    """What a model card is about."""

    run: Path | None
    """The run directory; None of a model of unknown origin."""
    folder: Path
    """What was exported: `hf_format/samples_N` of the run, say."""
    merged: bool
    adapter: bool
    base: str
    """Directory or hub name of an adapter's base; of a whole model its own directory."""
    dtype: str
    file: str | None
    """The GGUF file beside the card."""
    proofs: tuple[str, ...]
    """Sentences that say how it was compared."""
    architecture: str
    template: bool
    """Whether the tokenizer has a chat template."""


def model_card(card: Exported) -> str:
    """README.md in the form of the Hugging Face Hub: a head in YAML, then text."""
    verb = _verb(card.run)
    parts = [_head(card, verb), f"# {_title(card, verb)}", _about(card, verb)]
    if card.run is not None:
        parts += [_losses(card), _data(card.run), _settings(card.run)]
    parts += [
        "## How to load it\n\n" + _loading(card),
        "## How it was checked\n\n" + "\n".join(f"- {proof}" for proof in card.proofs),
        f"## Versions\n\nWritten by {', '.join(_versions())}.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _head(card: Exported, verb: str) -> str:
    peft = card.adapter and not card.merged
    head: dict[str, Any] = {
        "library_name": "gguf" if card.file else "peft" if peft else "transformers",
        "tags": ["forge", *([verb] if verb else []), *(["gguf"] if card.file else [])],
    }
    if not _is_reward(card):
        head["pipeline_tag"] = "text-generation"
    origin = _origin(card)
    if _of_hub(card, origin):  # the Hub knows no other base than its own
        head["base_model"] = origin
    return f"---\n{yaml.safe_dump(head, sort_keys=True).strip()}\n---"


def _origin(card: Exported) -> str:
    """What was trained: an adapter's base, or what the run of a whole model began with."""
    return card.base if card.adapter or card.run is None else str(run_values(card.run)["model_path"])


def _of_hub(card: Exported, origin: str) -> bool:
    if not is_hub_form(origin) or os.path.exists(origin):
        return False
    return card.run is None or str(_json(card.run / "run.json").get("model")).startswith("hub:")


def _title(card: Exported, verb: str) -> str:
    how = "exported by forge" if card.run is None else f"trained by forge {verb}".rstrip()
    return f"{place_name(_origin(card))}, {how}"


def _about(card: Exported, verb: str) -> str:
    if card.adapter:
        what = (
            f"An adapter merged into its base, {place_name(card.base)}"
            if card.merged
            else f"An adapter for {place_name(card.base)}"
        )
    else:
        what = "A whole model"
    started = "" if card.adapter or card.run is None else f", trained from {place_name(_origin(card))}"
    at = card.folder.name.removeprefix("samples_")
    seen = f" after {int(at):,} samples" if card.run is not None and at.isdigit() else ""
    seen += f" of `forge {verb}`" if seen and verb else ""
    return f"{what}{started}{seen}. {card.architecture}, weights in {card.dtype}."


def _losses(card: Exported) -> str:
    """From metrics.jsonl: what was measured before the first step and last before this export, and the training losses."""
    assert card.run is not None
    at = card.folder.name.removeprefix("samples_")
    most = int(at) if at.isdigit() else None
    held: list[dict[str, Any]] = []
    steps: list[dict[str, Any]] = []
    step = 0
    for line in _lines(card.run / "metrics.jsonl"):
        if not isinstance(line.get("step"), int):
            continue
        if isinstance(line.get("samples"), int):
            if most is not None and line["samples"] > most:
                break
            steps.append(line)
            step = line["step"]
        elif line["step"] <= step:
            held.append(line)
    rows = []
    if steps:
        rows.append(("training loss", steps[0].get("loss"), steps[-1].get("loss")))
    names = [name for name in (held[-1] if held else {}) if name.startswith(("eval_", "exported_eval_"))]
    for name in names:
        plain = name.removeprefix("exported_")
        if not name.endswith(("_tokens", "_pairs", "_answers", "_prompts")):
            rows.append((name, held[0].get(plain) if plain in held[0] and held[0]["step"] == 0 else None, held[-1][name]))
    if not rows:
        return ""
    table = "\n".join(f"| {name} | {_figure(before)} | {_figure(after)} |" for name, before, after in rows)
    return (
        f"## What was measured\n\n| figure | at first | at this export ({step:,} steps) |\n|---|---|---|\n{table}\n\n"
        "Losses are in nats per learned token, or what the verb's objective says; `eval_` is held-out data, first before any training."
    )


def _figure(value: Any) -> str:
    return (
        ""
        if value is None
        else f"{value:.4f}"
        if isinstance(value, float)
        else f"{value:,}"
        if isinstance(value, int)
        else str(value)
    )


def _data(run: Path) -> str:
    stores = sorted((run / "data").glob("*/store.json"))
    lines = []
    for file in stores:
        try:
            store = json.loads(file.read_text(encoding="utf-8"))
            account = store.get("accounting") or {}
            lost = "".join(f", dropped {count:,} ({reason})" for reason, count in (account.get("dropped") or {}).items())
            names = ", ".join(place_name(str(source.get("name"))) for source in store.get("sources") or [])
            lines.append(
                f"- {file.parent.name}: {account.get('read', 0):,} rows read, {account.get('kept', 0):,} kept{lost}; "
                f"{store.get('tokens', 0):,} tokens; from {names}; fingerprint `{store.get('fingerprint')}`"
            )
        except (OSError, ValueError, AttributeError, TypeError) as error:
            raise SettingsError(f"{file}: is not what a run writes ({error}). It is damaged; put it back.") from error
    return "## Data\n\n" + "\n".join(lines) if lines else ""


def _settings(run: Path) -> str:
    """Those that somebody or something chose; not where files lie or how the work was divided, which change no step."""
    text = (run / "config.yaml").read_text(encoding="utf-8")
    origins = dict(_ORIGIN.findall(text))
    rows = [
        f"| {name} | {_cell(_told(name, value))} | {_cell(_source(origins.get(name, '')))} |"
        for name, value in run_values(run).items()
        if origins.get(name) != "default" and value is not None and name not in DIVISION and name not in _ELSEWHERE
    ]
    return (
        "## Settings that are not the default\n\n| setting | value | from |\n|---|---|---|\n" + "\n".join(rows) if rows else ""
    )


def _told(name: str, value: Any) -> Any:
    if _PLACE.search(name) is None:
        return value
    return [place_name(str(each)) for each in value] if isinstance(value, list) else place_name(str(value))


def _source(origin: str) -> str:
    kind, _, place = origin.partition(" ")
    return f"recipe {place_name(place)}" if kind == "recipe" and place else origin


def _cell(value: Any) -> str:
    return str(nameless(value)).replace("|", "\\|").replace("\n", " ")


def _loading(card: Exported) -> str:
    if card.file is not None:
        return f"```shell\nllama-cli -m {shlex.quote(card.file)}\n```\n\nThe tokenizer {'and the chat template are' if card.template else 'is'} in the file."
    if card.adapter and not card.merged:
        kind = "AutoModelForSequenceClassification" if _is_reward(card) else "AutoModelForCausalLM"
        labels = ", num_labels=1" if _is_reward(card) else ""
        return (
            "```python\nfrom peft import PeftModel\n"
            f"from transformers import {kind}\n\n"
            f'base = {kind}.from_pretrained("{place_name(card.base)}"{labels})  # where the base model lies\n'
            'model = PeftModel.from_pretrained(base, "PATH_OF_THIS_DIRECTORY")\n```'
        )
    kind = "AutoModelForSequenceClassification" if _is_reward(card) else "AutoModelForCausalLM"
    return (
        f"```python\nfrom transformers import {kind}, AutoTokenizer\n\n"
        f'model = {kind}.from_pretrained("PATH_OF_THIS_DIRECTORY")\n'
        'tokenizer = AutoTokenizer.from_pretrained("PATH_OF_THIS_DIRECTORY")\n```'
    )


def _is_reward(card: Exported) -> bool:
    return "ForSequenceClassification" in card.architecture


def _verb(run: Path | None) -> str:
    return "" if run is None else str(_json(run / "run.json").get("verb", ""))


def _versions() -> list[str]:
    found = [f"{name} {import_module(name).__version__}" for name in _PACKAGES]
    for name in _OTHERS:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return found


def _json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _lines(file: Path) -> list[dict[str, Any]]:
    """Those that can be read: a kill may have torn one."""
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
