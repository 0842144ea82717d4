"""OTB: a baseline of each token, from probabilities that the rollout measures, on any number of ranks."""

import numpy as np
import pytest
import torch

from forge_algos import GRPOSettings
from forge_algos.losses import optimal_token_advantages

from ..digits import digit_model, rollout
from ..threads import on_threads

OPTIMAL = {"num_generations": 3, "max_new_tokens": 6, "baseline": "optimal_token", "temperature": 0.8}


@pytest.mark.parametrize("kl_weight", [0.0, 0.3])
def test_advantages_are_those_of_full_logits(kl_weight):
    """Of π and Σ p² by a plain forward of each completion, at the temperature, with and without a KL in the rewards."""
    model, other = digit_model(1, size=0.3), digit_model(2, size=0.3)
    own = {"kl_weight": kl_weight, "kl_in_reward": True} if kl_weight else {}
    made = rollout(model, GRPOSettings(**OPTIMAL, **own), reference=other if kl_weight else None, max_tokens=40)
    logps, collisions, rewards = [], [], []
    for i, ids in enumerate(made.completion_ids):
        prompt = made.prompt_ids[made.groups[i]]
        with torch.no_grad():
            out = model.eval()(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1].double()
        p = (out / 0.8).softmax(-1)
        logps.append(p[torch.arange(len(ids)), torch.tensor(ids, dtype=torch.int64)].log())
        collisions.append(p.square().sum(-1).log())
        rewards.append(torch.zeros(len(ids), dtype=torch.float64))
        if kl_weight:
            mine = slice(made.starts[i], made.starts[i + 1])
            rewards[-1] -= kl_weight * torch.from_numpy(made.old_logps[mine] - made.ref_logps[mine]).double()
        rewards[-1][-1] += float(made.rewards[i])
    expected = optimal_token_advantages(*map(torch.cat, (rewards, logps, collisions)), made.groups.tolist(), made.lengths)
    np.testing.assert_allclose(made.advantages, expected, rtol=1e-4, atol=1e-5)
    assert len(set(made.advantages.tolist())) > len(made.groups)
    for rank in on_threads(
        lambda rank: rollout(
            model, GRPOSettings(**OPTIMAL, **own), reference=other if kl_weight else None, parallel=rank, rank=rank.rank
        ),
        2,
    ):
        np.testing.assert_allclose(rank.advantages, made.advantages, rtol=1e-4, atol=1e-5)


def test_completions_that_were_cut_off_count_in_the_baseline():
    """With `mask_truncated` they are measured and not trained on, so that the others' advantages stay."""
    model = digit_model(1, size=0.3)
    whole, masked = (rollout(model, GRPOSettings(**OPTIMAL, mask_truncated=cut)) for cut in (False, True))
    trained = np.repeat(masked.trained, masked.lengths)
    assert 0 < trained.sum() < len(trained)
    np.testing.assert_allclose(masked.advantages[trained], whole.advantages[trained], rtol=1e-4, atol=1e-5)
    assert not masked.advantages[~trained].any()


def test_what_has_no_effect_beside_it_is_refused():
    """A loss of whole completions, a deviation, entropies, one completion."""
    for changes, says in (
        ({"loss_type": "gspo"}, "baseline='optimal_token' gives each token an advantage of its own, and loss_type='gspo'"),
        ({"scale_rewards": "batch"}, "scale_rewards='batch' has no effect with baseline='optimal_token'"),
        ({"top_entropy_quantile": 0.2}, "top_entropy_quantile=0.2 has no effect with baseline='optimal_token'"),
        ({"num_generations": 1}, "num_generations must be at least 2"),
    ):
        with pytest.raises(ValueError, match=says):
            GRPOSettings(**{**OPTIMAL, **changes})
