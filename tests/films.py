"""Qwen3-VL's processor with a video processor that needs no torchvision, and videos."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from transformers import AutoProcessor, AutoTokenizer, Qwen3VLConfig, Qwen3VLProcessor
from transformers.feature_extraction_utils import BatchFeature
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.video_processing_utils import VideoProcessorMixin
from transformers.video_utils import load_video, make_batched_metadata, make_batched_videos

if TYPE_CHECKING:
    from collections.abc import Sequence

MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
PLACEHOLDERS = {"image": "<|vision_start|><|image_pad|><|vision_end|>", "video": "<|vision_start|><|video_pad|><|vision_end|>"}
_PATCH, _MERGE, _TIME = 14, 2, 2
_SIDE = _PATCH * _MERGE


class Films(VideoProcessorMixin):
    """Cuts frames to whole patches, as transformers' Qwen3VLVideoProcessor lays them out; of a file 2 frames a second."""

    merge_size, temporal_patch_size, patch_size = _MERGE, _TIME, _PATCH
    do_sample_frames = True

    def sample_frames(self, metadata: Any, **_: Any) -> Any:
        """At the ends, and evenly between; 2 at least."""
        number = max(2, int(metadata.total_num_frames / metadata.fps * 2))
        return np.linspace(0, metadata.total_num_frames - 1, number).round().astype(int)

    def fetch_videos(self, video_url_or_urls: Any, sample_indices_fn: Any = None) -> Any:
        """By PyAV, where transformers' own takes torchcodec."""
        return load_video(video_url_or_urls, backend="pyav", sample_indices_fn=sample_indices_fn)

    def preprocess(
        self,
        videos: Any,
        video_metadata: Any = None,
        do_sample_frames: bool | None = None,
        return_metadata: bool = False,
        return_tensors: Any = None,
        **_: Any,
    ) -> BatchFeature:
        """Make patches float32[P, C * time * height * width] and their grid [videos, 3]."""
        given = make_batched_videos(videos)
        described = make_batched_metadata(given, video_metadata)
        if isinstance(given[0], str):
            sample = self.sample_frames if do_sample_frames is not False else None
            given, described = zip(*(self.fetch_videos(each, sample_indices_fn=sample) for each in given), strict=True)
        grids, patches = [], []
        for each in given:
            frames = np.asarray(each, dtype=np.float32) / 127.5 - 1
            frames = np.concatenate([frames, *[frames[-1:]] * (-len(frames) % _TIME)])
            high, wide = (max(1, size // _SIDE) for size in frames.shape[1:3])
            frames = np.resize(frames[:, : high * _SIDE, : wide * _SIDE], (len(frames), high * _SIDE, wide * _SIDE, 3))
            grid = len(frames) // _TIME, high * _MERGE, wide * _MERGE
            cut = frames.reshape(grid[0], _TIME, high, _MERGE, _PATCH, wide, _MERGE, _PATCH, 3)
            patches.append(cut.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(np.prod(grid), -1))
            grids.append(grid)
        made: dict[str, Any] = {"pixel_values_videos": np.concatenate(patches), "video_grid_thw": np.array(grids)}
        found = BatchFeature(made, tensor_type=return_tensors)
        return BatchFeature({**found, "video_metadata": [*described]}) if return_metadata else found


class FilmProcessor(Qwen3VLProcessor):
    """Loads its parts without AutoVideoProcessor, which needs torchvision."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
        """Transformers looks the classes of video processors up where torchvision is."""
        if argument_name == "video_processor":
            return VideoProcessorMixin
        return super().check_argument_for_proper_class(argument_name, argument)

    @classmethod
    def of(cls, tokenizer: Any) -> FilmProcessor:
        """Make it, with a tokenizer that has `MARKS`."""
        size = {"shortest_edge": _SIDE**2, "longest_edge": 9 * _SIDE**2}
        images = Qwen2VLImageProcessorPil(patch_size=_PATCH, merge_size=_MERGE, temporal_patch_size=_TIME, size=size)
        return cls(images, tokenizer, Films(), chat_template=tokenizer.chat_template)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, **_: Any) -> FilmProcessor:
        """Make it with the tokenizer of a directory."""
        return cls.of(AutoTokenizer.from_pretrained(pretrained_model_name_or_path))


AutoProcessor.register(Qwen3VLConfig, FilmProcessor, exist_ok=True)


def frames(folder: Path, name: str, number: int, size: tuple[int, int] = (32, 60)) -> list[str]:
    """Write frames of noise, of a height and a width, beside rows; return their names."""
    image = pytest.importorskip("PIL.Image")
    draw, names = np.random.default_rng([*name.encode()]), [f"{name}_{at}.png" for at in range(number)]
    for each in names:
        image.fromarray(draw.integers(0, 255, (*size, 3), dtype=np.uint8)).save(folder / each)
    return names


def film(
    file: Path, number: int = 12, rate: int = 4, size: tuple[int, int] = (48, 64), codec: str = "mpeg4", turned: int = 0
) -> Path:
    """Write a video of moving blocks, of a height and a width, by PyAV."""
    av = pytest.importorskip("av", reason="PyAV is not installed here: forge-data[video]")
    base = np.random.default_rng(number).integers(0, 255, (size[0] // 8, size[1] // 8, 3), dtype=np.uint8)
    with av.open(str(file), "w") as out:
        stream = out.add_stream(codec, rate=rate)
        stream.height, stream.width, stream.pix_fmt = *size, "yuv420p"
        for at in range(number):
            picture = np.roll(np.kron(base, np.ones((8, 8, 1), np.uint8)), 5 * at, axis=1)
            for packet in stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")):
                out.mux(packet)
        for packet in stream.encode():
            out.mux(packet)
    return file


def content(text: str, *videos: str | Sequence[str]) -> list[dict[str, Any]]:
    """Make a content with videos before its text."""
    return [*({"type": "video", "video": each} for each in videos), {"type": "text", "text": text}]
