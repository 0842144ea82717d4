"""Tiny models that take videos: those of images, with a video processor of small frames and a template that writes videos."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import media_grids as grids
import media_tiles as tiles
from media_parts import SIDE, Made, area, new

Make = Callable[[], Made]

_ANY = "{% if part['type'] != 'text' %}"
_QWEN = "<|vision_start|><|video_pad|><|vision_end|>"
_SECOND = {"do_sample_frames": True, "fps": 2}
_FOUR = {"do_sample_frames": True, "num_frames": 4}


def _filmed(make: Make, placeholder: str, videos: str, **fields: Any) -> Made:
    """Give a model of images a video processor, and have its template write `placeholder` for a video."""
    config, made = make()
    first = f"{{% if part['type'] == 'video' %}}{placeholder}{{% elif part['type'] != 'text' %}}"
    made.chat_template = made.tokenizer.chat_template = made.chat_template.replace(_ANY, first)
    made.video_processor = new(videos, **fields)
    return config, made


def _grids(make: Make, videos: str, placeholder: str = _QWEN, **fields: Any) -> Made:
    return _filmed(make, placeholder, videos, patch_size=14, size=area(1, 64), **fields)


qwen3_vl = partial(_grids, grids.qwen3_vl, "Qwen3VLVideoProcessor", fps=3)
qwen3_5 = partial(_grids, grids.qwen3_5, "Qwen3VLVideoProcessor")
qwen2_5_vl = partial(_grids, grids.qwen2_5_vl, "Qwen2VLVideoProcessor", **_SECOND)
qwen2_vl = partial(_grids, grids.qwen2_vl, "Qwen2VLVideoProcessor")
qwen2_5_omni = partial(_grids, grids.qwen2_5_omni, "Qwen2VLVideoProcessor", **_SECOND)
video_llama3 = partial(_grids, grids.video_llama3, "VideoLlama3VideoProcessor", "<|video_pad|>", **_SECOND)

_GLM = "<|begin_of_video|><|video|><|end_of_video|>"
glm4v = partial(_filmed, grids.glm4v, _GLM, "Glm4vVideoProcessor", size=area(2, 64))
glm46v = partial(_filmed, grids.glm46v, _GLM, "Glm46VVideoProcessor", size=area(2, 64))

_MARK = "<video>"
internvl = partial(_filmed, tiles.internvl, _MARK, "InternVLVideoProcessor", size=SIDE, **_FOUR)
internvl_whole = partial(_filmed, tiles.internvl, _MARK, "InternVLVideoProcessor", size=SIDE)
llava_onevision = partial(_filmed, tiles.llava_onevision, _MARK, "LlavaOnevisionVideoProcessor", size=SIDE, **_FOUR)
_EDGE = {"size": {"longest_edge": 28}, "max_image_size": {"longest_edge": 28}, "fps": 1}
smolvlm = partial(_filmed, tiles.smolvlm, _MARK, "SmolVLMVideoProcessor", **_EDGE, **_FOUR)
_NEXT = {"size": {"shortest_edge": 28}, "crop_size": SIDE}
llava_next_video = partial(_filmed, tiles.llava_next_video, _MARK, "LlavaNextVideoVideoProcessor", **_NEXT, **_FOUR)
video_llava = partial(_filmed, tiles.video_llava, _MARK, "VideoLlavaVideoProcessor", **_NEXT, **_FOUR)
_SOFT = {"patch_size": 14, "max_soft_tokens": 70, "pooling_kernel_size": 2, "num_frames": 3}
gemma4 = partial(_filmed, tiles.gemma4, "<|video|>", "Gemma4VideoProcessor", **_SOFT)
gemma4_seen = partial(_filmed, tiles.gemma4_seen, "<|video|>", "Gemma4VideoProcessor", **_SOFT)
gemma4_unified = partial(_filmed, tiles.gemma4_unified, "<|video|>", "Gemma4UnifiedVideoProcessor", **_SOFT)

qwen3_omni = partial(_grids, grids.qwen3_omni, "Qwen2VLVideoProcessor", **_SECOND)
qwen4_exp = partial(_grids, grids.qwen4_exp, "Qwen3VLVideoProcessor")
exaone4_5 = partial(_grids, grids.exaone4_5, "Qwen2VLVideoProcessor", **_SECOND)
lfm3_vl = partial(_grids, grids.lfm3_vl, "Qwen2VLVideoProcessor", **_SECOND)
glm4v_moe = partial(_filmed, grids.glm4v_moe, _GLM, "Glm4vVideoProcessor", size=area(2, 64))
glm_ocr = partial(_filmed, grids.glm_ocr, _GLM, "Glm46VVideoProcessor", size=area(2, 64))
_SQUARE = {"height": 56, "width": 56}
_BUDGET = {"min_image_tokens": 1, "max_image_tokens": 64}
glm5_next = partial(_filmed, grids.glm5_next, _GLM, "Glm5NextVideoProcessor", **_BUDGET)
_ERNIE = {"draw_on_frames": False, "min_frames": 2, "max_frames": 8, "patch_size": 14, "size": area(3, 64)}
ernie4_5_vl_moe = partial(_filmed, grids.ernie4_5_vl_moe, "<|VS|><|VIDEO|><|VE|>", "Ernie4_5_VLMoeVideoProcessor", **_ERNIE)
kimi_k25 = partial(
    _filmed,
    grids.kimi_k25,
    "<|kimi_k25_video_placeholder|>",
    "Kimi_K25VideoProcessor",
    size={"max_height": 112, "max_width": 112},
)
minicpm_v = partial(
    _filmed, grids.minicpm_v, "<|video_pad|>", "MiniCPMV4_6VideoProcessor", scale_resolution=112, max_slice_nums=4
)
minimax_m3_vl = partial(_filmed, grids.minimax_m3_vl, "]<]video[>[", "MiniMaxM3VLVideoProcessor")
muse_glimmer = partial(_filmed, grids.muse_glimmer, "<|video|>", "MuseGlimmerVideoProcessor", max_video_frame_tokens=16)
muse_spark = partial(_filmed, grids.muse_spark, "<|video|>", "MuseGlimmerVideoProcessor", max_video_frame_tokens=16)
_HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
_PIXELS = {"size": _SQUARE, "do_rescale": True, "do_normalize": True, **_HALF}
molmo2 = partial(_filmed, tiles.molmo2, "<|video|>", "Molmo2VideoProcessor", **_PIXELS)
perception_lm = partial(_filmed, tiles.perception_lm, "<|video|>", "PerceptionLMVideoProcessor", size=_SQUARE, **_FOUR)
