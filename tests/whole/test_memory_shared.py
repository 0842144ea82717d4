"""Rows with shared or virtual tokens: what the memory plan says beside what is taken, in bytes of torch's allocator."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

import forge
import forge_accel
import forge_algos
import forge_packing
from forge.run import _memory

from . import tiny
from .conftest import write_rows
from .verbs import settings_of

if TYPE_CHECKING:
    from pathlib import Path

SHORT: dict[str, Any] = {"num_virtual_tokens": 4, "max_tokens_per_gpu": 512}
LONG: dict[str, Any] = {"num_virtual_tokens": 100, "max_tokens_per_gpu": 1000}


def phases_of(run: Path) -> dict[str, Any]:
    """The phases of a run's memory plan by their names."""
    return {phase["name"]: phase for phase in json.loads((run / "memory.json").read_text())["phases"]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "lengths"),
    [(SHORT, (60, 90)), (LONG, (4, 6)), (LONG, (4, 4, 4, 4, 240))],
    ids=["long rows", "short rows", "a few long rows among short ones"],
)
def test_a_prefix_before_each_row(
    settings: dict[str, Any], lengths: tuple[int, ...], model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A virtual token takes less than one of a row: the largest micro-batch is not the one with the most of both."""
    monkeypatch.setattr(_memory, "_SMALL", 0)
    own = [tiny.sample(lengths[at % len(lengths)], at, slice(2, None)) for at in range(45)]
    rows = write_rows(tmp_path / "rows.jsonl", [{"input_ids": each.input_ids, "labels": each.labels} for each in own])
    run = tmp_path / "run"
    settings = {**settings, "adapter": "prefix", "effective_batch_size": 15, "max_steps": 3}
    forge.sft(**settings, model_path=str(model_dir), data_path=str(rows), ckpt_output_dir=str(run))
    phases = phases_of(run)
    measured = phases["first steps"]["measured"]
    assert phases["first steps"]["planned"] == pytest.approx(measured, rel=0.01)
    # The step that was measured is not the worst, but has most of it.
    assert 0.99 * measured <= phases["step"]["planned"] <= 1.25 * measured


@pytest.mark.slow
def test_a_prefix_before_each_piece_of_a_block(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Virtual tokens stand before each document of a block, and each is a line: the plan counts all of them."""
    monkeypatch.setattr(_memory, "_SMALL", 0)
    run, settings = tmp_path / "run", settings_of("pretrain", model_dir, tmp_path)
    forge.pretrain(**{**settings, "adapter": "prefix", "max_steps": 2, "ckpt_output_dir": str(run)})
    phases = phases_of(run)
    assert phases["step"]["planned"] >= phases["first steps"]["measured"]
    plan = forge_packing.BatchPlan.load(run / "plan" / "plan.npz")
    assert plan.lines is not None
    assert plan.lines.max() > 1


@pytest.mark.slow
def test_held_out_rows_that_share(larger_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their evaluation takes what was planned, with the keys and values that are gathered, and more rows in a micro-batch."""
    monkeypatch.setattr(_memory, "_SMALL", 0)
    begin = tiny.sample(200, 40, slice(0, None)).input_ids
    own = [tiny.sample(5 + at % 5, 50 + at, slice(2, None)) for at in range(60)]
    rows = [{"input_ids": begin + each.input_ids, "labels": [-100] * 200 + each.labels} for each in own]
    settings = {"model_path": str(larger_model), "ckpt_output_dir": str(tmp_path / "run"), "max_steps": 1}
    settings |= {"data_path": str(write_rows(tmp_path / "rows.jsonl", rows[:4])), "effective_batch_size": 2}
    settings |= {"eval_data_path": str(write_rows(tmp_path / "held_out.jsonl", rows[4:])), "max_tokens_per_gpu": 512}
    machine, evaluate, took = forge_accel.accelerator("cpu"), forge_algos.evaluate, []

    def metered(model: Any, *given: Any, **how: Any) -> Any:
        held = [*model.parameters(), *model.buffers()]
        meter = machine.meter()
        meter.start(sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}.values()))
        try:
            return evaluate(model, *given, **how)
        finally:
            took.append(meter.stop())

    monkeypatch.setattr(forge_algos, "evaluate", metered)
    forge.sft(**settings)
    parts = phases_of(tmp_path / "run")["evaluation"]["parts"]
    own_parts = sum(size for name, size in parts.items() if name not in ("gradients", "optimizer", "compiled"))
    print(own_parts / max(took))
    assert own_parts == pytest.approx(max(took), rel=0.03)
