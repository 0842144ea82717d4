"""Measurement by plain transformers: the share of answers that are exactly right, and the loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from tasks import Row
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer


class Measured(NamedTuple):
    """Figures of a model on some rows."""

    right: float
    """Share of rows whose answer is the likeliest at every token: the one that greedy decoding gives."""
    loss: float
    """Nats a token of the answers."""


def load(path: str | Path) -> tuple[Any, Any]:
    """Return the model, in float32, and its tokenizer."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval(), AutoTokenizer.from_pretrained(path)


@torch.no_grad()
def measure(model: Any, tokenizer: Any, held_out: list[Row]) -> Measured:
    """Measure one row at a time, without padding."""
    right, total, count = 0, 0.0, 0
    for row in held_out:
        ids = tokenizer(row["prompt"], add_special_tokens=False)["input_ids"]
        answer = tokenizer(row["completion"], add_special_tokens=False)["input_ids"]
        inputs = torch.tensor([[*ids, *answer]])
        logits = model(input_ids=inputs, use_cache=False, logits_to_keep=len(answer) + 1).logits[0, :-1]
        targets = torch.tensor(answer)
        right += bool((logits.argmax(1) == targets).all())
        total += float(functional.cross_entropy(logits, targets, reduction="sum"))
        count += len(answer)
    return Measured(right / len(held_out), total / count)
