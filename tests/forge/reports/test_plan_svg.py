"""The drawing of a plan: well-formed XML whose bars are the plan's own figures."""

from __future__ import annotations

import re
from xml.etree import ElementTree as ET

import pytest

import forge_packing
from forge.reports._plan_svg import draw

SVG = "{http://www.w3.org/2000/svg}"


def made(**changed: object) -> forge_packing.BatchPlan:
    """A plan of forty samples on three ranks."""
    given = {"batch_size": 16, "max_tokens": 40, "world_size": 3, "seed": 1, "epochs": 2, **changed}
    return forge_packing.plan([3 + 7 * i % 30 for i in range(40)], **given)


def bars(drawing: str, kinds: set[str]) -> list[ET.Element]:
    """The rectangles of these kinds."""
    return [bar for bar in ET.fromstring(drawing).iter(f"{SVG}rect") if bar.get("class") in kinds]


@pytest.mark.parametrize("step", [0, 2, 5])
def test_every_micro_batch_has_a_bar(step: int) -> None:
    """Above: a bar for each micro-batch that holds samples, as long as its cost; below: a bar a step, as tall as its fill."""
    plan = made()
    drawing = draw(plan, step)
    rows = [plan.micro_batches(step, rank) for rank in range(3)]
    costs = [float(plan.cost.of(plan.lengths[m]).sum()) for row in rows for m in row if m.size]
    found = bars(drawing, {"even", "odd"})
    assert len(found) == len(costs) + plan.num_steps
    widths = [float(bar.get("width")) + 0.7 for bar in found[: len(costs)]]
    figures = plan.figures(step)
    scale = (960 - 84 - 24) / figures.makespan
    assert widths == pytest.approx([cost * scale for cost in costs], abs=0.02)
    heights = [float(bar.get("height")) for bar in found[len(costs) :]]
    assert heights == pytest.approx([160 * plan.figures(each).fill for each in range(plan.num_steps)], abs=0.02)


def test_bars_and_waiting_fill_the_step() -> None:
    """On every rank, work and waiting together are as long as the step: ranks meet at the end of each pass."""
    plan = made(cost=forge_packing.Cost(per_micro_batch=3.0))
    figures = plan.figures(0)
    scale = (960 - 84 - 24) / figures.makespan
    by_row: dict[str, float] = {}
    for bar in bars(draw(plan, 0), {"even", "odd", "idle"}):
        if bar.get("height") != "160.00" and float(bar.get("height")) < 25:
            worked = 0.7 if bar.get("class") != "idle" else 0.0
            by_row[bar.get("y")] = by_row.get(bar.get("y"), 0.0) + float(bar.get("width")) + worked
    passes = (figures.makespan - 3.0 * figures.micro_batches) * scale
    assert len(by_row) == 3
    assert list(by_row.values()) == pytest.approx([passes] * 3, abs=0.1)


def test_nothing_but_itself() -> None:
    """The drawing needs no network, runs no script, and has a title that screen readers read."""
    drawing = draw(made(), 0)
    assert set(re.findall(r"https?://[^\s\"']+", drawing)) == {"http://www.w3.org/2000/svg"}
    assert "<script" not in drawing
    root = ET.fromstring(drawing)
    assert root.get("role") == "img"
    assert root.find(f"{SVG}title").text == root.get("aria-label")


@pytest.mark.parametrize(
    "plan",
    [
        forge_packing.plan([5], batch_size=1, max_tokens=9),
        forge_packing.plan([3] * 600, batch_size=600, max_tokens=9, world_size=300),
        pytest.param(
            forge_packing.plan([3, 4], batch_size=2, max_tokens=9, epochs=None, max_steps=10**8), marks=pytest.mark.slow
        ),
        forge_packing.plan([3, 4], batch_size=2, max_tokens=9, epochs=None),
        forge_packing.plan([1], batch_size=1, max_tokens=9, cost=forge_packing.Cost(1e-6, 0.0)),
    ],
    ids=["one sample", "many ranks", "many steps", "no last step", "a small unit"],
)
def test_extremes(plan: forge_packing.BatchPlan) -> None:
    """One sample, hundreds of ranks, 10**8 steps, an endless run and any unit of cost: the file stays small."""
    drawing = draw(plan, 0)
    numbers = re.findall(r' (?:x|y|width|height|x1|y2)="([^"%]+)"', drawing)
    assert all(-1 <= float(number) < 20_000 for number in numbers)
    assert len(drawing) < 200_000


@pytest.mark.parametrize("batch_size", [1, 2, 64])
def test_few_steps_are_measured(monkeypatch: pytest.MonkeyPatch, batch_size: int) -> None:
    """A step's bounds take time, so of many small steps only some are measured; the drawing says so."""
    plan = forge_packing.plan([5] * 5_000, batch_size=batch_size, max_tokens=5 * batch_size)
    measured = []
    whole = forge_packing.BatchPlan.figures
    monkeypatch.setattr(forge_packing.BatchPlan, "figures", lambda plan, step: (measured.append(step), whole(plan, step))[1])
    drawing = draw(plan, 0)
    assert len(measured) <= 2**11 + 1
    assert ("measured at the first 16 of each of 32 stretches" in drawing) == (batch_size < 64)
