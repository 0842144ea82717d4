"""What a matrix product takes for itself on this processor, measured by one of its shape."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import profiler
from torch.autograd.profiler_util import FunctionEvent

from forge_accel import CPUAccelerator
from forge_accel.devices import _products
from forge_accel.devices._memory import ProfilerMeter

FACTORS = [((29, 64), (64, 96)), ((311, 65), (65, 512)), ((3, 70, 64), (3, 64, 31)), ((1, 64), (64, 130))]
"""Shapes of two factors."""


def factor(shape: tuple[int, ...], *, turned: bool, device: str, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """One that lies in memory row by row, or column by column."""
    stored = (*shape[:-2], shape[-1], shape[-2]) if turned else shape
    made = torch.empty(stored, dtype=dtype, device=device)
    return made.transpose(-1, -2) if turned else made


@pytest.mark.parametrize("turned", [(False, False), (False, True), (True, False)])
def test_it_is_what_the_product_itself_takes(turned: tuple[bool, bool]) -> None:
    """The profiler's peak over the very product, less its outcome, in every order of its factors; they have no data here."""
    orders = [tuple(zip(shapes, turned, strict=True)) for shapes in FACTORS]
    found = CPUAccelerator().product_scratch([tuple(factor(s, turned=t, device="meta") for s, t in each) for each in orders])
    for each, size in zip(orders, found, strict=True):
        first, second = (factor(s, turned=t, device="cpu").fill_(0.5) for s, t in each)
        meter = ProfilerMeter()
        meter.start(0)
        product = first @ second
        assert meter.stop() - product.nbytes == size


def test_a_long_side_is_measured_by_a_shorter_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vocabulary of 150,000 is not multiplied to plan a step; what was measured once is not measured again."""
    made: list[tuple[int, ...]] = []
    make = _products._made
    monkeypatch.setattr(_products, "_made", lambda shape, *, turned: made.append(shape) or make(shape, turned=turned))
    wide = factor((8, 64), turned=False, device="meta"), factor((64, 150_000), turned=True, device="meta")
    once = _products.product_scratch([wide])
    assert made == [(8, 64), (64, 2048)]
    assert _products.product_scratch([wide, wide]) == once * 2
    assert len(made) == 2


def test_other_products_take_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 nothing is measured; nor is it where somebody else's profiler runs, which it would end."""
    monkeypatch.setattr(_products, "_scratch", lambda key: 1 / 0)
    narrow = factor((8, 64), turned=False, device="meta"), factor((64, 8), turned=True, device="meta")
    wide = tuple(each.float() for each in narrow)
    assert CPUAccelerator().product_scratch([wide]) == [0]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True):
        assert CPUAccelerator().product_scratch([narrow]) == [0]


@pytest.mark.filterwarnings("error")
def test_a_measurement_makes_no_object_of_each_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step over a thousand documents has a million operators: as Python objects they took a minute and gigabytes."""
    made: list[object] = []
    monkeypatch.setattr(FunctionEvent, "__init__", lambda self, *_, **__: made.append(self))
    meter = ProfilerMeter()
    meter.start(8)
    kept = torch.ones(1000)
    assert meter.stop() == 8 + kept.nbytes
    assert made == []


def test_a_measurement_records_no_operators_and_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are as many as allocations. What was added up is let go of, also where Python collects nothing meanwhile."""
    kept, traces, recordings = list[torch.Tensor](), list[str](), list[weakref.ref[Any]]()
    export = profiler.profile.export_chrome_trace

    def exported(self: Any, path: str) -> None:
        export(self, path)
        traces.append(Path(path).read_text())
        recordings.append(weakref.ref(self))

    monkeypatch.setattr(profiler.profile, "export_chrome_trace", exported)
    meter = ProfilerMeter()
    gc.disable()
    try:
        meter.start(8)
        for _ in range(3):
            kept.append(torch.ones(1000).neg())
            meter.add_up()
            assert recordings[-1]() is None
        kept.pop()
        assert meter.stop() == 8 + 4 * kept[0].nbytes
    finally:
        gc.enable()
    assert not torch.autograd._profiler_enabled()
    assert [trace.count('"[memory]"') for trace in traces] == [3, 3, 3, 1]
    assert not any("aten::" in trace for trace in traces)


def test_a_measurement_is_silent(capfd: pytest.CaptureFixture[str]) -> None:
    """Torch's profiler warns where operators are left out and those of GPUs are not, as if there were any."""
    meter = ProfilerMeter()
    meter.start(0)
    meter.stop()
    assert "Toggling" not in capfd.readouterr().err
