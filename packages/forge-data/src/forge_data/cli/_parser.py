"""Command line (`forge-data`, `python -m forge_data`, `forge data`) → calls and exit status.

Exit status: 0 done; 1 the lint found something that stops a training; 2 bad input, with one line that says what and where; 130
interrupted, 143 terminated.
"""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from forge_data._errors import ForgeDataError, printable
from forge_data._options import LEARNED_ENDS, ON_BAD_PAIR, ON_BAD_ROW, ON_OVERFLOW, TURNS
from forge_data._settings import MAX_BAD_ROWS
from forge_data._uncollected import process_of_one_command
from forge_data.cli import _commands


class _Parser(argparse.ArgumentParser):
    """Parser that reports an error in one line; argparse would print its usage first."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {printable(message)}; {self.prog} --help lists what there is\n")


def main(argv: Sequence[str] | None = None, prog: str = "forge-data") -> int:
    """Run the command line and return its exit status; bad input is one line on stderr."""
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        return run(argv, prog, own_process=argv is None)
    except _Terminated:
        sys.stderr.write(f"{prog}: terminated.\n")
        return 143
    except KeyboardInterrupt:
        sys.stderr.write(f"{prog}: interrupted.\n")
        return 130
    except Exception as error:
        status = getattr(error, "exit_status", None)
        if status is None:
            raise
        sys.stderr.write(f"{prog}: {error}\n")
        return int(status)
    finally:
        signal.signal(signal.SIGTERM, before)


class _Terminated(KeyboardInterrupt):
    """SIGTERM, by which schedulers stop a job; it takes the same clean-up as Ctrl-C."""


def _terminate(*_: object) -> None:
    raise _Terminated("SIGTERM")


def run(argv: Sequence[str] | None = None, prog: str = "forge-data", *, own_process: bool = False) -> int:
    """Run the command line and return its exit status; errors pass through to the caller.

    Args:
        argv: words; those of this process by default.
        prog: name of the command in help and errors.
        own_process: whether this process runs the command alone and ends with it.

    Raises:
        ForgeDataError: bad input, with flags in place of settings in its message.
    """
    if own_process:
        process_of_one_command()
    try:
        words = _parsed(argv, prog)
    except SystemExit as done:
        return int(done.code or 0)
    try:
        status = words.verb(words)
        sys.stdout.flush()
    except ForgeDataError as error:
        error.args = (_commands.with_flags(str(error)), *error.args[1:])
        raise
    except BrokenPipeError:
        # The reader (head, less) has closed the pipe. What is still buffered goes nowhere, instead of an error at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return int(status)


def _parsed(argv: Sequence[str] | None, prog: str) -> argparse.Namespace:
    """Parse words; samples may stand behind options, where argparse by itself takes none."""
    words, left = _parser(prog).parse_known_args(argv)
    left = [word for word in left if word != "--"]
    if left and hasattr(words, "samples") and all(word[:1] != "-" or word[1:2].isdigit() for word in left):
        words.samples += left
    elif left:
        words.parser.error(f"unrecognized arguments: {' '.join(left)}")
    return words


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=prog,
        description="Records → tokens and labels that can be looked at: prepare, merge, show, lint and count them.",
        allow_abbrev=False,
    )
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    _add_prepare(verbs)
    _add_merge(verbs)
    _add_show(verbs)
    _add_lint(verbs)
    _add_stats(verbs)
    return parser


def _verb(verbs: Any, name: str, summary: str, example: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = verbs.add_parser(name, help=summary, description=summary, allow_abbrev=False)
    parser.epilog = f"Example: {parser.prog} {example}"
    parser.set_defaults(verb=getattr(_commands, name), parser=parser)
    return parser


def _add_prepare(verbs: Any) -> None:
    parser = _verb(
        verbs,
        "prepare",
        "Turn files of rows into a token store.",
        "train.jsonl --tokenizer org/model --store-dir store",
    )
    _add_data(parser)
    parser.add_argument("--tokenizer", required=True, help="a directory, or a name on the Hub")
    parser.add_argument("--store-dir", required=True, metavar="DIR", help="directory of the store")
    _add_options(parser)
    parser.add_argument(
        "--num-proc", type=int, metavar="N", help="processes that tokenise; chosen by the size of DATA by default"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed that chooses held-out rows (default: 0)")
    parser.add_argument("--shard", metavar="K/N", help="part K of N equal parts of all rows, which merge joins")
    _add_prompts(parser)
    parser.add_argument(
        "--max-prompt-len", type=int, metavar="TOKENS", help="longest prompt, with --prompts; no limit by default"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress line")


def _add_merge(verbs: Any) -> None:
    parser = _verb(
        verbs,
        "merge",
        "Join the parts that prepare --shard made into the store of all rows.",
        "store parts/1 parts/2 parts/3",
    )
    parser.add_argument("store_dir", metavar="OUT", help="directory of the store")
    parser.add_argument("parts", nargs="+", metavar="PART", help="directory of a part; all of them, in any order")


def _add_show(verbs: Any) -> None:
    parser = _verb(
        verbs,
        "show",
        "Show what is trained on: tokens, which are learned, their roles, and rows that were left out.",
        "store 0 10:20 train.jsonl:417 --html page.html",
    )
    parser.add_argument(
        "store", metavar="STORE", help="a token store, the directory of a run, or rows that are not prepared yet"
    )
    parser.add_argument(
        "samples",
        nargs="*",
        default=[],  # else argparse says that it is required
        metavar="SAMPLE",
        help="a number, a range such as 10:20 (0: is all), or a row such as train.jsonl:417",
    )
    parser.add_argument("--finding", metavar="RULE", help="samples on whose rows the lint found this")
    parser.add_argument("--html", metavar="FILE", help="write one HTML page that needs no network, instead of text")
    parser.add_argument("--tokenizer", help="of rows that are not prepared yet: a directory, or a name on the Hub")
    _add_prompts(parser)
    _add_options(parser)


def _add_lint(verbs: Any) -> None:
    parser = _verb(
        verbs,
        "lint",
        "Find what would train a model wrongly, by file, row and field. Exits with 1 if anything should stop a training.",
        "train.jsonl --tokenizer org/model --eval-data held_out.jsonl",
    )
    _add_data(parser, also=", or a token store")
    parser.add_argument("--tokenizer", help="a directory, or a name on the Hub; a store has its own")
    parser.add_argument("--eval-data", metavar="DATA", help="held-out rows; those that are also trained on are found")
    _add_options(parser)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print the whole report as JSON")
    form.add_argument("--quiet", action="store_true", help="print how many findings of each rule there are, and no rows")


def _add_stats(verbs: Any) -> None:
    parser = _verb(verbs, "stats", "Count a token store: samples, tokens, what is learned, by role and source.", "store")
    parser.add_argument("store", metavar="STORE", help="a token store, or the directory of a run")
    parser.add_argument("--json", action="store_true", help="print the same numbers as JSON")


def _add_data(parser: argparse.ArgumentParser, also: str = "") -> None:
    parser.add_argument(
        "data_path",
        nargs="+",
        metavar="DATA",
        help="a file, glob, directory, URL or name:split; several are one data set, in which each may have a share as "
        f'DATA=WEIGHT, or settings of its own as \'DATA={{"data_format": "alpaca"}}\'{also}',
    )


def _add_prompts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompts", action="store_true", help="the rows are prompts, which are answered while training")


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--format", default="auto", help="format of the rows (default: detected from their fields)")
    parser.add_argument(
        "--train-on",
        default="assistant",
        metavar="{assistant,last,completion,all,ROLES}",
        help="what is learned, or whose messages, such as assistant,user (default: assistant)",
    )
    parser.add_argument(
        "--turns",
        default="auto",
        choices=TURNS,
        help="form in which turns are learned: as the model will be asked for them, or as the whole conversation has them "
        "(default: auto)",
    )
    parser.add_argument("--chat-template", metavar="FILE|NAME", help="chat template in place of the tokenizer's own")
    parser.add_argument(
        "--chat-template-kwargs",
        nargs="+",
        metavar="NAME=VALUE",
        help="arguments of the chat template, such as enable_thinking=false; a row's own win",
    )
    parser.add_argument(
        "--system-prompt",
        metavar="TEXT|file:PATH",
        help="system message of conversations that have none, as their first message",
    )
    parser.add_argument("--turn-end", metavar="TOKEN", help="token that ends a turn for which the template writes no end")
    parser.add_argument(
        "--train-on-turn-end",
        default="turn",
        choices=LEARNED_ENDS,
        help="which ends of turns are learned: of each learned turn, of every message, of the last learned turn, or none "
        "(default: turn)",
    )
    parser.add_argument("--max-seq-len", type=int, metavar="TOKENS", help="longest sample; no limit by default")
    parser.add_argument(
        "--on-overflow", default="drop", choices=ON_OVERFLOW, help="what becomes of a longer row (default: drop)"
    )
    parser.add_argument(
        "--on-bad-pair",
        default="error",
        choices=ON_BAD_PAIR,
        help="what becomes of a pair that prefers nothing (default: error)",
    )
    parser.add_argument(
        "--on-bad-row", default="error", choices=ON_BAD_ROW, help="what becomes of a row that is refused (default: error)"
    )
    parser.add_argument(
        "--max-bad-rows",
        type=float,
        default=MAX_BAD_ROWS,
        metavar="SHARE",
        help=f"share of the rows that --on-bad-row skip may leave out (default: {MAX_BAD_ROWS})",
    )
    parser.add_argument(
        "--max-samples",
        type=int,
        metavar="ROWS",
        help="read only the first so many rows of each file or data set that is named",
    )
    parser.add_argument("--media", action="store_true", help="the rows may have images, as forge sft, dpo and grpo train them")
    parser.add_argument("--preprocess", metavar="MODULE:FUNCTION", help="your own function, which gets each row first")
    parser.add_argument(
        "--rename-columns",
        nargs="+",
        metavar="COLUMN=NAME",
        help="columns that a format reads under another name, such as question=instruction answer=output",
    )
