"""Shell script that calls ms-swift → flags of its training command, and environment."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from forge._errors import RecipeError

TRAINING = ("sft", "pt", "rlhf")
_OTHER = {
    "infer": "`forge generate` and `forge chat` answer prompts",
    "app": "`forge chat` answers prompts",
    "web-ui": "`forge sft --help` lists what may be set",
    "deploy": "`forge serve` answers requests",
    "rollout": "forge grpo has a server of its own: sampler=vllm",
    "export": "`forge export` merges, quantises and writes other formats",
    "merge-lora": "`forge export RUN --merge` merges an adapter",
    "eval": "`forge eval` scores a model",
    "sample": "`forge generate` answers prompts",
}
"""Command of swift that trains nothing → what there is here."""
_CALLED = re.compile(r"(?:.*/)?swift/cli/(\w+)\.py|swift\.cli\.(\w+)")
_ENDS = ("&&", "||", ";", "|", "&", ">", ">>", "2>&1", "2>", "&>", "<")
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_VALUE = re.compile(
    r"'[^']*'|\$\(expr ([^()]*)\)|\$\(\(([^()]*)\)\)|\$\{(\w+)(?::?[-=]([^{}]*))?\}|\$(\w+)",
)
"""What stands in single quotes, which the shell leaves alone; arithmetic; a variable, perhaps with a default."""
_ARRAY = re.compile(r"^[ \t]*(\w+)=\(([^()]*)\)[ \t]*$", re.MULTILINE)
_HERE = re.compile(r"<<-?\s*['\"]?(\w+)['\"]?")
"""Beginning of a text that a script hands to a command, up to a line of this word."""
_OF_TORCHRUN = ("nproc_per_node", "nnodes", "node_rank", "master_addr", "master_port")
_OF_ROWS = ("dataset", "val_dataset", "split_dataset_ratio", "columns", "max_length")
"""Flags of `swift export --to_cached_dataset` that say which rows are trained on."""
_LONGEST = 100


class Command(NamedTuple):
    """A call of swift."""

    name: str
    """`sft`, `rlhf`, ...; `megatron` for any of Megatron-SWIFT's."""
    flags: dict[str, Any]
    """Flag with underscores → its value as text, a list of several, or True."""
    environment: dict[str, str]
    """Variables that it is called with, and what torchrun is told."""
    stray: list[str]
    """What stands where the shell gives it to no command."""


def script_values(text: str, name: str) -> dict[str, Any] | None:
    """Read the flags of a script's training command as a mapping; None where it calls no swift.

    The command is under `swift_command`, the environment under `ENV`, as in swift's YAML files.

    Raises:
        RecipeError: it calls swift and trains nothing, or trains more than once, or cannot be read as a shell would.
    """
    found = list(_commands(text, name))
    if not found and name.endswith((".sh", ".bash")):
        raise RecipeError(f"{name}: calls no training of ms-swift, verl or OpenRLHF (loops are not followed).")
    if not found:
        return None
    trained = [each for each in found if each.name in TRAINING]
    if not trained:
        first = found[0].name
        if any(each.name == "megatron" for each in found):
            raise RecipeError(
                f"{name}: calls megatron, whose flags are Megatron's; what is converted is swift's training by transformers. "
                "forge divides layers and experts with tp_size and ep_size."
            )
        raise RecipeError(
            f"{name}: calls swift {first}, which trains nothing, so that there is no recipe of it: {_OTHER[first]}."
        )
    if len(trained) > 1 and any(each[:2] != trained[0][:2] for each in trained):
        names = ", ".join(f"swift {each.name}" for each in trained)
        raise RecipeError(f"{name}: trains {len(trained)} times ({names}): a recipe is of one run; keep one command.")
    command = trained[0]
    named = next((flag for flag in command.flags if flag.endswith((".yaml", ".yml", ".json"))), None)
    if named is not None:
        raise RecipeError(f"{name}: its flags stand in {named}: convert that file.")
    cached = next((each.flags for each in found if each.name == "export" and "to_cached_dataset" in each.flags), {})
    rows = {flag: cached[flag] for flag in _OF_ROWS if flag in cached}  # made by the same script
    stray = {"stray_flags": command.stray} if command.stray else {}
    return {"swift_command": command.name, "ENV": command.environment, **rows, **command.flags, **stray}


def _commands(text: str, name: str) -> Iterator[Command]:
    """Find the calls of swift in a script, in order."""
    variables: dict[str, str] = {}
    last: Command | None = None
    for line in _lines(_without_arrays(text)):
        try:
            words = shlex.split(_filled(line, variables))
        except ValueError as error:
            if "swift" not in line:
                continue
            raise RecipeError(f"{name}: {line.strip()[:_LONGEST]!r} cannot be read as a command: {error}.") from error
        for part in _parts(words):
            own: dict[str, str] = {}
            rest = part[1:] if part[0] == "export" else part
            while rest and (assigned := _ASSIGNED.fullmatch(rest[0])):
                own[assigned[1]] = assigned[2]
                rest = rest[1:]
            if not rest:
                variables |= own
                continue
            if rest[0] in ("echo", "printf"):
                continue
            if rest[0].startswith("--") and last is not None:
                last.stray.append(" ".join(rest)[:_LONGEST])  # behind a comment, which ends a command
                continue
            at, called = _call(rest)
            if called is not None:
                last = Command(called, _flags(rest[at:]), {**_exported(variables), **own, **_torchrun(rest[:at])}, [])
                yield last


def _lines(text: str) -> Iterator[str]:
    """Join lines that go on, behind a backslash and in quotes; a comment ends a command."""
    pending, until = "", ""
    for line in text.splitlines():
        if until:
            until = "" if line.strip() == until else until
            continue
        here = _HERE.search(line)
        if here is not None and not _scan(f"{pending}{line}")[0]:
            pending, until = "", here[1]
            continue
        whole = f"{pending}{line}"
        quoted, comment = _scan(whole)
        if comment is not None:
            yield whole[:comment]
            pending = ""
        elif quoted:
            pending = f"{whole}\n"
        elif line.endswith("\\") and not line.endswith("\\\\"):
            pending = f"{whole[:-1]} "
        else:
            yield whole
            pending = ""
    if pending.strip():
        yield pending


def _without_arrays(text: str) -> str:
    """Put the words of arrays where a script names all of them."""
    for name, words in _ARRAY.findall(text):
        kept = " ".join(line for line in words.splitlines() if not line.lstrip().startswith("#"))
        text = re.sub(r"\"?\$\{" + name + r"\[[@*]\]\}\"?", lambda _, kept=kept: kept, text)
    return _ARRAY.sub("", text)


def _scan(text: str) -> tuple[bool, int | None]:
    """Return whether a quote is open at the end, and where a comment begins."""
    quote, before = "", " "
    escaped = False
    for at, sign in enumerate(text):
        if escaped:
            escaped = False
        elif sign == "\\" and quote != "'":
            escaped = True
        elif quote:
            quote = "" if sign == quote else quote
        elif sign in "'\"":
            quote = sign
        elif sign == "#" and before.isspace():
            return False, at
        before = sign
    return bool(quote), None


def _filled(line: str, variables: dict[str, str]) -> str:
    """Put in variables that the script sets, and arithmetic; what is unknown stays."""

    def value(found: re.Match[str]) -> str:
        sums = found[1] or found[2]
        if sums is not None:
            counted = _sum(_filled(sums, variables) if "$" in sums else re.sub(r"[A-Za-z_]\w*", _named, sums))
            return found[0] if counted is None else str(counted)
        name = found[3] or found[5]
        if name is None:
            return found[0]
        if "=" in found[0] and found[4] is not None:
            variables.setdefault(name, found[4])  # ${NAME:=value} sets it
        return variables.get(name, found[4] if found[4] is not None else found[0])

    def _named(found: re.Match[str]) -> str:
        return variables.get(found[0], found[0])

    return _VALUE.sub(value, line)


def _sum(text: str) -> int | None:
    """Count `16 / 4` in whole numbers, products first; None where it is no such thing."""
    words = re.findall(r"\d+|[-+*/%]|\S", text.replace("\\*", "*"))
    if len(words) % 2 == 0 or not all(word.isdigit() and len(word) < 10 for word in words[::2]):
        return None
    numbers, signs = [int(words[0])], list[str]()
    for sign, word in zip(words[1::2], words[2::2], strict=True):
        other = int(word)
        if sign in "/%" and not other:
            return None
        if sign in "*/%":
            left = numbers[-1]
            numbers[-1] = left * other if sign == "*" else left // other if sign == "/" else left % other
        elif sign in "+-":
            numbers.append(other)
            signs.append(sign)
        else:
            return None
    return numbers[0] + sum(each if sign == "+" else -each for sign, each in zip(signs, numbers[1:], strict=True))


def _parts(words: list[str]) -> Iterator[list[str]]:
    """Divide words at what ends a command."""
    part: list[str] = []
    for word in words:
        if word in _ENDS or word.endswith(";"):
            part += [word[:-1]] if word.endswith(";") and len(word) > 1 else []
            if part:
                yield part
            part = []
        else:
            part.append(word)
    if part:
        yield part


def _call(words: list[str]) -> tuple[int, str | None]:
    """Return where the flags of a call of swift begin, and its command."""
    for at, word in enumerate(words):
        if called := _CALLED.fullmatch(word):
            name = (called[1] or called[2]).replace("_", "-")
            if name == "main":
                continue
            return at + 1, name if name in (*TRAINING, *_OTHER) else "megatron" if "megatron" in word else None
        if "swift/cli/_megatron" in word or word.rpartition("/")[2] == "megatron":
            return at + 1, "megatron"
        if word.rpartition("/")[2] == "swift" and at + 1 < len(words):
            name = words[at + 1].replace("_", "-")
            if name in (*TRAINING, *_OTHER):
                return at + 2, name
    return 0, None


def _flags(words: list[str]) -> dict[str, Any]:
    """Read flags and their values; the last of a flag that is given twice holds."""
    found: dict[str, Any] = {}
    name, values = "", list[str]()
    for word in [*(each for each in words if each not in ("$@", "$*", "${@}")), "--"]:
        if re.match(r"--[A-Za-z]|--$", word):
            if name:
                found[name] = values[0] if len(values) == 1 else values or True
            elif values:
                found |= dict.fromkeys(values, True)  # a file with flags
            name, equals, value = word[2:].partition("=")
            name, values = name.replace("-", "_"), [value] if equals else []
        else:
            values.append(word)
    return found


def _torchrun(words: list[str]) -> dict[str, str]:
    """Read how many processes torchrun starts, under swift's names in the environment."""
    flags = _flags(words) if any(word.endswith(("torchrun", "torch.distributed.run")) for word in words) else {}
    return {name.upper(): str(flags[name]) for name in _OF_TORCHRUN if isinstance(flags.get(name), str)}


def _exported(variables: Mapping[str, str]) -> dict[str, str]:
    """Return variables whose names are those of an environment."""
    return {name: value for name, value in variables.items() if name.isupper()}
