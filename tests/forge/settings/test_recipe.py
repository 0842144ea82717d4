"""Reading and writing recipes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, strategies as st

import forge
from forge import RecipeError, SettingsError
from forge.settings._recipe import as_recipe, as_values, read_recipe, values_in
from forge.settings._settings import resolve
from forge.verbs._sft import SFTSettings

REQUIRED: dict[str, Any] = {"model_path": "m", "data_path": "d", "ckpt_output_dir": "o"}


@pytest.mark.slow
@given(
    text=st.text(alphabet=st.characters(exclude_categories=["Cs"]), min_size=1),
    rate=st.floats(min_value=1e-12, max_value=1.0),
    names=st.lists(st.text(alphabet="abc_.#: ", min_size=1), min_size=1, max_size=3),
)
def test_round_trip(text: str, rate: float, names: list[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    """config.yaml read back as a recipe gives the same settings, whatever is in the strings; so does PyYAML's own parser."""
    given_values = {**REQUIRED, "data_path": text, "learning_rate": rate, "adapter": "lora", "target_modules": names}
    first = resolve(SFTSettings, ("argument", given_values))
    path = tmp_path_factory.getbasetemp() / "config.yaml"
    written = as_recipe(first, "sft")
    path.write_text(written, encoding="utf-8", newline="\n")
    again = resolve(SFTSettings, ("recipe", {name: value for name, value in read_recipe(path).items() if value is not None}))
    assert as_values(again) == as_values(first)
    assert values_in(written) == yaml.safe_load(written)


def test_a_damaged_file_of_any_depth_is_no_yaml() -> None:
    """What is nested without end is refused with one of the errors that those who read it catch, and ends no process."""
    for damaged in ("[" * 100_000, "- " * 5000 + "x"):
        with pytest.raises((yaml.YAMLError, RecursionError)):
            values_in(damaged)


def test_an_empty_recipe_says_nothing(tmp_path: Path) -> None:
    """A file of comments only is a recipe without settings."""
    (tmp_path / "r.yaml").write_text("# nothing\n")
    assert read_recipe(tmp_path / "r.yaml") == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\na: 2\n", r":2:1: .*'a' is given twice, first in line 1 \(a: 2\)\. Leave one of them out\."),
        ("- a\n", "this file holds a list"),
        ("a: [\nb: 1\n", r"r\.yaml:1:4: .*a list that is not closed.*Close it with \]"),
        ("a: [", r":1:5: .*Close its bracket"),
        ("a: 1\n\tb: 2\n", r":2:1: .*a tab \(b: 2\)\. Take spaces\."),
        ('a: 1\nb: "x\nc: 2\n', r":2:4: .*a quote that is never closed \(b: \"x\)"),
        ("a: x: y\n", r":1:5: .*a second colon in a line .*quotes"),
        ("a: 1\n  b: 2\n", r":2:4: .*indented further than the one before"),
        ("a: 1\nb 2\nc: 3\n", r":2:1: .*a line without a colon \(b 2\)"),
        ("a: *proj\n", r":1:4: .*begins with \*.*quotes"),
        ("a: @x\n", r":1:4: .*begins with @"),
        ('a: "C:\\Users"\n', r":1:\d: .*a backslash between double quotes.*single quotes"),
        ("a: 1\n---\nb: 1\n", r":2:1: .*a second document"),
        ("a: 1\n\a", r":2:1: .*a control character \(0x07\)"),
        ("", r"r\.yaml: is empty"),
        (" \n", r"r\.yaml: is empty"),
        ("1: 2\n", "1 is no setting's name"),
        ("? [a]\n: 1\n", "no setting's name"),
        ("a: " + "[" * 3000, "cannot be read"),
        ("!!python/object:x {}", r":1:1: .*a tag, and a setting is a plain value"),
    ],
)
def test_bad_recipes(text: str, message: str, tmp_path: Path) -> None:
    """A recipe that cannot be read is refused with its place and the remedy; no Python object is ever built from one."""
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(RecipeError, match=message) as caught:
        read_recipe(tmp_path / "r.yaml")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x7fELF\x02\x01\x01\0\0\xff", "a binary file"),
        (b"a: \0\n", "a binary file"),
        ("seed: 1\nname: caf\u00e9\n".encode("latin-1"), r":2:10: cannot be read: byte 0xe9 is not UTF-8"),
        ("seed: 1\n".encode("utf-16"), "it is UTF-16. Save it as UTF-8"),
    ],
)
def test_what_is_no_text(content: bytes, message: str, tmp_path: Path) -> None:
    """A binary file and other encodings are named, with the place."""
    (tmp_path / "r.yaml").write_bytes(content)
    with pytest.raises(RecipeError, match=message):
        read_recipe(tmp_path / "r.yaml")


def test_a_date_is_text(tmp_path: Path) -> None:
    """YAML 1.1 would make a date of a run's name, and refuse one that the calendar has not; a byte-order mark is no sign."""
    (tmp_path / "r.yaml").write_text("ckpt_output_dir: 2026-11-27\nmodel_path: 2026-13-45\n", encoding="utf-8-sig")
    assert read_recipe(tmp_path / "r.yaml") == {"ckpt_output_dir": "2026-11-27", "model_path": "2026-13-45"}


def test_missing_and_directory(tmp_path: Path) -> None:
    """A recipe that is not there, and a directory in its place, are named."""
    with pytest.raises(RecipeError, match="no such recipe"):
        read_recipe(tmp_path / "r.yaml")
    with pytest.raises(RecipeError, match=r"config\.yaml"):
        read_recipe(tmp_path)
    for name, message in (("", "an empty name"), ("~nobody-of-this-name/r.yaml", "no such user")):
        with pytest.raises(RecipeError, match=message):
            read_recipe(name)


def test_a_named_pipe_is_no_recipe(tmp_path: Path) -> None:
    """Nobody may ever write into it; what a shell calls `<(command)` is read."""
    os.mkfifo(tmp_path / "r.yaml")
    with pytest.raises(RecipeError, match=r"r\.yaml: is a named pipe, and to read one may never end"):
        read_recipe(tmp_path / "r.yaml")
    reader, writer = os.pipe()
    os.write(writer, b"seed: 3\n")
    os.close(writer)
    assert read_recipe(f"/dev/fd/{reader}") == {"seed": 3}
    os.close(reader)


@pytest.mark.parametrize(("wrong", "said"), [(3, "not by 3"), (["r.yaml"], "a list"), ({"seed": 1}, r"a dict.*\*\*settings")])
def test_no_path(wrong: Any, said: str) -> None:
    """What is no path at all is told how settings are given, by verbs and dry runs; it was a bare TypeError."""
    for call in (forge.sft, lambda recipe: forge.dry_run("sft", recipe)):
        with pytest.raises(RecipeError, match=said):
            call(wrong)


def test_numbers_are_what_a_person_reads(tmp_path: Path) -> None:
    """YAML 1.1 would make 010 eight and 1:30 ninety: here the one is ten, and the other is refused."""
    (tmp_path / "r.yaml").write_text("seed: 010\n")
    assert resolve(SFTSettings, ("recipe", {**REQUIRED, **read_recipe(tmp_path / "r.yaml")})).plan.seed == 10
    (tmp_path / "r.yaml").write_text("seed: 1:30\n")
    with pytest.raises(SettingsError, match="1:30"):
        resolve(SFTSettings, ("recipe", {**REQUIRED, **read_recipe(tmp_path / "r.yaml")}))


def test_paths_that_cannot_be_asked_about(tmp_path: Path) -> None:
    """A name that the file system refuses is a missing recipe, not a crash."""
    for name in ("x" * 300, "a\0b"):
        with pytest.raises(RecipeError):
            read_recipe(tmp_path / name)


def test_a_runs_own_defaults_are_left_open(tmp_path: Path) -> None:
    """Of a config.yaml only given settings are read; other comments, and one inside a string, change nothing."""
    lines = ["seed: 1  # flag", "beta1: 0.5  # default", "dtype: float32  # chosen: because", "eps: 1e-6  # my default"]
    lines.append("data_path: 'a  # default'  # argument")
    (tmp_path / "r.yaml").write_text("\n".join(lines) + "\n")
    assert read_recipe(tmp_path / "r.yaml") == {"seed": 1, "eps": "1e-6", "data_path": "a  # default"}


def test_data_in_the_place_of_a_recipe(tmp_path: Path) -> None:
    """`forge sft train.jsonl` is answered with the right option."""
    (tmp_path / "train.jsonl").write_text('{"messages": []}\n{"messages": []}\n')
    with pytest.raises(RecipeError, match="--data-path"):
        read_recipe(tmp_path / "train.jsonl")


@pytest.mark.parametrize("text", ['model_path = "m"\n', '[sft]\nmodel_path = "m"\n'])
def test_toml(text: str, tmp_path: Path) -> None:
    """A recipe in TOML is answered with the form that recipes have."""
    file = tmp_path / "r.toml"
    file.write_text(text)
    with pytest.raises(RecipeError, match=r"Recipes are YAML \(or JSON\), not TOML"):
        read_recipe(file)
