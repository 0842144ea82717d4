"""The rows for the log: every decision with its reason."""

from __future__ import annotations

import pytest

from forge_accel import AccelError, CPUAccelerator, DeviceSettings, describe


def test_every_decision_has_a_row_and_a_reason():
    """The rows have the accelerator's decisions for these settings, none without a reason."""
    acc = CPUAccelerator()
    rows = {row.what: row for row in describe(acc, DeviceSettings(dtype="bfloat16", attention="eager"))}
    decisions = [
        "machine",
        "device",
        "dtype",
        "attention",
        "fused_optimizer",
        "collective_backend",
        "default_tokens",
        "support",
    ]
    assert list(rows) == decisions
    assert rows["support"].value == "exercised"
    assert [rows[what].value for what in ("device", "dtype", "attention", "collective_backend")] == [
        "cpu",
        "bfloat16",
        "eager",
        "gloo",
    ]
    assert all(row.value and row.reason for row in rows.values())
    assert rows["dtype"].reason == acc.dtype("bfloat16").reason
    assert describe(acc, DeviceSettings())[2].value == "float32"


def test_an_unknown_request_is_refused():
    """A plug-in's settings object with another attention does not slip through."""

    class Settings:
        dtype, attention = "auto", "flash"

    with pytest.raises(AccelError, match="flash"):
        describe(CPUAccelerator(), Settings())
