"""Figures of held-out rows as a person reads them."""

from __future__ import annotations

from forge.tasks._task import Evaluation


def test_what_was_cut_off_is_a_share_and_what_is_counted_is_whole() -> None:
    """As in a step's line, whether a verb counts completions or has their share; metrics.jsonl has what there was."""
    counted = Evaluation(loss=None, count=64, unit="completions", figures={"reward": 0.5, "cut_off": 63, "unscored": 1200})
    assert str(counted) == "reward 0.5000, cut_off 98%, unscored 1,200 over 64 completions"
    assert counted.metrics()["eval_cut_off"] == 63
    shared = Evaluation(loss=0.25, count=640, unit="tokens", figures={"cut_off": 0.75})
    assert str(shared) == "loss 0.2500, cut_off 75% over 640 tokens"
