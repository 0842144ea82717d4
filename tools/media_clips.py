"""Tiny models that take audio, beside those of tests/whole/pictures.py."""

from __future__ import annotations

from typing import Any

from media_parts import TEXT, Made, ids, new, processor, tokenizer

_EARS = {"num_mel_bins": 16, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


def audio_flamingo3() -> Made:
    """Make Audio Flamingo 3, which hears pieces of up to 4 seconds."""
    token = tokenizer("<sound>", audio_token="<sound>")
    ears = {**_EARS, "max_source_positions": 200, "layerdrop": 0.0}
    numbers = ids(token, audio_token_id="<sound>")
    config = new("AudioFlamingo3Config", audio_config=ears, text_config={**TEXT, "model_type": "qwen2"}, **numbers)
    hears = new("WhisperFeatureExtractor", feature_size=16, chunk_length=4)
    return config, processor("AudioFlamingo3Processor", token, feature_extractor=hears, max_audio_len=20)


def fun_asr_nano() -> Made:
    """Make Fun-ASR-Nano, whose processor needs torchaudio, without its dropout."""
    token = tokenizer("<audio>", audio_token="<audio>")
    still = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    ears = {**_EARS, **still, "num_hidden_layers": 2, "num_timestamp_prediction_layers": 1}
    joins = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 8, "num_hidden_layers": 1}
    parts: dict[str, Any] = {"audio_config": ears, "adaptor_config": {**joins, "projector_hidden_size": 32}}
    parts["text_config"] = {**TEXT, "model_type": "qwen3"}
    config = new("FunAsrNanoConfig", **parts, tie_word_embeddings=False, **ids(token, audio_token_id="<audio>"))
    hears = new("FunAsrNanoFeatureExtractor", feature_size=16)
    return config, processor("FunAsrNanoProcessor", token, feature_extractor=hears, audio_token="<audio>")


def granite_speech() -> Made:
    """Make Granite Speech, whose processor needs torchaudio, without the dropout of its projector."""
    token = tokenizer("<|audio|>", audio_token="<|audio|>")
    ears = {"input_dim": 160, "num_layers": 2, "hidden_dim": 32, "feedforward_mult": 2, "num_heads": 2, "dim_head": 16}
    ears |= {"output_dim": 32, "conv_kernel_size": 15, "dropout": 0.0}
    queries = {"model_type": "blip_2_qformer", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    queries |= {"intermediate_size": 32, "encoder_hidden_size": 32, "vocab_size": 10}
    queries |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = new(
        "GraniteSpeechConfig",
        text_config={**TEXT, "model_type": "llama"},
        encoder_config=ears,
        projector_config=queries,
        has_lora_adapter=False,
        **ids(token, audio_token_index="<|audio|>"),
    )
    return config, processor("GraniteSpeechProcessor", token, audio_processor=new("GraniteSpeechFeatureExtractor"))
