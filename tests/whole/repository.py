"""The repository as files: its packages, their sources as syntax trees, and what they declare. Imports no package of it."""

from __future__ import annotations

import ast
import re
import tomllib
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
LEAVES = ("forge-data", "forge-packing", "forge-accel", "forge-dist", "forge-algos")
FACADE = "forge"

# Distributions that import under another name; every other one imports as its own name with underscores.
_IMPORT_NAMES = {"pyyaml": "yaml", "pillow": "PIL", "forge_llm": "forge", "mlflow_skinny": "mlflow"}


@dataclass(frozen=True)
class Source:
    """One Python file of one package."""

    path: Path

    @cached_property
    def tree(self) -> ast.Module:
        """Its syntax tree, made when it is first asked for: every process that runs tests lists the sources, few read all."""
        return ast.parse(self.path.read_text(), str(self.path))

    @property
    def where(self) -> str:
        """Path from the root of the repository, for messages."""
        return self.path.relative_to(ROOT).as_posix()

    @property
    def module(self) -> str:
        """Name that imports it, such as `forge_data.store._writer`."""
        parts = self.path.relative_to(ROOT).with_suffix("").parts[3:]
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@dataclass(frozen=True)
class Package:
    """One folder of packages/."""

    folder: str

    @property
    def import_name(self) -> str:
        """Name that imports it, such as `forge_data`."""
        return self.folder.replace("-", "_")

    @property
    def source_dir(self) -> Path:
        """Folder of its Python files."""
        return ROOT / "packages" / self.folder / "src" / self.import_name

    @cached_property
    def project(self) -> dict[str, object]:
        """The `[project]` table of its pyproject.toml."""
        return tomllib.loads((ROOT / "packages" / self.folder / "pyproject.toml").read_text())["project"]

    @cached_property
    def required(self) -> set[str]:
        """Import names of what it always needs."""
        return {_import_name(line) for line in self.project["dependencies"]}

    @cached_property
    def optional(self) -> set[str]:
        """Import names of what its extras install."""
        extras = self.project.get("optional-dependencies", {})
        return {_import_name(line) for lines in extras.values() for line in lines} - self.required

    @cached_property
    def sources(self) -> list[Source]:
        """Every Python file that is shipped."""
        return [Source(path) for path in sorted(self.source_dir.rglob("*.py"))]

    @cached_property
    def modules(self) -> dict[str, bool]:
        """Every module → whether it is a folder's `__init__`."""
        return {source.module: source.path.name == "__init__.py" for source in self.sources}

    @cached_property
    def gathered(self) -> dict[str, dict[str, str]]:
        """`__init__` → each name that it gathers, by an import or in the table `_PUBLIC` → where the name comes from."""
        found: dict[str, dict[str, str]] = {}
        for source in self.sources:
            if self.modules[source.module]:
                found[source.module] = names = {}
                for node in source.tree.body:
                    if isinstance(node, ast.ImportFrom) and node.module:
                        names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
                    elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_PUBLIC":
                        table = ast.literal_eval(node.value)
                        names |= {name: f"{self.import_name}.{key}.{name}" for key in table for name in table[key].split()}
        return found


PACKAGES = {folder: Package(folder) for folder in (*LEAVES, FACADE)}


def _import_name(requirement: str) -> str:
    name = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert name, f"no distribution name in {requirement!r}"
    plain = re.sub(r"[-.]", "_", name[0]).lower()
    return _IMPORT_NAMES.get(plain, plain)


@dataclass(frozen=True)
class Import:
    """One top-level name that a file imports, and whether the import is deferred (in a function, or for type checkers only)."""

    name: str
    line: int
    deferred: bool


@cache
def imports(tree: ast.Module) -> list[Import]:
    """Every import of a file, those spelled `import_module("x")` and `__import__("x")` too; relative ones are its own."""
    return list(_imports(tree, deferred=False))


def _imports(node: ast.AST, *, deferred: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name.partition(".")[0], child.lineno, deferred)
        elif isinstance(child, ast.ImportFrom) and not child.level:
            yield Import((child.module or "").partition(".")[0], child.lineno, deferred)
        elif isinstance(child, ast.Call) and called(child).rpartition(".")[2] in {"import_module", "__import__"}:
            first = child.args[0] if child.args else None
            if isinstance(first, ast.Constant) and isinstance(first.value, str) and not first.value.startswith("."):
                yield Import(first.value.partition(".")[0], child.lineno, deferred)
        if isinstance(child, ast.If) and ast.unparse(child.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}:
            for statement in child.body:
                yield from _imports(ast.Module([statement], []), deferred=True)
            for statement in child.orelse:
                yield from _imports(ast.Module([statement], []), deferred=deferred)
        else:
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _imports(child, deferred=deferred or inside)


def called(call: ast.Call) -> str:
    """Dotted name of what a call calls, such as `torch.load`."""
    node, parts = call.func, []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ast.unparse(call.func)


@cache
def nodes(tree: ast.Module) -> list[ast.AST]:
    """Return every node of a tree, walked once for all the laws that read it."""
    return list(ast.walk(tree))


@cache
def prose(tree: ast.Module) -> set[int]:
    """Ids of the string nodes that are documentation: bare strings, which is what docstrings are."""
    return {id(node.value) for node in nodes(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)}


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, text) of the docstrings of a file's module, classes and functions, indentation removed."""
    for node in nodes(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text is not None:
                yield node.body[0].lineno, text


def field_docstrings(tree: ast.Module, class_name: str) -> dict[str, str]:
    """Field → the bare string under it, in one class."""
    found = {}
    for node in nodes(tree):
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            for field, text in zip(node.body, node.body[1:], strict=False):
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
                    value = text.value
                    if isinstance(value, ast.Constant) and isinstance(value.value, str):
                        found[field.target.id] = value.value
    return found
