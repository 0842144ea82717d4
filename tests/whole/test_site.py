"""The documentation site: what its navigation, reference, tables, messages and commands name is what there is."""

from __future__ import annotations

import ast
import doctest
import importlib
import logging
import re
import shlex
import sys
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

import pytest
import yaml

from forge import hub
from forge.cli._app import _COMMANDS, make_app
from forge.settings._settings import flat_fields
from forge.verbs._registry import VERBS, task_of
from forge_data.cli._parser import _parser
from forge_dist._strategy_table import strategy_names

from .repository import PACKAGES, ROOT, nodes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
SHOWN = [ROOT / "README.md", *PAGES, *sorted(ROOT.glob("packages/*/README.md"))]
MIGRATING = sorted((DOCS / "migrating").glob("*.md"))
FENCE = re.compile(r"^```(?P<kind>\w*)\n(?P<code>.*?)^```", re.MULTILINE | re.DOTALL)


def name_of(path: Any) -> str:
    return path.relative_to(ROOT).as_posix()


pages = pytest.mark.parametrize("page", [name_of(path) for path in SHOWN])


@cache
def tools(name: str) -> ModuleType:
    """A module of docs/_tools, which imports nothing but the standard library."""
    if (folder := str(DOCS / "_tools")) not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(name)


@cache
def sources() -> Any:
    """The packages' sources as the reference reads them, parsed once for all tests."""
    return tools("api_pages").Sources(ROOT)


@cache
def reference() -> dict[str, str]:
    """Pages of the API reference → Markdown."""
    return tools("api_pages").api_pages(sources())


@cache
def config() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "mkdocs.yml").read_text())


def leaves(nav: Any) -> Iterator[str]:
    """The pages of a navigation, in their order."""
    if isinstance(nav, str):
        yield nav
    else:
        for entry in nav.values() if isinstance(nav, dict) else nav:
            yield from leaves(entry)


# navigation


def test_the_navigation_names_every_page_once() -> None:
    """Each page of docs/, and each that is generated, stands in the navigation once; nothing else does."""
    generated = [*reference(), *tools("repository_pages").repository_pages(ROOT).values()]
    assert sorted(leaves(config()["nav"])) == sorted([*(path.relative_to(DOCS).as_posix() for path in PAGES), *generated])


def test_the_navigation_is_shallow() -> None:
    """A page is at most three levels deep: tab, group, page."""

    def depth(nav: Any) -> int:
        if isinstance(nav, str):
            return 0
        return max(map(depth, nav.values())) if isinstance(nav, dict) else 1 + max(map(depth, nav))

    assert depth(config()["nav"]) <= 3


def test_the_site_asks_for_nothing_from_the_network() -> None:
    """No web fonts, and neither style sheets nor scripts of somebody else; the build checks the pages themselves."""
    assert config()["theme"]["font"] is False
    assert config()["strict"] is True
    assert not [path for name in ("extra_css", "extra_javascript") for path in config().get(name, ()) if "//" in path]


# API reference


def public() -> list[tuple[str, str]]:
    """(module, name) of what is public at run time: the six packages, and the public folders of forge_algos."""
    algos = importlib.import_module("forge_algos")
    folders = [f"forge_algos.{name}" for name in algos._PACKAGES]
    modules = [*(package.import_name for package in PACKAGES.values()), *folders]
    return [(module, name) for module in modules for name in importlib.import_module(module).__all__]


def test_the_reference_has_every_public_name() -> None:
    """Each public name is explained on the page that links to it lead to."""
    made, known = reference(), tools("api_pages").public_names(sources())
    modules = {f"{module}.{name}" for module, name in public() if f"{module}.{name}" in made_modules(made)}
    facade = {f"forge.{name}" for name in importlib.import_module("forge")._PACKAGES}
    missing = []
    for module, name in public():
        full = f"{module}.{name}"
        if full in modules or full in facade:
            continue
        home = known[full].removeprefix("api/").removesuffix(".md")
        lines = made[known[full]].splitlines()
        if f"::: {home}.{name}" not in lines and f"### {full} {{ #{full} }}" not in lines:
            missing.append(full)
    assert missing == []


def made_modules(made: dict[str, str]) -> set[str]:
    return {page.removeprefix("api/").removesuffix(".md") for page in made}


def test_the_reference_has_nothing_that_is_not_public() -> None:
    """What the pages name can be imported under the name that they give it."""
    for page, text in reference().items():
        for full in re.findall(r"^::: (\S+)$", text, re.MULTILINE):
            module, _, name = full.rpartition(".")
            assert name in importlib.import_module(module).__all__, f"{page}: {full}"


def test_every_public_name_has_a_docstring() -> None:
    """A page of the reference says of each name what it is."""
    modules = [
        module
        for package in PACKAGES.values()
        for module in (package.import_name, *sources().public_folders(package.import_name))
    ]
    found = [f"{module}.{name.name}" for module in modules for name in sources().public(module) if not name.text]
    assert found == []


# migration


@cache
def settings() -> dict[str, list[Any]]:
    """Every setting of every verb → its types."""
    found: dict[str, list[Any]] = {}
    for verb in VERBS:
        for _, field in flat_fields(task_of(verb).settings):
            found.setdefault(field.name, []).append(field.type)
    return found


def takes(kind: Any, value: str) -> bool:
    """Whether a setting's type allows a value that a page gives it as text."""
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if kind in (str, bool):
        return kind is str or value in ("true", "false")
    return any(takes(part, value) for part in get_args(kind) if part is not ...)


def rows(text: str) -> Iterator[list[str]]:
    """Cells of the rows of a page's tables, heads and rules left out."""
    lines = text.splitlines()
    for index, line in enumerate(lines):
        if line.startswith("| ") and index + 1 < len(lines) and not lines[index + 1].startswith("|---"):
            yield [cell.strip() for cell in line.strip("|").split(" | ")]


def wrong(cell: str) -> list[str]:
    """What a cell names that forge does not have."""
    found = []
    for code in re.findall(r"`([^`]+)`", cell):
        name, equals, value = code.partition("=")
        if name.startswith("forge "):
            ok = name.split()[1] in {*VERBS, *_COMMANDS}
        elif name.startswith("forge.hub."):
            ok = name.removeprefix("forge.hub.") in hub.__all__
        elif name == "callbacks":
            ok = True  # an argument of every verb in Python, and no setting
        else:
            taken = name in settings() and (not equals or any(takes(kind, value) for kind in settings()[name]))
            # Packages from outside may add strategies, so that the type of this setting is any string.
            ok = taken and (code == name or name != "strategy" or value in {"auto", *strategy_names()})
        if not ok:
            found.append(code)
    return found


@pytest.mark.parametrize("page", [name_of(path) for path in MIGRATING])
def test_migration_tables_name_what_there_is(page: str) -> None:
    """What stands in the column of forge are settings, values that they take, and commands; or that there is nothing."""
    table = list(rows((ROOT / page).read_text()))
    assert len(table) > 15
    for cells in table:
        assert len(cells) == 3, cells
        assert wrong(cells[1]) == [], cells
        assert "`" in cells[1] or cells[1] in {"not available", "not available yet", "not needed", "refused"}, cells


def test_the_check_of_migration_tables_finds_what_is_planted() -> None:
    """A name that is none, a value that no setting takes, a command that there is not."""
    assert wrong("`max_len`, `strategy=fsdp`, `forge lora`") == ["max_len", "strategy=fsdp", "forge lora"]
    assert wrong("`max_seq_len`, `strategy=fsdp2`, `loss_type=ipo`, `forge sft`") == []


# troubleshooting


@cache
def messages() -> str:
    """Every text in the sources, as the command line prints it, with what is filled in left open."""
    found = []
    for package in PACKAGES.values():
        for source in package.sources:
            for node in nodes(source.tree):
                if isinstance(node, ast.JoinedStr):
                    found.append("".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
    # Settings that stand between backticks become flags.
    return re.sub(r"`(\w+_\w+)`", lambda name: f"--{name[1].replace('_', '-')}", "\n".join(found))


def test_the_messages_of_the_page_are_in_the_code() -> None:
    """Each message under which a reader looks is a part of one that forge prints."""
    headings = re.findall(r"^### `(.+)`$", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)
    assert len(headings) > 30
    assert [heading for heading in headings if heading not in messages()] == []


def test_every_exit_status_is_explained() -> None:
    """The table of exit statuses has those that the families of errors carry, and the signals'."""
    codes = {0, 130, 137, 141, 143}
    for package in PACKAGES.values():
        for source in package.sources:
            for node in nodes(source.tree):
                name = ast.unparse(node.target) if isinstance(node, ast.AnnAssign) else ""
                if name == "exit_status" and isinstance(node.value, ast.Constant):
                    codes.add(node.value.value)
    text = (DOCS / "troubleshooting.md").read_text()
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)} == codes


# what pages show


@pages
def test_links_outside_are_https(page: str) -> None:
    """A link that leaves the repository is https."""
    assert re.findall(r"\]\((?!https://)\w+:[^)]*\)", (ROOT / page).read_text()) == []


PLACES = ("benchmarks", "docs", "examples", "packages", "tests", *(package.import_name for package in PACKAGES.values()))
PLACE = re.compile(rf"`((?:{'|'.join(PLACES)})/[\w./-]*)`")


@pages
def test_files_that_are_named_exist(page: str) -> None:
    """A path of the repository, or of a package's sources, is one that is there."""
    roots = [ROOT, *(package.source_dir.parent for package in PACKAGES.values())]
    named = PLACE.findall((ROOT / page).read_text())
    assert [place for place in named if not any((root / place).exists() for root in roots)] == []


@pytest.mark.parametrize("page", [name_of(path) for path in PAGES if ">>>" in path.read_text()])
def test_the_examples_of_a_page(page: str) -> None:
    """What a page's `>>>` examples show is what they print."""
    logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno >= logging.ERROR)
    result = doctest.testfile(str(ROOT / page), module_relative=False)
    assert result.attempted
    assert result.failed == 0


def commands(text: str) -> Iterator[list[str]]:
    """Words of each `forge ...` command in a page's blocks of shell code, comments left out."""
    for block in FENCE.finditer(text):
        if block["kind"] in {"", "shell", "bash"}:
            for line in block["code"].replace("\\\n", " ").splitlines():
                if re.match(r"forge [a-z]", line) and "..." not in line:
                    yield shlex.split(line, comments=True)[1:]


@cache
def app(command: str) -> Any:
    """The command line, with the options of one command."""
    return make_app(command)


def parsed(words: list[str]) -> None:
    """Parse a command as the shell would; raises where a word is none of its own. Runs nothing."""
    if words[0] == "data":
        _parser("forge data").parse_args(words[1:])
    else:
        app(words[0]).parse_args(words, exit_on_error=False, print_error=False)


@pages
def test_commands_can_be_typed(page: str) -> None:
    """Every `forge` command that a page shows is one that the command line takes."""
    for words in commands((ROOT / page).read_text()):
        try:
            parsed(words)
        except (Exception, SystemExit) as error:
            pytest.fail(f"forge {shlex.join(words)}: {error}")


@pages
def test_python_calls_name_what_there_is(page: str) -> None:
    """Python code in a page is Python, and `forge.VERB(...)` is called with settings of that verb."""
    for block in FENCE.finditer((ROOT / page).read_text()):
        if block["kind"] != "python" or ">>>" in block["code"]:
            continue
        for node in ast.walk(ast.parse(block["code"])):
            called = ast.unparse(node.func).removeprefix("forge.") if isinstance(node, ast.Call) else ""
            if called in VERBS and ast.unparse(node.func).startswith("forge."):
                known = {field.name for _, field in flat_fields(task_of(called).settings)}
                assert {keyword.arg for keyword in node.keywords} <= known | {"accelerate_config", "callbacks"}


@pages
def test_recipes_name_what_there_is(page: str) -> None:
    """A YAML block of a page is a recipe of forge's settings, or another trainer's, which says so in its first line."""
    for block in FENCE.finditer((ROOT / page).read_text()):
        if block["kind"] == "yaml" and not re.match(r"# (?!forge\b|recipe\b)", block["code"]):
            assert set(yaml.safe_load(block["code"])) <= set(settings()), block["code"]


def test_the_checks_of_pages_find_what_is_planted() -> None:
    """A flag that there is not, a command that there is not."""
    assert list(commands("```shell\nforge sft --model-path a \\\n    --seed 1  # b\n```")) == [
        ["sft", "--model-path", "a", "--seed", "1"]
    ]
    for words in (["sft", "--max-length", "3"], ["data", "look"], ["exporting"]):
        with pytest.raises((Exception, SystemExit)):
            parsed(words)
