"""How a model is divided over ranks: the protocol that every strategy follows.

Order of calls: `make_strategy` → `load` → (`settle`, then an adapter is attached) → `wrap` → for each step `zero_grad`, for
each micro-batch `micro_batch` around its forward and `backward`, then `grad_norm`, perhaps `scale_grads`, `step`. `state`,
`load_state` and `whole` belong between steps. Every call but the properties is collective: all ranks make it, in the same
order.
"""

import abc
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from forge_dist._errors import StrategyError
from forge_dist._settings import StrategySettings
from forge_dist.context._decoder import ContextParallel
from forge_dist.loading._attention import AttentionFunction
from forge_dist.loading._load import read_model
from forge_dist.loading._modalities import LANGUAGE
from forge_dist.loading._model_path import Task
from forge_dist.loading._moving import moved
from forge_dist.loading._request import LoadRequest
from forge_dist.strategies._parallel_dims import ParallelDims
from forge_dist.strategies._wrappers import checkpoint_activations

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.utils.quantization_config import QuantizationConfigMixin

    from forge_dist.ranks._ranks import Ranks

Wanted = Collection[str] | Mapping[str, Collection[int]]
"""Names of tensors that are gathered on rank 0; or each name → the ranks that it is gathered on."""

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


class StoredState(Protocol):
    """Source of `load_state`; a `forge_dist.Checkpoint` is one."""

    @property
    def tensors(self) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        """Name → shape of the whole tensor and dtype."""
        ...

    def read(self, into: dict[str, torch.Tensor]) -> None:
        """Fill tensors and DTensors in place."""
        ...


class Strategy(abc.ABC):
    """One way to divide a model over ranks. Made by `make_strategy`.

    Args:
        settings: the requested settings.
        ranks: joined; connected before `load`.
        device: device of this rank's batches and weights.
        name: of the strategy: what "auto" became.
        reason: why it is this one, for the log.
        adapter: whether only an adapter is trained.

    Raises:
        StrategyError: these ranks, settings or devices do not fit.
    """

    divides: bool = False
    """Whether the weights themselves are divided over the ranks, so that every forward is collective."""
    media: bool = False
    """Whether rows have images, set before `load`. A rank whose rows have none passes over parts of a model: where weights are
    divided those are gathered with the whole of it, by all ranks alike."""
    autocasts: bool = True
    """Whether a forward with float32 weights takes autocast to compute in 16 bits. Not where weights are gathered in those:
    autocast would keep a second copy of what has been gathered until the backward pass."""

    def __init__(
        self, settings: StrategySettings, ranks: "Ranks", *, device: torch.device, name: str, reason: str, adapter: bool
    ) -> None:
        self.settings: StrategySettings = settings
        """The requested settings."""
        self.ranks: Ranks = ranks
        """The ranks that share the model."""
        self.device: torch.device = device
        """Device of this rank's batches and weights."""
        self.name: str = name
        """Name of the strategy (single, ddp, fsdp2, ...): what "auto" became."""
        self.reason: str = reason
        """Why it is this one, for the log."""
        self.adapter: bool = adapter
        """Whether only an adapter is trained."""
        self._context: ContextParallel | None = None
        if settings.activation_offloading and device.type == "cpu":
            raise StrategyError(
                "activation_offloading has no effect on the cpu, where activations are in the host's memory: leave it out"
            )

    @property
    def world_size(self) -> int:
        """R, the number of ranks."""
        return self.ranks.world_size

    @property
    def dims(self) -> ParallelDims:
        """Arrangement of the ranks; here each has a copy of the model."""
        shared = self.settings.cp_size * self.settings.tp_size
        return ParallelDims(dp_replicate=self.world_size // shared, non_data=shared)

    @property
    def data_parallel_size(self) -> int:
        """Number of shards that a step's data are divided into."""
        return self.dims.data_parallel_size

    @property
    def data_parallel_rank(self) -> int:
        """Data shard of this rank, from 0.

        Ranks with the same one read the same micro-batches and draw from the same seeds.
        """
        return self.dims.data_parallel_rank(self.ranks.rank)

    def load(
        self,
        model_path: str,
        *,
        dtype: torch.dtype,
        attention: str | None = "sdpa",
        attention_function: AttentionFunction | None = None,
        task: Task = "causal",
        quantization: "QuantizationConfigMixin | None" = None,
        other_dtype: torch.dtype | None = None,
        trained: Collection[str] = LANGUAGE,
    ) -> "PreTrainedModel":
        """Load this rank's part of the model, in eval mode. Arguments and errors as `load_model`.

        `other_dtype` and `trained` are those of `LoadRequest`.

        A reward model's new head is what rank 0 draws, on every rank. A quantized base is whole on every rank until `wrap`.
        Where ranks share packed rows (cp_size), the decoder cuts them, and `attention_function` sees a part of the queries with
        all of their keys; with `attention=None`, as of an export that is compared, each rank runs whole rows.

        Raises:
            ModelError: as `load_model`.
            StrategyError: this model, or a quantized one, cannot be divided so; or rows cannot be cut with this attention.
        """
        request = LoadRequest(
            model_path=model_path,
            dtype=dtype,
            attention=attention,
            attention_function=attention_function,
            task=task,
            quantization=quantization,
            other_dtype=other_dtype,
            trained=tuple(trained),
            media=self.media,
        )
        if self.settings.cp_size > 1 and attention is not None and attention_function is None:
            raise StrategyError(
                f"cp_size={self.settings.cp_size} cuts packed rows, which attention={attention} cannot attend over ranks: use "
                "attention=documents, or leave cp_size out"
            )
        return self._cut(request, self.read)

    def load_frozen(
        self,
        model_path: str,
        *,
        dtype: torch.dtype,
        attention: str | None = "sdpa",
        attention_function: AttentionFunction | None = None,
        task: Task = "causal",
        quantization: "QuantizationConfigMixin | None" = None,
        other_dtype: torch.dtype | None = None,
    ) -> "PreTrainedModel":
        """Load a reference, teacher or reward model beside the trained one.

        Arguments and errors as `load`.

        It is in eval mode, needs no gradients and no `wrap`, and is divided as `load` divides: whole copies under single, ddp,
        zero1 and zero2. Where it is divided every forward is collective: all ranks make it, together, with or without
        `torch.no_grad`.
        """
        request = LoadRequest(
            model_path=model_path,
            dtype=dtype,
            attention=attention,
            attention_function=attention_function,
            task=task,
            quantization=quantization,
            other_dtype=other_dtype,
            media=self.media,
        )
        return self._cut(request, self.read_frozen)

    def _cut(self, request: LoadRequest, read: "Callable[[LoadRequest], PreTrainedModel]") -> "PreTrainedModel":
        """Read a model, whose packed rows ranks share if they can with its attention."""
        if self.settings.cp_size == 1 or request.attention_function is None:
            return read(request)
        if self._context is None:
            self._context = ContextParallel(self._context_mesh())
        model = read(self._context.request(request))
        self._context.divide(model, request.model_path)
        return model

    def _context_mesh(self) -> DeviceMesh:
        sizes = (self.data_parallel_size, self.settings.cp_size, self.settings.tp_size)
        return init_device_mesh(self.device.type, sizes, mesh_dim_names=("dp", "cp", "tp"))["cp"]

    def compute_in(self, dtype: torch.dtype) -> None:  # noqa: B027 - most leave it to autocast
        """Choose what follows from the dtype of the computation.

        `make_strategy` calls it, before `load`.
        """

    def read(self, request: LoadRequest) -> "PreTrainedModel":
        """Read this rank's part of a model, for `load`; here the whole of it."""
        return moved(read_model(request, self.device, broadcast=self.broadcast), self.device)

    def read_frozen(self, request: LoadRequest) -> "PreTrainedModel":
        """Read a model that is not trained, for `load_frozen`."""
        return self.read(request).requires_grad_(requires_grad=False)

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return rank 0's tensor, on the CPU."""
        if self.world_size == 1:
            return tensor
        shared = tensor.to(self.device)
        torch.distributed.broadcast(shared, src=0, group=self.ranks.group)
        return shared.cpu()

    def computing(self, model: nn.Module) -> AbstractContextManager[None]:  # noqa: ARG002 - most have nothing to do
        """Enclose forwards, without gradients, of a loaded model that is not wrapped.

        A probe, or a second copy.
        """
        return nullcontext()

    def settle(self, model: nn.Module) -> None:  # noqa: B027 - most have nothing to do
        """Ready a loaded model for an adapter.

        Between this call and `wrap` no forward is made and no weight read.
        """

    def checkpoint_activations(self, model: nn.Module) -> None:
        """Switch on the activation checkpointing that the settings ask for; `wrap` calls it.

        Raises:
            StrategyError: the architecture does not support it.
        """
        s = self.settings
        checkpoint_activations(model, str(s.activation_checkpointing), offload=s.activation_offloading)

    def release(self, model: nn.Module) -> None:  # noqa: B027 - most have nothing to do
        """Divide weights again that forwards of a wrapped model left gathered.

        Whoever reads weights outside of a forward calls this first.
        """

    @abc.abstractmethod
    def wrap(self, model: nn.Module, make_optimizer: MakeOptimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Ready the model, with its adapter if it has one, for training.

        All forwards go through the module that is returned. Trainable parameters that every rank holds whole become rank 0's.
        `make_optimizer` is called once, with a module that has the parameters which this rank updates. Activation checkpointing
        is switched on here where the settings ask for it.

        Raises:
            StrategyError: the optimizer cannot move weights that are divided so.
        """

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sum each value over the data shards, in float64, to the same bits on every rank.

        The ranks of one data shard give the same values, which count once. For what a single rank may meet, a failure say, use
        `any`.
        """
        return self.ranks.sum(values if self.dims.counts(self.ranks.rank) else [0.0] * len(values))

    def gather(self, rows: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Concatenate the rows [n, ...] of all data shards; return also where this one's begin.

        They come in the order of the shards, to the bit, without a graph, on the device of `rows`; a shard may have any number
        of them. The ranks of one data shard give the same rows, which come once.
        """
        parts = self.ranks.gather_rows(rows if self.dims.counts(self.ranks.rank) else rows[:0])
        shards = [part for rank, part in enumerate(parts) if self.dims.counts(rank)]
        return torch.cat(shards), sum(map(len, shards[: self.data_parallel_rank]))

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set on at least one rank, whichever data shard it has."""
        return self.ranks.any(flag)

    @abc.abstractmethod
    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        """Enclose one micro-batch's forward and backward.

        `last`: no further micro-batch of the step follows; afterwards its gradients are complete.
        """

    @abc.abstractmethod
    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward pass of this rank's summed loss divided by the global count.

        After the last micro-batch the gradients are the sums over data shards (and micro-batches) of what each one's loss
        gives, never their means. The ranks of a data shard give the same loss, which counts once.
        """

    @abc.abstractmethod
    def grad_norm(self, parameters: Iterable[nn.Parameter]) -> torch.Tensor:
        """Return the global 2-norm of the gradients, float32[] on `device`, the same on every rank.

        Sharded and replicated gradients may mix.
        """

    @abc.abstractmethod
    def scale_grads(self, parameters: Iterable[nn.Parameter], factor: float) -> None:
        """Multiply every gradient by `factor`, as clipping does."""

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the optimizer's step."""
        optimizer.step()

    def zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        """Clear the gradients."""
        optimizer.zero_grad(set_to_none=True)

    @abc.abstractmethod
    def state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        """Return what training changes: tensors and DTensors of the model and the optimizer.

        They share memory with those.

        Names are "model/FQN" (trainable parameters and persistent buffers, without any wrapper's prefix; a tied weight once,
        under its first name), "optimizer/FQN/KEY" and, for what a schedule-free optimizer counts in its groups,
        "optimizer/group:N/KEY". They are the same under every strategy and on any number of ranks. A plain number of an
        optimizer is a tensor of no dimensions, KEY:number. An optimizer's hyperparameters (learning rate, betas) are not in it.

        Raises:
            CheckpointError: the optimizer keeps something that is neither tensor nor number.
        """

    @abc.abstractmethod
    def load_state(self, model: nn.Module, optimizer: torch.optim.Optimizer, checkpoint: StoredState) -> None:
        """Load a `state`, saved under any strategy, into the wrapped model and its optimizer.

        Optimizer state that does not exist yet is made from what the checkpoint lists: divided like the parameter where it has
        the parameter's shape, otherwise whole on every rank.

        Raises:
            CheckpointError: a name is missing or unexpected, or a shape differs; nothing has been changed by then.
        """

    @abc.abstractmethod
    def whole(self, model: nn.Module, names: Wanted | None = None) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Iterate over (name, tensor) of the model's `state_dict`, gathered one at a time.

        Only those of the given `names` (None: all), the same on all ranks; the others are not gathered. A mapping says which
        ranks get each of them, and in which order they come; otherwise that is rank 0.
        There tensors are whole and on the CPU (they may share the model's memory: do not write to them), elsewhere None.
        Every rank must run the iterator to its end. A tied weight comes once, under its first name. Names are without wrappers'
        prefixes.
        """
