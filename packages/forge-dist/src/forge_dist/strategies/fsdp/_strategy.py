"""Strategies fsdp2 and hsdp, by transformers' native sharding and PyTorch's `fully_shard`.

Each rank reads its own shards, and a layer's weights are gathered only while it computes. With tp_size ranks divide the layers
themselves, with ep_size the experts, by transformers' plans. What transformers lacks is here: gradients as sums, adapters that
are attached after sharding kept the same on all ranks, accumulation, and the reasons why a model cannot be divided so.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING

import attrs
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from forge_dist._errors import StrategyError
from forge_dist._settings import StrategySettings
from forge_dist.loading._divisible import check_divisible, check_expert_shards
from forge_dist.loading._fsdp_groups import broken_tie, set_buffers
from forge_dist.loading._load import read_model
from forge_dist.loading._model_path import check_model_path
from forge_dist.loading._moving import exchange
from forge_dist.loading._parallel_plan import partial_parameters
from forge_dist.loading._request import LoadRequest
from forge_dist.loading._unwrap import base_of
from forge_dist.strategies._optimizer_support import check_sharded, move_one_by_one
from forge_dist.strategies._parallel_dims import ParallelDims
from forge_dist.strategies._replicated import broadcast, replicated, sum_grads, sum_local_grads, unshard_copied_modules
from forge_dist.strategies._strategy import MakeOptimizer
from forge_dist.strategies._torch import TorchStrategy
from forge_dist.strategies._virtual_tokens import gather_before_lookup
from forge_dist.strategies._wrappers import fsdp_modules, resharded
from forge_dist.strategies.fsdp._misplaced import place_again, placeholders
from forge_dist.strategies.fsdp._own_shards import own_shards
from forge_dist.strategies.fsdp._placeholders import WholeShapePlaceholders
from forge_dist.strategies.fsdp._quantized import awaits_sharding, shard_quantized

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from forge_dist.ranks._ranks import Ranks


class FSDP(TorchStrategy):
    """Shards over all ranks (fsdp2), or copies that are sharded over `shard_size` ranks (hsdp)."""

    divides = True

    def __init__(
        self, settings: StrategySettings, ranks: "Ranks", *, device: torch.device, name: str, reason: str, adapter: bool
    ) -> None:
        super().__init__(settings, ranks, device=device, name=name, reason=reason, adapter=adapter)
        self._check_device()
        self.shard_size: int = self._checked_shard_size() if name == "hsdp" else ranks.world_size
        """Number of ranks that share one copy of the model."""
        self._check_copy()
        self._placeholders: WholeShapePlaceholders | None = None
        self._root: FSDPModule | None = None
        self._replicated: list[nn.Parameter] = []
        self._partial: list[nn.Parameter] = []
        self._meshes: DeviceMesh | None = None

    @property
    def dims(self) -> ParallelDims:
        shared = self.settings.cp_size * self.settings.tp_size
        return ParallelDims(
            dp_replicate=self.world_size // self.shard_size, dp_shard=self.shard_size // shared, non_data=shared
        )

    def _check_device(self) -> None:
        # Of a build for GPUs on a machine without one, the accelerator is the CPU.
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        found = "cpu" if accelerator is None else accelerator.type
        if self.device.type != found:
            raise StrategyError(
                f"strategy={self.name} shards onto the machine's {found}, not onto {self.device.type}: use strategy=ddp"
            )
        if self.settings.cpu_offload and self.device.type == "cpu":
            raise StrategyError(
                f"cpu_offload has no effect with strategy={self.name} on the cpu, where the weights are already: leave it out"
            )

    def _checked_shard_size(self) -> int:
        size, world_size = self.settings.shard_size, self.ranks.world_size
        size = self.ranks.local_world_size if size is None else size
        if world_size % size:
            raise StrategyError(
                f"shard_size={size} does not divide {world_size} ranks: use a divisor of them, or strategy=fsdp2"
            )
        if size == 1:
            raise StrategyError(
                f"strategy=hsdp with shards over one rank is {world_size} whole copies: use strategy=ddp, or a shard_size"
            )
        return size

    @property
    def _sharded_over(self) -> int:
        """Number of ranks over which a tensor is sharded that each of them computes with whole."""
        return self.shard_size // self.settings.tp_size

    def _check_copy(self) -> None:
        """Refuse groups that do not fit into a copy's ranks, and idle options of shards."""
        s, ranks = self.settings, f"the {self.shard_size} ranks of a copy{' (shard_size)' if self.name == 'hsdp' else ''}"
        if self.shard_size % (s.tp_size * s.cp_size):
            said = " times ".join(
                f"{name}={size}" for name, size in (("tp_size", s.tp_size), ("cp_size", s.cp_size)) if size > 1
            )
            raise StrategyError(f"{said} does not divide {ranks}: use divisors of them")
        if self.shard_size % s.ep_size:
            raise StrategyError(f"ep_size={s.ep_size} does not divide {ranks}: use a divisor of them")
        if self._sharded_over == 1 and self.shard_size < self.world_size:
            raise StrategyError(
                f"shard_size={self.shard_size} leaves nothing to shard beside tp_size={s.tp_size}: use twice as many or more, "
                "or strategy=fsdp2"
            )
        if self._sharded_over == 1:
            for name in ("gather_dtype", "reshard_after_forward", "cpu_offload"):
                value = getattr(s, name)
                if value != getattr(attrs.fields(type(s)), name).default:
                    raise StrategyError(
                        f"{name}={value!r} has no effect where all {self.shard_size} ranks of a copy divide its layers "
                        f"(tp_size={s.tp_size}): leave it out"
                    )

    def compute_in(self, dtype: torch.dtype) -> None:
        # The frozen weights beside an adapter are read in that dtype, and the adapter's own are whole: autocast casts those.
        if dtype != torch.bfloat16 or self.adapter or self._sharded_over == 1:
            return
        if self.settings.gather_dtype == "auto":
            self.settings = attrs.evolve(self.settings, gather_dtype="bfloat16")
        self.autocasts = self.settings.gather_dtype != "bfloat16"

    def read(self, request: LoadRequest) -> "PreTrainedModel":
        if request.quantization is not None:
            # `wrap` shards it, once the adapter is there.
            if torch.__version__.startswith("2.11."):
                raise StrategyError(
                    f"torch {torch.__version__} cannot divide weights that are codes: train a quantized base with "
                    "strategy=ddp, or install a newer torch"
                )
            if self.settings.gather_dtype == "bfloat16":
                raise StrategyError(
                    "gather_dtype=bfloat16 is for weights that are numbers, and a quantized base is codes: leave it out"
                )
            if self.settings.ep_size > 1:
                raise StrategyError(
                    "ep_size divides experts while they are read, and a quantized base is read whole: leave it out"
                )
            return super().read(request)
        from transformers.distributed import DistributedConfig

        sizes = {"tp_size": self.settings.tp_size, "ep_size": self.settings.ep_size}
        check_model_path(request.model_path, task=request.task)
        check_divisible(request.model_path, **sizes, task=request.task)
        # Experts are not divided by tp_size: ep_size and the shards cover all ranks of a copy (DistributedConfig.efsdp_size).
        shards = self.shard_size // self.settings.ep_size if self.settings.ep_size > 1 else self._sharded_over
        check_expert_shards(request.model_path, shards=shards, ep_size=self.settings.ep_size, task=request.task)
        divided = DistributedConfig(
            fsdp_size=self._sharded_over,
            dp_replicate_size=self.dims.dp_replicate if self.dims.dp_replicate > 1 else None,
            fsdp_cpu_offload=self.settings.cpu_offload,
            fsdp_mixed_precision=self.settings.gather_dtype == "bfloat16",
            **sizes,
        )
        with placeholders() as unmade:
            repair = partial(place_again, unmade=unmade)
            model = read_model(request, self.device, broadcast=self.broadcast, divided=divided, repair=repair)
        self._check_shards(model, request.model_path)
        set_buffers(model)
        own_shards(model)
        self._configure_groups(model)
        return model

    def read_frozen(self, request: LoadRequest) -> "PreTrainedModel":
        model = super().read_frozen(request)
        for module in fsdp_modules(model):
            # No backward follows, for which the last group's weights would stay gathered.
            module.set_reshard_after_forward(True, recurse=False)
        return model

    def _check_shards(self, model: "PreTrainedModel", model_path: str) -> None:
        # transformers only logs a plan that fits no module.
        whole = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
        if whole and self._sharded_over > 1:
            raise StrategyError(f"model_path {model_path}: {whole[0]} is not divided by {self.name}: use strategy=ddp")
        if name := broken_tie(model):
            raise StrategyError(
                f"model_path {model_path}: its config.json ties {name}, and its files hold other values for it: set"
                " tie_word_embeddings to false there, or use strategy=ddp"
            )

    def _configure_groups(self, model: nn.Module) -> None:
        for module in fsdp_modules(model):
            # Gloo cannot divide while it sums, and NCCL's way of it gave zeros in bfloat16 (pytorch#190747).
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        root = next(fsdp_modules(model), None)
        if root is not None and self.settings.reshard_after_forward != "auto":
            root.set_reshard_after_forward(self.settings.reshard_after_forward == "always")

    def settle(self, model: nn.Module) -> None:
        # A forward leaves the last group's weights gathered for a backward. Those are no parameters to train, nor to freeze.
        resharded(model)
        if self.adapter and self.dims.dp_replicate > 1:
            self._placeholders = WholeShapePlaceholders(model)

    def wrap(self, model: nn.Module, make_optimizer: MakeOptimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        wrapped, optimizer = super().wrap(model, make_optimizer)
        check_sharded(self.name, optimizer)
        move_one_by_one(optimizer)
        return wrapped, optimizer

    def wrap_model(self, model: nn.Module) -> nn.Module:
        resharded(model)
        if self._placeholders is not None:
            self._placeholders.restore()
        base = base_of(model)  # pyrefly: ignore[bad-argument-type]  it came from `load`
        if awaits_sharding(base):
            sizes = (self.dims.dp_replicate, self.shard_size)
            shard_quantized(base, device=self.device, sizes=sizes, cpu_offload=self.settings.cpu_offload, media=self.media)
            self._configure_groups(model)
        unshard_copied_modules(model)
        self._root = next(fsdp_modules(model), None)
        self._replicated = replicated(model)
        if self.settings.tp_size > 1:
            self._partial = partial_parameters(model)
            sizes = (self.world_size // self.settings.tp_size, self.settings.tp_size)
            self._meshes = init_device_mesh(self.device.type, sizes, mesh_dim_names=("data", "tp"))
        for parameter in self._replicated:
            # With cpu_offload an adapter was put beside its base weight, in the host's memory; it computes on the device.
            exchange(parameter, parameter.detach().to(self.device))
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                # So do the buffers that an adaptation keeps beside its parameters.
                if buffer.device != self.device:
                    setattr(module, name, buffer.to(self.device))
        broadcast(self._replicated, self.ranks.group)
        gather_before_lookup(model)
        return model

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        return self._micro_batch(last)

    @contextmanager
    def _micro_batch(self, last: bool) -> Iterator[None]:
        # Gradients that wait for the last micro-batch wait unsharded, as large as the model: only those who keep the weights
        # gathered between forward and backward have that room. Otherwise each micro-batch's are sharded at once, within a copy
        # of the model.
        waits = self.settings.reshard_after_forward == "never"
        if self._root is not None:
            self._root.set_requires_gradient_sync(last or not waits)
        if self._root is not None and not waits:
            self._root.set_requires_all_reduce(last)
        yield
        if not last:
            return
        # The ranks that divide a layer compute the same gradient of what each of them holds whole.
        meshes = self._meshes
        if self._replicated:
            sum_grads(self._replicated, self.ranks.group if meshes is None else meshes.get_group("data"))
        if self._partial and meshes is not None:
            sum_local_grads(self._partial, meshes.get_group("tp"))
