"""Known words of a shell script → what a shell computes of them: sums, tests, shortened."""

from __future__ import annotations

import ast
import fnmatch
import operator
import re

_BITS = 64
_LONGEST = 18
"""Digits of a number that 64 bits hold, whichever it is."""
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
    """Count an arithmetic expression of whole numbers as a shell does, in 64 bits.

    None where it is no such thing. Raises OverflowError where a number in it has more.

    >>> total("2 * (3 + 4) / 5"), total("-7 / 2"), total("9 ** 999999999")
    (2, -3, 3591297635458227769)
    """
    if re.search(rf"\d{{{_LONGEST + 1}}}", text):
        raise OverflowError
    try:
        return _counted(ast.parse(text.strip(), mode="eval").body, text.strip())
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return None


def _counted(node: ast.expr, text: str) -> int:
    """Count a sum of whole numbers."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inside = node.operand
        # A shell's minus binds before a power, and Python's after it.
        bare = "(" not in text[node.col_offset : inside.col_offset]
        if bare and isinstance(inside, ast.BinOp) and isinstance(inside.op, ast.Pow):
            return _power(_wrapped(-_counted(inside.left, text)), _counted(inside.right, text))
        return _wrapped(-_counted(inside, text))
    if isinstance(node, ast.BinOp):
        return _wrapped(_computed(node.op, _counted(node.left, text), _counted(node.right, text)))
    raise ValueError


def _computed(sign: ast.operator, left: int, right: int) -> int:
    match sign:
        case ast.Add():
            return left + right
        case ast.Sub():
            return left - right
        case ast.Mult():
            return left * right
        case ast.Pow():
            return _power(left, right)
        case ast.Div() | ast.Mod():  # towards zero, and the rest has the sign of what is divided
            whole = abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)
            return whole if isinstance(sign, ast.Div) else left - whole * right
        case _:
            raise ValueError


def _power(base: int, exponent: int) -> int:
    if exponent < 0:
        raise ValueError
    return _wrapped(pow(base, exponent, 1 << _BITS))


def _wrapped(number: int) -> int:
    """Return what 64 bits with a sign hold of a number."""
    half = 1 << (_BITS - 1)
    return (number + half) % (1 << _BITS) - half


def trimmed(value: str, how: str) -> list[str] | None:
    """Take a beginning or an end off, as `${NAME##*/}` does; None for other changes."""
    if how.startswith(("#", "%")):
        front, pattern = how[0] == "#", how.lstrip(how[0])
        sizes, fits = range(len(value) + 1), re.compile(fnmatch.translate(pattern))
        for size in reversed(sizes) if how[:2] in ("##", "%%") else sizes:
            if fits.match(value, 0, size) if front else fits.match(value, len(value) - size):
                return [value[size:] if front else value[: len(value) - size]]
        return [value]
    return [value.lower()] if how == ",," else [value.upper()] if how == "^^" else None
