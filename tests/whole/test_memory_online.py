"""Online verbs: what the memory plan says of sampling and of an update beside what they take, in bytes of torch's allocator."""

from __future__ import annotations

import json
import random
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

import forge
import forge_accel
import forge_packing
from forge.run import _memory
from forge.tasks._fullest_rows import Update, with_keys
from forge_algos.online import Beginnings, Completion, GenerateSampler
from forge_algos.online.updates._divide import divide_shards

from .conftest import write_rows
from .verbs import settings_of

if TYPE_CHECKING:
    from pathlib import Path

CASES: dict[str, dict[str, Any]] = {
    "grpo": {"num_generations": 4, "kl_weight": 0.05},
    "ppo": {},
    "rloo": {"num_generations": 2, "adapter": "lora"},
}
_OWN = st.lists(st.integers(1, 50), min_size=1, max_size=15)
"""What a prompt has of its own, behind a system prompt."""


@pytest.mark.lane
@pytest.mark.slow
@pytest.mark.parametrize("verb", CASES)
def test_sampling_and_an_update_take_what_was_planned(
    verb: str, larger_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within 5 percent where completions are as long as they may be; a reference is counted."""
    monkeypatch.setattr(_memory, "_SMALL", 0)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "forge_test_rewards", raising=False)
    machine, took, models = forge_accel.accelerator("cpu"), [], []
    # A completion that ends early would take less.
    monkeypatch.setattr("forge.tasks._rollouts.end_ids", lambda _: [10**6])
    sample = GenerateSampler.sample

    def sampled(self: Any, *given: Any, **more: Any) -> Any:
        models.append(self._model)
        held = [*self._model.parameters(), *self._model.buffers()]
        held += [p.grad for p in self._model.parameters() if p.grad is not None]
        meter = machine.meter()
        meter.start(sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}.values()))
        try:
            return sample(self, *given, **more)
        finally:
            took.append(meter.stop())

    monkeypatch.setattr(GenerateSampler, "sample", sampled)
    given = settings_of(verb, larger_model, tmp_path) | {"max_new_tokens": 64, "max_tokens_per_gpu": 1024, "max_steps": 4}
    given |= {"model_path": str(larger_model), "validation_split": 0.0, "ckpt_output_dir": tmp_path / "run", **CASES[verb]}
    given.pop("eval_every_steps", None)
    getattr(forge, verb)(**given)
    phases = {phase["name"]: phase for phase in json.loads((tmp_path / "run" / "memory.json").read_text())["phases"]}
    # Measured are the model and, from the second rollout on, its gradients; the plan has the optimizer and a reference too.
    rollout, model = phases["rollout"], sum(p.numel() * p.element_size() for p in models[0].parameters())
    own = rollout["planned"] - rollout["parts"]["optimizer"] - (rollout["parts"]["weights"] - model)
    update = phases["first steps"]
    print(
        verb, {"sampling": (max(took), round(own / max(took), 4)), "update": round(update["planned"] / update["measured"], 4)}
    )
    assert own == pytest.approx(max(took), rel=0.05)
    assert update["planned"] == pytest.approx(update["measured"], rel=0.05)
    assert phases["step"]["planned"] >= update["planned"]


@given(
    st.integers(1, 40),
    st.integers(1, 12),
    st.integers(1, 12),
    st.data(),
    st.integers(0, 150),
    st.integers(1, 10),
    st.booleans(),
)
def test_no_division_has_a_larger_micro_batch_than_the_plan(
    prompt: int, groups: int, new: int, data: st.DataObject, spare: int, times: int, shares: bool
) -> None:
    """Behind prompts of one length, whatever the lengths of completions, up to those that they may have, on any ranks."""
    each, ranks = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 4))
    own = np.array(data.draw(st.lists(st.integers(1, new), min_size=groups * each, max_size=groups * each)))
    before, owner = np.full(groups * each, prompt), np.repeat(np.arange(groups), each)
    limits = {"max_tokens": prompt + new + spare, "max_keys": times * (prompt + new + spare)}
    shards = divide_shards(
        np.arange(groups * each), owner, before, own, **limits, data_parallel_size=ranks, share_prompts=shares
    )
    update = {"groups": groups, "each": each, "max_new_tokens": new, "shares": shares, "ranks": ranks, **limits}
    found = Update(prompt_tokens=np.full((groups, 1), prompt), **update).fullest()
    most, most_of_both = max(row.tokens for row in found), max(with_keys(row.tokens, row.keys) for row in found)
    for row in found:  # the plan has the division itself lay it out
        whole = divide_shards(
            np.arange(len(row.lengths)), row.prompts, before[: len(row.lengths)], row.lengths, **limits, data_parallel_size=1,
            share_prompts=shares,
        )  # fmt: skip
        assert [len(part) for part in whole[0]] == [len(row.lengths)]
    for row in (row for shard in shards for row in shard):
        tokens = (len(set(owner[row])) if shares else len(row)) * prompt + own[row].sum()
        keys = (prompt + own)[row].sum() if shares else tokens
        assert tokens <= most
        assert with_keys(tokens, keys) <= most_of_both


@given(
    st.lists(st.integers(1, 60) | st.sampled_from([40, 90, 170]), min_size=1, max_size=20),
    st.integers(1, 3),
    st.sampled_from([1, 1, 2, 4]),
    st.sampled_from([1, 5, 20]),
    st.integers(0, 200),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_no_division_of_mixed_prompts_has_more_tokens_than_the_plan(
    prompts: list[int], ranks: int, each: int, new: int, spare: int, shares: bool, draw: random.Random
) -> None:
    """Short completions fill a row only where the lengths of their prompts add up to it; any may."""
    draw.shuffle(prompts)
    tokens, owner = np.array(prompts), np.repeat(np.arange(len(prompts)), each)
    own = np.array([draw.choice([1, new, draw.randint(1, new)]) for _ in owner])
    most = int(tokens.max()) + new + spare
    limits = {"max_tokens": most, "max_keys": forge_packing.most_keys(most)}
    shards = divide_shards(
        np.arange(len(owner)), owner, tokens[owner], own, **limits, data_parallel_size=ranks, share_prompts=shares
    )
    update = {"groups": len(prompts), "each": each, "max_new_tokens": new, "shares": shares, "ranks": ranks, **limits}
    planned = max(row.tokens for row in Update(prompt_tokens=tokens[:, None], **update).fullest())
    for row in (row for shard in shards for row in shard):
        held = tokens[np.unique(owner[row])] if shares else tokens[owner[row]]
        assert int(held.sum() + own[row].sum()) <= planned


@given(st.data(), st.integers(1, 3), st.integers(1, 4), st.sampled_from([1, 1, 2, 5]), st.integers(1, 20), st.integers(0, 150))
def test_no_division_of_prompts_that_begin_alike_has_a_larger_micro_batch(
    data: st.DataObject, systems: int, ranks: int, each: int, new: int, spare: int
) -> None:
    """Behind system prompts, of one kind or of student and teacher: any completions of at most `new` tokens, some left out."""
    groups, kinds = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 2))
    prompts = [
        [[90 + data.draw(st.integers(1, systems))] * 20 * kind + data.draw(_OWN) for _ in range(groups)]
        for kind in range(1, kinds + 1)
    ]
    prompt_tokens = np.array([list(map(len, kind)) for kind in prompts]).T
    longest, owner = prompt_tokens.max(axis=1), np.repeat(np.arange(groups), each)
    number = groups * each
    own = np.array(data.draw(st.lists(st.sampled_from([1, new]) | st.integers(1, new), min_size=number, max_size=number)))
    kept = np.flatnonzero(data.draw(st.lists(st.sampled_from([True, True, False]), min_size=number, max_size=number)))
    most = int(longest.max()) + new + spare
    limits = {"max_tokens": most, "max_keys": forge_packing.most_keys(most)}
    alike = [Beginnings(kind, forge_packing.LEAST_PREFIX) for kind in prompts]
    shards = divide_shards(
        kept, owner, longest[owner], own, **limits, data_parallel_size=ranks, share_prompts=True, beginnings=alike
    )
    update = {"groups": groups, "each": each, "max_new_tokens": new, "shares": True, "ranks": ranks, "beginnings": alike}
    found = Update(prompt_tokens=prompt_tokens, **update, **limits).fullest()
    for row in found:  # the plan has the division itself lay it out
        (rows,) = divide_shards(
            np.arange(len(row.lengths)), row.prompts, longest[row.prompts], row.lengths, **limits, data_parallel_size=1,
            share_prompts=True, beginnings=alike,
        )  # fmt: skip
        assert len(rows) == 1
    planned = max(row.tokens for row in found), max(with_keys(row.tokens, row.keys) for row in found)
    for row in (row for shard in shards for row in shard):
        used = np.unique(owner[row])
        tokens = sum(int(each.added(used).sum()) + int(own[row].sum()) for each in alike)
        keys = sum(int((kind[owner[row]] + own[row]).sum()) for kind in prompt_tokens.T)
        assert tokens <= planned[0]
        assert with_keys(tokens, keys) <= planned[1]


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["grpo", "sdft"])
def test_short_completions_of_long_prompts(verb: str, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows gather no more than eight times max_tokens keys, and the plan, whose completions may be longer, has room for it."""
    monkeypatch.setattr(_memory, "_SMALL", 0)
    seen: list[int] = []
    watched = _memory.FirstSteps.watched

    def answers(_: Any, prompts: Any, *, num_generations: int, **__: Any) -> list[Completion]:
        return [Completion(ids=np.arange(3, 6, dtype=np.int32), finished=True)] * (num_generations * len(prompts))

    def watch(self: Any, steps: Any, *more: Any) -> Any:
        for batches in watched(self, steps, *more):
            rows = [row for batch in batches for row in (batch.groups, getattr(batch, "teacher", batch.groups))]
            seen.extend(len(row.input_ids if row.kv_rows is None else row.kv_rows) for row in rows)
            yield batches

    monkeypatch.setattr(GenerateSampler, "sample", answers)
    monkeypatch.setattr(_memory.FirstSteps, "watched", watch)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "forge_test_rewards", raising=False)
    given = settings_of(verb, model_dir, tmp_path)
    asked = [[{"role": "user", "content": f"{at} " + "the sun and the rain " * 16}] for at in range(4)]
    answer = {"role": "assistant", "content": "red."}
    rows = [{"prompt": each, "fruit": "pear"} if verb == "grpo" else {"messages": [*each, answer]} for each in asked]
    given |= {"data_path": str(write_rows(tmp_path / "long.jsonl", rows)), "validation_split": 0.0, "kl_base": False}
    given |= {"num_generations": 32, "max_new_tokens": 32, "max_tokens_per_gpu": 320, "max_steps": 1, "effective_batch_size": 4}
    given.pop("eval_every_steps", None)
    given.pop("kl_weight", None)
    getattr(forge, verb)(**given, ckpt_output_dir=str(tmp_path / "run"))
    phases = {phase["name"]: phase for phase in json.loads((tmp_path / "run" / "memory.json").read_text())["phases"]}
    step, first = phases["step"], phases["first steps"]
    print(verb, max(seen) / 320, step["planned"], first["measured"], step["planned"] / first["measured"])
    assert forge_packing.most_keys(320) == 8 * 320
    assert 4 * 320 < max(seen) <= 8 * 320
    assert step["planned"] >= first["measured"]
