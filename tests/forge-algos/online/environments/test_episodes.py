"""Episodes of several turns: tokens as sampled, observations read and not learned, slow environments beside quick ones."""

import asyncio
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from forge_algos import GRPO, GRPOSettings, OptimizerSettings, RewardError, adamw, schedule, train
from forge_algos.losses import policy_gradient
from forge_algos.online import Completion, Episodes, Reward, Rollout, load_environment, make_rollout, rollout_batches

from ...digits import ASK, END, START, decode, digit_model, sampler
from ...threads import on_threads

SETTINGS = {"num_generations": 3, "max_new_tokens": 20, "max_turns": 3, "env": "any:Any"}


class Signs:
    """Turns of digits: a message is its digits, an observation its digits between two signs."""

    def message(self, ids, *, chat):
        assert chat is False
        return {"role": "assistant", "content": decode(ids)}

    def observation(self, observation, *, chat):
        return np.array([START, *map(int, observation), ASK], np.int32)


class Count:
    """Says how many turns there were, and rewards each with a tenth of its tokens' number."""

    def reset(self, *, prompt, seed, digit):
        self.digit, self.seed, self.turns = digit, seed, 0

    def step(self, turn):
        self.turns += 1
        return str(self.turns), len(turn["content"]) / 10, self.turns == 2 + self.digit % 2


class Scripted:
    """A sampler that always says one digit and ends."""

    def sample(self, contexts, **_options):
        return [Completion(ids=np.array([1, END], np.int32), finished=True) for _ in contexts]


def asked(number=3):
    random = np.random.default_rng(1)
    return [
        SimpleNamespace(input_ids=np.array([START, d, ASK], np.int32), prompt=str(d), columns={"digit": d})
        for d in random.integers(0, 10, number).tolist()
    ]


def play(environment=Count, *, model=None, settings=None, prompts=None, seed=5, draw=None, **options):
    model = digit_model(size=0.3) if model is None else model
    settings = GRPOSettings(**(SETTINGS | (settings or {})))
    return make_rollout(
        model,
        sampler(model, batch_tokens=2000) if draw is None else draw,
        asked() if prompts is None else prompts,
        settings=settings,
        rewards=options.pop("rewards", []),
        decode=decode,
        max_tokens=400,
        seed=seed,
        episodes=Episodes(environment, Signs()),
        **options,
    )


def test_an_episode_is_the_models_turns_between_observations():
    """Each learned token is one that the sampler drew there; an observation follows each turn's end, and is masked."""
    model = digit_model(size=0.3)
    drawn, inner = {}, sampler(model, batch_tokens=2000)

    class Recording:
        def sample(self, contexts, **options):
            made = inner.sample(contexts, **options)
            for context, completion in zip(contexts, made, strict=True):
                drawn.setdefault(tuple(context.tolist()), []).append(completion.ids.tolist())
            return made

    made = play(model=model, draw=Recording())
    several = 0
    for group, ids, mask in zip(made.groups, made.completion_ids, made.learned, strict=True):
        context, at = made.prompt_ids[group].tolist(), 0
        turns = 0
        while at < len(ids):
            end = at + int(np.argmin(np.append(mask[at:], False)))
            turn = ids[at:end].tolist()
            assert any(whole[: len(turn)] == turn for whole in drawn[tuple(context)])
            turns += 1
            after = end + int(np.argmax(np.append(mask[end:], True)))
            if after > end:
                assert turn[-1] == END
                assert ids[end:after].tolist() == [START, turns, ASK]
            context, at = context + ids[at:after].tolist(), after
        several += turns > 1
        assert mask[0]
        assert mask[-1]
    assert several > 3
    assert made.figures()["observed"] == sum((~mask).sum() for mask in made.learned) > 0
    np.testing.assert_allclose(made.scores["env"], made.rewards)


def test_observations_are_read_and_not_learned():
    """Log-probabilities, loss and gradients equal a naive forward of each episode, in which observations have no term."""
    model = digit_model(size=0.3)
    made = play(model=model)
    settings = GRPOSettings(**SETTINGS)
    logps = []
    for group, ids, mask in zip(made.groups, made.completion_ids, made.learned, strict=True):
        whole = torch.tensor([*made.prompt_ids[group], *ids]).long()
        scores = model(whole[None]).logits[0, :-1].log_softmax(-1).gather(1, whole[1:, None])[:, 0]
        logps.append(scores[len(made.prompt_ids[group]) - 1 :][torch.tensor(mask)])
    logps = torch.cat(logps)
    np.testing.assert_allclose(made.old_logps, logps.detach(), atol=1e-5)
    terms = policy_gradient(
        logps, torch.tensor(made.old_logps), torch.tensor(made.advantages), torch.tensor(made.lengths), kind="dapo"
    )
    loss = terms.sum / terms.count
    loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    own = OptimizerSettings(learning_rate=1e-12, lr_scheduler="constant")
    optimizer = adamw(model, own)
    (step,) = rollout_batches(made, max_tokens=60)
    assert len(step) > 1
    (output,) = train(
        model, [step], objective=GRPO(settings), optimizer=optimizer, scheduler=schedule(optimizer, own, 1), max_grad_norm=0
    )
    assert output.loss == pytest.approx(loss.item(), abs=1e-6)
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, parameter in model.named_parameters():
        assert float((parameter.grad - expected[name]).abs().max()) < 1e-5 * largest + 1e-7, name


def test_an_episode_that_waits_holds_no_other():
    """The environments of one prompt answer only once all other episodes are over."""
    ended, all_ended = [], threading.Event()

    class Waiting(Count):
        def step(self, turn):
            observation, reward, done = super().step(turn)
            if self.digit == 3 and self.turns == 1:
                assert all_ended.wait(timeout=60)
            elif self.digit != 3 and done:
                ended.append(self.digit)
                if len(ended) == 4:
                    all_ended.set()
            return observation, reward, done

    prompts = [
        SimpleNamespace(input_ids=np.array([START, d, ASK], np.int32), prompt=str(d), columns={"digit": d}) for d in (2, 3, 4)
    ]
    made = play(Waiting, prompts=prompts, settings={"num_generations": 2, "max_new_tokens": 60}, draw=Scripted())
    assert made.figures()["completions"] == 6


@pytest.mark.parametrize(("turns", "tokens"), [(1, 20), (2, 20), (3, 20), (3, 9)])
def test_an_episode_ends_after_its_turns_or_tokens(turns, tokens):
    """A turn has two tokens here and an observation three: what does not fit is not read, and the episode is cut off."""
    settings = {"max_turns": turns, "max_new_tokens": tokens}
    made = play(prompts=asked(2), settings=settings, draw=Scripted(), source=str)
    for group, ids in zip(made.groups, made.completion_ids, strict=True):
        played = min(turns, 2 + int(made.prompt_ids[group][1]) % 2, 2 if tokens == 9 else 3)
        assert len(ids) == 2 * played + 3 * (played - 1)
    whole = [min(turns, 2 if tokens == 9 else 3) >= 2 + int(prompt[1]) % 2 for prompt in made.prompt_ids]
    assert made.finished.tolist() == np.repeat(whole, 3).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.lane)])
def test_episodes_do_not_depend_on_the_ranks(ranks):
    """The same tokens and rewards on one rank and on several, and from one seed twice."""
    whole, again = play(), play()
    found = on_threads(lambda rank: play(parallel=rank), ranks)
    for made in (again, *found):
        assert [ids.tolist() for ids in made.completion_ids] == [ids.tolist() for ids in whole.completion_ids]
        assert [mask.tolist() for mask in made.learned] == [mask.tolist() for mask in whole.learned]
        np.testing.assert_array_equal(made.rewards, whole.rewards)
        np.testing.assert_allclose(made.old_logps, whole.old_logps, atol=1e-5)
    assert [ids.tolist() for ids in play(seed=6).completion_ids] != [ids.tolist() for ids in whole.completion_ids]


def test_ranks_that_share_the_weights_sample_together():
    """Where every forward is collective each rank makes as many calls as the others, whatever its episodes last."""
    calls = {}

    def on_rank(rank):
        class Together(Scripted):
            synced = True

            def sample(self, contexts, **options):
                calls.setdefault(rank.rank, []).append(len(contexts))
                assert rank.sum([1.0]) == [2.0]
                return super().sample(contexts, **options)

        return play(parallel=rank, draw=Together())

    whole = play(draw=Scripted())
    for made in on_threads(on_rank, 2):
        assert [ids.tolist() for ids in made.completion_ids] == [ids.tolist() for ids in whole.completion_ids]
    assert len(calls[0]) == len(calls[1])
    assert calls[0] != calls[1]


def test_async_environments_and_their_seeds():
    """`async def` works; all episodes of a prompt have one seed, prompts have different ones."""
    seeds = {}

    class Async:
        async def reset(self, *, prompt, seed, digit):
            seeds.setdefault(prompt, set()).add(seed)

        async def step(self, turn):
            await asyncio.sleep(0.001)
            return None, 1.0, True

    made = play(Async, rewards=[Reward(name="more", function=lambda completions, **_: [2.0] * len(completions), weight=0.5)])
    np.testing.assert_array_equal(made.rewards, 1.0 + made.finished)
    assert made.finished.any()
    assert all(len(each) == 1 for each in seeds.values())
    assert len(set.union(*seeds.values())) == len(seeds)


class Raises(Count):
    def step(self, turn):
        raise KeyError("nothing")


class Sleeps(Count):
    def step(self, turn):
        time.sleep(20 if self.digit == asked()[0].columns["digit"] else 0)
        return super().step(turn)


class Unready(Count):
    def step(self, turn):
        return "", 0.0, False


class Speaks(Count):
    def reset(self, **_):
        return "hello"


class Vague(Count):
    def step(self, turn):
        return "1", None, False


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        (Raises, r"step raised KeyError: 'nothing', at .*test_episodes.py:\d+, for rows.jsonl:0, turn 1"),
        (Sleeps, r"did not return within env_timeout=0.5 seconds, at .*test_episodes.py:\d+, for rows.jsonl:0"),
        (Unready, "no observation, and the episode is not done"),
        (Speaks, r"reset raised TypeError: reset returned 'hello'.*turn 0"),
        (Vague, "a number of at most 1e\\+37 is wanted"),
    ],
)
def test_what_an_environment_does_wrong(environment, says):
    """One error, with the file and line, and the row; or, skipped, that episode is unscored and teaches nothing."""
    quick = {"env_timeout": 0.5} if environment is Sleeps else {}
    with pytest.raises(RewardError, match=says):
        play(environment, settings=quick, source="rows.jsonl:{}".format, prompts=asked(1))
    made = play(environment, settings={**quick, "on_reward_error": "skip"}, prompts=asked(2))
    assert made.figures()["unscored"] >= 1
    assert not made.trained[np.isnan(made.rewards)].any()


def test_a_rollout_of_episodes_is_read_back_whole(tmp_path):
    """Masks and all numbers come back as they were written."""
    made = play()
    made.write(tmp_path / "rollout.jsonl")
    again = Rollout.read(tmp_path / "rollout.jsonl")
    for one, other in zip(made.learned, again.learned, strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(made.old_logps, again.old_logps)
    for one, other in zip(rollout_batches(made, max_tokens=60)[0], rollout_batches(again, max_tokens=60)[0], strict=True):
        np.testing.assert_array_equal(one.groups.rows, other.groups.rows)
        np.testing.assert_array_equal(one.advantages, other.advantages)


@pytest.mark.parametrize(
    ("name", "says"),
    [("Count", "is named as"), ("nowhere.at_all:Env", "cannot be imported"), ("math:pi", "has no reset and no step")],
)
def test_environments_that_are_none(name, says):
    """Each way in which a name can be wrong has its own message."""
    with pytest.raises(RewardError, match=says):
        load_environment(name)
