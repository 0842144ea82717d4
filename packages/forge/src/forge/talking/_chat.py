"""Lines of a person or a pipe → a conversation with a model, or with two side by side."""

from __future__ import annotations

import re
import shlex
import sys
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import forge_data
from forge._errors import SettingsError
from forge.talking._generate import check_text, undecoded
from forge.talking._model import AnsweringModel, Kind, Sampling, check_medium, find_model, with_media

_HELP = (
    "/reset forgets the conversation, /system TEXT changes the system message (and forgets it too), /quit ends. A line "
    "that ends with a backslash goes on in the next."
)
_HELP_OF_MEDIA = f"/image, /video and /audio FILE go with the next line, {_HELP}"


class _Side:
    """One model and its own history of the conversation."""

    def __init__(self, name: str, model: AnsweringModel) -> None:
        self.name, self._model = name, model
        self.takes_media = model.takes_media
        self._history: list[dict[str, Any]] = []
        self._media: list[forge_data.Media] = []

    def forget(self, system: str | None) -> None:
        """Begin anew with a system message: the run's own for None, none for an empty one."""
        system = self._model.system(None) if system is None else system
        self._history = [{"role": "system", "content": system}] if system else []
        self._media = []

    def say(self, line: str, media: Sequence[forge_data.Media], sampling: Sampling) -> None:
        """Show the answer while it is made; Ctrl-C ends it, and what was shown stays in the history."""
        made: list[str] = []

        def show(text: str) -> None:
            made.append(text)
            print(visible(text), end="", flush=True)

        content, own = with_media(line, media)
        asked = [*self._history, {"role": "user", "content": content}]
        given = [*self._media, *own]
        try:
            self._model.answer(asked, sampling, show, media=given)
            if not "".join(made).strip():
                print(f"({self._model.about_answer})", end="")
        except KeyboardInterrupt as stopped:
            _only_ctrl_c(stopped)
            print(" (stopped)", end="")
        finally:
            print()
        self._history, self._media = [*asked, {"role": "assistant", "content": "".join(made).strip()}], given


def _only_ctrl_c(stopped: KeyboardInterrupt) -> None:
    """Raise it again where it is not Ctrl-C: the command line has SIGTERM as a subclass."""
    if type(stopped) is not KeyboardInterrupt:
        raise stopped


def visible(text: str) -> str:
    r"""Escape control characters of an answer, so that none reaches the terminal.

    >>> print(visible("\x1b[2Jred and\r\x08green"))
    \x1b[2Jred and\r\x08green
    """
    return "".join(repr(sign)[1:-1] if unicodedata.category(sign) == "Cc" and sign not in "\n\t" else sign for sign in text)


def chat(
    model_path: str | Path,
    *,
    beside: str | Path | None = None,
    system: str | None = None,
    max_new_tokens: int = 512,
    temperature: float = 0.0,
    stop: Sequence[str] = (),
    seed: int = 42,
) -> None:
    """Talk with a model: it answers each line of standard input, and remembers what was said.

    A typed line that ends with a backslash goes on in the next. Lines that begin with a slash are commands: /image, /video and
    /audio FILE go with the next line, /reset forgets the conversation, /system TEXT changes the system message, /quit ends.
    Ctrl-C ends an answer, and twice at the prompt the conversation.

    Args:
        model_path: A model directory, an adapter directory, a run directory (its last export), or a hub name.
        beside: A second model, such as the base, that answers each line too, in a conversation of its own.
        system: A system message before the conversation. By default the `system_prompt` of each model's run, if it has one; ""
            for none.
        max_new_tokens: Stop an answer after so many tokens.
        temperature: 0 always takes the likeliest token; a higher one samples more freely.
        stop: Texts at which an answer ends.
        seed: Seed of the sampling.

    Raises:
        SettingsError: a value is out of range, there is no model at a path, or it has no chat template.
        forge_dist.ModelError: a model cannot be loaded, or the hub cannot be asked for it.

    """
    sampling = Sampling(max_new_tokens=max_new_tokens, temperature=temperature, stop=tuple(stop))
    paths = [model_path, *([] if beside is None else [beside])]
    for path in paths:
        find_model(path)
    if system:
        check_text("a line", system)
    sides = []
    for path in paths:
        model = AnsweringModel(path, seed=seed)
        print(model.about, file=sys.stderr)
        if not model.converses:
            raise SettingsError(f"{path}: has no chat template, so it cannot converse; `forge generate` continues a text.")
        if (said := model.about_system(system)) is not None:
            print(said, file=sys.stderr)
        sides.append(_Side(str(path), model))
    print(_help(sides), file=sys.stderr)
    _converse(sides, system, sampling)


_MEDIA: dict[str, Kind] = {"/image": "image", "/video": "video", "/audio": "audio"}


_COMMAND = re.compile(r"/\w*")


def _file(typed: str, command: str) -> str:
    """Return the file that a command names.

    A terminal into which one is dragged quotes its blanks.

    Raises:
        SettingsError: it names none.
    """
    if not typed:
        raise SettingsError(f"{command} which? Give a file: {command} FILE")
    if Path(typed).expanduser().exists():
        return typed
    try:
        words = shlex.split(typed)
    except ValueError:
        return typed
    return words[0] if len(words) == 1 else typed


def _help(sides: list[_Side]) -> str:
    return _HELP_OF_MEDIA if any(side.takes_media for side in sides) else _HELP


def _converse(sides: list[_Side], system: str | None, sampling: Sampling) -> None:
    for side in sides:
        side.forget(system)
    media: list[forge_data.Media] = []
    for line in _lines():
        command, _, rest = line.partition(" ")
        if not _COMMAND.fullmatch(command):  # a path may begin a question
            command = ""
        if command == "/quit":
            return
        if (kind := _MEDIA.get(command)) is not None:
            try:
                media.append(check_medium(_file(rest.strip(), command), kind))
                print(f"with the next line: {visible(', '.join(Path(str(each.path)).name for each in media))}", file=sys.stderr)
            except SettingsError as error:
                print(error, file=sys.stderr)
            continue
        if command in ("/reset", "/system"):
            media = []
            system = rest.strip() if command == "/system" else system
            for side in sides:
                side.forget(system)
            print("the conversation begins anew" + (f", with the system message {system!r}" if system else ""), file=sys.stderr)
            continue
        if command == "/help":
            print(_help(sides), file=sys.stderr)
            continue
        if command:
            print(f"there is no command {command}: {_help(sides)}", file=sys.stderr)
            continue
        for side in sides:
            try:
                if len(sides) > 1:
                    print(f"[{visible(side.name)}]")
                side.say(line, media, sampling)
            except KeyboardInterrupt as stopped:
                _only_ctrl_c(stopped)
                print(" (stopped)")
            except SettingsError as error:
                print(f"{error} /reset forgets it.", file=sys.stderr)
            except forge_data.ForgeDataError as error:
                print(error, file=sys.stderr)
        media = []


def _typed() -> str:
    """Return a line that is typed, with those that follow where it ends with a backslash."""
    line = input("> ")
    while line.endswith("\\"):
        line = f"{line[:-1]}\n{input('. ')}"
    return line


def _lines() -> Iterator[str]:
    """Yield the lines that are typed, or that a pipe holds, without empty ones.

    Raises:
        SettingsError: a line of a pipe is not UTF-8; of a typed one that is said, and the next is read.

    """
    typed = sys.stdin.isatty()
    if typed:
        import readline  # noqa: F401 - gives input() a history and keys to edit with
    asked_to_end = False
    while True:
        try:
            line = _typed() if typed else sys.stdin.readline()
            if line.strip():
                check_text(line, None)
        except EOFError:
            print(file=sys.stderr)
            return
        except KeyboardInterrupt as stopped:
            _only_ctrl_c(stopped)
            if not typed:
                raise
            print(file=sys.stderr)
            if asked_to_end:
                return
            asked_to_end = True
            print("Ctrl-C again, Ctrl-D or /quit ends.", file=sys.stderr)
            continue
        except (UnicodeDecodeError, SettingsError) as error:
            if not typed:
                raise SettingsError(f"standard input is not {undecoded(error)}") from error
            print(f"this line is not {undecoded(error)}", file=sys.stderr)
            continue
        asked_to_end = False
        if not typed and not line:
            return
        if line.strip():
            yield line.strip()
