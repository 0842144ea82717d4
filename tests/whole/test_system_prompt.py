"""`system_prompt`: a run learns its conversations with that message, and is asked with it afterwards."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import forge
from forge.cli._app import main
from forge.saving._system_prompt import run_system_prompt
from forge.talking._model import AnsweringModel
from forge.tasks._system_message import PROMPT_FILE

from .conftest import conversations, write_rows

PROMPT = "Answer in one word, isn't that nice?"
SYSTEM = {"role": "system", "content": PROMPT}
ASKED = "what colour has the fig?"
USER = {"role": "user", "content": ASKED}
SHORT: dict[str, Any] = {"max_steps": 1, "effective_batch_size": 4, "max_tokens_per_gpu": 512, "learning_rate": 1e-2}

pytestmark = pytest.mark.usefixtures("unchecked_exports")


@pytest.fixture(scope="module")
def run(model_dir: Path, chats: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was given the message on the command line, and asked two prompts while it trained."""
    path = tmp_path_factory.mktemp("run")
    own = write_rows(path / "asked.jsonl", [{"messages": [{"role": "system", "content": "Rhyme."}, USER]}])
    words = ["--model-path", model_dir, "--data-path", chats, "--ckpt-output-dir", path / "run", "--system-prompt", PROMPT]
    words += ["--eval-prompts", ASKED, own, "--eval-max-new-tokens", 2]
    words += [word for name, value in SHORT.items() for word in (f"--{name.replace('_', '-')}", value)]
    assert main(["sft", *map(str, words)]) == 0
    return path / "run"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Conversations that models are asked, each answered by one word."""
    found: list[Any] = []

    def answer(self: Any, messages: Any, *_: Any, **__: Any) -> str:
        found.append(messages)
        return "red"

    monkeypatch.setattr(AnsweringModel, "answer", answer)
    return found


@pytest.mark.slow
def test_a_run_is_that_of_rows_written_with_it(run: Path, model_dir: Path, tmp_path: Path) -> None:
    """The same tokens are learned, the log counts rows, and the record has the text."""
    rows = [{"messages": [SYSTEM, *row["messages"]]} for row in conversations()]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    written = forge.data.prepare(data, model_dir, tmp_path / "store", num_proc=1)
    store = forge.data.TokenStore.open(run / "data" / "train")
    assert len(store) == len(written)
    for found, expected in zip(store, written, strict=True):
        assert np.array_equal(found.input_ids, expected.input_ids)
        assert np.array_equal(found.labels, expected.labels)
    assert store.accounting.forms == {"with_system_prompt": len(rows)}
    assert run_system_prompt(next((run / "hf_format").glob("samples_*"))) == PROMPT


@pytest.mark.slow
def test_prompts_while_it_trains_have_it(run: Path) -> None:
    """Before a text; one that has its own is asked with that."""
    lines = [json.loads(line) for line in (run / "answers.jsonl").read_text().splitlines()]
    own = [{"role": "system", "content": "Rhyme."}, USER]
    assert [line["prompt"] for line in lines] == [[SYSTEM, USER], own] * 2
    assert "WARNING" not in (run / "log.txt").read_text()


@pytest.mark.slow
def test_the_run_is_asked_with_it(run: Path, asked: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    """Unless another one is given, or an empty one, by its path and by its export's; which is said."""
    (export,) = (run / "hf_format").glob("samples_*")
    said = "asked with the run's system_prompt 'Answer in one word, isn'\"'\"'t that nice?'; without it: --system ''"
    for path in (run, export):
        forge.generate(path, ASKED)
        assert said in capsys.readouterr().err
    for system in ("Rhyme.", ""):
        assert main(["generate", str(run), ASKED, "--system", system]) == 0
        assert "asked without the system message of the training rows" in capsys.readouterr().err
    assert asked == [[SYSTEM, USER]] * 2 + [[{"role": "system", "content": "Rhyme."}, USER], [USER]]


@pytest.mark.slow
def test_a_copy_of_an_export_is_asked_with_it(
    run: Path, asked: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the export of a run, and of what `forge export` makes of it, of a copy; a file that is damaged is named."""
    (export,) = (run / "hf_format").glob("samples_*")
    copy = shutil.copytree(export, tmp_path / "deep" / "er" / "copy")
    again = forge.export(copy, tmp_path / "deep" / "again")
    for path in (copy, again):
        forge.generate(path, ASKED)
        assert "asked with the run's system_prompt" in capsys.readouterr().err
    assert asked == [[SYSTEM, USER]] * 2
    for damaged in ("{", "[1]", '{"system_prompt": 1}'):
        (copy / PROMPT_FILE).write_text(damaged)
        with pytest.raises(forge.SettingsError, match=rf"{PROMPT_FILE}: is not what an export writes.* remove it"):
            forge.generate(copy, ASKED)
    (copy / PROMPT_FILE).unlink()
    forge.generate(copy, ASKED)
    assert asked[2:] == [[USER]]


@pytest.mark.slow
def test_a_conversation_begins_with_it(
    run: Path, model_dir: Path, asked: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the run alone where a base answers beside it; /reset keeps it, /system replaces it or takes it out."""
    lines = f"{ASKED}\n/reset\n{ASKED}\n/system Rhyme.\n{ASKED}\n/system\n{ASKED}\n/quit\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    assert main(["chat", str(run), "--beside", str(model_dir)]) == 0
    rhyme = [{"role": "system", "content": "Rhyme."}, USER]
    assert asked == [[SYSTEM, USER], [USER]] * 2 + [rhyme] * 2 + [[USER]] * 2
    assert "asked with the run's system_prompt" in capsys.readouterr().err


@pytest.mark.slow
def test_a_server_is_told_of_it(run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The server's process is given the text, or none for an empty one."""
    commands: list[list[str]] = []

    class Server:
        def __init__(self, command: list[str], **_: object) -> None:
            commands.append(command)

        def wait(self, *_: object) -> int:
            return 0

        def poll(self) -> int:
            return 0

    monkeypatch.setattr("forge.talking._serve.subprocess.Popen", Server)
    monkeypatch.setattr("forge.talking._serve.find_spec", lambda _: True)
    monkeypatch.setattr("forge.talking._serve._check_address", lambda *_: None)  # whether 8000 is taken here
    for system in (None, "Rhyme.", ""):
        forge.serve(run, system=system)
    assert [command[4] for command in commands] == [PROMPT, "Rhyme.", ""]
    assert capsys.readouterr().err.count("are given the run's system_prompt") == 1


@pytest.mark.slow
def test_another_one_is_no_resume(run: Path, model_dir: Path, chats: Path) -> None:
    """The run's steps were made with the former, which the error shows."""
    given = {**SHORT, "model_path": model_dir, "data_path": chats, "ckpt_output_dir": run, "max_steps": 2}
    with pytest.raises(forge.SettingsError, match="now `system_prompt` is Rhyme"):
        forge.sft(**given, system_prompt="Rhyme.")


@pytest.mark.parametrize(
    ("row", "error", "said"),
    [
        ({"prompt": "a ", "completion": "b"}, forge.data.DataError, "has no effect: .* only a conversation has a system"),
        ({"messages": [SYSTEM, *conversations(1)[0]["messages"]]}, forge.SettingsError, "every row has a system message of"),
    ],
)
def test_one_that_no_row_is_given_is_refused(
    row: dict[str, Any], error: type[Exception], said: str, model_dir: Path, tmp_path: Path
) -> None:
    """Text, and rows that have messages of their own: the model would be asked with what it never learned."""
    data = write_rows(tmp_path / "rows.jsonl", [row] * 8)
    given = {**SHORT, "model_path": model_dir, "data_path": data, "ckpt_output_dir": tmp_path / "run"}
    with pytest.raises(error, match=f"system_prompt.*{said}"):
        forge.sft(**given, system_prompt=PROMPT)
    assert not list((tmp_path / "run").glob("hf_format/*"))


def test_a_verb_without_conversations_has_no_such_setting(tmp_path: Path) -> None:
    """Documents have no system message, and texts that are embedded have prefixes."""
    for verb in (forge.pretrain, forge.embed):
        with pytest.raises(forge.SettingsError, match="system_prompt"):
            verb(model_path="m", data_path="d", ckpt_output_dir=tmp_path / "run", system_prompt=PROMPT)
