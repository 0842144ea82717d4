"""The system message that all training rows share: found from their tokens, and told of where it is not asked with."""

from __future__ import annotations

import io
import shutil
from pathlib import Path
from typing import Any

import pytest

import forge
import forge_data
from forge.cli._app import main
from forge.tasks._answers import Asked
from forge.tasks._lint_check import warn_of_system_message
from forge.tasks._system_message import shared_beginning, shared_system

from ...whole.conftest import conversations, write_model, write_rows

SYSTEM = "You rent out bikes.\nA bike costs 3 an hour, isn't that cheap?"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with a model and the rows that it was trained on, and no more."""
    path = tmp_path_factory.mktemp("run")
    model = write_model(path / "hf_format" / "samples_1")
    (path / "config.yaml").write_text(f"model_path: {model}\n")
    stored(path, "train", [SYSTEM] * 24)
    return path


def stored(run: Path, name: str, systems: list[str | None]) -> forge_data.TokenStore:
    """Conversations, each with its system message or with none, as tokens."""
    rows = conversations(len(systems))
    for row, system in zip(rows, systems, strict=True):
        row["messages"][:0] = [] if system is None else [{"role": "system", "content": system}]
    data = write_rows(run / f"{name}.jsonl", rows)
    return forge_data.prepare(data, run / "hf_format" / "samples_1", run / "data" / name, num_proc=1)


def test_one_that_all_share_is_read_from_the_tokens(run: Path) -> None:
    """As the text that was given; nothing where one row has another or none."""
    store = forge_data.TokenStore.open(run / "data" / "train")
    assert shared_system(store, store.tokenizer()) == SYSTEM
    for name, systems in (("none", [None] * 3), ("some", [SYSTEM, None, SYSTEM]), ("two", [SYSTEM, SYSTEM, "Be kind."])):
        other = stored(run, name, systems)
        assert shared_beginning(other) is None
        assert shared_system(other, store.tokenizer()) is None


def test_a_template_that_takes_none_gives_none(run: Path) -> None:
    """It raises for a conversation that has one."""
    store = forge_data.TokenStore.open(run / "data" / "train")
    tokenizer: Any = store.tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no system messages') }}"
    assert shared_system(store, tokenizer) is None


def test_who_asks_without_it_is_told(run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With the option that asks with it, of a run and of its export; who asks with it, or a model elsewhere, hears nothing."""
    said = (
        "asked without the system message of the training rows; with it: --system 'You rent out bikes.\nA bike costs 3 an hour"
    )
    for path, system, told in (
        (run, None, True),
        (run / "hf_format" / "samples_1", "Be kind.", True),
        (run, SYSTEM, False),
        (Path(shutil.copytree(run / "hf_format" / "samples_1", run / "elsewhere")), None, False),
    ):
        forge.generate(path, "hello", max_new_tokens=1, system=system)
        assert (said in capsys.readouterr().err) == told
    monkeypatch.setattr("sys.stdin", io.StringIO("/quit\n"))
    assert main(["chat", str(run)]) == 0
    assert said in capsys.readouterr().err


def test_a_run_says_it_of_its_prompts(run: Path) -> None:
    """Of texts and of messages without a system message; of rows that have none nothing is said."""
    noted: list[str] = []
    report: Any = type("Report", (), {"note": staticmethod(noted.append)})
    store = forge_data.TokenStore.open(run / "data" / "train")
    asked = [{"role": "user", "content": "hello"}]
    prompts = [Asked("hello", "a"), Asked(asked, "b"), Asked([{"role": "system", "content": SYSTEM}, *asked], "c")]
    warn_of_system_message(prompts, store, report)
    assert [line[:57] for line in noted] == ["WARNING: 2 prompts of eval_prompts will be asked without "]
    warn_of_system_message(prompts[2:], store, report)
    warn_of_system_message(prompts, stored(run, "bare", [None] * 3), report)
    assert len(noted) == 1
