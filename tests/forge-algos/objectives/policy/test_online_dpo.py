"""Online DPO: the best and the worst completion of each prompt, beside DPO of both by plain forwards."""

import numpy as np
import pytest
import torch

from forge_algos import GRPO, GRPOSettings
from forge_algos.losses import dpo
from forge_algos.online import rollout_batches
from forge_algos.online._credit import pairs_of

from ...digits import digit_model, rollout
from ...oracle import CPU, distance, gradients

NAN = np.nan


def settings(**changes):
    given = {"loss_type": "online_dpo", "num_generations": 2, "max_new_tokens": 6, "kl_weight": 0.3, "temperature": 0.8}
    return GRPOSettings(**given | changes)


def summed(model, made, i, temperature):
    """Return log π of completion i by one plain forward, with gradients."""
    prompt, ids = made.prompt_ids[made.groups[i]], torch.tensor(made.completion_ids[i], dtype=torch.int64)
    logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : len(prompt) + len(ids) - 1]
    return (logits / temperature).log_softmax(-1).gather(1, ids[:, None]).sum()


@pytest.mark.parametrize("generations", [2, 5])
@pytest.mark.parametrize("max_tokens", [12, 500])
@pytest.mark.parametrize("kind", ["online_dpo", "online_ipo"])
def test_is_dpo_on_the_best_and_the_worst(generations, max_tokens, kind):
    """A step's loss and gradients are the mean over pairs of DPO or IPO, however it is cut; equal rewards have no term.
    IPO is that of TRL's OnlineDPOTrainer, of summed log-probabilities: (c - r - 1/2β)².
    """
    model, reference = digit_model(1, size=0.3), digit_model(2, size=0.3)
    own = settings(num_generations=generations, loss_type=kind)
    made = rollout(model, own, reference=reference, max_tokens=max_tokens)
    objective = GRPO(own)
    bound = objective.bind(model, device=CPU)
    (batches,) = rollout_batches(made, max_tokens=max_tokens)
    assert (len(batches) > 1) == (max_tokens == 12)
    terms = [bound(batch, []) for batch in batches if len(batch.groups.lengths)]
    count = sum(each.count for each in terms)
    (sum(each.sum for each in terms) / count).backward()
    mine = gradients(model)
    model.zero_grad()

    found = []
    for group in range(6):
        members = np.flatnonzero(made.groups == group)
        ranked = members[np.argsort(made.rewards[members], kind="stable")]
        best, worst = members[made.rewards[members].argmax()], max(ranked[made.rewards[ranked] == made.rewards[ranked[0]]])
        if made.rewards[best] > made.rewards[worst]:
            logps = [summed(each, made, i, 0.8)[None] for each in (model, reference) for i in (best, worst)]
            margin = logps[0] - logps[1] - (logps[2] - logps[3]).detach()
            ipo = (margin - 1 / (2 * 0.3)).square().sum()
            plain = dpo(logps[0], logps[1], logps[2].detach(), logps[3].detach(), beta=0.3).sum
            found.append(ipo if kind == "online_ipo" else plain)
    assert len(found) > 3
    expected = sum(found) / 6
    expected.backward()
    assert count == 12
    assert (sum(each.sum.item() for each in terms) / count) == pytest.approx(expected.item(), rel=1e-5)
    assert distance(mine, gradients(model)) < 1e-4
    assert made.trained.sum() == 12
    assert sum(each.stats["completions"].item() for each in terms) == 12


def test_pairs_of():
    """The first of the best and the last of the worst that can be used; a group with one of them is no pair."""
    rewards = np.array([1, 3, 3, 0, 0, 2, 2, NAN, 5, 1, NAN], np.float32)
    groups = np.array([0, 0, 0, 0, 0, 1, 1, 2, 2, 3, 3])
    usable = np.ones(11, bool)
    assert pairs_of(rewards, groups, usable).tolist() == [[1, 4], [5, 6]]
    usable[[1, 4, 6]] = False
    assert pairs_of(rewards, groups, usable).tolist() == [[2, 3]]
    assert pairs_of(rewards[:0], groups[:0], usable[:0]).shape == (0, 2)


def test_cut_off_completions_are_in_no_pair():
    """With mask_truncated a pair is of two completions that ended; nothing else counts in the mean."""
    own = settings(num_generations=4, mask_truncated=True, max_new_tokens=3)
    made = rollout(digit_model(1, size=0.3), own, reference=digit_model(2, size=0.3))
    assert not made.finished.all()
    assert not made.trained[~made.finished].any()
    assert not made.masked.any()
    for group in range(6):
        members = np.flatnonzero(made.groups == group)
        assert made.trained[members].sum() == (2 if made.finished[members].sum() > 1 else 0)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kl_weight": 0.0}, "kl_weight=0 with loss_type='online_dpo': it is β"),
        ({"num_iterations": 2}, "num_iterations=2 .* learned from in one step"),
        ({"updates_per_pass": 2}, "updates_per_pass=2 .* learned from in one step"),
        ({"clip": 0.1}, "clip=0.1 has no effect with loss_type='online_dpo', which clips nothing"),
        ({"scale_rewards": "none"}, "scale_rewards='none' has no effect"),
        ({"entropy_coef": 0.1}, "entropy_coef=0.1 has no effect"),
        ({"importance_sampling_level": "token"}, "importance_sampling_level='token' has no effect"),
        ({"kl_estimator": "unbiased"}, "kl_estimator='unbiased' has no effect"),
        ({"multi_objective_aggregation": "normalize_then_sum"}, "multi_objective_aggregation=.* has no effect"),
        ({"vespo_k_pos": 1.0}, "vespo_k_pos=1.0 has no effect"),
        ({"loss_reduction": "tokens"}, "loss_reduction='tokens' has no effect .* losses are of whole completions"),
        ({"loss_type": "online_ipo", "clip": 0.1}, "clip=0.1 has no effect with loss_type='online_ipo'"),
    ],
)
def test_what_pairs_do_not_read_is_refused(changes, said):
    """Settings without effect, and more than one step on a rollout, are refused by name."""
    with pytest.raises(ValueError, match=said):
        settings(**changes)
