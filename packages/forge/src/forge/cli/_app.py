"""The command `forge`: words of a shell → the same calls that Python makes, errors → one message and an exit status.

Exit status: 0 finished; 2 bad input; 1 the run failed, or `forge data lint` found what stops one; 75 stopped by a signal
with its state saved; 130 interrupted, 143 terminated before there was a state.
"""

from __future__ import annotations

import inspect
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, cast, get_args, get_origin

import attrs
import cyclopts

import forge
from forge.cli._plan import plan_command
from forge.cli._settings_page import field_texts
from forge.run._run import run
from forge.settings._recipe import read_recipe
from forge.settings._settings import flat_fields, groups, resolve, signature_of
from forge.tasks._task import Task
from forge.verbs._registry import VERBS, task_of

_DEBUG = "FORGE_DEBUG"


def _whole(_kind: object, tokens: Sequence[cyclopts.Token]) -> int:
    """Read a whole number strictly: cyclopts by itself rounds 1.5 to 2."""
    return int(tokens[0].value)


def _whole_or_word(_kind: object, tokens: Sequence[cyclopts.Token]) -> int | str:
    """Read a whole number where one is written, and a word (`auto`, `1:4`) elsewhere."""
    word = tokens[0].value
    return int(word) if word.isdecimal() else word


def _converter(kinds: set[Any]) -> Callable[..., int | str] | None:
    if int not in kinds:
        return None
    return _whole_or_word if str in kinds else _whole


def _required(field: attrs.Attribute[Any]) -> str:
    return " Required, here or in the recipe." if field.default is attrs.NOTHING else ""


Whole = Annotated[int, cyclopts.Parameter(converter=_whole)]


class Terminated(KeyboardInterrupt):
    """SIGTERM, on its way through the same clean-up as Ctrl-C."""


def _terminate(*_: object) -> None:
    raise Terminated("SIGTERM")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status; never shows a traceback unless `--debug` asks for it."""
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words or bool(os.environ.get(_DEBUG))
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        command, bound, *_ = _app(next((word for word in words if word in VERBS), None)).parse_args(
            [word for word in words if word != "--debug"], exit_on_error=False, print_error=False
        )
        status = command(*bound.args, **bound.kwargs)
    except cyclopts.CycloptsError as error:
        return _say(str(error), 2, debug=debug)
    except Terminated:
        return _say("terminated.", 143, debug=debug)
    except KeyboardInterrupt:
        return _say("interrupted.", 130, debug=debug)
    except Exception as error:  # noqa: BLE001 - the last place that can turn an exception into a message
        status = getattr(error, "exit_status", None)
        if status is not None:
            return _say(str(error), int(status), debug=debug)
        what = f"{type(error).__name__}: {error}"
        return _say(f"failed: {what}\n(--debug shows where; if the input is right, this is a defect of forge.)", 1, debug=debug)
    finally:
        signal.signal(signal.SIGTERM, before)
    return status if isinstance(status, int) else 0


def _say(message: str, status: int, *, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    print(f"forge: {message}", file=sys.stderr)
    return status


def _app(asked: str | None = None) -> cyclopts.App:
    """Make the command line; of the verbs only the one that is asked for with all its options, which take time to put together."""
    app = cyclopts.App(
        name="forge",
        help="Fine-tune language models, with proof that what was trained is what you asked for.",
        version=forge.__version__,
        help_format="plaintext",
        help_epilogue="Every command takes --debug, which shows the traceback of an error.",
    )
    for name in VERBS:
        command = _verb_command(task_of(name)) if name == asked else _named(name, told=asked is None)
        app.command(_with_inspect(command) if name == asked == "osft" else command, name=name)
    app.command(generate)
    app.command(export)
    # forge-data reads its own words, `--help` too, so that it has the same command line without this package.
    app.command(data, help_flags=(), version_flags=())
    app.command(plan_command(_whole), name="plan")
    return app


def _with_inspect(verb: Callable[..., None]) -> cyclopts.App:
    """`forge osft`, and `forge osft inspect` beside it."""
    app = cyclopts.App(name="osft", help=verb.__doc__, help_format="plaintext")
    app.default(verb)
    app.command(inspect_osft, name="inspect")
    return app


def _named(name: str, *, told: bool) -> Callable[..., None]:
    """Stand for a verb where it is only listed, or the nearest to another word."""

    def command() -> None:
        raise AssertionError(name)

    command.__doc__ = task_of(name).about if told else ""
    return command


def _verb_command(task: Task) -> Callable[..., None]:
    """Build `forge VERB` from the settings classes: one option for each field, its docstring as help."""

    def command(recipe: str | None = None, /, **settings: object) -> None:
        layers = [(f"recipe {recipe}", read_recipe(recipe))] if recipe is not None else []
        flags = {
            name: value[0] if name in several and isinstance(value, tuple) and len(value) == 1 else value
            for name, value in settings.items()
        }
        if os.getcwd() not in sys.path:
            # A console script does not look here, and `--reward rewards:correct` means the file beside the user.
            sys.path.append(os.getcwd())
        result = run(task, resolve(task.settings, *layers, ("flag", flags)))
        if os.environ.get("RANK", "0") == "0":
            print(result.model_dir)

    # One path or several are words of a shell; a mapping of paths to weights is for recipes.
    several = {
        field.name
        for _, field in flat_fields(task.settings)
        if any(get_origin(kind) is Mapping for kind in get_args(field.type))
    }
    plain = signature_of(task.settings)
    owners = groups(task.settings)
    order = list(owners)
    helps = {
        field.name: (group, field_texts(owners[group])[field.name] + _required(field))
        for group, field in flat_fields(task.settings)
    }
    parameters = []
    for parameter in plain.parameters.values():
        if parameter.name == "recipe":
            about = cyclopts.Parameter(help="A YAML file of settings; options given beside it win.")
        else:
            group, text = helps[parameter.name]
            about = cyclopts.Parameter(
                help=text,
                group=cyclopts.Group(group.capitalize(), sort_key=order.index(group)),
                consume_multiple=True,
                negative_iterable=(),
                converter=_converter({parameter.annotation, *get_args(parameter.annotation)}),
            )
        annotation = tuple[str, ...] if parameter.name in several else parameter.annotation
        if parameter.default is None and parameter.name != "recipe":
            annotation = annotation | None
        parameters.append(parameter.replace(annotation=Annotated[annotation, about]))
    cast("Any", command).__signature__ = inspect.Signature(parameters)
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__doc__ = (
        f"{task.about}\n\n"
        f"Prints the directory of the trained model. Example: forge {task.name} --model-path org/model --data-path train.jsonl "
        "--ckpt-output-dir runs/first"
    )
    return command


def data(*words: Annotated[str, cyclopts.Parameter(show=False, allow_leading_hyphen=True)]) -> int:
    """Prepare, show, lint and count tokens: `forge data --help` says how."""
    from forge_data.__main__ import run as run_verb

    return run_verb(words, prog="forge data")


def inspect_osft(run: str, /, *, layer: str | None = None, html: str | None = None) -> None:
    """Show what a run protected and what it moved: the spectrum of a layer, its change, and how little of it leaked.

    Args:
        run: The directory of a run with adapter=osft.
        layer: Name, or last part of the name, of the target to draw; by default the one that moved most.
        html: Where to write the page; by default osft/inspect.html of the run.

    """
    from forge.reports._osft import inspect as inspect_run

    print(inspect_run(run, layer=layer, html=html))


def generate(
    model: str,
    prompt: str,
    /,
    *,
    max_new_tokens: Whole = 256,
    temperature: float = 0.0,
    system: str | None = None,
    seed: Whole = 42,
) -> None:
    """Let a model answer a prompt, to try what was trained.

    Args:
        model: A model directory, an adapter directory, a run directory (its last export), or a hub name.
        prompt: What the user says.
        max_new_tokens: Stop after so many tokens.
        temperature: 0 always takes the likeliest token; higher draws more freely.
        system: A system message before the prompt.
        seed: Seed of the draw.

    """
    answer = forge.generate(model, prompt, max_new_tokens=max_new_tokens, temperature=temperature, system=system, seed=seed)
    print(answer)
    if not answer:
        print("forge: the model ended its answer at once, without a word.", file=sys.stderr)


def export(
    run: str,
    /,
    *,
    output: str | None = None,
    merge: Annotated[bool, cyclopts.Parameter(negative=())] = False,
    dtype: str | None = None,
    format: str = "hf",  # noqa: A002 - the option's name
) -> None:
    """Write a model to hand on: merged or not, for transformers or as GGUF, loaded back and compared, with a model card.

    Prints what was written. Example: forge export runs/first --merge --format gguf --dtype q8_0

    Args:
        run: A run directory (its last export), or a model or adapter directory.
        output: The directory to write, which must not exist; of a run by default one in its exports/.
        merge: Add an adapter's updates to the weights of its base.
        dtype: float32, float16 or bfloat16, with gguf also q8_0; by default as the weights, or those of the base, are stored.
        format: hf for a directory that plain transformers (or plain PEFT) loads, gguf for a file that llama.cpp runs.

    """
    asked: Any = {"merge": merge, "dtype": dtype, "format": format}
    print(forge.export(run, output, **asked))
