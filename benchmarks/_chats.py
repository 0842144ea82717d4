"""Tokenized chats from the standard library's docstrings, with real length spread and labels on the assistant's tokens alone.

Every documented function or class gives up to two conversations: `answers` asks what it does and the docstring answers (most
tokens are the assistant's), `code` shows its source and asks for the docstring (most tokens are the user's). Nothing is
shipped or fetched.
"""

import importlib
import inspect
import random
import re
import textwrap
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from _models import SHAPES

Kind = Literal["answers", "code", "both"]
Turns = list[dict[str, str]]
MODULES = (
    "argparse ast asyncio.tasks base64 bisect calendar cmd codecs collections configparser contextlib copy csv dataclasses "
    "datetime decimal difflib email.message enum fileinput filecmp fnmatch fractions functools getpass gettext glob gzip "
    "heapq html http.client http.cookies imaplib inspect ipaddress json linecache locale logging mailbox mimetypes netrc "
    "ntpath numbers optparse os pathlib pdb pickle pickletools platform plistlib poplib posixpath pprint profile queue "
    "quopri random re reprlib sched secrets selectors shelve shlex shutil smtplib socket socketserver ssl statistics string "
    "subprocess tarfile tempfile textwrap threading timeit tokenize trace traceback types typing unittest.case "
    "unittest.mock urllib.parse urllib.request uuid warnings wave weakref webbrowser xml.dom.minidom xml.etree.ElementTree "
    "xmlrpc.client zipfile"
).split()


TOY_MODULES = ("calendar", "fractions", "heapq", "random", "shutil", "statistics", "textwrap", "threading", "zipfile")
"""Enough chats for a test."""


class Chats(NamedTuple):
    """Tokenized conversations, flat: `input_ids` and `labels` int32[T], `lengths` int64[B]; labels -100 for no loss."""

    input_ids: np.ndarray
    labels: np.ndarray
    lengths: np.ndarray


def conversations(kind: Kind = "both", modules: Sequence[str] = MODULES) -> Iterator[Turns]:
    """Yield two-turn `messages` of the standard library in the order of `modules`, the same for one Python version."""
    for name, thing in _documented(modules):
        docstring = inspect.cleandoc(thing.__doc__)
        if kind in ("answers", "both"):
            yield _turns(f"What does Python's `{name}` do?", docstring)
        if kind in ("code", "both") and (source := _source_without(thing, thing.__doc__)):
            yield _turns(f"Write the docstring of `{name}`.\n\n{source}", docstring)


def _turns(question: str, answer: str) -> Turns:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _documented(modules: Sequence[str]) -> Iterator[tuple[str, Any]]:
    seen: set[int] = set()
    for module_name in modules:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = importlib.import_module(module_name)
        for name, thing in sorted(vars(module).items()):
            members = [(name, thing)]
            if inspect.isclass(thing):
                members += [(f"{name}.{inner}", value) for inner, value in sorted(vars(thing).items())]
            for path, member in members:
                own = getattr(member, "__module__", None) == module_name and not path.rsplit(".", 1)[-1].startswith("_")
                if (
                    own
                    and (inspect.isfunction(member) or inspect.isclass(member))
                    and member.__doc__
                    and id(member) not in seen
                ):
                    seen.add(id(member))
                    yield f"{module_name}.{path}", member


def _source_without(thing: Any, docstring: str) -> str | None:
    if not inspect.isfunction(thing):
        return None
    try:
        source = textwrap.dedent(inspect.getsource(thing))
    except (OSError, TypeError):
        return None
    # The answer must not be in the question: cut the docstring where it is found verbatim, else leave the function out.
    lines = [line for line in docstring.strip().splitlines() if line.strip()]
    bare = re.sub(r'[rRuU]?("""|\'\'\')(.*?)\1', "", source, count=1, flags=re.DOTALL)
    return bare if lines and lines[0].strip() not in bare else None


def stand_in_encode(vocabulary: int) -> Callable[[str], list[int]]:
    """Return a tokenizer that needs no files: pieces of at most five characters, hashed to ids in [0, vocabulary).

    It makes about as many tokens as a real tokenizer, with a real text's spread of frequencies; the ids mean nothing.
    """
    pieces = re.compile(r"\s?\w{1,4}|\s+|[^\w\s]")
    return lambda text: [zlib.crc32(piece.encode()) % vocabulary for piece in pieces.findall(text)]


def tokenize_with_stand_in(turns: Turns, encode: Callable[[str], list[int]]) -> tuple[list[int], list[int]]:
    """Tokenize a conversation in a ChatML-like frame: (input_ids, labels); labels on the assistant's content and end."""
    input_ids: list[int] = []
    labels: list[int] = []
    for turn in turns:
        head, body = encode(f"<|im_start|>{turn['role']}\n"), encode(f"{turn['content']}<|im_end|>")
        input_ids += head + body
        labels += [-100] * len(head) + (body if turn["role"] == "assistant" else [-100] * len(body))
    return input_ids, labels


def make_chats(
    tokenize: Callable[[Turns], tuple[Any, Any]], *, kind: Kind, max_length: int, modules: Sequence[str] = MODULES
) -> Chats:
    """Tokenize and shuffle all conversations of at most `max_length` tokens; longer ones are left out, none is truncated."""
    turns = list(conversations(kind, modules))
    random.Random(0).shuffle(turns)
    tokenized = [tokenize(conversation) for conversation in turns]
    kept = [(np.asarray(ids, np.int32), np.asarray(labels, np.int32)) for ids, labels in tokenized if len(ids) <= max_length]
    lengths = np.array([len(ids) for ids, _ in kept], np.int64)
    return Chats(np.concatenate([ids for ids, _ in kept]), np.concatenate([labels for _, labels in kept]), lengths)


def behind_system_prompt(chats: Chats, tokens: int, vocabulary: int) -> Chats:
    """Put one made-up system prompt of so many tokens, which is not learned, before each chat."""
    prompt = np.random.default_rng(1).integers(3, vocabulary, tokens).astype(np.int32)
    starts = np.cumsum(chats.lengths) - chats.lengths
    before = np.repeat(starts, tokens)
    return Chats(
        np.insert(chats.input_ids, before, np.tile(prompt, len(starts))),
        np.insert(chats.labels, before, np.int32(-100)),
        chats.lengths + tokens,
    )


def chats_for(model: str, directory: Path, vocabulary: int, *, kind: Any, tokens: int, toy: bool) -> Chats:
    """Tokenize chats by the directory's own chat template, or by the stand-in tokenizer for a model made from a shape."""
    modules = TOY_MODULES if toy else MODULES
    if model in SHAPES:
        encode = stand_in_encode(vocabulary)
        return make_chats(lambda turns: tokenize_with_stand_in(turns, encode), kind=kind, max_length=tokens, modules=modules)
    from forge_data import load_tokenizer, tokenize

    tokenizer = load_tokenizer(str(directory))

    def by_template(turns: Any) -> tuple[Any, Any]:
        example = tokenize({"messages": turns}, tokenizer)
        return example.input_ids, example.labels

    return make_chats(by_template, kind=kind, max_length=tokens, modules=modules)
