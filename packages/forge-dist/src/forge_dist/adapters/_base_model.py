"""An adapter directory ↔ which base model it belongs to, by what that holds and not only by where it lies.

PEFT puts an adapter on any base whose shapes fit, and says nothing where the weights are others.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from forge_dist._errors import ModelError
from forge_dist.loading._identity import model_identity
from forge_dist.loading._model_path import find, is_hub_name
from forge_dist.loading._quantization import quantization_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BASE_FILE = "forge_base.json"


@attrs.frozen(kw_only=True)
class AdapterBase:
    """The base model of an adapter directory."""

    path: str
    """Where adapter_config.json says that it is: a directory, or a hub name."""

    identity: str | None
    """`model_identity` of the base when the adapter was written; None where the directory does not say (PEFT's own do not)."""

    quantization: dict[str, Any] | None
    """How the base was quantized while the adapter was trained, as transformers' configurations of it say it; None: it was not."""


def adapter_base(directory: str | Path) -> AdapterBase:
    """Which base model the adapter of `directory` belongs to. Reads no weights.

    Raises:
        ModelError: there is no adapter, it names no base, or forge_base.json is not what an export writes.
    """
    folder = Path(directory)
    file = folder / "adapter_config.json"
    try:
        path = json.loads(file.read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(f"{folder} is no adapter directory: its adapter_config.json cannot be read: {error}") from error
    if not path:
        raise ModelError(f"{file} does not name its base model (base_model_name_or_path)")
    note = folder / BASE_FILE
    if not note.is_file():
        return AdapterBase(path=str(path), identity=None, quantization=None)
    try:
        found = json.loads(note.read_text(encoding="utf-8"))
        return AdapterBase(path=str(path), identity=str(found["identity"]), quantization=found["quantization"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{note} is not what an export writes ({error!r}): export the adapter again, or remove it") from error


def check_base(directory: str | Path) -> AdapterBase:
    """`adapter_base`, if the base that lies there now is the one that the adapter was trained beside; its weights are read to tell.

    Raises:
        ModelError: as `adapter_base`, or it is another.
    """
    base = adapter_base(directory)
    if base.identity is None or (now := identity_of(base.path)) is None or now == base.identity:
        return base
    raise ModelError(
        f"{directory} is an adapter of another base model than {base.path} holds now ({base.identity[:12]} then, {now[:12]} now): its "
        "config.json or its weights changed. Put them back, or name the right base in adapter_config.json (base_model_name_or_path)"
    )


def note_base(model: "PreTrainedModel", path: str | None, folder: Path) -> None:
    """Write forge_base.json of the base `model`, which was read from `path`; nothing where that is neither a directory nor a hub name."""
    identity = identity_of(path) if path else None
    if identity is None:
        return
    config: Any = quantization_of(model)
    noted = {"identity": identity, "quantization": None if config is None else config.to_dict()}
    (folder / BASE_FILE).write_text(json.dumps(noted, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def identity_of(path: str) -> str | None:
    """`model_identity`; None where `path` is neither a directory here nor a hub name, which is for those who load it to say."""
    found = find(path)
    if found is None:
        return model_identity(path) if is_hub_name(path) else None
    return model_identity(str(found)) if found.is_dir() else None
