"""Speed: tokens a second, MFU and peak memory of forge's loop beside a bare loop; goals for one H200."""

import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from _here import Here, check, packed
from _one_shard import one_rank, sharded

GOALS = {
    "full_1b_compiled": 54_000,
    "full_8b": 11_000,
    "lora_8b_compiled": 14_000,
    "lora_06b": 54_000,
    "lora_06b_compiled": 54_000,
}
"""Tokens a second that one H200 should reach."""


def measure(here: Here, name: str, shape: str, step: Callable[[], int], *, flops: float) -> dict[str, Any]:
    """Return the median time of a step, and what follows from it; the first three are not counted."""
    warmup, steps = (1, 2) if here.toy else (3, 6)
    for _ in range(warmup):
        tokens = step()
    here.machine.synchronize()
    here.machine.reset_peak_memory()
    times = []
    for _ in range(steps):
        started = time.perf_counter()
        tokens = step()
        here.machine.synchronize()
        times.append(time.perf_counter() - started)
    seconds, peak = statistics.median(times), here.machine.peak_flops(here.dtype)
    mfu = None if peak is None or here.toy else round(flops / seconds / peak, 4)
    rate, goal = tokens / seconds, None if here.toy else GOALS.get(name)
    facts = {"shape": shape, "tokens_per_second": round(rate, 1), "seconds_per_step": round(seconds, 4), "mfu": mfu}
    return {**facts, **here.peaks(), "goal": goal, "of_goal": None if goal is None else round(rate / goal, 3)}


def side(here: Here, name: str, shape: str, tokens: int, **how: Any) -> tuple[bool | None, dict[str, Any]]:
    """Measure one way to train a shape: full or LoRA, forge's loop or a bare one, compiled, with Liger's kernels."""
    with one_rank(here) if how.get("sharded") else nullcontext() as ranks:
        return _side(here, name, shape, tokens, ranks, **how)


def _side(here: Here, name: str, shape: str, tokens: int, ranks: Any, **how: Any) -> tuple[bool | None, dict[str, Any]]:
    import torch
    from torch.nn.functional import cross_entropy

    from forge_accel import AccelError, CompiledBlocks, use_liger
    from forge_algos import AdapterSettings, MissingPackageError, OptimizerSettings, adapt, cast_trained, repeated_blocks

    lora, bare, padded = how.get("lora", False), how.get("bare", False), how.get("padded", False)
    adapter = AdapterSettings(adapter="lora", lora_r=16, lora_alpha=32.0) if lora else None
    if how.get("osft"):
        adapter = AdapterSettings(adapter="osft", unfreeze_rank_ratio=0.25)
    if how.get("quantized"):
        try:
            model, adapter = here.quantized(shape, how.get("quant_type", "nf4"))
        except (AccelError, MissingPackageError) as error:
            return None, {"side": how, "skipped": str(error)}
    else:
        model = here.model(
            shape,
            dtype=here.dtype if lora else torch.float32,
            attention="sdpa" if padded else "documents",
            layers=how.get("layers"),
        )
    if how.get("checkpointed"):
        model.gradient_checkpointing_enable({"use_reentrant": False})
    facts: dict[str, Any] = {"side": how}
    if how.get("kernels"):
        try:
            here.machine.kernels("liger")
        except AccelError as error:
            return None, {**facts, "skipped": str(error)}
        facts["replaced"] = [tuple(each) for each in use_liger(model, dtype=here.dtype, device=here.device)]
    adaptation = None if adapter is None else adapt(model, adapter)
    trained = model if adaptation is None else adaptation.model
    if how.get("weights"):
        cast_trained(trained, here.dtype)
    settings = OptimizerSettings(optimizer=how.get("optimizer", "adamw"), learning_rate=1e-5, lr_scheduler="constant")
    more: dict[str, Any] = {}
    if ranks is not None:
        trained, optimizer, strategy = sharded(here, trained, settings, ranks, gathered=True)
        more = {"optimizer": optimizer, "parallel": strategy, "autocast": nullcontext}
    if how.get("compiled"):
        facts["notes"] = []
        backend = "aot_eager" if here.toy else "inductor"
        CompiledBlocks(repeated_blocks(trained), backend=backend, note=facts["notes"].append)
    # Rows of one length have nothing to pad: the best case of a trainer that does.
    lengths = [32] * 4 if padded and here.toy else [2048] * (tokens // 2048) if padded else here.lengths(tokens)
    system = how.get("system", 0) and (32 if here.toy else how["system"])
    if system:
        # Answers of 200 tokens behind the system prompt.
        lengths = [system + (16 if here.toy else 200)] * (4 if here.toy else tokens // (system + 200))
    rows = here.rows(shape, lengths, system=system)
    labelled = sum(int((row.labels[1:] != -100).sum()) for row in rows)
    if not bare:
        rows_forever = ([packed(rows, shared=bool(how.get("shared")))] for _ in range(10**6))
        loop = here.train(trained, rows_forever, settings=settings, adaptation=adaptation, **more)

        def step() -> int:
            return next(loop).tokens
    else:
        parameters = [p for p in trained.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=1e-5, weight_decay=0.0, fused=True)
        trained.train()

        def step() -> int:
            row = packed(rows)
            ids, positions = (torch.tensor(each, device=here.device).long()[None] for each in (row.input_ids, row.position_ids))
            ends = torch.tensor(row.cu_seqlens, device=here.device, dtype=torch.int32)
            targets = torch.tensor(row.labels, device=here.device).long()
            where = (targets[1:] != -100).nonzero().squeeze(1)
            more = {"position_ids": positions, "cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "use_cache": False}
            with here.autocast():
                longest = {"max_length_q": row.max_seqlen, "max_length_k": row.max_seqlen}
                if padded:
                    logits = trained(input_ids=ids.view(len(lengths), -1), use_cache=False).logits.flatten(0, 1)[where]
                else:
                    logits = trained(input_ids=ids, logits_to_keep=where, **more, **longest).logits[0]
            cross_entropy(logits.float(), targets[where + 1]).backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return ids.numel()

    if how.get("shared"):
        from forge_algos import shares_prompts

        can, facts["why"] = shares_prompts(trained, device=here.device, autocast=here.autocast)
        if not can:
            return False, facts
        lengths = [lengths[0], *(length - system for length in lengths[1:])]
    found = measure(
        here, name, shape, step, flops=_flops(here, shape, lengths, labelled, trained if lora else None, how.get("layers"))
    )
    of_goal = found["of_goal"]
    return None if of_goal is None else of_goal >= 1, {**facts, **found}


def _flops(here: Here, shape: str, lengths: list[int], labelled: int, adapted: Any, layers: int | None = None) -> float:
    """Count a step's operations by the formula of benchmarks/_flops.py."""
    from _flops import step_flops
    from _models import Described

    s = here.shape(shape)
    wide, heads, keys, size = s["hidden_size"], s["num_attention_heads"], s["num_key_value_heads"], s["head_dim"]
    block = 2 * wide * heads * size + 2 * wide * keys * size + 3 * wide * s["intermediate_size"]
    layers = min(layers or s["num_hidden_layers"], s["num_hidden_layers"])
    described = Described(shape, s["vocab_size"], wide, layers, heads, size, layers * block, s["tie_word_embeddings"])
    adapter = 0 if adapted is None else sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    return step_flops(described, lengths, labelled, lora_weights=adapter)


_BF16 = {"weights": "bfloat16", "optimizer": "adamw_8bit"}
_AGAIN = {"checkpointed": True}
for _name, _shape, _tokens, _how in (
    ("full_1b", "1b", 16_384, {}),
    ("full_1b_bare", "1b", 16_384, {"bare": True}),
    ("full_1b_padded", "1b", 16_384, {"bare": True, "padded": True}),
    ("full_1b_compiled", "1b", 16_384, {"compiled": True}),
    ("full_1b_sharded", "1b", 16_384, {"sharded": True, "compiled": True}),
    ("full_1b_liger", "1b", 16_384, {"kernels": "liger"}),
    ("full_1b_bf16", "1b", 16_384, _BF16),
    ("full_1b_bf16_compiled", "1b", 16_384, {**_BF16, "compiled": True}),
    # Singular vectors of 16 layers take minutes, and a step is as fast without them.
    ("full_4_layers", "1b", 16_384, {"layers": 4}),
    ("osft_4_layers", "1b", 16_384, {"layers": 4, "osft": True}),
    ("lora_1b", "1b", 16_384, {"lora": True}),
    ("lora_1b_bare", "1b", 16_384, {"lora": True, "bare": True}),
    ("full_8b", "8b", 8_192, {"optimizer": "adamw_8bit", "compiled": True}),
    ("full_8b_sharded", "8b", 8_192, {"sharded": True, "optimizer": "adamw_8bit", "compiled": True}),
    ("full_8b_checkpointed", "8b", 16_384, {**_AGAIN, "optimizer": "adamw_8bit", "compiled": True}),
    ("full_8b_long", "8b", 16_384, {"optimizer": "adamw_8bit", "compiled": True}),
    ("full_8b_adamw", "8b", 8_192, _AGAIN),
    ("full_8b_bf16", "8b", 8_192, _BF16),
    ("full_8b_bf16_compiled", "8b", 8_192, {**_BF16, "compiled": True}),
    ("full_8b_bf16_checkpointed", "8b", 16_384, {**_BF16, **_AGAIN}),
    ("lora_8b", "8b", 8_192, {"lora": True}),
    ("lora_8b_bare", "8b", 8_192, {"lora": True, "bare": True}),
    ("lora_8b_compiled", "8b", 8_192, {"lora": True, "compiled": True}),
    ("lora_8b_liger", "8b", 8_192, {"lora": True, "kernels": "liger"}),
    ("qlora_8b", "8b", 8_192, {"lora": True, "quantized": True}),
    ("qlora_8b_int8", "8b", 8_192, {"lora": True, "quantized": True, "quant_type": "int8"}),
    ("qlora_8b_compiled", "8b", 8_192, {"lora": True, "quantized": True, "compiled": True}),
    ("lora_06b", "0.6b", 16_384, {"lora": True}),
    ("lora_06b_compiled", "0.6b", 16_384, {"lora": True, "compiled": True}),
    ("full_1b_system", "1b", 16_384, {"compiled": True, "system": 1024, "shared": True}),
    ("full_1b_system_repeated", "1b", 16_384, {"compiled": True, "system": 1024}),
    ("lora_8b_system", "8b", 8_192, {"lora": True, "compiled": True, "system": 1024, "shared": True}),
    ("lora_8b_system_repeated", "8b", 8_192, {"lora": True, "compiled": True, "system": 1024}),
):

    def _run(
        here: Here, name: str = _name, shape: str = _shape, tokens: int = _tokens, how: dict[str, Any] = _how
    ) -> tuple[bool | None, dict[str, Any]]:
        return side(here, name, shape, tokens, **how)

    _run.__name__ = _name
    check("speed")(_run)


KINDS = {
    "products": ("nvjet", "gemm", "cutlass", "cublas", "splitk"),
    "attention": ("flash", "fmha", "cudnn"),
    "optimizer": ("multi_tensor", "adam", "foreach", "8bit"),
    "compiled": ("triton",),
    "4 bits": ("dequantize", "kgemm_4bit"),
}
"""Parts of kernels' names, by what a kernel does; what has none of them is `rest`."""


def _profiled(here: Here, shape: str, tokens: int, **how: Any) -> dict[str, Any]:
    """Return the milliseconds of a step's kernels, by kind and by name, beside the step's own."""
    import torch
    from torch.profiler import ProfilerActivity

    from forge_accel import CompiledBlocks
    from forge_algos import AdapterSettings, OptimizerSettings, adapt, repeated_blocks

    model = here.model(shape, dtype=here.dtype if how.get("lora") else torch.float32, layers=how.get("layers"))
    settings = OptimizerSettings(optimizer=how.get("optimizer", "adamw"), learning_rate=1e-5, lr_scheduler="constant")
    adapter = AdapterSettings(adapter="lora", lora_r=16, lora_alpha=32.0)
    adaptation = adapt(model, adapter) if how.get("lora") else None
    trained = model if adaptation is None else adaptation.model
    CompiledBlocks(repeated_blocks(trained), backend="aot_eager" if here.toy else "inductor")
    rows = here.rows(shape, here.lengths(tokens))
    loop = here.train(trained, ([packed(rows)] for _ in range(9)), settings=settings, adaptation=adaptation)
    for _ in range(1 if here.toy else 3):
        next(loop)
    here.machine.synchronize()
    activities = set(torch.profiler.supported_activities()) or {ProfilerActivity.CPU}
    with torch.profiler.profile(activities=activities) as recorded:
        began = time.perf_counter()
        next(loop)
        here.machine.synchronize()
        wall = time.perf_counter() - began
    loop.close()
    spent: dict[str, list[float]] = {}
    for event in recorded.events():
        on_device = str(event.device_type).endswith("CUDA")
        if on_device or not here.gpu:
            each = spent.setdefault(event.name[:90], [0, 0.0])
            each[0] += 1
            each[1] += (event.self_device_time_total if on_device else event.self_cpu_time_total) / 1e3
    kinds = dict.fromkeys([*KINDS, "rest"], 0.0)
    for name, (_, ms) in spent.items():
        kind = next((kind for kind, parts in KINDS.items() if any(part in name.lower() for part in parts)), "rest")
        kinds[kind] += ms
    top = sorted(([name, count, round(ms, 2)] for name, (count, ms) in spent.items()), key=lambda each: -each[2])[:40]
    facts = {"step_ms": round(wall * 1e3, 1), "kernels_ms": round(sum(kinds.values()), 1), "kernels": len(spent)}
    return {**facts, "kinds_ms": {kind: round(ms, 1) for kind, ms in kinds.items()}, "top_ms": top}


@check("speed")
def profile(here: Here) -> tuple[None, dict[str, Any]]:
    """Show where the time of steps with compiled blocks goes: a 1B model, and eight layers of an 8B, full and LoRA."""
    cases: dict[str, dict[str, Any]] = {
        "full_1b": {"shape": "1b", "tokens": 16_384},
        "full_8b, 8 layers": {"shape": "8b", "tokens": 8_192, "layers": 8, "optimizer": "adamw_8bit"},
        "lora_8b, 8 layers": {"shape": "8b", "tokens": 8_192, "layers": 8, "lora": True},
    }
    return None, {name: _profiled(here, **how) for name, how in cases.items()}
