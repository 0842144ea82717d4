"""What a run says of what it chose."""

from __future__ import annotations

import os
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import forge
import forge_packing
from forge.run._choices import absolute_paths, begins_of, few_steps, moved_run, note_best, operations_of, warn_of_higher_loss
from forge.saving._best import Best
from forge.settings._settings import resolve
from forge.tasks._task import Evaluation
from forge.verbs._sft import SFTSettings

REQUIRED = {"model_path": "m", "data_path": "d", "ckpt_output_dir": "o"}


@pytest.mark.parametrize(
    ("given", "steps", "said"),
    [
        ({}, 2, True),
        ({}, 1, True),
        ({}, 10, False),
        ({}, None, False),
        ({"max_steps": 2}, 2, False),
        ({"effective_batch_size": 32}, 2, False),
        ({"num_epochs": 1}, 2, False),
    ],
)
def test_few_steps_are_remarked_on_where_nobody_chose_them(given: dict[str, Any], steps: int | None, said: bool) -> None:
    """By default 60 rows are two steps; who gave batch or length knows."""
    s = resolve(SFTSettings, ("argument", REQUIRED | given))
    if "num_epochs" not in given and "max_steps" not in given:
        s = s.resolved("num_epochs", 1, "as a run chooses it")
    found = few_steps(s, steps)
    assert (found is not None) == said
    if found is not None and steps is not None:
        assert f"{steps} step{'s' * (steps > 1)} with effective_batch_size=32 and one epoch" in found


def test_a_data_set_with_a_colon_in_its_name_is_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its path is absolute in config.yaml, as that of a split is; a dataset of the Hub with a configuration stays a name."""
    (tmp_path / "data").mkdir()
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "data" / "dataset_info.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    names = ["data/dataset_info.json:a:b/../c", "data:train", "org/name:config:train", "s3://data/rows.jsonl"]
    s = absolute_paths(forge.sft.task, resolve(SFTSettings, ("argument", REQUIRED | {"data_path": names})))
    assert s.data.data_path == (f"{tmp_path}/{names[0]}", f"{tmp_path}/data:train", *names[2:])
    assert any(map(os.path.exists, begins_of(s.data.data_path[0])))


def test_operations_of_a_run_are_six_a_weight_and_token(tmp_path: Path) -> None:
    """Counted from the files and the plan, of which each rank computes its share; of one without end none are known."""
    save_file({"w": torch.zeros(10, 100, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    task, s = forge.sft.task, resolve(SFTSettings, ("argument", REQUIRED))
    plan = forge_packing.plan([5, 7, 12], batch_size=3, max_tokens=16, world_size=2, epochs=None)
    header = (tmp_path / "model.safetensors").stat().st_size / 2 - 1000
    assert operations_of(task, s, plan.until(epochs=4, max_steps=None), str(tmp_path)) == pytest.approx(
        6 * (1000 + header) * 24 * 4 / 2
    )
    assert operations_of(task, s, plan, str(tmp_path)) == 0


def test_the_record_of_a_run_that_was_moved(tmp_path: Path) -> None:
    """Its config.yaml sends a run to where it was; one line names both, unless the directory is given or the same."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text("{}")
    layer = REQUIRED | {"ckpt_output_dir": str(tmp_path / "a")}
    moved = resolve(SFTSettings, (f"recipe {tmp_path / 'b' / 'config.yaml'}", layer))
    said = moved_run(moved)
    assert said is not None
    assert said.startswith(f"WARNING: {tmp_path / 'b' / 'config.yaml'} is of the run in {tmp_path / 'b'}, ")
    assert f"ckpt_output_dir is {tmp_path / 'a'}, to which this run writes" in said
    assert moved_run(resolve(SFTSettings, (f"recipe {tmp_path / 'a' / 'config.yaml'}", layer))) is None
    assert moved_run(resolve(SFTSettings, (f"recipe {tmp_path / 'r.yaml'}", layer))) is None
    assert moved_run(resolve(SFTSettings, (f"recipe {tmp_path / 'b' / 'config.yaml'}", REQUIRED), ("flag", layer))) is None


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [(3.1, 10.8, True), (3.1, 3.0, False), (3.1, 3.1, False), (None, 9.0, False), (3.1, None, False)],
)
def test_a_run_that_ends_worse_than_it_began_says_so(before: float | None, after: float | None, said: bool) -> None:
    """With both losses and what helps; what was not measured is not compared."""
    lines: list[str] = []
    for best_step in (None, 4, 0):
        warn_of_higher_loss(types.SimpleNamespace(note=lines.append), before, after, best_step=best_step)
    assert len(lines) == 3 * said
    if said:
        assert lines[0].startswith("WARNING: the held-out loss is higher than before training, 10.8000 after 3.1000")
        assert "keep_best=true" in lines[0]
        assert "hf_format/best" in lines[1]
        assert "hf_format/best" not in lines[2]
        assert "no step was better than none" in lines[2]


@pytest.mark.parametrize("kept", [True, False])
def test_an_earlier_best_measurement_is_said(kept: bool) -> None:
    """With its step, both figures and where that model is; not where the last step, or no step, was best."""
    lines: list[str] = []
    report: Any = types.SimpleNamespace(note=lines.append)
    after = Evaluation(loss=4.25, count=10, unit="tokens", figures={})
    for step in (0, 200, 680):
        note_best(report, Best(metric="loss", value=3.677, step=step), 680, after, kept=kept)
    model = "hf_format/best is that model" if kept else "keep_best=true keeps the best step's model"
    assert lines == [f"held out, best after step 200: loss 3.6770, 4.2500 at the end; {model}"]
