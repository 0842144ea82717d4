"""`plot_loss`: curves of several runs as SVG."""

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from forge import RunDirectoryError, SettingsError
from forge.hub import plot_loss


def a_run(path, losses, name="metrics.jsonl", key="loss"):
    """A run directory with losses."""
    path.mkdir()
    lines = [json.dumps({"step": step, key: loss}) for step, loss in enumerate(losses, start=1)]
    (path / name).write_text("\n".join([*lines, json.dumps({"step": 9, "eval_loss": 1.0}), '{"torn": ']))
    return path


def curves(picture):
    """Name → points of each curve, in the picture's coordinates."""
    root = ET.fromstring(Path(picture).read_text(encoding="utf-8"))
    return {
        line[0].text: [tuple(map(float, point.split(","))) for point in line.get("points").split()]
        for line in root.iter("{http://www.w3.org/2000/svg}polyline")
    }


def test_curves(tmp_path):
    """One curve a run, one more for its average; points are placed by step and loss, whatever file and figure they have."""
    one = a_run(tmp_path / "one <&>", [4.0, 3.0, 2.0, 1.0])
    two = a_run(tmp_path / "two", [2.0, 2.0], "training_log.jsonl", "avg_loss")
    picture = plot_loss([str(one), two], ema=True, ema_span=1)
    assert picture == str(one / "loss_plot.svg")
    found = curves(picture)
    assert list(found) == ["one <&>", "one <&> (EMA)", "two", "two (EMA)"]
    assert found["one <&>"] == found["one <&> (EMA)"], "a span of one step is the curve itself"
    (x1, y1), (x2, y2), (x3, y3), (x4, y4) = found["one <&>"]
    assert x2 - x1 == pytest.approx(x4 - x3, abs=0.02)
    assert y2 - y1 == pytest.approx(y4 - y3, abs=0.02)
    assert y2 > y1, "a lower loss is further down"
    assert found["two"][0] == (x1, y3)
    assert "http" not in re.sub(r'xmlns="[^"]*"', "", Path(picture).read_text(encoding="utf-8"))


def test_runs_of_one_name(tmp_path):
    """Two directories of the same name have colours of their own."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    picture = plot_loss([a_run(tmp_path / "a" / "run", [2.0, 1.0]), a_run(tmp_path / "b" / "run", [3.0, 1.0])], ema=True)
    colors = re.findall(r'<polyline [^>]*stroke="(#\w+)"', Path(picture).read_text(encoding="utf-8"))
    assert colors[0] == colors[1] != colors[2] == colors[3]


def test_an_average():
    """The weight of a new value is 2 / (span + 1), as pandas' ewm(span, adjust=False) has it."""
    from forge.hub._plot import _average

    assert _average([(1, 1.0), (2, 2.0), (3, 4.0)], 3) == [(1, 1.0), (2, 1.5), (3, 2.75)]


def test_one_point_and_a_flat_line(tmp_path):
    """What has no range is drawn too."""
    assert "<circle" in Path(plot_loss(a_run(tmp_path / "a", [2.0]))).read_text(encoding="utf-8")
    assert len(curves(plot_loss(a_run(tmp_path / "b", [0.0, 0.0])))["b"]) == 2
    assert len(curves(plot_loss(a_run(tmp_path / "c", [1e-9, 1e12])))["c"]) == 2


def test_refusals(tmp_path):
    """Each says what to give instead."""
    run = a_run(tmp_path / "run", [1.0])
    for arguments, why in (
        ({"output_path": tmp_path / "x.png"}, "is an .svg"),
        ({"labels": ["a", "b"]}, "2 names for 1 runs"),
        ({"ema": True, "ema_span": 0}, "ema_span must be"),
        ({"metric_keys": ["nothing"]}, "no line has nothing"),
    ):
        with pytest.raises(SettingsError, match=why):
            plot_loss(run, **arguments)
    with pytest.raises(SettingsError, match="is empty"):
        plot_loss([])
    with pytest.raises(SettingsError, match="must be a run directory or a list"):
        plot_loss(3)
    with pytest.raises(RunDirectoryError, match="has no training_log.jsonl or"):
        plot_loss(tmp_path)
    with pytest.raises(RunDirectoryError, match="has no other.jsonl"):
        plot_loss(run, metrics_file="other.jsonl")
    with pytest.raises(RunDirectoryError, match="cannot be written"):
        plot_loss(run, output_path=run / "metrics.jsonl" / "x.svg")
