"""Correctness of what lasts: probed kernels, FSDP2 on one device, full states, sampling and its update, 4-bit weights."""

import math
import tempfile
from collections import namedtuple
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from _here import Here, check, packed, relative
from _one_shard import one_rank, sharded

Asked = namedtuple("Asked", "input_ids prompt columns")  # noqa: PYI024 - what forge_algos reads of a prompt


@check("right")
def shared_prompts(here: Here) -> tuple[bool, dict[str, Any]]:
    """Compare attention in bf16 whose later samples read the first one's beginning too with float32; gradients too."""
    from forge_accel import document_attention

    torch, lengths, prompt = here.torch, *(([5, 33, 17], 3) if here.toy else ([131, 700, 64, 1000], 129))
    fast = here.machine.attention("auto", here.dtype).value.function
    seen, keys, start = [], [0], 0
    for length in lengths:
        own = [*range(min(prompt, start)), *range(start, start + length)]
        seen += own
        keys.append(keys[-1] + len(own))
        start += length
    ends = torch.tensor([0, *lengths], device=here.device).cumsum(0).to(torch.int32)
    more = {"cu_seq_lens_q": ends, "max_length_q": max(lengths), "max_length_k": prompt + max(lengths), "sliding_window": None}
    more |= {"kv_rows": torch.tensor(seen, device=here.device)}
    more |= {"cu_seq_lens_k": torch.tensor(keys, dtype=torch.int32, device=here.device)}
    worst = {}
    for heads, groups, size in ((8, 2, 64), (8, 2, 128)):
        torch.manual_seed(1)
        drawn = [torch.randn(1, n, sum(lengths), size, device=here.device) for n in (heads, groups, groups)]
        results = []
        for function, dtype in ((fast, here.dtype), (document_attention, torch.float32)):
            states = [state.to(here.dtype).to(dtype).requires_grad_() for state in drawn]
            out, _ = function(None, *states, **more)
            (out.float() * torch.linspace(-1, 1, out.numel(), device=here.device).view(out.shape)).sum().backward()
            results.append([out.detach(), *(state.grad for state in states)])
        errors = [relative(ours, theirs) for ours, theirs in zip(*results, strict=True)]
        worst[f"{heads}/{groups}x{size}"] = max(errors)
    return all(math.isfinite(error) and error < 2e-2 for error in worst.values()), {"relative_errors": worst}


@check("right")
def probe_kernel(here: Here) -> tuple[bool, dict[str, Any]]:
    """Count calls of the fast kernel in the probe of a run's start and in a step: what trains is what was proved."""
    from functools import partial

    from forge_accel import document_attention
    from forge_accel.attention._varlen import find_kernel
    from forge_algos import keep_documents_apart

    kernel, calls = find_kernel() if here.gpu else _padded_kernel(here), []

    def counted(*given: Any, **more: Any) -> Any:
        calls.append(given[0].dtype)
        return kernel(*given, **more)  # pyrefly: ignore[not-callable]  a GPU's torch has it

    facts = {}
    for name, dtype in (("float32 weights", here.torch.float32), ("bfloat16 weights", here.dtype)):
        model = here.model("small", dtype=dtype, function=partial(document_attention, varlen_kernel=counted))
        calls.clear()
        _, why = keep_documents_apart(model, device=here.device, autocast=here.autocast)
        probed = len(calls)
        calls.clear()
        next(here.train(model, [[packed(here.rows("small", [9, 30]))]]))
        facts[name] = {"in_probe": probed, "in_step": len(calls), "why": why}
    return all(found["in_probe"] and found["in_step"] for found in facts.values()), facts


def _padded_kernel(here: Here) -> Any:
    """Return a stand-in for a GPU's kernel: each document by torch's own attention."""
    from torch.nn.functional import scaled_dot_product_attention

    def kernel(query: Any, key: Any, value: Any, ends: Any, ends_k: Any, *_: Any, scale: Any = None, **more: Any) -> Any:
        out, cuts, cuts_k = [], ends.tolist(), ends_k.tolist()
        for at in range(len(cuts) - 1):
            span = slice(cuts_k[at], cuts_k[at + 1])
            states = [s.transpose(0, 1)[None] for s in (query[cuts[at] : cuts[at + 1]], key[span], value[span])]
            grouped = bool(more.get("enable_gqa"))
            made = scaled_dot_product_attention(*states, is_causal=True, scale=scale, enable_gqa=grouped)
            out.append(made[0].transpose(0, 1))
        return here.torch.cat(out)

    return kernel


@check("right")
def fsdp_one(here: Here) -> tuple[bool, dict[str, Any]]:
    """Train by FSDP2's own code on one device, gathered in float32 and in bfloat16: one process's losses."""
    from forge_algos import OptimizerSettings

    torch = here.torch
    settings = OptimizerSettings(learning_rate=1e-3, lr_scheduler="constant")
    rows = [[packed(here.rows("small", here.lengths(4096, seed=k), seed=k))] for k in range(4)]
    losses = {"single": [out.loss for out in here.train(here.model("small", dtype=torch.float32), rows, settings=settings)]}
    peaks: dict[str, Any] = {}
    cases = {"float32": ("none", False), "bfloat16": ("none", True), "bfloat16, recomputed": ("full", True)}
    with one_rank(here) as ranks:
        for name, (recomputed, gathered) in cases.items():
            model, optimizer, strategy = sharded(
                here,
                here.model("small", dtype=torch.float32),
                settings,
                ranks,
                gathered=gathered,
                recomputed=recomputed,
            )
            here.machine.reset_peak_memory()
            context = {"autocast": nullcontext} if gathered else {}
            steps = here.train(model, rows, settings=settings, optimizer=optimizer, parallel=strategy, **context)
            losses[name] = [out.loss for out in steps]
            peaks[name] = here.peaks()["peak_gib"]
    apart = {name: max(abs(a - b) / b for a, b in zip(each, losses["single"], strict=True)) for name, each in losses.items()}
    return all(each < 2e-2 for each in apart.values()), {"apart": apart, "peak_gib": peaks}


@check("right")
def resume(here: Here) -> tuple[bool, dict[str, Any]]:
    """Take six steps, and three, a full state on disk, a fresh model and three more: the same losses."""
    from forge_algos import SFT, OptimizerSettings, make_optimizer, schedule, train
    from forge_dist import Checkpoints, LaunchSettings, Ranks, StrategySettings, make_strategy, topology

    ranks = Ranks(topology(LaunchSettings(), environ={}))
    strategy = make_strategy(StrategySettings(strategy="single"), ranks, device=here.device, adapter=False)
    settings = OptimizerSettings(learning_rate=1e-3, lr_scheduler="cosine")
    rows = [[packed(here.rows("small", here.lengths(4096, seed=k), seed=k)) for k in (2 * j, 2 * j + 1)] for j in range(6)]

    def made(seed: int) -> tuple[Any, Any, Any]:
        model, optimizer = strategy.wrap(
            here.model("small", dtype=here.torch.float32, seed=seed),
            lambda m: make_optimizer(m, settings, fused=here.machine.fused_optimizer.value),
        )
        return model, optimizer, schedule(optimizer, settings, num_steps=6)

    def run(of: tuple[Any, Any, Any], part: list[Any], first: int) -> list[float]:
        model, optimizer, scheduler = of
        how = {"objective": SFT(), "device": here.device, "autocast": here.autocast, "parallel": strategy}
        return [out.loss for out in train(model, part, optimizer=optimizer, scheduler=scheduler, first_step=first, **how)]

    whole, again = run(made(0), rows, 1), run(made(0), rows, 1)
    with tempfile.TemporaryDirectory() as folder:
        of = made(0)
        before = run(of, rows[:3], 1)
        with Checkpoints(Path(folder) / "full_state", ranks, keep=2, background=True) as files:
            files.newest({}, str)
            files.save(3, strategy.state(of[0], of[1]), {"schedule": of[2].state_dict()}, must_match={})
            files.wait()
            problem, fresh = files.failed, made(7)
            found = files.newest({}, str)
            assert found is not None
            strategy.load_state(fresh[0], fresh[1], found)
            fresh[2].load_state_dict(found.about["schedule"])
            for group, rate in zip(fresh[1].param_groups, fresh[2].get_last_lr(), strict=True):
                group["lr"] = rate
            after = run(fresh, rows[3:], 4)
    repeats, apart = whole == again, max(abs(a - b) / b for a, b in zip(whole, before + after, strict=True))
    good = problem is None and (apart == 0 if repeats else apart < 1e-3)
    return good, {"apart": apart, "device_repeats_itself": repeats, "problem": problem}


@check("right")
def repeats(here: Here) -> tuple[None, dict[str, Any]]:
    """Compute twice and compare bits: three steps, and a sampled token's logits, also by torch's deterministic algorithms."""
    from forge_algos import OptimizerSettings

    torch, facts = here.torch, {}
    settings = OptimizerSettings(learning_rate=1e-3, lr_scheduler="constant")
    rows = [[packed(here.rows("small", here.lengths(4096, seed=k), seed=k))] for k in range(3)]
    ids = torch.arange(8 * 40, device=here.device).view(8, 40) % here.shape("small")["vocab_size"]
    mask = (torch.arange(40, device=here.device) >= torch.arange(8, device=here.device)[:, None]).long()

    def logits(model: Any) -> list[Any]:
        with torch.no_grad(), here.autocast():
            first = model(input_ids=ids[:, :-1], attention_mask=mask[:, :-1], use_cache=True)
            second = model(input_ids=ids[:, -1:], attention_mask=mask, past_key_values=first.past_key_values)
        return [first.logits, second.logits]

    for name, asked in (("as_it_comes", False), ("deterministic", True)):
        torch.use_deterministic_algorithms(asked, warn_only=True)
        try:
            runs, sampled = [], []
            for _ in range(2):
                model = here.model("small", dtype=torch.float32)
                sampled.append(logits(model.eval()))
                runs.append([out.loss for out in here.train(model.train(), rows, settings=settings)])
        finally:
            torch.use_deterministic_algorithms(mode=False)
        same = [bool(torch.equal(a, b)) for a, b in zip(*sampled, strict=True)]
        facts[name] = {"losses": runs[0] == runs[1], "prompt_logits": same[0], "next_logits": same[1]}
    return None, facts


@check("right")
def grpo(here: Here) -> tuple[bool, dict[str, Any]]:
    """Sample twice by one seed, and update: the same completions, a ratio of 1, a finite loss; tokens sampled a second."""
    import time

    import numpy as np

    from forge_algos import GRPO, GRPOSettings, OptimizerSettings, make_optimizer, schedule, train
    from forge_algos.online import GenerateSampler, Reward, make_rollout, rollout_batches

    model = here.model("small", dtype=here.torch.float32)
    number, new, most = (4, 6, 400) if here.toy else (16, 128, 8192)
    prompts = [Asked(np.arange(5 + 3 * i) % model.config.vocab_size, "text", {}) for i in range(number)]
    sampler = GenerateSampler(model, eos_ids=[1], pad_id=0, batch_tokens=8 * most, autocast=here.autocast)
    how = {"num_generations": 4, "max_new_tokens": new, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": 3}
    ids = [prompt.input_ids for prompt in prompts]
    sampler.sample(ids[:2], **how)
    here.machine.synchronize()
    began = time.perf_counter()
    drawn = sampler.sample(ids, **how)
    here.machine.synchronize()
    seconds = time.perf_counter() - began
    again, alone = sampler.sample(ids, **how), sampler.sample(ids[:1], **how)
    same, apart = (
        sum(a.ids.tolist() == b.ids.tolist() for a, b in zip(other, drawn, strict=False)) / len(other)
        for other in (again, alone)
    )
    settings = GRPOSettings(num_generations=4, max_new_tokens=new)
    lengths = Reward(name="length", function=lambda completions, **_: [float(len(each)) for each in completions])
    rollout = make_rollout(
        model, sampler, prompts, settings=settings, rewards=[lengths], decode=lambda ids: " ".join(map(str, ids)),
        max_tokens=most, seed=5, device=here.device, autocast=here.autocast,
    )  # fmt: skip
    moving = OptimizerSettings(learning_rate=1e-4, lr_scheduler="constant")
    optimizer = make_optimizer(model, moving, fused=here.machine.fused_optimizer.value)
    out = next(
        train(
            model, rollout_batches(rollout, max_tokens=most), objective=GRPO(settings), optimizer=optimizer,
            scheduler=schedule(optimizer, moving, num_steps=9), device=here.device, autocast=here.autocast,
        )
    )  # fmt: skip
    rate = sum(len(each.ids) for each in drawn) / seconds
    facts = {"same": same, "same_in_a_smaller_batch": apart, "sampled_tokens_per_second": round(rate, 1), "loss": out.loss}
    facts |= {"grad_norm": out.grad_norm, **out.figures}
    return same == 1.0 and math.isfinite(out.loss) and abs(out.figures.get("ratio", 1.0) - 1) < 1e-3, facts


@check("right")
def qlora(here: Here) -> tuple[bool | None, dict[str, Any]]:
    """Take six steps with LoRA on a 4-bit base: the loss falls, and the codes stay to the bit."""
    return _on_codes(here, "nf4")


@check("right")
def qlora_int8(here: Here) -> tuple[bool | None, dict[str, Any]]:
    """Take six steps with LoRA on an 8-bit base: the loss falls, and the codes stay to the bit."""
    return _on_codes(here, "int8")


def _on_codes(here: Here, quant_type: str) -> tuple[bool | None, dict[str, Any]]:
    from forge_accel import AccelError
    from forge_algos import MissingPackageError, adapt

    try:
        model, settings = here.quantized("small", quant_type)
    except (AccelError, MissingPackageError) as error:
        return None, {"skipped": str(error)}
    adaptation = adapt(model, settings)
    frozen = {n: p.detach().clone() for n, p in adaptation.model.named_parameters() if not p.requires_grad}
    rows = [[packed(here.rows("small", [40, 60]))]] * 6
    losses = [out.loss for out in here.train(adaptation.model, rows, adaptation=adaptation)]
    kept = all(here.torch.equal(p, frozen[n]) for n, p in adaptation.model.named_parameters() if n in frozen)
    return kept and losses[-1] < losses[0], {"losses": [round(loss, 4) for loss in losses], "frozen_kept": kept}
