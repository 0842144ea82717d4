"""Pieces that the tiny models of media share: tokenizer and template, sizes, what makes a class of transformers."""

from __future__ import annotations

import sys
from typing import Any

from media_imports import import_torchaudio, import_torchvision
from repository import ROOT

TORCHVISION = import_torchvision()
"""What is to be said of torchvision; empty where it is not installed."""
TORCHAUDIO = import_torchaudio()
"""As of torchvision."""

import transformers  # noqa: E402 - behind torchvision

sys.path.append(str(ROOT))

from tests.whole import modalities, pictures  # noqa: E402 - found by the path above

Made = tuple[Any, Any]
"""A configuration and a processor."""

TEXT = modalities.TEXT
TOWER = {**modalities.VISION, "num_hidden_layers": 1}
"""A tower of one layer, for images of 28 by 28 in patches of 14."""
SIGLIP = {**TOWER, "model_type": "siglip_vision_model", "vision_use_head": False}
PIXTRAL = {**TOWER, "model_type": "pixtral", "head_dim": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1]}}
SIDE = {"height": 28, "width": 28}
CUT = [[28, 56], [56, 28], [56, 56]]
"""Sizes that an image is cut into tiles of."""
EITHER = "{{% if part['type'] == 'audio' %}}{audio}{{% else %}}{image}{{% endif %}}"
"""What a template writes for a clip or an image."""


def new(name: str, **fields: Any) -> Any:
    """Make an object of a class of transformers."""
    return getattr(transformers, name)(**fields)


def tokenizer(placeholder: str, *marks: str, **named: str) -> Any:
    """Make a byte-level tokenizer with special tokens, whose template writes `placeholder` for a medium."""
    unnamed = {f"mark_{number}": mark for number, mark in enumerate(marks)}
    return pictures._tokenizer(placeholder, bos_token="<bos>", **unnamed, **named)


def ids(of: Any, **tokens: str) -> dict[str, int]:
    """Return fields of a configuration, by their special tokens."""
    return {field: of.convert_tokens_to_ids(token) for field, token in tokens.items()}


def processor(name: str, of: Any, **parts: Any) -> Any:
    """Make a processor around a tokenizer."""
    return new(name, tokenizer=of, chat_template=of.chat_template, **parts)


def area(least: int, most: int) -> dict[str, int]:
    """Return bounds of an image's area, in squares of 28 by 28."""
    return {"shortest_edge": 28 * 28 * least, "longest_edge": 28 * 28 * most}


def tiled(placeholder: str = "<image>", **named: str) -> Any:
    """Make a tokenizer whose mark of an image is the only one."""
    return tokenizer(placeholder, image_token=placeholder, **named)
