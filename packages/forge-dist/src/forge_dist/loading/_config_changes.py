"""Entries of a configuration that training changes and an export restores."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_NEEDED = {
    # Outputs are read by their names.
    "return_dict": True,
    # RWKV halves weights in place whenever it changes to evaluation mode, and an evaluation or an export would see those.
    "rescale_every": 0,
}
_AS_READ = "_config_as_read"
"""Attribute of a loaded model: the entries that were changed, as they were."""


def change_config(model: "PreTrainedModel") -> None:
    """Set the entries of a model's configuration that training needs."""
    config = model.config
    changed = {name: getattr(config, name) for name, value in _NEEDED.items() if getattr(config, name, value) != value}
    setattr(model, _AS_READ, changed)
    for name in changed:
        setattr(config, name, _NEEDED[name])


def restore_config(config: "PreTrainedConfig", model: "PreTrainedModel") -> None:
    """Set the changed entries in `config`, that of an export, to what was read."""
    for name, value in getattr(model, _AS_READ, {}).items():
        setattr(config, name, value)
