"""The example of an environment: a game of three turns, played and learned."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

HIGHER, LOWER = 6, 7
FOLDER = Path(__file__).resolve().parents[2] / "examples" / "guessing_game"


@pytest.fixture
def game(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The example's modules, imported as its script imports them."""
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in ("game", "play"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import play

    yield play
    for name in ("game", "play"):
        sys.modules.pop(name, None)


def test_the_best_play_always_wins(game: Any) -> None:
    """Halving what is left finds each of seven numbers in three guesses."""
    for secret in game.NUMBERS:
        one = game.Guess()
        one.reset(prompt="guess", seed=0, secret=secret)
        low, high, done, reward = 1, 7, False, 0.0
        while not done:
            middle = (low + high) // 2
            observation, reward, done = one.step({"role": "assistant", "content": str(middle)})
            low, high = (middle + 1, high) if observation == "higher" else (low, middle - 1)
        assert reward == 1.0


@pytest.mark.slow
def test_games_are_played_and_their_hints_masked(game: Any, tmp_path: Path) -> None:
    """A rollout holds whole games: the model's guesses learned, hints between them not, wins as rewards."""
    (won, *_) = game.play(tmp_path, rollouts=1)
    lines = [json.loads(line) for line in (tmp_path / "played" / "rollouts" / "step_1.jsonl").read_text().splitlines()[1:]]
    assert won == pytest.approx(np.mean([line["reward"] for line in lines]))
    asked = lines[0]["prompt_ids"]
    assert len(asked) > 0
    turns = {sum(np.diff([0, *line["learned"]]) == 1) for line in lines}
    assert turns == {1, 2, 3}
    for line in lines:
        read = [token for token, learned in zip(line["completion_ids"], line["learned"], strict=True) if not learned]
        hints = [token for token in read if token in (HIGHER, LOWER)]
        assert len(hints) == sum(np.diff([0, *line["learned"]]) == 1) - 1
        assert len(line["old_logps"]) == sum(line["learned"])


@pytest.mark.lane
def test_the_game_is_learned(game: Any, tmp_path: Path) -> None:
    """From less than a third of the games to a share that no play without the hints reaches in three guesses of seven."""
    won = game.play(tmp_path, rollouts=60)
    assert np.mean(won[:5]) < 0.4
    assert np.mean(won[-5:]) > 0.43
