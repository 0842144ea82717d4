"""Claim: the word cache makes `forge_data.prepare` at least 1.3 times as fast; if it does not, it is deleted.

The cache looks up the tokens of words that occurred before. It is switched off in every second run, in this process, on the
rows of the other preparation benchmarks, with default settings and in one thread (`num_proc=1`). All stores must be the same,
file by file. A ratio is the seconds without the cache over those with it, the median over pairs measured side by side. The
line's ratio is the lesser of the two; the processor time of each is beside it. `--distinct` takes every question and answer
once, so that no text occurs twice; `--template FILE` takes another chat template.

    python benchmarks/data_word_cache.py --repeats 9
"""

import argparse
import json
import logging
import statistics
import tempfile
import warnings
from pathlib import Path
from unittest import mock

import _preparation as preparation
from _chats import MODULES, TOY_MODULES, conversations
from _report import emit, machine, note

import forge_data
from forge_data.tokenizing import _batch_tokenizer

TARGET = 1.3


def without_word_cache(run: preparation.Prepare) -> preparation.Prepare:
    """Return a preparation in which the tokenizer itself tokenises every text."""

    def switched(data: Path, tokenizer: Path, folder: Path) -> None:
        with mock.patch.object(_batch_tokenizer, "_is_plain", return_value=False):
            run(data, tokenizer, folder)

    return switched


def main() -> None:
    """Measure and print the line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=3000, help="conversations")
    parser.add_argument("--repeats", type=int, default=9, help="measured runs of each side")
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--distinct", action="store_true", help="each question and answer once")
    parser.add_argument("--template", type=Path, help="a chat template; by default ChatML")
    parser.add_argument("--toy", action="store_true", help="a size that runs in seconds and proves nothing")
    options = parser.parse_args()
    if options.toy:
        options.rows, options.repeats, options.vocabulary = 40, 1, 500
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    at = machine()
    rows = preparation.make_rows(options.rows, toy=options.toy)
    if options.distinct:
        pairs = conversations("both", TOY_MODULES if options.toy else MODULES)
        rows = [{"messages": [{**turn, "content": turn["content"].strip()} for turn in pair]} for pair in pairs]
    template = options.template.read_text(encoding="utf-8") if options.template else preparation.CHATML
    settings = {"default": preparation.forge, "one_thread": preparation.forge_in_one}
    sides = {
        f"{name}_{state}": prepare
        for name, run in settings.items()
        for state, prepare in (("on", run), ("off", without_word_cache(run)))
    }
    with tempfile.TemporaryDirectory(prefix="forge-bench-") as scratch:
        folder = Path(scratch)
        tokenizer = preparation.write_tokenizer(folder / "tokenizer", rows, template, vocabulary=options.vocabulary)
        file = folder / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        every = preparation.take_turns(sides, file, tokenizer, folder, repeats=options.repeats)
        stores = {side: forge_data.TokenStore.open(folder / f"{side}-0" / "store") for side in sides}
        one = stores["default_on"]
        if any(store.sha256 != one.sha256 for store in stores.values()):
            raise SystemExit("the stores differ: the cache changes what is prepared")
        tokens = int(one.lengths.sum())
    ratios: dict[str, dict[str, float]] = {}
    for name in settings:
        pairs = [*zip(every[f"{name}_off"], every[f"{name}_on"], strict=True)]
        ratios[name] = {
            "ratio": round(statistics.median(off.seconds / on.seconds for off, on in pairs), 3),
            "cpu_time_ratio": round(statistics.median(off.cpu / on.cpu for off, on in pairs), 3),
        }
        note(f"{name}: {ratios[name]}")
    emit(
        "data_word_cache",
        "seconds of forge_data.prepare without the word cache over those with it, the lesser of defaults and one thread",
        min(each["ratio"] for each in ratios.values()),
        TARGET,
        toy=options.toy,
        at=at,
        ratios=ratios,
        sides={side: preparation.summary(taken, tokens) for side, taken in every.items()},
        sizes={
            "rows": len(rows),
            "tokens": tokens,
            "template": options.template.name if options.template else "ChatML",
            "distinct": options.distinct,
            "vocabulary": options.vocabulary,
            "repeats": options.repeats,
        },
    )


if __name__ == "__main__":
    main()
