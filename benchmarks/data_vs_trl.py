"""Claim: `forge_data.prepare` is at least 3 times as fast as TRL's preparation with `assistant_only_loss`, same ids and labels.

Conversations of one to three questions and answers, each side with its default settings (both stay in this process; ours once
more in one thread, `num_proc=1`, and the target is for the first), a chat template that marks the assistant's text with {%
generation %}, as TRL needs. Preparation is not a call of its own in TRL: it happens while `SFTTrainer` is made. So theirs is
the time to read the file and make a trainer, less the time to make a trainer (same model, same settings) from rows that are
prepared already. They take turns in one process with all libraries loaded; every run gets a new copy of the file. Every id
and every label must be the same. The ratio is their seconds over ours, medians; the processor time of both is beside it.

    python benchmarks/data_vs_trl.py
"""

import argparse
import importlib.util
import json
import logging
import statistics
import tempfile
import warnings
from pathlib import Path
from typing import Any

import _preparation as preparation
from _report import emit, machine, note

TARGET = 3.0


class Trl:
    """TRL's side."""

    def __init__(self, tokenizer: Path) -> None:
        from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

        self._tokenizer = AutoTokenizer.from_pretrained(tokenizer)
        sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
        self._model = LlamaForCausalLM(LlamaConfig(vocab_size=len(self._tokenizer), num_key_value_heads=1, **sizes))
        self.prepared: Any = None
        self.trainer: list[preparation.Taken] = []

    def __call__(self, data: Path, tokenizer: Path, folder: Path) -> None:
        """Read the rows and make a trainer."""
        from datasets import load_dataset

        del tokenizer
        rows = load_dataset("json", data_files=str(data), split="train", cache_dir=str(folder / "cache"))
        self.prepared = self._trainer(rows, folder).train_dataset

    def alone(self, folder: Path) -> None:
        """Time making a trainer from prepared rows, without preparation."""
        self.trainer.append(preparation.timed(lambda: self._trainer(self.prepared, folder)))

    def _trainer(self, rows: Any, folder: Path) -> Any:
        import trl

        arguments = trl.SFTConfig(
            output_dir=str(folder / "out"), max_length=None, assistant_only_loss=True, report_to=[], use_cpu=True, bf16=False,
            gradient_checkpointing=False,
        )  # fmt: skip
        return trl.SFTTrainer(model=self._model, args=arguments, train_dataset=rows, processing_class=self._tokenizer)


def main() -> None:
    """Measure and print the line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=3000, help="conversations")
    parser.add_argument("--repeats", type=int, default=5, help="measured runs of each side")
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--toy", action="store_true", help="a size that runs in seconds and proves nothing")
    options = parser.parse_args()
    if importlib.util.find_spec("trl") is None:
        raise SystemExit("trl is not installed here, and it is one side of this comparison: hatch run bench:data_trl")
    if options.toy:
        options.rows, options.repeats, options.vocabulary = 40, 1, 500
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    at = machine()
    rows = preparation.make_rows(options.rows, toy=options.toy)
    with tempfile.TemporaryDirectory(prefix="forge-bench-") as scratch:
        folder = Path(scratch)
        tokenizer = preparation.write_tokenizer(folder / "tokenizer", rows, preparation.MARKED, vocabulary=options.vocabulary)
        file = folder / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        theirs = Trl(tokenizer)
        sides = {"forge": preparation.forge, "forge_one_thread": preparation.forge_in_one, "trl": theirs}
        every = preparation.take_turns(sides, file, tokenizer, folder, repeats=options.repeats)
        for turn in range(options.repeats):
            theirs.alone(folder / f"alone-{turn}")
        for ours in ("forge-0", "forge_one_thread-0"):
            sizes = preparation.agree(preparation.forge_wrote(folder / ours), list(theirs.prepared), "TRL")
    # The cost of the trainer itself is subtracted from every run of theirs; at toy size the difference may be negative.
    trainer = preparation.Taken(*(statistics.median(figures) for figures in zip(*theirs.trainer, strict=True)))
    note(f"making TRL's trainer alone: {trainer.seconds:.2f} s, {trainer.cpu:.2f} s of processor time")
    every["trl"] = [
        preparation.Taken(max(taken.seconds - trainer.seconds, 1e-3), max(taken.cpu - trainer.cpu, 1e-3))
        for taken in every["trl"]
    ]
    measured = {side: preparation.summary(taken, sizes["tokens"]) for side, taken in every.items()}
    emit(
        "data_vs_trl",
        "seconds of TRL's dataset preparation with assistant_only_loss over forge_data.prepare's, default settings of both, "
        "same ids and labels",
        measured["trl"]["seconds"] / measured["forge"]["seconds"],
        TARGET,
        toy=options.toy,
        at=at,
        **preparation.ratios(measured, "trl"),
        sides=measured,
        trainer_seconds=round(trainer.seconds, 4),
        trainer_cpu_seconds=round(trainer.cpu, 4),
        sizes={
            **sizes,
            "bytes": sum(len(json.dumps(row)) + 1 for row in rows),
            "vocabulary": options.vocabulary,
            "repeats": options.repeats,
        },
    )


if __name__ == "__main__":
    main()
