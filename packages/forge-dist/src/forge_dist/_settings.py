"""The settings of this room: which model, on how many ranks and how divided, and where and when it is saved."""

import math
import re
from collections.abc import Callable
from typing import Any, Literal, get_args

import attrs

# More on one node is a slip of the keyboard, which would take the machine down before it is noticed.
MOST_PROCESSES = 1024
PORTS = range(1, 65536)

StrategyName = Literal["auto", "single", "ddp", "fsdp2", "hsdp", "zero1", "zero2", "zero3"]


def _text(_instance: object, attribute: "attrs.Attribute[str]", value: object) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{attribute.name} must be a string; got {value!r}")
    if not value.strip():
        raise ValueError(f"{attribute.name} must not be empty")


def _count(_instance: object, attribute: "attrs.Attribute[int]", value: object) -> None:
    # bool is an int to Python; `save_samples: yes` in a recipe is a mistake, not one sample.
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{attribute.name} must be a whole number; got {value!r}")
    if value < 0:
        raise ValueError(f"{attribute.name} must be 0 or more; got {value}")


def _switch(_instance: object, attribute: "attrs.Attribute[bool]", value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{attribute.name} must be true or false; got {value!r}")


def _one_of(kind: Any) -> Callable[..., None]:
    def check(_instance: object, attribute: "attrs.Attribute[Any]", value: object) -> None:
        if value not in get_args(kind):
            raise ValueError(f"{attribute.name} must be one of {', '.join(map(str, get_args(kind)))}; got {value!r}")

    return check


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


def _number_or(name: str, value: object, pattern: str, wish: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise TypeError(f"{name} must be {wish}; got {value!r}")
    if not re.fullmatch(pattern, str(value)):
        raise ValueError(f"{name} must be {wish}; got {value!r}")


_optional = attrs.validators.optional


@attrs.frozen(kw_only=True)
class ModelSettings:
    """Which model is trained."""

    model_path: str = attrs.field(validator=_text)
    """Directory of the model to start from (config.json and safetensors), or its name on the Hugging Face Hub (org/name)."""


@attrs.frozen(kw_only=True)
class CheckpointSettings:
    """Where the run writes, and when it exports the model."""

    ckpt_output_dir: str = attrs.field(validator=_text)
    """Directory of the run: configuration, metrics, log and exported models."""

    save_samples: int = attrs.field(default=0, validator=_count)
    """Export the model whenever this many more samples were seen; 0 exports at the end only."""

    checkpoint_at_epoch: bool = attrs.field(default=False, validator=_switch)
    """Export the model at the end of every epoch too."""

    full_state_every_steps: int = attrs.field(default=0, validator=_count)
    """Save all that resuming needs every so many steps; 0 leaves it to the minutes and to the ends of epochs."""

    full_state_every_minutes: float = attrs.field(default=30.0, validator=_minutes)
    """Save all that resuming needs whenever so many minutes went by since it was last saved; 0 does not look at the clock."""

    accelerate_full_state_at_epoch: bool = attrs.field(default=True, validator=_switch)
    """Save all that resuming needs at the end of every epoch."""

    keep_last_n: int = attrs.field(default=2, validator=_positive)
    """How many full states are kept, the newest ones; 2 or more can lose one to a bad disk and go on from the other."""

    keep_last_checkpoint_only: bool = attrs.field(default=False, validator=_switch)
    """Keep the newest export only; the one before it goes once the new one was loaded back and compared."""

    async_save: bool = attrs.field(default=True, validator=_switch)
    """Write full states beside the training, which stops only for their copy in memory."""

    resume: str = attrs.field(default="auto", validator=_text)
    """Whether a run that lies in ckpt_output_dir goes on: "auto" from its newest whole full state, "never" refuses it, a path names one full state."""


@attrs.frozen(kw_only=True)
class StrategySettings:
    """How the model is divided over ranks. What has no effect under a strategy is refused beside it."""

    # pyrefly takes this default, of all, for a mere string.
    strategy: StrategyName = attrs.field(default="auto", validator=_one_of(StrategyName))  # pyrefly: ignore[bad-assignment]
    """How the ranks share the work: one process ("single"), whole copies ("ddp"), shards over all ranks ("fsdp2") or within groups of them ("hsdp"), DeepSpeed's ZeRO ("zero1", "zero2", "zero3"); "auto" takes single for one rank, else fsdp2, or ddp for adapters."""

    shard_size: int | None = attrs.field(default=None, validator=_optional(_positive))
    """With strategy=hsdp: ranks that share one copy of the model; by default those of a node. The number of ranks is a multiple of it."""

    gather_dtype: Literal["float32", "bfloat16"] = attrs.field(
        default="float32", validator=_one_of(Literal["float32", "bfloat16"])
    )
    """With fsdp2 and hsdp: format in which shards are put together for a layer's forward and backward; gradients are summed in float32."""

    reshard_after_forward: Literal["auto", "always", "never"] = attrs.field(
        default="auto", validator=_one_of(Literal["auto", "always", "never"])
    )
    """With fsdp2 and hsdp: whether a layer's whole weights are freed between its forward and its backward; "auto" frees all but the last."""

    cpu_offload: bool = attrs.field(default=False, validator=_switch)
    """With fsdp2, hsdp and ZeRO: keep weights (zero3 and FSDP) and the optimizer's state in the host's memory."""

    activation_checkpointing: bool = attrs.field(default=False, validator=_switch)
    """Compute each layer's activations anew in the backward pass instead of keeping them: less memory, about a third more work."""

    def __attrs_post_init__(self) -> None:
        sharded, offloads = ("auto", "fsdp2", "hsdp"), ("auto", "fsdp2", "hsdp", "zero1", "zero2", "zero3")
        for name, where in {
            "shard_size": ("hsdp",),
            "gather_dtype": sharded,
            "reshard_after_forward": sharded,
            "cpu_offload": offloads,
        }.items():
            value = getattr(self, name)
            if value != getattr(attrs.fields(type(self)), name).default and self.strategy not in where:
                known = ", ".join(kind for kind in where if kind != "auto")
                raise ValueError(f"{name}={value!r} has no effect with strategy={self.strategy}; leave it out, or use {known}")


@attrs.frozen(kw_only=True)
class LaunchSettings:
    """How many processes a run has, and where they meet. What is left open is read from PET_* (Kubeflow, torchrun) or SLURM variables."""

    nproc_per_node: int | str | None = attrs.field(default=None, validator=_optional(_processes))
    """Processes on each node: a number, "auto" or "gpu" (one for each accelerator), "cpu" (one for each core). One where nothing says otherwise."""

    nnodes: int | str | None = attrs.field(default=None, validator=_optional(_nodes))
    """Nodes: a number, or "MIN:MAX" for an elastic run. One where nothing says otherwise."""

    node_rank: int | None = attrs.field(default=None, validator=_optional(_count))
    """Which node this is, counted from 0."""

    rdzv_id: str | None = attrs.field(default=None, validator=_optional(_text))
    """Name of this run among those that meet at the same rdzv_endpoint."""

    rdzv_endpoint: str | None = attrs.field(default=None, validator=_optional(_text))
    """HOST:PORT where the nodes of an elastic run meet (torchrun's c10d rendezvous)."""

    master_addr: str | None = attrs.field(default=None, validator=_optional(_text))
    """Host of node 0, where the nodes of a run of fixed size meet."""

    master_port: int | None = attrs.field(default=None, validator=_optional(_port))
    """Port on master_addr."""

    max_restarts: int | None = attrs.field(default=None, validator=_optional(_count))
    """How often the processes of this node are started again after one failed; each time the run goes on from its newest full state. 0 where nothing says otherwise."""

    connect_seconds: float = attrs.field(default=300.0, validator=_minutes)
    """How long nodes wait for each other before they say who is missing."""
