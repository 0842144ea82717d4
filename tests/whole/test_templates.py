"""A few chat templates of those that `hatch run templates` checks: every turn is learned as it is asked, in CI too."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest

from ..lanes import ci_keeps
from .repository import ROOT

if TYPE_CHECKING:
    from pathlib import Path

sys.path.insert(0, str(ROOT / "tools"))

import template_check
from template_check import CASES, ITSELF, OTHERWISE, RIGHT

FOLDER = ROOT / "tests" / "forge-data" / "templates"
TEMPLATES = {
    "deepseek-r1-distill": "a prompt that opens a block of reasoning, and none that is written",
    "gpt-oss": "another stop token in the last turn",
    "llama-3.1": "a header of its own, a tool call of its own form",
    "mistral": "no generation prompt",
    "phi-3": "an EOS behind the last turn's own end",
    "qwen2.5": "tools, several results in one turn",
    "qwen3": "reasoning that is dropped from earlier turns, and can be turned off",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ci_keeps(["gpt-oss", "llama-3.1", "phi-3", "qwen3"], list(TEMPLATES)))
def test_every_turn_is_learned_as_it_is_asked(name: str) -> None:
    """Of fifteen conversations each is right, or the template refuses it, leaves a part of it out, or prompts otherwise."""
    answers = template_check.check((FOLDER / f"{name}.jinja").read_text(encoding="utf-8"), name)
    assert {case: answer for case, answer in answers.items() if answer["state"] not in (RIGHT, ITSELF, OTHERWISE)} == {}
    assert sum(answer["state"] == RIGHT for answer in answers.values()) >= 10


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple:
    """A tokenizer, what its template asks of a conversation of three answers, and the samples of that conversation."""
    import json

    import forge_data

    row = CASES["several turns"]
    tokenizer = template_check.tokenizer_of((FOLDER / "qwen2.5.jinja").read_text(encoding="utf-8"), "qwen2.5")
    home: Path = tmp_path_factory.mktemp("prepared")
    (home / "row.jsonl").write_text(json.dumps(row))
    store = forge_data.prepare(home / "row.jsonl", tokenizer, home / "store", progress=False)
    wanted = template_check.asked(tokenizer, row)
    assert wanted is not None
    return tokenizer, list(store), wanted.turns


def learned_otherwise(example, change):
    """The sample with other labels: `change` gets the mask of what is learned."""
    trained = example.labels != -100
    change(trained)
    return type(example).from_mask(example.input_ids, trained, example.segments, example.roles)


def first_turn(trained):
    """The first learned stretch of a mask."""
    begin = int(np.flatnonzero(trained)[0])
    return begin, begin + int(np.flatnonzero(~trained[begin:])[0])


def lost(trained):
    begin, end = first_turn(trained)
    trained[begin:end] = False


def without_its_end(trained):
    trained[first_turn(trained)[1] - 1] = False


def without_its_beginning(trained):
    trained[first_turn(trained)[0]] = False


def with_the_header(trained):
    trained[first_turn(trained)[0] - 1] = True


def with_the_user(trained):
    trained[3] = True


def with_a_hole(trained):
    trained[first_turn(trained)[0] + 1] = False


@pytest.mark.parametrize("change", [lost, without_its_end, without_its_beginning, with_the_header, with_the_user, with_a_hole])
def test_the_comparison_finds_one_wrong_label(prepared, change) -> None:
    """A turn that is lost, cut, learned with a token of its header or beside one of the user's is found."""
    tokenizer, (example,), turns = prepared
    assert template_check.compare(tokenizer, [example], turns) == ""
    assert template_check.compare(tokenizer, [learned_otherwise(example, change)], turns)


def test_the_comparison_finds_another_context(prepared) -> None:
    """The right labels behind one other token are wrong; so is a conversation that is learned twice."""
    tokenizer, (example,), turns = prepared
    ids = example.input_ids.copy()
    ids[2] += 1
    assert template_check.compare(tokenizer, [type(example)(ids, example.labels)], turns)
    assert template_check.compare(tokenizer, [example, example], turns)


# Ends a turn with nothing; the next message's marker is what the model would write.
UNENDED = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@pytest.mark.parametrize(("stop", "right"), [("<|user|>", True), ("</s>", True), ("<s>", False), ("<|assistant|>", False)])
def test_only_what_follows_a_turn_may_end_it(stop: str, right: bool) -> None:
    """Where the template writes no end, one token more is right if it is EOS or begins the next message."""
    import forge_data

    tokenizer, row = template_check.tokenizer_of(UNENDED + "{# <|user|> <|assistant|> #}", "unended"), CASES["single turn"]
    wanted = template_check.asked(tokenizer, row)
    assert wanted is not None
    (turn,) = wanted.turns[1]
    ids = [*turn.ids, tokenizer.convert_tokens_to_ids(stop)]
    begin = next(at for at, (_, end) in enumerate(turn.offsets) if end > len(turn.prompt))
    example = forge_data.TokenizedExample(np.array(ids, np.int32), np.array([-100] * begin + ids[begin:], np.int32))
    assert (template_check.compare(tokenizer, [example], wanted.turns) == "") == right
