"""Settings of this package: model, ranks and how they divide it, checkpoints and exports."""

import math
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, get_args

import attrs

from forge_dist._errors import StrategyError
from forge_dist._strategy_table import AUTO, STRATEGIES, options_of, strategies_with

# More on one node is a typing error, which would take the machine down before it is noticed.
MOST_PROCESSES = 1024
PORTS = range(1, 65536)

if TYPE_CHECKING:
    StrategyName = str
else:
    StrategyName = Literal[(AUTO, *STRATEGIES)]
"""Names of the built-in strategies, and "auto"."""

SaveDtype = Literal["float32", "bfloat16", "float16"]
ActivationCheckpointing = Literal["none", "full", "selective", "auto"]

STRATEGY_OPTIONS = ("shard_size", "tp_size", "cp_size", "ep_size", "gather_dtype", "reshard_after_forward", "cpu_offload")
"""Fields of StrategySettings that have an effect under some strategies only (`StrategySpec.options`)."""


def _text(_instance: object, attribute: "attrs.Attribute[str]", value: object) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{attribute.name} must be a string; got {value!r}")
    if not value.strip():
        raise ValueError(f"{attribute.name} must not be empty")


def _count(_instance: object, attribute: "attrs.Attribute[int]", value: object) -> None:
    # bool is an int in Python; `save_samples: yes` in a recipe is a mistake, not one sample.
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{attribute.name} must be a whole number; got {value!r}")
    if value < 0:
        raise ValueError(f"{attribute.name} must be 0 or more; got {value}")


def _count_or_share(_instance: object, attribute: "attrs.Attribute[float]", value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{attribute.name} must be a whole number, or a share below 1; got {value!r}")
    if not (0 <= value < 1 or (isinstance(value, int) and value >= 1)):
        raise ValueError(f"{attribute.name} must be 0, a whole number, or a share of the run below 1; got {value!r}")


def _switch(_instance: object, attribute: "attrs.Attribute[bool]", value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{attribute.name} must be true or false; got {value!r}")


def _one_of(kind: Any) -> Callable[..., None]:
    def check(_instance: object, attribute: "attrs.Attribute[Any]", value: object) -> None:
        if value not in get_args(kind):
            raise ValueError(f"{attribute.name} must be one of {', '.join(map(str, get_args(kind)))}; got {value!r}")

    return check


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else (value,) if isinstance(value, str) else value


def _tokens(_instance: object, attribute: "attrs.Attribute[Any]", value: object) -> None:
    if not isinstance(value, tuple) or not all(isinstance(token, str) for token in value):
        raise TypeError(f"{attribute.name} must be a list of strings; got {value!r}")
    for token in value:
        if not token.strip():
            raise ValueError(f"{attribute.name} must not hold an empty string; got {value!r}")
        if value.count(token) > 1:
            raise ValueError(f"{attribute.name} names {token!r} twice: leave one out")


def _checkpointing(value: Any) -> Any:
    """Return the word that true or false stands for; any other value itself."""
    return {True: "full", False: "none"}[value] if isinstance(value, bool) else value


def _strategy(instance: object, attribute: "attrs.Attribute[str]", value: object) -> None:
    _text(instance, attribute, value)
    try:
        options_of(str(value))
    except StrategyError as error:
        raise ValueError(str(error)) from None


def _positive(instance: object, attribute: "attrs.Attribute[int]", value: object) -> None:
    _count(instance, attribute, value)
    if value == 0:
        raise ValueError(f"{attribute.name} must be 1 or more; got 0")


def _minutes(_instance: object, attribute: "attrs.Attribute[float]", value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{attribute.name} must be a number; got {value!r}")
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{attribute.name} must be 0 or more; got {value}")


def _processes(_instance: object, attribute: "attrs.Attribute[int | str]", value: object) -> None:
    _number_or(attribute.name, value, r"auto|cpu|gpu|[1-9]\d*", f"a number from 1 to {MOST_PROCESSES}, auto, gpu or cpu")
    if str(value).isdecimal() and int(str(value)) > MOST_PROCESSES:
        raise ValueError(f"{attribute.name} must be at most {MOST_PROCESSES} processes on a node; got {value}")


def _port(instance: object, attribute: "attrs.Attribute[int]", value: object) -> None:
    _count(instance, attribute, value)
    if value not in PORTS:
        raise ValueError(f"{attribute.name} must be a port from {PORTS[0]} to {PORTS[-1]}; got {value}")


def _nodes(_instance: object, attribute: "attrs.Attribute[int | str]", value: object) -> None:
    _number_or(attribute.name, value, r"[1-9]\d*(:[1-9]\d*)?", "a number from 1, or MIN:MAX")


def _number_or(name: str, value: object, pattern: str, expected: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise TypeError(f"{name} must be {expected}; got {value!r}")
    if not re.fullmatch(pattern, str(value)):
        raise ValueError(f"{name} must be {expected}; got {value!r}")


_optional = attrs.validators.optional


@attrs.frozen(kw_only=True)
class ModelSettings:
    """The model to train."""

    model_path: str = attrs.field(validator=_text)
    """Directory of the model to start from (config.json and safetensors), or its name on the Hugging Face Hub (org/name)."""

    add_tokens: tuple[str, ...] = attrs.field(default=(), converter=_tuple, validator=_tokens)
    """Strings that become one token each, with rows of the embedding and the head that start as the mean of the others'.
    Decoded text holds them."""

    add_special_tokens: tuple[str, ...] = attrs.field(default=(), converter=_tuple, validator=_tokens)
    """As add_tokens, for marks that are no part of the text: decoding leaves them out with skip_special_tokens."""

    def __attrs_post_init__(self) -> None:
        both = [token for token in self.add_tokens if token in self.add_special_tokens]
        if both:
            raise ValueError(f"add_tokens and add_special_tokens both name {both[0]!r}: leave it out of one")


@attrs.frozen(kw_only=True)
class CheckpointSettings:
    """Run directory, exports of the model, and full states."""

    ckpt_output_dir: str = attrs.field(validator=_text)
    """Directory of the run: configuration, metrics, log and exported models."""

    save_samples: int | float = attrs.field(default=0, validator=_count_or_share)
    """Export the model after every so many samples, or below 1 after each such share of the run's steps (0.25: four times);
    0 exports at the end only."""

    checkpoint_at_epoch: bool = attrs.field(default=False, validator=_switch)
    """Export the model at the end of every epoch too."""

    save_dtype: SaveDtype | None = attrs.field(default=None, validator=_optional(_one_of(SaveDtype)))
    """Dtype of exported weights; by default that of the model in model_path. Training and full states are in float32 either
    way. An adapter is always exported in float32."""

    full_state_every_steps: int | float = attrs.field(default=0, validator=_count_or_share)
    """Save the full state, all that resuming needs, every so many steps, or below 1 after each such share of the run; 0: see
    full_state_every_minutes."""

    full_state_every_minutes: float = attrs.field(default=30.0, validator=_minutes)
    """Save the full state whenever so many minutes have passed since the last one; 0 ignores the time."""

    accelerate_full_state_at_epoch: bool = attrs.field(default=True, validator=_switch)
    """Save the full state at the end of every epoch."""

    keep_last_n: int = attrs.field(default=2, validator=_positive)
    """Number of full states to keep, the newest ones; with 2 or more the run can resume even if a bad disk damages one."""

    keep_full_state: bool = attrs.field(default=False, validator=_switch)
    """Keep the last full states of a finished run, without which it cannot be trained for more steps. They are kept too where
    accelerate_full_state_at_epoch=true is given."""

    max_failed_saves: int = attrs.field(default=3, validator=_positive)
    """End the run once so many full states in a row could not be saved (a full disk), before more is lost."""

    emergency_dir: str | None = attrs.field(default=None, validator=_optional(_text))
    """Directory on another file system that gets a full state when ckpt_output_dir takes none: when a run ends by
    max_failed_saves, or its last export cannot be written. The same command goes on from there."""

    keep_last_checkpoint_only: bool = attrs.field(default=False, validator=_switch)
    """Keep the newest export only; the previous one is deleted once the new one was loaded back and compared."""

    async_save: bool = attrs.field(default=True, validator=_switch)
    """Write full states in the background; training pauses only while they are copied in memory."""

    resume: str = attrs.field(default="auto", validator=_text)
    """How to resume a run in ckpt_output_dir: "auto" from its newest whole full state, "never" refuses it, a path names one."""


@attrs.frozen(kw_only=True)
class StrategySettings:
    """How the model is divided over ranks. Settings without effect under a strategy are refused."""

    strategy: StrategyName | str = attrs.field(default=AUTO, validator=_strategy)
    """How the ranks share the model: one process ("single"), whole copies ("ddp"), shards over all ranks ("fsdp2") or within
    groups of them ("hsdp"), DeepSpeed's ZeRO ("zero1", "zero2", "zero3"), or the strategy of an installed package;
    "auto" takes single for one rank, else fsdp2, or ddp for adapters."""

    shard_size: int | None = attrs.field(default=None, validator=_optional(_positive))
    """With strategy=hsdp: ranks that share one copy of the model, a divisor of all ranks; by default those of a node."""

    tp_size: int = attrs.field(default=1, validator=_positive)
    """With fsdp2 and hsdp: consecutive ranks that divide each layer's heads and inner width (tensor parallel), and share their
    data; a divisor of the heads."""

    cp_size: int = attrs.field(default=1, validator=_positive)
    """With fsdp2, hsdp and ddp: consecutive ranks that share each packed row (context parallel), which may be cut at any token;
    for samples that are too long for one rank. max_tokens_per_gpu counts the tokens of one of them."""

    ep_size: int = attrs.field(default=1, validator=_positive)
    """With fsdp2 and hsdp: ranks that divide the experts of a mixture of experts, each of which has its own data (expert
    parallel); a divisor of the experts and of the ranks of a copy, and a multiple of tp_size."""

    gather_dtype: Literal["auto", "float32", "bfloat16"] = attrs.field(
        default="auto", validator=_one_of(Literal["auto", "float32", "bfloat16"])
    )
    """With fsdp2 and hsdp: dtype in which weights are gathered for forward and backward; gradients are summed in float32. By
    default that of the computation. Gathered in float32 for dtype=bfloat16, each rank keeps bfloat16 copies of all layers until
    the backward pass."""

    reshard_after_forward: Literal["auto", "always", "never"] = attrs.field(
        default="auto", validator=_one_of(Literal["auto", "always", "never"])
    )
    """With fsdp2 and hsdp: free a layer's gathered weights between forward and backward; "auto" frees all but the last."""

    cpu_offload: bool = attrs.field(default=False, validator=_switch)
    """With fsdp2, hsdp and ZeRO: keep the optimizer's state and (fsdp2, hsdp, zero3) the weights in the host's memory."""

    activation_checkpointing: ActivationCheckpointing | bool = attrs.field(  # pyrefly: ignore[bad-assignment]
        default="none", converter=_checkpointing, validator=_one_of(ActivationCheckpointing)
    )
    """Recompute activations in the backward pass instead of keeping them: of each layer all but its input (full, also true;
    about a third more work), all but the outputs of matrix products and attention (selective), or none (also false). auto takes
    what the memory plan needs."""

    activation_offloading: bool = attrs.field(default=False, validator=_switch)
    """With activation_checkpointing=full: keep each layer's input in the host's memory until its backward pass."""

    def __attrs_post_init__(self) -> None:
        if self.activation_offloading and self.activation_checkpointing != "full":
            raise ValueError(
                f"activation_offloading=true has no effect with activation_checkpointing={self.activation_checkpointing}, and "
                "moves what activation_checkpointing=full keeps: set that too, or leave it out"
            )
        for name in STRATEGY_OPTIONS:
            value = getattr(self, name)
            if value != getattr(attrs.fields(type(self)), name).default and name not in options_of(self.strategy):
                known = ", ".join(strategies_with(name))
                raise ValueError(f"{name}={value!r} has no effect with strategy={self.strategy}; leave it out, or use {known}")


@attrs.frozen(kw_only=True)
class LaunchSettings:
    """Processes of a run, and where they meet.

    Values that are not set are read from PET_* (Kubeflow, torchrun) or SLURM variables.
    """

    nproc_per_node: int | str | None = attrs.field(default=None, validator=_optional(_processes))
    """Processes on each node: a number, "auto" or "gpu" (one per accelerator), "cpu" (one per core); 1 by default."""

    nnodes: int | str | None = attrs.field(default=None, validator=_optional(_nodes))
    """Nodes: a number, or "MIN:MAX" for an elastic run; 1 by default."""

    node_rank: int | None = attrs.field(default=None, validator=_optional(_count))
    """Number of this node, counted from 0."""

    rdzv_id: str | None = attrs.field(default=None, validator=_optional(_text))
    """Name of this run, to tell it from others at the same rdzv_endpoint."""

    rdzv_endpoint: str | None = attrs.field(default=None, validator=_optional(_text))
    """HOST:PORT where the nodes meet: torchrun's c10d rendezvous, or with node_rank its static one, where node 0 listens."""

    master_addr: str | None = attrs.field(default=None, validator=_optional(_text))
    """Host of node 0, where the nodes of a run of fixed size meet."""

    master_port: int | None = attrs.field(default=None, validator=_optional(_port))
    """Port on master_addr."""

    max_restarts: int | None = attrs.field(default=None, validator=_optional(_count))
    """How often this node's processes are restarted after one failed, each time from the newest full state; 0 by default."""

    connect_seconds: float = attrs.field(default=300.0, validator=_minutes)
    """Seconds that nodes wait for each other before the missing ones are reported."""

    stall_timeout: float | None = attrs.field(default=None, validator=_optional(_minutes))
    """Seconds without progress after which a step has stalled: the run ends and names the rank; the same command goes on. By
    default ten times the slowest step so far, at least ten minutes; 0 never ends it. Loading, exporting and other long phases
    have half an hour without a sign of progress, or this where it is longer."""
