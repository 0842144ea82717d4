"""Pages: their links lead somewhere, the commands that they promise are there, a package's README is short."""

from __future__ import annotations

import re
import tomllib

import pytest

from .repository import PACKAGES, ROOT

PAGES = [
    ROOT / "README.md",
    *sorted(ROOT.glob("docs/**/*.md")),
    *sorted(ROOT.glob("packages/*/*.md")),
    *sorted(ROOT.glob("*/README.md")),
    *sorted(ROOT.glob("*/*/README.md")),
]
LINK = re.compile(r"\]\(([^)\s]+)\)")


@pytest.mark.parametrize("page", sorted({path.relative_to(ROOT).as_posix() for path in PAGES}))
def test_links_lead_somewhere(page: str) -> None:
    """Every relative link of a page names a file or folder of the repository."""
    path = ROOT / page
    links = [
        link.partition("#")[0] for link in LINK.findall(path.read_text()) if "://" not in link and not link.startswith("#")
    ]
    assert [link for link in links if not (path.parent / link).exists()] == []


def test_the_readme_links() -> None:
    """The scan for links sees them: the top page leads to every package."""
    links = LINK.findall((ROOT / "README.md").read_text())
    assert {f"packages/{folder}" for folder in PACKAGES} <= set(links)


FILE = re.compile(r"`((?:[\w-]+/)+[\w-]+\.py|test_\w+\.py|(?:tests|whole|forge[-_]\w+)/[\w/-]+)/?`")
BASES = [
    ROOT,
    ROOT / "tests",
    ROOT / "tests" / "whole",
    *(package.source_dir.parents[up] for package in PACKAGES.values() for up in (0, 1)),
]


def absent_files(text: str) -> list[str]:
    """Files and folders of the repository that a text names and that are not there: from its root, its tests or a package."""
    return [name for name in FILE.findall(text) if not any((base / name).exists() for base in BASES)]


@pytest.mark.parametrize("page", ["docs/extending.md", "docs/development.md"])
def test_a_newcomer_is_sent_to_files_that_are_there(page: str) -> None:
    """The pages on where to change what name files and folders as they are today."""
    assert absent_files((ROOT / page).read_text()) == []


def test_a_file_that_moved_is_found() -> None:
    """A file and a folder that are not there any more; one of a package and one of the tests are."""
    text = "`forge_accel/devices/_gone.py`, `forge-dist/gone`, `forge_accel/devices/_cpu.py`, `whole/test_pages.py`"
    assert absent_files(text) == ["forge_accel/devices/_gone.py", "forge-dist/gone"]


def too_long(text: str, most: int = 120) -> bool:
    """Whether a page has more lines than a README may have."""
    return len(text.splitlines()) > most


@pytest.mark.parametrize("folder", PACKAGES)
def test_a_readme_is_what_a_person_reads(folder: str) -> None:
    """A package's README has at most 120 lines: why, install, one example, links; tables are on the documentation's pages."""
    assert not too_long((ROOT / "packages" / folder / "README.md").read_text())


def test_a_long_readme_is_found() -> None:
    """121 lines are one too many."""
    assert too_long("line\n" * 121)
    assert not too_long("line\n" * 120)


@pytest.mark.parametrize("script", ["quickstart", "test"])
def test_two_commands_do_all_the_set_up(script: str) -> None:
    """The README's two commands stand on one line each, and hatch knows them."""
    assert f"pip install hatch && hatch run {script}" in (ROOT / "README.md").read_text().splitlines()
    assert script in tomllib.loads((ROOT / "hatch.toml").read_text())["envs"]["default"]["scripts"]


def test_the_facade_is_never_called_forge_on_pypi() -> None:
    """`forge` on PyPI is another project: no page and no requirement asks pip for it, but to warn of it."""
    for path in [*PAGES, *ROOT.glob("packages/*/pyproject.toml"), ROOT / "hatch.toml"]:
        found = [line for line in path.read_text().splitlines() if re.search(r"pip install (?:-\S+ )*forge(?![\w-])", line)]
        assert [line for line in found if "never" not in line.lower()] == [], path
    assert "never `pip install forge`" in (ROOT / "README.md").read_text()
    assert PACKAGES["forge"].project["name"] == "forge-llm"
