"""instructlab-training's `process_data` labels rows as we do where it is right: string contents, a turn end that is the EOS."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

import forge_data

from .data_families import FAMILIES

data_process = pytest.importorskip(
    "instructlab.training.data_process", reason="instructlab-training is not installed here: see docs/development.md"
)

# Headers that end where the content begins, turn ends that are the EOS, and no text of the template's own within a turn.
# SmolLM3 is not among them: rows without reasoning are rendered with thinking off, and theirs with the template's default.
RIGHT = [
    "chatml",
    "command-r",
    "granite-3.3",
    "llama-3",
    "llama-3.1",
    "mistral",
    "mistral-nemo",
    "phi-4",
    "qwen2.5",
    "zephyr",
]
WITHOUT_SYSTEM = {"mistral", "mistral-nemo"}
WORDS = "What is the capital of France Paris hello 🙂 é 12, 3. (x)\n def f(x): <b> don't".split(" ")


def rows(family: str, count: int) -> list[dict[str, Any]]:
    """Conversations of words; texts begin and end with a letter, since wrapped in tokens they are not trimmed or merged."""
    draw = random.Random(family)

    def text() -> str:
        return " ".join(["So", *draw.choices(WORDS, k=draw.randint(8, 30)), "end"])

    made = []
    for number in range(count):
        pairs = draw.randint(1, 3)
        turns = [{"role": role, "content": text()} for _ in range(pairs) for role in ("user", "assistant")]
        # Granite writes today's date where there is no system message; that is no fault, but midnight would be.
        if family not in WITHOUT_SYSTEM and (number % 2 or family == "granite-3.3"):
            turns.insert(0, {"role": "system", "content": text()})
        if number % 5 == 4 and len(turns) > 3:
            turns.pop()
        made.append({"messages": turns, "unmask": number % 4 == 3})
    return made


@pytest.mark.parametrize("family", RIGHT)
def test_labels_are_instructlabs(family: str, tmp_path: Path) -> None:
    """The file that `process_data` writes holds our ids and labels, row by row; `unmask` rows too."""
    tokenizer = FAMILIES[family].tokenizer("tiktoken")
    model = tmp_path / "model"
    tokenizer.save_pretrained(model)
    # It wants to know from the model's configuration whether this is gpt-oss.
    (model / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    made = rows(family, 40)
    data = tmp_path / "train.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in made), encoding="utf-8")
    data_process.process_messages_into_input_ids(
        data_path=str(data), data_output_path=str(tmp_path / "out"), max_seq_len=10_000, model_path=str(model), num_cpu_procs=1
    )
    lines = (tmp_path / "out" / "data.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == len(made)
    for row, line in zip(made, lines, strict=True):
        theirs, ours = json.loads(line), forge_data.tokenize(row, model)
        assert ours.input_ids.tolist() == theirs["input_ids"]
        assert ours.labels.tolist() == theirs["labels"], row
        assert len(ours) == theirs["len"]
