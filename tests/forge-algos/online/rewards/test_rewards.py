"""Reward functions: found by name, called with columns, their results checked.
Errors name function, row and what was returned.
"""

import asyncio
import math
import re
import sys
import time
from functools import partial

import attrs
import numpy as np
import pytest
import torch

from forge_algos import RewardError
from forge_algos.online import Reward, RewardModel, load_reward
from forge_algos.online.rewards._rewards import RewardInputs, score, total

ANSWERS = RewardInputs(
    prompts=["a", "b", "c"], completions=["x", "yy", "zzz"], columns={"wanted": [1, 2, 4]}, rows=[10, 11, 12]
)


def close(prompts, completions, wanted):
    return [-abs(len(c) - w) for c, w in zip(completions, wanted, strict=True)]


def test_functions_get_columns_and_return_numbers():
    """Functions get prompts, completions and fields as lists, and return a number for each.
    Ints, bools, numpy's and torch's numbers too.
    """
    assert score(Reward(name="close", function=close), ANSWERS).tolist() == [0, 0, -1]
    kinds = lambda prompts, completions, wanted: (np.float64(0.5), torch.tensor(2), True)  # noqa: E731
    found = score(Reward(name="kinds", function=kinds), ANSWERS)
    assert found.tolist() == [0.5, 2, 1]
    assert found.dtype == np.float32


def test_what_a_function_changes_no_other_sees():
    """Completions of a prompt and further functions are given the row as it is, whatever a function puts into it."""
    part = {"type": "image", "image": "plum.png"}
    messages = [{"role": "user", "content": [part]}]
    inputs = attrs.evolve(ANSWERS, prompts=[messages] * 3, columns={"wanted": [part] * 3})
    seen = []

    def opens(prompts, completions, wanted):
        for prompt, column in zip(prompts, wanted, strict=True):
            seen.append((prompt[0]["content"][0]["image"], column["image"]))
            prompt[0]["content"][0]["image"] = column["image"] = object()
        return [1] * len(completions)

    for name in ("first", "second"):
        score(Reward(name=name, function=opens), inputs)
    assert seen == [("plum.png", "plum.png")] * 6


def test_a_field_that_no_row_of_a_rollout_has_is_none():
    """A function is called alike whichever rows were drawn: its columns are there, None where no row has them."""
    given = lambda prompts, completions, wanted, images: [w if i is None else 0 for w, i in zip(wanted, images)]  # noqa: B905, E731
    assert score(Reward(name="i", function=given, columns={"images", "wanted"}), ANSWERS).tolist() == [1, 2, 4]


def test_none_and_nan_are_unscored():
    """None and NaN become NaN, without an error."""
    found = score(Reward(name="n", function=lambda **_: [None, math.nan, 1]), ANSWERS)
    assert np.isnan(found).tolist() == [True, True, False]


def raises(prompts, completions, wanted):
    return [1 / (w - 2) for w in wanted]


LINE = raises.__code__.co_firstlineno + 1


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (raises, rf"reward 'f' raised ZeroDivisionError: .*, at {re.escape(__file__)}:{LINE}, for row 11, completion 'yy'"),
        (lambda completions, **_: [1.0] * 2, r"reward 'f' \(.*test_rewards\.py:\d+\) gave 2 values for (3|1) completions?;"),
        (
            lambda completions, **_: ["good" if c == "zzz" else 1 for c in completions],
            r"gave 'good' \(str\) for row 12, completion 'zzz'",
        ),
        (lambda completions, **_: [math.inf if c == "x" else 1 for c in completions], r"gave inf \(float\) for row 10"),
        (lambda completions, **_: [1e39 if c == "x" else 1 for c in completions], r"gave 1e\+39 .* row 10.*at most 1e\+37"),
        (lambda completions, **_: None, r"reward 'f' \(.*\) gave None for (3|1) completions?; a list with one number for each"),
        (
            lambda completions, **_: dict.fromkeys(range(len(completions)), 1.0),
            r"gave a dict for 1 completion; a list with one",
        ),
        (lambda completions, **_: {*range(len(completions))}, r"gave a set for 1 completion; a list with one number for each"),
        (lambda completions, **_: np.ones((len(completions), 1)), r"gave values of shape \(1,\) \(ndarray\) for row 10"),
        (lambda completions, **_: [10**400] * len(completions), r"gave 1000.*\.\.\. \(int\) for row 10"),
        (lambda completions, **_: [10**5000] * len(completions), r"gave one of too many digits \(int\) for row 10"),
        (lambda completions: [1.0] * 3, r"reward 'f' raised TypeError: .*unexpected keyword argument 'prompts'"),
    ],
)
def test_a_failing_function_is_named(function, message):
    """A failure names the function, the row, the completion and what was returned."""
    with pytest.raises(RewardError, match=message):
        score(Reward(name="f", function=function), ANSWERS)


def test_a_row_has_its_name_and_a_builtin_none():
    """A row is named by `source`; a function that is not written in Python has no line."""
    named = attrs.evolve(ANSWERS, source=lambda row: f"prompts.jsonl:{row}")
    with pytest.raises(RewardError, match=r"for prompts\.jsonl:11, completion 'yy'"):
        score(Reward(name="f", function=raises), named)
    with pytest.raises(RewardError, match="which is not written in Python"):
        score(Reward(name="f", function=dict), named)


def test_a_weight_counts_in_the_largest_reward():
    """What no sum in float32 could hold is refused where it is given."""
    function = lambda completions, **_: [1e36] * len(completions)  # noqa: E731
    assert score(Reward(name="f", function=function), ANSWERS)[0] == np.float32(1e36)
    with pytest.raises(RewardError, match=r"gave 1e\+36 \(float\) for row 10"):
        score(Reward(name="f", function=function, weight=100.0), ANSWERS)


def test_skip_leaves_out_only_what_fails():
    """With skip only the failing completion is unscored; the others keep their rewards."""
    found = score(Reward(name="f", function=raises), ANSWERS, on_error="skip")
    assert found[0] == -1
    assert math.isnan(found[1])
    assert found[2] == 0.5


def test_functions_that_fail_only_together():
    """A function that fails on three completions but on none alone: stop reports just that.
    With skip all are scored.
    """

    def alone(completions, **_):
        if len(completions) > 1:
            raise ValueError("one at a time")
        return [float(len(completions[0]))]

    with pytest.raises(RewardError, match=r"one at a time, at .*test_rewards\.py:\d+, for 3 completions of row 10 to row 12"):
        score(Reward(name="f", function=alone), ANSWERS)
    assert score(Reward(name="f", function=alone), ANSWERS, on_error="skip").tolist() == [1, 2, 3]


def test_no_function_is_called_without_prompts():
    """Without prompts no function is called."""
    empty = RewardInputs(prompts=[], completions=[], columns={}, rows=[])
    assert len(score(Reward(name="f", function=raises), empty)) == 0


def test_rewards_are_weighted_sums_of_what_is_scored():
    """Rewards are weighted sums of the functions that could score; NaN where none could."""
    scores = {"a": np.array([1, 2, np.nan], np.float32), "b": np.array([1, np.nan, np.nan], np.float32)}
    found = total(scores, {"a": 2.0, "b": -0.5})
    assert found[:2].tolist() == [1.5, 4.0]
    assert math.isnan(found[2])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("math", "named as 'package.module:function'"),
        ("nowhere.at_all:f", "cannot be imported"),
        ("there/rewards.py:correct", "there is no file there/rewards.py, seen from /"),
        ("math:squareroot", "math has no squareroot; it has acos"),
        ("math:pi", "no function but float"),
    ],
)
def test_bad_reward_names(name, message):
    """Each way in which a name can be wrong has its own message."""
    with pytest.raises(RewardError, match=message):
        load_reward(name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import sys; sys.exit(0)", r"importing broken raised SystemExit: 0, at .*broken\.py:1; .*if __name__"),
        ("\n1 / 0", r"reward 'broken:f': importing broken raised ZeroDivisionError: division by zero, at .*broken\.py:2; "),
        ("def f(:", r"importing broken raised SyntaxError: invalid syntax \(broken\.py, line 1\); correct it"),
    ],
)
def test_a_module_that_raises(text, message, tmp_path, monkeypatch):
    """What a module raises as it is imported is told as its own, and one that ends the process does not."""
    (tmp_path / "broken.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "broken", raising=False)
    with pytest.raises(RewardError, match=message):
        load_reward("broken:f")


def test_a_function_of_a_file(tmp_path, monkeypatch):
    """Named by its path, from the folder one is in or whole, and read once; what it imports must be there."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.py").write_text(
        "import attrs\n\n@attrs.frozen\nclass One:\n    x: 'int' = 1\n\ndef f(prompts, completions): ...\n"
    )
    (tmp_path / "lacks.py").write_text("import nowhere_at_all\n")
    assert load_reward("here.py:f") is load_reward(f"{tmp_path}/here.py:f")
    with pytest.raises(RewardError, match=r"here\.py has no g; it has One, attrs, f"):
        load_reward("here.py:g")
    with pytest.raises(RewardError, match="'nowhere_at_all'.; what it imports must be installed"):
        load_reward("lacks.py:f")
    with pytest.raises(RewardError, match="cannot be imported"):
        load_reward("lacks.py:f")


def test_async_functions_are_awaited():
    """`async def` scores a batch, and its errors name file, line and row as any other's."""

    async def later(prompts, completions, wanted, fails=()):
        await asyncio.sleep(0.001)
        if fails:
            raise ValueError("not so")
        return [float(len(c)) for c in completions]

    asked = ANSWERS
    scores = score(Reward(name="later", function=later), asked)
    np.testing.assert_array_equal(scores, [len(c) for c in asked.completions])
    failing = attrs.evolve(asked, columns={**asked.columns, "fails": [1] * len(asked.completions)})
    with pytest.raises(RewardError, match=rf"ValueError: not so, at {__file__}:\d+, for row {asked.rows[0]}"):
        score(Reward(name="later", function=later), failing)


class Later:
    """A reward that is an object, with a coroutine to call."""

    async def __call__(self, prompts, completions, scale=1.0, **_):
        await asyncio.sleep(0.001)
        if scale is None:
            raise ValueError("not so")
        return [scale * len(c) for c in completions]


def behind(**asked):
    """A plain function that gives the coroutine of another one."""
    return Later()(**asked)


@pytest.mark.parametrize("function", [Later(), partial(Later(), scale=1.0), partial(Later().__call__, scale=1.0), behind])
@pytest.mark.parametrize("timeout", [None, 30.0])
def test_whatever_gives_a_coroutine_is_awaited(function, timeout):
    """An object whose `__call__` is `async def`, a part of it, a function that returns one: with and without a limit."""
    scores = score(Reward(name="later", function=function), ANSWERS, timeout=timeout)
    np.testing.assert_array_equal(scores, [len(c) for c in ANSWERS.completions])
    if function is not behind:
        with pytest.raises(RewardError, match=rf"ValueError: not so, at {__file__}:\d+, for row"):
            score(Reward(name="later", function=partial(function, scale=None)), ANSWERS, timeout=timeout)


def test_a_function_that_takes_too_long():
    """The error says where it stands; skipped, its completions go unscored; one that is quick has its score."""

    def slow(**_):
        time.sleep(20)
        return [0.0]

    asked = ANSWERS
    line = slow.__code__.co_firstlineno + 1
    with pytest.raises(RewardError, match=rf"within reward_timeout=0.1 seconds for .*{__file__}:{line}"):
        score(Reward(name="slow", function=slow), asked, timeout=0.1)
    assert np.isnan(score(Reward(name="slow", function=slow), asked, on_error="skip", timeout=0.1)).all()
    quick = Reward(name="quick", function=lambda completions, **_: [1.0] * len(completions))
    np.testing.assert_array_equal(score(quick, asked, timeout=60.0), 1.0)


class Letters:
    """A tokenizer of letters."""

    eos_token_id = 2

    def __call__(self, text):
        return {"input_ids": [3 + ord(c) % 50 for c in text]}

    def apply_chat_template(self, messages, tokenize, return_dict):
        return [3 + ord(c) % 50 for m in messages for c in m["role"][0] + m["content"]]


def test_a_reward_model_scores_as_transformers_does():
    """A reward model's scores on packed rows equal one plain forward of each text.
    Several texts and one, text and messages; the model's mode stays.
    """
    from transformers import LlamaConfig, LlamaForSequenceClassification

    from ...oracle import SIZES

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForSequenceClassification(LlamaConfig(**SIZES, num_labels=1)).train()
    tokenizer = Letters()
    texts = [("ask", "hello"), ("why", ""), ("how long", "is this"), ("a", "b")]
    chats = [([{"role": "user", "content": p}], [{"role": "assistant", "content": c}]) for p, c in texts]
    for asked in (texts, chats):
        expected = []
        for prompt, completion in asked:
            if isinstance(prompt, str):
                ids = [*tokenizer(prompt + completion)["input_ids"], 2]
            else:
                ids = tokenizer.apply_chat_template([*prompt, *completion], True, False)
            with torch.no_grad():
                expected.append(model(torch.tensor([ids])).logits.item())
        for most in (1, 12, 100):
            judge = RewardModel(model, tokenizer=tokenizer, max_tokens=most)
            found = judge(prompts=[p for p, _ in asked], completions=[c for _, c in asked], further=[0] * 4)
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert model.training
    assert len(set(expected)) == 4


def test_a_function_of_the_script(monkeypatch):
    """`__main__:name` is found in the process of the script; elsewhere its message says why not."""
    monkeypatch.setattr(sys.modules["__main__"], "close", close, raising=False)
    assert load_reward("__main__:close") is close
    with pytest.raises(RewardError, match=r"__main__ has no far; .* further ranks have a __main__ of their own: .* 'file:far'"):
        load_reward("__main__:far")
