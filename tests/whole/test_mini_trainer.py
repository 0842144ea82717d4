"""examples/mini_trainer: a trainer from two packages, run as a reader would run it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from ..lanes import ci_keeps
from . import tiny
from .repository import ROOT

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

SCRIPT = ROOT / "examples" / "mini_trainer" / "train.py"
TINY = "llama-tied"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model on disk."""
    directory = tmp_path_factory.mktemp("mini") / "model"
    tiny.save(TINY, directory)
    return directory


def write(path: Path, rows: list[object]) -> Path:
    """Rows as JSONL; a string is written as it is."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def counting(number: int = 24) -> list[object]:
    """Samples that count upwards after a prompt of two tokens: something that a tiny model learns at once."""
    rows: list[object] = []
    for index in range(number):
        ids = list(range(5 + index % 7, 5 + index % 7 + 6 + index % 5))
        rows.append({"input_ids": ids, "labels": [-100, -100, *ids[2:]], "len": len(ids)})
    return rows


def run(model: Path, data: Path, output: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """The script in a process of its own."""
    command = [sys.executable, str(SCRIPT), "--model", str(model), "--data", str(data), "--output", str(output), *options]
    environment = {**os.environ, "TQDM_DISABLE": "1"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def losses(text: str) -> list[float]:
    """The loss of each printed step."""
    return [float(found) for found in re.findall(r"^step \d+/\d+  loss (\S+)", text, re.MULTILINE)]


def mean_loss(model: object, rows: list[dict[str, list[int]]]) -> float:
    """Mean loss over learned tokens by plain transformers, one sample at a time."""
    import torch

    total, count = 0.0, 0
    with torch.no_grad():
        for row in rows:
            logits = model(input_ids=torch.tensor(row["input_ids"])[None], use_cache=False).logits[0, :-1]
            targets = torch.tensor(row["labels"])[1:]
            total += torch.nn.functional.cross_entropy(logits, targets, reduction="sum").item()
            count += int((targets != -100).sum())
    return total / count


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ci_keeps(["lora"], ["none", "lora"]))
def test_the_loss_falls_and_the_result_loads(model: Path, tmp_path: Path, adapter: str) -> None:
    """The printed loss falls, and what is saved is loaded by plain transformers or PEFT and has learned."""
    from transformers import AutoModelForCausalLM

    rows, output = counting(), tmp_path / "trained"
    options = ["--epochs", "6", "--max-tokens", "32", "--learning-rate", "1e-2", "--warmup-steps", "2"]
    done = run(
        model, write(tmp_path / "train.jsonl", rows), output, *options, *(["--lora-r", "8"] if adapter == "lora" else [])
    )
    assert done.returncode == 0, done.stderr
    assert losses(done.stdout)[-1] < 0.7 * losses(done.stdout)[0]
    assert len(losses(done.stdout)) == 18
    base = AutoModelForCausalLM.from_pretrained(model)
    before = mean_loss(base, rows)
    if adapter == "lora":
        from peft import PeftModel

        trained = PeftModel.from_pretrained(base, output)
    else:
        trained = AutoModelForCausalLM.from_pretrained(output)
    assert mean_loss(trained.eval(), rows) < 0.7 * before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.jsonl", "trained"]


GOOD = {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}


# Each is a process: a line, a row, all rows, a setting.
IN_CI = [
    ([GOOD, '{"input_ids": [1,'], [], r"train\.jsonl:2: this is no JSON"),
    ([{**GOOD, "labels": [-100, 6]}], [], r"train\.jsonl:1: 3 input_ids, 2 labels"),
    ([], [], "no row holds a token to learn"),
    ([GOOD], ["--learning-rate", "-1"], "learning_rate must be above 0"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "options", "message"),
    ci_keeps(
        IN_CI,
        [
            ([GOOD, '{"input_ids": [1,'], [], r"train\.jsonl:2: this is no JSON"),
            ([GOOD, {"text": "hello"}], [], r"train\.jsonl:2: .*needs the fields input_ids and labels, this one has: text"),
            ([[1, 2]], [], r"train\.jsonl:1: .*has: list"),
            ([{**GOOD, "labels": [-100, 6]}], [], r"train\.jsonl:1: 3 input_ids, 2 labels"),
            ([{**GOOD, "len": 4}], [], r"train\.jsonl:1: .*len is 4"),
            ([{**GOOD, "input_ids": [5, 6.5, 7]}], [], r"train\.jsonl:1: input_ids must be a list of whole numbers"),
            ([{**GOOD, "input_ids": []}], [], r"train\.jsonl:1: input_ids must be a list of whole numbers"),
            ([], [], "no row holds a token to learn"),
            ([{**GOOD, "labels": [5, -100, -100]}], [], "no row holds a token to learn"),
            ([GOOD], ["--max-tokens", "2"], "3"),
            ([GOOD], ["--batch-size", "0"], "batch_size"),
            ([GOOD], ["--learning-rate", "-1"], "learning_rate must be above 0"),
            ([GOOD], ["--lora-r", "0"], "lora_r must be at least 1"),
            ([{**GOOD, "input_ids": [5, 6, 999]}], [], r"token id 999.*vocabulary ends at 130"),
        ],
    ),
)
def test_bad_input_is_one_message(model: Path, tmp_path: Path, rows: list[object], options: list[str], message: str) -> None:
    """Exit status 2, one message and no traceback, nothing written."""
    done = run(model, write(tmp_path / "train.jsonl", rows), tmp_path / "trained", *options)
    assert done.returncode == 2, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert re.search(message, line)
    assert "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["train.jsonl"]


@pytest.mark.slow
def test_missing_and_existing_paths_are_named(model: Path, tmp_path: Path) -> None:
    """No data file, no model directory, an output that is there: each named."""
    data = write(tmp_path / "train.jsonl", [GOOD])
    for arguments, named in (
        ((model, tmp_path / "nothing.jsonl", tmp_path / "out"), "nothing.jsonl: there is no such file"),
        ((tmp_path / "nowhere", data, tmp_path / "out"), "nowhere: no model directory"),
        ((model, data, tmp_path), f"{tmp_path}: exists already"),
    ):
        done = run(*arguments)
        assert done.returncode == 2
        assert named in done.stderr


def test_it_is_short_and_needs_two_packages() -> None:
    """About 150 lines, and of forge only the two packages that it is about."""
    text = SCRIPT.read_text()
    assert len(text.splitlines()) <= 170
    assert set(re.findall(r"\bimport (forge\w*)|from (forge\w*)", text)) == {("forge_algos", ""), ("forge_packing", "")}
