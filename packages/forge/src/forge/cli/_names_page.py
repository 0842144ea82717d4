"""Table of other libraries' names → the page docs/names.md, in Markdown."""

from __future__ import annotations

from collections import defaultdict

from forge.settings._elsewhere import COMMANDS, RENAMED, SECOND, SWITCHES, TOLD


def names_page() -> str:
    """Write every name of another library that forge knows, and what it is here."""
    here: dict[str, list[str]] = defaultdict(list)
    for theirs, setting in {**RENAMED, **SWITCHES}.items():
        here[f"`{setting}`" + (f", `{SECOND[theirs]}`" if theirs in SECOND else "")].append(theirs)
    for theirs, text in TOLD.items():
        here[text].append(theirs)
    for theirs, command in COMMANDS.items():
        here[f"`forge {command}`"].append(theirs)
    return "\n".join(
        [
            "# Names elsewhere",
            "",
            "Generated from the table in `forge.settings._elsewhere` by `hatch run names`. It has names of TRL, Axolotl,",
            "LLaMA-Factory, training_hub, mini-trainer, instructlab-training, Unsloth, torchtune, ms-swift, verl and OpenRLHF",
            "that differ here. Given to forge they are refused, all at once, with what stands on the right;",
            "`forge config convert` carries over what it can. A name that is not in the table and is a",
            "[setting](settings.md) means the same here.",
            "",
            "| elsewhere | here |",
            "|---|---|",
            *(f"| {', '.join(f'`{name}`' for name in sorted(names))} | {text} |" for text, names in here.items()),
            "",
        ]
    )


if __name__ == "__main__":
    print(names_page(), end="")
