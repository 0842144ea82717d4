"""How a model is divided over ranks: the protocol that every strategy follows.

One order of calls: `make_strategy` → `load` → (`settle`, then an adapter is attached) → `wrap` → for each step `zero_grad`, for each micro-batch
`micro_batch` around its forward and `backward`, then `grad_norm`, perhaps `scale_grads`, `step`. `state`, `load_state` and `whole` belong
between steps. Every call but the properties is collective: all ranks make it, in the same order.
"""

import abc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from forge_dist._settings import StrategySettings
from forge_dist.loading._attention import AttentionFunction
from forge_dist.loading._load import read_model
from forge_dist.loading._model_path import Task
from forge_dist.loading._quantization import Quantized

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.utils.quantization_config import QuantizationConfigMixin

    from forge_dist.ranks._ranks import Ranks

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


class StoredState(Protocol):
    """What `load_state` reads from; a `forge_dist.Checkpoint` is one."""

    @property
    def tensors(self) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        """Each name's whole shape and dtype."""
        ...

    def read(self, into: dict[str, torch.Tensor]) -> None:
        """Fill tensors and DTensors in place."""
        ...


class Strategy(abc.ABC):
    """One way to divide a model over ranks. Made by `make_strategy`."""

    name: str
    """single, ddp, fsdp2, hsdp, zero1, zero2 or zero3: what "auto" became."""
    reason: str
    """Why it is this one, for the log."""
    ranks: "Ranks"
    settings: StrategySettings
    """What was asked for."""
    device: torch.device
    """Where this rank's batches and weights lie."""

    @property
    def world_size(self) -> int:
        """R: how many ranks share a step."""
        return self.ranks.world_size

    @property
    def data_parallel_size(self) -> int:
        """Number of shards that a step's data are divided into."""
        return self.world_size

    @property
    def data_parallel_rank(self) -> int:
        """Data shard of this rank, from 0."""
        return self.ranks.rank

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set on at least one rank."""
        return self.ranks.any(flag)

    @property
    def divides(self) -> bool:
        """Whether the weights themselves are divided over the ranks, so that every forward is collective."""
        return self.name in {"fsdp2", "hsdp", "zero3"}

    def load(
        self,
        model_path: str,
        *,
        dtype: torch.dtype,
        attention: str | None = "sdpa",
        attention_function: AttentionFunction | None = None,
        task: Task = "causal",
        quantization: "QuantizationConfigMixin | None" = None,
    ) -> "PreTrainedModel":
        """Load this rank's part of the model, in eval mode: here the whole of it. Arguments and errors are those of `load_model`.

        A reward model's new head is what rank 0 draws, on every rank. A quantized base is whole on every rank until `wrap`.

        Raises:
            ModelError: as `load_model`.
            StrategyError: this model, or a quantized one, cannot be divided so.
        """
        model = read_model(
            model_path,
            dtype=dtype,
            attention=attention,
            attention_function=attention_function,
            task=task,
            share=self._of_first,
            quantized=None if quantization is None else Quantized(quantization, self.device),
        )
        return model.to(self.device)

    def load_frozen(
        self,
        model_path: str,
        *,
        dtype: torch.dtype,
        attention: str | None = "sdpa",
        attention_function: AttentionFunction | None = None,
        task: Task = "causal",
    ) -> "PreTrainedModel":
        """Load a model that is only asked, beside the trained one: a reference, a teacher, a reward model. Arguments and errors as `load`.

        It is in eval mode, needs no gradients and no `wrap`, and is divided as `load` divides: whole copies under single, ddp, zero1 and zero2.
        Where it is divided every forward is collective: all ranks make it, together, with or without `torch.no_grad`.
        """
        model = self.load(model_path, dtype=dtype, attention=attention, attention_function=attention_function, task=task)
        return model.requires_grad_(requires_grad=False)

    def _of_first(self, tensor: torch.Tensor) -> torch.Tensor:
        """Rank 0's tensor, on the CPU."""
        if self.world_size == 1:
            return tensor
        shared = tensor.to(self.device)
        torch.distributed.broadcast(shared, src=0, group=self.ranks.group)
        return shared.cpu()

    def computing(self, model: nn.Module) -> AbstractContextManager[None]:  # noqa: ARG002 - most have nothing to do
        """Around forwards, without gradients, of a loaded model that is not wrapped: a probe, or a second copy that is measured."""
        return nullcontext()

    def settle(self, model: nn.Module) -> None:  # noqa: B027 - most have nothing to do
        """Make a loaded model ready for an adapter; between this call and `wrap` no forward is made and no weight read."""

    @abc.abstractmethod
    def wrap(self, model: nn.Module, make_optimizer: MakeOptimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Ready the model, with its adapter if it has one, for training; all forwards go through the module that is returned.

        Trainable parameters that every rank holds whole become rank 0's. `make_optimizer` is called once, with the parameters
        that this rank updates. Activation checkpointing is switched on here where the settings ask for it.

        Raises:
            StrategyError: the optimizer cannot move weights that are divided so.
        """

    def sum(self, values: Sequence[float]) -> list[float]:
        """Element-wise sum over ranks, in float64."""
        return self.ranks.sum(values)

    @abc.abstractmethod
    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        """Around one micro-batch's forward and backward; `last` says that the step's gradients are whole after it."""

    @abc.abstractmethod
    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward pass of this rank's summed loss divided by the global count.

        After the last micro-batch the gradients are the sums over ranks (and micro-batches) of what each rank's loss gives,
        never their means.
        """

    @abc.abstractmethod
    def grad_norm(self, parameters: Iterable[nn.Parameter]) -> torch.Tensor:
        """Global 2-norm of the gradients, float32[] on `device`, the same on every rank; sharded and replicated ones may mix."""

    @abc.abstractmethod
    def scale_grads(self, parameters: Iterable[nn.Parameter], factor: float) -> None:
        """Multiply every gradient by `factor`, as clipping does."""

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Move the parameters."""
        optimizer.step()

    def zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        """Forget the last step's gradients."""
        optimizer.zero_grad(set_to_none=True)

    @abc.abstractmethod
    def state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        """What training changes, as tensors and DTensors that share memory with the model and the optimizer.

        Names are "model/FQN" (trainable parameters and persistent buffers, without any wrapper's prefix; a tied weight once, under its
        first name), "optimizer/FQN/KEY" and, for what a schedule-free optimizer counts in its groups, "optimizer/group:N/KEY". They are the
        same under every strategy and on any number of ranks. What an optimizer keeps as a plain number is a tensor of no dimensions,
        KEY:number. An optimizer's hyperparameters (learning rate, betas) are not in it.

        Raises:
            CheckpointError: the optimizer keeps something that is neither tensor nor number.
        """

    @abc.abstractmethod
    def load_state(self, model: nn.Module, optimizer: torch.optim.Optimizer, checkpoint: StoredState) -> None:
        """Put a `state`, saved under any strategy, into the wrapped model and its optimizer, in place.

        Optimizer state that does not exist yet is made from what the checkpoint lists: divided like the parameter where it has the
        parameter's shape, otherwise whole on every rank.

        Raises:
            CheckpointError: a name is missing or too many, or a shape differs; nothing has been changed by then.
        """

    @abc.abstractmethod
    def whole(self, model: nn.Module) -> Iterator[tuple[str, torch.Tensor | None]]:
        """(name, tensor) of the model's `state_dict`, in its order, put together one at a time.

        On rank 0 tensors are whole and on the CPU (they may share the model's memory: do not write to them), elsewhere None. Every
        rank must run the iterator to its end. A tied weight comes once, under its first name. Names are without wrappers' prefixes.
        """
