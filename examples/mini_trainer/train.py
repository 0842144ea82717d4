"""A trainer of your own from two packages, forge_packing and forge_algos: tokenized JSONL → a fine-tuned model.

    python train.py --model DIRECTORY --data train.jsonl --output NEW_DIRECTORY

A row is {"input_ids": [...], "labels": [...]}, with -100 where no loss is counted; "len" is checked if it is there. The plan,
the packing, the loss and the loop are forge's; reading, loading, logging and saving are this file's, to be replaced by yours.
"""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import forge_algos
import forge_packing


class Example(NamedTuple):
    """One sample: two integer arrays of one length."""

    input_ids: np.ndarray
    labels: np.ndarray

    @property
    def loss_count(self) -> int:
        """Learned tokens, without the first one: no token precedes it, from which it could be predicted."""
        return int((self.labels[1:] != -100).sum())


class BadInputError(ValueError):
    """Input that cannot be used; the message says where and why."""

    exit_status = 2


def read(path: Path) -> list[Example]:
    """Read the samples of a file. Raises BadInputError, which names the line."""
    if not path.is_file():
        raise BadInputError(f"{path}: there is no such file")
    examples = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                examples.append(parse(line, f"{path}:{number}"))
    if not any(example.loss_count for example in examples):
        raise BadInputError(f"{path}: no row holds a token to learn (a label other than -100, after the first)")
    return examples


def parse(line: str, place: str) -> Example:
    """Parse one line of the file. Raises BadInputError, which names it by `place`."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise BadInputError(f"{place}: this is no JSON: {error}") from error
    if not isinstance(row, dict) or not {"input_ids", "labels"} <= row.keys():
        found = ", ".join(row) if isinstance(row, dict) else type(row).__name__
        raise BadInputError(f"{place}: a row needs the fields input_ids and labels, this one has: {found or 'none'}")
    for field in ("input_ids", "labels"):
        values = row[field]
        if not isinstance(values, list) or not values or any(type(v) is not int for v in values):
            raise BadInputError(f"{place}: {field} must be a list of whole numbers, at least one")
    length = len(row["input_ids"])
    if len(row["labels"]) != length or row.get("len", length) != length:
        stated = f", len is {row['len']}" if "len" in row else ""
        raise BadInputError(f"{place}: {length} input_ids, {len(row['labels'])} labels{stated}: these must be equal")
    return Example(np.array(row["input_ids"]), np.array(row["labels"]))


def steps(plan: forge_packing.BatchPlan, examples: list[Example]) -> Iterator[list[forge_packing.PackedBatch]]:
    """Yield the micro-batches of each step, packed when they are needed."""
    for step in range(plan.num_steps):
        yield [forge_packing.collate([examples[i] for i in indices]) for indices in plan.micro_batches(step)]


def train(options: argparse.Namespace) -> None:
    """Run the whole training."""
    if options.output.exists():
        raise BadInputError(f"{options.output}: exists already; name a new directory")
    if not (options.model / "config.json").is_file():
        raise BadInputError(f"{options.model}: no model directory (it has no config.json)")
    examples = read(options.data)
    # Bad settings are refused here, before a model is loaded.
    optimizer_settings = forge_algos.OptimizerSettings(
        learning_rate=options.learning_rate, warmup_steps=options.warmup_steps, max_grad_norm=options.max_grad_norm
    )
    lora = {} if options.lora_r is None else {"lora_r": options.lora_r}
    adapter = forge_algos.AdapterSettings(adapter="lora" if lora else "none", **lora)
    plan = forge_packing.plan(
        [len(example.input_ids) for example in examples],
        batch_size=options.batch_size,
        max_tokens=options.max_tokens or max(len(example.input_ids) for example in examples),
        seed=options.seed,
        epochs=options.epochs,
        loss_counts=[example.loss_count for example in examples],
    )
    print(plan.summary())

    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(options.seed)
    model: Any = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    if lora:
        model = forge_algos.adapt(model, adapter).model
    model.to(options.device)
    optimizer = forge_algos.adamw(model, optimizer_settings)
    for output in forge_algos.train(
        model,
        steps(plan, examples),
        objective=forge_algos.SFT(),
        optimizer=optimizer,
        scheduler=forge_algos.schedule(optimizer, optimizer_settings, plan.num_steps),
        max_grad_norm=optimizer_settings.max_grad_norm,
    ):
        line = f"step {output.step}/{plan.num_steps}  loss {output.loss:.4f}  lr {output.learning_rate:.2e}"
        print(f"{line}  grad_norm {output.grad_norm:.3f}  {output.tokens / output.seconds:.0f} tokens/s", flush=True)

    save(model, options.output)
    print(f"saved {'the adapter' if lora else 'the model'} in {options.output}")


def save(model: Any, directory: Path) -> None:
    """Save the model atomically: under a temporary name, then renamed."""
    temporary = directory.with_name(f".{directory.name}.{os.getpid()}")
    try:
        model.save_pretrained(temporary)
        temporary.rename(directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def main() -> int:
    """Train; return exit status 0, 2 after one message about bad input, 1 where the run failed by itself."""
    parser = argparse.ArgumentParser(description="Fine-tune a causal language model on tokenized JSONL.")
    parser.add_argument("--model", type=Path, required=True, help="directory of a transformers model")
    parser.add_argument("--data", type=Path, required=True, help="JSONL of input_ids and labels")
    parser.add_argument("--output", type=Path, required=True, help="new directory for the trained model")
    parser.add_argument("--batch-size", type=int, default=8, help="samples in one step (default %(default)s)")
    parser.add_argument("--max-tokens", type=int, help="tokens in one micro-batch (default: the longest sample)")
    parser.add_argument("--epochs", type=int, default=1, help="passes over the data (default %(default)s)")
    parser.add_argument("--learning-rate", type=float, help="default 2e-5, or 2e-4 with --lora-r")
    parser.add_argument("--warmup-steps", type=int, default=0, help="steps of rising learning rate (default %(default)s)")
    parser.add_argument("--max-grad-norm", type=float, default=1.0, help="0 turns clipping off (default %(default)s)")
    parser.add_argument("--lora-r", type=int, help="train LoRA adapters of this rank instead of all weights")
    parser.add_argument("--seed", type=int, default=42, help="order of the samples, adapters (default %(default)s)")
    parser.add_argument("--device", default="cpu", help="a torch device (default %(default)s)")
    try:
        train(parser.parse_args())
    except (BadInputError, forge_packing.PackingError, forge_algos.ForgeAlgosError) as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    except (TypeError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
