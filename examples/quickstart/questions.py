"""Questions and answers from the docstrings of Python's standard library, which is read and never imported."""

from __future__ import annotations

import ast
import inspect
import random
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

ROWS = 2000
SHORTEST, LONGEST = 30, 400  # characters of an answer


def stdlib_questions(*, leave_out: str) -> list[dict[str, list[dict[str, str]]]]:
    """Return `messages` rows "What does Python's `x.y` do?" in a fixed order.

    The answer is the first paragraph of the docstring.
    """
    rows = {}
    for name, text in sorted(documented(Path(sysconfig.get_paths()["stdlib"]))):
        question = f"What does Python's `{name}` do?"
        answer = " ".join(inspect.cleandoc(text).split("\n\n")[0].split())
        if SHORTEST <= len(answer) <= LONGEST and question != leave_out:
            rows[question] = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    questions = sorted(rows)
    random.Random(0).shuffle(questions)  # noqa: S311 - an order, not a secret
    return [{"messages": rows[question]} for question in questions[:ROWS]]


def documented(stdlib: Path) -> Iterator[tuple[str, str]]:
    """Yield `(dotted name, docstring)` of the public functions, classes and methods under a folder of Python files."""
    for path in sorted(stdlib.rglob("*.py")):
        parts = path.relative_to(stdlib).with_suffix("").parts
        if any(part.startswith("_") and part != "__init__" for part in parts) or {
            "test",
            "tests",
            "site-packages",
            "idlelib",
            "lib2to3",
        } & set(parts):
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        module = ".".join(part for part in parts if part != "__init__")
        for node in tree.body:
            yield from named(node, module)


def named(node: ast.AST, owner: str) -> Iterator[tuple[str, str]]:
    """Yield a definition and, for a class, its methods."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or node.name.startswith("_"):
        return
    text = ast.get_docstring(node)
    if text:
        yield f"{owner}.{node.name}", text
    if isinstance(node, ast.ClassDef):
        for inner in node.body:
            yield from named(inner, f"{owner}.{node.name}")
