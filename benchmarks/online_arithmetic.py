"""Claim: GRPO teaches a real model arithmetic: the share of right answers to sums that it was not trained on rises.

SmolLM2-135M-Instruct (any causal chat model's directory works) answers a sum with a sentence about sums. So it first learns
from a few right answers that the number alone is wanted (`forge.sft`), and then which number (`forge.grpo`): an answer that is
the right number and nothing else is rewarded with 1, all others with 0. Sums that neither has seen are asked before and after
GRPO, sampled at temperature 1. The ratio is the share of right answers after it, over that before it and the smallest rise that
counts, 0.1; `rewards` is the curve, the mean reward of each rollout.

    python benchmarks/online_arithmetic.py --model path/to/SmolLM2-135M-Instruct
"""

import argparse
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from _report import emit, machine

import forge

RISE = 0.1
"""Smallest rise of the share of right answers that counts."""
REWARD = '''
def right(prompts, completions, answer, **columns):
    """Reward an answer that is the number alone."""
    return [float(c[-1]["content"].strip().rstrip(".") == a) for c, a in zip(completions, answer, strict=True)]
'''


def sums(most: int) -> list[dict[str, object]]:
    """Return a row for each sum of two numbers from 1 to `most`, in random but always the same order."""
    rows = [
        {"prompt": [{"role": "user", "content": f"What is {a} + {b}? Reply with the number only."}], "answer": str(a + b)}
        for a in range(1, most + 1)
        for b in range(1, most + 1)
    ]
    random.Random(0).shuffle(rows)
    return rows


def answered(row: dict[str, object]) -> dict[str, object]:
    """Return the right answer to a row's sum as the assistant's message."""
    return {"role": "assistant", "content": row["answer"]}


def write(path: Path, rows: list[dict[str, object]]) -> str:
    """Write rows as JSONL; return the path as text."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def main() -> None:
    """Train, measure and print the line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="directory of a chat model")
    parser.add_argument("--adapter", default="lora", choices=("none", "lora", "osft"))
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--shown", type=int, default=64, help="sums with their answers that `forge.sft` trains on, once")
    parser.add_argument("--learning-rate-before", type=float, default=5e-5, help="of `forge.sft`")
    parser.add_argument("--most", type=int, default=20, help="numbers from 1 to this one are added")
    parser.add_argument("--rollouts", type=int, default=60)
    parser.add_argument("--toy", action="store_true", help="two rollouts of sums up to 4: no proof")
    options = parser.parse_args()
    at = machine()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "sum_rewards.py").write_text(REWARD, encoding="utf-8")
        sys.path.insert(0, scratch)
        rows = sums(6 if options.toy else options.most)
        held_out = 8 if options.toy else 64
        shown = rows[held_out : held_out + (8 if options.toy else options.shown)]
        spoken = forge.sft(
            model_path=options.model,
            data_path=write(folder / "shown.jsonl", [{"messages": [*row["prompt"], answered(row)]} for row in shown]),
            ckpt_output_dir=str(folder / "spoken"),
            learning_rate=options.learning_rate_before,
            lr_scheduler="constant",
            effective_batch_size=8,
            num_epochs=1,
            max_tokens_per_gpu=1024,
        )
        settings = {
            "model_path": str(spoken.model_dir),
            "data_path": write(folder / "train.jsonl", rows[held_out + len(shown) :]),
            "eval_data_path": write(folder / "held_out.jsonl", rows[:held_out]),
            "ckpt_output_dir": str(folder / "run"),
            "reward": "sum_rewards:right",
            "adapter": options.adapter,
            "learning_rate": options.learning_rate,
            "lr_scheduler": "constant",
            "num_generations": 8,
            "max_new_tokens": 6,
            "effective_batch_size": 8,
            "max_steps": 2 if options.toy else options.rollouts,
            "max_tokens_per_gpu": 1024,
        }
        started = time.perf_counter()
        forge.grpo(**settings)
        seconds = time.perf_counter() - started
        lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    rewards = [round(line["rollout_reward"], 4) for line in lines if "rollout_reward" in line]
    measured = [line["eval_reward"] for line in lines if "eval_reward" in line]
    before, after = measured[0], measured[-1]
    emit(
        "online_arithmetic",
        "share of right answers to held-out sums after GRPO, over that before it and a rise of 0.1",
        max(after, 1e-3) / (before + RISE),
        1.0,
        toy=options.toy,
        at=at,
        before=round(before, 4),
        after=round(after, 4),
        rewards=rewards,
        seconds=round(seconds, 1),
        sizes={
            **{name: settings[name] for name in ("adapter", "learning_rate", "num_generations", "effective_batch_size")},
            "rollouts": len(rewards),
            "model": Path(options.model).name,
            "sums": len(rows),
            "shown": len(shown),
            "held_out": held_out,
        },
    )


if __name__ == "__main__":
    main()
