"""What a model writes is shown as text."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, cast

import pytest

from forge import SettingsError
from forge.talking._chat import _lines, _Side, visible
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
