"""Runs whose blocks are compiled: the same losses, one graph, exports under plain names, resumed without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from torch._dynamo.testing import CompileCounterWithBackend

import forge
from forge_accel import Choice, CPUAccelerator
from forge_accel.fused import _choices

from ..ranks import run_on_ranks
from .starts import metrics, sft

pytestmark = pytest.mark.slow

CLOSE = 1e-5
BASE: dict[str, Any] = {
    "effective_batch_size": 5,
    "max_tokens_per_gpu": 160,
    "max_steps": 4,
    "learning_rate": 1e-3,
    "lr_scheduler": "constant",
    "activation_checkpointing": True,
}
LORA: dict[str, Any] = {"adapter": "lora", "lora_r": 4}


def compiled(settings: dict[str, Any]) -> int:
    """Run with `compile=blocks` by a backend that runs the graphs as they are; the number of graphs."""
    counter = CompileCounterWithBackend("aot_eager")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_choices, "INDUCTOR", counter)
        sft({**settings, "compile": "blocks"})
    return counter.frame_count


def losses(run: Path) -> list[float]:
    """The loss of every step."""
    return [line["loss"] for line in metrics(run) if "loss" in line]


def names(run: Path) -> list[str]:
    """The names of the tensors of its export."""
    (file,) = run.glob("hf_format/*/*.safetensors")
    with safe_open(file, "pt") as found:
        return sorted(found.keys())


def log(run: Path) -> str:
    """What the run told."""
    return (run / "log.txt").read_text()


@pytest.fixture
def given(model_dir: Path, chats: Path) -> dict[str, Any]:
    """Settings of every run here, but for its directory."""
    return {**BASE, "model_path": str(model_dir), "data_path": str(chats)}


def test_a_run_compiles_one_graph_and_is_resumed_without(given: dict[str, Any], tmp_path: Path) -> None:
    """LoRA, checkpointed, over rows of many sizes: one graph, the plain run's losses and names; half a run each way."""
    plain, half = tmp_path / "plain", tmp_path / "half"
    sft({**given, **LORA, "ckpt_output_dir": str(plain)})
    assert compiled({**given, **LORA, "ckpt_output_dir": str(half), "max_steps": 2, "keep_full_state": True}) == 1
    assert "one graph for all of its kind" in log(half)
    assert "WARNING: compile" not in log(half)
    assert names(half) == names(plain)
    sft({**given, **LORA, "ckpt_output_dir": str(half)})
    assert losses(half) == pytest.approx(losses(plain), rel=CLOSE)
    assert "compile: blocks → off" in log(half)


def test_what_compiles_by_itself_says_why_and_warns_of_nothing(
    given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where `auto` compiles, the log has the reason; blocks that cannot be compiled are no warning there."""

    def fails(*_: Any) -> Any:
        raise RuntimeError("no compiler here")

    wins, off = Choice(fails, "blocks: measured to win"), Choice(None, "off: asked for")
    monkeypatch.setattr(CPUAccelerator, "compiling", lambda _, asked: off if asked == "off" else wins)
    for name, more in (("auto", {}), ("asked", {"compile": "blocks"})):
        sft({**given, **more, "ckpt_output_dir": str(tmp_path / name), "max_steps": 1})
        assert "compile: blocks: measured to win" in log(tmp_path / name)
        assert "compile: the blocks run uncompiled" in log(tmp_path / name)
        assert ("WARNING: compile" in log(tmp_path / name)) == bool(more)
    for adapter in ("lora", "dora"):
        sft({**given, **LORA, "adapter": adapter, "ckpt_output_dir": str(tmp_path / adapter), "max_steps": 1})
        # With LoRA it was measured to win too, with DoRA it was not measured.
        assert ("compile: " in log(tmp_path / adapter)) == (adapter == "lora")


@pytest.mark.lane
def test_two_ranks_compile_one_graph_each(given: dict[str, Any], tmp_path: Path) -> None:
    """Under fsdp2, whose hooks gather and free each block's weights around its graph."""
    plain, divided = tmp_path / "plain", tmp_path / "divided"
    sft({**given, "ckpt_output_dir": str(plain)})
    graphs = run_on_ranks(
        compiled, 2, {**given, "strategy": "fsdp2", "ckpt_output_dir": str(divided)}, joined=False, timeout=900
    )
    assert graphs == [1, 1]
    assert losses(divided) == pytest.approx(losses(plain), rel=CLOSE)
    assert "WARNING: compile" not in log(divided)


@pytest.mark.lane
@pytest.mark.parametrize("more", [{}, LORA, {"strategy": "ddp"}, {"strategy": "fsdp2", **LORA}])
def test_compiled_by_inductor(more: dict[str, Any], given: dict[str, Any], tmp_path: Path) -> None:
    """The real compiler gives the same losses, on one process and on two."""
    plain, run = tmp_path / "plain", tmp_path / "run"
    number = 2 if "strategy" in more else 1
    for where, how in ((plain, "off"), (run, "blocks")):
        settings = {**given, **more, "compile": how, "ckpt_output_dir": str(where)}
        run_on_ranks(sft, number, settings, joined=False, timeout=1800)
    assert losses(run) == pytest.approx(losses(plain), rel=CLOSE)
    assert "one graph for all of its kind" in log(run)


def test_liger_is_refused_on_a_cpu(given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """kernels=liger is refused by name, before anything is prepared."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(forge.accel.AccelError, match="kernels=liger") as caught:
        forge.sft(**given, kernels="liger", ckpt_output_dir=tmp_path / "run")
    assert caught.value.exit_status == 2
    assert not (tmp_path / "run").exists()
