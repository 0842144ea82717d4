"""Strategies zero1, zero2 and zero3: optimizer state, gradients and weights divided.

DeepSpeed owns partitions and communication; the optimizer stays torch's, made by the caller, and moves the flat float32
partition of this rank. Clipping and the dropping of a step act right before it moves, through torch's own hooks. DeepSpeed
divides sums by the number of data shards, so losses are multiplied by it. Its checkpoints (pickles, bound to a world size) are
not used: see `_state`.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from forge_dist._errors import StrategyError
from forge_dist._settings import StrategySettings
from forge_dist.loading._request import LoadRequest
from forge_dist.strategies._optimizer_support import check_flat
from forge_dist.strategies._parallel_dims import ParallelDims
from forge_dist.strategies._strategy import MakeOptimizer, StoredState, Strategy, Wanted
from forge_dist.strategies.zero._engine import engine_config, import_deepspeed, prepare_import
from forge_dist.strategies.zero._load import load_partitioned, with_whole_shapes
from forge_dist.strategies.zero._parameters import (
    computing,
    gather_on_forward,
    gathered_with_the_model,
    give_inputs_gradients,
)
from forge_dist.strategies.zero._state import ZeroState, whole_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from forge_dist.ranks._ranks import Ranks


class ZeroModel(nn.Module):
    """Wrapper of DeepSpeed's engine that keeps the training mode and autocast.

    The engine alone would drop both.
    """

    def __init__(self, engine: Any) -> None:
        super().__init__()
        self.module: nn.Module = engine.module
        self.training = self.module.training
        # In a tuple, so that it is no submodule: it holds the same model under the same name.
        self._engine = (engine,)
        self._autocast: list[AbstractContextManager[Any]] = []
        self.module.register_forward_pre_hook(self._enter)
        self.module.register_forward_hook(self._leave, always_call=True)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model, under the autocast of the caller."""
        kind = next(self.module.parameters()).device.type
        # The engine turns autocast off around the model unless its own is configured, which would communicate in bfloat16.
        enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        self._autocast.append(torch.autocast(kind, dtype=dtype, enabled=enabled))
        return self._engine[0](*args, **kwargs)

    def reshard(self) -> None:
        """Divide the weights again that a forward or backward pass left gathered.

        Some may be on their way still, for a module that did not compute.
        """
        if self._engine[0].zero_optimization_partition_weights():
            self._engine[0].empty_partition_cache()

    def _enter(self, _module: nn.Module, _args: Any) -> None:
        if self._autocast:
            self._autocast[-1].__enter__()

    def _leave(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        if self._autocast:
            self._autocast.pop().__exit__(None, None, None)


class ZeroStrategy(Strategy):
    """One of ZeRO's stages. Trains float32 weights: bfloat16 comes with autocast.

    The engine holds its model, its optimizer and its parameters: the protocol's arguments that name them are ignored.
    """

    def __init__(
        self, settings: StrategySettings, ranks: "Ranks", *, device: torch.device, name: str, reason: str, adapter: bool
    ) -> None:
        super().__init__(settings, ranks, device=device, name=name, reason=reason, adapter=adapter)
        if settings.cpu_offload and device.type == "cpu":
            raise StrategyError(
                f"cpu_offload has no effect with strategy={name} on the cpu, where the weights are already: leave it out"
            )
        prepare_import(ranks, device)
        self.stage: int = int(name.removeprefix("zero"))
        """Stage: 1, 2 or 3."""
        self.divides = self.stage == 3
        self._engine: Any = None
        self._state: ZeroState | None = None
        self._trained: list[nn.Parameter] = []
        self._factor = 1.0
        self._pending = self._dropping = False
        self._set_aside: list[tuple[nn.Parameter, torch.Tensor | None]] = []

    @property
    def dims(self) -> ParallelDims:
        return ParallelDims(dp_shard=self.world_size)

    def read(self, request: LoadRequest) -> "PreTrainedModel":
        if request.quantization is not None:
            raise StrategyError(
                f"strategy={self.name} divides weights that are numbers, and those of a quantized base are not: use "
                "strategy=ddp or fsdp2"
            )
        if self.stage < 3:
            return super().read(request)
        import_deepspeed()
        config = engine_config(self.settings, self.stage, dtype=request.dtype)
        return load_partitioned(request, self.ranks, config, device=self.device, broadcast=self.broadcast)

    def read_frozen(self, request: LoadRequest) -> "PreTrainedModel":
        model = super().read_frozen(request)
        gather_on_forward(model, media=self.media)
        return model

    def computing(self, model: nn.Module) -> AbstractContextManager[None]:
        # The engine gathers what it wraps.
        return nullcontext() if isinstance(model, ZeroModel) else computing(model, media=self.media)

    def wrap(self, model: nn.Module, make_optimizer: MakeOptimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        deepspeed = import_deepspeed()
        self.checkpoint_activations(model)
        named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self._refuse_low_precision(named)
        for parameter in named.values():
            if not hasattr(parameter, "ds_id"):
                torch.distributed.broadcast(parameter.detach(), src=0)
        with with_whole_shapes(model):
            optimizer = make_optimizer(model)
        check_flat(self.name, optimizer)
        groups = [list(group["params"]) for group in optimizer.param_groups if group["params"]]
        self._refuse_untrained(named, groups)
        self._trained = [parameter for group in groups for parameter in group]
        elements = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in model.parameters())
        config = engine_config(self.settings, self.stage, elements=elements)
        with gathered_with_the_model(model, self.device) if self.media and self.stage == 3 else nullcontext():
            self._engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        if self.stage == 3:
            give_inputs_gradients(module for module in model.modules() if deepspeed.utils.z3_leaf_module(module))
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)
        self._state = ZeroState(self._engine, self.stage, groups, optimizer, self.ranks)
        return ZeroModel(self._engine), optimizer

    def _refuse_low_precision(self, named: dict[str, nn.Parameter]) -> None:
        for name, parameter in named.items():
            if parameter.dtype != torch.float32:
                raise StrategyError(
                    f"strategy={self.name} trains float32 weights, and {name} is {parameter.dtype}: load it as float32"
                )

    def _refuse_untrained(self, named: dict[str, nn.Parameter], groups: list[list[nn.Parameter]]) -> None:
        held = {id(parameter) for group in groups for parameter in group}
        for name, parameter in named.items():
            if id(parameter) not in held:
                raise StrategyError(
                    f"strategy={self.name}: the optimizer does not hold {name}: freeze it, or give it to the optimizer"
                )

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        return self._micro_batch(last)

    @contextmanager
    def _micro_batch(self, last: bool) -> Iterator[None]:
        self._engine.set_gradient_accumulation_boundary(last)
        yield

    def backward(self, loss: torch.Tensor) -> None:
        self._pending = True
        self._engine.backward(loss * self.data_parallel_size)

    def grad_norm(self, parameters: Iterable[nn.Parameter]) -> torch.Tensor:  # noqa: ARG002
        """Return the norm over all trained parameters, whatever `parameters` are.

        Those of the optimizer are flat partitions, which hold no gradients between calls.
        """
        if self.stage < 3:
            norm = torch.as_tensor(self._engine.optimizer.scaled_global_norm(), dtype=torch.float32, device=self.device)
            # DeepSpeed returns -1 for NaN and infinity.
            return torch.where(norm < 0, torch.full_like(norm, torch.nan), norm)
        from deepspeed.utils import safe_get_local_grad

        norms = [torch.linalg.vector_norm(safe_get_local_grad(p), dtype=torch.float32) for p in self._trained]
        squares = torch.stack(norms).square().sum().to(self.device)
        torch.distributed.all_reduce(squares)
        return squares.sqrt()

    def scale_grads(self, parameters: Iterable[nn.Parameter], factor: float) -> None:  # noqa: ARG002
        """Note the factor; `step` applies it, where the gradients are together."""
        self._factor *= factor

    def step(self, optimizer: torch.optim.Optimizer) -> None:  # noqa: ARG002
        """Make the optimizer's step.

        Raises:
            StrategyError: a gradient is NaN or infinite, which `grad_norm` shows before; no parameter has moved.
        """
        self._engine.step()
        self._pending, self._factor = False, 1.0
        if not self._engine.was_step_applied():
            raise StrategyError(
                f"strategy={self.name}: DeepSpeed kept the optimizer from moving, for a gradient is NaN or infinite"
            )

    def zero_grad(self, optimizer: torch.optim.Optimizer) -> None:  # noqa: ARG002
        self._factor = 1.0
        if self._pending:
            # Gradients that no step used. Only a step clears all buffers where DeepSpeed keeps them; this one moves nothing.
            self._dropping = True
            try:
                self._engine.set_gradient_accumulation_boundary(True)
                self._engine.step()
            finally:
                self._pending = self._dropping = False
        self._engine.optimizer.zero_grad(set_to_none=True)

    def _before_step(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        partitions = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if self._dropping:
            # Torch's optimizers skip a parameter without a gradient: weight, moments and step counter.
            self._set_aside = [(p, p.grad) for p in partitions]
            for partition in partitions:
                partition.grad = None
        elif self._factor != 1.0:
            for partition in partitions:
                assert partition.grad is not None
                partition.grad.mul_(self._factor)

    def _after_step(self, _optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        for partition, grad in self._set_aside:
            partition.grad = grad
        self._set_aside = []

    def state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:  # noqa: ARG002
        assert self._state is not None
        self.release(model)
        return self._state.tensors()

    def load_state(self, model: nn.Module, optimizer: torch.optim.Optimizer, checkpoint: StoredState) -> None:  # noqa: ARG002
        assert self._state is not None
        self.release(model)
        self._state.load(checkpoint)

    def whole(self, model: nn.Module, names: Wanted | None = None) -> Iterator[tuple[str, torch.Tensor | None]]:
        self.release(model)
        return whole_tensors(model, names, self.ranks)

    def release(self, model: nn.Module) -> None:
        if isinstance(model, ZeroModel):
            model.reshard()
