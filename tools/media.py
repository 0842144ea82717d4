"""Every model family of images, audio and videos beside plain transformers: `hatch run media` writes tables of docs/lanes.

A tiny random model of each is trained by several verbs on rows with images, audio, both or videos, and its losses and
gradient norms are compared with those of plain transformers with the model's own processor. What each check is stands in
media_check.py, the families in media_configs.py. All figures are in docs/lanes/media.json, of which the tables are made.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.metadata import version
from typing import Any

import lane
from forked import answers_of
from media_configs import AUDIO, BOTH, FAMILIES, IMAGE, KINDS, ROUNDING, VIDEO, families
from media_parts import TORCHAUDIO, TORCHVISION
from repository import RESULTS

SECONDS = 600
"""A check of a family that takes longer is ended, and said to hang."""
TITLES = {
    "sft": "sft",
    "all_parts": "sft, all parts train",
    "dpo": "dpo",
    "kto": "kto",
    "distill": "distill",
    "grpo": "grpo",
    "grpo_all_parts": "grpo, all parts train",
}
"""Check → the head of its column."""
CHECKS = {
    IMAGE: tuple(TITLES),
    AUDIO: tuple(TITLES),
    BOTH: ("sft", "all_parts"),
    VIDEO: tuple(TITLES)[:6],
}
"""Kind of rows → the checks that are made of it."""
BLOCKS = {
    "image": ("images", IMAGE, CHECKS[IMAGE][:5]),
    "image, sampled": ("images", IMAGE, CHECKS[IMAGE][5:]),
    "audio": ("audio", AUDIO, CHECKS[AUDIO]),
    "image and audio": ("audio", BOTH, CHECKS[BOTH]),
    "video": ("video", VIDEO, CHECKS[VIDEO]),
}
"""Name of a table → its page, its kind of rows and its checks."""

_SHOWN = 160
"""Characters of an error that a page shows."""

Answer = Mapping[str, Any]
Found = dict[str, dict[str, dict[str, Any]]]
"""Kind → check → `origin`, and `families`: name → answer. It is what media.json holds."""


def one(name: str, kind: str, check: str) -> lane.Result:
    """Check a family in a process of its own, and return its answer."""
    case = re.sub(r"\W+", "_", f"{kind} {check} {name}")
    ended = answers_of("media_check", (name, kind, check), lane="media", case=case, seconds=SECONDS)
    answer = {"ok": False, "says": ended.says} if ended.answers is None else ended.answers
    return {"says": f"{'' if answer['ok'] else 'WRONG: '}{answer['says']}", "answer": answer}


# --- the pages --------------------------------------------------------------------------------------------------------------


def block(found: Found, name: str) -> str:
    """Return a table with where it comes from above it, and what is wrong below."""
    _, kind, checks = BLOCKS[name]
    known = {check: found.get(kind, {}).get(check, {"origin": "", "families": {}}) for check in checks}
    origins: dict[str, list[str]] = {}
    for check, of in known.items():
        origins.setdefault(of["origin"], []).append(TITLES[check])
    several = len(origins) > 1
    said = [f"{'; '.join(titles) + ': ' if several else ''}{origin or 'not run.'}" for origin, titles in origins.items()]
    sampled = "grpo" in checks
    head = [
        "family",
        *(["frames of a file"] if kind == VIDEO else []),
        "rows",
        *(["prompts side by side", "a prompt is computed once"] if sampled else []),
    ]
    rows, wrong = [], []
    for family in families(kind).values():
        answers = {check: known[check]["families"].get(family.name) for check in checks}
        layout = next((answer["rows"] for answer in answers.values() if answer and "rows" in answer), "")
        drawn = answers.get("grpo") or {}
        way = [drawn.get("beside", ""), {True: "yes", False: "no"}.get(drawn.get("shared", ""), "")] if sampled else []
        cells = [family.skipped.get(check) or _cell(answers[check], check in family.drifts) for check in checks]
        rows.append([family.name, *([family.frames] if kind == VIDEO else []), layout, *way, *cells])
        wrong += [_reason(f"{family.name}, {TITLES[check]}", answer) for check, answer in answers.items() if _wrong(answer)]
    table = lane.table([*head, *(TITLES[check] for check in checks)], rows)
    below = ["", "Wrong:", "", *wrong] if wrong else []
    return "\n".join(["\n\n".join(said), "", table.rstrip(), *below])


def _wrong(answer: Answer | None) -> bool:
    return answer is not None and not answer["ok"]


def _reason(case: str, answer: Answer | None) -> str:
    return f"- {case}: {_plain((answer or {}).get('says', '')[:_SHOWN])}"


def _cell(answer: Answer | None, drifts: bool) -> str:
    """Return the largest differences of a loss and of a gradient norm; of what `drifts`, those of the first step."""
    if answer is None:
        return ""
    if "loss" not in answer:
        return "refused" if answer["ok"] else "**fails**"
    both = answer["first"] if drifts else (answer["loss"], answer["gradients"])
    figures = ", ".join(f"{figure:.0e}".replace("e-0", "e-").replace("0e+00", "0") for figure in both)
    return f"{figures if answer['ok'] else f'**{figures}**'}{f' ({ROUNDING})' if drifts else ''}"


def _plain(text: str) -> str:
    """Return text that Markdown shows as it is."""
    return re.sub(r"([\\`*_<>\[\]|])", r"\\\1", " ".join(text.split()))


def replaced(page: str, name: str, text: str) -> str:
    """Return a page with another text between the marks of a table.

    Raises:
        SystemExit: the page has no such marks.
    """
    marks = f"<!-- hatch run media: {name} -->", "<!-- end -->"
    before, begin, rest = page.partition(marks[0])
    _, end, after = rest.partition(marks[1])
    if not (begin and end):
        raise SystemExit(f"the page has no place for the table {name!r}: put {marks[0]} and {marks[1]} into it")
    return f"{before}{begin}\n\n{text}\n\n{end}{after}"


def read() -> Found:
    """Return what media.json holds."""
    file = RESULTS / "media.json"
    found: Found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return found


def put(
    found: Found, answers: Mapping[tuple[str, str, str], Answer], origin: str, chosen: Sequence[str] | None = None
) -> Found:
    """Return what was found with the answers of whole checks, or those of the chosen families in the place of older ones."""
    for kind, check in dict.fromkeys((kind, check) for _, kind, check in answers):
        of = {name: answer for (name, *rest), answer in answers.items() if rest == [kind, check]}
        if chosen is None:
            found.setdefault(kind, {})[check] = {"origin": origin, "families": of}
            continue
        if (known := found.get(kind, {}).get(check)) is None:
            raise SystemExit(f"{check} was never run on rows with {kind}: hatch run media --check {check}, without --update")
        known["origin"] += f" Again: {', '.join(of)}. {origin}"
        both = {**known["families"], **of}
        known["families"] = {name: both[name] for name in families(kind) if name in both}
    return found


def write(found: Found) -> None:
    """Write media.json, and the tables into their pages."""
    (RESULTS / "media.json").write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    for name, (page, kind, _) in BLOCKS.items():
        if kind in found:
            file = RESULTS / f"{page}.md"
            file.write_text(replaced(file.read_text(encoding="utf-8"), name, block(found, name)), encoding="utf-8")
            print(file)


def versions() -> str:
    """Return the versions that figures depend on."""
    names = ("transformers", "torch", "timm", "scipy", "Pillow", "soundfile", "soxr", "av")
    said = [f"{name} {version(name)}" for name in names]
    return ", ".join([*said[:2], TORCHVISION, TORCHAUDIO, *said[2:]])


def main(arguments: Sequence[str]) -> int:
    """Check what is not done yet, write the tables, return whether an answer is wrong."""
    parser = argparse.ArgumentParser(prog="hatch run media", description=__doc__.splitlines()[0])
    parser.add_argument("--fresh", action="store_true", help="repeat what an interrupted lane had done")
    some = parser.add_mutually_exclusive_group()
    some.add_argument("--only", nargs="+", metavar="FAMILY", help="these families alone; prints answers and writes no page")
    some.add_argument("--update", nargs="+", metavar="FAMILY", help="these families alone; puts their answers into the tables")
    parser.add_argument("--check", metavar="A,B", default=",".join(TITLES), help=f"some of {', '.join(TITLES)} (all)")
    parser.add_argument("--kind", choices=KINDS, help="rows with these alone")
    parser.add_argument("--tables", action="store_true", help="check nothing; make the tables of media.json again")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="families at a time (all cores)")
    options = parser.parse_args(arguments)
    names, checks = [family.name for family in FAMILIES], options.check.split(",")
    chosen = options.only or options.update
    for given, known, what in ((chosen or [], names, "family"), (checks, TITLES, "check")):
        if unknown := [each for each in given if each not in known]:
            parser.error(f"there is no {what} {unknown[0]!r}: {', '.join(known)}")
    if options.tables:
        write(read())
        return 0
    if not TORCHVISION:
        parser.error("torchvision is not installed, and most processors of images are written with it: use hatch run media")
    asked = [
        (family.name, kind, check)
        for check in checks
        for kind in ([options.kind] if options.kind else KINDS)
        for family in families(kind).values()
        if check in CHECKS[kind] and check not in family.skipped and family.name in (chosen or names)
    ]
    if not asked:
        parser.error("nothing is left to be checked: these families have no such check of such rows")
    # What is asked for by name is checked again.
    state = lane.Lane("media-only" if chosen else "media", fresh=options.fresh or bool(chosen))
    state.run({_case(*each): partial(one, *each) for each in asked}, workers=options.workers)
    answers = {each: state.done[_case(*each)]["answer"] for each in asked}
    if not options.only:
        origin = f"{lane.origin(' '.join(['hatch run media', *arguments]))} With {versions()}."
        write(put(read(), answers, origin, chosen))
    wrong = [f"{_case(*each)}: {answer['says']}" for each, answer in answers.items() if not answer["ok"]]
    print("\n".join([f"{len(answers)} checks, {len(wrong)} wrong", *wrong]))
    return int(bool(wrong))


def _case(name: str, kind: str, check: str) -> str:
    return f"{kind}, {check}, {name}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
