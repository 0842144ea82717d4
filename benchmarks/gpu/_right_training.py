"""Correctness of training: packed losses, exports, optimizers, adapters, and a whole run that is stopped and resumed."""

import json
import math
import tempfile
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from _here import Here, check, packed, relative
from _right import _seconds

TOLD = ("kernels: ", "memory", "compile: ", "WARNING")
"""What is shown of a run's log."""


@check("right")
def packed_alone(here: Here) -> tuple[bool, dict[str, Any]]:
    """Compare a packed row in bf16 with samples alone in float32; what bf16 does to samples alone is the yardstick."""
    torch = here.torch
    lengths = [7, 40, 23] if here.toy else [37, 400, 3, 812, 129]
    samples = here.rows("small", lengths)
    count = sum(int((sample.labels[1:] != -100).sum()) for sample in samples)

    def alone(context: Any) -> tuple[float, Any]:
        model, total = here.model("small", dtype=torch.float32, attention="eager"), 0.0
        for sample in samples:
            ids = torch.tensor(sample.input_ids, device=here.device, dtype=torch.long)[None]
            labels = torch.tensor(sample.labels, device=here.device, dtype=torch.long)
            with context:
                logits = model(input_ids=ids, use_cache=False).logits[0]
            loss = (
                torch.nn.functional.cross_entropy(logits.float()[:-1], labels[1:], ignore_index=-100, reduction="sum") / count
            )
            loss.backward()
            total += float(loss)
        return total, torch.cat([p.grad.flatten() for p in model.parameters()])

    from forge_algos import OptimizerSettings

    exact, noise = alone(nullcontext()), alone(here.autocast())
    model = here.model("small", dtype=torch.float32)
    still = OptimizerSettings(learning_rate=1e-12, lr_scheduler="constant")
    out = next(here.train(model, [[packed(samples)]], settings=still, max_grad_norm=0.0))
    grads = torch.cat([p.grad.flatten() for p in model.parameters()])
    facts = {
        "loss_error": abs(out.loss - exact[0]) / exact[0],
        "loss_error_alone": abs(noise[0] - exact[0]) / exact[0],
        "grad_error": relative(grads, exact[1]),
        "grad_error_alone": relative(noise[1], exact[1]),
    }
    good = facts["loss_error"] < max(3 * facts["loss_error_alone"], 2e-3)
    return good and facts["grad_error"] < 2 * facts["grad_error_alone"] + 1e-3, facts


@check("right")
def shared_alone(here: Here) -> tuple[bool, dict[str, Any]]:
    """Compare rows of which a system prompt is computed once, in bf16, with the same rows in float32 and with repeating it."""
    from forge_algos import OptimizerSettings, shares_prompts

    torch, system = here.torch, 40 if here.toy else 600
    lengths = [system + n for n in ((7, 40, 23) if here.toy else (37, 400, 3, 812, 129))]
    samples = here.rows("small", lengths, system=system)
    still = OptimizerSettings(learning_rate=1e-12, lr_scheduler="constant")

    def one(*, shared: bool, exact: bool) -> tuple[float, Any, str | None]:
        model = here.model("small", dtype=torch.float32)
        how = {"autocast": nullcontext} if exact else {}
        can, why = shares_prompts(model, device=here.device, autocast=how.get("autocast", here.autocast))
        row = packed(samples, shared=shared)
        out = next(here.train(model, [[row]], settings=still, max_grad_norm=0.0, **how))
        return out.loss, torch.cat([p.grad.flatten() for p in model.parameters()]), None if can else why

    exact, repeated, shared = one(shared=False, exact=True), one(shared=False, exact=False), one(shared=True, exact=False)
    again = one(shared=True, exact=True)
    facts = {
        "tokens": [len(packed(samples, shared=each).input_ids) for each in (False, True)],
        "why_not": shared[2],
        "loss_errors": {"repeated": abs(repeated[0] / exact[0] - 1), "shared": abs(shared[0] / exact[0] - 1)},
        "grad_errors": {"repeated": relative(repeated[1], exact[1]), "shared": relative(shared[1], exact[1])},
        "in_float32": {"loss": abs(again[0] / exact[0] - 1), "gradients": relative(again[1], exact[1])},
    }
    good = shared[2] is None and facts["grad_errors"]["shared"] < 2 * facts["grad_errors"]["repeated"] + 1e-3
    return good and facts["in_float32"]["loss"] < 1e-5 and facts["in_float32"]["gradients"] < 1e-3, facts


@check("right")
def selective(here: Here) -> tuple[bool | None, dict[str, Any]]:
    """Count the forward kernels of attention in a step: with selective checkpointing no more than with none."""
    from forge_dist.strategies._wrappers import checkpoint_activations

    row, counts, losses = packed(here.rows("small", here.lengths(4096))), {}, {}
    for kind in ("none", "selective", "full"):
        model = here.model("small", dtype=here.torch.float32)
        checkpoint_activations(model, kind)
        loop = here.train(model, ([row] for _ in range(3)))
        losses[kind] = [next(loop).loss]
        with here.torch.profiler.profile(activities=here.torch.profiler.supported_activities()) as recorded:
            losses[kind].append(next(loop).loss)
            here.machine.synchronize()
        loop.close()
        names = [event.name.lower() for event in recorded.events()]
        counts[kind] = sum("flash_fwd" in name and "kernel" in name for name in names)
        if not counts[kind]:
            counts[kind] = sum("attention" in name and "backward" not in name for name in names)
    facts = {"forward_kernels": counts, "losses": losses}
    if here.toy:
        return None, facts
    apart = max(abs(loss / losses["none"][1] - 1) for _, loss in losses.values())
    return 0 < counts["none"] == counts["selective"] < counts["full"] and apart < 1e-3, facts


@check("right")
def export(here: Here) -> tuple[bool, dict[str, Any]]:
    """Export in bf16 beside the optimizer, and prove it: that takes no more memory than two of the largest tensors."""
    from forge_dist import check_export, export_model

    model = here.model("small", dtype=here.torch.float32)
    list(here.train(model, [[packed(here.rows("small", [30, 50]))]]))
    here.machine.reset_peak_memory()
    held = here.machine.held_bytes() or 0
    with tempfile.TemporaryDirectory() as folder:
        export_model(model, Path(folder) / "out", dtype=here.torch.bfloat16)
        samples = [(s.input_ids.tolist(), s.labels.tolist()) for s in here.rows("small", [30, 50])]
        found = check_export(model, Path(folder) / "out", samples)
    extra = (here.machine.peak_memory_bytes() or held) - held
    largest = max(p.numel() * p.element_size() for p in model.parameters())
    facts = {"in_memory": found.in_memory, "reloaded": found.reloaded, "extra_bytes": extra, "largest_tensor_bytes": largest}
    return not here.gpu or extra <= 2 * largest, facts


@check("right")
def optimizers(here: Here) -> tuple[bool, dict[str, Any]]:
    """Take six steps with each optimizer: the loss falls."""
    from forge_algos import MissingPackageError, OptimizerSettings

    facts: dict[str, Any] = {}
    for name in ("adamw", "adafactor", "muon", "adamw_8bit", "schedule_free", "apollo", "apollo_mini"):
        model = here.model("small", dtype=here.torch.float32, layers=2)
        settings = OptimizerSettings(optimizer=name, learning_rate=1e-3, lr_scheduler="constant")
        try:
            rows = [[packed(here.rows("small", [40, 60]))]] * 6
            facts[name] = [round(out.loss, 4) for out in here.train(model, rows, settings=settings)]
        except MissingPackageError as error:
            facts[name] = f"skipped: {error}"
    return all(isinstance(found, str) or found[-1] < found[0] for found in facts.values()), facts


@check("right")
def rounding(here: Here) -> tuple[bool, dict[str, Any]]:
    """Round float32 weights stochastically: the device draws the CPU's bits, by one compiled kernel."""
    import time

    from forge_algos.optimizers._rounding import round_stochastically_

    torch, same, seconds = here.torch, True, 0.0
    for rows, columns in ((7, 300), (4, 5)) if here.toy else ((1000, 300), (8192, 4096), (33, 4096)):
        exact = torch.randn(rows, columns)
        found = []
        for device in ("cpu", here.device):
            into, given = torch.empty_like(exact, dtype=torch.bfloat16, device=device), exact.to(device)
            round_stochastically_(into, given.clone(), first_row=5, key=2**31 + 9)
            here.machine.synchronize()
            began = time.perf_counter()
            round_stochastically_(into, given, first_row=5, key=2**31 + 9)
            here.machine.synchronize()
            seconds = max(seconds, 0.0 if device == "cpu" else time.perf_counter() - began)
            found.append(into.cpu())
        same &= torch.equal(*found)
    return same, {"longest_seconds": seconds}


@check("right")
def head_kernel(here: Here) -> tuple[bool | None, dict[str, Any]]:
    """Score rows by one kernel and by operators: the same numbers in every variant, and the milliseconds of both."""
    from itertools import product

    from forge_algos.losses import _score_rows as kernel
    from forge_algos.losses._likelihood import Likelihood, score_in_place

    if not here.gpu:
        return None, {"skipped": "the kernel is for GPUs: a CPU goes by operators"}
    torch, columns = here.torch, here.shape("1b")["vocab_size"]
    dtypes = (None, torch.float32, torch.bfloat16, torch.float16)
    tried: dict[str, Any] = {}
    for dtype, weighted in product(dtypes, (False, True)):
        try:
            tried[f"{dtype}{' weighted' * weighted}"] = kernel.agrees(str(here.device), dtype, weighted=weighted)
        except Exception as error:
            tried[f"{dtype}{' weighted' * weighted}"] = f"{type(error).__name__}: {str(error)[:300]}"

    def drawn(rows: int) -> tuple[Any, Any]:
        torch.manual_seed(0)
        logits = torch.randn(rows, columns, device=here.device) * 4
        targets = torch.randint(0, columns, (rows,), device=here.device)
        # As in training, where half of the probability is the target's.
        return logits.scatter_(1, targets[:, None], 19.0), targets

    logits, targets = drawn(8 if here.toy else 64)
    used = kernel._has_kernel(logits, None, here.dtype)
    facts: dict[str, Any] = {"used": used, "tried": tried}
    if not used:
        return False, facts
    worst, rounded = dict.fromkeys(("scores", *map(str, dtypes[1:])), 0.0), 1.0
    for dft, smoothing, z_loss, weighted in product((False, True), (0.0, 0.1), (0.0, 1e-4), (False, True)):
        likelihood = Likelihood(dft=dft, label_smoothing=smoothing, z_loss=z_loss)
        weights = torch.linspace(0.5, 2, len(logits), device=here.device) if weighted else None
        exact, slope = torch.empty(3, len(logits), device=here.device, dtype=torch.float64), logits.double()
        score_in_place(slope, targets, likelihood, None if weights is None else weights.double(), tuple(exact), slope=True)
        found = {}
        for dtype in dtypes:
            scores = torch.empty(3, len(logits), device=here.device)
            found[dtype] = kernel.score_rows(logits.clone(), targets, likelihood, weights, tuple(scores), slope=dtype)
            errors = [relative(ours, theirs) for ours, theirs in zip(scores, exact, strict=True)]
            worst["scores"] = max(worst["scores"], *errors)
            if dtype is not None:
                worst[str(dtype)] = max(worst[str(dtype)], relative(found[dtype], slope))
        rounded = min(rounded, float((found[torch.float32].bfloat16() == found[torch.bfloat16]).double().mean()))
    limits = dict(zip(worst, (1e-5, 1e-5, 2**-8, 2**-8), strict=True))

    logits, targets = drawn(8 if here.toy else 512)
    scores = tuple(torch.empty(3, len(logits), device=here.device))
    given, out = logits.clone(), torch.empty_like(logits, dtype=here.dtype)

    def operators() -> None:
        score_in_place(given, targets, Likelihood(), None, scores, slope=True)
        given.to(here.dtype)

    def one_kernel(**how: int) -> None:
        tensors = logits, targets, scores[0], out, *scores
        kernel.launch(tensors, (0.0, 0.0, 0.0), weighted=False, slope=True, **how)

    took: dict[str, Any] = {"operators": _seconds(here, operators) * 1e3, "kernel": _seconds(here, one_kernel) * 1e3}
    for block, warps in ((2048, 8), (4096, 8), (4096, 16), (8192, 16), (8192, 32), (16384, 32)):
        try:
            took[f"{block} columns, {warps} warps"] = _seconds(here, partial(one_kernel, block=block, warps=warps)) * 1e3
        except Exception as error:
            took[f"{block} columns, {warps} warps"] = f"{type(error).__name__}: {str(error)[:200]}"
    facts |= {"relative_errors": worst, "share_rounded_to_nearest": rounded, "milliseconds": took, "rows": len(logits)}
    good = all(math.isfinite(worst[name]) and worst[name] < limit for name, limit in limits.items())
    return good and rounded > 0.999 and all(answer is True for answer in tried.values()), facts


@check("right")
def adapters(here: Here) -> tuple[bool, dict[str, Any]]:
    """Take six steps with LoRA, DoRA and OSFT: the loss falls, and what is frozen stays to the bit."""
    from forge_algos import AdapterSettings, adapt

    facts, good, torch = {}, True, here.torch
    for name in ("lora", "dora", "osft"):
        settings = AdapterSettings(adapter=name, **({"unfreeze_rank_ratio": 0.25} if name == "osft" else {"lora_r": 8}))
        model = here.model("small", dtype=torch.float32 if name == "osft" else torch.bfloat16)
        adaptation = adapt(model, settings)
        frozen = {n: p.detach().clone() for n, p in adaptation.model.named_parameters() if not p.requires_grad}
        rows = [[packed(here.rows("small", [40, 60]))]] * 6
        losses = [out.loss for out in here.train(adaptation.model, rows, adaptation=adaptation)]
        kept = all(torch.equal(p, frozen[n]) for n, p in adaptation.model.named_parameters() if n in frozen)
        facts[name] = {"losses": [round(loss, 4) for loss in losses], "frozen_kept": kept}
        good &= kept and losses[-1] < losses[0] and all(map(math.isfinite, losses))
    return good, facts


def prepared_run(here: Here, base: Path, shape: str, *, length: int) -> dict[str, Any]:
    """Write a model of a shape and 64 rows of about `length` tokens below `base`; return settings of `forge.sft` for them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate(["<|endoftext|>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|endoftext|>", pad_token="<|endoftext|>")
    here.torch.manual_seed(0)
    config = LlamaConfig(**{**here.shape(shape), "vocab_size": len(tokenizer)}, max_position_embeddings=4096)
    with here.torch.device(here.device):
        LlamaForCausalLM(config).save_pretrained(base / "model")
    tokenizer.save_pretrained(base / "model")
    rows = [[1 + k % 250 for k in range(length + i % 7)] for i in range(64)]
    lines = [json.dumps({"input_ids": row, "labels": [-100, *row[1:]]}) + "\n" for row in rows]
    (base / "data.jsonl").write_text("".join(lines), encoding="utf-8")
    return {
        "model_path": str(base / "model"), "data_path": str(base / "data.jsonl"), "effective_batch_size": 16, "seed": 1,
        "learning_rate": 1e-3, "lr_scheduler": "constant", "device": here.machine.name,
    }  # fmt: skip


@check("right")
def whole_run(here: Here) -> tuple[bool, dict[str, Any]]:
    """Run `forge.sft` from rows to a proven export, once at a stretch and once stopped at half and resumed."""
    import forge

    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        how = prepared_run(here, base, "small", length=9) | {"keep_full_state": True}
        forge.sft(**how, max_steps=6, ckpt_output_dir=str(base / "one"))
        forge.sft(**how, max_steps=3, ckpt_output_dir=str(base / "two"))
        forge.sft(**how, max_steps=6, ckpt_output_dir=str(base / "two"))
        losses = []
        for name in ("one", "two"):
            lines = map(json.loads, (base / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
            losses.append([line["loss"] for line in lines if "loss" in line])
    apart = max(abs(a - b) / b for a, b in zip(*losses, strict=True))
    return losses[0][-1] < losses[0][0] and apart < 1e-3, {"losses": losses, "apart": apart}


@check("right")
def whole_8bit(here: Here) -> tuple[bool, dict[str, Any]]:
    """Run `forge.sft` with bfloat16 weights and 8-bit AdamW behind a memory plan: the kernels are taken, the plan holds."""
    import forge

    facts: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        how = prepared_run(here, base, "small", length=200)
        for name, weights in (("float32", "float32"), ("bfloat16", "bfloat16")):
            run = base / name
            forge.sft(**how, optimizer="adamw_8bit", weights=weights, max_steps=4, ckpt_output_dir=str(run))
            lines = list(map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()))
            log = (run / "log.txt").read_text(encoding="utf-8").splitlines()
            facts[name] = {
                "losses": [line["loss"] for line in lines if "loss" in line],
                "log": [
                    line[:240] for line in log if any(word in line for word in ("kernels: ", "emory", "compile: ", "WARNING"))
                ],
            }
    given_up = [line for found in facts.values() for line in found["log"] if "given up" in line]
    return not given_up and all(found["losses"][-1] < found["losses"][0] for found in facts.values()), facts
