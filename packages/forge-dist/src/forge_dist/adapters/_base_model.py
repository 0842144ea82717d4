"""The base model of an adapter directory, known by its content and not only by its path.

PEFT attaches an adapter to any base whose shapes fit, without a word where the weights differ.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from forge_dist._errors import ModelError
from forge_dist.loading._identity import model_identity
from forge_dist.loading._model_path import find_path, is_hub_name
from forge_dist.loading._quantization import quantization_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BASE_FILE = "forge_base.json"
"""File of an adapter directory with the identity and the quantization of its base."""


@attrs.frozen(kw_only=True)
class AdapterBase:
    """The base model of an adapter directory."""

    path: str
    """Path that adapter_config.json names: a directory, or a hub name."""

    identity: str | None
    """`model_identity` of the base when the adapter was written; None in directories that PEFT wrote."""

    quantization: dict[str, Any] | None
    """Quantization of the base during training, as transformers' configuration of it; None: it was not quantized."""


def adapter_base(directory: str | Path) -> AdapterBase:
    """Return the base model of the adapter in `directory`, without reading weights.

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
    base_file = folder / BASE_FILE
    if not base_file.is_file():
        return AdapterBase(path=str(path), identity=None, quantization=None)
    try:
        found = json.loads(base_file.read_text(encoding="utf-8"))
        return AdapterBase(path=str(path), identity=str(found["identity"]), quantization=found["quantization"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"{base_file} is not what an export writes ({error!r}): export the adapter again, or remove it"
        ) from error


def check_base(directory: str | Path) -> AdapterBase:
    """Return `adapter_base` if that base is still the one that the adapter was trained beside.

    Its weights are read to compare.

    Raises:
        ModelError: as `adapter_base`, or the base is another one.
    """
    base = adapter_base(directory)
    if base.identity is None or (now := identity_of(base.path)) is None or now == base.identity:
        return base
    raise ModelError(
        f"{directory} is an adapter of another base model than {base.path} holds now ({base.identity[:12]} then, {now[:12]} "
        "now): its config.json or its weights changed. Put them back, or name the right base in adapter_config.json "
        "(base_model_name_or_path)"
    )


def write_base_file(model: "PreTrainedModel", path: str | None, folder: Path) -> None:
    """Write forge_base.json for the base `model`, which was read from `path`.

    Nothing is written where `path` is neither a directory nor a hub name.
    """
    identity = identity_of(path) if path else None
    if identity is None:
        return
    config: Any = quantization_of(model)
    content = {"identity": identity, "quantization": None if config is None else config.to_dict()}
    (folder / BASE_FILE).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def identity_of(path: str) -> str | None:
    """Return `model_identity` of `path`; None where it is neither a directory nor a hub name.

    Loading it raises the error for that.
    """
    found = find_path(path)
    if found is None:
        return model_identity(path) if is_hub_name(path) else None
    return model_identity(str(found)) if found.is_dir() else None
