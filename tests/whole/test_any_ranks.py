"""Any number of ranks, any strategy: the same samples and losses; saved under one, resumed under another."""

from __future__ import annotations

import importlib.util
import shutil
import signal
from collections.abc import Callable
from functools import cache
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import forge

from ..lanes import ci_keeps
from ..ranks import run_on_ranks
from .conftest import conversations, write_rows
from .starts import DROPOUT, RUN, final_state, metrics, sft, sft_with_signal, untimed, weights

pytestmark = pytest.mark.slow

STEPS = 20
CLOSE = 1e-5
"""Relative, in float32: what the order of sums may do over these steps."""

WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "ddp x2": (2, {"strategy": "ddp"}),
    "fsdp2 x2": (2, {"strategy": "fsdp2"}),
    "fsdp2 x4": (4, {"strategy": "fsdp2"}),
    "hsdp 2x2": (4, {"strategy": "hsdp", "shard_size": 2}),
    "cp2": (2, {"strategy": "fsdp2", "cp_size": 2}),
    "cp2 ddp": (2, {"strategy": "ddp", "cp_size": 2}),
    "fsdp2 with cp2 x4": (4, {"strategy": "fsdp2", "cp_size": 2}),
    "hsdp 2x2 with cp2": (4, {"strategy": "hsdp", "shard_size": 2, "cp_size": 2}),
    "tp2": (2, {"strategy": "fsdp2", "tp_size": 2}),
    "fsdp2 with tp2 x4": (4, {"strategy": "fsdp2", "tp_size": 2}),
    "tp2 with cp2": (4, {"strategy": "fsdp2", "tp_size": 2, "cp_size": 2}),
    "zero1 x2": (2, {"strategy": "zero1"}),
    "zero2 x2": (2, {"strategy": "zero2"}),
    "zero3 x2": (2, {"strategy": "zero3"}),
}
ADAPTERS: dict[str, dict[str, Any]] = {"full": {}, "lora": {"adapter": "lora", "lora_r": 4}}

IN_CI = [
    *(("full", way) for way in ("fsdp2 with cp2 x4", "zero3 x2")),
    ("lora", "cp2"),
]
"""Pairs of adapter and way: each structure, and one that is adapted. ddp and fsdp2 are in the chain below.

Steps, states and exports of hsdp are compared with one process's in `forge-dist/strategies`.
"""

TOPOLOGIES = {name: WAYS[name] for name in ("single", "ddp x2", "fsdp2 x2", "fsdp2 x4", "cp2", "tp2")} | {
    "ddp x4": (4, {"strategy": "ddp"})
}

needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="the extra deepspeed is not installed"
)


def takes(adapter: str, way: str) -> bool:
    """Whether this adapter can be trained in this way: layers that ranks divide take none."""
    return adapter == "full" or "tp2" not in way


def ways() -> list[Any]:
    """Every adapter with every way but the one to compare with, ZeRO's only where DeepSpeed is."""
    pairs = [(adapter, way) for adapter in ADAPTERS for way in WAYS if way != "single" and takes(adapter, way)]
    return ci_keeps(IN_CI, [pytest.param(*pair, marks=needs_deepspeed if "zero" in pair[1] else ()) for pair in pairs])


def settings_of(model_dir: Path, folder: Path) -> dict[str, Any]:
    """Rows of very unequal label counts, cut into several micro-batches a step; clipping and decay at work."""
    rows = conversations(31)
    for row in rows[::4]:
        row["messages"][-1]["content"] = "yes."
    for row in rows[1::7]:
        row["messages"][-1]["content"] += " and the sun and the rain" * 4
    return {
        "model_path": str(model_dir),
        "data_path": str(write_rows(folder / "rows.jsonl", rows)),
        "validation_split": 0.2,
        **RUN,
        "num_epochs": None,
        "max_steps": STEPS,
        "effective_batch_size": 7,
        "max_grad_norm": 0.5,
        "weight_decay": 0.1,
        "full_state_every_steps": 0,
    }


@pytest.fixture(scope="module")
def given(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What every run of this file is given."""
    return settings_of(model_dir, tmp_path_factory.mktemp("rows"))


def run(given: dict[str, Any], where: Path, way: str, **more: Any) -> Path:
    """Run one way, and return the run directory."""
    world_size, settings = {**WAYS, **TOPOLOGIES}[way]
    run_on_ranks(sft, world_size, {**given, **settings, **more, "ckpt_output_dir": str(where)}, joined=False)
    return where


@pytest.fixture(scope="module")
def single(given: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Adapter → the run to compare with: one process."""
    place = tmp_path_factory.mktemp("single")
    return cache(lambda adapter: run(given, place / adapter, "single", **ADAPTERS[adapter]))


def losses(where: Path, name: str = "loss") -> list[float]:
    """One figure of every line that has it."""
    return [line[name] for line in metrics(where) if name in line]


@pytest.mark.parametrize(("adapter", "way"), ways())
def test_the_same_losses_any_way(
    adapter: str, way: str, single: Callable[[str], Path], given: dict[str, Any], tmp_path: Path
) -> None:
    """20 steps with clipping, decay, accumulation and unequal label counts: one process's losses and samples."""
    alone = single(adapter)
    found = run(given, tmp_path / "run", way, **ADAPTERS[adapter])
    assert len(losses(found)) == STEPS
    np.testing.assert_allclose(losses(found), losses(alone), rtol=CLOSE)
    np.testing.assert_allclose(losses(found, "grad_norm"), losses(alone, "grad_norm"), rtol=2e-4)
    np.testing.assert_allclose(losses(found, "eval_loss"), losses(alone, "eval_loss"), rtol=CLOSE)
    for name in ("samples", "tokens", "loss_tokens", "epoch", "lr"):
        assert losses(found, name) == losses(alone, name), name
    plans = [forge.packing.BatchPlan.load(where / "plan" / "plan.npz") for where in (found, alone)]
    for step in range(STEPS):
        assert sorted(plans[0].samples(step)) == sorted(plans[1].samples(step))
        ranks = [[set(map(int, batch)) for batch in plans[0].micro_batches(step, rank)] for rank in range(plans[0].world_size)]
        assert set().union(*(batch for rank in ranks for batch in rank)) == set(map(int, plans[1].samples(step)))


SHORT = {"max_steps": 6}


@pytest.fixture(scope="module")
def short(given: dict[str, Any]) -> dict[str, Any]:
    """Six steps."""
    return {**given, **SHORT}


def stop_in_third_step(settings: dict[str, Any], where: Path, way: str) -> Path:
    """A run that was asked to stop in its third step, finished it, and saved its state."""
    world_size, options = TOPOLOGIES[way]
    with pytest.raises(forge.PreemptedError):
        run_on_ranks(
            sft_with_signal,
            world_size,
            {**settings, **options, "ckpt_output_dir": str(where)},
            *("optimizer", 3, "before", signal.SIGTERM),
            joined=False,
        )
    return where


@pytest.fixture(scope="module")
def whole_run(short: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run of one process."""
    return run(short, tmp_path_factory.mktemp("untouched") / "run", "single")


@pytest.fixture(scope="module")
def stopped(short: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Topology → a run that stopped after its third step."""
    place = tmp_path_factory.mktemp("stopped")
    return cache(lambda way: stop_in_third_step(short, place / way.replace(" ", "_"), way))


# In CI each is left once and gone on with once; ranks become more, fewer and others in kind.
CHAIN = ["single", "fsdp2 x4", "ddp x2", "tp2", "single"]


@pytest.mark.parametrize(("before", "after"), ci_keeps(list(pairwise(CHAIN)), list(product(TOPOLOGIES, repeat=2))))
def test_saved_one_way_and_gone_on_with_another(
    before: str, after: str, short: dict[str, Any], stopped: Callable[[str], Path], whole_run: Path, tmp_path: Path
) -> None:
    """The losses are those of an uninterrupted process; every step and every sample is there once."""
    where = tmp_path / "run"
    shutil.copytree(stopped(before), where)
    run(short, where, after)
    assert [line["step"] for line in metrics(where) if "loss" in line] == [1, 2, 3, 4, 5, 6]
    assert losses(where)[:3] == losses(stopped(before))
    np.testing.assert_allclose(losses(where), losses(whole_run), rtol=CLOSE)
    np.testing.assert_allclose(losses(where, "eval_loss"), losses(whole_run, "eval_loss"), rtol=CLOSE)
    for name in ("samples", "tokens", "loss_tokens", "lr"):
        assert losses(where, name) == losses(whole_run, name), name


@pytest.mark.parametrize("way", ci_keeps(["fsdp2 x2"], [way for way in TOPOLOGIES if takes("lora", way)]))
def test_gone_on_with_the_same_way(way: str, short: dict[str, Any], tmp_path: Path) -> None:
    """On the same ranks weights and optimizer have the bits of an uninterrupted run, with dropout on."""
    settings = {**short, **DROPOUT}
    untouched = run(settings, tmp_path / "untouched", way)
    where = run(settings, stop_in_third_step(settings, tmp_path / "stopped", way), way)
    assert untimed(where) == untimed(untouched)
    assert weights(where) == weights(untouched)
    assert final_state(where) == final_state(untouched)
