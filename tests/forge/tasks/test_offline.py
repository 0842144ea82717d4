"""Steps of a batch plan: divided by the degree of data parallelism, which may differ from the number of ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import forge_packing
from forge.tasks._offline import OfflineSteps, shard_of
from forge.tasks._seeds import step_seed

LENGTHS = np.array([7, 3, 9, 4, 4, 12, 5, 6, 2, 8])
SHARDS, RANKS = 2, 4


def run_of(rank: int, seeds: list[int], adapter: str = "none") -> Any:
    """What the steps of a rank need, where two ranks share each of two data shards."""
    plan = forge_packing.plan(LENGTHS, batch_size=4, max_tokens=20, world_size=SHARDS, seed=3, epochs=1)
    return SimpleNamespace(
        strategy=SimpleNamespace(data_parallel_size=SHARDS, data_parallel_rank=rank // (RANKS // SHARDS)),
        ranks=SimpleNamespace(world_size=RANKS, rank=rank),
        device=SimpleNamespace(type="cpu"),
        machine=SimpleNamespace(seed=seeds.append),
        settings=SimpleNamespace(
            plan=SimpleNamespace(seed=3, max_tokens_per_gpu=20),
            strategy=SimpleNamespace(cp_size=1),
            adapter=SimpleNamespace(adapter=adapter, num_virtual_tokens=2),
        ),
        train=SimpleNamespace(batch=lambda rows: rows.tolist()),
        held_out=SimpleNamespace(lengths=LENGTHS, longest=LENGTHS, lines=None),
        plan=plan,
        num_steps=plan.num_steps,
        steps_from=lambda first: range(first, plan.num_steps),
    )


def test_ranks_of_one_shard_get_the_same_batches_and_seeds() -> None:
    """Rank 0 and 1 train on one shard, rank 2 and 3 on the other; together the shards hold each sample of a step once."""
    found = []
    for rank in range(RANKS):
        seeds: list[int] = []
        run = run_of(rank, seeds)
        found.append((list(OfflineSteps(run, objective=None).steps(0)), seeds))  # type: ignore[arg-type]
    assert found[0] == found[1] != found[2] == found[3]
    plan = run_of(0, []).plan
    for step in range(plan.num_steps):
        samples = [sample for steps, _ in found[::2] for batch in steps[step] for sample in batch]
        assert sorted(samples) == sorted(plan.samples(step).tolist())
        assert [seeds[step] for _, seeds in found[::2]] == [step_seed(3, step, shard) for shard in range(SHARDS)]


@pytest.mark.parametrize("adapter", ["none", "prefix"])
def test_held_out_rows_are_divided_over_the_shards(adapter: str) -> None:
    """Ranks of one shard measure the same rows, and both shards together every row once, in equally many micro-batches."""
    runs = [run_of(rank, [], adapter) for rank in range(RANKS)]
    shards = [[batch.tolist() for batch in shard_of(run, run.held_out)] for run in runs]
    assert shards[0] == shards[1] != shards[2] == shards[3]
    assert len(shards[0]) == len(shards[2])
    assert sorted(sample for shard in shards[::2] for batch in shard for sample in batch) == list(range(len(LENGTHS)))
    if adapter == "prefix":  # whose lines are padded
        assert max(len(batch) * (2 + LENGTHS[batch].max()) for shard in shards for batch in shard if batch) <= 20


@pytest.mark.parametrize("other", [(4, 1, 0), (3, 2, 0), (3, 1, 1)])
def test_a_seed_follows_from_the_position_alone(other: tuple[int, int, int]) -> None:
    """The same for the same seed, step and shard, another for any other."""
    assert step_seed(3, 1, 0) == step_seed(3, 1, 0) != step_seed(*other)
    assert 0 <= step_seed(*other) < 2**63
