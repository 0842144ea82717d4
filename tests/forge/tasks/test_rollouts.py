"""Made-up rollouts of the memory plan: which micro-batches are rehearsed, and how they are laid out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import forge_algos
import forge_packing
from forge.tasks import _rehearsed_rollouts
from forge.tasks._rehearsed_rollouts import RehearsedRollouts
from forge.tasks._sharing import Sharing

SYSTEM = np.arange(100, 200)


def rehearsed(
    prompts: list[np.ndarray], monkeypatch: pytest.MonkeyPatch, *, sharing: Sharing, most: int = 256, **own: Any
) -> RehearsedRollouts:
    """Rollouts of a GRPO run on these prompts, all of which are one step."""
    objective = forge_algos.GRPOSettings(**{"num_generations": 2, "max_new_tokens": 10, **own})
    lengths = np.array([len(ids) for ids in prompts]) + objective.max_new_tokens
    settings = SimpleNamespace(
        objective=objective,
        plan=SimpleNamespace(max_tokens_per_gpu=most),
        strategy=SimpleNamespace(cp_size=1),
    )
    train = SimpleNamespace(
        store=SimpleNamespace(has_media=False),
        pictures={},
        lengths=lengths,
        batch=lambda rows: [SimpleNamespace(input_ids=prompts[row], prompt="", columns={}) for row in rows],
    )
    plan = forge_packing.plan(lengths, batch_size=len(prompts), max_tokens=most)
    monkeypatch.setattr(_rehearsed_rollouts, "sharing", lambda _: sharing)
    run: Any = SimpleNamespace(settings=settings, train=train, plan=plan)
    return RehearsedRollouts(run, forge_algos.GRPO(objective))


def test_the_largest_micro_batch_is_that_of_the_rows_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """What prompts begin with alike stands in a row once: another one is the largest than without that."""
    alike = [np.append(SYSTEM, [number] * 8) for number in (1, 2)]
    prompts = [*alike, np.arange(300, 510)]
    shared = rehearsed(prompts, monkeypatch, sharing=Sharing(prompt=True, prefix=True, why=""))
    assert shared.largest() == 210 + 2 * 10
    assert rehearsed(prompts, monkeypatch, sharing=Sharing(prompt=True, prefix=False, why="")).largest() == 256
    only = rehearsed(alike, monkeypatch, sharing=Sharing(prompt=True, prefix=True, why=""))
    assert only.largest() == 100 + 2 * 8 + 4 * 10


def test_rows_with_most_tokens_and_with_most_keys_are_both_rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which takes more depends on the model: each after a short one, beside whose gradients it runs."""
    short, long = [np.array([number, 3]) for number in range(20)], [np.arange(number, number + 100) for number in range(8)]
    settings = {"num_generations": 64, "max_new_tokens": 3}
    steps = rehearsed([*short, *long], monkeypatch, sharing=Sharing(True, False, ""), most=512, **settings).worst()
    assert [len(step) for step in steps] == [2, 2]
    tokens, keys = zip(*((len(step[-1].groups.input_ids), len(step[-1].groups.kv_rows)) for step in steps), strict=True)
    assert tokens[0] == 512
    assert tokens[0] > tokens[1]
    assert keys[0] < keys[1] <= 8 * 512
    assert all(len(step[0].groups.input_ids) == 3 for step in steps)


def test_an_update_of_several_has_its_share_of_the_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four prompts in two updates are two in a row at most, though all would fit."""
    prompts = [np.arange(number, number + 20) for number in (0, 30, 60, 90)]
    sharing = Sharing(True, True, "")
    whole, halves = (rehearsed(prompts, monkeypatch, sharing=sharing, updates_per_pass=updates) for updates in (1, 2))
    assert (whole.largest(), halves.largest()) == (4 * 20 + 8 * 10, 2 * 20 + 4 * 10)
    assert [len(step) for step in (*whole.worst(), *halves.worst())] == [1, 1]
