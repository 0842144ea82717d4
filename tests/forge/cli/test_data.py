"""`forge data`: forge-data's own command line, under this one."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

import forge_data
from forge.cli import _app as _cli

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("words", [["--help"], ["show", "--help"], ["show", "-h"]])
def test_help_is_forge_datas(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Help for `forge data` and its verbs comes from forge-data."""
    assert _cli.main(["data", *words]) == 0
    assert capsys.readouterr().out.startswith(f"usage: forge data{' show' if len(words) > 1 else ''} [-h]")


def test_forge_help_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    """`forge --help` lists it."""
    assert _cli.main(["--help"]) == 0
    assert "forge data --help" in " ".join(capsys.readouterr().out.replace("│", " ").split())


def test_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Unknown commands and bad input give one line on stderr and status 2."""
    assert _cli.main(["data", "show", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("forge: ")
    assert "is not a token store" in said
    assert _cli.main(["data", "shwo"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_statuses_pass(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The exit status is that of `forge data lint`; options and negative numbers are passed on unchanged."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}\n')
    forge_data.TokenStore.from_jsonl(rows, tmp_path / "store")
    assert _cli.main(["data", "show", str(tmp_path / "store"), "-1"]) == 0
    monkeypatch.setattr("forge_data.cli._commands.lint", lambda words: 1)
    assert _cli.main(["data", "lint", "x", "--json"]) == 1


@pytest.mark.slow
def test_help_loads_no_transformers() -> None:
    """`forge data --help` is instant: neither torch nor transformers nor datasets; and forge-data knows whose process it is."""
    code = (
        "import sys\nfrom forge.cli._app import main\nfrom forge_data._uncollected import _of_one_command as own\n"
        "main(['data', '--help'])\nassert not own\nsys.argv = ['forge', 'data', '--help']\nmain()\nassert own\n"
        "assert not {'torch', 'transformers', 'datasets'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
