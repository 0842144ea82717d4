"""A tokenizer's directory and JSONL files of a given size, for the benchmarks of `prepare` that compare it with a budget."""

import itertools
import json
import random
from pathlib import Path

from _chats import MODULES, TOY_MODULES, conversations
from _preparation import CHATML, make_rows, write_tokenizer


def tokenizer_directory(folder: Path, *, toy: bool) -> Path:
    """Write the files of a tokenizer alone, as `save_pretrained` does."""
    directory = write_tokenizer(
        folder / "tokenizer", make_rows(20 if toy else 1000, toy=toy), CHATML, vocabulary=1000 if toy else 16_384
    )
    (directory / "config.json").unlink()
    return directory


def file_of_bytes(path: Path, size: int, *, toy: bool) -> Path:
    """Write conversations of one to three questions and answers, all different, until the file has `size` bytes."""
    lines = [json.dumps(row, ensure_ascii=False) for row in make_rows(20 if toy else 3000, toy=toy)]
    written = 0
    with path.open("w", encoding="utf-8") as file:
        for number, line in enumerate(itertools.cycle(lines)):
            if written >= size:
                return path
            # A number before the first question: a duplicate is a lint finding, and findings cost time.
            written += file.write(line.replace('"content": "', f'"content": "{number}. ', 1) + "\n")
    return path


def file_of_rows(path: Path, count: int, *, toy: bool) -> Path:
    """Write `count` short questions and answers."""
    pairs = [
        (turns[0]["content"], turns[1]["content"][:120]) for turns in conversations("answers", TOY_MODULES if toy else MODULES)
    ]
    draw = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            question, answer = draw.choice(pairs)
            turns = [{"role": "user", "content": f"{number}. {question}"}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": turns}, ensure_ascii=False) + "\n")
    return path
