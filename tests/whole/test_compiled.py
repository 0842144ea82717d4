"""Runs whose blocks are compiled: the same losses, one graph, exports under plain names, resumed without."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from torch._dynamo import lookup_backend
from torch._dynamo.testing import CompileCounterWithBackend

import forge
from forge.run._choices import choose_machine
from forge.settings._settings import resolve
from forge_accel import Choice, CompiledBlocks, CPUAccelerator
from forge_accel.devices import _cpu
from forge_accel.fused import _choices
from forge_algos import _kernels
from forge_algos.losses import _score_rows

from ..ranks import run_on_ranks
from . import tiny
from .conftest import write_rows
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
    sft({**given, **LORA, "ckpt_output_dir": str(half), "compile": "off"})
    assert losses(half) == pytest.approx(losses(plain), rel=CLOSE)
    assert "compile: blocks → off" in log(half)


@pytest.mark.lane
def test_rows_with_and_without_a_shared_prefix_are_a_graph_each(model_dir: Path, tmp_path: Path) -> None:
    """Whatever their sizes, how many samples they have and how many share; checkpointed, of which the products are kept."""
    common, found = tiny.sample(24, 40).input_ids, []
    for at in range(24):
        ids = (common if at % 8 < 5 else []) + tiny.sample(4 + at % 7, 50 + at).input_ids
        found.append({"input_ids": ids, "labels": ids})
    given = {**BASE, "model_path": str(model_dir), "data_path": str(write_rows(tmp_path / "rows.jsonl", found))}
    given |= {"activation_checkpointing": "selective", "effective_batch_size": 8, "max_tokens_per_gpu": 48, "max_steps": 3}
    assert compiled({**given, "ckpt_output_dir": str(tmp_path / "run")}) == 2
    assert "prefixes: computed once a micro-batch" in log(tmp_path / "run")
    assert "WARNING: compile" not in log(tmp_path / "run")


def test_what_compiles_by_itself_says_why_and_warns_of_nothing(
    given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where `auto` compiles, the log has the reason; blocks that cannot be compiled are no warning there."""

    def fails(*_: Any) -> Any:
        raise RuntimeError("no compiler here")

    wins, off = Choice(fails, "blocks: measured to win"), Choice(None, "off: asked for")
    monkeypatch.setattr(CPUAccelerator, "compiling", lambda _, asked, **__: off if asked == "off" else wins)
    for name, more in (("auto", {}), ("asked", {"compile": "blocks"})):
        sft({**given, **more, "ckpt_output_dir": str(tmp_path / name), "max_steps": 1})
        assert "compile: blocks: measured to win" in log(tmp_path / name)
        assert "compile: the blocks run uncompiled" in log(tmp_path / name)
        assert ("WARNING: compile" in log(tmp_path / name)) == bool(more)
    for adapter in ("lora", "dora"):
        sft({**given, **LORA, "adapter": adapter, "ckpt_output_dir": str(tmp_path / adapter), "max_steps": 1})
        # With LoRA it was measured to win too, with DoRA it was not measured.
        assert ("compile: " in log(tmp_path / adapter)) == (adapter == "lora")


def test_a_long_run_on_a_cpu_is_compiled(given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By itself, as a dry run and its record say; it goes on as it began, whatever its length has become."""
    counter, run = CompileCounterWithBackend("aot_eager"), tmp_path / "run"
    sft({**given, "ckpt_output_dir": str(tmp_path / "short")})
    assert "compile: " not in log(tmp_path / "short")
    monkeypatch.setattr(_choices, "INDUCTOR", counter)
    for module in (_choices, _cpu):
        monkeypatch.setattr(module, "missing_compiler", lambda: "")
    monkeypatch.setattr(_cpu, "_OPERATIONS_A_SECOND", 1.0)
    settings = {**given, "ckpt_output_dir": str(run)}
    why = "a step was measured to take 0.8 to 0.95 of the time, and the run is of about "
    assert f"compile=blocks: {why}" in str(forge.dry_run(forge.sft, **settings))
    dora = forge.dry_run(forge.sft, **settings, **LORA | {"adapter": "dora"})
    assert "compile=off: measured to win without an adapter or with LoRA, not with adapter=dora" in str(dora)
    for max_steps in (2, 4):
        sft({**settings, "max_steps": max_steps})
    assert f"compile: blocks  # chosen: {why}" in (run / "config.yaml").read_text()
    assert log(run).count(f"compile: blocks: {why}") == 2
    assert "compile: blocks →" not in log(run)
    assert counter.frame_count > 0
    assert losses(run) == pytest.approx(losses(tmp_path / "short"), rel=CLOSE)
    # One that began short is given more steps, and stays as it was.
    sft({**given, "ckpt_output_dir": str(tmp_path / "short"), "max_steps": 6})
    assert "compile: " not in log(tmp_path / "short")
    assert "compile: 'off'  # chosen: " in (tmp_path / "short" / "config.yaml").read_text()


@pytest.mark.parametrize(("adapter", "asked", "auto"), [("dora", "blocks", "off"), ("none", "off", "blocks")])
def test_what_was_given_stays_in_a_run_that_is_resumed_without(
    adapter: str, asked: str, auto: str, given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where `auto` would choose the other, by the adapter or the device."""
    compiles = Choice(CompileCounterWithBackend("aot_eager"), "blocks: here")
    by_itself = {"off": Choice(None, "off: asked for")} | ({"auto": Choice(None, "off: here")} if auto == "off" else {})
    monkeypatch.setattr(CPUAccelerator, "compiling", lambda _, asked, **__: by_itself.get(asked, compiles))
    settings = {**given, "adapter": adapter, "ckpt_output_dir": str(tmp_path), "keep_full_state": True}
    sft({**settings, "compile": asked, "max_steps": 1})
    sft({**settings, "max_steps": 2})
    config = (tmp_path / "config.yaml").read_text()
    assert f"compile: {asked}  # chosen: what the run had before" in config.replace("'", "")


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


def fails_on_rank_1(settings: dict[str, Any]) -> None:
    """Run with a compiler that works on rank 0 alone."""

    def backend(graph: Any, inputs: list[Any]) -> Any:
        if os.environ["RANK"] == "1":
            raise RuntimeError("no compiler here")
        return lookup_backend("aot_eager")(graph, inputs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_choices, "INDUCTOR", backend)
        sft({**settings, "compile": "blocks"})


@pytest.mark.lane
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_ranks_run_compiled_alike(given: dict[str, Any], tmp_path: Path, strategy: str) -> None:
    """A compiler that fails on one rank leaves the blocks of both as they stand after the first step."""
    plain, run = tmp_path / "plain", tmp_path / "run"
    sft({**given, "ckpt_output_dir": str(plain)})
    run_on_ranks(fails_on_rank_1, 2, {**given, "strategy": strategy, "ckpt_output_dir": str(run)}, joined=False, timeout=900)
    assert losses(run) == pytest.approx(losses(plain), rel=CLOSE)
    assert "WARNING: compile: the blocks run uncompiled: RuntimeError: no compiler here (rank 1)" in log(run)


@pytest.mark.parametrize("shared", ["tp_size", "cp_size", "ep_size"])
def test_blocks_that_ranks_compute_together_are_not_compiled(monkeypatch: pytest.MonkeyPatch, shared: str) -> None:
    """Asked for it is refused by name, before anything is prepared; `auto` leaves it with the reason."""
    machine = CPUAccelerator()
    monkeypatch.setattr(CPUAccelerator, "compiling", lambda *_, **__: Choice("inductor", "blocks"))
    for asked in ("auto", "blocks"):
        given = {"model_path": "m", "data_path": "d", "ckpt_output_dir": "o", "strategy": "fsdp2", shared: 2, "compile": asked}
        s = resolve(forge.sft.task.settings, ("argument", given))
        if asked == "auto":
            s = choose_machine(s, machine, machine.dtype())
            assert s.device.compile == "off"
            assert s.origins["compile"] == f"chosen: with {shared}=2 ranks compute a block together"
            continue
        with pytest.raises(forge.SettingsError, match=f"compile=blocks with {shared}=2") as caught:
            choose_machine(s, machine, machine.dtype())
        assert caught.value.exit_status == 2


def test_ranks_agree_after_the_first_step(given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One vote of all ranks, between the first step and the second; a no leaves the blocks as they stand."""
    agree, answers = CompiledBlocks.agree, []

    def another_cannot(self: CompiledBlocks, of_all: Callable[[str | None], str | None]) -> None:
        answers.append((of_all(None), of_all("no compiler")))
        agree(self, lambda _: "another rank cannot")

    monkeypatch.setattr(CompiledBlocks, "agree", another_cannot)
    run = tmp_path / "run"
    assert compiled({**given, "ckpt_output_dir": str(run), "max_steps": 2, "logging_steps": 1}) == 1
    assert answers == [(None, "no compiler (rank 0)")]
    told = log(run)
    assert "WARNING: compile: the blocks run uncompiled: another rank cannot" in told
    assert told.index("one graph for all") < told.index("another rank cannot") < told.index("step 2/2")


def test_a_run_tells_which_kernels_it_takes(given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of forge that were asked for: one line, with the reason where one was given up; not those of a former run."""
    monkeypatch.setattr(_kernels, "_found", {})
    _kernels.try_kernel("a former run's", "x:0", lambda: None, instead="operators")

    def asked(*_: Any) -> bool:
        _kernels.try_kernel("adamw_8bit", "x:0", lambda: None, instead="bitsandbytes' kernels")
        return _kernels.try_kernel("losses", "x:0", lambda: "its numbers are others", instead="operators")

    monkeypatch.setattr(_score_rows, "_has_kernel", asked)
    sft({**given, "ckpt_output_dir": str(tmp_path), "max_steps": 2})
    (told,) = [line for line in log(tmp_path).splitlines() if "kernels: " in line]
    assert told.partition("kernels: ")[2] == (
        "adamw_8bit by one kernel, tried on x:0 first; "
        "losses by operators, for its kernel was given up on x:0: its numbers are others"
    )
