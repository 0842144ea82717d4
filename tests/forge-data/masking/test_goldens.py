"""Real chat templates, and what is learned of conversations in them, written by hand as text in `golden/`."""

import re
from functools import cache

import pytest

from forge_data import ForgeDataError, tokenize

from ..families import FAMILIES, TEMPLATES
from ..golden import FOLDER, cases, disagreements, native

CASES = cases()
WRITTEN = [case for case in CASES if case.refusal != "always"]
MAKES = ["its own", "bytes", "tiktoken"]


@cache
def tokenizer_of(family, make="its own"):
    return FAMILIES[family].tokenizer(None if make == "its own" else make)


def named(chosen):
    return pytest.mark.parametrize("case", chosen, ids=[f"{case.family}: {case.name}" for case in chosen])


def test_every_family_has_its_page():
    """Every family has a golden file, and every template a family and a line about its source."""
    assert {file.stem for file in FOLDER.glob("*.txt")} == set(FAMILIES)
    files = {path.name for path in TEMPLATES.glob("*.jinja")}
    used = {name for family in FAMILIES.values() for _, name in family.files or (("", f"{family.name}.jinja"),)}
    assert files == used
    assert files == set(re.findall(r"`([\w.-]+\.jinja)`", (TEMPLATES / "README.md").read_text(encoding="utf-8")))


@named(WRITTEN)
def test_the_page_is_the_templates_own_text(case):
    """A golden text without its marks is what transformers renders, to the character."""
    assert native(tokenizer_of(case.family), case.row, tokenize=False) == case.text


@pytest.mark.parametrize("make", [MAKES[0], *(pytest.param(make, marks=pytest.mark.slow) for make in MAKES[1:])])
@named(WRITTEN)
def test_ids_and_labels(case, make):
    """The ids are the tokenizer's own, and exactly the text between the marks is learned."""
    tokenizer = tokenizer_of(case.family, make)
    try:
        example = tokenize(case.row, tokenizer, train_on=case.train_on, turns=case.turns)
    except ForgeDataError:
        if case.refusal == "allowed":
            return
        raise
    assert example.input_ids.tolist() == native(tokenizer, case.row)
    assert disagreements(tokenizer, example, case.pieces) == []


@named([case for case in CASES if case.refusal == "always"])
def test_refused(case):
    """Rows that a template leaves out or refuses are refused by name, with a remedy, and never guessed at."""
    with pytest.raises(ForgeDataError) as refused:
        tokenize(case.row, tokenizer_of(case.family), train_on=case.train_on, turns=case.turns)
    assert str(refused.value).startswith("row")
    assert ";" in str(refused.value) or "refuses the conversation" in str(refused.value)
