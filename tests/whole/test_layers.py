"""The shape of each package's inside: folders import downwards only, by the tables below; no circles; no crowded folder, no long file."""

from __future__ import annotations

import ast
import warnings
from collections import defaultdict
from typing import TYPE_CHECKING

import pytest

from .house import PACKAGES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from .house import Package

# Folders from the lowest stage to the highest; "." is the package's own files. A folder imports itself and what stands in a line above it.
STAGES = {
    "forge-data": """
        .
        reading  formats  findings
        chat_template
        masking
        tokenizing
        store
        linting  viewing
        preparing
        cli
    """,
    "forge-packing": """
        .
        ordering  dividing/kernels  collating
        dividing
        planning
    """,
    "forge-accel": """
        .
        attention
        devices
    """,
    "forge-dist": """
        .
        environment  loading
        ranks  adapters
        strategies  checkpoints  launching
        strategies/fsdp  strategies/zero
        exporting
        verifying
        gguf
    """,
    "forge-algos": """
        .  settings
        batches  optimizers
        isolation  losses
        losses/preference  losses/policy  losses/distillation
        heads
        adaptations/base
        adaptations/osft  adaptations/peft
        adaptations
        objectives
        objectives/preference  objectives/policy
        online/sampling  online/rewards  online/rollout
        online/updates
        online  training
    """,
    "forge": """
        .
        tasks/items
        settings
        tasks
        run
        verbs  exporting  reports
        cli
    """,
}
# Imports that run upwards on purpose: (the file that imports, the module it imports), with the reason.
UPWARDS = {
    # TokenStore.from_jsonl tokenizes: a constructor belongs to its class, and what it does is a stage of its own.
    ("forge_data.store._token_store", "forge_data.preparing._from_jsonl"),
}
MAX_MODULES = 20
LONG, TOO_LONG = 400, 500


def own_imports(package: Package, module: str, tree: ast.Module, modules: Iterable[str]) -> Iterator[tuple[int, str]]:
    """(line, module) of every import of the package's own files: deferred ones and those for type checkers too."""
    known, name = set(modules), package.import_name
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name.partition(".")[0] == name)
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").partition(".")[0] == name:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield node.lineno, inner if inner in known else node.module or ""
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in {"import_module", "importlib.import_module"}:
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant) and str(first.value).partition(".")[0] == name:
                yield node.lineno, first.value


def folder_of(package: Package, module: str, modules: Mapping[str, bool]) -> str:
    """The folder of a module, "." for the package's own: `forge_data.store._writer` → `store`."""
    parts = module.split(".")[1:]
    return "/".join(parts if modules.get(module) else parts[:-1]) or "."


def modules_of(package: Package) -> dict[str, bool]:
    """Every module of a package → whether it is a folder's `__init__`."""
    return {source.module: source.path.name == "__init__.py" for source in package.sources}


def stages_of(table: str) -> dict[str, int]:
    """Each folder → its line in the table."""
    lines = [line.split() for line in table.strip().splitlines()]
    return {folder: stage for stage, line in enumerate(lines) for folder in line}


def is_public_api(module: str, target: str, modules: Mapping[str, bool]) -> bool:
    """A folder's `__init__` that gathers names of its own files and subfolders, or `python -m`, which calls the command line."""
    return module.endswith(".__main__") or (bool(modules.get(module)) and target.startswith(f"{module}."))


def upward(package: Package, module: str, tree: ast.Module, modules: Mapping[str, bool], table: str) -> Iterator[str]:
    """Imports of a file that do not run downwards by the table."""
    stages, here = stages_of(table), folder_of(package, module, modules)
    for line, target in own_imports(package, module, tree, modules):
        there = folder_of(package, target, modules)
        allowed = (module, target) in UPWARDS or is_public_api(module, target, modules)
        if there != here and stages[there] >= stages[here] and not allowed:
            yield f"{module}:{line}: {target} ({here} may not import {there})"


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """The groups of two and more files that import each other, directly or around: strongly connected components (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in graph.get(node, ()):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            group = []
            while not group or group[-1] != node:
                group.append(stack.pop())
            if len(group) > 1 or node in graph.get(node, ()):
                found.append(sorted(group))

    for node in graph:
        if node not in index:
            visit(node)
    return found


def graph_of(package: Package) -> dict[str, set[str]]:
    """Which file imports which; a package's public API, which loads names lazily, is left out, and so are the named upward imports."""
    modules = modules_of(package)
    graph: dict[str, set[str]] = {}
    for source in package.sources:
        if source.module != package.import_name:
            targets = {target for _, target in own_imports(package, source.module, source.tree, modules)}
            graph[source.module] = {t for t in targets - {package.import_name} if (source.module, t) not in UPWARDS}
    return graph


def crowded(modules: Mapping[str, bool], package: Package, limit: int = MAX_MODULES) -> dict[str, int]:
    """Folders that hold more modules than the limit, `__init__` not counted."""
    counts: dict[str, int] = defaultdict(int)
    for module, is_folder in modules.items():
        if not is_folder:
            counts[folder_of(package, module, modules)] += 1
    return {folder: count for folder, count in counts.items() if count > limit}


@pytest.mark.parametrize("folder", PACKAGES)
def test_the_table_names_every_folder(folder: str) -> None:
    """Each folder of a package stands in its table once, and no other does."""
    package = PACKAGES[folder]
    modules = modules_of(package)
    assert sorted({folder_of(package, module, modules) for module, is_folder in modules.items() if not is_folder}) == sorted(
        STAGES[folder].split()
    )


@pytest.mark.parametrize("folder", PACKAGES)
def test_folders_import_downwards(folder: str) -> None:
    """A file imports its own folder and lower stages only, type-only and deferred imports included."""
    package = PACKAGES[folder]
    modules = modules_of(package)
    found = [
        line
        for source in package.sources
        if source.module != package.import_name
        for line in upward(package, source.module, source.tree, modules, STAGES[folder])
    ]
    assert found == []


@pytest.mark.parametrize("folder", PACKAGES)
def test_no_circle_of_files(folder: str) -> None:
    """No two files import each other, not even around several others or for types only."""
    assert circles(graph_of(PACKAGES[folder])) == []


def test_every_upward_import_is_there() -> None:
    """An exception that nobody uses any more is taken out of the list."""
    found = {
        (source.module, target)
        for package in PACKAGES.values()
        for source in package.sources
        for _, target in own_imports(package, source.module, source.tree, modules_of(package))
    }
    assert found >= UPWARDS


@pytest.mark.parametrize("folder", PACKAGES)
def test_no_folder_is_crowded(folder: str) -> None:
    """No folder holds more than 20 modules: beyond that no newcomer finds anything."""
    package = PACKAGES[folder]
    assert crowded(modules_of(package), package) == {}


@pytest.mark.parametrize("folder", PACKAGES)
def test_each_folder_says_what_it_turns_into_what(folder: str) -> None:
    """A folder's `__init__.py` begins with a sentence on what it turns into what, and one on what it may import."""
    for source in PACKAGES[folder].sources:
        if source.path.name == "__init__.py" and source.module != PACKAGES[folder].import_name:
            text = ast.get_docstring(source.tree) or ""
            assert len(text.splitlines()[0] if text else "") >= 30, f"{source.where}: {text!r}"
            assert "import" in text.lower(), f"{source.where} does not say what its files may import"


@pytest.mark.parametrize("folder", PACKAGES)
@pytest.mark.filterwarnings("default:.* lines")
def test_no_file_is_long(folder: str) -> None:
    """A source file stays below 500 lines; from 400 on a warning asks whether there is a second idea in it."""
    lengths = {source.where: len(source.path.read_text().splitlines()) for source in PACKAGES[folder].sources}
    for where, lines in lengths.items():
        if LONG <= lines < TOO_LONG:
            warnings.warn(f"{where} has {lines} lines; at {TOO_LONG} this test fails", stacklevel=1)
    assert {where: lines for where, lines in lengths.items() if lines >= TOO_LONG} == {}


PLANTED = {"forge_data": True, "forge_data.reading._a": False, "forge_data.store._b": False, "forge_data._errors": False}


@pytest.mark.parametrize(
    "planted",
    [
        "from forge_data.store._b import x",
        "def f():\n    from forge_data.store import _b",
        "if TYPE_CHECKING:\n    import forge_data.store._b",
        "from importlib import import_module\nimport_module('forge_data.store._b')",
    ],
)
def test_the_layer_scan_finds_what_is_planted(planted: str) -> None:
    """An import of a higher stage is found however it is spelled."""
    package = PACKAGES["forge-data"]
    assert list(upward(package, "forge_data.reading._a", ast.parse(planted), PLANTED, STAGES["forge-data"]))
    assert not list(upward(package, "forge_data.store._b", ast.parse(planted), PLANTED, STAGES["forge-data"]))
    assert not list(
        upward(package, "forge_data.reading._a", ast.parse("from forge_data._errors import E"), PLANTED, ".\nreading")
    )


def test_siblings_of_a_stage_do_not_know_each_other() -> None:
    """Two folders in one line of a table may not import each other."""
    package, known = PACKAGES["forge-data"], {"forge_data.reading._a": False, "forge_data.formats._b": False}
    planted = ast.parse("from forge_data.formats._b import x")
    assert list(upward(package, "forge_data.reading._a", planted, known, STAGES["forge-data"]))


@pytest.mark.parametrize(
    ("graph", "found"),
    [
        ({"a": {"b"}, "b": {"a"}}, [["a", "b"]]),
        ({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}, [["a", "b", "c"]]),
        ({"a": {"a"}}, [["a"]]),
        ({"a": {"b", "c"}, "b": {"c"}, "c": set()}, []),
    ],
)
def test_the_search_for_circles_finds_them(graph: dict[str, set[str]], found: list[list[str]]) -> None:
    """Circles of two, of three and of one are found; a diamond is none."""
    assert circles(graph) == found


def test_the_count_of_modules_finds_a_crowded_folder() -> None:
    """Twenty-one modules are one too many, wherever they lie."""
    modules = {f"forge_data.store._m{i}": False for i in range(21)} | {"forge_data.store": True}
    assert crowded(modules, PACKAGES["forge-data"]) == {"store": 21}
