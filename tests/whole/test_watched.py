"""Trackers and callbacks of a real run: they see what metrics.jsonl says, and the model is the same with and without them."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import forge
from forge.cli._app import main

SHORT: dict[str, Any] = {
    "max_steps": 3,
    "effective_batch_size": 4,
    "max_tokens_per_gpu": 512,
    "learning_rate": 1e-2,
    "validation_split": 0.25,
    "adapter": "lora",
    "lora_dropout": 0.5,
}


class Meddler:
    """A callback that does all that it can to change the run."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self.measured: list[int] = []
        self.result: Any = None

    def on_step(self, record: dict[str, Any]) -> None:
        import torch

        self.steps.append(dict(record))
        record.clear()
        torch.rand(3)
        random.random()
        np.random.rand(3)  # noqa: NPY002 - the state that it moves is what is tested

    def on_evaluation(self, record: dict[str, Any]) -> None:
        self.measured.append(record["step"])

    def on_end(self, result: Any) -> None:
        self.result = result


class Leaver:
    """A callback that ends the process, or would."""

    def on_step(self, _: dict[str, Any]) -> None:
        sys.exit(9)


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def weights(run: Path) -> bytes:
    return next(run.glob("hf_format/samples_*/*.safetensors")).read_bytes()


@pytest.mark.slow
def test_callbacks_see_the_record_and_change_nothing(model_dir: Path, chats: Path, tmp_path: Path) -> None:
    """Each step and measurement in order, then the result; with dropout, the weights are those of a run without them."""
    given = {**SHORT, "model_path": model_dir, "data_path": chats}
    meddler = Meddler()
    result = forge.sft(**given, ckpt_output_dir=tmp_path / "with", callbacks=[Leaver(), meddler])
    forge.sft(**given, ckpt_output_dir=tmp_path / "without")
    assert meddler.steps == [line for line in lines(tmp_path / "with") if "lr" in line]
    assert (meddler.measured, meddler.result) == ([0, 3], result)
    assert weights(tmp_path / "with") == weights(tmp_path / "without")
    log = (tmp_path / "with" / "log.txt").read_text()
    assert log.count("WARNING: callback Leaver.on_step: SystemExit: 9. It is not called again.") == 1


def test_an_object_that_watches_nothing_is_refused(model_dir: Path, chats: Path, tmp_path: Path) -> None:
    """A misspelled method would never be called."""
    with pytest.raises(forge.SettingsError, match=r"object has none of the methods on_step, on_evaluation, on_end"):
        forge.sft(**SHORT, model_path=model_dir, data_path=chats, ckpt_output_dir=tmp_path / "run", callbacks=[object()])
    assert not (tmp_path / "run").exists()


@pytest.mark.lane
@pytest.mark.slow
def test_callbacks_over_launched_ranks(model_dir: Path, chats: Path, tmp_path: Path) -> None:
    """The launcher calls them with what its first rank writes."""
    meddler = Meddler()
    forge.sft(
        **SHORT | {"adapter": "none", "lora_dropout": 0.0, "max_steps": 2},
        model_path=model_dir,
        data_path=chats,
        ckpt_output_dir=tmp_path / "run",
        nproc_per_node=2,
        callbacks=[meddler],
    )
    assert meddler.steps == [line for line in lines(tmp_path / "run") if "lr" in line]
    assert meddler.result.steps == 2


@pytest.mark.slow
def test_a_run_and_its_tracker(model_dir: Path, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`tensorboard_log_dir` alone switches TensorBoard on; `forge track` has nothing left to send to it."""
    pytest.importorskip("tensorboard", reason="the extra `tensorboard` of forge-llm")
    pytest.importorskip("accelerate", reason="the extra `tensorboard` of forge-llm")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run, folder = tmp_path / "run", tmp_path / "boards"
    forge.sft(**SHORT, model_path=model_dir, data_path=chats, ckpt_output_dir=run, tensorboard_log_dir=folder)
    found = EventAccumulator(str(folder / "run")).Reload()
    losses = [(line["step"], pytest.approx(line["loss"])) for line in lines(run) if "loss" in line]
    assert [(event.step, event.value) for event in found.Scalars("loss")] == losses
    assert "trackers: tensorboard" in (run / "log.txt").read_text()
    assert main(["track", str(run)]) == 0
    assert capsys.readouterr().out == f"tensorboard: has all {len(lines(run))} lines\n"
    assert forge.track(run) == {"tensorboard": len(lines(run))}


def test_a_run_without_trackers_has_none_to_send_to(tmp_path: Path) -> None:
    """And what is no run is refused."""
    with pytest.raises(forge.RunDirectoryError, match="no run directory"):
        forge.track(tmp_path)
    (tmp_path / "config.yaml").write_text("model_path: a\n")
    with pytest.raises(forge.SettingsError, match="name one, such as tensorboard"):
        forge.track(tmp_path)
