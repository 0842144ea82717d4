"""Known words of a shell script → what a shell computes of them: sums, tests, shortened."""

from __future__ import annotations

import ast
import fnmatch
import operator
import re
from collections.abc import Callable

_SUMS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARES = {
    "-eq": operator.eq, "-ne": operator.ne, "-lt": operator.lt, "-le": operator.le, "-gt": operator.gt, "-ge": operator.ge,
}  # fmt: skip


def tested(words: list[str]) -> bool | None:
    """Evaluate `[ ... ]` on what is known."""
    inside = [word for word in words[1:] if word not in ("]", "]]")]
    turned = bool(inside) and inside[0] == "!"
    inside = inside[turned:]
    if any("$" in word or "`" in word for word in inside):
        return None
    if len(inside) == 2 and inside[0] in ("-z", "-n"):
        found: bool | None = (not inside[1]) == (inside[0] == "-z")
    elif len(inside) == 1 and not inside[0].startswith("-"):
        found = bool(inside[0])
    elif len(inside) == 3 and inside[1] in ("=", "==", "!="):
        found = fnmatch.fnmatchcase(inside[0], inside[2]) == (inside[1] != "!=")
    elif len(inside) == 3 and inside[1] in _COMPARES and all(re.fullmatch(r"-?\d+", inside[n]) for n in (0, 2)):
        found = _COMPARES[inside[1]](int(inside[0]), int(inside[2]))
    else:
        return None
    return None if found is None else found != turned


def total(text: str) -> int | None:
    """Count an arithmetic expression of whole numbers; None where it is no such thing.

    >>> total("2 * (3 + 4) / 5")
    2
    """
    try:
        return _counted(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return None


def _counted(node: ast.expr) -> int:
    """Count a sum of whole numbers."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_counted(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _SUMS:
        found = int(_SUMS[type(node.op)](_counted(node.left), _counted(node.right)))
        if abs(found) < 10**15:
            return found
    raise ValueError


def trimmed(value: str, how: str) -> list[str] | None:
    """Take a beginning or an end off, as `${NAME##*/}` does; None for other changes."""
    if how.startswith(("#", "%")):
        front, pattern = how[0] == "#", how.lstrip(how[0])
        sizes = range(len(value) + 1)
        for size in reversed(sizes) if how[:2] in ("##", "%%") else sizes:
            part = value[:size] if front else value[len(value) - size :]
            if fnmatch.fnmatchcase(part, pattern):
                return [value[size:] if front else value[: len(value) - size]]
        return [value]
    return [value.lower()] if how == ",," else [value.upper()] if how == "^^" else None
