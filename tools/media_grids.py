"""Tiny models whose images become grids of patches, as many as their size asks for: Qwen, GLM, Pixtral and their like."""

from __future__ import annotations

from typing import Any

from family_configs import OWN, tiny_config
from media_parts import (
    EITHER,
    EXPERTS,
    MROPE,
    PIXTRAL,
    ROUTED,
    TEXT,
    TOWER,
    Made,
    area,
    ids,
    modalities,
    new,
    processor,
    tiled,
    tokenizer,
)

# --- Qwen ------------------------------------------------------------------------------------------------------------------

QWEN = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
QWEN_TOWER = {"depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 14, "out_hidden_size": 32}
WINDOWS = {"fullatt_block_indexes": [1], "window_size": 56}
INTERLEAVED = {"rope_parameters": {**MROPE["rope_parameters"], "mrope_interleaved": True}}
DEEP = {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}


def qwen_ids(of: Any) -> dict[str, int]:
    """Return the ids of Qwen's marks."""
    return ids(
        of,
        image_token_id="<|image_pad|>",
        video_token_id="<|video_pad|>",
        vision_start_token_id="<|vision_start|>",
        vision_end_token_id="<|vision_end|>",
    )


def qwen_images() -> Any:
    """Make Qwen's processor of images: a token for 28 by 28 pixels, 16 at most."""
    return new("Qwen2VLImageProcessor", patch_size=14, merge_size=2, temporal_patch_size=2, size=area(1, 16))


def _qwen(config: str, of: str = "Qwen3VL", videos: str = "", **fields: Any) -> Made:
    token = tokenizer(QWEN_IMAGE, *QWEN)
    video = new(videos or f"{of}VideoProcessor", patch_size=14)
    return (
        new(config, **fields, **qwen_ids(token)),
        processor(f"{of}Processor", token, image_processor=qwen_images(), video_processor=video),
    )


def _of_tests(name: str) -> dict[str, Any]:
    """Return both parts of a configuration that the tests have."""
    config = modalities.CONFIGS[name]().to_dict()
    return {part: config[part] for part in ("text_config", "vision_config")}


def qwen2_vl() -> Made:
    """Make Qwen2-VL."""
    vision = {"depth": 2, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "patch_size": 14, "mlp_ratio": 2}
    return _qwen("Qwen2VLConfig", "Qwen2VL", text_config={**TEXT, **MROPE}, vision_config=vision)


def qwen2_5_vl() -> Made:
    """Make Qwen2.5-VL, whose tower has windows."""
    vision = {**QWEN_TOWER, **WINDOWS}
    return _qwen("Qwen2_5_VLConfig", "Qwen2_5_VL", "Qwen2VLVideoProcessor", text_config={**TEXT, **MROPE}, vision_config=vision)


def qwen3_vl() -> Made:
    """Make Qwen3-VL."""
    return _qwen("Qwen3VLConfig", **_of_tests("qwen3-vl"))


def qwen3_vl_moe() -> Made:
    """Make Qwen3-VL with experts."""
    return _qwen("Qwen3VLMoeConfig", text_config={**TEXT, **EXPERTS, **INTERLEAVED}, vision_config={**QWEN_TOWER, **DEEP})


def qwen3_5() -> Made:
    """Make Qwen3.5, one of whose layers has a state."""
    return _qwen("Qwen3_5Config", **_of_tests("qwen3.5"))


def qwen3_5_moe() -> Made:
    """Make Qwen3.5 with experts."""
    of = _of_tests("qwen3.5")["text_config"]
    kept = {name: of[name] for name in of if name.startswith("linear_") or name in {"layer_types", "rope_parameters"}}
    text = {**TEXT, **kept, **EXPERTS, "shared_expert_intermediate_size": 16}
    return _qwen("Qwen3_5MoeConfig", text_config=text, vision_config={**QWEN_TOWER, "num_position_embeddings": 16})


def qwen4_exp() -> Made:
    """Make Qwen4-Exp, whose layers select keys."""
    token = tokenizer(QWEN_IMAGE, *QWEN)
    vision = {**QWEN_TOWER, "num_position_embeddings": 16}
    text = {**OWN["qwen4_exp_text"], "vocab_size": TEXT["vocab_size"]}
    config = tiny_config("qwen4_exp", {"text_config": text, "vision_config": vision})
    config.update(qwen_ids(token))
    video = new("Qwen3VLVideoProcessor", patch_size=14)
    return config, processor("Qwen3VLProcessor", token, image_processor=qwen_images(), video_processor=video)


# --- Qwen-Omni, which hears too ---------------------------------------------------------------------------------------------

_EITHER = EITHER.format(audio="<|audio_bos|><|AUDIO|><|audio_eos|>", image=QWEN_IMAGE)
_EARS = {"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 24, "num_mel_bins": 16}
_EARS |= {"output_dim": 32, "max_source_positions": 200, "n_window": 50}


def _omni(config: str, of: str, **fields: Any) -> Made:
    audio = {"audio_token": "<|AUDIO|>", "audio_bos_token": "<|audio_bos|>", "audio_eos_token": "<|audio_eos|>"}
    vision = {"vision_bos_token": "<|vision_start|>", "vision_eos_token": "<|vision_end|>"}
    media = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
    token = tokenizer(_EITHER, **media, **vision, **audio)
    numbers = qwen_ids(token) | ids(
        token, audio_token_id="<|AUDIO|>", audio_start_token_id="<|audio_bos|>", audio_end_token_id="<|audio_eos|>"
    )
    # Of two names of a field each class has one.
    numbers |= {name.replace("_token_id", "_token_index"): numbers[name] for name in numbers if "_start" not in name}
    made = new(config, **fields, **numbers)
    parts = {"image_processor": qwen_images(), "video_processor": new("Qwen2VLVideoProcessor", patch_size=14)}
    hears = new("WhisperFeatureExtractor", feature_size=16, chunk_length=4)
    return made, processor(of, token, feature_extractor=hears, **parts)


def qwen2_5_omni() -> Made:
    """Make Qwen2.5-Omni's thinker."""
    parts = {"vision_config": {**QWEN_TOWER, **WINDOWS}, "audio_config": _EARS}
    return _omni("Qwen2_5OmniThinkerConfig", "Qwen2_5OmniProcessor", text_config={**TEXT, **MROPE}, **parts)


def qwen3_omni() -> Made:
    """Make Qwen3-Omni's thinker, which has experts."""
    text = {**TEXT, **EXPERTS, **INTERLEAVED}
    ears = {**_EARS, "downsample_hidden_size": 8, "n_window_infer": 100}
    parts = {"vision_config": {**QWEN_TOWER, **DEEP}, "audio_config": ears}
    return _omni("Qwen3OmniMoeThinkerConfig", "Qwen3OmniMoeProcessor", text_config=text, **parts)


# --- GLM --------------------------------------------------------------------------------------------------------------------

_GLM = {
    "image_token_id": "<|image|>",
    "video_token_id": "<|video|>",
    "image_start_token_id": "<|begin_of_image|>",
    "image_end_token_id": "<|end_of_image|>",
    "video_start_token_id": "<|begin_of_video|>",
    "video_end_token_id": "<|end_of_video|>",
}
_GLM_IMAGE = "<|begin_of_image|><|image|><|end_of_image|>"
_GLM_TOWER = {"depth": 1, "hidden_size": 16, "num_heads": 2, "patch_size": 14, "image_size": 28, "out_hidden_size": 32}
_GLM_TOWER |= {"intermediate_size": 24}


def _glm(config: str, of: str, **text: Any) -> Made:
    token = tokenizer(_GLM_IMAGE, *_GLM.values())
    made = new(config, text_config={**TEXT, **text, **MROPE}, vision_config=_GLM_TOWER, **ids(token, **_GLM))
    parts = {"image_processor": new(f"{of}ImageProcessor", size=area(2, 32)), "video_processor": new(f"{of}VideoProcessor")}
    return made, processor(f"{of}Processor", token, **parts)


def glm4v() -> Made:
    """Make GLM-4.1V."""
    return _glm("Glm4vConfig", "Glm4v")


def glm46v() -> Made:
    """Make GLM-4.6V."""
    return _glm("Glm46VConfig", "Glm46V", model_type="glm4v_text")


def glm4v_moe() -> Made:
    """Make GLM-4.5V, which has experts."""
    return _glm("Glm4vMoeConfig", "Glm4v", **ROUTED, first_k_dense_replace=1, partial_rotary_factor=1.0)


def glm_ocr() -> Made:
    """Make GLM-OCR."""
    return _glm("GlmOcrConfig", "Glm46V")


def glm5_next() -> Made:
    """Make GLM-5 Next, whose attention selects keys."""
    token = tokenizer(_GLM_IMAGE, *_GLM.values())
    text = {"index_topk": 8, "index_kpool": 2, "index_n_heads": 16, "index_head_dim": 8, "qk_rope_head_dim": 0, "head_dim": 0}
    vision = {**_GLM_TOWER, "projection_intermediate_size": 24}
    text |= {"vocab_size": TEXT["vocab_size"]}
    config = tiny_config("glm5_next", {"text_config": text, "vision_config": vision})
    config.update(ids(token, **_GLM))
    images = new("Glm5NextImageProcessor", min_image_tokens=1, max_image_tokens=16)
    return config, processor("Glm5NextProcessor", token, image_processor=images, video_processor=new("Glm5NextVideoProcessor"))


# --- Pixtral's tower --------------------------------------------------------------------------------------------------------


def _pixtral(config: str, of: str = "PixtralProcessor", *, merge: int, edge: int = 56, **fields: Any) -> Made:
    field = fields.pop("field", "image_token_index")
    marks = fields.pop("marks", {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"})
    token = tokenizer(marks["image_token"], **marks)
    patch = {"height": 14 * merge, "width": 14 * merge}
    images = new("PixtralImageProcessorPil", size={"longest_edge": edge}, patch_size=patch)
    made = new(config, vision_config=PIXTRAL, **fields, **ids(token, **{field: marks["image_token"]}))
    return made, processor(of, token, image_processor=images, patch_size=14, spatial_merge_size=merge)


def pixtral() -> Made:
    """Make Pixtral, as LLaVA."""
    text = {**TEXT, "model_type": "mistral", "sliding_window": None}
    return _pixtral("LlavaConfig", merge=1, text_config=text, vision_feature_layer=-1, vision_feature_select_strategy="full")


def mistral3() -> Made:
    """Make Mistral 3."""
    text = {**TEXT, "model_type": "mistral", "sliding_window": None}
    return _pixtral("Mistral3Config", merge=2, text_config=text, spatial_merge_size=2)


def mistral_large4() -> Made:
    """Make Mistral Large 4, whose attention selects keys."""
    latent = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "qk_nope_head_dim": 8}
    selects = {"index_topk": 6, "index_head_dim": 8, "index_n_heads": 16}
    text = {**TEXT, **ROUTED, **latent, **selects, "num_key_value_heads": 4}
    return _pixtral("MistralLarge4Config", merge=2, text_config=text, spatial_merge_size=2)


def lighton_ocr() -> Made:
    """Make LightOnOCR."""
    marks = {"image_token": "<|image_pad|>", "image_break_token": "<|vision_pad|>", "image_end_token": "<|vision_end|>"}
    text = {"text_config": {**TEXT, "model_type": "qwen3"}, "spatial_merge_size": 2}
    return _pixtral("LightOnOcrConfig", "LightOnOcrProcessor", merge=2, edge=84, marks=marks, field="image_token_id", **text)


# --- others -----------------------------------------------------------------------------------------------------------------


def kimi_k25() -> Made:
    """Make Kimi K2.5, which has latent attention and experts."""
    image = "<|media_begin|>image<|media_content|><|media_pad|><|media_end|>"
    marks = ("<|media_pad|>", "<|kimi_k25_video_placeholder|>", "<|media_begin|>", "<|media_end|>", "<|media_content|>")
    token = tokenizer(image, *marks)
    latent = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
    text = {name: value for name, value in TEXT.items() if name != "head_dim"} | ROUTED | latent
    text |= {"model_type": "deepseek_v3", "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4}
    vision = {**TOWER, "pos_emb_height": 8, "pos_emb_width": 8}
    vision = {name: value for name, value in vision.items() if name != "image_size"}
    fields = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    numbers = ids(token, **dict(zip(fields, marks, strict=False)))
    config = new("Kimi_K25Config", text_config=text, vision_config=vision, projection_hidden_size=16, **numbers)
    images = new("Kimi_K25ImageProcessor", size={"max_height": 112, "max_width": 112})
    return config, processor("Kimi_K25Processor", token, image_processor=images, video_processor=new("Kimi_K25VideoProcessor"))


def paddleocr_vl() -> Made:
    """Make PaddleOCR-VL."""
    token = tokenizer("<img><im></img>", "<img>", "</img>", image_token="<im>")
    numbers = ids(token, image_token_id="<im>", vision_start_token_id="<img>", vision_end_token_id="</img>")
    vision = {**TOWER, "spatial_merge_size": 2}
    config = new("PaddleOCRVLConfig", text_config={**TEXT, **MROPE}, vision_config=vision, **numbers, video_token_id=511)
    return config, processor("PaddleOCRVLProcessor", token, image_processor=new("PaddleOCRVLImageProcessor", size=area(1, 8)))


def video_llama3() -> Made:
    """Make VideoLLaMA 3."""
    token = tokenizer("<|image_pad|>", image_token="<|image_pad|>", video_token="<|video_pad|>")
    numbers = ids(token, image_token_id="<|image_pad|>", video_token_id="<|video_pad|>")
    config = new("VideoLlama3Config", text_config={**TEXT, "model_type": "qwen2"}, vision_config=dict(TOWER), **numbers)
    parts = {"image_processor": new("VideoLlama3ImageProcessor", size=area(1, 8))}
    return config, processor("VideoLlama3Processor", token, **parts, video_processor=new("VideoLlama3VideoProcessor"))


def exaone4_5() -> Made:
    """Make EXAONE 4.5."""
    token = tokenizer(QWEN_IMAGE, *QWEN)
    vision = {**QWEN_TOWER, **WINDOWS, "num_key_value_heads": 2}
    config = new("Exaone4_5_Config", text_config={**TEXT, "model_type": "exaone4"}, vision_config=vision, **qwen_ids(token))
    video = new("Qwen2VLVideoProcessor", patch_size=14)
    return config, processor("Exaone4_5_Processor", token, image_processor=qwen_images(), video_processor=video)


def lfm3_vl() -> Made:
    """Make LFM3-VL, one of whose layers is a convolution."""
    token = tokenizer(QWEN_IMAGE, *QWEN)
    parts: dict[str, Any] = {"text_config": {**TEXT, "model_type": "lfm2", "layer_types": ["conv", "full_attention"]}}
    tower = {name: value for name, value in TOWER.items() if name != "image_size"}
    parts["vision_config"] = {**tower, "num_hidden_layers": 2, "num_key_value_heads": 2}
    config = new("Lfm3VlConfig", **parts, projector_hidden_size=16, **qwen_ids(token))
    video = new("Qwen2VLVideoProcessor", patch_size=14)
    return config, processor("Lfm3VlProcessor", token, image_processor=qwen_images(), video_processor=video)


def minimax_m3_vl() -> Made:
    """Make MiniMax M3 VL, which has experts and an index of keys."""
    import transformers

    own = transformers.MiniMaxM3VLProcessor
    token = tokenizer(own.IMAGE_TOKEN, own.IMAGE_TOKEN, own.VIDEO_TOKEN, own.VISION_START_TOKEN, own.VISION_END_TOKEN)
    sizes = {"intermediate_size": 16, "dense_intermediate_size": 48, "shared_intermediate_size": 16, "rotary_dim": 4}
    index = {"index_n_heads": 2, "index_head_dim": 8, "index_block_size": 64}
    text = {**TEXT, "num_local_experts": 4, "num_experts_per_tok": 2, **sizes, **index}
    numbers = ids(token, image_token_index=own.IMAGE_TOKEN, video_token_index=own.VIDEO_TOKEN)
    parts = {"text_config": text, "vision_config": {**TOWER, "image_size": 112}, "projector_hidden_size": 16}
    images = new("MiniMaxM3VLImageProcessor", size=area(1, 8))
    video = new("MiniMaxM3VLVideoProcessor")
    config = new("MiniMaxM3VLConfig", **parts, **numbers)
    return config, processor("MiniMaxM3VLProcessor", token, image_processor=images, video_processor=video)


def ernie4_5_vl_moe() -> Made:
    """Make Ernie 4.5 VL, which has experts for texts and for images."""
    marks = {"image_token": "<|IMAGE_PLACEHOLDER|>", "image_start_token": "<|IMAGE_START|>", "image_end_token": "<|IMAGE_END|>"}
    marks |= {"video_token": "<|VIDEO|>", "video_start_token": "<|VS|>", "video_end_token": "<|VE|>"}
    token = tokenizer("<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>", **marks)
    experts = {"moe_intermediate_size": [16, 16], "moe_k": 2, "moe_num_experts": 4, "moe_num_shared_experts": 1}
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [1, 1, 2]}
    text = {**TEXT, **experts, "mlp_layer_types": ["dense", "sparse"], "rope_parameters": rope}
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 24, "patch_size": 14}
    numbers = ids(token, **{f"{name}_id": mark for name, mark in marks.items()})
    config = new("Ernie4_5_VLMoeConfig", text_config=text, vision_config=vision, **numbers)
    parts = {"image_processor": new("Ernie4_5_VLMoeImageProcessor", size=area(1, 8))}
    parts["video_processor"] = new("Ernie4_5_VLMoeVideoProcessor", draw_on_frames=False)
    return config, processor("Ernie4_5_VLMoeProcessor", token, **parts)


def hunyuan_vl() -> Made:
    """Make HunYuan-VL, whose positions have four axes."""
    marks = {"image_token": "<img>", "image_start_token": "<imgs>", "image_end_token": "<imge>"}
    token = tokenizer("<imgs><img><imge>", "<nl>", **marks)
    rope = {"rope_type": "dynamic", "factor": 1.0, "alpha": 1000.0, "rope_theta": 10_000.0}
    text = {**TEXT, "rope_parameters": {**rope, "xdrope_section": [1, 1, 1, 1], "mrope_section": [1, 1, 1, 1]}}
    vision = {name: value for name, value in TOWER.items() if name != "image_size"}
    vision |= {"out_hidden_size": 32, "text_hidden_size": 32, "max_image_size": 112, "min_image_size": 28}
    numbers = ids(token, image_token_id="<img>", im_start_id="<imgs>", im_end_id="<imge>", im_newline_id="<nl>")
    images = new("HunYuanVLImageProcessor", size=area(1, 8), patch_size=14)
    config = new("HunYuanVLConfig", text_config=text, vision_config=vision, **numbers)
    return config, processor("HunYuanVLProcessor", token, image_processor=images)


MUSE_MARKS = ("<|image_start|>", "<|image_end|>", "<|video|>", "<|vid_frame_separator|>", "<|vid_start|>", "<|vid_end|>")
MUSE_TOWER = {"patch_size": 14, "pos_emb_height": 8, "pos_emb_width": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
MUSE_TOWER |= {"hidden_size": 16, "intermediate_size": 24, "max_position_embeddings": 64}
_MUSE = {"vision_config": MUSE_TOWER, "out_hidden_size": 64, "projector_hidden_size": 16}


def _muse_media() -> dict[str, Any]:
    images = new("MuseGlimmerImageProcessor", max_image_tokens=16)
    return {"image_processor": images, "video_processor": new("MuseGlimmerVideoProcessor")}


def muse_glimmer() -> Made:
    """Make Muse Glimmer."""
    token = tokenizer("<|patch|>", "<|patch|>", *MUSE_MARKS)
    numbers = ids(token, image_token_id="<|patch|>", video_token_id="<|video|>")
    config = new("MuseGlimmerConfig", text_config={**TEXT, "sliding_window": 8}, **_MUSE, **numbers)
    return config, processor("MuseGlimmerProcessor", token, **_muse_media())


def muse_spark() -> Made:
    """Make Muse Spark, which has experts and a tower of audio."""
    either = EITHER.format(audio="<|audio|>", image="<|patch|>")
    token = tokenizer(either, "<|patch|>", *MUSE_MARKS, "<|audio|>", "<|soft_audio_start|>", "<|soft_audio_end|>")
    numbers = ids(token, image_token_id="<|patch|>", video_token_id="<|video|>", audio_token_id="<|audio|>")
    experts = {"moe_intermediate_size": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_hidden_size": 16}
    ears = {"hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1], "out_hidden_size": 32}
    text = {**TEXT, "sliding_window": 8, **experts}
    config = new("MuseSparkConfig", text_config=text, audio_config=ears, **_MUSE, **numbers)
    hears = new("MuseSparkFeatureExtractor")
    return config, processor("MuseSparkProcessor", token, feature_extractor=hears, **_muse_media())


def inkling() -> Made:
    """Make Inkling, whose processor of audio needs scipy."""
    marks = {"image_token": "<|img|>", "audio_token": "<|aud|>"}
    either = EITHER.format(audio="<|content_audio_input|><|aud|>", image="<|content_image|><|img|>")
    token = tokenizer(either, "<|content_image|>", "<|content_audio_input|>", **marks)
    vision = {"text_hidden_size": 32, "patch_size": 20, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2}
    text = {"vocab_size": TEXT["vocab_size"], "unpadded_vocab_size": TEXT["vocab_size"]}
    parts = {"text_config": text, "vision_config": vision, "audio_config": {"text_hidden_size": 32}}
    config = tiny_config("inkling_mm_model", parts)
    beginnings = {"image_bos_token_id": "<|content_image|>", "audio_bos_token_id": "<|content_audio_input|>"}
    config.update(ids(token, image_token_id="<|img|>", audio_token_id="<|aud|>", **beginnings))
    images = new("InklingImageProcessor", size={"height": 20, "width": 20})
    hears = new("InklingFeatureExtractor")
    return config, processor("InklingProcessor", token, feature_extractor=hears, image_processor=images)


def minicpm_v() -> Made:
    """Make MiniCPM-V 4.6, whose large images are sliced."""
    marks = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
    for part, mark in (("image", "image"), ("slice", "slice"), ("image_id", "image_id")):
        marks |= {f"{part}_start_token": f"<{mark}>", f"{part}_end_token": f"</{mark}>"}
    token = tokenizer("<|image_pad|>", **marks)
    vision = {**TOWER, "image_size": 56, "num_hidden_layers": 2, "insert_layer_id": 0}
    numbers = ids(token, image_token_id="<|image_pad|>", video_token_id="<|video_pad|>")
    parts = {"text_config": {**TEXT, "model_type": "qwen3"}, "vision_config": vision, "insert_layer_id": 0, "image_size": 56}
    config = new("MiniCPMV4_6Config", **parts, **numbers)
    images = new("MiniCPMV4_6ImageProcessor", scale_resolution=112, max_slice_nums=4)
    video = new("MiniCPMV4_6VideoProcessor")
    return config, processor("MiniCPMV4_6Processor", token, image_processor=images, video_processor=video)


def lfm2_vl() -> Made:
    """Make LFM2-VL, one of whose layers is a convolution, and whose large images are cut into tiles."""
    tiles = [f"<|img_row_{row}_col_{column}|>" for row in range(1, 5) for column in range(1, 5)]
    marks = {f"mark_{name}": name for name in ("<|image_start|>", "<|image_end|>", "<|img_thumbnail|>", *tiles)}
    token = tiled(**marks)
    text = {**TEXT, "model_type": "lfm2", "layer_types": ["conv", "full_attention"]}
    text |= {"block_multiple_of": 8, "block_ff_dim": 48}
    tower = {name: value for name, value in TOWER.items() if name != "image_size"}
    vision = {**tower, "model_type": "siglip2_vision_model", "num_patches": 16, "vision_use_head": False}
    numbers = ids(token, image_token_id="<image>")
    config = new("Lfm2VlConfig", text_config=text, vision_config=vision, projector_hidden_size=16, **numbers)
    bounds = {"min_image_tokens": 1, "max_image_tokens": 16, "min_tiles": 2, "max_tiles": 4}
    images = new("Lfm2VlImageProcessor", encoder_patch_size=14, tile_size=56, size={"height": 56, "width": 56}, **bounds)
    return config, processor("Lfm2VlProcessor", token, image_processor=images)
