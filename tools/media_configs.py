"""Every model family that takes images, audio or videos → a tiny configuration and its processor, for `hatch run media`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import media_clips as clips
import media_films as films
import media_grids as grids
import media_tiles as tiles
from media_parts import Made, pictures

IMAGE, AUDIO, BOTH, VIDEO = "image", "audio", "image and audio", "video"
KINDS = (IMAGE, AUDIO, BOTH, VIDEO)
"""What rows have."""
ROUNDING = "[rounding](images.md#what-is-rounding)"
"""In a cell: what comes behind the first step is not compared."""


class Family(NamedTuple):
    """A model family."""

    name: str
    """Its row of the page."""
    make: Callable[[], Made]
    kinds: tuple[str, ...] = (IMAGE,)
    """What its rows are tried with."""
    media: tuple[int, int] = (0, 2)
    """Fewest and most clips, or videos, of a row that its processor takes."""
    beside: tuple[str, ...] = (IMAGE,)
    """What stands beside videos in some rows."""
    lists: bool = True
    """Whether half of the videos are lists of frames, which need not be of one number in a row."""
    sizes: tuple[tuple[int, int], ...] = ((48, 64), (64, 48), (40, 80))
    """Heights and widths of files of videos."""
    frames: str = ""
    """Of a file, those that its processor takes."""
    plain: bool = False
    """Whether its rows are plain text with images, for it has no chat template."""
    parts: Mapping[str, Any] = {}
    """Settings of parts that train, where they are not those of all."""
    tokens: int = 640
    """Tokens of a micro-batch, at least those of a row."""
    refused: Mapping[str, str] = {}
    """Check → words of the error that it must end with."""
    drifts: tuple[str, ...] = ()
    """Checks whose first step alone must be close: AdamW makes a step of a gradient that is rounding (docs/lanes/images.md)."""
    skipped: Mapping[str, str] = {}
    """Check that is not made → what its cell says: what drifts by rounding is sampled otherwise."""


_EACH = (IMAGE, AUDIO, BOTH)
_SAMPLED = ("grpo", "grpo_all_parts")
_DRIFTS = dict.fromkeys(_SAMPLED, ROUNDING)
_PARTS_DRIFT = {"grpo_all_parts": ROUNDING}
_DEAF = {"dpo": "keep documents with media apart"}
_ONE_A_ROW = {"dpo": "pairs of answers with images"}
_NOT_JOINED = {"dpo": "arrays that are not joined"}
_SEES_AHEAD = dict.fromkeys(_SAMPLED, "prompt sees what is ahead")
_WHOLE_PATCHES = ((56, 84), (84, 56), (28, 56))
_NO_TOWER = dict.fromkeys(("all_parts", "grpo_all_parts"), "names no vision tower")


def _film(name: str, make: Callable[[], Made], frames: str, **more: Any) -> Family:
    return Family(name, make, (VIDEO,), frames=frames, tokens=1200, **more)


FAMILIES = (
    Family("Qwen3-VL", grids.qwen3_vl),
    Family("Qwen3-VL, with experts", grids.qwen3_vl_moe),
    Family("Qwen3.5", grids.qwen3_5),
    Family("Qwen3.5, with experts", grids.qwen3_5_moe),
    Family("Qwen2.5-VL", grids.qwen2_5_vl),
    Family("Qwen2-VL", grids.qwen2_vl),
    Family("Qwen3-Omni's thinker", grids.qwen3_omni),
    Family("Qwen3-Omni's thinker", grids.qwen3_omni, (AUDIO, BOTH), refused={"dpo": "keep documents with media apart"}),
    Family("Qwen2.5-Omni's thinker", grids.qwen2_5_omni, _EACH),
    Family("GLM-4.1V", grids.glm4v),
    Family("GLM-4.6V", grids.glm46v),
    Family("GLM-4.5V", grids.glm4v_moe),
    Family("GLM-OCR", grids.glm_ocr),
    Family("Kimi K2.5", grids.kimi_k25),
    Family("InternVL", tiles.internvl),
    Family("LLaVA", tiles.llava),
    Family("ViP-LLaVA", tiles.vipllava),
    Family("LLaVA-NeXT (Granite Vision 3)", tiles.llava_next),
    Family("LLaVA-NeXT-Video", tiles.llava_next_video),
    Family("LLaVA-OneVision", tiles.llava_onevision),
    Family("Pixtral as LLaVA", grids.pixtral),
    Family("Mistral 3", grids.mistral3),
    Family("LightOnOCR", grids.lighton_ocr),
    Family("Gemma 3", tiles.gemma3),
    Family("Gemma 4", tiles.gemma4, skipped=_DRIFTS),
    Family("Gemma 4, whose tokens of an image see each other", tiles.gemma4_seen),
    Family("Gemma 4 Unified", tiles.gemma4_unified, refused=_NO_TOWER, drifts=("dpo", "kto"), skipped=_DRIFTS),
    Family("Aya Vision", tiles.aya_vision),
    Family("Command A Vision", tiles.cohere2_vision),
    Family("Granite 4 Vision", tiles.granite4_vision),
    Family("Idefics 2", tiles.idefics2),
    Family("Idefics 3", tiles.idefics3),
    Family("SmolVLM", tiles.smolvlm),
    Family("Llama 3.2 Vision (Mllama)", tiles.mllama, refused=_ONE_A_ROW),
    Family("Ovis 2", tiles.ovis2),
    Family("LFM2-VL", grids.lfm2_vl),
    Family("LFM3-VL", grids.lfm3_vl),
    Family("PaddleOCR-VL", grids.paddleocr_vl),
    Family("DeepSeek-VL", tiles.deepseek_vl),
    Family("DeepSeek-VL, hybrid", tiles.deepseek_vl_hybrid),
    Family("Janus", tiles.janus, refused=dict.fromkeys(_SAMPLED, "logits_processor")),
    Family("Aria", tiles.aria, skipped=_PARTS_DRIFT),
    Family("VideoLLaMA 3", grids.video_llama3),
    Family("MiniCPM-V 4.6", grids.minicpm_v),
    Family("EXAONE 4.5", grids.exaone4_5),
    Family("MiniMax M3 VL", grids.minimax_m3_vl),
    Family("Muse Glimmer", grids.muse_glimmer),
    Family("Ernie 4.5 VL", grids.ernie4_5_vl_moe),
    Family("HunYuan-VL", grids.hunyuan_vl, refused=_ONE_A_ROW, skipped=_DRIFTS),
    Family("Step 3.7", tiles.step3p7),
    Family("Molmo 2", tiles.molmo2, refused=_ONE_A_ROW, skipped=_DRIFTS),
    Family("DeepSeek-OCR 2", tiles.deepseek_ocr2, tokens=2000),
    Family("Qwen4-Exp", grids.qwen4_exp),
    Family("GLM-5 Next", grids.glm5_next, refused=_ONE_A_ROW, drifts=("kto",), skipped=_DRIFTS),
    Family("Inkling", grids.inkling, _EACH),
    Family("Mistral Large 4", grids.mistral_large4),
    Family("Muse Spark", grids.muse_spark, (IMAGE, BOTH)),
    Family("Muse Spark", grids.muse_spark, (AUDIO,), parts={"freeze_multi_modal_projector": True}),
    Family("Perception LM, `vision_input_type=vanilla`", tiles.perception_lm),
    Family("PaliGemma, plain text", tiles.paligemma, plain=True, refused=_SEES_AHEAD),
    Family("PaliGemma 2, plain text", tiles.paligemma2, plain=True, refused=_SEES_AHEAD),
    Family("Video-LLaVA", tiles.video_llava),
    Family("Gemma 3n", tiles.gemma3n, tokens=2000, skipped=_PARTS_DRIFT),
    Family("Qwen2-Audio", pictures.FAMILIES["qwen2-audio"], (AUDIO,)),
    Family("GLM-ASR", pictures.FAMILIES["glm-asr"], (AUDIO,), media=(0, 1)),
    Family("Qwen3-ASR", pictures.FAMILIES["qwen3-asr"], (AUDIO,), media=(1, 1)),
    Family("Audio Flamingo 3", clips.audio_flamingo3, (AUDIO,), media=(0, 1)),
    Family("Fun-ASR-Nano", clips.fun_asr_nano, (AUDIO,), media=(0, 1)),
    Family("Granite Speech", clips.granite_speech, (AUDIO,), refused=_DEAF),
    Family("Gemma 4, with its tower of audio", tiles.gemma4_audio, (AUDIO, BOTH), skipped=_DRIFTS),
    _film("Qwen3-VL", films.qwen3_vl, "3 a second, times in the text"),
    _film("Qwen3.5", films.qwen3_5, "2 a second"),
    _film("Qwen2.5-VL", films.qwen2_5_vl, "2 a second, positions by seconds"),
    _film("Qwen2-VL", films.qwen2_vl, "all"),
    _film("Qwen2.5-Omni's thinker, with clips", films.qwen2_5_omni, "2 a second, positions by seconds", beside=(IMAGE, AUDIO)),
    _film("GLM-4.1V, no images", films.glm4v, "as GLM chooses, times in the text", beside=()),
    _film("GLM-4.6V, no images", films.glm46v, "as GLM chooses, times in the text", beside=()),
    _film("InternVL", films.internvl, "4", lists=False),
    _film("InternVL, one video a row", films.internvl_whole, "all", media=(0, 1)),
    _film("VideoLLaMA 3", films.video_llama3, "2 a second, times in the text"),
    _film("Gemma 4", films.gemma4, "3, times in the text", skipped=_DRIFTS),
    _film("LLaVA-NeXT-Video", films.llava_next_video, "4", lists=False, refused=_NOT_JOINED),
    _film("LLaVA-OneVision", films.llava_onevision, "4", lists=False, refused=_NOT_JOINED),
    _film("SmolVLM, no images", films.smolvlm, "4, times in the text", beside=(), refused=_NOT_JOINED, drifts=("grpo",)),
    _film(
        "Qwen3-Omni's thinker, with clips",
        films.qwen3_omni,
        "2 a second, positions by seconds",
        beside=(IMAGE, AUDIO),
        refused=_DEAF,
    ),
    _film("Qwen4-Exp", films.qwen4_exp, "2 a second, times in the text"),
    _film("EXAONE 4.5", films.exaone4_5, "2 a second"),
    _film("LFM3-VL", films.lfm3_vl, "2 a second, times in the text"),
    _film("GLM-4.5V, no images", films.glm4v_moe, "as GLM chooses, times in the text", beside=()),
    _film("GLM-OCR, no images", films.glm_ocr, "as GLM chooses, times in the text", beside=()),
    _film("GLM-5 Next", films.glm5_next, "as GLM chooses, times in the text", refused=_DEAF),
    _film("Ernie 4.5 VL", films.ernie4_5_vl_moe, "2 to 8"),
    _film("Kimi K2.5", films.kimi_k25, "2 a second, times in the text"),
    _film("MiniCPM-V 4.6", films.minicpm_v, "1 a second"),
    _film("MiniMax M3 VL", films.minimax_m3_vl, "all, times in the text", lists=False, sizes=_WHOLE_PATCHES),
    _film("Muse Glimmer", films.muse_glimmer, "2 a second, times in the text"),
    _film("Muse Spark", films.muse_spark, "2 a second, times in the text"),
    _film(
        "Molmo 2, one video a row",
        films.molmo2,
        "up to 2 a second, times in the text",
        media=(0, 1),
        beside=(),
        refused=_NOT_JOINED,
    ),
    _film("Video-LLaVA", films.video_llava, "4", lists=False, refused=_NOT_JOINED),
    _film("Gemma 4, whose tokens of an image see each other", films.gemma4_seen, "3, times in the text", skipped=_DRIFTS),
    _film("Gemma 4 Unified", films.gemma4_unified, "3, times in the text", refused=_NO_TOWER, skipped=_DRIFTS),
    _film("Perception LM", films.perception_lm, "4", lists=False, refused=_NOT_JOINED),
)


def families(kind: str) -> dict[str, Family]:
    """Return the families that rows of a kind are tried with, by their names."""
    return {family.name: family for family in FAMILIES if kind in family.kinds}
