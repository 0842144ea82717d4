"""Arrays of a processor for media of several texts ↔ those of each: joined and padded."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from forge_data._media import Kind
from forge_data.media._video import Video

if TYPE_CHECKING:
    from numpy.typing import NDArray

_SIZES = ((64, 96), (160, 48), (220, 230), (24, 24), (300, 30), (20, 240))
"""Pixels of made-up images that a processor cuts or pads in unlike ways, if it does so at all."""
_CLIPS = (0.4, 1.1, 0.25, 2.3, 0.7, 1.6)
"""Seconds of made-up audio."""
_VIDEOS = ((4, 56, 84), (2, 168, 56), (6, 56, 56), (4, 28, 84))
"""Frames, height and width of made-up videos: whole patches, as MiniMax's processor, which resizes none, takes them."""


class Joining(NamedTuple):
    """How a processor joins an array of media of several texts."""

    axis: int
    """Dimension along which one's stand behind another's."""
    fill: Any
    """What is put behind a smaller one, along the other dimensions."""
    slack: tuple[int, ...]
    """By how much sizes along each dimension differed where they were tried; 0 for `axis`."""

    def padded(self, array: "NDArray[Any]", sizes: Sequence[int]) -> "NDArray[Any]":
        """Put `fill` behind an array, up to `sizes` of its dimensions but `axis`."""
        more = [0 if at == self.axis else size - own for at, (size, own) in enumerate(zip(sizes, array.shape, strict=True))]
        return np.pad(array, [(0, each) for each in more], constant_values=self.fill) if any(more) else array


def joining(apart: "list[NDArray[Any]]", together: "NDArray[Any]", *, exactly: bool) -> Joining | None:
    """Tell how the arrays of some texts became those of all; None for no way that is known here.

    Where what is padded may differ (not `exactly`), as audio that is padded before its spectrum is made, shapes say it.
    """
    shapes = [*zip(*(array.shape for array in apart), strict=True)]
    sizes = [max(each) for each in shapes]
    for axis in range(together.ndim):
        slack = tuple(0 if at == axis else max(each) - min(each) for at, each in enumerate(shapes))
        ones = Joining(axis, fill=True, slack=slack)
        filled = np.concatenate([ones.padded(np.zeros(array.shape, dtype=np.bool_), sizes) for array in apart], axis)
        if filled.shape != together.shape:
            continue
        found = ones._replace(fill=together[filled][0] if filled.any() else together.dtype.type(0))
        if not exactly:
            return found._replace(fill=together.dtype.type(0))
        if np.array_equal(np.concatenate([found.padded(array, sizes) for array in apart], axis), together):
            return found
    return None


def alike(one: Joining, other: Joining) -> bool:
    """Tell whether arrays of one name of media of two kinds are joined in one way."""
    return one == other or (one.axis == other.axis and not any((*one.slack, *other.slack)))


def fitting(how: Joining, apart: "Sequence[NDArray[Any]]") -> Joining | None:
    """Return how arrays are joined if others are joined so too, without padding; else None."""
    others = {array.shape[: how.axis] + array.shape[how.axis + 1 :] for array in apart}
    return how if len(others) == 1 else None


def made_up_media(kind: Kind, sampling_rate: int) -> "list[Any]":
    """Make media of a kind of unlike sizes; audio at a rate in Hz."""
    match kind:
        case "image":
            return made_up_images()
        case "video":
            return _videos()
        case "audio":
            return _audio(sampling_rate)


def made_up_images() -> "list[Any]":
    """Make images of unlike sizes, by Pillow."""
    from PIL import Image as Pillow

    return [Pillow.effect_noise(size, 64).convert("RGB") for size in _SIZES]


def _videos() -> list[Video]:
    """Make videos of unlike lengths and sizes, of two frames a second."""
    noise, made = np.random.default_rng(0), list[Video]()
    for number, height, width in _VIDEOS:
        about = {"total_num_frames": number, "fps": 2.0, "duration": number / 2, "height": height, "width": width}
        frames = noise.integers(0, 256, (number, height, width, 3), dtype=np.uint8)
        made.append(Video(frames, about | {"frames_indices": np.arange(number)}))
    return made


def _audio(sampling_rate: int) -> "list[Any]":
    """Make audio float32[N] of unlike lengths, at a rate in Hz."""
    noise = np.random.default_rng(0)
    return [noise.uniform(-0.5, 0.5, int(each * sampling_rate)).astype(np.float32) for each in _CLIPS]
