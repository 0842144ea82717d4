"""Ranks that share a data shard: every result is that of one rank for each shard.

As under tensor or context parallelism, made up here by four threads in two shards.
"""

import math

import numpy as np
import pytest
import torch

from forge_algos import (
    DPO,
    SFT,
    DivergedError,
    GRPOSettings,
    OptimizerSettings,
    ReferenceMismatchError,
    RewardError,
    UnevenRanksError,
    adamw,
    evaluate,
    schedule,
    train,
)
from forge_algos.adaptations import osft_importance
from forge_algos.adaptations.base._targets import resolve_targets
from forge_algos.objectives import check_reference, reference_logps
from forge_algos.online import rollout_batches
from forge_algos.training._columns import columns

from .digits import digit_model, prompts, rollout, sampler
from .oracle import make, pack, samples
from .preferences import pair_batch, some_pairs
from .threads import on_threads

EXAMPLES = samples((5, 9, 2, 7, 13, 4, 6), seed=3)


def shared(function):
    """Return the results of two ranks with a shard each, and of four in two shards."""
    two, four = on_threads(function, 2), on_threads(function, 4, ranks_a_shard=2)
    return [two[0], two[0], two[1], two[1]], four


def steps_of(rank, **options):
    model = make()
    rank.parameters = list(model.parameters())
    config = OptimizerSettings(learning_rate=1e-2, warmup_steps=2)
    optimizer = adamw(model, config)
    outputs = train(
        model,
        # Unequal counts; the second shard has nothing in the second step.
        [[pack(EXAMPLES[rank.data_parallel_rank :: 2])], [pack([] if rank.data_parallel_rank else EXAMPLES)]],
        objective=SFT(),
        optimizer=optimizer,
        scheduler=schedule(optimizer, config, 2),
        parallel=rank,
        **options,
    )
    figures = [(o.loss, o.loss_count, o.tokens, o.samples, o.grad_norm, tuple(o.figures.values())) for o in outputs]
    return figures, [p.detach().clone() for p in model.parameters()]


def test_training():
    """Losses, counts, norms, figures and weights are those of one rank a shard, to the bit."""
    for (figures, weights), (expected, theirs) in zip(*shared(steps_of), strict=True):
        assert figures == expected
        assert all(torch.equal(mine, other) for mine, other in zip(weights, theirs, strict=True))


def test_a_norm_that_is_nan_on_a_rank_that_does_not_count():
    """A gradient norm that is infinite on the second rank of a shard stops all ranks."""

    def run(rank):
        if rank.rank == 3:
            rank.grad_norm = lambda _parameters: torch.tensor(math.inf)
        with pytest.raises(DivergedError, match="step 1: the gradient norm is"):
            steps_of(rank)
        assert ("step",) not in rank.calls

    on_threads(run, 4, ranks_a_shard=2)


def test_evaluation():
    """An evaluation counts each shard's terms once."""

    def run(rank):
        batches = [pack([example]) for example in EXAMPLES[rank.data_parallel_rank :: 2]]
        return evaluate(make(), [*batches, *[pack([])] * (4 - len(batches))], objective=SFT(), parallel=rank)

    expected, found = shared(run)
    assert found == expected
    assert found[0].loss_count == evaluate(make(), [pack(EXAMPLES)], objective=SFT()).loss_count


def test_uneven_shards_are_refused():
    """Shards that were not given equally many micro-batches are counted as shards, not as ranks."""

    def run(rank):
        with pytest.raises(UnevenRanksError, match="given [12] micro-batches and the mean of 2 data shards is 1.5"):
            columns([pack(EXAMPLES)] * (1 + rank.data_parallel_rank), SFT(), rank)
        with pytest.raises(UnevenRanksError, match="1 of 2 data shards have no batches left"):
            columns([pack(EXAMPLES)] if rank.data_parallel_rank else None, SFT(), rank)

    on_threads(run, 4, ranks_a_shard=2)


def test_columns_count_each_shard_once():
    """Counts of terms, tokens and samples are summed over the shards, beyond one collective's width."""

    def run(rank):
        given = [pack(EXAMPLES[:1] if (k + rank.data_parallel_rank) % 3 == 0 else []) for k in range(70)]
        found = columns(given, SFT(), rank)
        return found.mine, found.everywhere, found.active, found.count, found.tokens, found.samples

    expected, found = shared(run)
    assert found == expected


def test_osft_importance():
    """Each shard's rows count once in the importance, and uneven shards are refused."""
    targets = resolve_targets(make(), None)

    def run(rank):
        return osft_importance(make(), [pack(EXAMPLES[rank.data_parallel_rank :: 2])], targets=targets, parallel=rank)

    def uneven(rank):
        rows = [pack(EXAMPLES)] * (1 + rank.data_parallel_rank)
        with pytest.raises(UnevenRanksError):
            osft_importance(make(), rows, targets=targets, parallel=rank)

    expected, found = shared(run)
    assert found == expected
    on_threads(uneven, 4, ranks_a_shard=2)


def test_check_reference():
    """Terms are counted once a shard, and one shard's wrong references stop all ranks."""
    pairs = some_pairs(5, seed=1)

    def run(rank, wrong=False):
        batch = pair_batch(pairs[rank.data_parallel_rank :: 2])
        (logps,) = reference_logps(make(seed=9 if wrong and rank.data_parallel_rank else 0), [batch.groups])
        batch = type(batch)(groups=batch.groups, ref_logps=logps)
        try:
            return check_reference(make(), [batch], objective=DPO(), parallel=rank)
        except ReferenceMismatchError as error:
            return str(error)

    expected, found = shared(run)
    assert found == expected
    assert found[0] == pytest.approx(math.log(2), abs=1e-4)
    assert all("2 of 5 terms are off" in error for error in on_threads(lambda rank: run(rank, wrong=True), 4, ranks_a_shard=2))


SETTINGS = GRPOSettings(num_generations=2, max_new_tokens=5, kl_weight=0.1)


@pytest.mark.slow
def test_rollouts_and_their_batches():
    """Prompts and batches are divided over the shards, and ranks of one shard get the same."""

    def run(rank):
        model = digit_model(size=0.3)
        made = rollout(
            model, SETTINGS, asked=prompts(5), sampler=sampler(model), reference=digit_model(2), parallel=rank, max_tokens=40
        )
        updates = rollout_batches(made, max_tokens=40, updates=2, seed=4, parallel=rank)
        rows = [[batch.groups.input_ids.tolist() for batch in update] for update in updates]
        return made.completion_texts, made.rewards.tolist(), made.old_logps, made.ref_logps, made.advantages, rows

    expected, found = shared(run)
    for mine, theirs in zip(found, expected, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            np.testing.assert_equal(one, other)
    assert found[0][-1] != found[2][-1]
    assert found[0][0] == rollout(digit_model(size=0.3), SETTINGS, asked=prompts(5), reference=digit_model(2)).completion_texts


def test_a_reward_that_fails_on_a_rank_that_does_not_count():
    """A reward function that fails on the second rank of a shard alone stops all ranks."""
    messages = {}

    def run(rank):
        def fails(prompts, completions, digit):
            if rank.rank == 1:
                raise ValueError("no disk")
            return [0.0] * len(completions)

        with pytest.raises(RewardError) as caught:
            rollout(digit_model(), SETTINGS, asked=prompts(4), reward=fails, reference=digit_model(2), parallel=rank)
        messages[rank.rank] = str(caught.value)

    on_threads(run, 4, ranks_a_shard=2)
    assert "no disk" in messages.pop(1)
    assert set(messages) == {0, 2, 3}
    assert all("failed on another rank" in message for message in messages.values())
