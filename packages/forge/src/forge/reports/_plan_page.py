"""Batch plan → one HTML page: the load of a step on each rank, and the fill over the run."""

from __future__ import annotations

import forge_packing
from forge.reports._page import page
from forge.reports._plan_svg import draw_fill, draw_step, step_words


def plan_page(plan: forge_packing.BatchPlan, step: int, name: str) -> str:
    """Write the page of a plan, which needs no network.

    Args:
        plan: the plan.
        step: the step whose division is drawn.
        name: of the plan's file or directory.

    """
    title, words = step_words(plan, step)
    fill, filled, about = draw_fill(plan)
    drawings = [(title, words, draw_step(plan, step)), (filled, about, fill)]
    return page("plan.html", styles=("plan.css",), plan=plan, name=name, drawings=drawings)
