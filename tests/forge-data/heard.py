"""Tiny processors of models that hear, and clips."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from forge_data._media_values import as_wav

from . import pictured

if TYPE_CHECKING:
    from pathlib import Path

TEMPLATE = pictured.TEMPLATE.replace("c.type == 'image'", "c.type == 'audio'")


def qwen2_audio(directory: Path, seconds: int = 4) -> Path:
    """Save a processor of Qwen2-Audio, which hears `seconds`: 25 tokens for one of them, between marks."""
    from transformers import Qwen2AudioProcessor, WhisperFeatureExtractor

    named = {"audio_bos_token": "<abos>", "audio_token": "<AUDIO>", "audio_eos_token": "<aeos>"}
    tokenizer = pictured.tiny_tokenizer("", [*named.values()], **named)
    tokenizer.chat_template = TEMPLATE.replace("PLACEHOLDER", "".join(named.values()))
    ears = WhisperFeatureExtractor(feature_size=8, chunk_length=seconds)
    Qwen2AudioProcessor(feature_extractor=ears, tokenizer=tokenizer, chat_template=tokenizer.chat_template).save_pretrained(
        directory
    )
    tokenizer.save_pretrained(directory)
    return directory


def samples(seed: int = 0, seconds: float = 0.5, rate: int = 16_000, channels: int = 1) -> np.ndarray:
    """Make noise, float32[channels, N]."""
    return np.random.default_rng(seed).uniform(-0.5, 0.5, (channels, int(seconds * rate))).astype(np.float32)


def wav(seed: int = 0, seconds: float = 0.5, rate: int = 16_000, channels: int = 1) -> bytes:
    """Encode a clip of noise."""
    return as_wav("", "", samples(seed, seconds, rate, channels), rate)
