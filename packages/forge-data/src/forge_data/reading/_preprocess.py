"""User's preprocessing: a function, or its name, that turns a row into rows before all else."""

import hashlib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs

from forge_data._errors import DataError
from forge_data._values import describe

Function = Callable[[dict[str, Any]], Any]
"""Row's fields → a row, a list of rows, or None to leave it out."""


@attrs.frozen
class Preprocess:
    """A user's function, its name for messages and its identity; pickles if the function does."""

    function: Function
    name: str
    """Name, such as `my_package.rows:split_dialogue`."""
    identity: str | None
    """Content of its source file, for the fingerprint of a store.
    None where that is unknown (a lambda, a closure, a callable object), and then a store is never reused."""

    def __call__(self, place: str, fields: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the rows that a row becomes; an empty list where it is left out.

        Raises:
            DataError: the function raised an error, or returned what is not a row; by place and function.
        """
        try:
            given = self.function(fields)
        except Exception as error:
            what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raise DataError(
                f"{place}: preprocess {self.name} raised {what}{_where(error)}; correct the function or the row"
            ) from error
        if given is None:
            return []
        rows = list(given) if isinstance(given, (list, tuple)) else [given]
        for row in rows:
            if not isinstance(row, Mapping):
                raise DataError(
                    f"{place}: preprocess {self.name} returned {describe(row)}; it must return a row (a dict), a list of rows, "
                    "or None to leave the row out"
                )
        return [{name: value for name, value in row.items() if value is not None} for row in rows]

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        # By name where it has one, so that another process imports it.
        return (load_preprocess, (self.name,)) if ":" in self.name else (Preprocess, (self.function, self.name, self.identity))


def load_preprocess(spec: str | Function | None) -> Preprocess | None:
    """Load the function that `preprocess` names, or is.

    Raises:
        DataError: nothing of that name can be imported and called.
    """
    if spec is None or isinstance(spec, Preprocess):
        return spec
    if isinstance(spec, str):
        return _named(spec)
    if not callable(spec):
        raise DataError(f"`preprocess` is {describe(spec)}; give a function or its name as 'package.module:function'")
    name = getattr(spec, "__qualname__", None)
    if not isinstance(name, str):
        return Preprocess(spec, type(spec).__qualname__, None)
    return Preprocess(spec, f"{spec.__module__}.{name}", _identity(spec))


def _named(spec: str) -> Preprocess:
    module_name, colon, path = spec.partition(":")
    if not colon or not all(part.isidentifier() for part in [*module_name.split("."), *path.split(".")]):
        raise DataError(f"`preprocess` is {spec!r}; name a function as 'package.module:function'")
    module = _imported(spec, module_name)
    found: Any = module
    for part in path.split("."):
        found = getattr(found, part, None)
        if found is None:
            functions = [name for name, _ in inspect.getmembers(module, inspect.isfunction)]
            raise DataError(
                f"`preprocess` is {spec!r}, but {module_name} has no {path!r}; its functions: {', '.join(functions) or 'none'}"
            )
    if not callable(found):
        raise DataError(f"`preprocess` is {spec!r}, which is {describe(found)} and not a function")
    return Preprocess(found, spec, _identity(found))


def _imported(spec: str, name: str) -> Any:
    # A command imports from its own directory first; a user's file lies in the working directory.
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # a script that ends itself would end the command, with status 0
        raise DataError(
            f"`preprocess` is {spec!r}, but {name} cannot be imported: {type(error).__name__}: {error}; "
            f"looked on sys.path and in {here}"
        ) from error


def _identity(function: Any) -> str | None:
    """Return module, name and SHA-256 of the source file; None for a function with own state."""
    if not inspect.isfunction(function) or function.__closure__ or "<lambda>" in function.__qualname__:
        return None
    # A function made by another one may keep in its defaults what it was made with.
    if "<locals>" in function.__qualname__ and (function.__defaults__ or function.__kwdefaults__):
        return None
    try:
        source = inspect.getsourcefile(function)
        if source is None:
            return None
        digest = hashlib.sha256(Path(source).read_bytes()).hexdigest()
    except (TypeError, OSError):
        return None
    return f"{function.__module__}:{function.__qualname__}:{digest}"


def _where(error: Exception) -> str:
    """Name the line of the user's file that raised an error."""
    trace = inspect.getinnerframes(error.__traceback__)[1:] if error.__traceback__ else []
    return f" ({Path(trace[-1].filename).name}:{trace[-1].lineno})" if trace else ""
