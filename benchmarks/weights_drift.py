"""Claim: bfloat16 weights with stochastic rounding learn as float32 weights do; rounded to the nearest they do not.

A small llama of bytes learns Python's manual for 200 steps in float32. From there each side learns the source of Python's
standard library for 200 steps on the same rows: float32 weights in float32 and under bfloat16 autocast, bfloat16 weights with
moments in 8 bits (`weights=bfloat16`: stochastic rounding), and bfloat16 weights with torch's AdamW, which rounds to the
nearest. Both texts come with every Python. Drift is the mean distance of a side's losses from float32's, in nats a byte, and
the difference of the last 20; `gained` is what float32 lost over these steps. `ratio` is the nearest's drift over ours at the
lowest rate.

    python benchmarks/weights_drift.py
"""

import argparse
import copy
import importlib
import inspect
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
from _chats import MODULES
from _report import emit, machine, note

TARGET = 3.0
SIDES = ("float32", "autocast", "bfloat16", "nearest")
V, DOCUMENTS = 256, 8


class Row:
    """Packed row of documents, all but their first tokens learned."""

    def __init__(self, ids: np.ndarray) -> None:
        documents, length = ids.shape
        self.input_ids = ids.reshape(-1)
        self.position_ids = np.tile(np.arange(length), documents)
        self.cu_seqlens = np.arange(documents + 1) * length
        self.labels = np.where(self.position_ids == 0, -100, self.input_ids)
        self.max_seqlen = length


def texts() -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes of the two texts: Python's manual as `help` has it, and modules of its standard library."""
    from pydoc_data.topics import topics

    source = "".join(inspect.getsource(importlib.import_module(name)) for name in MODULES)
    found = ("\n".join(topics[name] for name in sorted(topics)), source)
    return tuple(np.frombuffer(text.encode(), dtype=np.uint8) for text in found)  # pyrefly: ignore[bad-return]


def rows(text: np.ndarray, seed: int, steps: int, length: int) -> list[list[Row]]:
    """Return a row for each step: documents from drawn places of a text."""
    draw, found = np.random.default_rng(seed), []
    for _ in range(steps):
        starts = draw.integers(0, len(text) - length, DOCUMENTS)
        found.append([Row(text[starts[:, None] + np.arange(length)].astype(np.int64))])
    return found


def model_of(width: int) -> Any:
    """Return a llama of two layers with random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=V, tie_word_embeddings=True, **sizes))


def losses(model: Any, data: list[list[Row]], rate: float, side: str = "float32") -> list[float]:
    """Train a model, and return the loss of each step in nats a token."""
    import torch

    import forge_algos

    settings = forge_algos.OptimizerSettings(
        learning_rate=rate, lr_scheduler="constant", optimizer="adamw_8bit" if side == "bfloat16" else "adamw"
    )
    if side in ("bfloat16", "nearest"):
        forge_algos.cast_trained(model, torch.bfloat16)
    optimizer = forge_algos.make_optimizer(model, settings, fused=side != "nearest", seed=42)
    steps = forge_algos.train(
        model,
        data,
        objective=forge_algos.SFT(),
        optimizer=optimizer,
        scheduler=forge_algos.schedule(optimizer, settings, num_steps=len(data)),
        autocast=nullcontext if side == "float32" else partial(torch.autocast, "cpu", torch.bfloat16),
    )
    return [step.loss for step in steps]


def main() -> None:
    """Measure, and print one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toy", action="store_true", help="a size that runs in seconds and proves nothing")
    parser.add_argument("--rates", type=float, nargs="+", default=[2e-5, 2e-4], help="learning rates, the lowest first")
    options = parser.parse_args()
    width, steps, length, at = (64, 12, 16, machine()) if options.toy else (256, 200, 32, machine())
    start, (manual, source) = model_of(width), texts()
    note(f"learned the manual: {losses(start, rows(manual, 1, steps, length), 1e-3)[-1]:.3f} nats a byte")
    data, found = rows(source, 2, steps, length), {}
    for rate in options.rates:
        curves = {side: np.array(losses(copy.deepcopy(start), data, rate, side)) for side in SIDES}
        exact, last = curves["float32"], max(1, steps // 10)
        gained = float(exact[:last].mean() - exact[-last:].mean())
        found[f"{rate:g}"] = {
            "gained": round(gained, 4),
            "drift": {side: round(float(np.abs(curves[side] - exact).mean()), 5) for side in SIDES[1:]},
            "last": {side: round(float((curves[side] - exact)[-last:].mean()), 5) for side in SIDES[1:]},
            "largest": {side: round(float(np.abs(curves[side] - exact).max()), 5) for side in SIDES[1:]},
        }
        note(f"rate {rate:g}: {found[f'{rate:g}']}")
    lowest = found[f"{min(options.rates):g}"]["drift"]
    claim = "losses of bfloat16 weights with stochastic rounding stay nearer to float32's than those rounded to the nearest"
    sizes = {
        "width": width,
        "steps": steps,
        "tokens": DOCUMENTS * length,
        "weights": sum(p.numel() for p in start.parameters()),
    }
    ratio = lowest["nearest"] / lowest["bfloat16"]
    emit("weights_drift", claim, ratio, TARGET, toy=options.toy, at=at, sizes=sizes, rates=found)


if __name__ == "__main__":
    main()
