"""hatch.toml: what it installs is what the packages declare, pinned and no more."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest

from .repository import LEAVES, PACKAGES, ROOT

ENVIRONMENTS: dict[str, Any] = tomllib.loads((ROOT / "hatch.toml").read_text())["envs"]
ALONE = ENVIRONMENTS["hatch-test"]
IN_THE_MAIN_ENVIRONMENT = {"accelerate", "deepspeed"}
"""Its tests take minutes, and are run once."""


def installed(leaf: str) -> list[str]:
    """What hatch installs beside a leaf to test it alone."""
    chosen = ALONE["overrides"]["matrix"]["package"]["extra-dependencies"]
    return ALONE["dependencies"] + [entry["value"] for entry in chosen if leaf in entry["if"]]


def test_every_environment_installs_with_pip() -> None:
    """uv does not read pip's configuration, and hatch's own environments default to it: each of ours names pip."""
    inherited = {name for name, table in ENVIRONMENTS.items() if table.get("template") == "default"}
    assert {name for name, table in ENVIRONMENTS.items() if table.get("installer") != "pip"} - inherited == set()
    assert {"default", "hatch-test", "hatch-check-code", "hatch-check-fmt", "hatch-check-types"} <= set(ENVIRONMENTS)


def test_every_leaf_is_tested_alone() -> None:
    """The matrix of `hatch test` is the five leaves, one member an environment."""
    assert ALONE["matrix"] == [{"package": list(LEAVES)}]
    assert ALONE["workspace"]["members"] == ["packages/{matrix:package}"]
    assert ALONE["default-args"] == ["tests/{matrix:package}"]


@pytest.mark.parametrize("leaf", LEAVES)
def test_a_leaf_alone_has_what_it_declares_and_no_more(leaf: str) -> None:
    """Beside pytest and hypothesis: torch, pinned, where the leaf declares it, and its extras that are tested there."""
    names = {re.split(r"[<>=]", line)[0].replace("-", "_") for line in installed(leaf)}
    extras = PACKAGES[leaf].optional - IN_THE_MAIN_ENVIRONMENT
    assert names == {"pytest", "hypothesis"} | ({"torch"} & PACKAGES[leaf].required) | extras


def test_what_is_not_tested_alone_is_tested_with_everything() -> None:
    """An extra that the leaf's own environment lacks is in the one that holds all packages."""
    main = {re.split(r"[<>=; ]", line)[0].replace("-", "_") for line in ENVIRONMENTS["default"]["dependencies"]}
    assert main >= IN_THE_MAIN_ENVIRONMENT


@pytest.mark.parametrize("name", ["default", "hatch-check-types"])
def test_torch_is_pinned(name: str) -> None:
    """An open range of torch brings gigabytes of CUDA packages to a machine without a GPU."""
    torch = [line for line in [*ENVIRONMENTS[name]["dependencies"], *installed("forge-algos")] if line.startswith("torch")]
    assert len(torch) == 2
    assert all(re.fullmatch(r"torch==\d+\.\d+\.\d+", line) for line in torch)


def test_the_main_environment_has_every_package() -> None:
    """`hatch run` sees all six packages, editable."""
    assert set(ENVIRONMENTS["default"]["workspace"]["members"]) == {f"packages/{folder}" for folder in PACKAGES}
