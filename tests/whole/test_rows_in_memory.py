"""Training on rows in memory: the same run as on a file of them, known again by what they hold."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import datasets
import pytest

import forge

from .conftest import conversations
from .starts import untimed, weights

ROWS = conversations()
HELD_OUT = conversations(30)[24:]


@pytest.fixture(scope="module")
def given(model_dir: Path) -> dict[str, Any]:
    """Four steps, without data."""
    return {
        "model_path": str(model_dir),
        "effective_batch_size": 6,
        "max_tokens_per_gpu": 256,
        "learning_rate": 1e-2,
        "full_state_every_steps": 1,
        "keep_full_state": True,
        "num_epochs": 1,
    }


@pytest.fixture(scope="module")
def of_a_file(given: dict[str, Any], chats: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run on a file of the rows."""
    return forge.sft(**given, data_path=chats, ckpt_output_dir=tmp_path_factory.mktemp("file") / "run").output_dir


def unfinished(run: Path) -> None:
    """Make a run what a kill before the last step's state leaves."""
    (run / "result.json").unlink()
    shutil.rmtree(run / "hf_format")
    shutil.rmtree(run / "full_state" / "step_4")


@pytest.mark.slow
def test_a_dataset_and_a_list_train_as_their_file(given: dict[str, Any], of_a_file: Path, tmp_path: Path) -> None:
    """The same losses and weights; config.yaml says what the rows were; a resume knows them again and refuses others."""
    rows = datasets.Dataset.from_list(ROWS)
    run = forge.sft(**given, data_path=rows, ckpt_output_dir=tmp_path / "run").output_dir
    assert untimed(run) == untimed(of_a_file)
    assert weights(run) == weights(of_a_file)
    assert "data_path: datasets.Dataset of 24 rows, sha256 " in (run / "config.yaml").read_text()
    before = (run / "log.txt").read_text()
    forge.sft(**given, data_path=datasets.Dataset.from_list(ROWS), ckpt_output_dir=run)
    assert (run / "log.txt").read_text() == before, "it was finished, and is given again"
    unfinished(run)
    with pytest.raises(forge.SettingsError, match="the rows of data_path are not those that its run was made with"):
        forge.sft(**given, data_path=ROWS[1:], ckpt_output_dir=run)
    forge.sft(**given, data_path=ROWS, ckpt_output_dir=run)
    assert "resuming after step 3" in (run / "log.txt").read_text()
    assert weights(run) == weights(of_a_file)
    with pytest.raises(forge.data.DataError, match=r"'list of 24 rows, sha256 .* were rows in memory"):
        forge.sft(run / "config.yaml", ckpt_output_dir=tmp_path / "repeated")


@pytest.mark.slow
def test_a_stream_trains_as_its_file(given: dict[str, Any], of_a_file: Path, tmp_path: Path) -> None:
    """A generator is known by the fingerprint of its store, also once the run is finished; held-out rows may be given too."""
    more = {"eval_data_path": iter(HELD_OUT)}
    run = forge.sft(**given, **more, data_path=iter(ROWS), ckpt_output_dir=tmp_path / "run").output_dir
    assert weights(run) == weights(of_a_file)
    config = (run / "config.yaml").read_text()
    assert "data_path: list_iterator of 24 rows, sha256 " in config
    assert "eval_data_path: list_iterator of 6 rows, sha256 " in config
    result = forge.sft(**given, eval_data_path=HELD_OUT, data_path=(row for row in ROWS), ckpt_output_dir=run)
    assert result.steps == 4
    with pytest.raises(forge.SettingsError, match="the rows of eval_data_path are not those"):
        forge.sft(**given, data_path=iter(ROWS), eval_data_path=iter(HELD_OUT[1:]), ckpt_output_dir=run)


def test_an_error_names_the_row_and_leaves_nothing(given: dict[str, Any], tmp_path: Path) -> None:
    """The place is `data_path[24]`, and there is no run directory."""
    for launch in ({}, {"nproc_per_node": 2}):
        with pytest.raises(forge.data.DataError, match=r"^data_path\[24\]: field messages"):
            forge.sft(**given, **launch, data_path=iter([*ROWS, {"messages": 3}]), ckpt_output_dir=tmp_path / "run")
        assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_launcher_prepares_for_its_ranks(given: dict[str, Any], of_a_file: Path, tmp_path: Path) -> None:
    """Two processes train on rows that only their launcher has, read once, and leave nothing of them beside the run."""
    run = forge.sft(**given, nproc_per_node=2, data_path=iter(ROWS), ckpt_output_dir=tmp_path / "run").output_dir
    assert [line["loss"] for line in untimed(run)] == pytest.approx([line["loss"] for line in untimed(of_a_file)], rel=1e-5)
    assert "data_path: list_iterator of 24 rows, sha256 " in (run / "config.yaml").read_text()
    assert not list((run / "logs").glob("*/rows"))
