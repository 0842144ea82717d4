"""Preparation benchmarks: conversations and a tokenizer's directory made from docstrings, prepared and timed in turn.

Both sides get the same JSONL file and the same directory, and must write the same ids and labels: `agree` ends the benchmark
if one token differs. Every run gets a file of its own, so that no side finds the cache of an earlier run.
"""

import contextlib
import gc
import io
import json
import os
import random
import resource
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

# Before datasets is imported: no progress bar, no network.
os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_DISABLE_PROGRESS_BARS="1", HF_HUB_DISABLE_TELEMETRY="1")

from _chats import MODULES, TOY_MODULES, conversations
from _report import note

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}"
    "{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The same text, with the marks that TRL's `assistant_only_loss` needs."""

Rows = list[dict[str, Any]]
Prepare = Callable[[Path, Path, Path], None]
"""Function of the JSONL file, the tokenizer's directory and an empty folder to write into."""


def make_rows(count: int, *, toy: bool) -> Rows:
    """Make `count` conversations of one to three questions and answers, the same for one Python version."""
    pairs = list(conversations("both", TOY_MODULES if toy else MODULES))
    draw, rows = random.Random(0), []
    while len(rows) < count:
        turns = [turn for pair in draw.choices(pairs, k=draw.randint(1, 3)) for turn in pair]
        # Stripped, because instructlab wraps contents in tokens, where outer blanks merge otherwise than in the native text.
        rows.append({"messages": [{**turn, "content": turn["content"].strip()} for turn in turns]})
    return rows


def write_tokenizer(folder: Path, rows: Rows, template: str, *, vocabulary: int) -> Path:
    """Train a byte-level BPE tokenizer on the rows; save it with a chat template and the config.json that instructlab needs."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    backend.decoder = decoders.ByteLevel()
    texts = (turn["content"] for row in rows[:1000] for turn in row["messages"])
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False)
    )
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in ("<|im_start|>", "<|im_end|>")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|im_end|>")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    return folder


def forge(data: Path, tokenizer: Path, folder: Path) -> None:
    """Prepare with forge's defaults, which for so little data are this process and the tokenizer's threads."""
    import forge_data

    forge_data.prepare(data, str(tokenizer), folder / "store", progress=False)


def forge_in_one(data: Path, tokenizer: Path, folder: Path) -> None:
    """Prepare with forge in one process of one thread."""
    import forge_data

    forge_data.prepare(data, str(tokenizer), folder / "store", num_proc=1, progress=False)


def forge_wrote(folder: Path) -> Rows:
    """Read the rows that forge wrote."""
    import forge_data

    store = forge_data.TokenStore.open(folder / "store")
    return [{"input_ids": store[i].input_ids.tolist(), "labels": store[i].labels.tolist()} for i in range(len(store))]


class Taken(NamedTuple):
    """Time of one run."""

    seconds: float
    cpu: float
    """Seconds of processor time, of all threads and of child processes that have ended."""


def timed(run: Callable[[], object]) -> Taken:
    """Time a call, whose output is discarded, so that the benchmark prints one line."""
    with contextlib.redirect_stdout(io.StringIO()):
        start, before = time.perf_counter(), _cpu_seconds()
        run()
        return Taken(time.perf_counter() - start, _cpu_seconds() - before)


def _cpu_seconds() -> float:
    used = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def _prepared(run: Prepare, rows: Path, tokenizer: Path, folder: Path) -> Taken:
    """Time one preparation of a new copy of the rows."""
    folder.mkdir(parents=True)
    data = folder / "train.jsonl"
    shutil.copyfile(rows, data)
    # A full garbage collection takes 0.25 s here, and comes once enough objects are new: each run starts after one.
    gc.collect()
    return timed(lambda: run(data, tokenizer, folder))


def take_turns(
    sides: dict[str, Prepare], rows: Path, tokenizer: Path, scratch: Path, *, repeats: int
) -> dict[str, list[Taken]]:
    """Time every run of every side: once to warm up, then `repeats` times A B C, C B A, A B C, ..."""
    every: dict[str, list[Taken]] = {side: [] for side in sides}
    for turn in range(-1, repeats):
        for side in sorted(sides, reverse=turn % 2 == 1):
            taken = _prepared(sides[side], rows, tokenizer, scratch / f"{side}-{turn}")
            times = f"{taken.seconds:.2f} s, {taken.cpu:.2f} s of processor time"
            note(f"{side:16} {'warm-up' if turn < 0 else f'run {turn + 1}'}: {times}")
            if turn >= 0:
                every[side].append(taken)
    return every


def agree(ours: Rows, theirs: Rows, named: str) -> dict[str, int]:
    """Count the rows, tokens and learned tokens of both sides; end the benchmark where one differs."""
    if len(ours) != len(theirs):
        raise SystemExit(f"{len(ours)} rows here and {len(theirs)} of {named}: they do not prepare the same")
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        for name in ("input_ids", "labels"):
            if one[name] != list(other[name]):
                raise SystemExit(f"row {number}: {name} differ from those of {named}: they do not prepare the same")
    return {
        "rows": len(ours),
        "tokens": sum(len(row["input_ids"]) for row in ours),
        "learned_tokens": sum(label != -100 for row in ours for label in row["labels"]),
    }


def read_rows(file: Path) -> Iterator[dict[str, Any]]:
    """Read the rows of a JSONL file."""
    with file.open(encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def summary(every: list[Taken], tokens: int) -> dict[str, Any]:
    """Summarise the runs of one side."""
    median = statistics.median(taken.seconds for taken in every)
    return {
        "seconds": round(median, 4),
        "cpu_seconds": round(statistics.median(taken.cpu for taken in every), 4),
        "tokens_per_second": round(tokens / median, 1),
        "all_seconds": [round(taken.seconds, 3) for taken in every],
    }


def ratios(measured: dict[str, dict[str, Any]], peer: str) -> dict[str, float]:
    """Return the peer's seconds over ours in one thread, and both ratios in processor time."""
    theirs = measured[peer]
    return {
        "ratio_one_thread": round(theirs["seconds"] / measured["forge_one_thread"]["seconds"], 4),
        "ratio_cpu_default": round(theirs["cpu_seconds"] / measured["forge"]["cpu_seconds"], 4),
        "ratio_cpu_one_thread": round(theirs["cpu_seconds"] / measured["forge_one_thread"]["cpu_seconds"], 4),
    }
