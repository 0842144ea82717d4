"""Claim: `forge_data.tokenize` takes at most 0.1 ms for a short row, once it was called with the tokenizer.

A row of a question and an answer is tokenised over and over, in turn by `tokenize`, which makes ids, labels and roles, and by
transformers' `apply_chat_template`, which makes the ids alone; both must give the same ids. A first call, which compiles the
template, is timed apart. The ratio is the budget over the median.

    python benchmarks/data_tokenize.py --repeats 11
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from _data_files import tokenizer_directory
from _report import emit, machine, note

import forge_data

BUDGET_MILLISECONDS = 0.1
ROW = {
    "messages": [
        {"role": "user", "content": "What does `textwrap.dedent` do?"},
        {"role": "assistant", "content": "It removes the common leading white space of all lines."},
    ]
}


def milliseconds(call: Callable[[], object], calls: int) -> float:
    """Measure the mean milliseconds of a call."""
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return 1000 * (time.perf_counter() - start) / calls


def main() -> None:
    """Measure and print the line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=11, help="turns of each")
    parser.add_argument("--calls", type=int, default=500, help="calls in a turn")
    parser.add_argument("--toy", action="store_true", help="a few calls on a small vocabulary: seconds, and no proof")
    options = parser.parse_args()
    repeats, calls = (2, 20) if options.toy else (options.repeats, options.calls)
    at = machine()
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer = forge_data.load_tokenizer(tokenizer_directory(Path(scratch), toy=options.toy))
    sides: dict[str, Callable[[], object]] = {
        "tokenize": lambda: forge_data.tokenize(ROW, tokenizer),
        "apply_chat_template": lambda: tokenizer.apply_chat_template(ROW["messages"]),
    }
    first = milliseconds(sides["tokenize"], 1)
    ours, theirs = forge_data.tokenize(ROW, tokenizer), tokenizer.apply_chat_template(ROW["messages"])
    assert ours.input_ids.tolist() == theirs["input_ids"]
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, call in sides.items():
            taken[name].append(milliseconds(call, calls))
    median = {name: statistics.median(times) for name, times in taken.items()}
    note(f"tokenize {median['tokenize']:.3f} ms, apply_chat_template {median['apply_chat_template']:.3f} ms")
    emit(
        "data_tokenize",
        f"budget over time: a short row tokenised with labels in {BUDGET_MILLISECONDS:g} ms",
        BUDGET_MILLISECONDS / median["tokenize"],
        1.0,
        toy=options.toy,
        at=at,
        tokenize_milliseconds=round(median["tokenize"], 4),
        apply_chat_template_milliseconds=round(median["apply_chat_template"], 4),
        over_apply_chat_template=round(median["tokenize"] / median["apply_chat_template"], 2),
        first_call_milliseconds=round(first, 2),
        sizes={"tokens": len(ours), "calls": calls, "repeats": repeats},
    )


if __name__ == "__main__":
    main()
