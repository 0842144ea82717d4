"""Directory of a model → its processor, and the digests of the files that say what it does."""

import contextlib
import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_data._errors import TokenizerError
from forge_data.media._processor import ModelProcessor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
"""Files of a directory that say what its processor does."""


def processor_files(directory: str | os.PathLike[str]) -> dict[str, str]:
    """Return the SHA-256 of each file that says what a directory's processor does.

    Of a name on the Hub, those of the files in its cache.
    """
    name, found = os.fspath(directory), {}
    for file in _FILES:
        path: Any = os.path.join(name, file)
        if name and not os.path.isdir(name):
            from huggingface_hub import try_to_load_from_cache

            with contextlib.suppress(ValueError):
                path = try_to_load_from_cache(name, file)
        if isinstance(path, str) and os.path.isfile(path):
            found[file] = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    return found


def load_processor(directory: str | os.PathLike[str], tokenizer: "PreTrainedTokenizerBase | None" = None) -> ModelProcessor:
    """Load the processor of a model's directory, or of its name on the Hub.

    No code that comes with it is run.

    Args:
        directory: of the model or its tokenizer.
        tokenizer: to be used in place of the directory's own.

    Raises:
        TokenizerError: none is there, one that needs a package that is not installed, or one of which nothing is known.
    """
    name = os.fspath(directory)
    if not name:
        raise TokenizerError(
            "rows have media, and the tokenizer was not loaded from a directory, where the model's processor would be; load "
            "it from the model's directory"
        )
    try:
        from transformers import AutoProcessor

        processor: Any = AutoProcessor.from_pretrained(name, trust_remote_code=False)
    except Exception as error:
        # transformers raises ImportError, OSError, ValueError, KeyError, TypeError, by what is missing.
        raise TokenizerError(_not_loaded(name, error)) from error
    return ModelProcessor(processor, tokenizer)


def _not_loaded(name: str, error: Exception) -> str:
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    package = next((each for each in ("torchvision", "torchaudio", "pillow") if each in line.lower()), None)
    if package is None and not isinstance(error, ImportError):
        return (
            f"there are media, and no processor of them can be loaded from {name!r}: {line.rstrip('.')}; use a model "
            "that takes them, with its preprocessor_config.json or processor_config.json beside the tokenizer"
        )
    remedy = {
        "torchvision": "install the torchvision that belongs to this torch",
        "torchaudio": "install the torchaudio that belongs to this torch",
        "pillow": "install pillow",
        None: "install it",
    }
    return (
        f"there are media, and the processor of {name!r} needs a package that cannot be imported: "
        f"{line.partition('. ')[0]}; {remedy[package]}"
    )
