"""verl's and OpenRLHF's rows and reward functions, as they are: what the functions see in a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

import forge
from forge._errors import SettingsError

from .conftest import FRUITS, write_rows

FEW: dict[str, Any] = {
    "max_steps": 1, "effective_batch_size": 2, "max_tokens_per_gpu": 512, "num_generations": 2, "max_new_tokens": 6,
}  # fmt: skip
FUNCTIONS = """
import json
from pathlib import Path

SEEN = Path(__file__).with_name("seen.jsonl")


def told(**given):
    with SEEN.open("a") as file:
        file.write(json.dumps(given) + "\\n")


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    told(data_source=data_source, solution_str=solution_str, ground_truth=ground_truth, extra_info=extra_info)
    return {"score": float(len(solution_str)), "acc": 0.0}


def reward_func(queries, prompts, labels, **kwargs):
    import torch

    for query, prompt, label in zip(queries, prompts, labels):
        told(query=query, prompt=prompt, label=label)
    return {"rewards": torch.tensor([float(len(query)) for query in queries]), "extra_logs": {}}
"""


def seen(folder: Path, run: Path) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """What a function was given for each completion, beside the completion's line of the rollout."""
    given = [json.loads(line) for line in (folder / "seen.jsonl").read_text().splitlines()]
    (file,) = (run / "rollouts").glob("*.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()][1:]
    prompts = {line["group"]: line["prompt"] for line in lines if "prompt" in line}
    lines = [{**line, "prompt": prompts[line["group"]]} for line in lines]
    assert len(given) == len(lines) == 4
    return list(zip(given, lines, strict=True))


def test_verls_parquet_and_compute_score(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of its preprocessing scripts are read as they are; each completion is scored beside its own ground truth."""
    rows = [
        {
            "data_source": "fruits", "prompt": [{"role": "user", "content": f"what colour has the {fruit}?"}],
            "ability": "colours", "reward_model": {"style": "rule", "ground_truth": fruit},
            "extra_info": {"split": "train", "index": index, "answer": "red"},
        }
        for index, fruit in enumerate(FRUITS)
    ]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    (tmp_path / "theirs.py").write_text(FUNCTIONS)
    monkeypatch.chdir(tmp_path)
    given = {"model_path": model_dir, "data_path": "train.parquet", "reward": "theirs.py:compute_score", **FEW}
    forge.grpo(ckpt_output_dir="run", **given)
    for call, line in seen(tmp_path, tmp_path / "run"):
        assert call["data_source"] == "fruits"
        assert call["solution_str"] == line["completion"]
        assert call["ground_truth"] in line["prompt"], "the ground truth of another row"
        assert call["extra_info"] == rows[FRUITS.index(call["ground_truth"])]["extra_info"]
        assert line["reward"] == len(call["solution_str"])
    write_rows(tmp_path / "bare.jsonl", [{"prompt": "a plum", "data_source": "fruits"}] * 4)
    with pytest.raises(SettingsError, match="takes the field reward_model, which no row of data_path has"):
        forge.grpo(ckpt_output_dir="bare", **{**given, "data_path": "bare.jsonl"})


def test_openrlhfs_rows_and_reward_func(model_dir: Path, tmp_path: Path) -> None:
    """Its input_key and label_key are renamed; queries are the whole text that the model read and wrote, with its marks."""
    rows = [{"context": [{"role": "user", "content": f"what is a {fruit}?"}], "answer": fruit} for fruit in FRUITS]
    write_rows(tmp_path / "rows.jsonl", rows)
    (tmp_path / "theirs.py").write_text(FUNCTIONS)
    forge.grpo(
        model_path=model_dir, data_path=tmp_path / "rows.jsonl", ckpt_output_dir=tmp_path / "run", **FEW,
        rename_columns={"context": "prompt", "answer": "label"}, reward=f"{tmp_path}/theirs.py:reward_func",
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    for call, line in seen(tmp_path, tmp_path / "run"):
        asked = [{"role": "user", "content": f"what is a {call['label']}?"}]
        assert call["prompt"] == tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        assert call["query"].startswith(call["prompt"])
        rest = tokenizer(call["query"].removeprefix(call["prompt"]), add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(rest, skip_special_tokens=True) == line["completion"]
        assert line["reward"] == len(call["query"])
