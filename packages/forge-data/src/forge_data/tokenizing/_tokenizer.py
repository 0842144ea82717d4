"""Directory or Hub name → fast tokenizer, which reports the characters of its tokens."""

import contextlib
import importlib.util
import os
import re
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_data._errors import TokenizerError
from forge_data._uncollected import uncollected
from forge_data._values import parsed_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_GENERIC_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")
_NO_WARNINGS = "TRANSFORMERS_NO_ADVISORY_WARNINGS"


def load_tokenizer(model_path: str | os.PathLike[str]) -> "PreTrainedTokenizerBase":
    """Load the fast tokenizer of a local directory or of a model on the Hugging Face Hub.

    A directory needs tokenizer files only, no model and no config.json. Code that comes with a model is never run.

    Raises:
        TokenizerError: neither a directory with a tokenizer nor a Hub name that answers, or a tokenizer without offsets.
    """
    name = os.fspath(model_path)
    local, mode = _stat(name)
    is_dir = stat.S_ISDIR(mode)
    if not name or (not is_dir and (mode or not _HUB_NAME.fullmatch(name) or name.startswith("."))):
        found = "nothing there" if not name or not mode else "a file" if stat.S_ISREG(mode) else "no directory"
        raise TokenizerError(
            f"no tokenizer at {name!r}: {found}; give a directory that holds tokenizer.json, or a name on the "
            "Hugging Face Hub such as 'HuggingFaceTB/SmolLM2-135M-Instruct'"
        )
    try:
        with uncollected():
            tokenizer: Any = _loader(local if is_dir else None)(str(local) if is_dir else name, trust_remote_code=False)
    except Exception as error:
        # transformers raises OSError, ValueError, KeyError, TypeError or its libraries' own, by what is missing.
        raise TokenizerError(_not_loaded(name, local if is_dir else None, error)) from error
    if is_dir and not tokenizer.chat_template:
        tokenizer.chat_template = _processor_template(local)
    return as_tokenizer(tokenizer)


def _processor_template(directory: Path) -> str | None:
    """Return the chat template that a directory holds for its processor alone, None without one.

    Models of several modalities have it in a file that only transformers' processors read.

    Raises:
        TokenizerError: the file is not what a processor writes.
    """
    file = directory / "chat_template.json"
    if not file.is_file():
        return None
    try:
        template = parsed_json(file.read_text(encoding="utf-8"))["chat_template"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TokenizerError(f"{file} holds no chat_template ({error!r}): mend it, or take it away") from error
    if not isinstance(template, str):
        raise TokenizerError(f"{file}: chat_template is {type(template).__name__}; it must be a string")
    return template


def stored_chat_template(directory: Path) -> str | dict[str, str] | None:
    """Return a saved tokenizer's chat template; errors as `load_tokenizer`."""
    file = directory / "chat_template.jinja"
    # transformers takes this file whatever tokenizer_config.json says, beside others as one of several.
    if file.is_file() and not (directory / "additional_chat_templates").exists():
        with contextlib.suppress(OSError, ValueError):
            if template := file.read_text(encoding="utf-8"):
                return template
    return load_tokenizer(directory).chat_template


def as_tokenizer(tokenizer: "PreTrainedTokenizerBase | str | os.PathLike[str]") -> "PreTrainedTokenizerBase":
    """Return a loaded tokenizer as it is; load one from a path or name.

    Raises:
        TokenizerError: the tokenizer has no fast (Rust) backend, so it cannot report the characters of its tokens.
    """
    if isinstance(tokenizer, (str, os.PathLike)):
        return load_tokenizer(tokenizer)
    if not getattr(tokenizer, "is_fast", False):
        raise TokenizerError(
            f"{type(tokenizer).__name__} has no fast backend, so it cannot report which characters a token stands for; "
            "use a tokenizer that has a tokenizer.json (transformers' PreTrainedTokenizerFast)"
        )
    return tokenizer


def _loader(directory: Path | None) -> Callable[..., Any]:
    """Choose what loads a tokenizer: transformers' choice by name, or its plain fast tokenizer.

    Making that choice loads torch where it is installed, which takes longer than all the rest. A directory of tokenizer files
    alone that names no class of its own, as `save_pretrained` writes it and every token store holds one, leaves no choice.
    """
    with _without_advice():
        if directory is not None and not (directory / "config.json").exists() and (directory / "tokenizer.json").is_file():
            with contextlib.suppress(OSError, ValueError, AttributeError):
                config = parsed_json((directory / "tokenizer_config.json").read_text("utf-8"))
                if config.get("tokenizer_class") in _GENERIC_CLASSES and "auto_map" not in config:
                    from transformers import PreTrainedTokenizerFast

                    return PreTrainedTokenizerFast.from_pretrained
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained


def _stat(name: str) -> tuple[Path, int]:
    """Find what a name is on this machine: its path, and its mode, 0 for nothing."""
    try:
        local = Path(name).expanduser()
        return local, local.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return Path(name), 0
    except OSError as error:
        raise TokenizerError(f"no tokenizer at {name!r}: {error.strerror}; check the path and who may read it") from error
    except (ValueError, RuntimeError) as error:
        # A null byte, or an unknown ~user.
        raise TokenizerError(f"no tokenizer at {name!r}: {error}; check the path") from error


def _not_loaded(name: str, directory: Path | None, error: Exception) -> str:
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    reason = line.rstrip(".:")
    if isinstance(error, ImportError):
        return f"the tokenizer of {name!r} was not loaded: a package that it needs cannot be imported: {reason}; install it"
    if directory is not None:
        try:
            files = ", ".join(sorted(path.name for path in directory.iterdir())[:8]) or "nothing"
        except OSError as unlisted:
            files = f"what cannot be listed: {unlisted.strerror}"
        # A line that ends so is the head of a list of ways to make one, none of which is meant.
        why = "" if line.endswith(":") else f": {reason}"
        return (
            f"no usable tokenizer in the directory {name!r} (it holds {files}){why}; it needs tokenizer.json, and "
            "tokenizer_config.json for its special tokens"
        )
    return (
        f"no tokenizer called {name!r}: there is no such directory, and the Hugging Face Hub did not give one: {reason}; "
        "check the spelling and the network, or give a local directory"
    )


@contextlib.contextmanager
def _without_advice() -> Iterator[None]:
    """Suppress the warning of transformers that torch is missing; here it is not needed."""
    if "transformers" in sys.modules or _NO_WARNINGS in os.environ or importlib.util.find_spec("torch") is not None:
        yield
        return
    os.environ[_NO_WARNINGS] = "1"
    try:
        yield
    finally:
        del os.environ[_NO_WARNINGS]
