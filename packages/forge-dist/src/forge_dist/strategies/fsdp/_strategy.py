"""FSDP2 through transformers: each rank reads its own shards, and a layer's weights are whole only while it computes.

What transformers lacks is here: gradients as sums, adapters that are attached after sharding kept in step, accumulation, and the
reasons why a model cannot be divided.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from forge_dist._errors import StrategyError
from forge_dist._settings import StrategySettings
from forge_dist.adapters._adapter import base_of
from forge_dist.loading._attention import AttentionFunction
from forge_dist.loading._fsdp_groups import untied
from forge_dist.loading._load import read_model
from forge_dist.loading._model_path import Task
from forge_dist.strategies._optimizer_support import check_divided
from forge_dist.strategies._replicated import broadcast, made_whole, replicated, sum_grads
from forge_dist.strategies._strategy import MakeOptimizer
from forge_dist.strategies._torch import Divided
from forge_dist.strategies._virtual_tokens import gather_before_lookup
from forge_dist.strategies._wrappers import fsdp_modules, resharded
from forge_dist.strategies.fsdp._adapter import StandIns
from forge_dist.strategies.fsdp._quantized import divide_quantized, is_undivided

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.utils.quantization_config import QuantizationConfigMixin

    from forge_dist.ranks._ranks import Ranks


class FSDP(Divided):
    """fsdp2 (`shard_size` is the number of ranks) and hsdp (copies of the model, each sharded over `shard_size` ranks)."""

    def __init__(
        self,
        settings: StrategySettings,
        ranks: "Ranks",
        *,
        device: torch.device,
        name: str,
        reason: str,
        shard_size: int,
        adapter: bool,
    ) -> None:
        super().__init__(settings, ranks, device=device, name=name, reason=reason)
        self.shard_size = shard_size
        self._adapter = adapter
        self._stand_ins: StandIns | None = None
        self._root: FSDPModule | None = None
        self._replicated: list[nn.Parameter] = []

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
        if quantization is not None:
            # `wrap` divides it, once the adapter is there.
            self._refuse_gather_dtype()
            return super().load(
                model_path,
                dtype=dtype,
                attention=attention,
                attention_function=attention_function,
                task=task,
                quantization=quantization,
            )
        from transformers.distributed import DistributedConfig

        sizes = DistributedConfig(
            fsdp_size=self.shard_size,
            dp_replicate_size=self.world_size // self.shard_size,
            fsdp_cpu_offload=self.settings.cpu_offload,
            fsdp_mixed_precision=self.settings.gather_dtype == "bfloat16",
        )
        model = read_model(
            model_path,
            dtype=dtype,
            attention=attention,
            attention_function=attention_function,
            task=task,
            share=self._of_first,
            divided=sizes,
        )
        self._check_shards(model, model_path)
        self._settle_groups(model)
        return model

    def _settle_groups(self, model: nn.Module) -> None:
        for module in fsdp_modules(model):
            # Gloo cannot divide while it sums, and NCCL's way of it gave zeros in bfloat16 (pytorch#190747).
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        if self.settings.reshard_after_forward != "auto":
            self._root_of(model).set_reshard_after_forward(self.settings.reshard_after_forward == "always")

    def _refuse_gather_dtype(self) -> None:
        if self.settings.gather_dtype == "bfloat16":
            raise StrategyError(
                "gather_dtype=bfloat16 is for weights that are numbers, and a quantized base is codes: leave it out"
            )

    def load_frozen(self, model_path: str, **how: Any) -> "PreTrainedModel":
        model = super().load_frozen(model_path, **how)
        for module in fsdp_modules(model):
            # No backward follows, for which the last weights would stay whole.
            module.set_reshard_after_forward(True, recurse=False)
        return model

    def _check_shards(self, model: "PreTrainedModel", model_path: str) -> None:
        # A plan that fits no module is only a line in transformers' log.
        whole = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
        if whole:
            raise StrategyError(f"model_path {model_path}: {whole[0]} is not divided by {self.name}: use strategy=ddp")
        if name := untied(model):
            raise StrategyError(
                f"model_path {model_path}: its config.json ties {name}, and its files hold other values for it: set"
                " tie_word_embeddings to false there, or use strategy=ddp"
            )

    def _root_of(self, model: nn.Module) -> FSDPModule:
        return next(fsdp_modules(model))

    def settle(self, model: nn.Module) -> None:
        # A forward leaves the last group's weights whole for a backward to come. They are no parameters to train, nor to freeze.
        resharded(model)
        if self._adapter and self.shard_size < self.world_size:
            self._stand_ins = StandIns(model)

    def wrap(self, model: nn.Module, make_optimizer: MakeOptimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        wrapped, optimizer = super().wrap(model, make_optimizer)
        check_divided(self.name, optimizer)
        return wrapped, optimizer

    def _wrap(self, model: nn.Module) -> nn.Module:
        resharded(model)
        if self._stand_ins is not None:
            self._stand_ins.restore()
        base = base_of(model)  # pyrefly: ignore[bad-argument-type]  it came from `load`
        if is_undivided(base):
            divide_quantized(
                base,
                device=self.device,
                world_size=self.world_size,
                shard_size=self.shard_size,
                cpu_offload=self.settings.cpu_offload,
            )
            self._settle_groups(model)
        made_whole(model)
        self._root = self._root_of(model)
        self._replicated = replicated(model)
        for parameter in self._replicated:
            # With cpu_offload an adapter was put beside its base weight, in the host's memory; it computes on the device.
            parameter.data = parameter.detach().to(self.device)
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                # And what an adaptation keeps beside its parameters.
                if buffer.device != self.device:
                    setattr(module, name, buffer.to(self.device))
        broadcast(self._replicated, self.ranks.group)
        gather_before_lookup(model)
        return model

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        return self._micro_batch(last)

    @contextmanager
    def _micro_batch(self, last: bool) -> Iterator[None]:
        assert self._root is not None
        # Gradients that wait for the last micro-batch wait whole, as large as the model: only those who keep the weights whole
        # between forward and backward have that room. Otherwise each micro-batch's are divided at once, within a copy of the model.
        waits = self.settings.reshard_after_forward == "never"
        self._root.set_requires_gradient_sync(last or not waits)
        if not waits:
            self._root.set_requires_all_reduce(last)
        yield
        if last and self._replicated:
            sum_grads(self._replicated, self.ranks.group)
