"""Curves of a run: exact sums, bounded size, whatever the file holds."""

from __future__ import annotations

import json
import math
import random
from typing import TYPE_CHECKING, Any

import pytest

from forge.reports._charts import charts, table
from forge.reports._curves import MOST, Curve, Curves

if TYPE_CHECKING:
    from pathlib import Path


def write(file: Path, lines: list[dict[str, Any]], mode: str = "w") -> None:
    """Write lines as a run does."""
    with file.open(mode) as opened:
        opened.writelines(json.dumps(line) + "\n" for line in lines)


@pytest.mark.parametrize("count", [1, 2, 2 * MOST, 2 * MOST + 1, 4 * MOST + 1, 13_577])
def test_points_are_means_of_equal_stretches(count: int) -> None:
    """However many measurements there are, each point is the mean, least and largest of `stride` of them, in order."""
    random.seed(count)
    values = [random.uniform(-3, 3) for _ in range(count)]
    curve = Curve()
    for step, value in enumerate(values, 1):
        curve.add(step, value)
    stretches = [values[at : at + curve.stride] for at in range(0, count, curve.stride)]
    points = curve.points()
    assert len(stretches) <= 2 * MOST
    assert points["y"] == pytest.approx([sum(each) / len(each) for each in stretches], rel=1e-4, abs=1e-5)
    assert curve.steps() == tuple(min(at + curve.stride, count) for at in range(0, count, curve.stride))
    if curve.stride > 1:
        assert points["low"] == pytest.approx([min(each) for each in stretches], rel=1e-5)
        assert points["high"] == pytest.approx([max(each) for each in stretches], rel=1e-5)
    assert (curve.least, curve.most, curve.first, curve.last) == (min(values), max(values), values[0], values[-1])
    assert curve.total == pytest.approx(math.fsum(values), abs=1e-9)


def test_what_is_not_finite_is_a_gap_and_counted() -> None:
    """A null, a NaN and an infinity are gaps of the curve, never numbers of it."""
    curve = Curve()
    for step, value in enumerate([1.0, None, math.nan, math.inf, 10**400, 3.0]):
        curve.add(step, value)
    assert curve.points()["y"] == [1.0, None, None, None, None, 3.0]
    assert (curve.count, curve.not_finite, curve.least, curve.most) == (2, 4, 1.0, 3.0)


def test_further_lines_are_read_once(tmp_path: Path) -> None:
    """A half-written line waits for its end; a file that was cut is read anew; other lines are left out."""
    file, curves = tmp_path / "metrics.jsonl", Curves()
    curves.read(file)
    write(file, [{"step": 1, "loss": 2.0, "tokens": 10, "tokens_per_second": 5.0, "samples": 3}])
    with file.open("a") as opened:
        opened.write('[]\n{"loss": 1}\ntorn\n\n{"step": 2, "lo')
    curves.read(file)
    assert curves.figures["loss"].count == 1
    with file.open("a") as opened:
        opened.write('ss": 1.0, "skipped": true, "name": "x", "time": "2026-01-01T00:00:00.000Z"}\n')
    curves.read(file)
    assert (curves.figures["loss"].count, curves.step, curves.samples, curves.step_seconds) == (2, 2, 3, 2.0)
    assert set(curves.figures) == {"loss", "tokens", "tokens_per_second", "samples"}
    write(file, [{"step": 1, "loss": 5.0}])
    curves.read(file)
    assert (curves.figures["loss"].count, curves.figures["loss"].last, curves.step) == (1, 5.0, 1)


def test_figures_that_belong_together_share_a_chart(tmp_path: Path) -> None:
    """Training and held-out figures of one name share a chart, chosen beside rejected, rewards by function."""
    file, curves = tmp_path / "metrics.jsonl", Curves()
    step = {"loss": 1.0, "loss_pairs": 4, "chosen_reward": 0.5, "rejected_reward": 0.1, "lr": 1e-3, "kl": 0.1, "memory": 9}
    rollout = {"rollout_reward": 1.0, "rollout_reward/a": 1.0, "rollout_reward/b": 0.0, "rollout_cut_off": 2, "rollout_kl": 0.2}
    write(file, [{"step": 0, "eval_loss": 2.0, "eval_loss_pairs": 3}, {"step": 0, **rollout}, {"step": 1, **step}])
    write(file, [{"step": 1, "exported_eval_loss": 1.5, "expert_load": [[0.5, 0.5], [0.9, 0.1]]}], "a")
    curves.read(file)
    drawn = charts({"run": curves.figures}, "dpo")
    found = {chart["name"]: {line["name"] for line in chart["lines"]} for chart in drawn["charts"]}
    assert found["loss"] == {"training", "held out", "held out, as exported"}
    assert found["rewards of answers"] == {"chosen reward", "rejected reward"}
    assert found["rewards by function"] == {"a", "b"}
    assert found["kl"] == {"training", "rollout"}
    assert found["expert load"] == {"most", "least"}
    assert (drawn["charts"][0]["name"], drawn["charts"][-1]["name"]) == ("loss", "memory")
    assert not {"loss_pairs", "eval_loss_pairs"} & {row["name"] for row in table(curves.figures)}
    assert curves.figures["expert_load_most"].last == pytest.approx(1.8)


def test_a_long_run_stays_small(tmp_path: Path) -> None:
    """Thousands of figures, or of steps, make no page that a browser cannot open."""
    file, curves = tmp_path / "metrics.jsonl", Curves()
    write(file, [{"step": step, **{f"figure {n}": step * n / 7 for n in range(300)}} for step in range(40)])
    curves.read(file)
    assert (len(curves.figures), len(curves.left_out)) == (120, 180)
