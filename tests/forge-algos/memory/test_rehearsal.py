"""A step without data takes the bytes that torch's allocator gives the same step with data."""

from __future__ import annotations

import gc
import json
import sys
import weakref
from contextlib import nullcontext, suppress
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

import forge_algos
from forge_algos.losses import _score_rows
from forge_algos.memory._rehearsal import _runs_as_it_is
from forge_algos.optimizers import _adamw_8bit

from ...lanes import ci_keeps

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from torch import nn

_SHAPE = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
CONFIGS = {
    "llama": lambda: LlamaConfig(**_SHAPE, tie_word_embeddings=True),
    "experts": lambda: Qwen3MoeConfig(**_SHAPE, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2),
}
CPU = torch.device("cpu")


class Row:
    """A packed row of documents, every token but the first of each learned."""

    def __init__(self, *lengths: int) -> None:
        self.input_ids = np.random.default_rng(0).integers(3, 512, sum(lengths))
        self.position_ids = np.concatenate([np.arange(length) for length in lengths])
        self.cu_seqlens = np.cumsum([0, *lengths])
        self.labels = np.where(self.position_ids == 0, -100, self.input_ids)
        self.max_seqlen = max(lengths)


def made(
    kind: str,
    settings: forge_algos.AdapterSettings,
    optimizer: str,
    outline: bool,
    dtype: torch.dtype = torch.float32,
    blocks: int | None = None,
    shares: dict[str, int] | None = None,
) -> tuple[Any, ...]:
    """A model, real or an outline, with its adapter and its optimizer; and the rehearsal of an outline."""
    rehearsal = forge_algos.Rehearsal(device=CPU, shares=shares or {})
    config = CONFIGS[kind]()
    with torch.device("meta" if outline else "cpu"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    if outline:
        rehearsal.model(model, None, blocks=blocks)
    else:
        forge_algos.SFT().bind(model, device=CPU)
    with rehearsal.adapting() if outline else torch.random.fork_rng():
        adaptation = forge_algos.adapt(model, settings)
        forge_algos.cast_trained(model, dtype)
    trained = rehearsal.placed(adaptation.model) if outline else adaptation.model
    return (
        rehearsal,
        adaptation,
        trained,
        forge_algos.make_optimizer(trained, forge_algos.OptimizerSettings(optimizer=optimizer)),
    )


def measured(work: Callable[[], object], folder: Path) -> int:
    """The most bytes that are allocated at a time within `work`, as torch's profiler saw it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as seen:
        work()
    seen.export_chrome_trace(str(folder / "trace.json"))
    trace = (e for e in json.loads((folder / "trace.json").read_text())["traceEvents"] if e.get("name") == "[memory]")
    events = sorted((e["ts"], e["args"]["Ev Idx"], e["args"]["Bytes"]) for e in trace)
    return int(np.cumsum([0, *(size for *_, size in events)]).max())


def scratch(products: Sequence[tuple[torch.Tensor, torch.Tensor]], folder: Path) -> list[int]:
    """What products in bfloat16 take for themselves on this processor: each is made as it is."""
    found = []
    for factors in products:
        first, second = (torch.empty_strided(f.shape, f.stride(), dtype=f.dtype).fill_(0.5) for f in factors)
        if first.dtype != torch.bfloat16:
            found.append(0)
            continue
        made: list[torch.Tensor] = []
        most = measured(lambda made=made, first=first, second=second: made.append(first @ second), folder)
        found.append(most - made[0].untyped_storage().nbytes())
    return found


def storage_bytes(model: nn.Module) -> int:
    """The bytes of a model's tensors."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in forge_algos.tensors_of(model)}.values())


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_first_step_is_one_whatever_was_rehearsed_before(optimizer: str) -> None:
    """Moments of a former rehearsal are none of a run's first step; a later step has its own again."""
    rehearsal, adaptation, model, moved = made("llama", forge_algos.AdapterSettings(), optimizer, outline=True)

    def step(*, first: bool) -> int:
        return rehearsal.step(
            model, moved, [Row(300, 200)], objective=forge_algos.SFT, adaptation=adaptation, first=first
        ).bytes

    peaks = [step(first=first) for first in (True, True, False, True, False)]
    assert peaks[0] < peaks[2]
    assert peaks == [peaks[0], peaks[0], peaks[2], peaks[0], peaks[2]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "adapter", "optimizer"),
    ci_keeps(
        [("llama", "lora", "adafactor"), ("experts", "none", "muon")],
        [
            ("llama", "none", "adamw"),
            ("llama", "lora", "adafactor"),
            ("experts", "none", "muon"),
            ("experts", "none", "apollo"),
            ("llama", "osft", "adamw"),
            *(("llama", adapter, "adamw") for adapter in ("oft", "hra", "loha", "lokr", "miss", "vera", "randlora")),
        ],
    ),
)
def test_a_step_takes_what_was_planned(kind: str, adapter: str, optimizer: str, tmp_path: Path) -> None:
    """Within 2 percent, for two steps of two micro-batches: weights, gradients, moments, what autograd keeps, the head."""
    settings, rows = forge_algos.AdapterSettings(adapter=adapter), [Row(9, 20), Row(70, 41)]
    rehearsal, adaptation, model, moved = made(kind, settings, optimizer, outline=True)
    planned = rehearsal.step(model, moved, rows, objective=forge_algos.SFT, adaptation=adaptation)
    _, adaptation, model, moved = made(kind, settings, optimizer, outline=False)
    scheduler = forge_algos.schedule(moved, forge_algos.OptimizerSettings(), num_steps=4)
    held = storage_bytes(model)

    def train() -> None:
        steps = forge_algos.train(
            model, [rows, rows], objective=forge_algos.SFT(), optimizer=moved, scheduler=scheduler, adaptation=adaptation
        )
        list(steps)

    took = held + measured(train, tmp_path)
    assert planned.bytes == pytest.approx(took, rel=0.02)
    assert sum(planned.parts.values()) == planned.bytes
    assert planned.parts["weights"] == held


def _keeps_products(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if "mm" in str(operator) else CheckpointPolicy.PREFER_RECOMPUTE


RECOMPUTED: dict[str, dict[str, Any]] = {
    "full": {"use_reentrant": False},
    "selective": {"use_reentrant": False, "context_fn": partial(create_selective_checkpoint_contexts, _keeps_products)},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    # A plain step is measured above; selective recomputation holds what full does, and keeps products beside.
    ci_keeps(["selective", "casts", "bfloat16 weights"], ["none", "selective", "full", "casts", "bfloat16 weights"]),
)
def test_each_way_to_save_memory_is_planned(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within 2 percent of what torch's allocator gave: recomputed layers, casts kept for a step, bfloat16 weights.

    In bfloat16 with what this processor's products take for themselves. bfloat16 weights are moved in many parts, of which the
    plan makes the first.
    """
    if kind == "bfloat16 weights":
        pytest.importorskip("bitsandbytes")
        monkeypatch.setattr(_adamw_8bit, "_AT_ONCE_ON_A_CPU", 2**12)
    weights = torch.bfloat16 if kind == "bfloat16 weights" else torch.float32
    optimizer = "adamw_8bit" if kind == "bfloat16 weights" else "adamw"
    rows = [Row(9, 20), Row(170, 141)]
    autocast = partial(torch.autocast, "cpu", torch.bfloat16) if kind == "casts" else nullcontext
    rehearsal, adaptation, model, moved = made("llama", forge_algos.AdapterSettings(), optimizer, outline=True, dtype=weights)
    rehearsal = attrs.evolve(rehearsal, autocast=autocast, product_scratch=partial(scratch, folder=tmp_path))
    with suppress(KeyError):
        model.activation_checkpointing_enable(RECOMPUTED[kind])
    how = {"objective": forge_algos.SFT, "keep_casts": True}
    planned = rehearsal.step(model, moved, rows, adaptation=adaptation, **how)
    _, adaptation, model, moved = made("llama", forge_algos.AdapterSettings(), optimizer, outline=False, dtype=weights)
    with suppress(KeyError):
        model.activation_checkpointing_enable(RECOMPUTED[kind])
    scheduler = forge_algos.schedule(moved, forge_algos.OptimizerSettings(), num_steps=4)
    held = storage_bytes(model)

    def train() -> None:
        steps = forge_algos.train(
            model,
            [rows, rows],
            objective=forge_algos.SFT(),
            optimizer=moved,
            scheduler=scheduler,
            adaptation=adaptation,
            autocast=autocast,
            keep_casts=True,
        )
        list(steps)

    took = measured(train, tmp_path)
    assert planned.bytes == pytest.approx(held + took, rel=0.02)
    _PLANNED[kind] = planned.parts
    if {"none", "selective", "full"} <= set(_PLANNED):
        kept = [_PLANNED[each]["activations"] for each in ("none", "selective", "full")]
        assert kept[0] > 1.2 * kept[1]
        assert kept[1] > kept[2]


_PLANNED: dict[str, Any] = {}


@pytest.mark.slow
@pytest.mark.parametrize("alone", [True, False])
def test_weights_that_are_gathered_in_bfloat16_compute_in_it(alone: bool) -> None:
    """Activations are those of bfloat16 weights without autocast; weights, gradients and moments are float32's.

    Where a small model cannot compute so (here, for what a layer multiplies by a number in float32) all compute under autocast.
    """
    draft = AutoModelForCausalLM.from_config(CONFIGS["llama"](), dtype=torch.bfloat16)
    autocast, found = partial(torch.autocast, "cpu", torch.bfloat16), []
    for dtype, gathered in ((torch.float32, torch.bfloat16), (torch.bfloat16, None), (torch.float32, None)):
        rehearsal, adaptation, model, moved = made("llama", forge_algos.AdapterSettings(), "adamw", outline=True, dtype=dtype)
        if not alone:
            for each in (draft, model):
                each.model.layers[1].mlp.register_forward_pre_hook(lambda _, args: args[0].float())
        loaded = rehearsal._loaded
        rehearsal = attrs.evolve(
            rehearsal, gather_dtype=gathered, autocast=nullcontext if alone and gathered is None else autocast
        )
        rehearsal._loaded.update(loaded)
        rehearsal._runs.append(_runs_as_it_is(draft, CPU))
        how = {"objective": forge_algos.SFT, "adaptation": adaptation}
        found.append(rehearsal.step(model, moved, [Row(9, 20), Row(170, 141)], **how).parts)
        assert all(p.dtype == dtype for p in model.parameters())
    mixed, narrow, wide = found
    assert mixed["weights"] == wide["weights"] == pytest.approx(2 * narrow["weights"], rel=1e-3), "buffers stay float32"
    assert mixed["optimizer"] == wide["optimizer"]
    assert mixed["activations"] + mixed["head"] == pytest.approx(narrow["activations"] + narrow["head"], rel=0.02)
    assert mixed["activations"] + mixed["head"] < wide["activations"] + wide["head"]


def test_a_draft_that_fails_otherwise_is_no_reason_for_autocast() -> None:
    """A failure that names no dtypes is a RehearsalError, so that the plan says that it has none; no draft is kept."""
    config = CONFIGS["llama"]()
    draft = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    hook = draft.model.layers[1].register_forward_pre_hook(lambda _, args: (args[0][..., :-1],))
    rehearsal = forge_algos.Rehearsal(device=CPU, gather_dtype=torch.bfloat16)
    with torch.device("meta"):
        outline = AutoModelForCausalLM.from_config(config)
    with pytest.raises(RuntimeError, match="size"):
        _runs_as_it_is(draft, CPU)
    with pytest.raises(forge_algos.RehearsalError, match="size"):
        rehearsal.model(outline, draft)
    hook.remove()
    rehearsal.model(outline, draft)
    assert rehearsal._runs == [True]
    dropped = weakref.ref(draft)
    del draft, hook
    gc.collect()
    assert dropped() is None


_BY_BLOCKS = [
    ("llama", "lora", "adamw", True, True),
    ("llama", "none", "adamw", False, True),
    ("llama", "none", "adamw", True, False),
    ("llama", "osft", "adamw", False, False),
    ("experts", "none", "muon", False, False),
    ("experts", "lora", "adafactor", False, True),
]


@pytest.mark.parametrize(("kind", "adapter", "optimizer", "checkpointed", "several"), ci_keeps(_BY_BLOCKS[:1], _BY_BLOCKS))
def test_equal_blocks_need_not_all_be_rehearsed(
    kind: str, adapter: str, optimizer: str, checkpointed: bool, several: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From three and four blocks of six follows what six take, byte for byte and part for part."""
    monkeypatch.setitem(_SHAPE, "num_hidden_layers", 6)
    settings = forge_algos.AdapterSettings(adapter=adapter, **({"unfreeze_rank_ratio": 0.3} if adapter == "osft" else {}))
    found = []
    for blocks in (None, 3, 4):
        rehearsal, adaptation, model, moves = made(kind, settings, optimizer, True, blocks=blocks)
        if checkpointed:
            model.activation_checkpointing_enable(RECOMPUTED["full"])
        rows = [Row(7, 5), Row(30, 20, 14)][0 if several else 1 :]
        step = rehearsal.step(model, moves, rows, objective=forge_algos.SFT, adaptation=adaptation)
        found.append((step, rehearsal.evaluation(model, moves, rows[-1], objective=forge_algos.SFT)))
    for whole, fewer, more in zip(*found, strict=True):
        assert not whole.stages
        derived = fewer.with_blocks(more, fewer=3, blocks=6)
        assert (derived.bytes, derived.parts) == (whole.bytes, whole.parts)
        assert fewer.bytes < more.bytes < whole.bytes
        assert fewer.with_blocks(attrs.evolve(more, stages=fewer.stages), fewer=3, blocks=6) is None


def test_the_worst_moment_is_that_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of gradients that 64 ranks divide it is an earlier one, with more activations, and follows from few blocks as well."""
    monkeypatch.setitem(_SHAPE, "num_hidden_layers", 6)
    found = {}
    for blocks, ranks in ((None, 1), (None, 64), (3, 64), (4, 64)):
        settings, shares = forge_algos.AdapterSettings(), {"gradients": ranks}
        rehearsal, adaptation, model, moves = made("llama", settings, "adamw", True, blocks=blocks, shares=shares)
        found[blocks, ranks] = rehearsal.step(model, moves, [Row(7, 5)], objective=forge_algos.SFT, adaptation=adaptation)
    alone, shared = found[None, 1], found[None, 64]
    assert shared.parts["gradients"] < alone.parts["gradients"]
    assert shared.parts["activations"] > alone.parts["activations"]
    assert shared.bytes == sum(shared.parts.values()) < alone.bytes
    derived = found[3, 64].with_blocks(found[4, 64], fewer=3, blocks=6)
    assert (derived.bytes, derived.parts) == (shared.bytes, shared.parts)


def test_blocks_that_differ_are_all_rehearsed() -> None:
    """Another class, width or window: nothing follows from a few of them."""
    rehearsal = forge_algos.Rehearsal(device=CPU)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**{**_SHAPE, "num_hidden_layers": 5}))
    model.model.layers[4].self_attn.sliding_window = 8
    with pytest.raises(forge_algos.RehearsalError, match="not alike"):
        rehearsal.model(model, None, blocks=3)
    assert len(model.model.layers) == 5
    del model.model.layers[4].self_attn.sliding_window
    with pytest.raises(forge_algos.RehearsalError, match="no more than 5"):
        rehearsal.model(model, None, blocks=5)
    assert len(rehearsal.model(model, None, blocks=3).model.layers) == 3


def test_an_evaluation_is_less_than_a_step() -> None:
    """No gradients are computed, and nothing is kept for a backward pass."""
    rehearsal, adaptation, model, moved = made("llama", forge_algos.AdapterSettings(), "adamw", outline=True)
    rows = [Row(70, 41)]
    step = rehearsal.step(model, moved, rows, objective=forge_algos.SFT, adaptation=adaptation)
    found = rehearsal.evaluation(model, moved, rows[0], objective=forge_algos.SFT)
    assert found.parts["activations"] < step.parts["activations"]
    assert found.parts["gradients"] == sum(p.numel() * 4 for p in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("adapter", "prompts"), ci_keeps([("lora", (9, 30))], [("none", (9, 30)), ("lora", (9, 30)), ("lora", (5, 5, 21))])
)
def test_sampling_takes_what_was_planned(adapter: str, prompts: tuple[int, ...], tmp_path: Path) -> None:
    """Within 1 percent of completions that no token ends: the cache at its longest, and the logits of the widest batch.

    Of prompts of 9 and 30 tokens a batch in the middle, with one of each, computes most tokens at once.
    """
    asked = [np.arange(3, 3 + length) for length in prompts]
    more = {"num_generations": 3, "max_new_tokens": 14, "temperature": 0.8, "top_p": 1.0, "top_k": 0}

    def sampler(model: nn.Module) -> Any:
        return forge_algos.online.GenerateSampler(model, eos_ids=[511 + 9], pad_id=0, batch_tokens=110)

    settings = forge_algos.AdapterSettings(adapter=adapter)
    rehearsal, _, model, moved = made("llama", settings, "adamw", outline=True)
    planned = rehearsal.sampling(model, moved, partial(sampler(model).first_and_last, asked, **more))
    _, _, model, _ = made("llama", settings, "adamw", outline=False)
    found = measured(lambda: sampler(model).sample(asked, seed=1, **more), tmp_path)
    gradients = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    assert planned.bytes - gradients == pytest.approx(storage_bytes(model) + found, rel=0.01)
    assert planned.parts["cache"] > 0
    assert sum(planned.parts.values()) == planned.bytes


def test_gradients_in_buckets_are_always_held() -> None:
    """The buffers of DistributedDataParallel count at every moment, each gradient once."""
    rehearsal, adaptation, model, moved = made("llama", forge_algos.AdapterSettings(), "adamw", outline=True)
    peaks = [
        rehearsal.step(model, moved, [Row(70, 41)], objective=forge_algos.SFT, adaptation=adaptation, buckets=buckets)
        for buckets in (False, True)
    ]
    whole = sum(p.numel() * 4 for p in model.parameters())
    assert peaks[1].parts["gradients"] == whole
    assert peaks[0].bytes <= peaks[1].bytes <= peaks[0].bytes - peaks[0].parts["gradients"] + whole + 4096
    assert sum(peaks[1].parts.values()) == peaks[1].bytes


def test_what_a_product_takes_for_itself_counts_while_it_is_made() -> None:
    """It stands beside what is held at that moment: products far below the worst moment are not even asked for."""
    asked: list[torch.Tensor] = []

    def taken(products: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[int]:
        asked.extend(first for first, _ in products)
        return [2**40 if first.shape[-1] == 111 else 7 for first, _ in products]

    rehearsal, adaptation, model, moved = made("llama", forge_algos.AdapterSettings(), "adamw", outline=True)
    how = {"objective": forge_algos.SFT, "adaptation": adaptation}
    plain = rehearsal.step(model, moved, [Row(70, 41)], **how)
    found = attrs.evolve(rehearsal, product_scratch=taken).step(model, moved, [Row(70, 41)], **how)
    assert plain.parts["kernels"] == 0
    assert found.parts["kernels"] == 2**40, "of a gradient of weights, which adds up 111 tokens"
    assert found.bytes == sum(found.parts.values())
    assert plain.bytes - found.parts["weights"] < found.bytes - 2**40 + found.parts["optimizer"] <= 2 * plain.bytes
    assert all(each.is_meta for each in asked)


def test_allocations_are_rounded_as_the_device_does() -> None:
    """Blocks of 512 bytes take at least as much, and all are whole blocks."""
    rehearsal, adaptation, model, moved = made("llama", forge_algos.AdapterSettings(), "adamw", outline=True)
    plain = rehearsal.step(model, moved, [Row(30)], objective=forge_algos.SFT, adaptation=adaptation)
    blocks = forge_algos.Rehearsal(device=CPU, allocated=lambda size: -(-size // 512) * 512)
    rounded = blocks.step(model, moved, [Row(30)], objective=forge_algos.SFT, adaptation=adaptation)
    assert rounded.bytes % 512 == 0
    assert rounded.bytes > plain.bytes


def test_what_needs_numbers_is_said() -> None:
    """A shape that follows from weights is an error that names the operation."""

    class Sparse(forge_algos.SFT):
        def terms(self, head: Any, row: Any) -> Any:
            weight = next(head.model.parameters())
            weight[weight > 0].sum()
            return super().terms(head, row)

    rehearsal, adaptation, model, moved = made("llama", forge_algos.AdapterSettings(), "adamw", outline=True)
    with pytest.raises(forge_algos.RehearsalError, match="needs values that only the loaded model has"):
        rehearsal.step(model, moved, [Row(30)], objective=Sparse, adaptation=adaptation)


def test_a_defect_of_our_own_is_no_lack_of_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A TypeError that a file of this package raises is not taken for a computation that needs values; a model's is."""
    from forge_algos.memory import _rehearsal

    rehearsal, adaptation, model, moved = made("llama", forge_algos.AdapterSettings(), "adamw", outline=True)

    class Odd(forge_algos.SFT):
        def terms(self, head: Any, row: Any) -> Any:
            raise TypeError("a model's")

    with pytest.raises(forge_algos.RehearsalError, match="TypeError: a model's"):
        rehearsal.step(model, moved, [Row(30)], objective=Odd, adaptation=adaptation)
    monkeypatch.setattr(_rehearsal, "schedule", eval("lambda *_, **__: 1 + ''", vars(_rehearsal)))
    with pytest.raises(TypeError, match="unsupported operand"):
        rehearsal.step(model, moved, [Row(30)], objective=forge_algos.SFT, adaptation=adaptation)


def test_what_libraries_keep_counts_at_all_times() -> None:
    """Beside everything else, as a part of `kernels`."""
    peaks = []
    for kept in (0, 66 * 2**20):
        rehearsal, adaptation, model, moved = made("llama", forge_algos.AdapterSettings(), "adamw", outline=True)
        rehearsal = attrs.evolve(rehearsal, library_bytes=kept)
        peaks.append(rehearsal.step(model, moved, [Row(9, 20)], objective=forge_algos.SFT, adaptation=adaptation))
    assert peaks[1].bytes - peaks[0].bytes == peaks[1].parts["kernels"] - peaks[0].parts["kernels"] == 66 * 2**20


def test_a_plan_holds_for_the_heads_kernel_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan follows the operators; the kernel that takes their place on a GPU allocates what they do, weights and all."""
    launched = []
    peaks = []
    settings, dtype = forge_algos.AdapterSettings(adapter="none"), torch.bfloat16
    for by_kernel in (False, True):
        if by_kernel:
            monkeypatch.setattr(_score_rows, "_has_kernel", lambda *how: launched.append(how[2]) or True)
        rehearsal, adaptation, model, moved = made("llama", settings, "adamw", outline=True, dtype=dtype)
        # Several chunks, of which each has logits and a slope that are most of what is held beside the weights.
        forge_algos.score_rows_at_once(model, 700)
        peaks.append(rehearsal.step(model, moved, [Row(2000)], objective=forge_algos.SFT, adaptation=adaptation))
    assert launched == [torch.bfloat16] * 3
    assert peaks[0].parts["head"] > 700 * 512 * (4 + 2)
    assert peaks[0].bytes == peaks[1].bytes
    assert peaks[0].parts == peaks[1].parts


@pytest.mark.parametrize("there", [False, True])
def test_a_plan_moves_weights_by_the_kernel_that_a_run_does(monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    """The device is tried before a step is rehearsed: within, no kernel is launched, and a trial would find a wrong one.

    It would be remembered, and the run would take bitsandbytes' kernels, and their copies.
    """
    pytest.importorskip("bitsandbytes")
    taken = []
    monkeypatch.setitem(CONFIGS, "wide", lambda: LlamaConfig(**{**_SHAPE, "hidden_size": 320}))
    monkeypatch.setattr(_adamw_8bit, "_move_at_once", lambda *held: taken.append(held[0].shape))
    monkeypatch.setattr(_adamw_8bit, "_has_kernel", lambda _: there)
    settings = forge_algos.AdapterSettings(adapter="none")
    rehearsal, adaptation, model, moved = made("wide", settings, "adamw_8bit", outline=True, dtype=torch.bfloat16)
    monkeypatch.setattr(_adamw_8bit, "_has_kernel", lambda _: pytest.fail("tried while a step is rehearsed"))
    rehearsal.step(model, moved, [Row(9, 20)], objective=forge_algos.SFT, adaptation=adaptation)
    assert bool(taken) == there


def test_no_kernel_is_launched_on_tensors_without_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's kernels do nothing while a step is rehearsed, and work again after it; an address of data is refused."""
    launched = []

    class KernelInterface:
        """What Triton's kernels, and those that tune them, derive from."""

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *_args: launched.append(grid)

    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(KernelInterface=KernelInterface))
    kernel = KernelInterface()

    class Fused(forge_algos.SFT):
        """Loss that calls a kernel, as a fused layer does."""

        def __call__(self, batch: Any, totals: Any) -> Any:
            kernel[(1,)](batch)
            return super().__call__(batch, totals)

    rehearsal, adaptation, model, moved = made("llama", forge_algos.AdapterSettings(), "adamw", outline=True)
    rehearsal.step(model, moved, [Row(9, 20)], objective=Fused, adaptation=adaptation)
    assert not launched
    kernel[(2,)]()
    assert launched == [(2,)]
    with pytest.raises(RuntimeError, match="data pointer"):
        next(model.parameters()).data_ptr()


class AskedToStopError(BaseException):
    """What a caller ends a rehearsal with."""


@pytest.mark.parametrize("after", [0, 50, 400])
def test_a_check_ends_a_rehearsal(after: int) -> None:
    """It is asked before each kernel, of the backward pass too; what it raises comes out as it is, and a next step is whole."""
    rehearsal, adaptation, model, moves = made("llama", forge_algos.AdapterSettings(), "adamw", True)
    calls = [0]

    def check() -> None:
        calls[0] += 1
        if calls[0] > after:
            raise AskedToStopError

    def step(asked: forge_algos.Rehearsal) -> Any:
        return asked.step(model, moves, [Row(5, 7)], objective=forge_algos.SFT, adaptation=adaptation)

    whole = step(rehearsal).bytes
    with pytest.raises(AskedToStopError):
        step(attrs.evolve(rehearsal, check=check))
    assert calls[0] == after + 1
    assert step(rehearsal).bytes == whole
