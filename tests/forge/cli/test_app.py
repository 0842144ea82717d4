"""The command line itself: options, help, exit statuses."""

from __future__ import annotations

import inspect
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import cyclopts
import pytest

import forge
from forge.cli import _app as _cli
from forge.cli._train import verb_command
from forge.cli._words import _MEANT_OF
from forge.run import _run
from forge.settings._settings import dashed, flat_fields
from forge.verbs._registry import VERBS, task_of

from ...lanes import quick_keeps


@pytest.mark.parametrize("verb", quick_keeps(["sft", "osft", "grpo"], VERBS))
def test_help_names_every_setting(verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """`forge VERB --help` lists every setting with dashes, and exits with 0."""
    monkeypatch.setenv("COLUMNS", "120")
    assert _cli.main([verb, "--help"]) == 0
    text = capsys.readouterr().out
    for _, field in flat_fields(task_of(verb).settings):
        assert f"--{dashed(field.name)}" in text
    assert not re.search(r"\(\)|default: None|MAPPING", text)


def test_version_and_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    """`forge --version` prints it; an unknown command is answered with the nearest, status 2."""
    assert _cli.main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == forge.__version__
    for word, said in (("stf", "Did you mean 'sft'?"), ("lint", "Here it is `forge data lint`."), ("watch", "`forge report`")):
        assert _cli.main([word]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize("group", ["recipes", "config", "slurm", "kubeflow"])
def test_other_words_for_commands_of_a_command(group: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each is answered with the word here, which there is; a misspelt one with the nearest."""
    commands = {name for name in _cli.make_app(group)[group] if not name.startswith("-")}
    for here, others in _MEANT_OF[group].items():
        assert here in commands
        for other in others.split():
            assert other not in commands
            assert _cli.main([group, other, "x"]) == 2
            said = f"forge: unknown command '{group} {other}'. Here it is `forge {group} {here}`. Commands: "
            assert capsys.readouterr().err.startswith(said)
        assert _cli.main([group, here + "e"]) == 2
        assert f"Did you mean '{here}'?" in capsys.readouterr().err or len(here) < 3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["eval", "run"], "--tasks is required; `forge eval --help` describes it."),
        (["recipes", "cp"], "NAME is required; `forge recipes cp --help` describes it."),
        (["sft", "--learning-rate", "--seed", "3"], "--learning-rate needs a value; `forge sft --help` describes it."),
    ],
)
def test_what_is_missing_is_named(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An argument that is required, or the value of a flag, with status 2."""
    assert _cli.main(words) == 2
    assert capsys.readouterr().err == f"forge: {said}\n"


def test_commands_are_listed_by_what_they_are_for(capsys: pytest.CaptureFixture[str]) -> None:
    """Each under one heading: training first, `sft` at its head."""
    assert _cli.main(["--help"]) == 0
    lines = [line.strip(" │╭─╮") for line in capsys.readouterr().out.splitlines() if line[:1] in "│╭"]
    headings = ["Train", "Use a model", "Runs", "Data and recipes", "Clusters", "Options"]
    assert [line for line in lines if line in headings] == headings
    assert lines[lines.index("Train") + 1].split()[0] == "sft"
    words = {line.split()[0] for line in lines if line}
    assert words >= {*VERBS, *_cli._COMMANDS}


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RuntimeError("boom"), 1),
        (forge.SettingsError("no"), 2),
        (forge.PreemptedError("later"), 75),
        (KeyboardInterrupt(), 130),
    ],
)
def test_exit_statuses(
    error: BaseException, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bad input is 2, a failure 1, an interruption 130; one message each and no traceback."""

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(_run, "run", fail)
    assert _cli.main(["sft", "--model-path", "m", "--data-path", "d", "--ckpt-output-dir", "o"]) == status
    said = capsys.readouterr().err
    assert said.startswith("forge: ")
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (KeyboardInterrupt(), "interrupted."),
        (KeyboardInterrupt("all is lost."), "interrupted: all is lost."),
        (_cli.Terminated("SIGTERM"), "terminated."),
        (_cli.Terminated("SIGTERM: all is lost."), "terminated: all is lost."),
    ],
)
def test_an_interruption_says_what_became_of_the_run(
    error: BaseException, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, with what the run says of its end, where there was one."""

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(_run, "run", fail)
    assert _cli.main(["sft", "--model-path", "m", "--data-path", "d", "--ckpt-output-dir", "o"]) in (130, 143)
    assert capsys.readouterr().err == f"forge: {said}\n"


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_second_signal_does_not_change_a_saved_end(
    second: signal.Signals, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It comes while a preempted run is cleaned up after, or answered: the status stays 75, with the one message."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGTERM, signal.SIGHUP)}

    def fail(*_: object) -> None:
        try:
            raise forge.PreemptedError("its state is saved")
        finally:
            signal.raise_signal(second)

    show = _cli.printable

    def shown(*given: object, **kwargs: object) -> str:
        signal.raise_signal(second)
        return show(*given, **kwargs)

    monkeypatch.setattr(_run, "run", fail)
    monkeypatch.setattr(_cli, "printable", shown)
    try:
        assert _cli.main(["sft", "--model-path", "m", "--data-path", "d", "--ckpt-output-dir", "o"]) == 75
        assert [signal.getsignal(number) for number in before] == [signal.SIG_DFL, signal.SIG_DFL]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
    assert capsys.readouterr().err == "forge: its state is saved\n"


def test_a_message_cannot_control_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The name of a file in a message may hold an escape sequence or a mark that reorders text; lines stay lines."""

    def fail(*_: object) -> None:
        raise forge.SettingsError("a\x1b[2J\u202e.jsonl\nmore")

    monkeypatch.setattr(_run, "run", fail)
    assert _cli.main(["sft", "--model-path", "m", "--data-path", "d", "--ckpt-output-dir", "o"]) == 2
    assert capsys.readouterr().err == "forge: a\\x1b[2J\\u202e.jsonl\nmore\n"


def test_a_list_setting_takes_words_and_repeats() -> None:
    """`--target-modules a b` and `--target-modules a --target-modules b` are one list."""
    app = _cli.make_app("sft")
    for words in (["--target-modules", "a", "b"], ["--target-modules", "a", "--target-modules", "b"]):
        _, bound, *_ = app.parse_args(["sft", *words], exit_on_error=False, print_error=False)
        assert tuple(bound.kwargs["target_modules"]) == ("a", "b")
        assert set(bound.kwargs) == {"target_modules"}, "a flag that was not given is not a flag"


@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS)
def test_help_names_first_what_most_runs_give(verb: str) -> None:
    """A line before the hundred others: flags that the verb has, what it requires among them."""
    about = inspect.getdoc(verb_command(task_of(verb)))
    assert about is not None
    (line,) = [line for line in about.splitlines() if line.startswith("Most runs give no more than ")]
    named = {flag.removeprefix("--").replace("-", "_") for flag in re.findall(r"--[a-z-]+", line)}
    assert {"model_path", "data_path", "ckpt_output_dir", "learning_rate"} <= named
    assert named <= {field.name for _, field in flat_fields(task_of(verb).settings)}


def test_help_loads_no_torch() -> None:
    """`forge sft --help` imports neither torch nor transformers."""
    code = (
        "import sys\nfrom forge.cli._app import main\nmain(['sft', '--help'])\n"
        "assert not {'torch', 'transformers', 'numba', 'trl'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.slow
@pytest.mark.parametrize("words", [["recipes", "ls"], ["--help"], ["sft", "--help"]])
def test_a_reader_that_has_enough_ends_a_command_without_a_word(words: list[str]) -> None:
    """`forge recipes ls | head` and a page of help print no error, and no traceback at the interpreter's end."""
    read, write = os.pipe()
    os.close(read)
    ended = subprocess.run([sys.executable, "-m", "forge", *words], check=False, stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert (ended.returncode, ended.stderr) == (141, b"")


@pytest.mark.parametrize(
    "words", [["sft", "--seed", "1.5"], ["generate", "m", "hi", "--max-new-tokens", "1.5"], ["sft", "--max-steps", "1e2"]]
)
def test_whole_numbers_are_not_rounded(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """1.5 where a whole number is meant is refused, not rounded."""
    assert _cli.main(words) == 2
    assert words[-1] in capsys.readouterr().err


def test_a_name_does_not_look_like_a_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The end of a line in a name that was given is escaped: each printed line is forge's own."""
    name = f"{tmp_path}/nothing\nforge: finished; the model is in /tmp/evil\x1b[8m"
    words = ["sft", f"--model-path={name}", "--data-path", "rows.jsonl", "--ckpt-output-dir", str(tmp_path / "run")]
    assert _cli.main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "nothing\\nforge: finished; the model is in /tmp/evil\\x1b[8m" in line


def test_a_current_directory_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A shell whose directory was removed is told of it, and not of a defect."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    words = ["sft", "--model-path", "/m", "--data-path", "/d", "--ckpt-output-dir", "/o"]
    assert (_cli.main(words), capsys.readouterr().err) == (
        2,
        "forge: the current directory is gone: change to one that is there.\n",
    )


def test_an_exception_makes_no_exit_status_of_success(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever an exception says of itself, the command that it ends failed."""

    class Fine(Exception):
        exit_status = 0

    def fail(*_: object) -> None:
        raise Fine

    monkeypatch.setattr(_run, "run", fail)
    assert _cli.main(["sft", "--model-path", "m", "--data-path", "d", "--ckpt-output-dir", "o"]) == 1


@pytest.mark.parametrize(
    ("code", "status", "shown"), [(None, 1, ""), (0, 1, "0"), (3, 3, "3"), (75, 1, "75"), ("no", 1, "'no'")]
)
def test_what_ends_the_process_is_said(
    code: Any, status: int, shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A reward function that calls `sys.exit()` makes no run that looks finished, nor one whose state is saved."""
    monkeypatch.setattr(_run, "run", lambda *_: sys.exit(code))
    assert _cli.main(["sft", "--model-path", "m", "--data-path", "d", "--ckpt-output-dir", "o"]) == status
    said = (
        rf"forge: the run was ended by sys\.exit\({shown}\) at .*test_app\.py:\d+, and is not finished\. Raise an error there"
    )
    assert re.match(said, capsys.readouterr().err)


@pytest.mark.parametrize(("code", "status"), [(0, 1), (3, 3), ("no", 1)])
def test_a_command_that_is_ended_has_not_finished(code: object, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    """A preprocessing that calls `sys.exit(0)` ended `forge data lint` with status 0."""
    app = cyclopts.App()
    app.default(lambda: sys.exit(code))  # type: ignore[arg-type]
    assert _cli.main([], lambda *_: app) == status
    assert re.match(rf"forge: ended by sys\.exit\({code!r}\) at .*test_app\.py:\d+\.$", capsys.readouterr().err)


@pytest.mark.parametrize(("rank", "printed"), [(None, "forge: terminated.\n"), ("0", "forge: terminated.\n"), ("1", "")])
def test_a_rank_that_torchrun_ends_says_nothing(
    rank: str | None, printed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """SIGTERM while a command works is one line with status 143; of other ranks than the first it is the launcher's doing."""
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(_cli, "check_words", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    assert _cli.main(["sft", "--model-path", "m"]) == 143
    assert capsys.readouterr().err == printed


def test_a_copy_of_a_recipe_goes_where_nothing_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A directory that is missing, or a file, is named as such; a link to nothing stays."""
    (tmp_path / "link.yaml").symlink_to(tmp_path / "gone")
    (tmp_path / "file").write_text("")
    for place, said in (
        (
            "none/mine.yaml",
            f"cannot be written: {tmp_path / 'none'} does not exist. Make that directory, or give another file.",
        ),
        (
            "file/mine.yaml",
            f"cannot be written: {tmp_path / 'file'} is no directory. Make that directory, or give another file.",
        ),
        ("link.yaml", "exists already, and nothing is written over it. Give another file."),
    ):
        assert _cli.main(["recipes", "cp", "sft", str(tmp_path / place)]) == 2
        assert capsys.readouterr().err == f"forge: {tmp_path / place}: {said}\n"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "link.yaml"]
