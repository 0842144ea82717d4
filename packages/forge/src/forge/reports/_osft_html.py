"""What OSFT moved → one HTML page: no network, no script, readable without colour; every word of the run's own is escaped."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from typing import TYPE_CHECKING, Literal

from forge.reports._osft_svg import change, spectrum

if TYPE_CHECKING:
    from forge_algos.adaptations import Moved, Portrait

_SLOT = re.compile("@([a-z]+)@")
_NOTHING = 1e-5
"""A leak up to here is what float32 arithmetic leaves."""


def page(
    name: str,
    rule: Literal["strict", "paper"],
    dtype: str,
    targets: Sequence[Moved],
    shown: Moved,
    portrait: Portrait,
    others: Mapping[str, float | None],
) -> str:
    """The text of the page.

    Args:
        name: of the run.
        rule: what its protected directions forbid.
        dtype: of the exported targets.
        targets: in the model's order.
        shown: the one of them that is drawn.
        portrait: of that one.
        others: every other tensor of the model → ‖Δ‖/‖W‖, or None where it is new.

    """
    style = _file("osft.css")
    slots = {
        "policy": f"default-src 'none'; style-src '{_hash(style)}'; img-src data:; base-uri 'none'; form-action 'none'",
        "name": escape(name),
        "style": style,
        "lede": (
            "What this run protected of its base model, what it moved, and how much of that went where nothing may move "
            f"(rule: {rule})."
        ),
        "figures": _figures(targets, rule),
        "layer": _breakable(shown.name),
        "about": _about(shown, rule, dtype),
        "spectrumtext": _spectrum_text(portrait),
        "spectrum": spectrum(portrait),
        "changetext": _change_text(portrait, rule),
        "change": change(portrait),
        "shares": _shares(portrait, rule),
        "alltext": (
            f"‖ΔW‖/‖W‖ is how far a target moved; the leak is the share of ΔW that the rule forbids. Below {_NOTHING:.0e}, or below four times "
            f"what rounding to {escape(dtype)} explains, it is the rounding's; ▲ marks what is above both."
        ),
        "targets": _table(targets, shown, rule),
        "rest": _rest(others),
    }
    # One pass, so that a slot's name inside a text stays text.
    return _SLOT.sub(lambda found: slots.get(found[1], found[0]), _file("osft.html"))


def leaks(target: Moved, rule: Literal["strict", "paper"]) -> bool:
    """Whether more went where nothing may move than rounding explains."""
    return target.leak(rule) > max(_NOTHING, 4 * target.rounding)


def _figures(targets: Sequence[Moved], rule: Literal["strict", "paper"]) -> str:
    directions, free = sum(min(t.shape) for t in targets), sum(t.free for t in targets)
    most, worst = max(targets, key=lambda t: t.moved), max(targets, key=lambda t: t.leak(rule))
    moved = sum(t.moved > 0 for t in targets)
    leaking = sum(leaks(t, rule) for t in targets)
    rows = [
        ("Targets", f"{len(targets):,}", f"{moved:,} moved"),
        ("Free directions", f"{100 * free / directions:.3g} %", f"{free:,} of {directions:,}"),
        ("Moved most", f"{most.moved:.1e}", most.name),
        ("Worst leak", f"{worst.leak(rule):.1e}", f"{leaking:,} above rounding" if leaking else "nothing above rounding"),
    ]
    return "".join(
        f"<div><dt>{escape(what)}</dt><dd>{escape(value)}<small>{_breakable(note)}</small></dd></div>"
        for what, value, note in rows
    )


def _about(shown: Moved, rule: Literal["strict", "paper"], dtype: str) -> str:
    rows, columns = shown.shape
    forbidden = "between protected directions" if rule == "paper" else "on a protected direction of either side"
    return (
        f"{rows:,} outputs, {columns:,} inputs; {shown.free:,} of its {min(shown.shape):,} singular directions were free. It moved by "
        f"‖ΔW‖/‖W‖ = {shown.moved:.2e}; the share of that {forbidden} is {shown.leak(rule):.1e}, and rounding to {escape(dtype)} alone is "
        f"expected to be {shown.rounding:.1e}."
    )


def _spectrum_text(portrait: Portrait) -> str:
    energy = portrait.singular_values.square()
    share = float(energy[: portrait.protected].sum() / energy.sum())
    return f"The directions of the largest singular values, which hold {100 * share:.3g} % of ‖W‖². The hatched rest was free to move."


def _change_text(portrait: Portrait, rule: Literal["strict", "paper"]) -> str:
    allowed = (
        "All may move but what leads from protected to protected."
        if rule == "paper"
        else "Only what is free on both sides may."
    )
    unused = portrait.rows[-1] != portrait.columns[-1]
    return (
        "Each field is how much of some input directions (columns) now goes to some output directions (rows), in the order of the singular "
        f"values. {allowed}{' The dotted band stands for directions of the longer side that the weights do not use.' if unused else ''}"
    )


def _shares(portrait: Portrait, rule: Literal["strict", "paper"]) -> str:
    """Where the change lies, as four numbers that add up to one."""
    told = [
        "<table><thead><tr><th>Share of ‖ΔW‖²</th>",
        *(f'<th class="number">from {w}<br>inputs</th>' for w in ("protected", "free")),
    ]
    told.append("</tr></thead><tbody>")
    for outputs, word in ((True, "protected"), (False, "free")):
        told.append(f'<tr><th scope="row">to {word}<br>outputs</th>')
        for inputs in (True, False):
            barred = outputs and inputs if rule == "paper" else outputs or inputs
            note = f'<span class="note">{"forbidden" if barred else "allowed"}</span>'
            told.append(f'<td class="number">{_percent(portrait.share(outputs=outputs, inputs=inputs))}{note}</td>')
        told.append("</tr>")
    return "".join([*told, "</tbody></table>"])


def _table(targets: Sequence[Moved], shown: Moved, rule: Literal["strict", "paper"]) -> str:
    most = max(t.moved for t in targets) or 1.0
    head = (
        '<table><thead><tr><th>Target</th><th class="number wide">Shape</th><th class="number">Free</th>'
        '<th class="number">‖ΔW‖/‖W‖</th><th class="number">Leak</th></tr></thead><tbody>'
    )
    return head + "".join(_row(t, most, rule, chosen=t is shown) for t in targets) + "</tbody></table>"


def _row(target: Moved, most: float, rule: Literal["strict", "paper"], *, chosen: bool) -> str:
    leak, bad = target.leak(rule), leaks(target, rule)
    meter = f'<svg class="meter" viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true"><rect width="{100 * target.moved / most:.1f}" height="10"/></svg>'
    return (
        f'<tr{" class=shown" if chosen else ""}><th scope="row" class="name">{_breakable(target.name)}{" (drawn above)" if chosen else ""}</th>'
        f'<td class="number wide">{target.shape[0]:,} × {target.shape[1]:,}</td>'
        f'<td class="number">{target.free:,}/{min(target.shape):,}</td><td class="number">{target.moved:.1e}{meter}</td>'
        f'<td class="number{" bad" if bad else ""}">{"▲ " if bad else ""}{leak:.0e}</td></tr>'
    )


def _rest(others: Mapping[str, float | None]) -> str:
    changed = {name: size for name, size in others.items() if size != 0}
    if not changed:
        return f'<p class="soft">{len(others):,} other tensors of the model: none changed, bit for bit.</p>'
    rows = "".join(
        f'<tr><th scope="row" class="name">{_breakable(name)}</th><td class="number">{"new" if size is None else f"{size:.1e}"}</td></tr>'
        for name, size in changed.items()
    )
    return (
        f'<p class="soft">{len(changed):,} of {len(others):,} other tensors changed.</p>'
        '<div class="scroll tall" tabindex="0" role="region" aria-label="Other tensors that changed"><table><thead><tr><th>Tensor</th>'
        f'<th class="number">‖ΔW‖/‖W‖</th></tr></thead><tbody>{rows}</tbody></table></div>'
    )


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %" if share >= 1e-4 or not share else f"{share:.0e}"


def _breakable(name: str) -> str:
    """A long dotted name may be broken after its dots."""
    return escape(name).replace(".", ".<wbr>")


def _file(name: str) -> str:
    return (resources.files("forge") / "reports" / "pages" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
