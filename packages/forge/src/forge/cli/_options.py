"""Settings classes and public functions → commands of cyclopts, with options and help."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import attrs
import cyclopts

from forge.settings._settings import dashed


def whole_number(_kind: object, tokens: Sequence[cyclopts.Token], wanted: str = "a whole number") -> int:
    """Convert a whole number strictly; cyclopts by itself rounds 1.5 to 2."""
    word = tokens[0].value
    try:
        return int(word)
    except ValueError:
        raise ValueError(f"{wanted} is wanted, not {word!r}") from None


def whole_number_or_word(_kind: object, tokens: Sequence[cyclopts.Token]) -> int | str:
    """Convert a whole number where one is given, and keep a word (`auto`, `1:4`)."""
    word = tokens[0].value
    return int(word) if word.isdecimal() else word


def number(_kind: object, tokens: Sequence[cyclopts.Token]) -> float:
    """Convert a number, a whole one to an int."""
    word = tokens[0].value
    try:
        return int(word)
    except ValueError:
        pass
    try:
        return float(word)
    except ValueError:
        raise ValueError(f"a number is wanted, not {word!r}") from None


def converter_of(kinds: set[Any]) -> Callable[..., float | str] | None:
    """Return the converter of an option of these types; None for the one of cyclopts."""
    if int not in kinds:
        return None
    if float in kinds:
        return number
    if str in kinds:
        return whole_number_or_word
    words = [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]

    def convert(_kind: object, tokens: Sequence[cyclopts.Token]) -> int | str:
        word = tokens[0].value
        return word if word in words else whole_number(_kind, tokens, " or ".join(["a whole number", *map(repr, words)]))

    return convert


@cache
def field_texts(owner: type) -> dict[str, str]:
    """Return the docstring under each field of an attrs class, inherited fields included."""
    found: dict[str, str] = {}
    for home in reversed(owner.__mro__):
        if attrs.has(home):
            found |= _texts_of_file(home.__module__).get(home.__name__, {})
    return found


@cache
def _texts_of_file(module: str) -> dict[str, dict[str, str]]:
    """Return the docstrings under the fields of each class of a module's file.

    Without a file, as in a notebook, there are none.
    """
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError):
        return {}
    return {node.name: dict(_texts(node)) for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def _texts(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """Yield name and docstring of each field of a class."""
    for field, below in pairwise(node.body):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                yield name, " ".join(text.split())


def with_signature(command: Any, parameters: Sequence[inspect.Parameter], doc: str) -> Any:
    """Give a function the parameters and docstring that cyclopts reads, and its flags."""
    command.__signature__ = inspect.Signature(parameters)
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__doc__ = doc
    command.flags = {
        parameter.name: parameter.name.upper()
        if parameter.kind is inspect.Parameter.POSITIONAL_ONLY
        else f"--{dashed(parameter.name)}"
        for parameter in parameters
    }
    return command


def command_of(
    function: Callable[..., object],
    example: str,
    *,
    positional: int = 1,
    one_word: Sequence[str] = (),
    show: Callable[[Any], str] | None = str,
) -> Any:
    """Make a command of a public function: the same parameters and help; it prints the result.

    Args:
        function: documented in Google's style.
        example: a command line, for the help.
        positional: how many parameters are words; the others are options.
        one_word: lists of which an option takes one word and is repeated, so that words may follow it.
        show: writes the result; None for a function that prints by itself, whose result is the exit status.

    """

    def command(*words: object, **options: object) -> object:
        result = function(*words, **options)
        if show is None:
            return result
        print(show(result))
        return None

    parameters = []
    for number, parameter in enumerate(inspect.signature(function, eval_str=True).parameters.values()):
        kind = inspect.Parameter.POSITIONAL_ONLY if number < positional else inspect.Parameter.KEYWORD_ONLY
        annotation = _option(parameter.annotation, multiple=parameter.name not in one_word)
        parameters.append(parameter.replace(kind=kind, annotation=annotation))
    text = inspect.cleandoc(function.__doc__ or "").partition("\nReturns:")[0]
    summary, _, rest = text.partition("\n\n")
    return with_signature(command, parameters, f"{summary}\n\nExample: {example}\n\n{rest}")


def _option(annotation: Any, *, multiple: bool) -> Any:
    """Return the type of an option: strings for paths, words for lists and mappings."""
    kinds = get_args(annotation) if get_origin(annotation) is not Literal else ()
    if get_origin(annotation) is Sequence:
        annotation = Sequence[str]
    elif Path in kinds:
        annotation = str | None if type(None) in kinds else str
    if any(get_origin(kind) is Mapping for kind in kinds):
        annotation = Sequence[str] | None if type(None) in kinds else Sequence[str]
        kinds = get_args(annotation)
    if any(get_origin(kind) is Sequence for kind in (annotation, *kinds)):
        return Annotated[annotation, cyclopts.Parameter(consume_multiple=multiple, negative_iterable=())]
    if annotation is int:
        return Annotated[int, cyclopts.Parameter(converter=whole_number)]
    return Annotated[bool, cyclopts.Parameter(negative=())] if annotation is bool else annotation
