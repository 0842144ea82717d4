"""Comparison of forge's packages with TRL's trainer: both train in turn on the same rows; figures of both sides."""

import argparse
import importlib.util
import statistics
from pathlib import Path
from typing import Any, NamedTuple

from _lockstep import agree, race
from _models import SHAPES


class Race(NamedTuple):
    """Figures of a comparison."""

    sides: dict[str, dict[str, Any]]
    """Medians over the measured steps of each side, and its memory."""
    first_loss: dict[str, float]
    threads: int

    def figures(self) -> dict[str, Any]:
        """Return the figures that each line of a comparison with TRL has."""
        forge, trl = self.sides["forge"], self.sides["trl"]
        return {
            "cpu_time_ratio": round(trl["cpu_seconds_per_step"] / forge["cpu_seconds_per_step"], 3),
            "memory_ratio": round(trl["peak_rss_bytes"] / forge["peak_rss_bytes"], 3),
            "less_memory": forge["peak_rss_bytes"] < trl["peak_rss_bytes"],
            "sides": self.sides,
            "first_loss": self.first_loss,
        }

    @property
    def ratio(self) -> float:
        """Tokens per second of forge over those of TRL."""
        return self.sides["forge"]["tokens_per_second"] / self.sides["trl"]["tokens_per_second"]


def require_trl() -> None:
    """End the benchmark where TRL is not installed."""
    if importlib.util.find_spec("trl") is None:
        raise SystemExit("trl is not installed here, and it is one side of this comparison: hatch run bench:sft")


def race_parser(description: str | None, *, steps: int) -> argparse.ArgumentParser:
    """Make a parser with the options of every comparison; `steps` are measured by default."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=steps, help="measured steps")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them that are not counted")
    parser.add_argument("--threads", type=int, default=None, help="OpenMP threads of each side (default: torch's own choice)")
    parser.add_argument("--toy", action="store_true", help="a size that runs in seconds and proves nothing")
    return parser


def add_chats(parser: argparse.ArgumentParser) -> None:
    """Add the options of what is trained: `--model`, `--adapter` and `--chats`."""
    parser.add_argument(
        "--model", default="tiny", help=f"a model directory, or a shape made from a config: {', '.join(SHAPES)}"
    )
    parser.add_argument("--adapter", choices=["none", "lora"], default="none")
    parser.add_argument("--chats", choices=["answers", "code", "both"], default="both", help="what the chats are made of")


def race_on_a_cpu(
    job: dict[str, Any],
    folder: Path,
    options: argparse.Namespace,
    *,
    tolerance: float = 1e-4,
    objective: str = "",
    trl_attention: str = "sdpa",
) -> Race:
    """Train both sides, fp32 on a CPU, a step of each in turn; end where first losses differ by more than `tolerance`.

    `options` are those of `race_parser`. `objective` is the ending of the sides' files (`_side_forge_dpo.py`), empty for
    supervised fine-tuning.
    """
    job = {**job, "trl_attention": trl_attention, "attention": "auto", "device": "cpu", "dtype": "float32"}
    names = [f"forge{objective}", f"trl{objective}"]
    found, ends = race(job, folder, names, options.warmup + options.steps, threads=options.threads)
    figures = {side.removesuffix(objective): done for side, done in found.items()}
    first = agree(figures, tolerance=tolerance)
    sides = {side: _summary(done[options.warmup :], ends[f"{side}{objective}"]) for side, done in figures.items()}
    return Race(sides, first, ends[f"forge{objective}"]["threads"])


def _summary(figures: list[dict[str, Any]], end: dict[str, Any]) -> dict[str, Any]:
    return {
        "tokens_per_second": round(statistics.median(f["tokens"] / f["seconds"] for f in figures), 2),
        "seconds_per_step": round(statistics.median(f["seconds"] for f in figures), 4),
        "cpu_seconds_per_step": round(statistics.median(f["cpu_seconds"] for f in figures), 4),
        "peak_rss_bytes": end["peak_rss_bytes"],
        "rss_before_steps_bytes": end["rss_before_steps_bytes"],
    }
