"""File or frames of a video → the frames that a processor chooses of it, and their times.

They are those of transformers' `load_video` with PyAV, upright as its other decoders have them.
"""

import hashlib
import io
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import attrs
import numpy as np

from forge_data._errors import DataError
from forge_data._media import Kind, Media
from forge_data._values import counted
from forge_data.media._read import checked_bytes, media_error, read_image

if TYPE_CHECKING:
    from numpy.typing import NDArray

Sample = Callable[[Any], Any]
"""Chooses frames: a video's `VideoMetadata` → their numbers."""
_MOST_BYTES = 1 << 33
"""Bytes of a video's frames from which on it is refused."""
_REMEDY = "give an MP4, MOV, WebM or MKV file"
_SAMPLE = 'have the model\'s video processor take fewer ("do_sample_frames": true, "fps" in its file)'


class Video(NamedTuple):
    """A decoded video."""

    frames: "NDArray[np.uint8]"
    """uint8[F, H, W, 3], those that were chosen."""
    about: Mapping[str, Any]
    """Arguments of transformers' `VideoMetadata`."""

    def first(self, number: int) -> Self:
        """Return it with its first frames alone."""
        return self._replace(frames=self.frames[:number], about={**self.about, "frames_indices": np.arange(number)})

    def metadata(self) -> Any:
        """Make a `VideoMetadata`, which processors change."""
        from transformers.video_utils import VideoMetadata

        return VideoMetadata(**self.about)


class Chosen(Exception):  # noqa: N818 - no error, but how a call ends that is made to learn something
    """How a processor chooses the frames of a file."""

    def __init__(self, sample: Sample | None) -> None:
        super().__init__()
        self.sample = sample


def kind_of(decoded: Any) -> Kind:
    """Return of which kind a decoded medium is."""
    if isinstance(decoded, Video):
        return "video"
    return "audio" if isinstance(decoded, np.ndarray) else "image"


def read_video(medium: Media, place: str, sample: Sample | None) -> tuple[Video, Media]:
    """Decode a video, and say by SHA-256 what was read.

    Args:
        medium: the video; where it, or a frame of it, has a `sha256`, its bytes must still have it.
        place: of its row, such as `train.jsonl:417`.
        sample: chooses frames of a file; None takes all. Of a list of frames all are taken.

    Raises:
        DataError: it is missing, unreadable, cut off, no video, of no frames, too large, or another one than before.
    """
    if medium.frames:
        return _of_images(medium, place)
    data, sha256 = checked_bytes(medium, place)
    return _decoded(data, medium, place, sample), attrs.evolve(medium, sha256=sha256)


def _of_images(medium: Media, place: str) -> tuple[Video, Media]:
    pixels, frames = list[Any](), list[Media]()
    for frame in medium.frames:
        opened, sha256 = read_image(frame, place)
        with opened:
            pixels.append(np.asarray(opened))
        frames.append(attrs.evolve(frame, sha256=sha256))
        if pixels[-1].shape != pixels[0].shape:
            first, other = (f"{each.shape[1]} x {each.shape[0]}" for each in (pixels[0], pixels[-1]))
            raise media_error(
                frame, place, f"is a frame of {other} pixels, and the first has {first}", "give all frames one size"
            )
    number, (height, width, _) = len(pixels), pixels[0].shape
    about: dict[str, Any] = {
        "total_num_frames": number,
        "fps": medium.fps,
        "duration": None if medium.fps is None else number / medium.fps,
        "height": height,
        "width": width,
        # An array, as processors add to a list.
        "frames_indices": np.arange(number),
    }
    digest = hashlib.sha256(" ".join([*(each.sha256 for each in frames), str(medium.fps)]).encode()).hexdigest()
    return Video(np.stack(pixels), about), attrs.evolve(medium, sha256=digest, frames=tuple(frames))


def _decoded(data: bytes, medium: Media, place: str, sample: Sample | None) -> Video:
    try:
        import av
    except ImportError as error:
        raise DataError(
            f"{place}: field {medium.field}: videos are read by PyAV, which cannot be imported ({error}); install "
            "forge-data[video], or give a list of frames"
        ) from error
    try:
        with av.open(io.BytesIO(data), "r") as container:
            if "_pipe" in container.format.name:
                raise media_error(medium, place, "is an image, and no video", "give the frames of one as a list in the list")
            if not container.streams.video:
                raise media_error(medium, place, "has no pictures, but sound alone", _REMEDY)
            return _frames(container, io.BytesIO(data), medium, place, sample)
    except av.FFmpegError as error:
        line = str(error.strerror or error).partition("\n")[0]
        raise media_error(medium, place, f"cannot be read as a video: {line}", _REMEDY) from error


def _frames(container: Any, again: io.BytesIO, medium: Media, place: str, sample: Sample | None) -> Video:
    stream = container.streams.video[0]
    # Matroska and WebM do not say how many they have.
    number, rate = stream.frames or _counted(again), stream.average_rate
    if not number:
        raise media_error(medium, place, "is a video of no frames", "mend it, or take the row out")
    if not rate:
        raise media_error(medium, place, "does not say how many frames a second has", "encode it again, at a fixed rate")
    from transformers.video_utils import VideoMetadata

    about: dict[str, Any] = {
        "total_num_frames": int(number),
        "fps": float(rate),
        "duration": float(number / rate),
        "video_backend": "pyav",
        "height": stream.height,
        "width": stream.width,
    }
    try:
        chosen = np.asarray(np.arange(number) if sample is None else sample(VideoMetadata(**about)))
    except Exception as error:
        # Whatever a processor's own sample_frames raises: of a video that is too short for it, say.
        raise media_error(
            medium,
            place,
            f"is a video of {counted(number, 'frames')} of which the processor cannot choose some: {error}",
            "set another number in the file of the model's video processor, or take the row out",
        ) from error
    if not len(chosen):
        raise media_error(medium, place, "is a video of which the processor chooses no frame", "take the row out")
    size = len(chosen) * stream.height * stream.width * 3
    if size > _MOST_BYTES:
        what = f"has {counted(len(chosen), 'frames')} of {stream.width} x {stream.height} pixels to be read"
        raise media_error(medium, place, f"{what}, {size / 2**30:.0f} GiB", f"make it shorter or smaller, or {_SAMPLE}")
    wanted, found = {*chosen.tolist()}, dict[int, Any]()
    last = max(wanted)
    for at, frame in enumerate(container.decode(video=0)):
        if at in wanted:
            # A phone's picture lies on its side, and says how it is turned.
            found[at] = np.rot90(frame.to_ndarray(format="rgb24"), round((frame.rotation or 0) / 90))
        if at >= last:
            break
    if missing := wanted - found.keys():
        raise media_error(
            medium,
            place,
            f"is cut off: its header tells of {counted(number, 'frames')}, and there is none from number {min(missing)} on",
            "give the whole file, or encode it again",
        )
    shapes = {each.shape for each in found.values()}
    if len(shapes) > 1:
        raise media_error(medium, place, "changes its size from frame to frame", "encode it again, at one size")
    frames = np.stack([found[at] for at in chosen.tolist()])
    return Video(frames, about | {"height": frames.shape[1], "width": frames.shape[2], "frames_indices": chosen})


def _counted(file: io.BytesIO) -> int:
    import av

    with av.open(file, "r") as container:
        return sum(bool(packet.size) for packet in container.demux(video=0))
