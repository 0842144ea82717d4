"""The examples of environments: a game of three turns and a calculator, played and learned."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "environments"


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The example's script, imported with its modules as it imports them."""
    monkeypatch.syspath_prepend(str(FOLDER))
    names = ("calculator", "game", "play")
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module("play")
    for name in names:
        sys.modules.pop(name, None)


def completions(run: Path) -> list[dict[str, Any]]:
    """Read the first rollout of a run."""
    return [json.loads(line) for line in (run / "rollouts" / "step_1.jsonl").read_text().splitlines()[1:]]


def read_only(line: dict[str, Any]) -> list[int]:
    """Return the tokens of an episode that were read and not learned."""
    return [token for token, learned in zip(line["completion_ids"], line["learned"], strict=True) if not learned]


def turns(line: dict[str, Any]) -> int:
    """Count the model's turns of an episode."""
    return int(sum(np.diff([0, *line["learned"]]) == 1))


def test_the_best_play_always_wins(play: Any) -> None:
    """Halving what is left finds each of seven numbers in three guesses."""
    for secret in play.game.NUMBERS:
        one = play.game.Guess()
        one.reset(prompt="guess", seed=0, secret=secret)
        low, high, done, reward = 1, 7, False, 0.0
        while not done:
            middle = (low + high) // 2
            observation, reward, done = one.step({"role": "assistant", "content": str(middle)})
            low, high = (middle + 1, high) if observation == "higher" else (low, middle - 1)
        assert reward == 1.0


@pytest.mark.parametrize(
    ("given", "said", "reward"),
    [((3, 4, 9), "16", 1.0), ((3, 4), "7", 0.0), (None, "16", 1.0), ("many", None, 0.0), ((), None, 0.0)],
)
def test_a_sum_is_judged_by_the_answer(play: Any, given: Any, said: str | None, reward: float) -> None:
    """The calculator adds what it is given; the answer that follows must be the sum that was asked for."""
    one = play.calculator.Calculator()
    one.reset(prompt=play.calculator.asked((3, 4, 9)), seed=0, numbers=[3, 4, 9])
    if given is not None:
        call = play.calculator.call(tuple(given) if isinstance(given, tuple) else ())
        call["tool_calls"][0]["function"]["arguments"]["numbers"] = list(given) if isinstance(given, tuple) else given
        observation, first, done = one.step(call)
        if said is None:
            assert (observation, first, done) == (None, reward, True)
            return
        assert (observation, first, done) == ([{"role": "tool", "content": str(sum(given))}], 0.0, False)
    assert one.step({"role": "assistant", "content": said}) == (None, reward, True)


@pytest.mark.slow
def test_games_are_played_and_their_hints_masked(play: Any, tmp_path: Path) -> None:
    """A rollout holds whole games: the model's guesses learned, hints between them not, wins as rewards."""
    (won, *_) = play.play(tmp_path, "game", rollouts=1)
    lines = completions(tmp_path / "played")
    assert won == pytest.approx(np.mean([line["reward"] for line in lines]))
    assert len(lines[0]["prompt_ids"]) > 0
    assert f"finished: 2 steps, {2 * len(lines)} completions" in (tmp_path / "played" / "log.txt").read_text()
    assert {turns(line) for line in lines} == {1, 2, 3}
    words = AutoTokenizer.from_pretrained(tmp_path / "model")
    hints = set(words.convert_tokens_to_ids(["higher", "lower"]))
    for line in lines:
        assert sum(token in hints for token in read_only(line)) == turns(line) - 1
        assert len(line["old_logps"]) == sum(line["learned"])


@pytest.mark.lane
def test_the_game_is_learned(play: Any, tmp_path: Path) -> None:
    """From less than a third of the games to a share that no play without the hints reaches in three guesses of seven."""
    won = play.play(tmp_path, "game", rollouts=60)
    assert np.mean(won[:5]) < 0.4
    assert np.mean(won[-5:]) > 0.43


@pytest.mark.lane
def test_calls_of_the_calculator_are_learned(play: Any, tmp_path: Path) -> None:
    """From aimless calls to right ones; the calculator's results are read, and not learned."""
    won = play.play(tmp_path, "calculator", rollouts=40)
    lines = completions(tmp_path / "played")
    assert {turns(line) for line in lines} == {1, 2}
    words = AutoTokenizer.from_pretrained(tmp_path / "model")
    for line in lines:
        assert ("tool" in words.convert_ids_to_tokens(read_only(line))) == (turns(line) == 2)
    assert np.mean(won[:5]) < 0.4
    assert np.mean(won[-5:]) > 0.8
