"""A flipped bit in the data of a run that was killed is found when it goes on: every verb, and several ranks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from ..lanes import ci_keeps
from ..ranks import run_on_ranks
from .starts import damaged, untimed, weights
from .verbs import VERBS, run_verb, settings_of

pytestmark = pytest.mark.slow

STATES = {"full_state_every_steps": 1, "keep_last_n": 9, "async_save": False}
CASES = [*((verb, 1) for verb in VERBS), ("sft", 2), ("dpo", 2)]
IN_CI = [("dpo", 1), ("sft", 2)]


def largest_array(store: Path) -> Path:
    """The file of a store that holds its mask, or its most bytes."""
    masks = [*store.rglob("*mask*.bin")]
    return masks[0] if masks else max(store.rglob("*.bin"), key=lambda file: file.stat().st_size)


@pytest.mark.parametrize(("verb", "ranks"), ci_keeps(IN_CI, CASES))
def test_a_flipped_bit_is_found(verb: str, ranks: int, model_dir: Path, tmp_path: Path) -> None:
    """The store is named, made again from the rows, and the run ends with the bits of one that nothing damaged."""
    folder = tmp_path / "rows"
    folder.mkdir()
    settings: dict[str, Any] = {**settings_of(verb, model_dir, folder), **STATES}
    whole, run = tmp_path / "whole", tmp_path / "run"

    def start(path: Path) -> None:
        given = {**settings, "ckpt_output_dir": str(path), **({"strategy": "ddp"} if ranks > 1 else {})}
        if ranks == 1:
            run_verb(verb, given, str(folder))
        else:
            run_on_ranks(run_verb, ranks, verb, given, str(folder), joined=False)

    start(whole)
    shutil.copytree(whole, run)
    # As a kill after step 2 would leave it.
    (run / "result.json").unlink()
    shutil.rmtree(run / "hf_format")
    for step in (3, 4):
        shutil.rmtree(run / "full_state" / f"step_{step}")
    damaged(largest_array(run / "data" / "train"), "bit flipped", run)
    start(run)
    text = (run / "log.txt").read_text()
    assert "resuming after step 2" in text
    assert "It was made again from the rows of data_path" in text
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert any("data/train" in event["text"] for event in events if event["event"] == "warning")
    assert untimed(run) == untimed(whole)
    assert weights(run) == weights(whole)
