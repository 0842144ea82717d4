"""The page of an online run's rollouts: what was sampled, what it was worth, and nothing that its texts could do."""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING

import pytest

from forge.cli._app import main
from forge.reports._rollouts import rollouts

from .test_report import HOSTILE, Elements, make_run

if TYPE_CHECKING:
    from pathlib import Path


def write_rollout(run: Path, step: int, words: str = "plain", prompts: int = 2) -> Path:
    """A rollout of two completions a prompt, as forge_algos writes it."""
    lines = [{"rollout": 1, "seed": 0, "prompts": prompts, "completions": 2 * prompts, "functions": ["a", "b"]}]
    lines += [
        {
            "group": group,
            **({"row": 10 + group, "prompt": f"prompt {group} {words}", "prompt_ids": [1]} if not which else {}),
            "completion": words if which else "",
            "reward": 1.5 if which else None,
            "scores": {"a": 1.0, "b": 0.5 if which else None},
            "finished": bool(which),
            "trained": bool(which),
            "completion_ids": [1, 2, 3],
            "advantages": [0.5, None, 1.0] if which else [],
        }
        for group in range(prompts)
        for which in range(2)
    ]
    file = run / "rollouts" / f"step_{step}.jsonl"
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    return file


def test_every_completion_stands_under_its_prompt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With its reward, each function's own, its advantage and what became of it; unscored is a dash."""
    run = make_run(tmp_path / "run")
    write_rollout(run, 1)
    assert main(["rollouts", str(run)]) == 0
    assert capsys.readouterr().out.strip() == str(run / "rollouts.html")
    words = " ".join(Elements((run / "rollouts.html").read_text()).words.split())
    assert "prompt 10 prompt 0 plain reward –, 3 tokens, cut off, not trained on a 1, b –" in words
    assert "reward 1.5, advantage +0.75 , 3 tokens a 1, b 0.5 plain" in words
    assert "4 completions, mean reward 1.5" in words


def test_words_make_no_elements(tmp_path: Path) -> None:
    """Hostile prompts and completions are only text."""
    pages = []
    for name, words in (("plain", "plain"), ("hostile", HOSTILE)):
        run = make_run(tmp_path / name)
        write_rollout(run, 1, words)
        pages.append(Elements(rollouts(run).read_text()))
    assert pages[0].tags == pages[1].tags
    assert f"prompt 0 {HOSTILE}" in pages[1].words


def test_a_line_ends_at_a_newline_alone(tmp_path: Path) -> None:
    """Texts hold other ends of lines (U+2028, U+0085), which stand in the file as they are."""
    run = make_run(tmp_path / "run")
    write_rollout(run, 1, "one\u2028two\x85three")
    assert "prompt 0 one\u2028two\x85three" in Elements(rollouts(run).read_text()).words


def test_a_long_run_has_a_short_page(tmp_path: Path) -> None:
    """Twelve rollouts from the first to the last, eight prompts each; one step's rollout has all of its prompts."""
    run = make_run(tmp_path / "run")
    for step in range(1, 60, 2):
        write_rollout(run, step, prompts=9)
    words = Elements(rollouts(run).read_text()).words
    shown = [step for step in range(1, 60, 2) if f"Step {step} " in words]
    assert (len(shown), shown[0], shown[-1]) == (12, 1, 59)
    assert {after - before for before, after in itertools.pairwise(shown)} <= {4, 6}
    assert "And 1 more prompts" in words
    words = Elements(rollouts(run, step=8).read_text()).words
    assert "Step 7 " in words
    assert "prompt 8 plain" in words


@pytest.mark.parametrize(
    ("content", "words", "said"),
    [
        (None, [], "has no rollouts"),
        ("{}\n", [], "cannot be read as a rollout"),
        ('{"completions": 2}\n', [], "it has 0 of 2 completions"),
        ('{"completions": 1}\n[]\n', [], "cannot be read as a rollout"),
        ('{"completions": 0}\n', ["--step", "2"], "--step 2: was trained on no rollout"),
    ],
)
def test_what_cannot_be_shown_is_named(
    tmp_path: Path, content: str | None, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run without rollouts, a damaged one, a step that was not made: status 2, no page."""
    run = make_run(tmp_path / "run")
    if content is not None:
        (run / "rollouts").mkdir()
        (run / "rollouts" / "step_3.jsonl").write_text(content)
    assert main(["rollouts", str(run), *words]) == 2
    assert said in capsys.readouterr().err
    assert not (run / "rollouts.html").exists()
