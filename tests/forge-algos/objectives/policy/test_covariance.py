"""Clip-Cov and KL-Cov: tokens are chosen among all of a step's, however it is cut, by the policy as it is before it."""

import copy

import attrs
import numpy as np
import pytest
import torch

from forge_algos import GRPO, GRPOSettings, LossError, PackedBatchError, train
from forge_algos.losses import kl_cov_tokens
from forge_algos.online import rollout_batches

from ...digits import digit_model, prompts, rollout
from ...oracle import CPU, distance, gradients
from ...threads import on_threads

SETTINGS = {
    "clip_cov": {"clip_cov_ratio": 0.2, "clip_cov_lb": 0.05, "clip_cov_ub": 50.0, "clip": 0.1, "clip_high": 0.3},
    "kl_cov": {"kl_cov_ratio": 0.2, "kl_cov_coef": 3.0},
}


def made_of(kind):
    """Return a model, and a rollout of an older policy in four groups of two."""
    settings = GRPOSettings(loss_type=kind, num_generations=2, max_new_tokens=6, **SETTINGS[kind])
    model = digit_model(1, size=0.3)
    made = rollout(model, settings, asked=prompts(4))
    away = np.random.default_rng(0).normal(0, 0.2, len(made.old_logps)).astype(np.float32)
    return settings, model, attrs.evolve(made, old_logps=made.old_logps + away)


def reference_loss(model, made, settings, lots):
    """Equations 11 to 15 of arXiv 2505.22617, completion after completion without packing; return how many were chosen too."""
    logps = []
    for i, ids in enumerate(made.completion_ids):
        prompt = made.prompt_ids[made.groups[i]]
        out = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        logps.append(out[torch.arange(len(ids)), torch.tensor(ids, dtype=torch.int64)])
    logps = torch.cat(logps)
    A, old, now = torch.tensor(made.advantages), torch.tensor(made.old_logps), logps.detach()
    covariance = ((now - now.mean()) * (A - A.mean())).numpy()
    ratio, number = (logps - old).exp(), int(0.2 * len(now))
    if settings.loss_type == "kl_cov":
        chosen = np.argsort(-covariance)[:number]
        losses = -ratio * A
        return (losses.sum() + 3.0 * (logps - old)[chosen].abs().sum()) / len(now), number
    losses = -torch.min(ratio * A, ratio.clamp(0.9, 1.3) * A)
    free = (losses == -ratio * A).numpy()
    could = np.flatnonzero((covariance > 0.05) & (covariance < 50) & free)
    chosen = could[np.argsort(lots[could])][:number]
    keep = torch.ones(len(now))
    keep[chosen] = 0
    assert 0 < len(chosen) < len(could)
    return (losses * keep).sum() / len(now), len(chosen)


def step_of(model, batches, settings, **options):
    """Return (output, gradients) of one step that moves nothing."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
    still = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    (output,) = train(
        model, [batches], objective=GRPO(settings), optimizer=optimizer, scheduler=still, max_grad_norm=0, **options
    )
    return output, gradients(model)


@pytest.mark.parametrize("kind", SETTINGS)
def test_equals_the_paper_whatever_the_cut(kind):
    """Loss and gradients are within 1e-5 of the reference in one row, in short ones, and on two ranks."""
    settings, model, made = made_of(kind)
    whole = rollout_batches(made, max_tokens=1000, lots=True)[0]
    lots = whole[0].lots
    assert len(set(lots.tolist())) == len(made.old_logps)
    model.zero_grad()
    loss, number = reference_loss(model, made, settings, lots)
    loss.backward()
    wanted = gradients(model)
    longest = int(max(len(p) for p in made.prompt_ids) + made.lengths.max())
    for tokens in (1000, 2 * longest, longest):
        batches = rollout_batches(made, max_tokens=tokens, lots=True)[0]
        output, found = step_of(model, batches, settings)
        assert output.loss == pytest.approx(loss.item(), rel=1e-5, abs=1e-6)
        assert distance(found, wanted) < 1e-5
        assert output.figures["chosen"] == pytest.approx(number / len(made.old_logps))
    assert len(batches) > 3

    def on_rank(rank):
        mine = copy.deepcopy(model)
        rank.parameters = list(mine.parameters())
        batches = rollout_batches(made, max_tokens=2 * longest, parallel=rank, rank=rank.rank, lots=True)[0]
        return step_of(mine, batches, settings, parallel=rank)

    for output, found in on_threads(on_rank, 2):
        assert output.loss == pytest.approx(loss.item(), rel=1e-5, abs=1e-6)
        assert distance(found, wanted) < 1e-5
    # So that the comparison can fail.
    other = attrs.evolve(settings, **{f"{kind}_ratio": 0.4})
    assert distance(step_of(model, whole, other)[1], wanted) > 1e-3


def test_lots_are_drawn_anew_in_each_update():
    """They follow from the rollout's seed and the update's number."""
    _, _, made = made_of("kl_cov")
    first, second = (batches[0].lots for batches in rollout_batches(made, max_tokens=1000, passes=2, lots=True))
    again, _ = (batches[0].lots for batches in rollout_batches(made, max_tokens=1000, passes=2, lots=True))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, second)


def test_equal_covariances_are_chosen_by_lot():
    """Also where they differ by rounding, as those of equal tokens in other rows do: the least lots."""
    logps = torch.tensor([-1.0, -1.0 + 1e-7, -1.0 - 1e-7, -9.0])
    chosen = kl_cov_tokens(logps, torch.tensor([1.0, 1.0, 1.0, 0.0]), torch.tensor([0.5, 0.9, 0.1, 0.0]), share=0.75)
    assert chosen.tolist() == [True, False, True, True]


def test_a_policy_that_has_not_moved_has_the_gradient_of_the_plain_loss():
    """Of KL-Cov in a rollout's first update: where the ratio differs from 1 by rounding, |log ratio| has no slope."""
    settings, model, made = made_of("kl_cov")
    with torch.no_grad():
        before = rollout(model, settings, asked=prompts(4))
    noise = np.random.default_rng(0).normal(0, 1e-6, len(before.old_logps)).astype(np.float32)
    batches = rollout_batches(attrs.evolve(before, old_logps=before.old_logps + noise), max_tokens=1000, lots=True)[0]
    _, found = step_of(model, batches, settings)
    _, plain = step_of(model, batches, GRPOSettings(loss_type="dapo", num_generations=2, max_new_tokens=6))
    assert distance(found, plain) < 1e-5
    assert made.advantages.any()


def test_what_is_missing_is_said():
    """A batch without lots, and a step that was not begun."""
    settings, model, made = made_of("clip_cov")
    (batch,) = rollout_batches(made, max_tokens=1000, lots=True)[0]
    bound = GRPO(settings).bind(model, device=CPU)
    with pytest.raises(LossError, match="chooses among all tokens of a step: before its first micro-batch call begin"):
        bound(batch, [])
    with pytest.raises(PackedBatchError, match="lots is missing"):
        step_of(model, [attrs.evolve(batch, lots=None)], settings)
