"""The page "What 70B takes": its figures are those of the shapes, of the memory plan and of the state's format."""

from __future__ import annotations

import importlib.util
import math
import re
from types import SimpleNamespace
from typing import Any

import pytest

import forge_accel
from forge.memory._divided import Groups, _exchanged

from .repository import ROOT

PAGE = (ROOT / "docs" / "seventy-billion.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def sizes() -> dict[str, int]:
    """Numbers of each weight of a Llama 3.1 70B."""
    spec = importlib.util.spec_from_file_location("_llama_70b", ROOT / "benchmarks" / "_llama_70b.py")
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {name: math.prod(shape) for name, shape in module.shapes().items()}


def gigabytes(number: float) -> str:
    """As the page writes them."""
    return f"{number / 1e9:.1f} GB"


def test_the_share_of_a_rank(sizes: dict[str, int]) -> None:
    """16 bytes a number, divided: each row of the table."""
    total = sum(sizes.values())
    assert f"has {total:,} numbers in {len(sizes)} tensors" in PAGE
    assert f"{round(16 * total / 1e9):,} GB in all" in PAGE
    rows = re.findall(r"^\| (\d+) \| (\S+ GB) \| (\S+ GB) \| (\S+ GB) \| (\S+ GB) \|$", PAGE, re.MULTILINE)
    assert [int(ranks) for ranks, *_ in rows] == [8, 16, 32, 64, 128, 512]
    for ranks, *found in rows:
        assert found == [gigabytes(bytes_ * total / int(ranks)) for bytes_ in (4, 4, 8, 16)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_is_gathered_and_summed_at_a_time(dtype: str, sizes: dict[str, int]) -> None:
    """The memory plan's own arithmetic, for devices that are no host."""
    block = sum(number for name, number in sizes.items() if name.startswith("model.layers.0."))
    root = sum(number for name, number in sizes.items() if ".layers." not in name)
    kind: Any = getattr(forge_accel, dtype)
    planned: Any = SimpleNamespace(gathers=kind, weights=forge_accel.float32)
    taken = _exchanged(planned, Groups(layers=80, block=block, root=root), {}, on_host=False)
    assert f"{gigabytes(taken)} in {dtype}" in PAGE


def test_what_the_disk_holds(sizes: dict[str, int]) -> None:
    """An export in two and four bytes a number, a state in twelve, and each rank's part of it."""
    total = sum(sizes.values())
    for words, bytes_ in (("each export of it", 2), ("an export in float32", 4), ("a full state", 12)):
        (line,) = (line for line in PAGE.splitlines() if line.startswith("|") and words in line)
        assert f"| {round(bytes_ * total / 1e9)} GB |" in line
    for ranks in (64, 512):
        assert f"{gigabytes(12 * total / ranks)} on {ranks}" in PAGE
