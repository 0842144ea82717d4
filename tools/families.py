"""Every model family that transformers registers for causal language modelling: `hatch run families` writes docs/models.md.

A tiny random model of each is trained, exported, resumed, divided over two ranks and adapted, and its loss and gradients are
compared with those of plain transformers on one document at a time. What each check is stands in family_check.py.
`hatch run families --tensor-parallel` divides the layers of each over two ranks, for docs/lanes/tensor_parallel.md.
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
from pathlib import Path
from typing import Any, NamedTuple

import lane
from family_configs import model_types
from forked import answers_of
from repository import RESULTS, ROOT

PAGE = ROOT / "docs" / "models.md"
INSIDE = ("tp_size=2", "ep_size=2", "tp_size=2, ep_size=2")
"""Ways to divide layers, as family_check.py has them."""
SECONDS = 600
"""A family that takes longer is ended, and said to hang."""

Answers = Mapping[str, Mapping[str, Any]]


def one(model_type: str, only: Sequence[str] = ()) -> lane.Result:
    """Check a family in a process of its own, or some checks of it alone, and return its answers."""
    arguments = (model_type, *([only] if only else []))
    ended = answers_of("family_check", arguments, lane="families", case=model_type, seconds=SECONDS)
    none = {"built": {"ok": True, "says": ""}, "numbers": {"ok": False, "says": ended.says}}
    answers = none if ended.answers is None else ended.answers
    says = ", ".join(f"{name}: {_cell(answers.get(name))}" for name in INSIDE) if only else state(answers)
    return {"says": says, "answers": answers}


# --- what came of a family --------------------------------------------------------------------------------------------------


def state(answers: Answers) -> str:
    """Return what came of a family: right, wrong, refused, failed, not plain or not built."""
    numbers = answers.get("numbers")
    if numbers is None:
        return "not built"
    if numbers["ok"] is None:
        return "not plain"
    if not numbers["ok"]:
        return "refused" if numbers.get("refused") else "failed" if "loss" not in numbers else "wrong"
    return "right" if all(answer["ok"] is not False for answer in answers.values()) else "right, but"


def _broken(answers: Answers) -> bool:
    """Return whether something is wrong or crashes, where neither forge nor transformers refuses by name."""
    later = (answer for name, answer in answers.items() if name != "built")
    return any(answer["ok"] is False and not answer.get("refused") for answer in later)


SHORT = {"export": "export", "resumed": "resumed", "ranks": "2 ranks", "lora": "LoRA", "osft": "OSFT", "gguf": "GGUF"}


def row(model_type: str, answers: Answers) -> list[str]:
    """Return the table's row of a family that was built and that plain transformers can train."""
    numbers = answers["numbers"]
    if "loss" not in numbers:
        return [f"`{model_type}`", answers["built"]["says"], f"**{state(answers)}**", *([""] * (2 + len(SHORT)))]
    figures = [f"{numbers[name]:.0e}" for name in ("loss", "gradients")]
    cells = [_cell(answers.get(name)) for name in SHORT]
    way = ("packed" if numbers["packed"] else "alone") if numbers["ok"] else "**wrong**"
    return [f"`{model_type}`", answers["built"]["says"], f"{way}, {numbers['attention']}", *figures, *cells]


def _cell(answer: Mapping[str, Any] | None) -> str:
    if answer is None or answer["ok"] is None:
        return "-"
    if not answer["ok"]:
        return "**refused**" if answer.get("refused") else "**fails**"
    return str(answer.get("cell", "yes"))


PLAIN, BUILT = "What plain transformers cannot train", "What could not be built tiny"
TITLES = ("What fails or is refused", "What fsdp2 cannot divide", PLAIN, BUILT, "Why documents run alone")
"""Sections of the page below its table."""


class Parts(NamedTuple):
    """What the page is made of."""

    rows: dict[str, list[str]]
    """Model type → its row of the table."""
    reasons: dict[str, dict[str, list[str]]]
    """Title of a section → model type → reasons, as Markdown."""


def parts(found: Mapping[str, Answers]) -> Parts:
    """Return the parts of the page of these answers."""
    states = {name: state(answers) for name, answers in found.items()}
    right = {name: answers for name, answers in found.items() if states[name].startswith("right")}
    reasons = (
        {name: _failures(answers) for name, answers in found.items() if states[name] not in ("not plain", "not built")},
        {name: [why] for name, answers in right.items() if (why := answers.get("ranks", {}).get("reason"))},
        {name: [answers["numbers"]["says"]] for name, answers in found.items() if states[name] == "not plain"},
        {name: [answers["built"]["says"]] for name, answers in found.items() if states[name] == "not built"},
        {name: [answers["numbers"]["why"]] for name, answers in right.items() if not answers["numbers"]["packed"]},
    )
    shown = {name: row(name, found[name]) for name in found if states[name] not in ("not plain", "not built")}
    return Parts(
        shown,
        {
            title: {name: list(map(_plain, map(_same, each))) for name, each in of.items() if each}
            for title, of in zip(TITLES, reasons, strict=True)
        },
    )


def read_parts(text: str) -> Parts:
    """Return the parts of a page that `page` made."""
    top, *sections = text.split("\n## ")
    cells = [line[2:-2].split(" | ") for line in top.splitlines() if line.startswith("| `")]
    reasons: dict[str, dict[str, list[str]]] = {title: {} for title in TITLES}
    for section in sections:
        title, _, body = section.partition("\n")
        for line in body.splitlines():
            if match := re.fullmatch(r"- ((?:`[^`]+`, )*`[^`]+`): (.*)", line):
                for name in re.findall(r"`([^`]+)`", match[1]):
                    reasons[title].setdefault(name, []).append(match[2])
    return Parts({line[0].strip("`"): line for line in cells}, reasons)


def replaced(old: Parts, new: Parts, order: Sequence[str]) -> Parts:
    """Return the old parts with what is new of the model types that the new ones tell of."""
    again = {*new.rows, *(name for of in new.reasons.values() for name in of)}

    def joined(before: Mapping[str, list[str]], after: Mapping[str, list[str]]) -> dict[str, list[str]]:
        both = {**{name: value for name, value in before.items() if name not in again}, **after}
        return {name: both[name] for name in order if name in both}

    return Parts(joined(old.rows, new.rows), {title: joined(old.reasons[title], new.reasons[title]) for title in TITLES})


def page(of: Parts) -> str:
    """Return the page: totals, the table, and the reasons."""
    ways = {name: cells[2] for name, cells in of.rows.items()}
    right = [name for name, way in ways.items() if not way.startswith("**")]
    alone = [name for name in right if ways[name].startswith("alone")]
    whole = [name for name in right if not any(cell.startswith("**") for cell in of.rows[name])]
    wrong, failed, refused = (
        sum(way.startswith(sign) for way in ways.values()) for sign in ("**wrong", "**failed", "**refused")
    )
    unbuilt, unplain = len(of.reasons[BUILT]), len(of.reasons[PLAIN])
    built = len(of.rows) + unplain
    share = f"{100 * len(right) / max(built, 1):.1f} %"
    lines = [
        f"Of the {built + unbuilt} model types that transformers registers for causal language modelling, {built} could be "
        f"built tiny. **{len(right)} of these ({share}) train right**: {len(right) - len(alone)} packed, {len(alone)} with "
        f"each document alone. {wrong} are wrong, {failed} fail, {refused} are refused, and {unplain} cannot be trained by "
        f"plain transformers. {len(whole)} pass every check.",
        "",
        "Right is: the loss of a step within 1e-5 of plain transformers on one unpadded document at a time, and each "
        "parameter's gradient within 1e-4 of the norm of all (both columns are relative errors). *export*: the trained model "
        "was loaded back by plain transformers and compared tensor by tensor and by its loss. *resumed*: stopped after a step "
        "and started again, its next loss is that of the whole run. *2 ranks*: so are its losses under fsdp2. *LoRA*, *OSFT*: "
        "targets by default, of models of two to four layers. *GGUF*: written and read back.",
        "",
        lane.table(["model type", "class", "rows", "loss", "gradients", *SHORT.values()], list(of.rows.values())),
    ]
    for title in TITLES:
        lines += _section(title, of.reasons[title])
    return "\n".join(lines)


def _failures(answers: Answers) -> list[str]:
    return [f"{SHORT.get(name, name)}: {answer['says']}" for name, answer in answers.items() if answer["ok"] is False]


def _section(title: str, reasons: Mapping[str, Sequence[str]]) -> list[str]:
    """Return a section with a line for each reason, and the families that share it."""
    families: dict[str, list[str]] = {}
    for name, found in reasons.items():
        for reason in found:
            families.setdefault(reason, []).append(f"`{name}`")
    if not families:
        return []
    return [f"\n## {title}\n", *(f"- {', '.join(names)}: {reason}" for reason, names in families.items())]


def _same(reason: str) -> str:
    """Return a reason without what differs from family to family: its folder, and the name of its class."""
    return re.sub(r"^\w+ with attention", "with attention", re.sub(r"/\S*/tmp\w+/", "", reason))


def _plain(reason: str) -> str:
    """Return a reason that Markdown shows as it is."""
    for sign in ("<", "*", "_", "|"):
        reason = reason.replace(sign, f"\\{sign}")
    return reason


def write_inside(found: Mapping[str, Answers]) -> None:
    """Write docs/lanes/tensor_parallel.md: of each family that one of the ways can divide, how far its losses are."""
    asked = {name: {way: answers[way] for way in INSIDE if way in answers} for name, answers in found.items()}
    shown = {name: ways for name, ways in asked.items() if any(answer["ok"] is not None for answer in ways.values())}
    cells = [
        [f"`{name}`", *(ways[way]["says"] if ways[way]["ok"] else _cell(ways[way]) for way in INSIDE)]
        for name, ways in shown.items()
    ]
    refused = {name: [answer["says"] for answer in ways.values() if answer["ok"] is False] for name, ways in shown.items()}
    others = {name: [next(iter(ways.values()))["says"]] for name, ways in asked.items() if ways and name not in shown}
    trained = sum(map(bool, asked.values()))
    lines = [
        f"Of {len(asked)} model types {trained} train on one rank, and the layers of {len(shown)} of these can be divided, by "
        "the plans that transformers has. Two steps on two ranks, exported and compared as any run; the figures are how far "
        "the losses are from those of one rank. `-` is refused by name: there is no plan, or not of that kind. "
        "`gemma4` and `gemma4_text` are further off by float32 itself, which moves their gradients by 3e-5 on one rank; in "
        "float64 two ranks are within 3e-8 of one.",
        "",
        lane.table(["model type", *INSIDE], cells),
        *_section(
            "What is wrong or fails", {name: list(map(_plain, map(_same, each))) for name, each in refused.items() if each}
        ),
        *_section("What is refused", {name: list(map(_plain, map(_same, each))) for name, each in others.items()}),
    ]
    head = f"# Layers divided over two ranks\n\n{lane.origin('hatch run families --tensor-parallel')} With {_versions()}."
    _write(head, "\n".join(lines), RESULTS / "tensor_parallel.md")


def _versions() -> str:
    return ", ".join(f"{name} {version(name)}" for name in ("transformers", "torch", "peft"))


def write(found: Mapping[str, Answers]) -> None:
    """Write docs/models.md."""
    _write(f"# Models\n\n{lane.origin('hatch run families')} With {_versions()}.", page(parts(found)), PAGE)


def update(found: Mapping[str, Answers], order: Sequence[str]) -> None:
    """Put these answers into docs/models.md, in the place of what it says of their model types."""
    old = PAGE.read_text(encoding="utf-8")
    head = old.partition("\n\nOf the ")[0]
    named = ", ".join(f"`{name}`" for name in found)
    of = replaced(read_parts(old), parts(found), order)
    _write(f"{head}\n\n{named}: {lane.origin('hatch run families --update')}", page(of), PAGE)


def _write(head: str, text: str, file: Path) -> None:
    file.write_text(f"{head}\n\n{text.rstrip()}\n", encoding="utf-8")
    print(f"\n{file}")


def main(arguments: Sequence[str]) -> int:
    """Check what is not done yet, write the page, return whether a family is wrong or fails."""
    parser = argparse.ArgumentParser(prog="hatch run families", description=__doc__.splitlines()[0])
    parser.add_argument("--fresh", action="store_true", help="repeat what an interrupted lane had done")
    some = parser.add_mutually_exclusive_group()
    some.add_argument("--only", nargs="+", metavar="TYPE", help="these model types alone; prints answers and writes no page")
    some.add_argument("--update", nargs="+", metavar="TYPE", help="these model types alone; puts their answers into the page")
    some.add_argument("--tensor-parallel", action="store_true", help="divide layers over two ranks; its own page")
    options = parser.parse_args(arguments)
    known = model_types()
    chosen = options.only or options.update
    if unknown := [name for name in chosen or () if name not in known]:
        parser.error(f"no causal language model of transformers has the type {unknown[0]!r}: {', '.join(known)}")
    types = chosen or list(known)
    # What is asked for by name is checked again.
    lane_name = "families-inside" if options.tensor_parallel else "families-only" if chosen else "families"
    state_file = lane.Lane(lane_name, fresh=options.fresh or bool(chosen))
    only = ("built", "export", *INSIDE) if options.tensor_parallel else ()
    state_file.run({name: partial(one, name, only) for name in types}, workers=os.cpu_count() or 1)
    found = {name: state_file.done[name]["answers"] for name in types}
    if options.tensor_parallel:
        write_inside(found)
    elif options.only:
        print(json.dumps(found, indent=1))
    elif options.update:
        update(found, list(known))
    else:
        write(found)
    return int(any(_broken(answers) for answers in found.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
