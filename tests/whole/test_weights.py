"""A run with bfloat16 weights: said as such, resumed to the bit, on several ranks, and refused where it cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import forge

from ..lanes import ci_keeps
from ..ranks import run_on_ranks
from .conftest import conversations, write_rows
from .starts import RUN, metrics, sft

pytestmark = pytest.mark.slow
pytest.importorskip("bitsandbytes")


@pytest.fixture
def given(model_dir: Path, tmp_path: Path) -> dict[str, Any]:
    """Four steps on eight rows."""
    rows = write_rows(tmp_path / "rows.jsonl", conversations(8))
    own = {"num_epochs": 2, "effective_batch_size": 4, "weights": "bfloat16", "full_state_every_steps": 2}
    return {"model_path": str(model_dir), "data_path": str(rows), **RUN, **own, "keep_full_state": True, "keep_last_n": 4}


def tensors(run: Path, step: int) -> dict[str, torch.Tensor]:
    """What a full state holds."""
    found = {}
    for file in sorted((run / "full_state" / f"step_{step}").rglob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            found |= {f"{file.name}/{name}": opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
    return found


def untimed(run: Path) -> list[tuple[float, float]]:
    """The loss and the gradient norm of each step."""
    return [(line["loss"], line["grad_norm"]) for line in metrics(run)]


def test_a_run_is_said_as_such_and_resumed_to_the_bit(given: dict[str, Any], tmp_path: Path) -> None:
    """Log and config.yaml name weights, optimizer and dtype; a run from a state in its middle has the same losses and bits.

    Rows may be packed otherwise when it goes on; the weights' dtype may not change, and the message says so.
    """
    whole = forge.sft(**given, ckpt_output_dir=tmp_path / "whole").output_dir
    said, config = (whole / "log.txt").read_text(), (whole / "config.yaml").read_text()
    assert "weights: bfloat16, and no float32 copy of them: each step is rounded stochastically (seed 42)" in said
    assert "moments have 8 bits" in said
    assert "weights: bfloat16" in config
    assert "optimizer: adamw_8bit  # chosen: what moves weights=bfloat16" in config
    assert "dtype: bfloat16  # chosen" in config
    state = tensors(whole, 4)
    kept = {name.partition("/")[2].partition("/")[0]: tensor.dtype for name, tensor in state.items()}
    assert any(tensor.dtype == torch.bfloat16 for tensor in state.values()), kept
    again = {**given, "resume": str(whole / "full_state" / "step_2")}
    resumed = forge.sft(**again, ckpt_output_dir=tmp_path / "resumed").output_dir
    assert untimed(resumed)[-2:] == untimed(whole)[-2:]
    other = tensors(resumed, 4)
    assert state.keys() == other.keys()
    assert all(torch.equal(state[name], other[name]) for name in state)
    alone = forge.sft(**again, packing="off", ckpt_output_dir=tmp_path / "alone").output_dir
    for mine, theirs in zip(untimed(alone)[-2:], untimed(whole)[-2:], strict=True):
        assert mine[0] == pytest.approx(theirs[0], rel=1e-2)
    (whole / "result.json").unlink()
    with pytest.raises(forge.SettingsError, match="weights=bfloat16, and now `weights` is float32.*Give weights=bfloat16"):
        forge.sft(**{**given, "weights": "float32", "dtype": "bfloat16", "optimizer": "adamw_8bit"}, ckpt_output_dir=whole)
    # Without a word on what followed from the weights, they are what is named.
    with pytest.raises(forge.SettingsError, match="weights=bfloat16, and now `weights` is float32.*Give weights=bfloat16"):
        forge.sft(**{name: value for name, value in given.items() if name != "weights"}, ckpt_output_dir=whole)


TWO_RANKS = [("none", "fsdp2"), ("none", "ddp"), ("lora", "ddp"), ("lora", "fsdp2")]


@pytest.mark.parametrize(("adapter", "strategy"), ci_keeps([("none", "fsdp2")], TWO_RANKS))
def test_on_two_ranks(adapter: str, strategy: str, given: dict[str, Any], tmp_path: Path) -> None:
    """Divided, and with an adapter, two ranks have one process' losses but for rounding."""
    more = {**given, "adapter": adapter, "full_state_every_steps": 0, "num_epochs": 1}
    single = forge.sft(**more, ckpt_output_dir=tmp_path / "single").output_dir
    divided = tmp_path / "divided"
    run_on_ranks(sft, 2, {**more, "strategy": strategy, "ckpt_output_dir": str(divided)}, joined=False)
    for mine, theirs in zip(untimed(divided), untimed(single), strict=True):
        assert mine[0] == pytest.approx(theirs[0], rel=1e-2)
        assert mine[1] == pytest.approx(theirs[1], rel=5e-2)
    assert "each step is rounded stochastically" in (divided / "log.txt").read_text()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"optimizer": "adamw"}, "weights=bfloat16 with optimizer=adamw, which rounds to the nearest"),
        ({"optimizer": "muon"}, "weights=bfloat16 with optimizer=muon, which rounds to the nearest"),
        ({"optimizer": "apollo"}, "weights=bfloat16 with optimizer=apollo, which rounds to the nearest"),
        ({"adapter": "osft"}, "weights=bfloat16 with adapter=osft: weights that are rounded at random move"),
        ({"dtype": "float32"}, "weights=bfloat16 with dtype=float32"),
        ({"strategy": "zero2"}, "weights=bfloat16 with strategy=zero2, which moves float32 weights"),
        ({"backend": "trl"}, "weights.*TRL's optimizers round to the nearest"),
        ({"weights": "float16"}, "weights must be one of 'float32', 'bfloat16'"),
        ({"dtype": "float16"}, "dtype=float16 is not available: float16 ends at 65,504"),
    ],
)
def test_what_cannot_be_is_refused(change: dict[str, Any], message: str, given: dict[str, Any], tmp_path: Path) -> None:
    """By name, with the reason, exit status 2, and before anything is written."""
    if change.get("backend") == "trl":
        pytest.importorskip("trl")
        for name in ("full_state_every_steps", "keep_full_state", "keep_last_n"):
            given.pop(name)
    with pytest.raises(forge.SettingsError, match=message) as caught:
        forge.sft(**{**given, **change}, ckpt_output_dir=tmp_path / "run")
    assert caught.value.exit_status == 2
    assert not (tmp_path / "run").exists()
