"""The settings of this room: which model, and where and when it is saved."""

import attrs


def _text(_instance: object, attribute: "attrs.Attribute[str]", value: object) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{attribute.name} must be a string; got {value!r}")
    if not value.strip():
        raise ValueError(f"{attribute.name} must not be empty")


def _count(_instance: object, attribute: "attrs.Attribute[int]", value: object) -> None:
    # bool is an int to Python; `save_samples: yes` in a recipe is a mistake, not one sample.
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{attribute.name} must be a whole number; got {value!r}")
    if value < 0:
        raise ValueError(f"{attribute.name} must be 0 or more; got {value}")


def _switch(_instance: object, attribute: "attrs.Attribute[bool]", value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{attribute.name} must be true or false; got {value!r}")


@attrs.frozen(kw_only=True)
class ModelSettings:
    """Which model is trained."""

    model_path: str = attrs.field(validator=_text)
    """Directory of the model to start from (config.json and safetensors), or its name on the Hugging Face Hub (org/name)."""


@attrs.frozen(kw_only=True)
class CheckpointSettings:
    """Where the run writes, and when it exports the model."""

    ckpt_output_dir: str = attrs.field(validator=_text)
    """Directory of the run: configuration, metrics, log and exported models."""

    save_samples: int = attrs.field(default=0, validator=_count)
    """Export the model whenever this many more samples were seen; 0 exports at the end only."""

    checkpoint_at_epoch: bool = attrs.field(default=False, validator=_switch)
    """Export the model at the end of every epoch too."""
