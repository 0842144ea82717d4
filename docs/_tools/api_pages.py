"""Sources of the six packages → Markdown pages of the API reference. Reads syntax trees; imports nothing of forge."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

PACKAGES = {
    "forge": "forge",
    "forge_data": "forge-data",
    "forge_packing": "forge-packing",
    "forge_accel": "forge-accel",
    "forge_dist": "forge-dist",
    "forge_algos": "forge-algos",
}
"""Import name → folder in packages/, in the order of the navigation."""
KINDS = ("Functions", "Classes", "Settings", "Errors", "Constants")
"""Sections of a page, after the training verbs."""


@dataclass(frozen=True)
class Name:
    """A public name and the syntax node that defines it."""

    name: str
    module: str
    """Module that defines it, such as `forge_data.store._token_store`."""
    node: ast.stmt
    text: str
    """Its docstring; empty where there is none."""
    is_verb: bool = False
    """Whether it is a training verb: a function made from a task, which no syntax tree has."""

    @property
    def kind(self) -> str:
        """Section of the page that it stands in, one of KINDS."""
        if isinstance(self.node, ast.FunctionDef | ast.AsyncFunctionDef):
            return "Functions"
        if not isinstance(self.node, ast.ClassDef):
            return "Constants"
        return next(
            (kind for kind, end in (("Settings", "Settings"), ("Errors", "Error")) if self.name.endswith(end)), "Classes"
        )

    @property
    def first_line(self) -> str:
        """First line of its docstring, for a table."""
        first = self.text.strip().partition("\n")[0]
        return escaped(first).replace("|", "\\|")


class Sources:
    """The packages' source files, parsed when they are first asked for."""

    def __init__(self, root: Path) -> None:
        """Take the root of the repository."""
        self._root = root
        self._trees: dict[str, ast.Module] = {}
        self._public: dict[str, list[Name]] = {}

    def path(self, module: str) -> Path:
        """File of a module, such as `forge_data.store._base`."""
        package, _, rest = module.partition(".")
        base = self._root.joinpath("packages", PACKAGES[package], "src", package, *rest.split(".") if rest else ())
        return base / "__init__.py" if base.is_dir() else base.with_suffix(".py")

    def tree(self, module: str) -> ast.Module:
        """Syntax tree of a module."""
        if module not in self._trees:
            self._trees[module] = ast.parse(self.path(module).read_text("utf-8"))
        return self._trees[module]

    def docstring(self, module: str) -> str:
        """Docstring of a module."""
        return ast.get_docstring(self.tree(module)) or ""

    def table(self, module: str, name: str) -> object:
        """Value of a literal that a module assigns; None where it assigns none."""
        value = _assigned(self.tree(module), name)
        return None if value is None else ast.literal_eval(value)

    def public(self, module: str) -> list[Name]:
        """Public names of a package (its `_PUBLIC` table) or of a public folder (its `__all__`), sorted."""
        if module not in self._public:
            self._public[module] = self._found(module)
        return self._public[module]

    def _found(self, module: str) -> list[Name]:
        table = self.table(module, "_PUBLIC")
        if isinstance(table, Mapping):
            homes = {name: f"{module}.{home}" for home, names in table.items() for name in names.split()}
        else:
            homes = dict.fromkeys(self.table(module, "__all__") or (), module)
        in_order = sorted(homes.items(), key=lambda item: item[0].lower())
        return [self.verb(home, name) or self.find(home, name) for name, home in in_order]

    def public_folders(self, module: str) -> list[str]:
        """Public names of a package that are packages themselves, such as `forge_algos.losses`."""
        folders = self.table(module, "_PACKAGES") or ()
        return [] if isinstance(folders, Mapping) else [f"{module}.{folder}" for folder in folders]

    def verb(self, module: str, name: str) -> Name | None:
        """Training verb that a module of forge defines: one with a task of that name, whose `about` is its docstring."""
        for node in self.tree(module).body if module.startswith("forge.verbs.") else ():
            if isinstance(node, ast.ClassDef):
                fields = {field: _assigned(node, field) for field in ("name", "about")}
                if all(isinstance(value, ast.Constant) for value in fields.values()) and fields["name"].value == name:
                    return Name(name, module, node, fields["about"].value, is_verb=True)
        return None

    def verb_docstring(self) -> str:
        """Find what the docstrings of all training verbs say of arguments, result and errors."""
        values = [node.value for node in self.tree("forge.verbs._registry").body if isinstance(node, ast.Assign)]
        return next(value.value for value in values if isinstance(value, ast.Constant) and "Raises:" in str(value.value))

    def find(self, module: str, name: str) -> Name:
        """Definition of a name, through the imports of the folders that hand it on."""
        statements = self.tree(module).body
        for node, after in zip(statements, [*statements[1:], None], strict=True):
            if getattr(node, "name", None) == name:
                return Name(name, module, node, ast.get_docstring(node) or "")
            if name in _targets(node):
                return Name(name, module, node, _text(after))
            if isinstance(node, ast.ImportFrom) and any((alias.asname or alias.name) == name for alias in node.names):
                original = next(alias.name for alias in node.names if (alias.asname or alias.name) == name)
                return self.find(node.module or "", original)
        raise LookupError(f"{module} defines no {name}")


def escaped(text: str) -> str:
    """Markdown in which `[a][b]` outside code is no link: docstrings index arrays so."""
    parts = re.split(r"(```.*?```|`[^`\n]+`)", text, flags=re.DOTALL)
    return "".join(part if index % 2 else part.replace("][", "]\\[") for index, part in enumerate(parts))


def _targets(node: ast.stmt) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _assigned(tree: ast.Module | ast.ClassDef, name: str) -> ast.expr | None:
    return next(
        (node.value for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign) and name in _targets(node)), None
    )


def _text(node: ast.stmt | None) -> str:
    value = node.value if isinstance(node, ast.Expr) else None
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else ""


def api_pages(sources: Sources) -> dict[str, str]:
    """Path below docs/ → Markdown, for the reference of every package and public folder."""
    pages = {"api/index.md": _index(sources)}
    for package in PACKAGES:
        pages[page_of(package)] = _package_page(sources, package)
        for folder in sources.public_folders(package):
            pages[page_of(folder)] = _page(sources, folder, sources.public(folder))
    return pages


def page_of(module: str) -> str:
    """Path below docs/ of the page of a package or public folder."""
    return f"api/{module}.md"


def public_names(sources: Sources) -> dict[str, str]:
    """Qualified public name → the page that explains it, below docs/."""
    found = {}
    for package in PACKAGES:
        for module in (package, *sources.public_folders(package)):
            found[module] = page_of(module)
            for name in sources.public(module):
                found.setdefault(f"{module}.{name.name}", page_of(_home(sources, package, name) or module))
    return found


def _home(sources: Sources, package: str, name: Name) -> str | None:
    """Public folder of a package that has the name too: it is explained there, once."""
    for folder in sources.public_folders(package):
        if any((other.name, other.module) == (name.name, name.module) for other in sources.public(folder)):
            return folder
    return None


def _index(sources: Sources) -> str:
    lines = ["# API reference", "", "Every public name of the six packages, from its docstring.", ""]
    lines += ["| package | turns |", "|---|---|"]
    for package in PACKAGES:
        first = sources.docstring(package).partition("\n")[0]
        lines += [f"| [`{package}`]({package}.md) | {first} |"]
        lines += [
            f"| [`{folder}`]({folder}.md) | {sources.docstring(folder).partition(chr(10))[0]} |"
            for folder in sources.public_folders(package)
        ]
    return "\n".join([*lines, ""])


def _package_page(sources: Sources, package: str) -> str:
    names = sources.public(package)
    elsewhere = {name.name: home for name in names if (home := _home(sources, package, name))}
    return _page(sources, package, names, elsewhere)


def _page(sources: Sources, module: str, names: list[Name], elsewhere: Mapping[str, str] | None = None) -> str:
    elsewhere = elsewhere or {}
    lines = [f"# {module}", "", sources.docstring(module), ""]
    lines += _verbs(sources, module, [name for name in names if name.is_verb])
    folders = sources.public_folders(module)
    if folders:
        lines += ["## Public folders", "", "| folder | |", "|---|---|"]
        lines += [f"| [`{folder}`]({folder}.md) | {sources.docstring(folder).partition(chr(10))[0]} |" for folder in folders]
        lines += [""]
    for kind in KINDS:
        of_kind = [name for name in names if not name.is_verb and name.kind == kind]
        if of_kind:
            lines += [f"## {kind}", "", "| name | |", "|---|---|"]
            for name in of_kind:
                page = f"{elsewhere[name.name]}.md#{elsewhere[name.name]}" if name.name in elsewhere else f"#{module}"
                lines.append(f"| [`{name.name}`]({page}.{name.name}) | {name.first_line} |")
            lines.append("")
            lines += _directives(module, [name for name in of_kind if name.name not in elsewhere])
    return "\n".join(lines)


def _directives(module: str, names: list[Name]) -> Iterator[str]:
    for name in names:
        yield f"::: {module}.{name.name}"
        yield ""


def _verbs(sources: Sources, module: str, verbs: list[Name]) -> Iterator[str]:
    if not verbs:
        return
    yield from ("## Training verbs", "", "```python", f"{module}.VERB(recipe=None, /, **settings) -> RunResult", "```", "")
    yield from _sections(sources.verb_docstring().format(settings="VERBSettings"))
    for name in verbs:
        yield from (
            f"### {module}.{name.name} {{ #{module}.{name.name} }}",
            "",
            f"{name.text} [Settings](../settings.md#{module}-{name.name})",
            "",
        )


def _sections(text: str) -> Iterator[str]:
    """Markdown of a docstring with the sections `Returns:` and `Raises:`."""
    about, *sections = re.split(r"^(Returns|Raises):$", text, flags=re.MULTILINE)
    yield about
    for title, section in zip(sections[::2], sections[1::2], strict=True):
        body = " ".join(section.split())
        yield from (f"**{title}:**", "")
        # Each entry begins with the errors that it is about: `A, b.B: why.`
        entries = re.split(r"(?<=\.) (?=[\w.]+Error[,:])", body) if title == "Raises" else [body]
        for entry in entries:
            names, _, why = entry.partition(": ") if title == "Raises" else ("", "", entry)
            yield f"- {', '.join(f'`{name}`' for name in names.split(', '))}: {why}" if names else why
        yield ""
