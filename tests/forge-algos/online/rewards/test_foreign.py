"""Reward functions of verl and OpenRLHF: recognised by their parameters, and called as there."""

import asyncio
import re

import numpy as np
import pytest
import torch

from forge_algos import GRPOSettings, RewardError
from forge_algos.online import Reward, check_reward, load_reward, reward_columns
from forge_algos.online.rewards._foreign import adapted, reads_of
from forge_algos.online.rewards._rewards import RewardInputs, score

from ...digits import decode, digit_model, prompts, rollout

VERL = {
    "data_source": ["sums", "sums", None],
    "reward_model": [{"style": "rule", "ground_truth": truth} for truth in ("7", "8", "9")],
    "extra_info": [{"index": 0}, None, {"index": 2}],
    "ability": ["math"] * 3,
}


def inputs(columns, **texts):
    answers = [[{"role": "assistant", "content": text}] for text in ("7", "7", "9")]
    prompts = [[{"role": "user", "content": text}] for text in ("3 + 4", "4 + 4", "4 + 5")]
    return RewardInputs(prompts=prompts, completions=answers, columns=columns, rows=[10, 11, 12], texts=texts)


def test_verls_function_of_one_completion():
    """Source, text, ground truth and further information of each completion; `score` of a mapping is the reward."""
    seen = []

    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        seen.append((data_source, solution_str, ground_truth, extra_info))
        return {"score": float(solution_str == ground_truth), "acc": 0.5}

    reward = Reward(name="f", function=adapted(compute_score))
    assert score(reward, inputs(VERL)).tolist() == [1, 0, 1]
    assert seen == [("sums", "7", "7", {"index": 0}), ("sums", "7", "8", {}), (None, "9", "9", {"index": 2})]
    assert score(reward, inputs(VERL, solution_texts=["8", "8", "8"])).tolist() == [0, 1, 0], "the decoded text goes first"


def test_what_a_function_does_not_take_it_is_not_given():
    """Ground truth and text alone are enough, with whatever has a default; `**kwargs` take all."""
    few = adapted(lambda solution_str, ground_truth, method="strict": solution_str == ground_truth and method == "strict")
    many = adapted(lambda solution_str, ground_truth, **more: len(more))
    assert [score(Reward(name="f", function=each), inputs(VERL)).tolist() for each in (few, many)] == [[1, 0, 1], [2, 2, 2]]


def test_verls_functions_of_a_batch_and_of_a_coroutine():
    """`solution_strs` are given all at once, and `async def` is awaited, all completions together."""

    def batch(data_sources, solution_strs, ground_truths, extra_infos):
        assert len(data_sources) == len(extra_infos) == 3
        return [{"score": float(a == b)} for a, b in zip(solution_strs, ground_truths, strict=True)]

    waiting = 0

    async def later(data_source, solution_str, ground_truth, extra_info):
        nonlocal waiting
        waiting += 1
        await asyncio.sleep(0.001)
        return float(solution_str == ground_truth) + waiting

    async def both(solution_strs, ground_truths):
        await asyncio.sleep(0.001)
        return batch(VERL["data_source"], solution_strs, ground_truths, VERL["extra_info"])

    class Both:
        async def __call__(self, solution_strs, ground_truths):
            return await both(solution_strs, ground_truths)

    class Later:
        async def __call__(self, data_source, solution_str, ground_truth, extra_info):
            return await later(data_source, solution_str, ground_truth, extra_info)

    class Queries:
        async def __call__(self, queries, prompts, labels):
            return {"rewards": [float(query.endswith(label)) for query, label in zip(queries, labels, strict=True)]}

    for function in (batch, both, Both()):
        assert score(Reward(name="f", function=adapted(function)), inputs(VERL)).tolist() == [1, 0, 1]
    for function in (later, Later()):
        waiting = 0
        assert score(Reward(name="f", function=adapted(function)), inputs(VERL)).tolist() == [4, 3, 4]
    texts = {"query_texts": ["a7", "b7", "c9"], "prompt_texts": ["a", "b", "c"]}
    reward = Reward(name="f", function=adapted(Queries()))
    assert score(reward, inputs({"label": ["7", "8", None]}, **texts)).tolist() == [1, 0, 1]


@pytest.mark.parametrize("as_dict", [True, False])
def test_openrlhfs_function(as_dict):
    """Queries, prompts and labels as texts; `rewards` of a mapping, or the tensor itself, are the rewards."""
    seen = {}

    def reward_func(queries, prompts, labels, **kwargs):
        seen.update(queries=queries, prompts=prompts, labels=labels, kwargs=kwargs)
        found = torch.tensor([float(query.endswith(label)) for query, label in zip(queries, labels, strict=True)])
        return {"rewards": found, "scores": found, "extra_logs": {}} if as_dict else found

    texts = {"query_texts": ["<u>a</u>7", "<u>b</u>7", "<u>c</u>9"], "prompt_texts": ["<u>a</u>", "<u>b</u>", "<u>c</u>"]}
    reward = Reward(name="f", function=adapted(reward_func))
    assert score(reward, inputs({"label": ["7", "8", None]}, **texts)).tolist() == [1, 0, 1]
    assert seen == {
        "queries": texts["query_texts"], "prompts": texts["prompt_texts"], "labels": ["7", "8", ""], "kwargs": {},
    }  # fmt: skip
    with pytest.raises(RewardError, match="queries of conversations are known with backend=forge alone"):
        score(reward, inputs({}))
    plain = RewardInputs(prompts=["1 + 1 = "], completions=["2"], columns={"label": ["2"]}, rows=[0])
    assert score(reward, plain).tolist() == [1]
    assert seen["queries"] == ["1 + 1 = 2"]


def test_a_failure_is_the_functions_own():
    """An error names the line in the function, and a row without a ground truth is told what is wanted."""

    def compute_score(solution_str, ground_truth):
        return 1 / (int(ground_truth) - 8)

    line = compute_score.__code__.co_firstlineno + 1
    with pytest.raises(RewardError, match=rf"ZeroDivisionError: .*, at {re.escape(__file__)}:{line}, for row 11"):
        score(Reward(name="f", function=adapted(compute_score)), inputs(VERL))
    with pytest.raises(RewardError, match=r"a row's reward_model is 'rule', and \{'ground_truth': \.\.\.\} is wanted"):
        score(Reward(name="f", function=adapted(compute_score)), inputs({"reward_model": ["rule"] * 3}))


def test_what_they_need_is_known_before_a_run(tmp_path, monkeypatch):
    """The fields that a run looks for in its rows; a function of neither kind is told how all three are called."""
    (tmp_path / "theirs.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None): ...\n"
        "def reward_func(queries, prompts, labels): ...\n"
        "def other(answers): ...\n"
        "def ours(prompts, completions, solution_str, ground_truth): ...\n"
        "def more(solution_str, ground_truth, tolerance, *, unit): ...\n"
        "def by_place(queries, prompts, labels, /): ...\n"
    )
    monkeypatch.chdir(tmp_path)
    for name in ("compute_score", "reward_func", "ours"):
        check_reward(f"theirs.py:{name}")
    assert reward_columns("theirs.py:compute_score") == {"data_source", "reward_model"}
    assert reward_columns("theirs.py:reward_func") == set()
    assert reward_columns("theirs.py:ours") == {"solution_str", "ground_truth"}
    assert reads_of(load_reward("theirs.py:ours")) is None
    with pytest.raises(RewardError, match=r"takes \(answers\) .*or as verl \(solution_str, ground_truth\) and OpenRLHF"):
        check_reward("theirs.py:other")
    with pytest.raises(RewardError, match="nothing is given as tolerance, unit: give a default there"):
        check_reward("theirs.py:more")
    with pytest.raises(RewardError, match="nothing is given as queries, prompts, labels"):
        check_reward("theirs.py:by_place")


def test_a_rollout_gives_texts_as_they_were_tokens():
    """A query is prompt and completion decoded together, special tokens included; a solution is decoded without them."""
    seen = {}

    def reward_func(queries, prompts, labels):
        seen.update(queries=queries, prompts=prompts)
        return [float(i % 3) for i in range(len(queries))]

    def compute_score(solution_str, ground_truth):
        seen.setdefault("solutions", []).append((solution_str, ground_truth))
        return 0.0

    asked = prompts(6)
    for each in asked:
        each.columns["reward_model"] = {"style": "rule", "ground_truth": "5"}
    rewards = [Reward(name="a", function=adapted(reward_func)), Reward(name="b", function=adapted(compute_score))]
    made = rollout(
        digit_model(), GRPOSettings(num_generations=3, max_new_tokens=4), rewards=rewards, asked=asked,
        decode_whole=lambda ids: f"<{decode(ids)}>",
    )  # fmt: skip
    whole = [
        f"<{decode([*made.prompt_ids[group].tolist(), *ids.tolist()])}>"
        for group, ids in zip(made.groups, made.completion_ids, strict=True)
    ]
    assert seen["queries"] == whole
    assert seen["prompts"] == [f"<{made.prompt_texts[group]}>" for group in made.groups]
    assert seen["solutions"] == [(text, "5") for text in made.completion_texts]
    np.testing.assert_array_equal(made.scores["a"], [i % 3 for i in range(18)])
