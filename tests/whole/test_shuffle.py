"""shuffle=false: rows as they stand in the files, in a whole run and in one that is resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import forge
import forge_packing

from .conftest import conversations, write_rows
from .starts import untimed, weights

RUN: dict[str, Any] = {
    "effective_batch_size": 4,
    "max_tokens_per_gpu": 256,
    "lr_scheduler": "constant",
    "learning_rate": 1e-2,
    "shuffle": False,
    "keep_full_state": True,
    "stall_timeout": 0,
}


@pytest.fixture(scope="module")
def given(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two files, 6 easy rows and then 4 hard ones."""
    folder, rows = tmp_path_factory.mktemp("rows"), conversations(10)
    paths = [write_rows(folder / f"{name}.jsonl", part) for name, part in (("easy", rows[:6]), ("hard", rows[6:]))]
    return {"model_path": str(model_dir), "data_path": [str(path) for path in paths], **RUN}


def order(run: Path) -> list[list[int]]:
    """The samples of each step."""
    plan = forge_packing.BatchPlan.load(run / "plan" / "plan.npz")
    return [plan.samples(step).tolist() for step in range(plan.num_steps)]


def test_one_file_after_the_other_in_every_epoch(given: dict[str, Any], tmp_path: Path) -> None:
    """A run that is stopped within its second epoch and goes on has the same bits as one that was not."""
    whole = forge.sft(**given, max_steps=5, ckpt_output_dir=tmp_path / "whole").output_dir
    assert order(whole) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], [0, 1, 2, 3], [4, 5, 6, 7]]
    store = forge.data.TokenStore.open(whole / "data" / "train")
    assert ["easy" in store.source(at) for at in (0, 5, 6, 9)] == [True, True, False, False]
    assert "samples        18 (10 in the data), in the order of the data" in (whole / "log.txt").read_text()
    stopped = forge.sft(**given, max_steps=4, ckpt_output_dir=tmp_path / "stopped").output_dir
    assert forge.sft(**given, max_steps=5, ckpt_output_dir=stopped).steps == 5
    last = "hf_format/samples_18/model.safetensors"
    assert weights(stopped)[last] == weights(whole)[last]
    steps = [[line for line in untimed(run) if "lr" in line] for run in (whole, stopped)]
    assert steps[0] == steps[1]


def test_each_source_of_a_mixture_in_its_own_order(given: dict[str, Any], tmp_path: Path) -> None:
    """Shares interleave the files; each is read from its first row to its last, and again."""
    shares = dict(zip(given["data_path"], (0.25, 0.75), strict=True))
    run = forge.sft(**{**given, "data_path": shares}, max_steps=2, ckpt_output_dir=tmp_path / "run").output_dir
    taken = [at for step in order(run) for at in step]
    assert [at for at in taken if at < 6] == [0, 1]
    assert [at for at in taken if at >= 6] == [6, 7, 8, 9, 6, 7]
    other = dict(zip(given["data_path"], (0.5, 0.5), strict=True))
    with pytest.raises(forge.SettingsError, match="in another order .* with the shares of data_path"):
        forge.sft(**{**given, "data_path": other}, max_steps=3, ckpt_output_dir=run)


def test_prompts_of_rollouts(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An online verb samples completions of the first prompts first."""
    (tmp_path / "forge_test_order.py").write_text("def same(completions, **_):\n    return [1.0] * len(completions)\n")
    monkeypatch.syspath_prepend(tmp_path)
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": f"the {word}"} for word in ("apple", "fig", "plum", "pear")])
    own = {"reward": "forge_test_order:same", "num_generations": 2, "max_new_tokens": 2, "kl_weight": 0.0}
    few = {**RUN, "effective_batch_size": 2}
    run = forge.rloo(model_path=model_dir, data_path=rows, ckpt_output_dir=tmp_path / "run", **own, **few).output_dir
    files = [run / "rollouts" / f"step_{step}.jsonl" for step in (1, 2)]
    lines = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    assert [[line["prompt"] for line in each if "prompt" in line] for each in lines] == [
        ["the apple", "the fig"],
        ["the plum", "the pear"],
    ]
