"""FSDP, DeepSpeed and sizes of groups of another library's file → strategy and its settings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from forge.settings._accelerate import sharding
from forge.settings.convert._draft import Draft


def strategy(draft: Draft) -> None:
    """Read what divides the model, and over how many ranks."""
    _kind(draft)
    _devices(draft)


def _kind(draft: Draft) -> None:
    """Read FSDP as fsdp2, and DeepSpeed's stage in what it holds, else in its file's name."""
    left, lost = draft.left, draft.lost
    words, config = left.pop("fsdp", None), left.pop("fsdp_config", None)
    left.pop("fsdp_version", None)
    deepspeed = left.pop("deepspeed", None)
    if isinstance(deepspeed, Mapping):
        _deepspeed(deepspeed, draft)
        return
    if deepspeed:
        text = str(deepspeed).lower()
        stage = re.search(r"z(?:ero)?[-_]?(?:stage)?[-_]?([0-3])", text)
        if stage:
            draft.found["strategy"] = f"zero{stage[1]}" if stage[1] != "0" else "ddp"
            if re.search(r"(?<!no)(?<!no[-_])offload", text):
                draft.found["cpu_offload"] = True
            return
        lost.append(f"deepspeed: {deepspeed!r}: choose strategy=zero1, zero2 or zero3")
    if words or config:
        if config and not isinstance(config, dict):
            lost.append(f"fsdp_config: {config!r}: the file is not read: write its keys here, or give what it says as settings")
        section = {str(key): value for key, value in config.items()} if isinstance(config, dict) else {}
        asked = words if isinstance(words, list) else str(words).split()
        section |= {key: value for word, (key, value) in _FSDP_WORDS.items() if word in asked}
        settings, refused = sharding(section)
        draft.found |= settings
        lost += [f"fsdp_config.{key}: {section.get(key)!r}: {why}" for key, why in refused.items()]


_FSDP_WORDS = {
    "shard_grad_op": ("reshard_after_forward", False),
    "no_shard": ("sharding_strategy", "NO_SHARD"),
    "hybrid_shard": ("sharding_strategy", "HYBRID_SHARD"),
    "hybrid_shard_zero2": ("sharding_strategy", "HYBRID_SHARD_ZERO2"),
    "offload": ("offload_params", True),
}
"""Word in `fsdp` → the key of `fsdp_config` that says the same."""


def _devices(draft: Draft) -> None:
    """Read over how many ranks weights are divided: all of them, unless there are copies."""
    left, found = draft.left, draft.found
    shards, copies = left.get("dp_shard_size"), left.pop("dp_replicate_size", None)
    if isinstance(copies, int) and copies > 1 and isinstance(shards, int) and shards > 1:
        found["strategy"] = "hsdp"
    elif isinstance(shards, int):
        del left["dp_shard_size"]
        if shards > 1:
            found["strategy"] = "fsdp2"


def _deepspeed(config: Mapping[str, Any], draft: Draft) -> None:
    """Read a configuration of DeepSpeed; list what of it changes numbers and is set here."""
    zero = config.get("zero_optimization")
    zero = zero if isinstance(zero, Mapping) else {}
    stage = zero.get("stage", 0)
    if stage not in (0, 1, 2, 3):
        draft.lost.append(f"deepspeed.zero_optimization.stage: {stage!r}: choose strategy=zero1, zero2 or zero3")
        return
    draft.found["strategy"] = f"zero{stage}" if stage else "ddp"
    places = [zero.get(key) for key in ("offload_optimizer", "offload_param")]
    devices = {str(place.get("device", "none")) for place in places if isinstance(place, Mapping)} - {"none"}
    if stage and devices:
        draft.found["cpu_offload"] = True
        if "nvme" in devices:
            draft.lost.append("deepspeed.zero_optimization: offloads to nvme: cpu_offload keeps it in the host's memory")
    for key, ours in _OF_DEEPSPEED.items():
        value = config.get(key)
        if value not in (None, "auto", {}):
            draft.lost.append(f"deepspeed.{key}: {value!r}: {ours}")
    if isinstance(config.get("fp16"), Mapping) and config["fp16"].get("enabled") is True:
        draft.lost.append("deepspeed.fp16: dtype is float32 or bfloat16")


_OF_DEEPSPEED = {
    "optimizer": "choose optimizer, learning_rate and their kin",
    "scheduler": "choose lr_scheduler and warmup_steps",
    "gradient_clipping": "give max_grad_norm",
    "train_batch_size": "give effective_batch_size",
}
"""Key of DeepSpeed's configuration that changes numbers → what to set here."""
