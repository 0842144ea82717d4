"""Table of the strategies: one row each, read by settings and error messages.

A new strategy is one file with its class, and one row here; outside this package, an entry point of the group `GROUP`.
"""

import difflib
import importlib
import importlib.util
import warnings
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal

import attrs

from forge_dist._errors import StrategyError

GROUP = "forge.strategies"
"""Entry-point group: the name is what `strategy=` calls it, the value a `StrategySpec`."""


@attrs.frozen(kw_only=True)
class StrategySpec:
    """A strategy's row: its class, the settings that it takes, and what it needs."""

    strategy: str
    """Subclass of `forge_dist.Strategy`, as "module:Class"; imported when it is chosen."""

    about: str
    """What each rank holds, in a few words for help texts."""

    options: tuple[str, ...] = ()
    """Fields of StrategySettings that have an effect, beside `activation_checkpointing`; the others are refused."""

    optimizer_gets: Literal["tensors", "shards", "flat"] = "tensors"
    """Parameters that the optimizer moves: whole tensors, shards (DTensors), or flat pieces of many parameters."""

    on_one_rank: bool = False
    """Whether it does anything on one rank; otherwise `single` takes its place there."""

    requires: tuple[str, ...] = ()
    """Import names of packages that must be installed."""

    install: str = ""
    """Requirement for pip that installs them."""

    def load(self, name: str) -> Any:
        """Import the strategy's class, a subclass of `forge_dist.Strategy`.

        Raises:
            StrategyError: a required package is not installed, or the class cannot be imported.
        """
        missing = [package for package in self.requires if importlib.util.find_spec(package) is None]
        if missing:
            raise StrategyError(
                f"strategy={name} needs {' and '.join(missing)}: `pip install '{self.install}'`, or use strategy=fsdp2"
            )
        module, _, attribute = self.strategy.partition(":")
        try:
            return getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise StrategyError(f"strategy={name}: {self.strategy} could not be loaded: {error}") from error


_FSDP_OPTIONS = ("tp_size", "cp_size", "ep_size", "gather_dtype", "reshard_after_forward", "cpu_offload")
_ZERO = "forge_dist.strategies.zero._strategy:ZeroStrategy"
_DEEPSPEED = "forge-dist[deepspeed]"

STRATEGIES = {
    "single": StrategySpec(
        strategy="forge_dist.strategies._torch:Single",
        about="one process",
        on_one_rank=True,
    ),
    "ddp": StrategySpec(
        strategy="forge_dist.strategies._ddp:DDP",
        about="whole copies",
        options=("cp_size",),
    ),
    "fsdp2": StrategySpec(
        strategy="forge_dist.strategies.fsdp._strategy:FSDP",
        about="shards over all ranks",
        options=_FSDP_OPTIONS,
        optimizer_gets="shards",
    ),
    "hsdp": StrategySpec(
        strategy="forge_dist.strategies.fsdp._strategy:FSDP",
        about="shards within groups of ranks",
        options=("shard_size", *_FSDP_OPTIONS),
        optimizer_gets="shards",
    ),
    "zero1": StrategySpec(
        strategy=_ZERO,
        about="DeepSpeed's ZeRO: shards of the optimizer's state",
        options=("cpu_offload",),
        optimizer_gets="flat",
        on_one_rank=True,
        requires=("deepspeed",),
        install=_DEEPSPEED,
    ),
    "zero2": StrategySpec(
        strategy=_ZERO,
        about="the same, of the gradients too",
        options=("cpu_offload",),
        optimizer_gets="flat",
        on_one_rank=True,
        requires=("deepspeed",),
        install=_DEEPSPEED,
    ),
    "zero3": StrategySpec(
        strategy=_ZERO,
        about="the same, of the weights too",
        options=("cpu_offload",),
        optimizer_gets="flat",
        on_one_rank=True,
        # transformers reads a model in ZeRO-3's way only where accelerate is installed too.
        requires=("deepspeed", "accelerate"),
        install=_DEEPSPEED,
    ),
}
"""Name → row of the built-in strategies."""

AUTO = "auto"
"""Setting that leaves the choice to `make_strategy`, which may take single, ddp or fsdp2."""

AUTO_OPTIONS = STRATEGIES["fsdp2"].options
"""Options that "auto" takes: they make it choose fsdp2."""


def strategy_names() -> list[str]:
    """Return the names of all strategies: the built-in ones, then those of entry points, sorted."""
    return [*STRATEGIES, *sorted(_entry_points())]


def spec_of(name: str) -> StrategySpec:
    """Return the row of a strategy.

    Raises:
        StrategyError: there is none of this name, or its entry point could not be loaded.
    """
    if name in STRATEGIES:
        return STRATEGIES[name]
    entry = _entry_points().get(name)
    if entry is None:
        known = (AUTO, *strategy_names())
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise StrategyError(f"strategy must be one of {', '.join(known)}; got {name!r}{hint}")
    try:
        found = entry.load()
    except (ImportError, AttributeError) as error:
        raise StrategyError(f"strategy={name!r}: {entry.value} could not be loaded: {error}") from error
    if not isinstance(found, StrategySpec):
        raise StrategyError(f"strategy={name!r}: {entry.value} is no forge_dist.StrategySpec")
    return found


def options_of(name: str) -> tuple[str, ...]:
    """Return the options that have an effect with `strategy=name`; errors as `spec_of`."""
    return AUTO_OPTIONS if name == AUTO else spec_of(name).options


def strategies_with(option: str) -> list[str]:
    """Return the names of the built-in strategies in which an option has an effect."""
    return [name for name, spec in STRATEGIES.items() if option in spec.options]


def _entry_points() -> dict[str, EntryPoint]:
    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=GROUP):
        if entry.name in STRATEGIES or entry.name in found or entry.name == AUTO:
            # A package that is merely installed must not replace how a run divides its model.
            warnings.warn(
                f"{GROUP}: the entry point {entry.name} = {entry.value} is ignored: that name is taken",
                RuntimeWarning,
                stacklevel=4,
            )
        else:
            found[entry.name] = entry
    return found
