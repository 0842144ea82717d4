"""Setting of models that take images or audio: which of their parts train; no torch."""

from typing import Any, Literal

import attrs

Part = Literal["language_model", "vision_tower", "audio_tower", "multi_modal_projector"]

_flag: Any = attrs.validators.instance_of(bool)


@attrs.frozen(kw_only=True)
class PartSettings:
    """Parts of a model that takes images or audio: which train, and which stay as read.

    >>> PartSettings(freeze_vision_tower=False).trained
    ('language_model', 'vision_tower')
    >>> PartSettings(freeze_language_model=True)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    ValueError: freeze_language_model=True: nothing would train; set freeze_multi_modal_projector=False or ...
    """

    freeze_vision_tower: bool = attrs.field(default=True, validator=_flag)
    """Whether the vision tower stays as it was read. False trains it on rows with images: its weights with adapter=none, an
    adapter on its linear layers with lora and the like."""
    freeze_audio_tower: bool = attrs.field(default=True, validator=_flag)
    """Whether the audio tower stays as it was read. False trains it on rows with audio, in the same way."""
    freeze_multi_modal_projector: bool = attrs.field(default=True, validator=_flag)
    """Whether the projector, which turns what a tower makes of an image or a clip into vectors of the language part, stays as
    it was read. False trains it in the same way."""
    freeze_language_model: bool = attrs.field(default=False, validator=_flag)
    """Whether the language part stays as it was read, and towers or projector alone train."""

    def __attrs_post_init__(self) -> None:
        if not self.trained:
            raise ValueError(
                "freeze_language_model=True: nothing would train; set freeze_multi_modal_projector=False or "
                "freeze_vision_tower=False or freeze_audio_tower=False too"
            )

    @property
    def trained(self) -> tuple[Part, ...]:
        """Parts that train."""
        parts: tuple[Part, ...] = ("language_model", "vision_tower", "audio_tower", "multi_modal_projector")
        return tuple(part for part in parts if not getattr(self, f"freeze_{part}"))

    @property
    def beside(self) -> tuple[Part, ...]:
        """Parts that train beside the language part."""
        return tuple(part for part in self.trained if part != "language_model")
