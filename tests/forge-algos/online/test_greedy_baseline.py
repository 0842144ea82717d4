"""ReMax: the baseline of a prompt is the reward of its greedy answer, sampled beside the others on any number of ranks."""

import numpy as np
import pytest
import torch

from forge_algos import GRPOSettings, RewardError, RLOOSettings
from forge_algos.online import Episodes, Reward, Rollout

from ..digits import END, decode, digit_model, prompts, rollout, small
from ..threads import on_threads
from .environments.test_episodes import SETTINGS as EPISODES, Count, Signs, asked

GREEDY = {"num_generations": 3, "max_new_tokens": 6, "baseline": "greedy"}


def remax(token_level_rewards, reward_baselines, response_mask):
    """`compute_remax_outcome_advantage` of verl/trainer/ppo/core_algos.py (Apache-2.0, commit 1dda039b), as it is there."""
    returns = (token_level_rewards * response_mask).flip(dims=[-1]).cumsum(dim=-1).flip(dims=[-1])
    return returns - reward_baselines.unsqueeze(-1) * response_mask


def likeliest(model, prompt, most):
    """Return the token ids of the greedy answer, by a plain forward of each."""
    ids = []
    while len(ids) < most and END not in ids:
        ids.append(int(model(torch.tensor([[*prompt, *ids]])).logits[0, -1].argmax()))
    return ids


@pytest.mark.parametrize("kl_weight", [0.0, 0.3])
def test_advantages_are_verls(kl_weight):
    """Of rewards less the greedy answer's, with and without a KL in the rewards."""
    model, other = digit_model(1, size=0.3), digit_model(2, size=0.3)
    own = {"kl_weight": kl_weight, "kl_in_reward": True, "reference": "initial"} if kl_weight else {}
    made = rollout(model, GRPOSettings(**GREEDY, **own, missing_eos_penalty=0.2), reference=other if kl_weight else None)
    with torch.no_grad():
        answers = [likeliest(model.eval(), ids.tolist(), 6) for ids in made.prompt_ids]
    digits = [prompt.columns["digit"] for prompt in prompts(6)]
    scores = small(None, [decode(answer) for answer in answers], digits)
    wanted = np.array([s - 0.2 * (END not in a) for s, a in zip(scores, answers, strict=True)])
    np.testing.assert_allclose(made.greedy_rewards, wanted, rtol=1e-6)
    assert len(set(wanted.tolist())) > 2
    assert made.figures()["greedy_reward"] == pytest.approx(wanted.mean())
    mask = (torch.arange(6) < torch.from_numpy(made.lengths)[:, None]).double()
    token_rewards = torch.zeros(len(made.lengths), 6, dtype=torch.float64)
    if kl_weight:
        token_rewards[mask > 0] -= kl_weight * torch.from_numpy(made.old_logps - made.ref_logps).double()
    for i, length in enumerate(made.lengths.tolist()):
        token_rewards[i, length - 1] += float(made.rewards[i])
    expected = remax(token_rewards, torch.from_numpy(wanted)[made.groups], mask)[mask > 0]
    np.testing.assert_allclose(made.advantages, expected, rtol=1e-5, atol=1e-6)


def test_it_is_the_same_on_two_ranks_and_read_back(tmp_path):
    """Also where a prompt is answered by itself; a file without a greedy answer has none."""
    settings = GRPOSettings(**{**GREEDY, "num_generations": 1})
    model = digit_model(1, size=0.3)
    alone = rollout(model, settings)
    for made in on_threads(lambda rank: rollout(model, settings, parallel=rank, rank=rank.rank), 2):
        assert np.array_equal(made.greedy_rewards, alone.greedy_rewards)
        assert np.array_equal(made.advantages, alone.advantages)
    alone.write(tmp_path / "a.jsonl")
    again = Rollout.read(tmp_path / "a.jsonl")
    assert np.array_equal(again.greedy_rewards, alone.greedy_rewards)
    assert again.figures() == alone.figures()
    rollout(model, GRPOSettings(num_generations=2, max_new_tokens=4)).write(tmp_path / "b.jsonl")
    assert Rollout.read(tmp_path / "b.jsonl").greedy_rewards is None


def test_a_greedy_answer_that_cannot_be_scored_leaves_its_prompt_out():
    """Its completions have no advantage and are not trained on; those of others are."""
    calls = []

    def at_times(prompts, completions, digit):
        calls.append(len(completions))
        found = small(prompts, completions, digit)
        return [None, *found[1:]] if len(calls) == 2 else found

    made = rollout(digit_model(1, size=0.3), GRPOSettings(**GREEDY, on_reward_error="skip", reward=("a:b",)), reward=at_times)
    assert calls == [18, 6]
    assert np.isnan(made.greedy_rewards[0])
    assert not made.trained[:3].any()
    assert made.trained[3:].all()
    assert np.isfinite(made.advantages).all()
    assert np.isfinite(made.figures()["greedy_reward"])


def test_an_episode_is_greedy_in_the_world_of_its_prompts_others():
    """One of each prompt, whose environment has their seed."""
    worlds = []

    class Noted(Count):
        def reset(self, **given):
            worlds.append(given["seed"])
            super().reset(**given)

    settings = GRPOSettings(**EPISODES, baseline="greedy")
    made = rollout(
        digit_model(1, size=0.3), settings, asked=asked(), rewards=[], episodes=Episodes(Noted, Signs(), name="Noted")
    )
    assert len(worlds) == 12
    assert worlds[9:] == worlds[:9:3]
    assert made.greedy_rewards.shape == (3,)
    rewards = made.rewards - made.greedy_rewards[made.groups]
    starts = made.starts
    assert [made.advantages[a] for a in starts[:-1]] == pytest.approx(rewards.tolist())


def test_what_has_no_effect_beside_it_is_refused():
    """A deviation, a completion's loss with a KL of tokens, and other methods."""
    for changes, says in (
        ({"scale_rewards": "group"}, "scale_rewards='group' has no effect with baseline='greedy'"),
        ({"kl_weight": 0.1, "kl_in_reward": True, "loss_type": "gspo"}, "with baseline='greedy' gives each token"),
        ({"loss_type": "online_dpo", "kl_weight": 0.1}, "baseline='greedy' has no effect"),
    ):
        with pytest.raises(ValueError, match=says):
            GRPOSettings(**{**GREEDY, **changes})
    assert GRPOSettings(**GREEDY).scale == "none"
    assert RLOOSettings().credit == "leave_one_out"
    with pytest.raises(RewardError, match="nothing rewards"):
        rollout(digit_model(), GRPOSettings(**GREEDY), rewards=list[Reward]())
