"""Published chat templates: `hatch run templates` writes docs/templates.md.

Each is taken through fifteen conversations. Templates are those that TRL ships, those in llama-cpp-python's source archive, and
those of tests/forge-data. What each case is, and what it is compared with, stands in template_check.py.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tarfile
import tempfile
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import lane
import template_check
import transformers
from repository import LANES, ROOT
from template_check import CASES, ITSELF, OTHERWISE, REFUSED, RIGHT, WRONG

PAGE = ROOT / "docs" / "templates.md"
LLAMA_CPP = "llama-cpp-python==0.3.36"
"""Its source archive holds templates as the models' makers ship them; pip asks it for its metadata, and nothing is compiled."""
MARKS = {RIGHT: "+", WRONG: "**wrong**", REFUSED: "refused", ITSELF: "", OTHERWISE: "prompt"}

Answers = Mapping[str, template_check.Answer]


# --- where templates are ------------------------------------------------------------------------------------------------------


def found_templates(llama_cpp: Path) -> dict[str, list[str]]:
    """Return templates with the names of the files that hold each."""
    spec = find_spec("trl")
    if spec is None or spec.origin is None:
        raise SystemExit("TRL is not installed: `hatch run templates` runs where it is")
    folders = {
        "ours": ROOT / "tests" / "forge-data" / "templates",
        "trl": Path(spec.origin).parent / "chat_templates",
        "llama.cpp": llama_cpp,
    }
    found: dict[str, list[str]] = {}
    for source, folder in folders.items():
        files = sorted(folder.glob("*.jinja"))
        if not files:
            raise SystemExit(f"{folder} holds no *.jinja")
        for file in files:
            found.setdefault(file.read_text(encoding="utf-8"), []).append(f"{source}/{file.stem}")
    return found


def llama_cpp_templates(home: Path) -> Path:
    """Return the folder of llama-cpp-python's templates, fetched the first time."""
    folder = home / LLAMA_CPP
    if not folder.is_dir():
        with tempfile.TemporaryDirectory(dir=home) as fetched:
            command = [
                sys.executable,
                "-m",
                "pip",
                "download",
                "--no-deps",
                "--no-binary",
                ":all:",
                "--dest",
                fetched,
                LLAMA_CPP,
            ]
            subprocess.run(command, check=True)
            made = Path(fetched) / "templates"
            made.mkdir()
            (archive,) = Path(fetched).glob("*.tar.gz")
            with tarfile.open(archive) as files:
                for member in files:
                    content = files.extractfile(member) if "/models/templates/" in member.name and member.isfile() else None
                    if content is not None and member.name.endswith(".jinja"):
                        (made / Path(member.name).name).write_bytes(content.read())
            made.rename(folder)
    return folder


# --- what came of them --------------------------------------------------------------------------------------------------------


def one(template: str, name: str) -> lane.Result:
    """Check a template, and return its answers."""
    answers = template_check.check(template, name.partition(",")[0])
    counts = Counter(answer["state"] for answer in answers.values())
    return {"says": ", ".join(f"{count} {state}" for state, count in counts.items()), "answers": answers}


def page(found: Mapping[str, Answers]) -> str:
    """Return the page: totals, the table, and the reasons."""
    counts = Counter(answer["state"] for answers in found.values() for answer in answers.values())
    rendered = counts.total() - counts[ITSELF]
    accepted = counts[RIGHT] + counts[WRONG]
    return "\n".join(
        [
            f"{len(found)} chat templates, each with {len(CASES)} conversations: the template itself writes {rendered} of "
            f"these {counts.total()}. forge_data accepts {accepted} of them, and **{counts[RIGHT]} "
            f"({_share(counts[RIGHT], accepted)}) are learned as the template asks for them**; {counts[WRONG]} are not. "
            f"{counts[OTHERWISE]} ({_share(counts[OTHERWISE], rendered)}) cannot be learned as they are asked for, since the "
            f"template prompts with a text that nothing it writes of the turn begins with, and are refused; {counts[REFUSED]} "
            f"({_share(counts[REFUSED], rendered)}) others are refused, with the reasons below.",
            "",
            "Right (+) is: for each learned turn, what `apply_chat_template` writes of the messages before it, with the "
            "generation prompt, is the context, token by token; what it writes of the messages up to this turn, without that "
            "context, is what is learned; each turn is learned once, and nothing else is. No mark: the template refuses the "
            "conversation itself, or leaves out a part of it (its tools, a turn), and forge_data refuses it. *prompt*: refused "
            "because the template prompts otherwise than it writes.",
            "",
            "Templates that can think are asked as by default, on where the row has reasoning, or off where the turn has none. "
            "Blanks behind the turn's last token, and an EOS behind its stop token, may be left out; where the template writes "
            "no stop token, one more token may be learned, and where it marks the assistant's text, blanks before it. "
            "Behind a prompt that ends with a closed empty block of reasoning the answer is learned, also where the template "
            "writes it without one; behind one that opens a block, its end too: as the template writes it behind reasoning, "
            "or, where it never writes any but cuts `</think>` out of answers, as DeepSeek-R1 does. "
            "A template that several packages ship stands here once.",
            "",
            *(f"{number}. {case}" for number, case in enumerate(CASES, start=1)),
            "",
            lane.table(
                ["template", *(str(number) for number, _ in enumerate(CASES, start=1))],
                [[f"`{name}`", *(MARKS[answers[case]["state"]] for case in CASES)] for name, answers in found.items()],
            ),
            *_reasons("What is wrong", found, WRONG),
            *_reasons("What is refused", found, REFUSED),
            *_reasons("What is prompted otherwise than it is written", found, OTHERWISE),
            *_reasons("What templates leave out", found, ITSELF),
        ]
    )


def _share(part: int, whole: int) -> str:
    return f"{100 * part / max(whole, 1):.1f} %"


def _reasons(title: str, found: Mapping[str, Answers], state: str) -> list[str]:
    """Return a section with a line for each reason, and the templates and cases that share it."""
    shared: dict[str, dict[str, list[str]]] = {}
    for name, answers in found.items():
        for number, case in enumerate(CASES, start=1):
            if answers[case]["state"] == state and answers[case]["says"]:
                shared.setdefault(_reason(answers[case]["says"]), {}).setdefault(name, []).append(str(number))
    if not shared:
        return []
    lines = []
    for reason, names in sorted(shared.items(), key=lambda item: -len(item[1])):
        places = ", ".join(f"`{name}` ({' '.join(numbers)})" for name, numbers in names.items())
        lines.append(f"- {reason}: {places}")
    return [f"\n## {title}\n", *lines]


def _reason(says: str) -> str:
    """Return a reason without the place, the template and the texts of one case."""
    if says.startswith(("learned ", "message ")):
        says = "; ".join(dict.fromkeys(re.sub(r"'.*", "...", part) for part in re.split(r"; (?=learned |message )", says)))
    says = re.sub(r"^\S*row\.jsonl\S* ?|the chat template of \S+", "", says)
    same = re.sub(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""", "...", says)
    same = re.sub(r"\d+", "N", same).strip(" :")
    for sign in ("<", "*", "_", "|", "{", "`"):
        same = same.replace(sign, f"\\{sign}")
    return same


def write(found: Mapping[str, Answers]) -> None:
    """Write docs/templates.md."""
    versions = f"transformers {version('transformers')}, templates of trl {version('trl')} and {LLAMA_CPP.replace('==', ' ')}"
    head = f"# Chat templates\n\n{lane.origin('hatch run templates')} With {versions}.\n\n"
    PAGE.write_text(head + page(found).rstrip() + "\n", encoding="utf-8")
    print(f"\n{PAGE}")


def main(arguments: Sequence[str]) -> int:
    """Check what is not done yet, write the page, return whether a case is wrong."""
    parser = argparse.ArgumentParser(prog="hatch run templates", description=__doc__.splitlines()[0])
    parser.add_argument("--fresh", action="store_true", help="repeat what an interrupted lane had done")
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="templates of these names alone; prints answers, writes no page"
    )
    parser.add_argument(
        "--llama-cpp", type=Path, metavar="DIR", help="folder of llama.cpp's templates; else it is fetched once"
    )
    options = parser.parse_args(arguments)
    home = LANES / "templates"
    home.mkdir(parents=True, exist_ok=True)
    names = {
        ", ".join(files): template
        for template, files in found_templates(options.llama_cpp or llama_cpp_templates(home)).items()
    }
    if options.only:
        names = {name: names[name] for name in names if any(part in name for part in options.only)}
        if not names:
            parser.error(f"no template is called {options.only[0]!r}")
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    # What is asked for by name is checked again.
    state = lane.Lane("templates-only" if options.only else "templates", fresh=options.fresh or bool(options.only))
    state.run({name: partial(one, template, name) for name, template in names.items()})
    found = {name: state.done[name]["answers"] for name in names}
    if options.only:
        print(json.dumps(found, indent=1, ensure_ascii=False))
    else:
        write(found)
    return int(any(answer["state"] == WRONG for answers in found.values() for answer in answers.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
