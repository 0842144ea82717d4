"""Rollouts: log-probabilities, ratios, and credit by the papers' formulas."""

import copy
import math
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from attrs import evolve

from forge_algos import (
    GRPO,
    PPO,
    RLOO,
    AdapterError,
    AdapterSettings,
    GRPOSettings,
    PPOSettings,
    RewardError,
    RLOOSettings,
    RolloutError,
    adapt,
)
from forge_algos.online import Completion, Reward, attach_value_head, rollout_batches
from forge_algos.online._credit import Scored, leave_one_out
from forge_algos.online.rollout._rollout import equal_groups

from ..digits import copied, decode, digit_model, prompts, rollout, sampler, small
from ..oracle import CPU
from ..threads import on_threads

SETTINGS = {
    "grpo": (GRPO, GRPOSettings(num_generations=4, max_new_tokens=6, temperature=0.7)),
    "rloo": (RLOO, RLOOSettings(num_generations=3, max_new_tokens=6, kl_weight=0.1)),
    "ppo": (PPO, PPOSettings(num_generations=2, max_new_tokens=6, kl_weight=0.2, temperature=1.3, whiten=False)),
}


def policy(seed=1):
    """Return a model whose value head is not zero."""
    model = digit_model(seed, size=0.3)
    linear = attach_value_head(model)
    with torch.no_grad():
        linear.weight.normal_(generator=torch.Generator().manual_seed(5))
    return model


def alone(model, made, i, temperature):
    """Return (logps, values) of completion i, float32[S], by one plain forward.
    Full logits, no packing.
    """
    prompt, ids = made.prompt_ids[made.groups[i]], made.completion_ids[i]
    with torch.no_grad():
        out = model(torch.tensor([[*prompt, *ids]]), output_hidden_states=True)
        at = slice(len(prompt) - 1, len(prompt) + len(ids) - 1)
        logps = (out.logits[0, at] / temperature).log_softmax(-1)
        values = model.value_head(out.hidden_states[-1][0, at])[:, 0] if hasattr(model, "value_head") else None
    return logps.gather(1, torch.tensor(ids, dtype=torch.int64)[:, None])[:, 0].numpy(), values


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("max_tokens", [12, 40, 500])
def test_log_probabilities_are_those_of_a_plain_forward(name, max_tokens):
    """Log-probabilities and values equal a plain forward's, for every cut into rows.
    The policy's and the reference's, at the sampling temperature.
    """
    model, other = policy(), digit_model(2, size=0.3)
    _, settings = SETTINGS[name]
    reference = other if settings.kl_weight else None
    made = rollout(model, settings, reference=reference, max_tokens=max_tokens)
    starts = made.starts
    for i in range(len(made.groups)):
        mine = slice(starts[i], starts[i + 1])
        logps, values = alone(model, made, i, settings.temperature)
        np.testing.assert_allclose(made.old_logps[mine], logps, rtol=1e-5, atol=1e-5)
        if reference is not None:
            np.testing.assert_allclose(
                made.ref_logps[mine], alone(other, made, i, settings.temperature)[0], rtol=1e-5, atol=1e-5
            )
        if name == "ppo":
            np.testing.assert_allclose(made.values[mine], values, rtol=1e-4, atol=1e-4)
    assert (made.ref_logps is None) == (reference is None)
    assert (made.values is None) == (name != "ppo")


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("low", [False, True])
def test_ratios_begin_at_one(name, low):
    """The first update's log-probabilities are the rollout's within 1e-6 a token.
    In bfloat16 too, for every cut.
    """
    model = policy()
    objective, settings = SETTINGS[name]
    settings = type(settings)(
        **{f: getattr(settings, f) for f in ("num_generations", "max_new_tokens", "kl_weight", "temperature")},
        updates_per_pass=2,
    )
    autocast = partial(torch.autocast, "cpu", torch.bfloat16, enabled=low)
    for max_tokens in (12, 30, 500):
        made = rollout(
            model, settings, reference=digit_model(2) if settings.kl_weight else None, max_tokens=max_tokens, autocast=autocast
        )
        bound = objective(settings).bind(model, device=CPU)
        updates = rollout_batches(made, max_tokens=max_tokens, updates=2)
        assert len(updates) == 2
        for batch in [batch for update in updates for batch in update]:
            with autocast():
                logps, _, _ = bound.forward(batch)
                terms = bound(batch, [])
            assert np.abs(np.exp(logps.detach().numpy().astype(np.float64) - batch.old_logps) - 1).max() <= 1e-6
            assert logps.requires_grad
            assert abs(terms.stats["ratio"].item() / terms.count - 1) < 1e-6


def test_grpo_compares_within_groups():
    """GRPO's advantage is (reward - mean) / (deviation + 1e-4) of the group, on each token."""
    made = rollout(policy(), SETTINGS["grpo"][1])
    starts = made.starts
    for group in range(6):
        members = np.flatnonzero(made.groups == group)
        rewards = made.rewards[members].astype(np.float64)
        for i, expected in zip(members, (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4), strict=True):
            np.testing.assert_allclose(made.advantages[starts[i] : starts[i + 1]], expected, rtol=1e-4, atol=1e-4)
    assert len(np.unique(made.rewards)) > 6


def test_rloo_has_the_kl_in_the_reward():
    """RLOO's advantage is reward - 0.1 · Σ(log π - log π_ref), less the mean of the others'.
    arXiv 2402.14740, section 3.
    """
    made = rollout(policy(), SETTINGS["rloo"][1], reference=digit_model(2, size=0.3))
    starts = made.starts
    total = [
        float(made.rewards[i]) - 0.1 * float((made.old_logps - made.ref_logps)[starts[i] : starts[i + 1]].sum())
        for i in range(18)
    ]
    for i in range(18):
        others = [total[j] for j in range(18) if made.groups[j] == made.groups[i] and j != i]
        expected = total[i] - sum(others) / 2
        np.testing.assert_allclose(made.advantages[starts[i] : starts[i + 1]], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cut_off", [False, True])
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out", "length", "none"])
def test_credit_of_verls_estimators(baseline, cut_off):
    """The KL in the reward, another baseline, whitening: as verl's `apply_kl_penalty` and its estimators do one by one.

    Without a baseline a token's return is the reward less the penalties from it on (REINFORCE++).
    """
    settings = GRPOSettings(
        num_generations=3, max_new_tokens=6, kl_weight=0.1, kl_in_reward=True, baseline=baseline, whiten=True,
        mask_truncated=cut_off,
    )  # fmt: skip
    made = rollout(policy(), settings, reference=digit_model(2, size=0.3))
    k1 = np.split(0.1 * (made.old_logps - made.ref_logps).astype(np.float64), made.starts[1:-1])
    returns = []
    for i in range(18):
        own = [j for j in range(18) if made.groups[j] == made.groups[i]]
        total = {j: float(made.rewards[j]) - k1[j].sum() for j in own}
        length = {j: len(k1[j]) for j in own}
        less = {
            "mean": sum(total.values()) / 3,
            "leave_one_out": sum(total[j] for j in own if j != i) / 2,
            "length": sum(total[j] * length[j] for j in own) / sum(length.values()),
        }
        if baseline == "none":
            returns.append([float(made.rewards[i]) - k1[i][t:].sum() for t in range(length[i])])
        else:
            returns.append([total[i] - less[baseline]] * length[i])
    of_tokens = np.concatenate(returns)
    kept = np.repeat(made.trained, made.lengths)
    assert kept.all() != cut_off
    expected = (of_tokens - of_tokens[kept].mean()) / of_tokens[kept].std(ddof=1)
    np.testing.assert_allclose(made.advantages, np.where(kept, expected, 0), rtol=1e-4, atol=1e-4)
    (batch,) = next(iter(rollout_batches(made, max_tokens=500)))
    assert GRPO(settings).loss_options(batch, CPU)["ref_logps"] is None, "the KL is in no loss besides"


def test_one_completion_of_each_prompt():
    """Without a baseline nothing is compared, and a prompt may be answered once: the rewards themselves, whitened if asked."""
    plain, white = (
        rollout(policy(), GRPOSettings(num_generations=1, max_new_tokens=6, baseline="none", whiten=whiten))
        for whiten in (False, True)
    )
    rewards = np.repeat(plain.rewards, plain.lengths)
    np.testing.assert_allclose(plain.advantages, rewards, rtol=1e-6)
    np.testing.assert_allclose(white.advantages, (rewards - rewards.mean()) / rewards.std(ddof=1), rtol=1e-4, atol=1e-5)


def test_rloo_normalizes_the_advantages_of_what_counts():
    """To mean 0 and deviation 1, of all that is scored, or left after `on_equal_rewards=skip`, cut off and masked ones too."""
    own = {"num_generations": 3, "max_new_tokens": 3, "kl_weight": 0.0, "mask_truncated": True, "on_equal_rewards": "skip"}

    def reward(prompts, completions, digit):
        return [float(len(c)) if d % 2 else 1.0 for c, d in zip(completions, digit, strict=True)]

    plain, found = (
        rollout(policy(), RLOOSettings(normalize_advantages=normalize, **own), reward=reward, asked=prompts(9))
        for normalize in (False, True)
    )
    assert found.masked.any()
    assert not (found.trained | found.masked).all()
    counted = found.trained | found.masked
    groups = np.array([found.rewards[found.groups == group].sum() for group in found.groups])
    each = found.rewards - (groups - found.rewards) / 2
    wanted = (each - each[counted].mean()) / (each[counted].std(ddof=1) + 1e-4)
    first = found.starts[:-1]
    np.testing.assert_allclose(plain.advantages[first][plain.trained], each[plain.trained], rtol=1e-5)
    np.testing.assert_allclose(found.advantages[first][found.trained], wanted[found.trained], rtol=1e-4, atol=1e-5)


def test_rloo_normalizes_without_what_is_scored_alone():
    """A completion whose group has no other score has no baseline: it is none of those that are scaled, and stays at 0."""
    found = leave_one_out(
        RLOOSettings(normalize_advantages=True),
        Scored(
            rewards=np.array([1, 3, np.nan, 9], np.float32), groups=np.array([0, 0, 1, 1]), lengths=np.array([1, 2, 1, 1]),
            trained=np.array([True, True, False, True]), counted=np.array([True, True, False, True]),
            parts={}, penalty=np.zeros(5, np.float32), values=None,
        ),
    )[0]  # fmt: skip
    deviation = np.std([-2, 2], ddof=1) + 1e-4
    np.testing.assert_allclose(found, [-2 / deviation, 2 / deviation, 0, 0], rtol=1e-6)


def test_rewards_are_clipped_before_penalties():
    """What the functions give together is bounded; what is subtracted for a missing end comes on top."""
    own = {"num_generations": 3, "max_new_tokens": 3, "missing_eos_penalty": 5.0}
    plain, found = (rollout(policy(), GRPOSettings(reward_clip_range=clip, **own), reward=small) for clip in (None, (0.2, 0.6)))
    raw = plain.rewards + 5.0 * ~plain.finished
    assert raw.min() < 0.2
    assert raw.max() > 0.6
    np.testing.assert_allclose(found.rewards, raw.clip(0.2, 0.6) - 5.0 * ~found.finished, rtol=1e-6)
    assert plain.scores["r"].tolist() == found.scores["r"].tolist()


@pytest.mark.parametrize(("equal", "penalty"), [("keep", 0.5), ("skip", 0.0)])
def test_rewards_are_normalized_each_by_itself(equal, penalty):
    """GDPO, one completion after another: each reward within its group, their weighted sum over all that counts.
    A penalty is one reward more; a group is of equal rewards where each of them is equal.
    """
    own = {"num_generations": 3, "max_new_tokens": 3, "missing_eos_penalty": penalty, "mask_truncated": True}
    settings = GRPOSettings(multi_objective_aggregation="normalize_then_sum", on_equal_rewards=equal, **own)

    def length(prompts, completions, digit):
        return [float(len(c)) * (d != 3) for c, d in zip(completions, digit, strict=True)]

    def against(prompts, completions, digit):
        return [None if d == 4 else -float(len(c)) / 2 * (d != 3) for c, d in zip(completions, digit, strict=True)]

    rewards = [Reward(name="length", function=length), Reward(name="against", function=against, weight=2.0)]
    made = rollout(policy(), settings, rewards=rewards, asked=prompts(9))
    parts = [(1.0, made.scores["length"]), (2.0, made.scores["against"]), (-penalty, (~made.finished).astype(np.float32))]
    G, first = len(made.prompt_rows), made.starts[:-1]
    sums, alike = np.zeros(len(made.groups)), np.zeros(G, bool)
    for g in range(G):
        mine, varied = made.groups == g, False
        for weight, values in parts:
            if weight and not np.isnan(values[mine]).any():
                own_part = values[mine].astype(np.float64)
                sums[mine] += weight * (own_part - own_part.mean()) / (own_part.std(ddof=1) + 1e-4)
                varied |= own_part.min() < own_part.max()
        alike[g] = not varied
    left = alike & (equal == "skip")
    counted = ~left[made.groups]
    wanted = (sums - sums[counted].mean()) / (sums[counted].std(ddof=1) + 1e-4)
    assert (equal_groups(made.rewards, made.groups, G) & ~left).any(), "a sum that is equal, of rewards that are not"
    assert left.any() == (equal == "skip")
    assert made.figures()["equal_rewards"] == alike.sum()
    np.testing.assert_array_equal(made.trained, counted & made.finished)
    np.testing.assert_allclose(made.advantages[first], np.where(made.trained, wanted, 0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("whiten", [False, True])
def test_ppo_credit_is_the_papers(whiten):
    """PPO's credit: rewards a token, GAE by its definition as a sum, returns.
    Whitened over all tokens of the rollout.
    """
    settings = PPOSettings(num_generations=2, max_new_tokens=6, kl_weight=0.2, gamma=0.9, lam=0.8, whiten=whiten)
    made = rollout(policy(), settings, reference=digit_model(2, size=0.3))
    starts = made.starts
    advantages, returns = [], []
    for i in range(12):
        mine = slice(starts[i], starts[i + 1])
        values = [*made.values[mine].tolist(), 0.0]
        rewards = (-0.2 * (made.old_logps - made.ref_logps)[mine].astype(np.float64)).tolist()
        rewards[-1] += float(made.rewards[i])
        deltas = [r + 0.9 * values[t + 1] - values[t] for t, r in enumerate(rewards)]
        mine = [sum((0.9 * 0.8) ** (k - t) * deltas[k] for k in range(t, len(deltas))) for t in range(len(deltas))]
        advantages += mine
        returns += [a + v for a, v in zip(mine, values, strict=False)]
    np.testing.assert_allclose(made.returns, returns, rtol=1e-4, atol=1e-4)
    if whiten:
        advantages = (np.array(advantages) - np.mean(advantages)) / np.std(advantages, ddof=1)
    np.testing.assert_allclose(made.advantages, advantages, rtol=1e-4, atol=1e-4)


def test_the_reference_may_be_the_model_without_its_adapter():
    """reference="adapter_off" gives the base's values; a model without an adapter is refused."""
    base = digit_model(1, size=0.3)
    model = adapt(copy.deepcopy(base), AdapterSettings(adapter="lora", lora_r=4)).model
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.5)
    settings = RLOOSettings(num_generations=2, max_new_tokens=6)
    off, live = (rollout(model, settings, reference=reference) for reference in ("adapter_off", base))
    np.testing.assert_allclose(off.ref_logps, live.ref_logps, rtol=0, atol=1e-6)
    assert np.abs(off.ref_logps - off.old_logps).max() > 0.1
    with pytest.raises(AdapterError, match="carries no adapter"):
        rollout(base, settings, reference="adapter_off")


def test_what_is_cut_off_can_be_left_out_or_punished():
    """mask_truncated leaves cut-off completions out, whose rewards stay in the group's mean.
    missing_eos_penalty is in the reward.
    """
    plain, masked, punished = (
        rollout(digit_model(), GRPOSettings(num_generations=4, max_new_tokens=5, scale_rewards="none", **extra))
        for extra in ({}, {"mask_truncated": True}, {"missing_eos_penalty": 0.5})
    )
    assert {True, False} == set(plain.finished.tolist())
    assert plain.trained.all()
    assert (masked.trained == masked.finished).all()
    tokens = np.repeat(plain.finished, plain.lengths)
    np.testing.assert_array_equal(masked.advantages, np.where(tokens, plain.advantages, 0))
    np.testing.assert_allclose(punished.rewards, plain.rewards - 0.5 * ~plain.finished, rtol=1e-6)
    trained = [i for update in rollout_batches(masked, max_tokens=40) for batch in update for i in batch.groups.lengths]
    assert len(trained) == masked.finished.sum()


def test_rloo_masked_completions_are_in_the_baseline():
    """A masked completion's KL is in the baseline of the others.
    Its log-probabilities are computed although nothing is learned from it.
    """
    settings = {"num_generations": 3, "max_new_tokens": 5, "kl_weight": 0.3}
    plain, masked = (
        rollout(digit_model(), RLOOSettings(**settings, **extra), reference=digit_model(2, size=0.3))
        for extra in ({}, {"mask_truncated": True})
    )
    tokens = np.repeat(plain.finished, plain.lengths)
    np.testing.assert_allclose(masked.advantages, np.where(tokens, plain.advantages, 0), rtol=1e-5, atol=1e-5)
    assert not masked.trained.all()


def test_equal_and_missing_rewards():
    """Groups of equal rewards are kept with advantages of 0 or left out, by setting.
    What is unscored is always left out.
    """

    def odd(completions, digit, **_):
        # The first prompt's completions are all equal, the second's first is unscored.
        return [1.0] * 4 + [None, 0.0, 0.5, 1.0] + [float(i) for i in range(len(completions) - 8)]

    keep, skip = (
        rollout(digit_model(), GRPOSettings(num_generations=4, max_new_tokens=5, on_equal_rewards=which), reward=odd)
        for which in ("keep", "skip")
    )
    assert keep.trained.tolist() == [True] * 4 + [False] + [True] * 19
    assert skip.trained.tolist() == [False] * 5 + [True] * 19
    assert keep.figures()["equal_rewards"] == skip.figures()["equal_rewards"] == 1
    assert keep.figures()["unscored"] == 1
    assert not keep.advantages[: keep.starts[5]].any()
    np.testing.assert_allclose(keep.advantages, skip.advantages)
    assert np.isnan(skip.old_logps[: skip.starts[5]]).all()
    assert not np.isnan(skip.old_logps[skip.starts[5] :]).any()


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("why", ["unscored", "cut off"])
def test_a_rollout_of_which_nothing_counts(name, why):
    """No completion is scored, or each is masked: advantages of 0, for every method."""
    model, settings = policy(), evolve(SETTINGS[name][1], mask_truncated=True, kl_weight=0.0)
    if why == "unscored":
        made = rollout(model, settings, reward=lambda completions, **_: [None] * len(completions))
    else:
        made = rollout(model, settings, sampler=sampler(model, eos_ids=[99]))
        assert not made.finished.any()
    assert not made.trained.any()
    assert not made.advantages.any()
    assert made.returns is None or not made.returns.any()


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "rloo"])
@pytest.mark.parametrize("updates", [1, 2])
def test_what_a_masked_completion_counts(name, updates):
    """Masked completions have no term; means over completions divide by all of a step, means over tokens by the trained ones.

    The sum over a pass is the sum of the trained ones' terms, however it is cut into micro-batches, updates and shards.
    """
    given = {"num_generations": 4, "max_new_tokens": 5, "mask_truncated": True, "updates_per_pass": updates}
    settings = RLOOSettings(**given, kl_weight=0) if name == "rloo" else GRPOSettings(**given, loss_type=name)
    objective = RLOO(settings) if name == "rloo" else GRPO(settings)
    model = digit_model()
    made = rollout(model, settings)
    assert made.masked.any() == (name != "dapo")
    assert not (made.masked & made.trained).any()
    bound = objective.bind(model, device=CPU)
    for shards in (1, 2):
        found = []
        for rank in range(shards):
            parallel = SimpleNamespace(data_parallel_size=shards, data_parallel_rank=rank)
            found.append(rollout_batches(made, max_tokens=20, updates=updates, parallel=parallel))
        counted = 0
        for step in zip(*found, strict=True):
            batches = [batch for mine in step for batch in mine if len(batch.groups.lengths)]
            terms = [bound(batch, []) for batch in batches]
            assert [term.count for term in terms] == [objective.count(batch) for batch in batches]
            counted += sum(term.count for term in terms)
            # The members of the step's groups, cut off or not.
            trained = sum(len(batch.groups.lengths) for batch in batches)
            assert sum(term.stats["completions"].item() for term in terms) == trained
        tokens = int(made.lengths[made.trained].sum())
        assert counted == (tokens if name == "dapo" else len(made.groups))


def test_groups_of_equal_rewards_are_sampled_anew():
    """Groups that teach nothing get other completions, at most so often; the others stay as they were, on any ranks."""
    plain = rollout(digit_model(), GRPOSettings(num_generations=2, max_new_tokens=4), reward=copied)
    again = GRPOSettings(num_generations=2, max_new_tokens=4, on_equal_rewards="resample", max_resamples=8)
    made = rollout(digit_model(), again, reward=copied)
    equal, still = (equal_groups(one.rewards, one.groups, 6) for one in (plain, made))
    assert equal.sum() > still.sum()
    assert (made.trained == ~still[made.groups]).all()
    for i, group in enumerate(plain.groups):
        if not equal[group]:
            np.testing.assert_array_equal(plain.completion_ids[i], made.completion_ids[i])
    assert equal.sum() <= made.figures()["resampled"] <= 8 * equal.sum()
    one = rollout(digit_model(), evolve(again, max_resamples=1), reward=copied)
    assert one.figures()["resampled"] == equal.sum()

    def on_rank(rank):
        model = digit_model()
        return rollout(model, again, reward=copied, sampler=sampler(model), parallel=rank, rank=rank.rank)

    for other in on_threads(on_rank, 2):
        assert other.completion_texts == made.completion_texts
        np.testing.assert_array_equal(other.rewards, made.rewards)
        assert other.resampled == made.resampled


@pytest.mark.parametrize("settings", [GRPOSettings, RLOOSettings])
def test_groups_too_hard_or_too_easy_are_left_out(settings):
    """A group whose mean reward lies outside the bounds is not trained on; the bounds themselves are inside."""

    def by_prompt(completions, **_):
        # Means 0.25, 0.5, 0.75, 0, 1 and none: the last prompt's completions cannot be scored.
        return [1, 0, 0, 0, 1, 1, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 1, 1, 1, 1, None, None, None, None]

    made = rollout(
        digit_model(),
        settings(
            num_generations=4,
            max_new_tokens=4,
            on_equal_rewards="skip",
            min_group_reward=0.5,
            max_group_reward=0.7,
            kl_weight=0,
        ),
        reward=by_prompt,
    )
    assert made.trained.tolist() == [False] * 4 + [True] * 4 + [False] * 16


def test_long_completions_are_punished_softly():
    """The last tokens before the limit cost up to 1, as arXiv 2503.14476, equation 13, has it."""
    plain, soft = (
        rollout(digit_model(), GRPOSettings(num_generations=4, max_new_tokens=6, overlong_buffer=buffer)) for buffer in (0, 4)
    )
    expected = [0 if n <= 2 else 2 - n for n in plain.lengths]
    np.testing.assert_allclose(soft.rewards - plain.rewards, np.array(expected) / 4, atol=1e-6)
    assert len(set(expected)) > 2


def test_skipped_groups_are_no_work():
    """With all groups skipped, updates are empty, and `train` has nothing to learn."""
    settings = GRPOSettings(num_generations=2, max_new_tokens=5, on_equal_rewards="skip")
    made = rollout(digit_model(), settings, reward=lambda completions, **_: [1.0] * len(completions))
    assert not made.trained.any()
    (update,) = rollout_batches(made, max_tokens=40)
    assert [GRPO(settings).count(batch) for batch in update] == [0] * len(update)


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_ranks_make_the_same_rollout(name):
    """Two ranks, and three for two prompts, each have the rollout of one process.
    Tokens, rewards, log-probabilities and credit.
    """
    _, settings = SETTINGS[name]
    for ranks, number in ((2, 6), (3, 2)):
        asked = prompts(number)
        expected = rollout(policy(), settings, asked=asked, reference=digit_model(2) if settings.kl_weight else None)

        def on_rank(rank, asked=asked):
            model = policy()
            return rollout(
                model, settings, asked=asked, sampler=sampler(model), reference=digit_model(2) if settings.kl_weight else None,
                parallel=rank, rank=rank.rank, max_tokens=25,
            )  # fmt: skip

        for made in on_threads(on_rank, ranks):
            assert made.completion_texts == expected.completion_texts
            for one, other in zip(made.completion_ids, expected.completion_ids, strict=True):
                np.testing.assert_array_equal(one, other)
            np.testing.assert_array_equal(made.rewards, expected.rewards)
            np.testing.assert_array_equal(made.finished, expected.finished)
            for array in ("old_logps", "ref_logps", "values", "advantages", "returns"):
                one, other = getattr(made, array), getattr(expected, array)
                assert (one is None) == (other is None)
                if one is not None:
                    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


def test_an_error_on_one_rank_is_one_on_all():
    """A reward function that fails for another rank's prompts stops this rank too."""

    def fails(prompts, completions, digit):
        if any(d == int(asked[-1].columns["digit"]) for d in digit):
            raise ValueError("not this one")
        return [0.0] * len(completions)

    asked = prompts(2)
    assert asked[0].columns != asked[1].columns
    messages = {}

    def on_rank(rank):
        with pytest.raises(RewardError) as caught:
            rollout(digit_model(), SETTINGS["grpo"][1], asked=asked, reward=fails, parallel=rank, rank=rank.rank)
        messages[rank.rank] = str(caught.value)

    on_threads(on_rank, 2)
    assert "failed on another rank" in messages[0]
    assert "not this one" in messages[1]


def test_chats_and_several_functions():
    """Messages are answered with a message; columns are lists; rewards are weighted sums."""
    asked = prompts(2)
    for prompt in asked:
        prompt.prompt = [{"role": "user", "content": prompt.prompt}]
    seen = []

    def looks(prompts, completions, digit):
        seen.append((prompts, completions, digit))
        return [1.0] * len(completions)

    made = rollout(
        digit_model(),
        GRPOSettings(num_generations=2, max_new_tokens=4),
        asked=asked,
        rows=[8, 9],
        rewards=[Reward(name="a", function=looks, weight=2.0), Reward(name="b", function=lambda **k: [0.5] * 4)],
    )
    ((given, answers, digits),) = seen
    assert given[0] == given[1] == asked[0].prompt
    assert answers == [[{"role": "assistant", "content": text}] for text in made.completion_texts]
    assert digits == [p.columns["digit"] for p in asked for _ in range(2)]
    assert made.rewards.tolist() == [2.5] * 4
    assert made.prompt_rows.tolist() == [8, 9]
    assert {k: v for k, v in made.figures().items() if "/" in k} == {"reward/a": 1.0, "reward/b": 0.5}


def test_impossible_values_are_refused():
    """Each impossible argument is refused with what to do."""
    model, settings = digit_model(), GRPOSettings(num_generations=2, max_new_tokens=4)
    with pytest.raises(RewardError, match="nothing rewards"):
        rollout(model, settings, rewards=[])
    with pytest.raises(RolloutError, match="needs a prompt"):
        rollout(model, settings, asked=[])
    with pytest.raises(RolloutError, match="seed"):
        rollout(model, settings, seed=-1)
    with pytest.raises(RolloutError, match="longer than a micro-batch, max_tokens=6"):
        rollout(model, settings, max_tokens=6)
    with pytest.raises(RolloutError, match="a KL above 0 needs a reference"):
        rollout(model, RLOOSettings(max_new_tokens=4))
    with pytest.raises(RolloutError, match="without it none is read"):
        rollout(model, settings, reference=model)
    with pytest.raises(RolloutError, match="rows: 6 numbers are wanted"):
        rollout(model, settings, rows=[1])
    with pytest.raises(AdapterError, match="attach_value_head"):
        rollout(model, PPOSettings(max_new_tokens=4, kl_weight=0))
    empty = prompts(2)
    empty[1].input_ids = empty[1].input_ids[:0]
    with pytest.raises(RolloutError, match="prompt 1 is empty"):
        rollout(model, settings, asked=empty)
    named = prompts(2)
    named[1].columns = {"completions": 1}
    with pytest.raises(RewardError, match="a field 'completions'"):
        rollout(model, settings, asked=named)

    class Wrong:
        def sample(self, asked, **_):
            return [Completion(ids=np.zeros(5, np.int32), finished=True)] * self.number

    wrong = Wrong()
    for wrong.number, message in ((11, "11 completions where 12"), (12, "5 tokens; 1 to 4")):
        with pytest.raises(RolloutError, match=message):
            rollout(model, settings, sampler=wrong)


def test_texts_are_decoded():
    """Prompts and completions are kept as text."""
    made = rollout(digit_model(), GRPOSettings(num_generations=2, max_new_tokens=4), reward=small)
    assert made.prompt_texts == tuple(decode(p.input_ids.tolist()) for p in prompts(6))
    assert made.completion_texts == tuple(decode(ids.tolist()) for ids in made.completion_ids)
    assert math.isfinite(made.figures()["reward_std"])
