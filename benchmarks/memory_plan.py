"""Compute the memory of 21 kinds of training steps without data, and measure the same steps; print both.

Each is a model of a configuration, an adapter, an optimizer, a dtype and documents. The planned side is `forge_algos.Rehearsal`
on an outline of the model; the measured side is the meter of the accelerator around two steps of `forge_algos.train`: torch's
profiler on a CPU, the allocator's statistics on a GPU. `--table` prints the table of docs/memory.md.

    hatch run bench:memory_plan [--table] [--device cpu]
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import tempfile
import time
from functools import partial
from typing import Any

import attrs
import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    Lfm2Config,
    LlamaConfig,
    Mamba2Config,
    MixtralConfig,
    OPTConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

import forge_accel
import forge_algos
import forge_dist

_SHAPE = {
    "vocab_size": 8000,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
}
_WINDOWS = ["sliding_attention", "full_attention"] * 2
CONFIGS: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**_SHAPE, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**_SHAPE),
    "gemma2": lambda: Gemma2Config(**_SHAPE, sliding_window=64),
    "gemma3": lambda: Gemma3TextConfig(**_SHAPE, sliding_window=64, layer_types=_WINDOWS),
    "qwen3-moe": lambda: Qwen3MoeConfig(**_SHAPE, moe_intermediate_size=128, num_experts=8, num_experts_per_tok=2),
    "mixtral": lambda: MixtralConfig(**_SHAPE, num_local_experts=4, num_experts_per_tok=2),
    "gpt-oss": lambda: GptOssConfig(**_SHAPE, num_local_experts=4, num_experts_per_tok=2, sliding_window=64),
    "lfm2": lambda: Lfm2Config(**_SHAPE, layer_types=["conv", "full_attention"] * 2),
    "qwen3.5": lambda: Qwen3_5TextConfig(
        **_SHAPE,
        layer_types=["linear_attention", "full_attention"] * 2,
        linear_num_value_heads=4,
        linear_num_key_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
    ),
    "mamba2": lambda: Mamba2Config(
        vocab_size=8000, hidden_size=256, num_hidden_layers=4, num_heads=16, head_dim=32, n_groups=1
    ),
    "opt": lambda: OPTConfig(
        vocab_size=8000,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=8,
        ffn_dim=768,
        max_position_embeddings=2048,
        word_embed_proj_dim=256,
    ),
}


@attrs.frozen
class Case:
    """Step that is planned and measured."""

    model: str
    adapter: str = "none"
    optimizer: str = "adamw"
    dtype: str = "float32"
    documents: tuple[tuple[int, ...], ...] = ((300, 200, 100),)
    checkpointing: str = "none"
    packing: str = "on"
    quant_type: str = "nf4"


CASES = (
    Case("llama"),
    Case("llama", checkpointing="full"),
    Case("llama", checkpointing="selective"),
    Case("llama", documents=((1500,), (700, 800))),
    Case("llama", dtype="bfloat16"),
    Case("llama", optimizer="muon"),
    Case("llama", optimizer="adamw_8bit"),
    Case("llama", optimizer="apollo"),
    Case("llama", optimizer="adafactor", packing="off"),
    Case("llama", adapter="lora", dtype="bfloat16"),
    Case("llama", adapter="qlora", dtype="bfloat16"),
    Case("llama", adapter="qlora", quant_type="int8", dtype="bfloat16"),
    Case("llama", adapter="osft"),
    Case("qwen3"),
    Case("qwen3", adapter="lora", documents=((500,), (300, 200))),
    Case("gemma2"),
    Case("gemma3", checkpointing="full", documents=((900, 100),)),
    Case("qwen3-moe"),
    Case("mixtral", adapter="lora"),
    Case("gpt-oss"),
    Case("lfm2"),
    Case("qwen3.5"),
    Case("mamba2"),
)


class Row:
    """Packed row of made-up documents, of which two thirds are learned."""

    def __init__(self, lengths: tuple[int, ...]) -> None:
        self.input_ids = np.random.default_rng(0).integers(3, 8000, sum(lengths))
        self.position_ids = np.concatenate([np.arange(length) for length in lengths])
        self.cu_seqlens = np.cumsum([0, *lengths])
        firsts = np.concatenate([np.arange(length) < max(1, length // 3) for length in lengths])
        self.labels = np.where(firsts, -100, self.input_ids)
        self.max_seqlen = max(lengths)


def measure(case: Case, machine: forge_accel.Accelerator) -> dict[str, Any]:
    """Plan and measure one case."""
    device, dtype = machine.device.value, machine.dtype(case.dtype).value
    adapter = forge_algos.AdapterSettings(adapter=case.adapter, quant_type=case.quant_type)
    frozen = case.adapter not in ("none", "osft")
    autocast = partial(machine.autocast, dtype)
    rows = [Row(lengths) for lengths in case.documents]
    optimizer_settings = forge_algos.OptimizerSettings(optimizer=case.optimizer)
    with tempfile.TemporaryDirectory() as folder:
        model = AutoModelForCausalLM.from_config(CONFIGS[case.model](), dtype=torch.float32)
        model.save_pretrained(folder)
        del model
        attention, packing, draft = _way(folder, case, machine, dtype, autocast)
        quantization = forge_algos.quantization_config(adapter, compute_dtype=dtype)
        request = forge_dist.LoadRequest(
            model_path=folder,
            dtype=dtype if frozen else torch.float32,
            attention=attention.name,
            attention_function=attention.function,
            quantization=quantization,
        )
        ranks = forge_dist.Ranks(forge_dist.topology(forge_dist.LaunchSettings(), environ={}))
        settings = forge_dist.StrategySettings(strategy="single", activation_checkpointing=case.checkpointing)
        strategy = forge_dist.make_strategy(settings, ranks, device=device, adapter=frozen)

        def make(model: Any) -> Any:
            return forge_algos.make_optimizer(model, optimizer_settings, fused=machine.fused_optimizer.value)

        began = time.perf_counter()
        rehearsal = forge_algos.Rehearsal(
            device=device,
            allocated=machine.allocated_bytes,
            autocast=autocast,
            product_scratch=machine.product_scratch,
            library_bytes=machine.library_bytes(),
        )
        outline = rehearsal.model(forge_dist.outline_model(request), draft)
        with rehearsal.adapting():
            adaptation = forge_algos.adapt(outline, adapter)
        model, optimizer = strategy.wrap(rehearsal.placed(adaptation.model), make)
        planned = rehearsal.step(model, optimizer, rows, objective=forge_algos.SFT, adaptation=adaptation)
        seconds = time.perf_counter() - began

        model = forge_dist.load_model(**attrs.asdict(request, recurse=False), device=device)
    forge_algos.keep_documents_apart(
        model, device=device, packing=packing, longest=max(map(max, case.documents)), autocast=autocast
    )
    adaptation = forge_algos.adapt(model, adapter)
    model, optimizer = strategy.wrap(adaptation.model, make)
    forge_algos.SFT().bind(model, device=device)
    gc.collect()
    meter = machine.meter()
    assert meter is not None
    meter.start(sum({t.data_ptr(): t.untyped_storage().nbytes() for t in forge_algos.tensors_of(model)}.values()))
    for _ in forge_algos.train(
        model,
        [rows, rows],
        objective=forge_algos.SFT(),
        optimizer=optimizer,
        scheduler=forge_algos.schedule(optimizer, forge_algos.OptimizerSettings(), num_steps=4),
        adaptation=adaptation,
        autocast=autocast,
        device=device,
    ):
        pass
    took = meter.stop()
    return {
        **attrs.asdict(case),
        "attention": attention.name + ("" if packing == "on" else ", alone"),
        "planned": planned.bytes,
        "measured": took,
        "ratio": planned.bytes / took,
        "seconds": round(seconds, 2),
    }


def _way(folder: str, case: Case, machine: forge_accel.Accelerator, dtype: Any, autocast: Any) -> tuple[Any, Any, Any]:
    """Return attention, packing and small model of the first way that keeps documents apart, as a run takes it."""
    packed = [("auto", "on"), ("eager", "on")] if case.packing == "on" else []
    for name, packing in (*packed, ("sdpa", "off"), ("eager", "off")):
        attention = machine.attention(name, dtype).value
        request = forge_dist.LoadRequest(
            model_path=folder, dtype=dtype, attention=attention.name, attention_function=attention.function
        )
        try:
            draft = forge_dist.draft_model(request, device=machine.device.value)
            forge_algos.keep_documents_apart(draft, device=machine.device.value, packing=packing, longest=1, autocast=autocast)
        except (forge_algos.PackedBatchError, forge_dist.ModelError):
            continue
        return attention, packing, draft
    raise AssertionError(case)


def main() -> None:
    """Print a JSON line for each case, or the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--device", default="auto")
    asked = parser.parse_args()
    logging.disable(logging.WARNING)
    machine = forge_accel.accelerator(asked.device)
    machine.library_bytes()
    if asked.table:
        print("| model | adapter | optimizer | dtype | documents | attention | planned | measured | planned / measured |")
        print("|---|---|---|---|---|---|---:|---:|---:|")
    for case in CASES:
        found = measure(case, machine)
        if not asked.table:
            print(json.dumps(found), flush=True)
            continue
        documents = "; ".join("+".join(map(str, row)) for row in case.documents)
        attention = found["attention"] + {"none": "", "full": ", checkpointed", "selective": ", selective"}[case.checkpointing]
        bits = " int8" if case.quant_type == "int8" else ""
        mib = [f"{found[name] / 2**20:.1f} MiB" for name in ("planned", "measured")]
        print(
            f"| {case.model} | {case.adapter}{bits} | {case.optimizer} | {case.dtype} | {documents} | {attention} | {mib[0]} | "
            f"{mib[1]} | {found['ratio']:.4f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
