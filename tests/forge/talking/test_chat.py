"""What a model writes is shown as text."""

from __future__ import annotations

import builtins
import io
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import pytest

from forge import SettingsError
from forge.talking._chat import _converse, _lines, _Side, _typed, visible
from forge.talking._model import Sampling


def test_control_characters_are_escaped() -> None:
    """None reaches the terminal; line ends, tabs and joined signs stay."""
    assert visible("a\x1b[2J\rb\x9b1m\x08\n\tc") == "a\\x1b[2J\\rb\\x9b1m\\x08\n\tc"
    assert visible("👩\u200d🚀 é") == "👩\u200d🚀 é"


class Stopped(KeyboardInterrupt):
    """SIGTERM, as the command line raises it."""


@pytest.mark.parametrize(("error", "goes_on"), [(KeyboardInterrupt, True), (Stopped, False)])
def test_ctrl_c_ends_an_answer_and_sigterm_the_conversation(
    error: type[BaseException], goes_on: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was shown of the answer is part of the history."""

    class Model:
        takes_media = False

        def answer(self, asked: object, sampling: object, shown: Callable[[str], None], *, media: object) -> str:
            """Say half an answer."""
            shown("half an ")
            raise error

    side = _Side("model", cast("Any", Model()))
    side.forget("be kind")
    with nullcontext() if goes_on else pytest.raises(Stopped):
        side.say("what?", [], Sampling())
    if goes_on:
        assert capsys.readouterr().out == "half an  (stopped)\n"
        assert side._history[-1] == {"role": "assistant", "content": "half an"}


def test_ctrl_c_between_two_answers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One that comes as an answer has ended does not end the conversation."""

    class Side:
        takes_media, forget = False, print

        def say(self, line: str, *_: object) -> None:
            """Take the signal behind what catches it."""
            print(line)
            raise KeyboardInterrupt

    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\n"))
    _converse([cast("Any", Side())], None, Sampling())
    assert "one\n (stopped)\ntwo\n (stopped)\n" in capsys.readouterr().out


def test_a_pipe_that_is_not_utf8_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of it is answered in another encoding."""
    for stdin in (io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), encoding="utf-8"), io.StringIO("caf\udce9\n")):
        monkeypatch.setattr(sys, "stdin", stdin)
        with pytest.raises(SettingsError, match="standard input is not UTF-8"):
            list(_lines())


def test_a_pipe_in_the_encoding_of_the_locale(monkeypatch: pytest.MonkeyPatch) -> None:
    """UTF-8 where PYTHONIOENCODING is ascii is not said to be none."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("café\n".encode()), encoding="ascii"))
    with pytest.raises(SettingsError, match="not ascii, which PYTHONIOENCODING .* PYTHONIOENCODING=utf-8 has UTF-8 read"):
        list(_lines())


def test_a_line_goes_on_behind_a_backslash(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many lines as end with one are one question."""
    typed = iter(["def f():\\", "    return 1\\", "", "next"])
    monkeypatch.setattr(builtins, "input", lambda _: next(typed))
    assert [_typed(), _typed()] == ["def f():\n    return 1\n", "next"]


def test_files_and_paths_of_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A file may be quoted, as a terminal does with one that is dragged; a question may begin with a path."""

    class Side:
        takes_media = True

        def forget(self, _: object) -> None:
            """Begin anew."""

        def say(self, line: str, media: list[Any], _: object) -> None:
            """Show what came."""
            print(line, [Path(each.path).name for each in media])

    (tmp_path / "my plum.png").touch()
    folder = str(tmp_path)
    lines = [f"/image '{folder}/my plum.png'", f"/image {folder}/my\\ plum.png", f"/image {folder}/my plum.png", "what?"]
    lines += ["/image", "/image it's", "/etc/passwd has what?", "/quit2", "/"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines) + "\n"))
    _converse([cast("Any", Side())], None, Sampling())
    told = capsys.readouterr()
    assert told.out.splitlines() == ["what? ['my plum.png', 'my plum.png', 'my plum.png']", "/etc/passwd has what? []"]
    assert told.err.splitlines()[:5] == [
        "with the next line: my plum.png",
        "with the next line: my plum.png, my plum.png",
        "with the next line: my plum.png, my plum.png, my plum.png",
        "/image which? Give a file: /image FILE",
        "image it's: there is no such file. Give a PNG, JPEG or WebP file.",
    ]
    assert [each.partition(":")[0] for each in told.err.splitlines()[5:]] == [
        "there is no command /quit2",
        "there is no command /",
    ]
