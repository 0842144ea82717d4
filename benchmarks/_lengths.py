"""Steps of realistic sample lengths, drawn by a seed, and mini-trainer's packer to divide them.

mini-trainer's packer is loaded from its file alone: its package imports torch and transformers, which a packer does not need.
"""

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

RANKS = 8


class Step(NamedTuple):
    """Step of a run: int64 lengths, and the budget of a micro-batch."""

    lengths: np.ndarray
    max_tokens: int


def _lognormal(rng: np.random.Generator, median: int, spread: float, count: int, longest: int) -> np.ndarray:
    return np.clip(rng.lognormal(np.log(median), spread, count).astype(np.int64), 8, longest)


FAMILIES: dict[str, Callable[[np.random.Generator], Step]] = {
    "short chats": lambda rng: Step(_lognormal(rng, 650, 0.8, 128, 8192), 8192),
    "longer chats": lambda rng: Step(_lognormal(rng, 1500, 0.8, 128, 8192), 8192),
    "long reasoning": lambda rng: Step(_lognormal(rng, 5000, 0.9, 128, 25_000), 25_000),
    "long context": lambda rng: Step(_lognormal(rng, 8000, 1.3, 64, 65_536), 65_536),
    "uniform": lambda rng: Step(rng.integers(1, 8193, 128), 8192),
    "51 and 49 percent": lambda rng: Step(rng.permutation(np.repeat([4177, 4014], 64)), 8192),
    "a giant": lambda rng: Step(rng.permutation(np.append(_lognormal(rng, 400, 0.6, 127, 2000), 8000)), 8192),
}


def trials(family: str, count: int) -> Iterator[Step]:
    """Yield `count` steps, the same on every machine and in every run."""
    for seed in range(count):
        yield FAMILIES[family](np.random.Generator(np.random.Philox(seed)))


def mini_trainer() -> Any:
    """Load `batch_lengths_to_minibatches_lpt(lengths, max_tokens, ranks, rank)`; None where mini-trainer is not installed."""
    package = importlib.util.find_spec("mini_trainer")
    if package is None or not package.submodule_search_locations:
        return None
    spec = importlib.util.spec_from_file_location(
        "mini_trainers_packer", Path(package.submodule_search_locations[0]) / "batch_packer.py"
    )
    if spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.batch_lengths_to_minibatches_lpt


def mini_trainers_division(pack: Any, step: Step, ranks: int) -> list[list[np.ndarray]]:
    """Divide a step by mini-trainer's packer: result[rank][micro-batch], where a dummy micro-batch is empty."""
    lengths = step.lengths.tolist()
    division = [pack(lengths, step.max_tokens, ranks, rank) for rank in range(ranks)]
    return [[np.array([i for i in m if i >= 0], dtype=np.int64) for m in rank] for rank in division]


def makespan(division: list[list[np.ndarray]], costs: np.ndarray) -> float:
    """Sum the cost of the costliest rank over the passes."""
    return sum(max(costs[m].sum() for m in row) for row in zip(*division, strict=True))
