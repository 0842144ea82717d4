"""Shipped recipes: each says what it is for, is a recipe of its verb, and runs whole."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from forge.cli import _app as _cli
from forge.cli._recipes import as_verb
from forge.settings._recipe import read_recipe, verb_of
from forge.settings._shipped import about, shipped
from forge.verbs._registry import VERBS

from ..lanes import ci_keeps
from .recipes import NEEDS, TOKENS, needs_of, words_of, write_outline
from .starts import metrics

CI = ["sft-lora", "grpo"]


@pytest.mark.parametrize("name", shipped())
def test_a_recipe_says_what_it_is_for(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Its head has a title and five parts; it is right, and leaves model, data and directory to its user."""
    text = shipped()[name].read_text()
    head = text[: text.index("\nverb: ")]
    assert re.findall(r"^# (\w+): ", head, re.MULTILINE) == ["For", "Data", "Give", "Needs", "Gave"]
    assert len(about(shipped()[name])) > 20
    assert _cli.main(["config", "validate", str(shipped()[name])]) == 0
    assert "to be given: model_path, data_path" in capsys.readouterr().out
    assert {key for key in read_recipe(shipped()[name]) if key.endswith(("_path", "_dir"))} == set()


def test_there_is_one_for_everything() -> None:
    """At least 15: every verb, every family of adapters, several ranks."""
    recipes = {name: read_recipe(file) for name, file in shipped().items()}
    assert len(recipes) >= 15
    assert {verb_of(file) for file in shipped().values()} == set(VERBS)
    assert {recipe.get("adapter") for recipe in recipes.values()} >= {None, "lora", "qlora", "dora", "rslora", "ia3", "prompt"}
    assert any(recipe.get("nproc_per_node") for recipe in recipes.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", ci_keeps(CI, list(shipped())))
def test_a_recipe_runs(name: str, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`forge recipes run NAME key=value ...` trains, measures and exports."""
    words = words_of(name, model_dir, tmp_path, tmp_path / "run")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "forge_test_rewards", raising=False)
    assert _cli.main(words) == 0
    assert [line["step"] for line in metrics(tmp_path / "run") if "loss" in line] == [1, 2]
    assert (tmp_path / "run" / json.loads((tmp_path / "run" / "result.json").read_text())["model_dir"]).is_dir()


@pytest.mark.lane
@pytest.mark.parametrize("name", shipped())
def test_a_recipe_needs_what_it_says(name: str, model_dir: Path, tmp_path: Path) -> None:
    """Within 5 percent: the memory plan's worst phase, which `hatch run recipes` writes into its head."""
    said = NEEDS.search(shipped()[name].read_text())
    assert said is not None
    assert said[3].startswith(f" for a model of 1.24 billion parameters in micro-batches of {TOKENS:,} tokens")
    needs, phase = needs_of(name, write_outline(model_dir, tmp_path / "outline"), tmp_path)
    assert float(said[1]) == pytest.approx(needs, rel=0.05)
    assert said[2] == phase


@pytest.mark.slow
@pytest.mark.lane
def test_two_tasks_in_sequence(model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The second run of the OSFT recipe begins from the export of the first, which its last line names."""
    assert _cli.main(words_of("osft", model_dir, tmp_path, tmp_path / "first")) == 0
    export = capsys.readouterr().out.strip()
    assert _cli.main(words_of("osft", Path(export), tmp_path, tmp_path / "second")) == 0
    assert f"model_path: {export}" in (tmp_path / "second" / "config.yaml").read_text()


def test_values_are_read_as_yaml() -> None:
    """Lists, weighted paths, a template's arguments, switches; a sentence with a colon is a text."""
    given = {
        "data_path={a.jsonl: 0.75, b c.jsonl: 0.25}": ["--data-path", "a.jsonl=0.75", "b c.jsonl=0.25"],
        "data_path=[a.jsonl, b.jsonl]": ["--data-path", "a.jsonl", "b.jsonl"],
        "chat_template_kwargs={depth: 2, mode: '2'}": ["--chat-template-kwargs", "depth=2", 'mode="2"'],
        "reward_weights=[1, 0.5]": ["--reward-weights", "1", "0.5"],
        "reward=[rewards:a, rewards:b]": ["--reward", "rewards:a", "rewards:b"],
        "eval_prompts=Answer: what is a fig?": ["--eval-prompts", "Answer: what is a fig?"],
        "keep_best=false": ["--no-keep-best"],
        "learning_rate=1e-5": ["--learning-rate", "1e-5"],
    }
    assert as_verb(["recipes", "run", "grpo", *given])[2:] == [word for words in given.values() for word in words]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["recipes", "run", "kto", "model_path={a: 1}"], "model_path must be"),
        (["recipes", "run", "kto", "data_path=[-x]"], "begins with a dash"),
        (["recipes", "run", "kto", "seed=[1, 2]"], "seed must be a whole number, not [1, 2] (seed=[1, 2])"),
        (["recipes", "run", "kto", "k=[1,2]"], "unknown option --k"),
        (["sft", "--seed", "1", "2", "3"], "'3': nothing takes this here"),
        (["sft", "--seed", "1", "2", "3"], "`forge sft --help` lists what it takes"),
        (["export", "run", "to"], "forge export takes RUN, and as options --output, --merge, --dtype, --format."),
    ],
)
def test_values_that_nothing_takes_are_named(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """By setting, or as they were written; no inside words."""
    assert _cli.main(words) == 2
    assert said in capsys.readouterr().err


def test_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`ls`, `show` and `cp`; what is given beside `run` are settings, refused as those of the verb are."""
    monkeypatch.chdir(tmp_path)
    assert _cli.main(["recipes", "ls"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(shipped())
    assert _cli.main(["recipes", "show", "kto"]) == 0
    assert capsys.readouterr().out == shipped()["kto"].read_text()
    assert _cli.main(["recipes", "cp", "kto"]) == 0
    assert (tmp_path / "kto.yaml").read_text() == shipped()["kto"].read_text()
    capsys.readouterr()
    for words, part in (
        (["cp", "kto"], "exists already"),
        (["cp", "kto", "none/kto.yaml"], "cannot be written"),
        (["show", "kot"], "Did you mean 'kto'?"),
        (["run", "kto", "lr=3"], "unknown option --lr: here it is --learning-rate"),
        (["run", "kto", "blurb"], "'blurb' is no setting: write name=value"),
        (["run", "kto", "model_path=m", "data_path=d", "ckpt_output_dir=o", "--beta", "-1"], "beta"),
    ):
        assert _cli.main(["recipes", *words]) == 2
        assert part in capsys.readouterr().err
