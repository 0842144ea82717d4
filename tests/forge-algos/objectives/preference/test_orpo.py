"""ORPO: the likelihood of the chosen completion beside the odds of the two."""

import numpy as np
import pytest

from forge_algos import ORPO, ORPOSettings, evaluate

from ...oracle import make
from ...preferences import naive_orpo, one_step, pair_batch, shareable, some_pairs, token_logps

PAIRS = some_pairs(5, seed=41)


def test_the_figures():
    """Rewards are β times the log-probability a token; both parts of the loss are reported."""
    model = make()
    found = evaluate(model, [pair_batch(PAIRS[:2]), pair_batch(PAIRS[2:])], objective=ORPO(ORPOSettings(beta=0.5)))
    means = np.array([[token_logps(model, p, y).mean().item() for y in both] for p, *both in PAIRS])
    odds = means - np.log1p(-np.exp(means))
    log_odds = odds[:, 0] - odds[:, 1]
    tokens = [token_logps(model, p, c) for p, c, _ in PAIRS]
    nll = -sum(t.sum().item() for t in tokens) / sum(map(len, tokens))
    assert found.loss == pytest.approx(nll + 0.5 * np.log1p(np.exp(-log_odds)).mean(), rel=1e-5)
    assert found.figures == pytest.approx(
        {
            "accuracy": (means[:, 0] > means[:, 1]).mean(),
            "margin": 0.5 * (means[:, 0] - means[:, 1]).mean(),
            "chosen_reward": 0.5 * means[:, 0].mean(),
            "rejected_reward": 0.5 * means[:, 1].mean(),
            "nll": nll,
            "log_odds": log_odds.mean(),
        },
        rel=1e-4,
    )


@pytest.mark.parametrize("share", [False, True])
def test_prompts_are_learned_once_and_only_the_chosen_ones(share):
    """With `learn_prompt` each chosen completion's prompt is learned once, shared or not.
    With a prompt that is longer than all else, and with one of a single token.
    """
    pairs = [(np.arange(3, 20), *PAIRS[0][1:]), (np.array([7]), *PAIRS[1][1:]), PAIRS[2]]
    model = shareable(make()) if share else make()
    output, _ = one_step(model, ORPO(ORPOSettings(learn_prompt=True)), [pair_batch(pairs, share=share)])
    assert output.loss == pytest.approx(naive_orpo(make(), pairs, learn_prompt=True).item(), rel=1e-5)
    assert output.loss != pytest.approx(naive_orpo(make(), pairs).item(), rel=1e-3)


def test_what_is_masked_within_a_completion_is_learned_with_the_prompt():
    """Masked tokens within a completion (another speaker's turn) are learned with the prompt.
    And in no other way.
    """
    prompt, chosen, rejected = (np.array(ids) for ids in ([5, 6, 7], [8, 9, 10, 11], [12, 13]))
    batch = pair_batch([(prompt, chosen, rejected)])
    groups = batch.groups
    # The chosen completion's second token is not learned.
    groups.rows, groups.targets = np.delete(groups.rows, 1), np.delete(groups.targets, 1)
    groups.lengths = np.array([3, 2])
    model = make()
    whole = token_logps(model, prompt, chosen, prompts=True)
    found = evaluate(model, [batch], objective=ORPO(ORPOSettings(learn_prompt=True)))
    assert found.figures["nll"] == pytest.approx(-whole.mean().item(), rel=1e-5)
    alone = evaluate(model, [batch], objective=ORPO())
    assert alone.figures["nll"] == pytest.approx(-whole[[2, 4, 5]].mean().item(), rel=1e-5)
