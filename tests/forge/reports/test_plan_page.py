"""The page of a plan: drawings whose bars are the plan's own figures, and plain words."""

from __future__ import annotations

import re
from xml.etree import ElementTree as ET

import pytest

import forge_packing
from forge.reports._plan_page import plan_page
from forge.reports._plan_svg import draw_fill, draw_step, step_words

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
    rows = [plan.micro_batches(step, rank) for rank in range(3)]
    costs = [float(plan.cost.of(plan.lengths[m]).sum()) for row in rows for m in row if m.size]
    found, below = bars(draw_step(plan, step), {"even", "odd"}), bars(draw_fill(plan)[0], {"odd"})
    assert (len(found), len(below)) == (len(costs), plan.num_steps)
    widths = [float(bar.get("width")) + 0.7 for bar in found]
    figures = plan.figures(step)
    scale = (960 - 84 - 24) / figures.makespan
    assert widths == pytest.approx([cost * scale for cost in costs], abs=0.02)
    heights = [float(bar.get("height")) for bar in below]
    assert heights == pytest.approx([160 * plan.figures(each).fill for each in range(plan.num_steps)], abs=0.02)


def test_bars_and_waiting_fill_the_step() -> None:
    """On every rank, work and waiting together are as long as the step: ranks meet at the end of each pass."""
    plan = made(cost=forge_packing.Cost(per_micro_batch=3.0))
    figures = plan.figures(0)
    scale = (960 - 84 - 24) / figures.makespan
    by_row: dict[str, float] = {}
    for bar in bars(draw_step(plan, 0), {"even", "odd", "idle"}):
        worked = 0.7 if bar.get("class") != "idle" else 0.0
        by_row[bar.get("y")] = by_row.get(bar.get("y"), 0.0) + float(bar.get("width")) + worked
    passes = (figures.makespan - 3.0 * figures.micro_batches) * scale
    assert len(by_row) == 3
    assert list(by_row.values()) == pytest.approx([passes] * 3, abs=0.1)


def test_nothing_but_itself() -> None:
    """The page needs no network, and its drawings have a title that screen readers read."""
    page = plan_page(made(), 0, "<b>first</b>")
    assert set(re.findall(r"https?://[^\s\"']+", page)) == {"http://www.w3.org/2000/svg"}
    assert "&lt;b&gt;first&lt;/b&gt;" in page
    assert "makespan" not in page
    for drawing in (draw_step(made(), 0), draw_fill(made())[0]):
        assert drawing in page
        root = ET.fromstring(drawing)
        assert root.get("role") == "img"
        assert root.find(f"{SVG}title").text == root.get("aria-label")


def test_the_words_are_the_figures() -> None:
    """How much longer the step takes than any division could, in percent of the bound; none where nothing is better."""
    plan = made()
    found = plan.figures(0)
    longer = found.makespan / found.least_makespan - 1
    assert longer > 0.0005
    assert f"{longer:.1%} longer than the least" in step_words(plan, 0)[1]
    assert (
        "No division of its samples would take less time"
        in step_words(forge_packing.plan([5], batch_size=1, max_tokens=9), 0)[1]
    )


@pytest.mark.parametrize(
    "plan",
    [
        forge_packing.plan([5], batch_size=1, max_tokens=9),
        forge_packing.plan([3] * 600, batch_size=600, max_tokens=9, world_size=300),
        pytest.param(
            forge_packing.plan([3, 4], batch_size=2, max_tokens=9, epochs=None, max_steps=10**8), marks=pytest.mark.lane
        ),
        forge_packing.plan([3, 4], batch_size=2, max_tokens=9, epochs=None),
        forge_packing.plan([1], batch_size=1, max_tokens=9, cost=forge_packing.Cost(1e-6, 0.0)),
    ],
    ids=["one sample", "many ranks", "many steps", "no last step", "a small unit"],
)
def test_extremes(plan: forge_packing.BatchPlan) -> None:
    """One sample, hundreds of ranks, 10**8 steps, an endless run and any unit of cost: the file stays small."""
    drawing = plan_page(plan, 0, "a plan")
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
    drawing = plan_page(plan, 0, "a plan")
    assert len(measured) <= 2**11 + 2
    assert ("measured at the first 16 of each of 32 stretches" in drawing) == (batch_size < 64)
