"""Two tasks in sequence on SmolLM2-135M: how much of the first is forgotten by full fine-tuning and by OSFT.

    hatch run two_tasks                                   # about three minutes on two cores
    hatch run two_tasks --model path/to/a/model           # another model directory

Task A is learned once. Task B is then learned on that model twice, by full fine-tuning and by OSFT, and each time task A, task
B and text of neither are measured. A trained model is a plain directory: the second run's `model_path` is the first's result.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from measure import Measured, load, measure
from tasks import Row, rows

import forge

sys.path.append(str(Path(__file__).resolve().parents[1] / "quickstart"))

from model import smollm2
from questions import stdlib_questions

STEPS, SAMPLES, HELD_OUT = 16, 16, 50
METHODS: dict[str, dict[str, Any]] = {
    "full": {"learning_rate": 1e-4},
    "osft": {"adapter": "osft", "unfreeze_rank_ratio": 0.25, "learning_rate": 3e-4},
}


def main() -> None:
    """Train three times, measure four models, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None, help="model directory (default: SmolLM2-135M-Instruct, fetched once)")
    parser.add_argument("--runs", type=Path, default=Path("runs/two_tasks"), help="folder of the runs")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"optimizer steps of {SAMPLES} samples for each task")
    options = parser.parse_args()
    base = options.model or smollm2(report=print)
    held_out = {task: rows(task, HELD_OUT, seed=1) for task in "AB"}
    # Text about Python, which neither task is about.
    chats = [row["messages"] for row in stdlib_questions(leave_out="")[: HELD_OUT // 2]]
    held_out["text"] = [{"prompt": user["content"], "completion": f"\n{answer['content']}"} for user, answer in chats]

    table = {"before": measured(base, held_out)}
    first = learn("A", base, options, "A-full", **METHODS["full"])
    table["A"] = measured(first.model_dir, held_out)
    for name, settings in METHODS.items():
        result = learn("B", str(first.model_dir), options, f"B-{name}", **settings)
        table[f"A, then B ({name})"] = measured(result.model_dir, held_out)
        print(f"{name}: {result.seconds:.0f} s of training")

    print(f"\n{'trained on':<20}{'A right':>9}{'B right':>9}{'loss on A':>11}{'loss on B':>11}{'loss on text':>14}")
    for name, of in table.items():
        shares, losses = [of[task].right for task in "AB"], [of[task].loss for task in ("A", "B", "text")]
        print(f"{name:<20}{shares[0]:>9.0%}{shares[1]:>9.0%}{losses[0]:>11.3f}{losses[1]:>11.3f}{losses[2]:>14.3f}")
    print(f"\nwhat was protected, and what changed:  hatch run forge osft inspect {options.runs / 'B-osft'}")


def learn(task: str, model_path: str, options: argparse.Namespace, name: str, **settings: Any) -> Any:
    """Fine-tune a model on a task; the same command continues a run that was stopped."""
    data = options.runs / f"{task}.jsonl"
    data.parent.mkdir(parents=True, exist_ok=True)
    data.write_text("".join(json.dumps(row) + "\n" for row in rows(task, options.steps * SAMPLES, seed=0)), encoding="utf-8")
    return forge.sft(
        model_path=model_path,
        data_path=data,
        ckpt_output_dir=options.runs / name,
        max_steps=options.steps,
        effective_batch_size=SAMPLES,
        warmup_steps=2,
        **settings,
    )


def measured(path: str | Path, held_out: dict[str, list[Row]]) -> dict[str, Measured]:
    """Measure a model on all held-out rows."""
    model, tokenizer = load(path)
    return {name: measure(model, tokenizer, wanted) for name, wanted in held_out.items()}


if __name__ == "__main__":
    main()
