"""Tiny models whose images are resized to one size, or cut into tiles of one: LLaVA, Gemma, Idefics and their like."""

from __future__ import annotations

from functools import partial
from typing import Any

from media_parts import (
    CUT,
    EITHER,
    ROUTED,
    SIDE,
    SIGLIP,
    TEXT,
    TOWER,
    Made,
    ids,
    modalities,
    new,
    pictures,
    processor,
    tiled,
    tokenizer,
)

gemma3, llava, llava_next, idefics2, mllama, paligemma2 = (
    pictures.FAMILIES[name] for name in ("gemma3", "llava", "llava-next", "idefics2", "mllama", "paligemma")
)

CLIP = {**TOWER, "model_type": "clip_vision_model"}
LLAMA = {**TEXT, "model_type": "llama"}
QWEN2 = {**TEXT, "model_type": "qwen2"}
COHERE = {**TEXT, "model_type": "cohere2", "sliding_window": 8}
SAM = {"hidden_size": 16, "output_channels": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "mlp_dim": 24}
_LLAVA = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}

# --- LLaVA ------------------------------------------------------------------------------------------------------------------


def vipllava() -> Made:
    """Make ViP-LLaVA, which reads two layers of its tower."""
    token = tiled()
    parts = {"text_config": LLAMA, "vision_config": CLIP, "image_seq_length": 4, "vision_feature_layer": [-1, -2]}
    images = new("CLIPImageProcessorPil", size=SIDE, crop_size=SIDE)
    config = new("VipLlavaConfig", **parts, **ids(token, image_token_index="<image>"))
    return config, processor("LlavaProcessor", token, image_processor=images, **_LLAVA)


def llava_next_video() -> Made:
    """Make LLaVA-NeXT-Video."""
    token = tiled(video_token="<video>")
    numbers = ids(token, image_token_index="<image>", video_token_index="<video>")
    parts = {"text_config": LLAMA, "vision_config": CLIP, "image_grid_pinpoints": CUT, "vision_feature_layer": -1}
    images = new("LlavaNextImageProcessorPil", size={"shortest_edge": 28}, crop_size=SIDE, image_grid_pinpoints=CUT)
    video = new("LlavaNextVideoVideoProcessor")
    return new("LlavaNextVideoConfig", **parts, **numbers), processor(
        "LlavaNextVideoProcessor", token, image_processor=images, video_processor=video, **_LLAVA
    )


def video_llava() -> Made:
    """Make Video-LLaVA, which has a tower of images and one of videos."""
    token = tiled(video_token="<video>")
    numbers = ids(token, image_token_index="<image>", video_token_index="<video>")
    parts = {"text_config": LLAMA, "vision_config": CLIP, "vision_feature_layer": -1, "image_seq_length": 4}
    images = new("VideoLlavaImageProcessor", size={"shortest_edge": 28}, crop_size=SIDE)
    video = new("VideoLlavaVideoProcessor")
    config = new("VideoLlavaConfig", **parts, **numbers)
    return config, processor("VideoLlavaProcessor", token, image_processor=images, video_processor=video, **_LLAVA)


def llava_onevision() -> Made:
    """Make LLaVA-OneVision."""
    token = tiled(video_token="<video>")
    numbers = ids(token, image_token_index="<image>", video_token_index="<video>")
    config = new("LlavaOnevisionConfig", text_config=QWEN2, vision_config=SIGLIP, image_grid_pinpoints=CUT, **numbers)
    images = new("LlavaOnevisionImageProcessor", size=SIDE, image_grid_pinpoints=CUT)
    parts = {"num_image_tokens": 4, "vision_feature_select_strategy": "full"}
    video = new("LlavaOnevisionVideoProcessor")
    return config, processor("LlavaOnevisionProcessor", token, image_processor=images, video_processor=video, **parts)


def granite4_vision() -> Made:
    """Make Granite 4 Vision without the dropout of its projector."""
    token, cut = tiled(), [[56, 112], [112, 56], [112, 112]]
    queries = {"model_type": "blip_2_qformer", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1}
    queries |= {"intermediate_size": 24, "encoder_hidden_size": 16, "vocab_size": 10}
    queries |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = new(
        "Granite4VisionConfig",
        text_config=TEXT,
        vision_config={**SIGLIP, "image_size": 56, "num_hidden_layers": 2, "hidden_size": 64},
        qformer_config=queries,
        image_grid_pinpoints=cut,
        downsample_rate="1/2",
        image_seq_length=16,
        vision_feature_select_strategy="full",
        deepstack_layer_map=[[-1, 0]],
        spatial_target_layers=[1],
        projector_dropout=0.0,
        **ids(token, image_token_index="<image>"),
    )
    crop = {"height": 56, "width": 56}
    images = new("LlavaNextImageProcessorPil", size={"shortest_edge": 56}, crop_size=crop, image_grid_pinpoints=cut)
    parts = {"patch_size": 14, "vision_feature_select_strategy": "full", "downsample_rate": "1/2"}
    return config, processor("Granite4VisionProcessor", token, image_processor=images, **parts)


# --- InternVL and others whose tiles are cut as GOT-OCR's -------------------------------------------------------------------


def internvl() -> Made:
    """Make InternVL."""
    marks = {"context_image_token": "<IMG_CONTEXT>", "start_image_token": "<img>", "end_image_token": "</img>"}
    token = tokenizer("<IMG_CONTEXT>", **marks, video_token="<video>")
    vision = {**TOWER, "image_size": [28, 28], "patch_size": [14, 14]}
    parts = {"text_config": QWEN2, "vision_config": vision, "image_seq_length": 1, "downsample_ratio": 0.5}
    config = new("InternVLConfig", **parts, **ids(token, image_token_id="<IMG_CONTEXT>"))
    images = new("GotOcr2ImageProcessor", size=SIDE, crop_to_patches=True, max_patches=4)
    media = {"image_processor": images, "video_processor": new("InternVLVideoProcessor")}
    return config, processor("InternVLProcessor", token, **media, image_seq_length=1)


def aya_vision() -> Made:
    """Make Aya Vision."""
    marks = ("<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>", "<|IMG_LINE_BREAK|>", "TILE", "TILE_GLOBAL")
    token = tokenizer("<image>", "<image>", *marks)
    parts = {"text_config": COHERE, "vision_config": SIGLIP, "downsample_factor": 2, "vision_feature_layer": -1}
    config = new("AyaVisionConfig", **parts, **ids(token, image_token_index="<|IMG_PATCH|>"))
    images = new("GotOcr2ImageProcessor", size=SIDE, crop_to_patches=True, max_patches=2)
    return config, processor(
        "AyaVisionProcessor", token, image_processor=images, patch_size=14, img_size=28, downsample_factor=2
    )


def cohere2_vision() -> Made:
    """Make Command A Vision."""
    token = tiled(boi_token="<boi>", eoi_token="<eoi>", img_line_break_token="<lb>")
    parts = {"text_config": COHERE, "vision_config": {**SIGLIP, "image_size": 56}, "alignment_intermediate_size": 64}
    config = new("Cohere2VisionConfig", **parts, **ids(token, image_token_id="<image>"))
    images = new("Cohere2VisionImageProcessor", size={"height": 56, "width": 56}, max_patches=3, patch_size=2)
    return config, processor("Cohere2VisionProcessor", token, image_processor=images)


def ovis2() -> Made:
    """Make Ovis 2."""
    marks = ("<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>")
    token = tokenizer("<image>", "<image>", *marks, "<IMG_ATOM>")
    vision = {**TOWER, "vocab_size": 64, "hidden_stride": 1}
    numbers = ids(token, image_token_id="<IMG_ATOM>")
    indicators = token.convert_tokens_to_ids([*marks])
    parts = {"text_config": QWEN2, "vision_config": vision, "vocab_size": TEXT["vocab_size"], "hidden_size": 32}
    config = new("Ovis2Config", **parts, visual_indicator_token_ids=indicators, **numbers)
    images = new("Ovis2ImageProcessor", size=SIDE, crop_to_patches=True, max_patches=3)
    return config, processor("Ovis2Processor", token, image_processor=images, image_seq_length=4)


# --- Idefics ----------------------------------------------------------------------------------------------------------------


def _rows_and_columns(name: str, of: str, **media: Any) -> Made:
    tiles = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    marks = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *tiles)
    token = tokenizer("<image>", *marks)
    config = new(name, text_config=LLAMA, vision_config=TOWER, scale_factor=2, **ids(token, image_token_id="<image>"))
    images = new(f"{of}ImageProcessorPil", size={"longest_edge": 56}, max_image_size={"longest_edge": 28})
    return config, processor(f"{of}Processor", token, image_processor=images, image_seq_len=1, **media)


def idefics3() -> Made:
    """Make Idefics 3."""
    return _rows_and_columns("Idefics3Config", "Idefics3")


def smolvlm() -> Made:
    """Make SmolVLM, whose processor needs num2words."""
    return _rows_and_columns("SmolVLMConfig", "SmolVLM", video_processor=new("SmolVLMVideoProcessor"))


# --- Gemma ------------------------------------------------------------------------------------------------------------------

_EITHER = EITHER.format(audio="<|audio|>", image="<|image|>")
_GEMMA4 = {
    "image_token": "<|image|>",
    "boi_token": "<|image>",
    "eoi_token": "<image|>",
    "audio_token": "<|audio|>",
    "boa_token": "<|audio>",
    "eoa_token": "<audio|>",
}


def _gemma4(make: str, of: str, images: str, config: dict[str, Any]) -> Made:
    token = tokenizer(_EITHER, "<|video|>", **_GEMMA4)
    numbers = ids(token, **{f"{name}_id": mark for name, mark in _GEMMA4.items()}, video_token_id="<|video|>")
    parts: dict[str, Any] = {"feature_extractor": new(f"{of}AudioFeatureExtractor")}
    parts["image_processor"] = new(images, patch_size=14, max_soft_tokens=70, pooling_kernel_size=2)
    parts["video_processor"] = new(f"{of}VideoProcessor", patch_size=14)
    return new(make, **config, **numbers), processor(f"{of}Processor", token, image_seq_length=70, **parts)


def gemma4(*, hears: bool = False, **text: Any) -> Made:
    """Make Gemma 4; with a tower of audio if it `hears`."""
    made = modalities.CONFIGS["gemma4"]().to_dict()
    vision = {**made["vision_config"], "patch_size": 14, "pooling_kernel_size": 2, "position_embedding_size": 256}
    config = {"text_config": {**made["text_config"], **text}, "vision_config": vision}
    if hears:
        ears = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "subsampling_conv_channels": (128, 8)}
        config["audio_config"] = {**ears, "output_proj_dims": 32}
    return _gemma4("Gemma4Config", "Gemma4", "Gemma4ImageProcessorPil", config)


gemma4_seen = partial(gemma4, use_bidirectional_attention="vision")
gemma4_audio = partial(gemma4, hears=True)


def gemma4_unified() -> Made:
    """Make Gemma 4 Unified, which has no tower."""
    text = {**TEXT, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
    vision = {"patch_size": 14, "pooling_kernel_size": 2, "mm_embed_dim": 32, "mm_posemb_size": 64, "output_proj_dims": 32}
    config = {"text_config": text, "vision_config": vision, "audio_config": {"audio_embed_dim": 16}}
    return _gemma4("Gemma4UnifiedConfig", "Gemma4Unified", "Gemma4UnifiedImageProcessor", config)


def paligemma() -> Made:
    """Make PaliGemma, whose language part is the first Gemma."""
    config, made = paligemma2()
    fields = {name: getattr(config, name) for name in ("vision_config", "projection_dim", "hidden_size", "image_token_index")}
    return new("PaliGemmaConfig", text_config={**TEXT, "model_type": "gemma", "vocab_size": 1536}, **fields), made


def gemma3n() -> Made:
    """Make Gemma 3n, whose tower is timm's."""
    marks = {"image_token": "<image_soft_token>", "boi_token": "<boi>", "eoi_token": "<eoi>"}
    marks |= {"audio_token": "<audio_soft_token>", "boa_token": "<boa>", "eoa_token": "<eoa>"}
    token = tokenizer("<image_soft_token>", **marks)
    layers = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8}
    shared = {"num_kv_shared_layers": 2, "vocab_size_per_layer_input": 400, "hidden_size_per_layer_input": 8}
    other = {"laurel_rank": 8, "activation_sparsity_pattern": [0.0] * 4, "altup_num_inputs": 2}
    text = {**TEXT, "max_position_embeddings": 1024, **layers, **shared, **other}
    vision = {"hidden_size": 2048, "vocab_offset": 496, "vocab_size": 8, "architecture": "mobilenetv5_base"}
    vision |= {"model_args": {"channel_multiplier": 0.1}}
    ears = {"hidden_size": 16, "conf_num_hidden_layers": 1, "conf_num_attention_heads": 2, "vocab_offset": 504, "vocab_size": 8}
    numbers = ids(token, **{f"{name}_id": mark for name, mark in marks.items()})
    parts = {"text_config": text, "vision_config": vision, "audio_config": ears, "vision_soft_tokens_per_image": 256}
    images = new("SiglipImageProcessorPil", size={"height": 256, "width": 256})
    hears = new("Gemma3nAudioFeatureExtractor")
    return new("Gemma3nConfig", **parts, **numbers), processor(
        "Gemma3nProcessor", token, feature_extractor=hears, image_processor=images, image_seq_length=256
    )


# --- others -----------------------------------------------------------------------------------------------------------------


def deepseek_vl() -> Made:
    """Make DeepSeek-VL."""
    token = tiled("<im>")
    config = new("DeepseekVLConfig", text_config=LLAMA, vision_config=SIGLIP, **ids(token, image_token_id="<im>"))
    images = new("DeepseekVLImageProcessor", size=SIDE)
    return config, processor("DeepseekVLProcessor", token, image_processor=images, num_image_tokens=4)


def deepseek_vl_hybrid() -> Made:
    """Make DeepSeek-VL with a second tower for images in high resolution."""
    token, side = tiled("<im>"), {"height": 128, "width": 128}
    high = {**SAM, "model_type": "sam_vision_model", "image_size": 128, "patch_size": 16, "window_size": 4}
    high |= {"global_attn_indexes": [0], "num_pos_feats": 8}
    parts = {"text_config": LLAMA, "vision_config": SIGLIP, "high_res_vision_config": high}
    config = new("DeepseekVLHybridConfig", **parts, **ids(token, image_token_id="<im>"))
    images = new("DeepseekVLHybridImageProcessor", size=SIDE, high_res_size=side)
    return config, processor("DeepseekVLHybridProcessor", token, image_processor=images, num_image_tokens=4)


def deepseek_ocr2() -> Made:
    """Make DeepSeek-OCR 2, whose images are read by a language model."""
    token = tokenizer("<image>", "<image>")
    text = {**TEXT, **ROUTED, "n_shared_experts": 1, "num_key_value_heads": 4, "mlp_layer_types": ["dense", "sparse"]}
    sam = {**SAM, "global_attn_indexes": [], "downsample_channels": [8, 16], "initializer_range": 0.02}
    reads = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    reads |= {"num_key_value_heads": 1, "vocab_size": 8}
    config = new(
        "DeepseekOcr2Config",
        text_config={**text, "max_position_embeddings": 2048},
        vision_config={"sam_config": sam, "encoder_config": reads},
        **ids(token, image_token_id="<image>"),
    )
    return config, processor("DeepseekOcr2Processor", token, image_processor=new("DeepseekOcr2ImageProcessor"))


def janus() -> Made:
    """Make Janus, which has a codebook of images too."""
    token = tiled("<image_placeholder>", boi_token="<begin_of_image>", eoi_token="<end_of_image>")
    vision = {**TOWER, "mlp_ratio": 2, "projection_dim": 32, "num_image_tokens": 4}
    vision = {name: value for name, value in vision.items() if name != "intermediate_size"}
    codes = {"embed_dim": 8, "num_embeddings": 16, "latent_channels": 8, "base_channels": 32, "channel_multiplier": [1, 1]}
    codes |= {"num_res_blocks": 1, "num_patches": 4, "projection_dim": 32, "image_token_embed_dim": 32}
    parts = {"text_config": LLAMA, "vision_config": vision, "vq_config": codes}
    config = new("JanusConfig", **parts, **ids(token, image_token_id="<image_placeholder>"))
    return config, processor("JanusProcessor", token, image_processor=new("JanusImageProcessor", size=SIDE), num_image_tokens=4)


def aria() -> Made:
    """Make Aria, which has experts."""
    token = tiled("<|img|>")
    experts = {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1}
    vision = {**TOWER, "model_type": "idefics3_vision", "image_size": 490}
    numbers = ids(token, image_token_index="<|img|>")
    queries = {1225: 4, 4900: 8}
    config = new(
        "AriaConfig", text_config={**TEXT, **experts}, vision_config=vision, projector_patch_to_query_dict=queries, **numbers
    )
    images = new("AriaImageProcessor", max_image_size=490)
    return config, processor("AriaProcessor", token, image_processor=images, size_conversion={490: 4, 980: 8})


def step3p7() -> Made:
    """Make Step 3.7, which has experts."""
    marks = ("<im_patch>", "<patch_start>", "<patch_end>", "<patch_newline>", "<im_start>", "<im_end>")
    token = tokenizer("<im_patch>", *marks)
    experts = {**ROUTED, "num_local_experts": 4, "share_expert_dim": 16}
    vision = {**TOWER, "image_size": 728}
    vision = {name: value for name, value in vision.items() if name != "patch_size"}
    text = {**TEXT, "sliding_window": 8, **experts}
    config = new("Step3p7Config", text_config=text, vision_config=vision, **ids(token, image_token_id="<im_patch>"))
    return config, processor("Step3p7Processor", token, image_processor=new("Step3p7ImageProcessor"))


def molmo2() -> Made:
    """Make Molmo 2."""
    marks = {"image_patch_id": "<im_patch>", "image_start_token_id": "<im_start>", "image_end_token_id": "<im_end>"}
    marks |= {"low_res_image_start_token_id": "<low_res_im_start>"}
    marks |= {"frame_start_token_id": "<frame_start>", "frame_end_token_id": "<frame_end>"}
    token = tokenizer("<|image|>", "<im_col>", *marks.values(), image_token="<|image|>", video_token="<|video|>")
    token.chat_template = "{{ bos_token }}" + token.chat_template
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "hidden_size": 16, "intermediate_size": 24}
    vision = {**heads, "num_hidden_layers": 2, "image_size": [56, 56], "patch_size": 14, "num_position_embeddings": 16}
    adapter = {**heads, "vision_feature_layer": [-1, -2], "text_hidden_size": 32}
    parts = {"text_config": {**TEXT, "additional_vocab_size": 16}, "vision_config": vision, "adapter_config": adapter}
    config = new("Molmo2Config", **parts, **ids(token, **marks))
    images = new("Molmo2ImageProcessor", size={"height": 56, "width": 56}, max_crops=2, overlap_margins=[1, 1])
    return config, processor("Molmo2Processor", token, image_processor=images, video_processor=new("Molmo2VideoProcessor"))


def perception_lm() -> Made:
    """Make Perception LM, whose tower is timm's, with one tile an image."""
    token = tiled("<|image|>", video_token="<|video|>")
    tower = {"embed_dim": 16, "img_size": [56, 56], "depth": 1, "num_heads": 2, "global_pool": "", "init_values": 0.1}
    tower |= {"use_post_transformer_norm": False, "ref_feat_shape": [4, 4]}
    vision = {"model_type": "timm_wrapper", "architecture": "vit_pe_core_large_patch14_336", "model_args": tower}
    vision |= {"do_pooling": True, "num_classes": 0}
    numbers = ids(token, image_token_id="<|image|>", video_token_id="<|video|>")
    parts = {"text_config": LLAMA, "vision_config": vision, "vision_use_cls_token": True, "projector_pooling_ratio": 2}
    size = {"height": 56, "width": 56}
    images = new("PerceptionLMImageProcessor", vision_input_type="vanilla", tile_size=56, max_num_tiles=4, size=size)
    media = {"image_processor": images, "video_processor": new("PerceptionLMVideoProcessor")}
    config = new("PerceptionLMConfig", **parts, **numbers)
    return config, processor("PerceptionLMProcessor", token, **media, patch_size=14, pooling_ratio=2)
