"""Everything that a store is made from → one SHA-256; equal inputs give equal stores."""

import hashlib
import importlib.metadata
import json
import os
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

import attrs

import forge_data
from forge_data._errors import DataError
from forge_data._options import Options, PairOptions, PromptOptions, TextOptions
from forge_data._own_reading import NOTHING_OWN
from forge_data.formats._registry import plug_in_identity
from forge_data.media._load import processor_files
from forge_data.reading._preprocess import Preprocess, load_preprocess
from forge_data.store._manifest import VERSION
from forge_data.tokenizing._stop_tokens import stop_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from forge_data.reading._sources import Source

_LIBRARIES = ("transformers", "tokenizers", "jinja2")
"""Libraries that may turn the same rows into other tokens in another version."""
_OF_MEDIA = ("pillow", "torchvision", "av", "soundfile", "soxr")
"""Libraries that may read the same media otherwise in another version, where they are installed."""
_LATER = {"max_samples": None, "system_prompt": None, "train_on_turn_end": "turn"}
"""Options that stores of earlier releases have not, with the value under which the fingerprint is the same."""


def fingerprint_of_inputs(
    sources: "Sequence[Source]",
    tokenizer: "PreTrainedTokenizerBase | None",
    options: "Options | PromptOptions | TextOptions | PairOptions",
    preprocess: Preprocess | None,
    seed: int,
) -> str | None:
    """Hash everything that decides what is in a store; None where that is unknown beforehand.

    It is of rows that are read only once, and of a preprocess without identity.

    The directory of a file is not part of it, but its name is, which `store.source(i)` returns. Files of images are read with
    the rows, so it does not know them: whoever opens a store again compares them with it.
    """
    if preprocess is not None and preprocess.identity is None:
        return None
    own_functions = {name: load_preprocess(name) for name in {source.own.preprocess for source in sources} if name is not None}
    if any(each is None or each.identity is None for each in own_functions.values()):
        return None
    digests = [source.digest() for source in sources]
    if None in digests:
        return None
    template = getattr(tokenizer, "chat_template", None)
    inputs: dict[str, Any] = {
        "version": VERSION,
        "libraries": _versions(_LIBRARIES) | {"forge-data": forge_data.__version__},
        "sources": [
            # Settings of its own only where there are some: stores of earlier releases know none.
            [
                source.name,
                digest,
                source.group,
                source.weight,
                *([source.own.as_dict()] if source.own != NOTHING_OWN else []),
            ]
            for source, digest in zip(sources, digests, strict=True)
        ],
        "tokenizer": _tokenizer(tokenizer) if tokenizer is not None else None,
        "template": template,
        # A template that writes the date gives other tokens tomorrow.
        "date": datetime.now().astimezone().date().isoformat() if "strftime_now" in json.dumps(template) else None,
        "options": [type(options).__name__, _values(options)],
        "stops": stop_tokens(tokenizer, options.turn_end) if tokenizer is not None and isinstance(options, Options) else (),
        "preprocess": preprocess.identity if preprocess is not None else None,
        "seed": seed,
    }
    if options.media and tokenizer is not None:
        inputs["processor"] = [processor_files(tokenizer.name_or_path), _versions(_OF_MEDIA)]
    if own_functions:
        inputs["own_preprocess"] = sorted(each.identity for each in own_functions.values() if each and each.identity)
    if isinstance(options, Options):
        named = dict.fromkeys(source.own.data_format or options.format for source in sources)
        if others := {name: found for each in named for name, found in plug_in_identity(each).items()}:
            inputs["formats"] = others
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()


def stamps_of(sources: "Sequence[Source]") -> list[tuple[int, int] | None]:
    """Return size and modification time of each source that is a local file; None for others."""
    stamps: list[tuple[int, int] | None] = []
    for source in sources:
        try:
            found = os.stat(source.path)
            stamps.append((found.st_size, found.st_mtime_ns))
        except (OSError, ValueError):
            stamps.append(None)
    return stamps


def check_stamps(sources: "Sequence[Source]", before: list[tuple[int, int] | None]) -> None:
    """Make sure that what was read is what was fingerprinted.

    Raises:
        DataError: a file changed in between.
    """
    for source, then, now in zip(sources, before, stamps_of(sources), strict=True):
        if then != now:
            raise DataError(f"{source.path} changed while it was read; prepare it again once nothing writes to it")


def _values(options: Any) -> dict[str, Any]:
    # A chat template is hashed itself, wherever it was.
    values = attrs.asdict(options) | {"chat_template": None}
    return {name: value for name, value in values.items() if name not in _LATER or value != _LATER[name]}


def _versions(libraries: Sequence[str]) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in libraries:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def _tokenizer(tokenizer: "PreTrainedTokenizerBase") -> list[Any]:
    return [
        type(tokenizer).__name__,
        hashlib.sha256(_backend(tokenizer).encode()).hexdigest(),
        {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        # An attribute of transformers: whether `<|im_end|>` in a text is that token or letters.
        bool(getattr(tokenizer, "split_special_tokens", False)),
    ]


def _backend(tokenizer: Any) -> str:
    """Return the fast tokenizer as JSON, without truncation and padding set by the last call."""
    text: str = tokenizer.backend_tokenizer.to_str()
    if '"truncation":null,"padding":null' in text[:80]:
        return text
    state = json.loads(text) | {"truncation": None, "padding": None}
    return json.dumps(state, ensure_ascii=False, separators=(",", ":"))
