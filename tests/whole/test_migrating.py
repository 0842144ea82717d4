"""Names of other libraries: the table, the pages of docs/migrating and the settings agree."""

from __future__ import annotations

import ast
import re
from functools import cache
from typing import TYPE_CHECKING

import pytest

from forge.settings._elsewhere import COMMANDS, RENAMED, SWITCHES, TOLD, hint
from forge.settings._own import OWN
from forge.settings._settings import flat_fields, resolve
from forge.verbs._registry import VERBS, task_of

from .repository import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGES = {page.stem: page for page in sorted((ROOT / "docs" / "migrating").glob("*.md"))}
CODE = re.compile(r"`([^`]+)`")
NAME = re.compile(r"[a-z][a-z0-9_]*")
COMMAND_HEADINGS = {"Commands", "Trainers", "Functions"}


@cache
def settings() -> frozenset[str]:
    """Every setting of every verb."""
    return frozenset(field.name for verb in VERBS for _, field in flat_fields(task_of(verb).settings))


def rows(text: str) -> Iterator[tuple[list[str], list[str], str]]:
    """(names of a row, what they are here, the middle cell) of the tables of settings on a page."""
    heading = ""
    for line in text.splitlines():
        if line.startswith("## "):
            heading = line.removeprefix("## ")
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and len(cells) == 3 and heading not in COMMAND_HEADINGS:
            names = [name for name in CODE.findall(cells[0]) if NAME.fullmatch(name)]
            yield names, CODE.findall(cells[1]), cells[1]


def faults(text: str) -> list[str]:
    """Names of a page that the table does not know, or of which it says something else."""
    found = []
    for names, here, cell in rows(text):
        plain = {code.partition("=")[0] for code in here}
        for name in names:
            if name in RENAMED and RENAMED[name] not in plain:
                found.append(f"{name}: the page says {cell}, the table {RENAMED[name]}")
            elif name in SWITCHES and SWITCHES[name].partition("=")[0] not in plain:
                found.append(f"{name}: the page says {cell}, the table {SWITCHES[name]}")
            elif name not in {*RENAMED, *SWITCHES, *TOLD, *settings()}:
                found.append(f"{name}: is not in the table")
        found += [f"{code}: is no setting" for code in plain if NAME.fullmatch(code) and code not in {"callbacks", *settings()}]
    return found


@pytest.mark.parametrize("page", PAGES)
def test_a_page_says_what_the_table_says(page: str) -> None:
    """Every name in a page's tables of settings is in the table or a setting, and what it is here agrees."""
    text = PAGES[page].read_text()
    assert sum(len(names) for names, _, _ in rows(text)) > 15
    assert faults(text) == []


def test_a_wrong_row_is_found() -> None:
    """A name that the table does not have, another setting than the table's, and a setting that is none."""
    page = "## Data\n| TRL | forge | note |\n|---|---|---|\n| `lrr` | `seed` | |\n| `lr` | `seed` | |\n| `seed` | `sed` | |\n"
    assert len(faults(page)) == 3


def test_every_library_has_a_page() -> None:
    """The eleven libraries of the table."""
    eight = {"ms-swift", "axolotl", "llama-factory", "mini-trainer", "torchtune", "training-hub", "trl", "unsloth"}
    assert set(PAGES) == eight | {"instructlab-training", "openrlhf", "verl"}


def test_the_example_of_instructlab_training() -> None:
    """Each argument of its call is one of the call below, by the table, and with the backend these are settings."""
    blocks = re.findall(r"```python\n(.*?)```", PAGES["instructlab-training"].read_text(), re.DOTALL)
    theirs, ours = (arguments(block, name) for block, name in zip(blocks, ("TrainingArgs", "sft"), strict=True))
    processes = arguments(blocks[0], "TorchrunArgs")["nproc_per_node"]
    wanted = {RENAMED.get(name, name): value for name, value in theirs.items() if name not in TOLD}
    assert {**wanted, "nproc_per_node": processes} == ours
    found = resolve(task_of("sft").settings, ("argument", {**ours, "backend": "instructlab-training"}))
    assert found.passed_on.sharding_strategy == "HYBRID_SHARD"


def arguments(code: str, function: str) -> dict[str, object]:
    """Keyword arguments of the call of a function in a block of code."""
    calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    (call,) = [node for node in calls if function in (getattr(node.func, "id", ""), getattr(node.func, "attr", ""))]
    return {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}


@pytest.mark.slow
def test_the_table_names_what_is_there() -> None:
    """No name of the table is a setting here, and what it leads to is one; settings of some verbs are listed with these."""
    assert ({*RENAMED, *SWITCHES, *TOLD} & settings()) == set(), "a setting of this name exists now: take it out of the table"
    assert set(RENAMED.values()) <= settings()
    for told in SWITCHES.values():
        name, _, value = told.partition("=")
        field = next(field for verb in VERBS for _, field in flat_fields(task_of(verb).settings) if field.name == name)
        assert value in (("true", "false") if field.type is bool else str(field.type)), told
    for command in COMMANDS.values():
        assert command.split()[0] in {*VERBS, "generate", "chat", "serve", "eval", "export", "data"}
    some = {name for name in settings() if not all(name in names_of(verb) for verb in VERBS)}
    assert set(OWN) == some
    for name, text in OWN.items():
        having = {verb for verb in VERBS if name in names_of(verb)}
        assert named(text) == having, name


def names_of(verb: str) -> set[str]:
    """Settings of a verb."""
    return {field.name for _, field in flat_fields(task_of(verb).settings)}


def named(text: str) -> set[str]:
    """Verbs that a row of `OWN` names: those it lists, or all others but those."""
    words = set(re.findall(r"[a-z]+", text))
    if "others" in words:
        return set(VERBS) - (set(re.findall(r"[a-z]+", text.partition(" but ")[2])) & set(VERBS))
    return words & set(VERBS)


@pytest.mark.parametrize("text", sorted({*TOLD.values()}))
def test_a_sentence_names_settings(text: str) -> None:
    """A word with an underscore or before "=" in a sentence of the table is a setting."""
    told = re.sub(r"rollouts/\S+|[^ ]+\.jsonl|RUN|\{[^}]*\}", "", text)
    assert {*re.findall(r"[a-z0-9]+(?:_[a-z0-9]+)+", told), *re.findall(r"(\w+)=", told)} <= settings() | {
        "adamw_8bit",
        "apollo_mini",
    }


def test_hints() -> None:
    """What the issue of this table asked for, word for word where it matters."""
    known = names_of("sft")
    for name, part in {
        "lr": "`learning_rate`",
        "base_model": "`model_path`",
        "load_in_4bit": "adapter=qlora",
        "load_in_8bit": "quant_type=int8",
        "report_to": "`trackers`",
        "gradient_accumulation_steps": "effective_batch_size is the samples of a whole step",
        "use_liger": "kernels=liger",
        "cut_cross_entropy": "logits are never held whole",
        "adamw_betas": "beta1 and beta2",
        "is_pretraining": "forge pretrain",
        "unmask_messages": "train_on=all",
        "osft": "forge osft",
        "group_size": "a setting of forge sdft, ppo, grpo and rloo",
        "block_size": "a setting of forge pretrain",
        "loss_type": "here it is `loss`",
        "freeze_vit": "here it is `freeze_vision_tower`, and `freeze_audio_tower`",
    }.items():
        assert part in (hint(name, known) or ""), name
    assert hint("nothing_of_the_sort", known) is None
    assert hint("beta", names_of("grpo")) == "here it is `kl_weight`"
