"""The inside of each package: folders import downwards only, by the tables below; no circles, crowded folders or long files."""

from __future__ import annotations

import ast
import warnings
from collections import defaultdict
from functools import cache, partial
from typing import TYPE_CHECKING

import pytest

from .own_imports import dynamic_imports, own_imports, package_of
from .repository import PACKAGES, prose

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from .repository import Package, Source

# Folders from the lowest stage to the highest; "." is the package's own files. A folder imports itself and what is in a line
# above its own.
STAGES = {
    "forge-data": """
        .
        reading  formats  findings  media
        formats/questions
        chat_template
        masking
        tokenizing
        store
        linting  viewing  aligning
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
        attention  fused
        devices
    """,
    "forge-dist": """
        .
        environment  loading  watching
        ranks  adapters  context
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
        online/updates  online/environments
        online  training
        memory
    """,
    "forge": """
        .
        tasks/items  trackers  locking
        settings  storage  settings/convert/shell
        settings/convert
        tasks  reports
        memory
        saving
        run
        backends
        verbs  exporting  talking  reports/osft
        clusters  hub  teaching
        cli
        mini
    """,
}
# Imports that run upwards on purpose: (the file that imports, the module it imports), with the reason.
UPWARDS = {
    # TokenStore.from_jsonl tokenizes: a constructor belongs to its class, and what it does is a stage of its own.
    ("forge_data.store._token_store", "forge_data.preparing._from_jsonl"),
    # A launched worker is a process of its own, which is started by its module's name.
    ("forge.run._launching", "forge.cli._worker"),
}
# Tables whose rows name functions or classes of higher stages as "module:name": settings and errors read the table,
# and a row is resolved when it is chosen.
TABLES = {
    "forge.settings._backends",
    "forge_data._formats",
    "forge_dist._strategy_table",
    "forge_algos.settings._adapter_table",
}
MAX_MODULES = 20
LONG, MOST_LINES = 400, 500


def folder_of(module: str, modules: Mapping[str, bool]) -> str:
    """The folder of a module, "." for the package's own: `forge_data.store._writer` → `store`."""
    return "/".join(package_of(module, modules).split(".")[1:]) or "."


def stages_of(table: str) -> dict[str, int]:
    """Each folder → its line in the table."""
    lines = [line.split() for line in table.strip().splitlines()]
    return {folder: stage for stage, line in enumerate(lines) for folder in line}


def upward(package: Package, module: str, tree: ast.Module, modules: Mapping[str, bool], table: str) -> Iterator[str]:
    """Imports of a file that do not run downwards by the table.

    An `__init__` may gather names of its own subfolders, and `__main__` calls the command line.
    """
    stages, here = stages_of(table), folder_of(module, modules)
    for line, target in sorted(set(own_imports(package, module, tree, modules, rows=module not in TABLES))):
        there = folder_of(target, modules)
        gathers = bool(modules.get(module)) and target.startswith(f"{module}.")
        allowed = (module, target) in UPWARDS or gathers or module.endswith(".__main__")
        if there != here and stages[there] >= stages[here] and not allowed:
            yield f"{module}:{line}: {target} ({here} may not import {there})"


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """The groups of files that import each other, directly or around: strongly connected components (Tarjan)."""
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
    """Which file imports which, but for the upward imports that are named; the public API, which loads lazily, is left out."""
    return {
        module: {target for target in targets - {package.import_name} if (module, target) not in UPWARDS}
        for module, targets in targets_of(package).items()
        if module != package.import_name
    }


@cache
def targets_of(package: Package) -> dict[str, set[str]]:
    """Each module → the package's own modules that it uses."""
    return {
        source.module: {
            target
            for _, target in own_imports(package, source.module, source.tree, package.modules, rows=source.module not in TABLES)
        }
        for source in package.sources
    }


def crowded(modules: Mapping[str, bool], limit: int = MAX_MODULES) -> dict[str, int]:
    """Folders that hold more modules than the limit, `__init__` not counted."""
    counts: dict[str, int] = defaultdict(int)
    for module, is_folder in modules.items():
        if not is_folder:
            counts[folder_of(module, modules)] += 1
    return {folder: count for folder, count in counts.items() if count > limit}


def faults_of_a_folder(tree: ast.Module) -> Iterator[str]:
    """What is wrong with a folder's `__init__`: a docstring that says too little, or more than that and gathered names."""
    text = ast.get_docstring(tree) or ""
    if len(text.partition("\n")[0]) < 30:
        yield f"does not say what the folder turns into what: {text!r}"
    if "import" not in text.lower():
        yield f"does not say what its files may import: {text!r}"
    for node in tree.body:
        names = [ast.unparse(target) for target in node.targets] if isinstance(node, ast.Assign) else []
        if (
            not isinstance(node, ast.ImportFrom)
            and names != ["__all__"]
            and id(getattr(node, "value", None)) not in prose(tree)
        ):
            yield f"holds {ast.unparse(node)!r}"


def too_long(lengths: Mapping[str, int]) -> dict[str, int]:
    """Files of more lines than a file may have; those that come near are warned of."""
    for where, lines in lengths.items():
        if LONG <= lines <= MOST_LINES:
            warnings.warn(f"{where} has {lines} lines of at most {MOST_LINES}: is there a second idea in it?", stacklevel=1)
    return {where: lines for where, lines in lengths.items() if lines > MOST_LINES}


@pytest.mark.parametrize("folder", PACKAGES)
def test_the_table_names_every_folder(folder: str) -> None:
    """Each folder of a package is in its table once, and no other is."""
    modules = PACKAGES[folder].modules
    assert sorted({folder_of(module, modules) for module in modules}) == sorted(STAGES[folder].split())


@pytest.mark.parametrize("folder", PACKAGES)
def test_folders_import_downwards(folder: str) -> None:
    """A file imports its own folder and lower stages only, type-only and deferred imports included."""
    package = PACKAGES[folder]
    found = [
        line
        for source in package.sources
        if source.module != package.import_name
        for line in upward(package, source.module, source.tree, package.modules, STAGES[folder])
    ]
    assert found == []


@pytest.mark.parametrize("folder", PACKAGES)
def test_no_circle_of_files(folder: str) -> None:
    """No two files import each other, not even around several others or for types only."""
    assert circles(graph_of(PACKAGES[folder])) == []


def test_every_upward_import_is_there() -> None:
    """An exception that no file needs any more is taken out of the list."""
    found = {
        (module, target)
        for package in PACKAGES.values()
        for module, targets in targets_of(package).items()
        for target in targets
    }
    assert found >= UPWARDS


def modules_where(holds: Callable[[Package, Source], object]) -> set[str]:
    """Modules of all packages, the public APIs left out, for whose source something holds."""
    return {
        source.module
        for package in PACKAGES.values()
        for source in package.sources
        if source.module != package.import_name and holds(package, source)
    }


def test_every_table_has_rows() -> None:
    """A file in the list of tables names modules of its package in strings; one that no longer does is taken out."""

    def has_rows(package: Package, source: Source) -> set[tuple[int, str]]:
        imports = partial(own_imports, package, source.module, source.tree, package.modules)
        return set(imports()) - set(imports(rows=False))

    assert modules_where(has_rows) >= TABLES


def test_no_file_puts_names_of_modules_together() -> None:
    """An import whose module's name is put together from the package's own would escape the table of stages."""
    assert modules_where(lambda package, source: list(dynamic_imports(package, source.tree))) == set()


@pytest.mark.parametrize("folder", PACKAGES)
def test_no_folder_is_crowded(folder: str) -> None:
    """No folder holds more than 20 modules: beyond that no newcomer finds anything."""
    assert crowded(PACKAGES[folder].modules) == {}


@pytest.mark.parametrize("folder", PACKAGES)
def test_each_folder_says_what_it_turns_into_what_and_no_more(folder: str) -> None:
    """Each folder has an `__init__.py`: a sentence on what it turns into what, one on what it may import, and no code."""
    package = PACKAGES[folder]
    inits = {source.module: source for source in package.sources if source.path.name == "__init__.py"}
    assert {package_of(module, package.modules) for module in package.modules} == set(inits)
    faults = [
        f"{source.where}: {fault}"
        for module, source in inits.items()
        if module != package.import_name
        for fault in faults_of_a_folder(source.tree)
    ]
    assert faults == []


@pytest.mark.parametrize("folder", PACKAGES)
@pytest.mark.filterwarnings("default:.* lines")
def test_no_file_is_long(folder: str) -> None:
    """A source file has 500 lines at most; from 400 on a warning asks whether there is a second idea in it."""
    assert too_long({source.where: len(source.path.read_text().splitlines()) for source in PACKAGES[folder].sources}) == {}


PLANTED = {
    "forge_data": True,
    "forge_data._errors": False,
    "forge_data.reading": True,
    "forge_data.reading._a": False,
    "forge_data.store": True,
    "forge_data.store._b": False,
}


@pytest.mark.parametrize(
    "planted",
    [
        "from forge_data.store._b import x",
        "def f():\n    from forge_data.store import _b",
        "if TYPE_CHECKING:\n    import forge_data.store._b",
        "try:\n    import forge_data.store._b as z\nexcept ImportError:\n    z = None",
        "from forge_data import store",
        "from ..store import _b",
        "from ..store._b import x",
        "from .. import store as s",
        "from importlib import import_module\nimport_module('forge_data.store._b')",
        "from importlib import import_module as load\nload('..store._b', __package__)",
        "import importlib as i\nclass A:\n    b = i.import_module('forge_data.store')",
        "__import__('forge_data.store._b')",
        "import sys\nsys.modules['forge_data.store._b'].x()",
        "EntryPoint('b', 'forge_data.store._b:B', 'group')",
        "subprocess.run([sys.executable, '-m', 'forge_data.store._b'])",
        "import forge_data\nforge_data.store._b.x()",
        "import forge_data._errors\nforge_data.store._b.x()",
        "from forge_data import TokenStore",
        "from .. import TokenStore",
        "import forge_data\ndef f():\n    return forge_data.TokenStore",
        "import forge_data as d\nd.TokenStore.open('x')",
    ],
)
def test_the_layer_scan_finds_what_is_planted(planted: str) -> None:
    """An import of a higher stage is found however it is spelled."""
    package = PACKAGES["forge-data"]
    assert list(upward(package, "forge_data.reading._a", ast.parse(planted), PLANTED, STAGES["forge-data"]))
    assert not list(upward(package, "forge_data.store._b", ast.parse(planted), PLANTED, STAGES["forge-data"]))


@pytest.mark.parametrize(
    "allowed",
    [
        "from forge_data._errors import E",
        "from . import _c",
        "import forge_data\nversion = forge_data.__version__",
        "from forge_data import DataError",
        "raise DataError('no forge_data.store._b: call forge_data.prepare')",
        "'''forge_data.store._b'''",
        "import other.store._b\nother.store._b.x()",
    ],
)
def test_the_layer_scan_lets_the_rest_through(allowed: str) -> None:
    """Lower stages, the own folder, the version and prose are no faults."""
    package = PACKAGES["forge-data"]
    assert not list(upward(package, "forge_data.reading._a", ast.parse(allowed), PLANTED, STAGES["forge-data"]))


@pytest.mark.parametrize(
    ("planted", "found"),
    [
        ("import_module(f'forge_data.{name}')", True),
        ("import importlib\nimportlib.import_module('forge_data.' + name)", True),
        ("from importlib import import_module as load\nload(f'{__package__}.{name}')", True),
        ("import_module(name)", False),
        ("import_module('forge_data.store._b')", False),
    ],
)
def test_the_scan_for_names_put_together_finds_them(planted: str, found: bool) -> None:
    """A module's name put together from the package's own is found; a user's module, which the user names, is none."""
    assert bool(list(dynamic_imports(PACKAGES["forge-data"], ast.parse(planted)))) is found


@pytest.mark.parametrize(
    "planted", ["x = 1", "def f(): pass", "import os", "if x:\n    from forge_data.store._b import x", "'Reading.'"]
)
def test_the_scan_of_folders_finds_what_is_planted(planted: str) -> None:
    """Code in a folder's `__init__`, and a docstring that says too little, are faults; gathered names are none."""
    good = "'''Rows → a store of tokens on disk.\n\nImports the files of `reading`.\n'''\nfrom a._b import c\n__all__ = ['c']\n"
    assert list(faults_of_a_folder(ast.parse(good))) == []
    assert list(faults_of_a_folder(ast.parse(planted if planted.startswith("'") else good + planted)))


def test_siblings_of_a_stage_do_not_know_each_other() -> None:
    """Two folders in one line of a table may not import each other."""
    package, known = PACKAGES["forge-data"], {"forge_data.formats": True, "forge_data.formats._b": False}
    planted = ast.parse("from forge_data.formats._b import x")
    assert list(upward(package, "forge_data.reading._a", planted, known, STAGES["forge-data"]))


@pytest.mark.parametrize(
    "planted",
    [
        "from forge_algos.losses import dpo",
        "from .. import dpo",
        "from forge_algos import losses\nlosses.dpo()",
        "import forge_algos.losses as gathered\ngathered.dpo()",
    ],
)
def test_a_name_that_a_folder_gathers_is_imported_from_its_home(planted: str) -> None:
    """`losses` gathers `dpo` of `losses/preference`: a file of `losses/policy` that takes it from there imports its sibling."""
    package = PACKAGES["forge-algos"]
    file = "forge_algos.losses.policy._planted"
    (found,) = upward(package, file, ast.parse(planted), {**package.modules, file: False}, STAGES["forge-algos"])
    assert "losses/policy may not import losses/preference" in found


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
    assert crowded(modules) == {"store": 21}


def test_the_count_of_lines_finds_a_long_file() -> None:
    """500 lines are warned of, and 501 are too many."""
    with pytest.warns(UserWarning, match="^b has 500 lines"):
        assert too_long({"a": 399, "b": 500, "c": 501}) == {"c": 501}
