"""The quickstart: fine-tune SmolLM2-135M-Instruct on questions about the Python standard library, in minutes on two cores.

    hatch run quickstart                 # a model, 2,000 real questions, a short run, one answer before and after
    hatch run quickstart --steps 60      # longer

Everything after the model and the data is one call of `forge.sft`. Ctrl-C stops it; the same command goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import yaml
from model import smollm2
from questions import stdlib_questions
from rich.console import Console
from rich.panel import Panel

import forge

QUESTION = "What does Python's `textwrap.dedent` do?"


def main() -> None:
    """Fetch the model, write the data, train, and compare an answer before and after."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=16, help="optimizer steps of 16 samples (default 16)")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of the runs (default runs/)")
    options = parser.parse_args()
    console = Console(soft_wrap=True)

    console.rule("[bold]1  a model")
    model_path = smollm2(report=console.print)

    console.rule("[bold]2  some data")
    data_path = options.runs / "quickstart-data.jsonl"
    data_path.parent.mkdir(parents=True, exist_ok=True)
    rows = stdlib_questions(leave_out=QUESTION)
    data_path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    console.print(f"{len(rows):,} questions and answers from the standard library's docstrings: {data_path}")

    console.rule("[bold]3  training")
    first = options.runs / "quickstart"
    run = place(first, options.steps)
    if run != first:
        console.print(
            f"{first} holds a finished run, or one of other steps: this one goes to {run}, and takes as much room again"
        )
    if run.exists():
        console.print(f"{run} was stopped, and goes on; the model as it was before it is asked again ...")
    else:
        console.print("what it answers before training ...")
    answer_before = forge.generate(model_path, QUESTION, max_new_tokens=64)
    result = forge.sft(
        model_path=model_path,
        data_path=data_path,
        ckpt_output_dir=run,
        validation_split=0.02,
        max_steps=options.steps,
        effective_batch_size=16,
        learning_rate=1e-4,
        warmup_steps=2,
    )
    console.print("what it answers after training ...")
    answer_after = forge.generate(result.model_dir, QUESTION, max_new_tokens=64)

    before, after = result.eval_loss_before, result.eval_loss_after
    assert before is not None
    assert after is not None
    console.rule("[bold]4  the result")
    console.print(f"held-out loss  {before:.4f} → {after:.4f}  ({100 * (after / before - 1):+.1f} %)")
    console.print(Panel(answer_before, title=f"before: {QUESTION}", title_align="left"), markup=False)
    console.print(Panel(answer_after, title=f"after: {QUESTION}", title_align="left"), markup=False)
    console.print(f"({result.seconds:.0f} seconds of training teach a small model how docstrings sound, not what they know.)")
    console.print(f"the run    {result.output_dir}  (report.html to look at; config.yaml, metrics.jsonl, log.txt)")
    console.print(f"the model  {result.model_dir}  (a plain Hugging Face directory)")
    forge_command = "hatch run forge" if os.environ.get("HATCH_ENV_ACTIVE") else "forge"
    console.print(f'try it     {forge_command} generate {result.output_dir} "What does Python\'s json.loads do?"')
    console.print(
        f"next       {forge_command} sft --model-path {model_path} ...  (the model as it was; --help has the settings)"
    )


def place(path: Path, steps: int) -> Path:
    """Return the first of `path`, `path-2`, ... that does not exist yet, or holds this very run unfinished."""
    number, found = 1, path
    while found.exists() and not unfinished(found, steps):
        number += 1
        found = path.with_name(f"{path.name}-{number}")
    return found


def unfinished(run: Path, steps: int) -> bool:
    """Return whether a directory holds a run of so many steps that was stopped before its end."""
    config = run / "config.yaml"
    return config.exists() and not (run / "result.json").exists() and yaml.safe_load(config.read_text())["max_steps"] == steps


def stoppable(page: Callable[[], None]) -> int:
    """Run a page and return its exit status; Ctrl-C ends it with one line on what became of the run."""
    try:
        page()
    except KeyboardInterrupt as stopped:
        status = getattr(stopped, "exit_status", 130)
        again = "interrupted; the same command goes on from the last saved state, or begins again where there is none."
        print(f"quickstart: {stopped if status == 75 else again}", file=sys.stderr)
        return status
    return 0


if __name__ == "__main__":
    sys.exit(stoppable(main))
