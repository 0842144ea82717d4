"""Name of a function or class of somebody else's module → the object itself."""

import importlib
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from forge_algos._errors import RewardError


def load_named(name: str, *, setting: str, wanted: str) -> tuple[Any, str]:
    """Import what "package.module:name" or "file.py:name" names; return it, and its own name.

    Args:
        name: as it was given.
        setting: that gave it, for the messages.
        wanted: what it is to be, `function` or `Class`.

    Raises:
        RewardError: the name has another form, or the module or what it names is not there, or importing it raises.
    """
    module_name, colon, path = name.partition(":")
    if not module_name or not colon or not path:
        raise RewardError(f"{setting} {name!r}: a {wanted.lower()} is named as 'package.module:{wanted}' or 'file.py:{wanted}'")
    is_file = module_name.endswith(".py")
    if is_file and not Path(module_name).expanduser().is_file():
        raise RewardError(f"{setting} {name!r}: there is no file {module_name}, seen from {Path.cwd()}")
    try:
        found: Any = _of_file(module_name) if is_file else importlib.import_module(module_name)
    except ImportError as error:
        advice = "what it imports must be installed, or its folder on PYTHONPATH" if is_file else "is its folder on PYTHONPATH?"
        raise RewardError(f"{setting} {name!r}: the module cannot be imported ({error}); {advice}") from error
    except (Exception, SystemExit) as error:  # whatever a user's module may raise, a script that ends itself among them
        what = f"{type(error).__name__}: {error}".removesuffix(": ")
        at = traceback.extract_tb(error.__traceback__)[-1]
        where = "" if isinstance(error, SyntaxError) else f", at {at.filename}:{at.lineno}"
        raise RewardError(
            f"{setting} {name!r}: importing {module_name} raised {what}{where}; correct it, and keep what a script does under "
            "`if __name__ == '__main__':`"
        ) from error
    for part in path.split("."):
        if not hasattr(found, part):
            known = ", ".join(sorted(key for key in vars(found) if not key.startswith("_"))[:20])
            own = f". Commands and further ranks have a __main__ of their own: they find 'file:{path}', a name in a file"
            note = own if module_name == "__main__" else ""
            raise RewardError(f"{setting} {name!r}: {module_name} has no {path}; it has {known}{note}")
        found = getattr(found, part)
    return found, path


def _of_file(path: str) -> ModuleType:
    """Import a file once, under its path: files of one name in two folders are two modules."""
    name = str(Path(path).expanduser().resolve())
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, name)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no file of Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs, as import does: a dataclass looks its own module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
