"""Correctness of training: packed losses, exports, optimizers, adapters, and a whole run that is stopped and resumed."""

import json
import math
import tempfile
from pathlib import Path
from typing import Any

from _here import Here, check, packed, relative


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

    from contextlib import nullcontext

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
    for name in ("adamw", "adafactor", "muon", "adamw_8bit", "schedule_free"):
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
