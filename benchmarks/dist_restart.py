"""Claim: a stopped run reaches its next step nearly as soon as a new one its first: the ratio of the times is at least 0.8.

A Llama of 33 million parameters (`--toy`: tiny) and token rows, written on the spot; one process, AdamW. One run is stopped
by SIGTERM after a few steps, which saves its full state. Then, in turn, a new run is started in an empty directory, and a
copy of the stopped one is started again; each is timed from starting the command until its first new step is in
metrics.jsonl, and killed there. So the time of the restart includes checking every byte of the state against its hash, and
reading it. The ratio is the median time of a new run over the median restart.

    python benchmarks/dist_restart.py --repeats 5
"""

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _report import emit, machine, note

SHAPE = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 12, "vocab_size": 32000}
TOY = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 512}
ROWS, TOKENS, STEPS_BEFORE = 64, 64, 3
PATIENCE_SECONDS = 1800.0


def write_model(folder: Path, shape: dict[str, int]) -> int:
    """Write the model, in float32, with a tokenizer of bytes; return its number of parameters."""
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate([*alphabet, "<|end|>"])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(folder)
    config = transformers.LlamaConfig(num_attention_heads=6, num_key_value_heads=6, tie_word_embeddings=True, **shape)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def write_rows(file: Path) -> None:
    """Write rows of ids, all of them learned."""
    draw = random.Random(0)
    rows = [[draw.randrange(256) for _ in range(TOKENS)] for _ in range(ROWS)]
    file.write_text("".join(json.dumps({"input_ids": row, "labels": row}) + "\n" for row in rows), encoding="utf-8")


def last_step(run: Path) -> int:
    """Read the last complete step of metrics.jsonl; 0 before there is one."""
    try:
        lines = (run / "metrics.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
    except FileNotFoundError:
        return 0
    return max((line["step"] for line in map(json.loads, lines) if "loss" in line), default=0)


def link_or_copy(source: str, target: str) -> None:
    """Copy a file, or link it where it is part of a full state, which is written only once: a copy would keep the disk busy."""
    if source.endswith(".safetensors"):
        Path(target).hardlink_to(source)
    else:
        shutil.copy2(source, target)


class Run:
    """`forge sft` in a process of its own, killed at the end of the block if it still runs."""

    def __init__(self, run: Path, scratch: Path) -> None:
        self.run, self.log = run, scratch / "output.txt"
        given = {"model-path": scratch / "model", "data-path": scratch / "rows.jsonl", "ckpt-output-dir": run}
        settings = {"effective-batch-size": 2, "max-tokens-per-gpu": 2 * TOKENS, "num-epochs": 1000, "lr-scheduler": "constant"}
        self.command = [sys.executable, "-m", "forge", "sft"]
        for name, value in {**given, **settings}.items():
            self.command += [f"--{name}", str(value)]

    def __enter__(self) -> "Run":
        self.began = time.perf_counter()
        with self.log.open("w") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log)
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def reach(self, step: int) -> float:
        """Wait until `step` is in metrics.jsonl; return the seconds since the command was started."""
        while last_step(self.run) < step:
            if self.process.poll() is not None or time.perf_counter() - self.began > PATIENCE_SECONDS:
                raise SystemExit(f"step {step} was not reached:\n{self.log.read_text()}")
            time.sleep(0.005)
        return time.perf_counter() - self.began

    def processor_seconds(self) -> float:
        """Read the processor seconds of the command so far, on a busy machine the steadier figure."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        """Stop the run by SIGTERM, and wait until it has saved its state."""
        self.process.send_signal(signal.SIGTERM)
        if self.process.wait(PATIENCE_SECONDS) != 75:
            raise SystemExit(f"the run did not stop as it should:\n{self.log.read_text()}")


def measure(scratch: Path, repeats: int) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Measure the seconds of each start; and processor seconds, the step of the restarts, the bytes of their full state."""
    stopped = scratch / "stopped"
    with Run(stopped, scratch) as run:
        run.reach(STEPS_BEFORE)
        run.stop()
    step = last_step(stopped)
    latest = stopped / "full_state" / (stopped / "full_state" / "latest").read_text().strip()
    found: dict[str, Any] = {
        "stopped_after_step": step,
        "full_state_bytes": sum(file.stat().st_size for file in latest.iterdir()),
    }
    seconds: dict[str, list[float]] = {"fresh": [], "restart": []}
    busy: dict[str, list[float]] = {"fresh": [], "restart": []}
    # The first start of each kind, left out, brings the files into memory, as they are where a run was just stopped.
    for turn in range(repeats + 1):
        for name in sorted(seconds, reverse=bool(turn % 2)):
            where = scratch / f"{name}-{turn}"
            if name == "restart":
                shutil.copytree(stopped, where, copy_function=link_or_copy)
            with Run(where, scratch) as run:
                seconds[name].append(run.reach(1 if name == "fresh" else step + 1))
                busy[name].append(run.processor_seconds())
            if ("resuming after step" in run.log.read_text()) != (name == "restart"):
                raise SystemExit(f"this is no {name} run:\n{run.log.read_text()}")
            note(f"{name:8} {seconds[name][-1]:6.2f} s")
            shutil.rmtree(where)
    found["processor_seconds"] = {name: statistics.median(taken[1:]) for name, taken in busy.items()}
    return {name: taken[1:] for name, taken in seconds.items()}, found


def main() -> None:
    """Measure and print the line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="starts of each kind")
    parser.add_argument("--toy", action="store_true", help="a tiny model, started once: seconds, and no proof")
    options = parser.parse_args()
    repeats = 1 if options.toy else options.repeats
    at = machine()
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        parameters = write_model(scratch / "model", TOY if options.toy else SHAPE)
        write_rows(scratch / "rows.jsonl")
        seconds, found = measure(scratch, repeats)
    busy = found.pop("processor_seconds")
    median = {name: statistics.median(taken) for name, taken in seconds.items()}
    emit(
        "dist_restart",
        "time from starting the command to the first step of a new run, over that to the next step of a stopped one",
        median["fresh"] / median["restart"],
        0.8,
        toy=options.toy,
        at=at,
        seconds={name: round(value, 3) for name, value in median.items()},
        processor_seconds=busy,
        cpu_time_ratio=round(busy["fresh"] / busy["restart"], 4),
        each={name: [round(value, 3) for value in taken] for name, taken in seconds.items()},
        sizes={"parameters": parameters, "rows": ROWS, "tokens_per_step": 2 * TOKENS, "repeats": repeats, **found},
    )


if __name__ == "__main__":
    main()
