"""Every model family that transformers registers for causal language modelling: `hatch run families` writes docs/models.md.

A tiny random model of each is trained, exported, resumed, divided over two ranks and adapted, and its loss and gradients are
compared with those of plain transformers on one document at a time. What each check is stands in family_check.py.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import multiprocessing.context
import multiprocessing.process
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from importlib.metadata import version
from typing import Any

import lane
from family_configs import model_types
from repository import LANES, ROOT

PAGE = ROOT / "docs" / "models.md"
SECONDS = 600
"""A family that takes longer is ended, and said to hang."""

Answers = Mapping[str, Mapping[str, Any]]


def one(model_type: str) -> lane.Result:
    """Check a family in a process of its own, and return its answers."""
    folder = LANES / "families"
    folder.mkdir(parents=True, exist_ok=True)
    file, output = folder / f"{model_type}.json", folder / f"{model_type}.txt"
    file.unlink(missing_ok=True)
    process = _server().Process(target=_into_files, args=(model_type, str(file), str(output)))
    process.start()
    ended = wait(process, SECONDS)
    if file.is_file():
        answers = json.loads(file.read_text(encoding="utf-8"))
    else:
        answers = {"built": {"ok": True, "says": ""}, "numbers": {"ok": False, "says": f"its process {ended}: {output}"}}
    return {"says": state(answers), "answers": answers}


@cache
def _server() -> multiprocessing.context.ForkServerContext:
    """Return the server that families are forked from; it imports what they need once, which takes longer than most of them."""
    # Python 3.11 hands its path on to the forks, and not to the server.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "tools"), os.environ.get("PYTHONPATH")]))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["family_check"])
    return context


def wait(process: multiprocessing.process.BaseProcess, seconds: float) -> str:
    """Wait for a process, end it with its group where it takes longer, and return how it ended."""
    process.join(seconds)
    if not process.is_alive():
        return f"ended with exit status {process.exitcode}"
    assert process.pid is not None
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()
    return f"did not end within {seconds:g} s"


def _into_files(*arguments: str) -> None:
    # In the forked process, where it is imported already.
    import family_check

    family_check.into_files(*arguments)


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


def page(found: Mapping[str, Answers]) -> str:
    """Return the page: totals, the table, and the reasons."""
    states = {name: state(answers) for name, answers in found.items()}
    counts = {which: [name for name in found if states[name] == which] for which in sorted(set(states.values()))}
    built = [name for name in found if states[name] != "not built"]
    right = [name for name in built if states[name].startswith("right")]
    alone = [name for name in right if not found[name]["numbers"]["packed"]]
    share = f"{100 * len(right) / max(len(built), 1):.1f} %"
    lines = [
        f"Of the {len(found)} model types that transformers registers for causal language modelling, {len(built)} could be "
        f"built tiny. **{len(right)} of these ({share}) train right**: {len(right) - len(alone)} packed, {len(alone)} with "
        f"each document alone. {len(counts.get('wrong', []))} are wrong, {len(counts.get('failed', []))} fail, "
        f"{len(counts.get('refused', []))} are refused, and {len(counts.get('not plain', []))} cannot be trained by plain "
        f"transformers. {len(counts.get('right', []))} pass every check.",
        "",
        "Right is: the loss of a step within 1e-5 of plain transformers on one unpadded document at a time, and each "
        "parameter's gradient within 1e-4 of the norm of all (both columns are relative errors). *export*: the trained model "
        "was loaded back by plain transformers and compared tensor by tensor and by its loss. *resumed*: stopped after a step "
        "and started again, its next loss is that of the whole run. *2 ranks*: so are its losses under fsdp2. *LoRA*, *OSFT*: "
        "targets by default, of models of two to four layers. *GGUF*: written and read back.",
        "",
        lane.table(
            ["model type", "class", "rows", "loss", "gradients", *SHORT.values()],
            [row(name, found[name]) for name in built if states[name] != "not plain"],
        ),
    ]
    lines += _reasons("What fails or is refused", {name: _failures(found[name]) for name in built})
    lines += _reasons(
        "What fsdp2 cannot divide",
        {name: [why] for name in right if (why := found[name].get("ranks", {}).get("reason"))},
    )
    lines += _reasons(
        "What plain transformers cannot train",
        {name: [found[name]["numbers"]["says"]] for name in counts.get("not plain", [])},
    )
    lines += _reasons(
        "What could not be built tiny", {name: [found[name]["built"]["says"]] for name in counts.get("not built", [])}
    )
    lines += _reasons("Why documents run alone", {name: [found[name]["numbers"]["why"]] for name in alone})
    return "\n".join(lines)


def _failures(answers: Answers) -> list[str]:
    return [f"{SHORT.get(name, name)}: {answer['says']}" for name, answer in answers.items() if answer["ok"] is False]


def _reasons(title: str, reasons: Mapping[str, Sequence[str]]) -> list[str]:
    """Return a section with a line for each reason, and the families that share it."""
    families: dict[str, list[str]] = {}
    for name, found in reasons.items():
        for reason in found:
            # What differs from family to family would keep equal reasons apart: its folder, and the name of its class.
            same = re.sub(r"^\w+ with attention", "with attention", re.sub(r"/\S*/tmp\w+/", "", reason))
            families.setdefault(same, []).append(f"`{name}`")
    if not families:
        return []
    return [f"\n## {title}\n", *(f"- {', '.join(names)}: {_plain(reason)}" for reason, names in families.items())]


def _plain(reason: str) -> str:
    """Return a reason that Markdown shows as it is."""
    for sign in ("<", "*", "_", "|"):
        reason = reason.replace(sign, f"\\{sign}")
    return reason


def write(found: Mapping[str, Answers]) -> None:
    """Write docs/models.md."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("transformers", "torch", "peft"))
    head = f"# Models\n\n{lane.origin('hatch run families')} With {versions}.\n\n"
    PAGE.write_text(head + page(found).rstrip() + "\n", encoding="utf-8")
    print(f"\n{PAGE}")


def main(arguments: Sequence[str]) -> int:
    """Check what is not done yet, write the page, return whether a family is wrong or fails."""
    parser = argparse.ArgumentParser(prog="hatch run families", description=__doc__.splitlines()[0])
    parser.add_argument("--fresh", action="store_true", help="repeat what an interrupted lane had done")
    parser.add_argument("--only", nargs="+", metavar="TYPE", help="these model types alone; prints answers and writes no page")
    options = parser.parse_args(arguments)
    known = model_types()
    if unknown := [name for name in options.only or () if name not in known]:
        parser.error(f"no causal language model of transformers has the type {unknown[0]!r}: {', '.join(known)}")
    types = options.only or list(known)
    # What is asked for by name is checked again.
    state_file = lane.Lane("families-only" if options.only else "families", fresh=options.fresh or bool(options.only))
    state_file.run({name: partial(one, name) for name in types}, workers=os.cpu_count() or 1)
    found = {name: state_file.done[name]["answers"] for name in types}
    if options.only:
        print(json.dumps(found, indent=1))
    else:
        write(found)
    return int(any(_broken(answers) for answers in found.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
