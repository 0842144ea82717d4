"""Imports within one package, however they are spelled; read by the laws of its folders."""

from __future__ import annotations

import ast
import re
from functools import cache
from typing import TYPE_CHECKING

from .repository import called, nodes, prose

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from .repository import Package

IMPORTERS = {"import_module", "__import__", "find_spec", "run_module"}


def own_imports(
    package: Package, module: str, tree: ast.Module, modules: Mapping[str, bool], *, rows: bool = True
) -> Iterator[tuple[int, str]]:
    """(line, module) of each use of the package's own files, however it is spelled.

    Imports at any depth, conditional, deferred or for type checkers only; relative ones; a dotted name such as
    `forge_data.store._writer`, whatever its first part is called here; a name that an `__init__` gathers, for the module that
    defines it; and a string that names a module, as `import_module`, `sys.modules` and `python -m` take it. With `rows=False`
    such strings are left out, as the rows of a table and the groups of entry points are.
    """
    root, here, documentation, loads = package.import_name, package_of(module, modules), prose(tree), _importers(tree)
    bound, named = {root: root}, set(modules) - {root}
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            bound |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom):
            start = _absolute(here, node.level, node.module or "")
            full = {alias.asname or alias.name: f"{start}.{alias.name}" for alias in node.names}
            bound |= {name: target for name, target in full.items() if target in modules}

    def names(node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = _absolute(here, node.level, node.module or "")
            yield from (f"{start}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute):
            first, *rest = _dotted(node)
            if first in bound:
                yield ".".join([bound[first], *rest])
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            if rows and (name := node.value.partition(":")[0]) in named:
                yield name
        elif isinstance(node, ast.Call) and loads(node):
            name = getattr(node.args[0], "value", None)
            if isinstance(name, str) and name.startswith("."):
                yield _absolute(here, len(name) - len(name.lstrip(".")), name.lstrip("."))

    for node in nodes(tree):
        for name in names(node):
            if name.partition(".")[0] == root:
                yield getattr(node, "lineno", 0), _home_of(package, name, modules)


def dynamic_imports(package: Package, tree: ast.Module) -> Iterator[int]:
    """Lines of imports whose module's name is put together from the package's own."""
    own, loads = re.compile(rf"\b{package.import_name}\b|__name__|__package__"), _importers(tree)
    for node in nodes(tree):
        called_with = node.args[0] if isinstance(node, ast.Call) and loads(node) else None
        if called_with and not isinstance(called_with, ast.Constant) and own.search(ast.unparse(called_with)):
            yield called_with.lineno


@cache
def _importers(tree: ast.Module) -> Callable[[ast.Call], bool]:
    """Whether a call imports by name: `import_module(...)` and its like, under another name too."""
    imported = [alias for node in nodes(tree) if isinstance(node, ast.ImportFrom) for alias in node.names]
    known = IMPORTERS | {alias.asname for alias in imported if alias.name in IMPORTERS}
    return lambda call: bool(call.args) and called(call).rpartition(".")[2] in known


def package_of(module: str, modules: Mapping[str, bool]) -> str:
    """What relative imports of a module start from, its `__package__`."""
    return module if modules.get(module) else module.rpartition(".")[0]


def _absolute(package: str, level: int, name: str) -> str:
    """The absolute name of a relative one; level 0 is absolute already."""
    base = package.split(".")[: len(package.split(".")) - level + 1] if level else []
    return ".".join([*base, *filter(None, [name])])


def _dotted(node: ast.expr) -> list[str]:
    """The parts of `a.b.c`; the first is empty where that is no name."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.insert(0, node.attr)
        node = node.value
    return [node.id if isinstance(node, ast.Name) else "", *parts]


def _home_of(package: Package, name: str, modules: Mapping[str, bool]) -> str:
    """The module that a dotted name lies in; of a name that an `__init__` gathers, the one that defines it."""
    found, *rest = name.split(".")
    for part in rest:
        if f"{found}.{part}" not in modules:
            gathered = package.gathered.get(found, {}).get(part)
            return _home_of(package, gathered, modules) if gathered else found
        found = f"{found}.{part}"
    return found
