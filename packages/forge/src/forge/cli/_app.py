"""The command `forge`: words of a shell → calls of the public API, errors → one message.

Exit status: 0 finished; 2 bad input, or a dry run whose memory plan does not fit; 1 the run failed, or `forge data lint` found
what stops one; 75 stopped by a signal with its state saved; 130 interrupted, 143 terminated before there was a state.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Annotated, Any, get_args

import cyclopts

import forge
from forge._error_chain import error_chain
from forge._errors import PreemptedError
from forge._printable import printable
from forge._stderr import StandardError
from forge._uncollected import is_process_of_one_command, process_of_one_command, uncollected
from forge.cli._flags import as_flags
from forge.cli._options import command_of
from forge.cli._output import open_closed_streams, take_any_text
from forge.cli._train import verb_command
from forge.cli._words import check_words
from forge.verbs._registry import VERBS, task_of

_DEBUG = "FORGE_DEBUG"
_ANSWER_SECONDS = 10.0
"""How long a further rank that torchrun started leaves the first one the word, which most likely fails for the same reason."""
_COMPLETION = "--install-completion"
_TERMINATED = "SIGTERM"
_STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
_OUTPUT_CLOSED = 141
"""Exit status where nobody reads the output any more, as a shell has it of a program that SIGPIPE ended."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


class Terminated(KeyboardInterrupt):
    """SIGTERM, SIGHUP or SIGUSR1 as an exception, cleaned up after as Ctrl-C is."""


def _terminate(*_: object) -> None:
    raise Terminated(_TERMINATED)


def main(argv: Sequence[str] | None = None, make: Callable[[str | None, Sequence[str]], cyclopts.App] | None = None) -> int:
    """Run the command line and return its exit status; only `--debug` shows a traceback.

    Args:
        argv: words; those of this process by default.
        make: makes the application from the command that is asked for and the words; `make_app` by default.

    """
    words = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        open_closed_streams()
        process_of_one_command()
        take_any_text()
    debug = "--debug" in words or bool(os.environ.get(_DEBUG))
    words = [word for word in words if word != "--debug"]
    before: dict[signal.Signals, Any] = {number: signal.getsignal(number) for number in _STOPPING}
    signal.signal(signal.SIGTERM, _terminate)
    for number in (signal.SIGHUP, signal.SIGUSR1):  # SIGHUP is ignored under `nohup`; Slurm's --signal may send the other
        if before[number] == signal.SIG_DFL:
            signal.signal(number, _terminate)
    status = 1
    try:
        status = _status(words, make, debug=debug)
    except KeyboardInterrupt as error:
        status = _print_interruption(error, debug=debug)
    finally:
        # A saved state is the last word: a second signal of a scheduler or terminal is not to give another status.
        if argv is not None or status != PreemptedError.exit_status:
            for number, handler in before.items():
                signal.signal(number, handler)
    return status


def _status(words: list[str], make: Callable[[str | None, Sequence[str]], cyclopts.App] | None, *, debug: bool) -> int:
    """Run the command of the words; return its exit status, and print what it raised."""
    flags: dict[str, str] = {}
    try:
        if words[:2] == ["recipes", "run"]:
            from forge.cli._recipes import as_verb

            words = as_verb(words)
        asked = words[0] if words[:1] == [_COMPLETION] else next((word for word in words if not word.startswith("-")), None)
        with uncollected():
            app = (make or make_app)(asked, words)
            check_words(app, words)
            command, bound, *_ = app.parse_args(words, exit_on_error=False, print_error=False)
        flags = getattr(command, "flags", flags)
        status = command(*bound.args, **bound.kwargs)
        sys.stdout.flush()
    except cyclopts.UnusedCliTokensError as error:
        return _print_error(_unused(error.unused_tokens or (), error.command_chain or (), error.target), 2, debug=debug)
    except cyclopts.MissingArgumentError as error:
        return _print_error(_missing(error), 2, debug=debug)
    except cyclopts.CoercionError as error:
        return _print_error(_invalid(error), 2, debug=debug)
    except cyclopts.CycloptsError as error:
        return _print_error(str(error), 2, debug=debug)
    except SystemExit as error:
        # rich ends the process with 1 where nobody reads what it prints (a page of help); it has dropped the rest itself.
        if not isinstance(error.__context__, BrokenPipeError):
            at = traceback.extract_tb(error.__traceback__)[-1]
            status = error.code if isinstance(error.code, int) and error.code else 1  # it has not finished
            return _print_error(f"ended by sys.exit({error.code!r}) at {at.filename}:{at.lineno}.", status, debug=debug)
        return _OUTPUT_CLOSED
    except Exception as error:  # noqa: BLE001 - the last place that can turn an exception into a message
        if isinstance(error, BrokenPipeError) and _output_closed():
            # Whoever read the output has enough of it (`| head`). What is left is dropped, or Python would try it again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return _OUTPUT_CLOSED
        if isinstance(error, OSError) and error.errno in _FULL and error.filename is None:
            # Errors of the files of a run have their names: this one is of what was printed.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return _print_error(f"standard output cannot be written: {error.strerror}.", 1, debug=debug)
        if isinstance(error, FileNotFoundError) and error.filename is None and _is_nowhere():
            return _print_error("the current directory is gone: change to one that is there.", 2, debug=debug)
        status, what = getattr(error, "exit_status", None), _in_one_line(str(error), words)
        if status is not None:
            return _print_error(as_flags(what, flags), int(status) or 1, debug=debug)
        what = f"{type(error).__name__}: {what}"
        return _print_error(
            f"failed: {what}\n(--debug shows where; if the input is right, this is a defect of forge.)", 1, debug=debug
        )
    return status if isinstance(status, int) else 0


def _print_interruption(error: KeyboardInterrupt, *, debug: bool) -> int:
    """Say how a signal ended the command; return the exit status."""
    saved = next((each for each in error_chain(error) if isinstance(each, PreemptedError)), None)
    if saved is not None:
        # A second signal, while the first one's answer was on its way.
        return _print_error(str(saved), saved.exit_status, debug=debug)
    if isinstance(error, Terminated):
        # Where torchrun ends the other ranks after the first one's error, that error is the message.
        return _print_error(_ended("terminated", error), 143, debug=debug) if _is_first() else 143
    if sys.stderr.isatty():
        print(file=StandardError())  # the terminal has shown ^C on this line
    return _print_error(_ended("interrupted", error), 130, debug=debug)


_FEW_OPTIONS = 6
"""Most options of a command that a message lists; of more it names `--help`."""


def _missing(error: cyclopts.MissingArgumentError) -> str:
    """Say which argument is missing, or which flag has no value, and where it is described."""
    name = "" if error.argument is None else error.argument.name
    what = f"{error.keyword} needs a value" if error.keyword is not None else f"{name} is required"
    command = " ".join(("forge", *(error.command_chain or ())))
    return f"{what}; `{command} --help` describes it."


def _invalid(error: cyclopts.CoercionError) -> str:
    """Say which value is none of a flag's, and which one another library's is here."""
    said, token = str(error), error.token
    known = tuple(each for each in get_args(error.target_type) if isinstance(each, str))
    if token is None or token.keyword is None or "Choose from: " not in said or not known:
        return said
    from forge.settings._elsewhere import made_elsewhere, meant

    said = said.partition(" Did you mean ")[0]
    if maker := made_elsewhere(token.value, known):
        return f"{said} {maker}"
    word = meant(token.keyword.lstrip("-").replace("-", "_"), token.value, known)
    return said + (f' Did you mean "{word}"?' if word else "")


def _unused(left: Sequence[str], command: Sequence[str], target: object) -> str:
    """Say that words are too many, and what the command takes, or where that stands."""
    flags = list(getattr(target, "flags", {}).values())
    words = [flag for flag in flags if not flag.startswith("-")]
    options = flags[len(words) :]
    name = " ".join(["forge", *command])
    takes = ""
    if words and len(options) <= _FEW_OPTIONS:
        takes = f" {name} takes {' and '.join(words)}" + (f", and as options {', '.join(options)}" if options else "") + "."
    elif command:
        takes = f" `{name} --help` lists what it takes."
    return (
        f"{', '.join(map(repr, left))}: nothing takes this here: the option or argument before it takes no more. Quote a "
        f"value with spaces.{takes}"
    )


def _output_closed() -> bool:
    """Return whether nobody reads standard output any more."""
    watched = select.poll()
    watched.register(sys.stdout.fileno(), select.POLLOUT)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in watched.poll(0))


def _is_nowhere() -> bool:
    """Return whether the current directory was removed."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


def _is_first() -> bool:
    """Return whether this is the first of torchrun's processes, or none of them."""
    return os.environ.get("RANK", "0") == "0"


def _in_one_line(message: str, words: Sequence[str]) -> str:
    """Escape ends of lines that a word of the command line holds: a name is no message."""
    for word in words:
        for part in (word, word.partition("=")[2]):
            if not part.isprintable():
                message = message.replace(part, printable(part))
    return message


def _ended(how: str, error: KeyboardInterrupt) -> str:
    """Say how a command ended, and what became of the run, where there was one."""
    became = str(error).removeprefix(_TERMINATED).removeprefix(": ")
    return f"{how}: {became}" if became else f"{how}."


def _print_error(message: str, status: int, *, debug: bool) -> int:
    if status == PreemptedError.exit_status:
        for number in _STOPPING:
            signal.signal(number, signal.SIG_IGN)
    if not _is_first():
        # torchrun ends the other ranks soon after the first one: then they say nothing, and the message is there once.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(_ANSWER_SECONDS)
    if debug:
        traceback.print_exc()
    # A message may quote the name of a file, and a name may hold what controls a terminal.
    print("forge: " + printable(message, keep="\n"), file=StandardError())
    return status


def make_app(asked: str | None = None, words: Sequence[str] = ()) -> cyclopts.App:
    """Make the command line; only the command asked for gets its options, which take time.

    Shell completion asks for those of all. A backend among the words brings options of its own.
    """
    app = cyclopts.App(
        name="forge",
        help="Fine-tune language models, with proof that what was trained is what you asked for.",
        version=forge.__version__,
        help_format="plaintext",
        help_epilogue="Every command takes --debug, which shows the traceback of an error.",
    )
    groups = [cyclopts.Group(heading, sort_key=place) for place, heading in enumerate(_HEADINGS)]
    listed = {
        name: {"group": group, "sort_key": order}
        for group, names in zip(groups, _HEADINGS.values(), strict=True)
        for order, name in enumerate(names)
    }
    for name in VERBS:
        if asked in (name, _COMPLETION):
            app.command(_verb(name, words), name=name)
        else:
            app.command(_placeholder(task_of(name).about if asked is None else ""), name=name, **listed[name])
    for name, (about, make, options) in _COMMANDS.items():
        if asked in (name, _COMPLETION):
            app.command(make(), name=name, **options)
        else:
            app.command(_placeholder(about), name=name, **listed[name], **options)
    if asked in (None, _COMPLETION):
        app.register_install_completion_command(_COMPLETION, help="Install completion for this shell: bash, zsh or fish.")
        others = cyclopts.Group("Options", sort_key=len(groups))
        for flag in ("--help", "--version", _COMPLETION):
            app[flag].group = others
    return app


def _placeholder(about: str) -> Callable[..., None]:
    """Stand for a command that is only listed, or the nearest to a misspelled one."""

    def command() -> None:
        raise AssertionError(about)

    command.__doc__ = about
    return command


def _verb(name: str, words: Sequence[str]) -> Callable[..., None] | cyclopts.App:
    """Build `forge VERB`; `forge osft` has the command `inspect` beside it."""
    command = verb_command(task_of(name), words)
    if name != "osft":
        return command
    app = cyclopts.App(name="osft", help=command.__doc__, help_format="plaintext")
    app.default(command)
    app.command(_inspect(), name="inspect")
    return app


def _inspect() -> Callable[..., None]:
    from forge.reports.osft._inspect import inspect

    return command_of(inspect, "forge osft inspect runs/first --layer q_proj")


def _generate() -> Callable[..., None]:
    example = "forge generate runs/first 'What is in it?' --image plum.png"
    return command_of(forge.generate, example, positional=2, one_word=("image", "video", "audio"))


def _chat() -> Callable[..., None]:
    return command_of(forge.chat, "forge chat runs/first --beside org/base --system 'Answer in one word.'", show=None)


def _eval() -> Callable[..., None]:
    from forge.talking._evaluate import as_table

    return command_of(forge.evaluate, "forge eval runs/first --tasks arc_easy --limit 100", show=as_table)


def _serve() -> Callable[..., int]:
    return command_of(forge.serve, "forge serve runs/first --port 8000", show=None)


def _export() -> Callable[..., None]:
    return command_of(forge.export, "forge export runs/first --merge --format gguf --dtype q8_0")


def _track() -> Callable[..., None]:
    def show(sent: dict[str, int]) -> str:
        return "\n".join(
            f"{name}: has {'its one line' if lines == 1 else f'all {lines:,} lines'}" for name, lines in sent.items()
        )

    return command_of(forge.track, "forge track runs/first --trackers tensorboard", show=show)


def _repair() -> Callable[..., None]:
    return command_of(forge.repair, "forge repair runs/first")


def _push() -> Callable[..., None]:
    return command_of(forge.push, "forge push runs/first org/name", positional=2)


def _plan() -> Callable[..., None]:
    from forge.cli._plan import plan_command

    return plan_command()


def _report() -> Callable[..., None]:
    from forge.reports._report import report

    return command_of(report, "forge report runs/first")


def _compare() -> Callable[..., None]:
    from forge.cli._compare import compare_command

    return compare_command()


def _rollouts() -> Callable[..., None]:
    from forge.reports._rollouts import rollouts

    return command_of(rollouts, "forge rollouts runs/grpo --step 40")


def _forgetting() -> Callable[..., None]:
    return command_of(forge.forgetting, "forge forgetting runs/first --data general.jsonl")


def _teach() -> Callable[..., None]:
    return command_of(forge.teach, "forge teach --teacher-path LARGE --data-path train.jsonl --output taught", positional=0)


def _recipes() -> cyclopts.App:
    from forge.cli._recipes import recipes_app

    return recipes_app()


def _config() -> cyclopts.App:
    from forge.cli._config import config_app

    return config_app()


def _slurm() -> cyclopts.App:
    from forge.cli._clusters import slurm_app

    return slurm_app()


def _kubeflow() -> cyclopts.App:
    from forge.cli._clusters import kubeflow_app

    return kubeflow_app()


def _data() -> Callable[..., int]:
    def data(*words: Annotated[str, cyclopts.Parameter(show=False, allow_leading_hyphen=True)]) -> int:
        from forge_data.__main__ import run as run_data

        return run_data(words, prog="forge data", own_process=is_process_of_one_command())

    return data


_COMMANDS: dict[str, tuple[str, Callable[[], Callable[..., Any] | cyclopts.App], dict[str, Any]]] = {
    "generate": ("Generate a model's answer to a prompt.", _generate, {}),
    "chat": ("Talk with a model, or with two side by side.", _chat, {}),
    "eval": ("Score a run's base model and its last export on tasks of lm-evaluation-harness.", _eval, {}),
    "serve": ("Serve a model over HTTP as OpenAI's interface has it, by transformers' server.", _serve, {}),
    "export": ("Write a model to hand on: merged or not, for transformers or as GGUF, with a model card.", _export, {}),
    "track": ("Send the record of a run that has ended to trackers: W&B, MLflow, TensorBoard, trackio.", _track, {}),
    "repair": ("Make a finished run whole whose files were damaged, or say what only training again makes.", _repair, {}),
    "push": ("Upload a run's export to the Hugging Face Hub, private, with its model card.", _push, {}),
    # forge-data parses its own words, `--help` too, so that it has the same command line without this package.
    "data": (
        "Prepare, show, lint and count tokens: `forge data --help` lists the commands.",
        _data,
        {"help_flags": (), "version_flags": ()},
    ),
    "report": ("Write the page of a run: curves, what was trained, samples, exports, events.", _report, {}),
    "compare": ("Lay the curves of runs over each other, and list the settings that differ.", _compare, {}),
    "rollouts": ("Write a page of a run's rollouts: prompts, completions, rewards, advantages over steps.", _rollouts, {}),
    "forgetting": ("Measure what a run lost of its base on general data, by source; write a page of it.", _forgetting, {}),
    "teach": ("Store a teacher's likeliest tokens of some rows, for forge distill --teacher-logprobs.", _teach, {}),
    "recipes": ("List, show, copy and run the shipped recipes: a beginning for every verb and adapter.", _recipes, {}),
    "config": ("Check a recipe, convert one from another trainer, or describe recipes for an editor.", _config, {}),
    "slurm": ("Write an sbatch file that runs a recipe and requeues itself: forge slurm render.", _slurm, {}),
    "kubeflow": (
        "Write the TrainJob of a recipe, and the runtimes, for Kubeflow Trainer V2: forge kubeflow render, runtimes.",
        _kubeflow,
        {},
    ),
    "plan": ("Show how the samples of a step share ranks and micro-batches; trains nothing.", _plan, {}),
}
"""Command that trains nothing → a line for `forge --help`, the function that builds it, options of cyclopts."""

_HEADINGS = {
    "Train": VERBS,
    "Use a model": ["generate", "chat", "serve", "export", "push", "teach"],
    "Runs": ["report", "compare", "eval", "forgetting", "rollouts", "plan", "track", "repair"],
    "Data and recipes": ["data", "recipes", "config"],
    "Clusters": ["slurm", "kubeflow"],
}
"""Heading of `forge --help` → its commands, in order."""
