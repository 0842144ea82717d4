"""A strategy as another package would bring it: tensor parallelism of the MLPs over pairs of ranks, which share a data shard.

The tests install it beside an entry point of the group `forge.strategies`; nothing in forge_dist knows of it.
"""

from contextlib import contextmanager

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import forge_dist

PAIR = 2

SPEC = forge_dist.StrategySpec(
    strategy="outside_strategy:TensorParallel",
    about="MLPs divided over pairs of ranks",
    options=("shard_size",),
    optimizer_gets="shards",
)


class TensorParallel(forge_dist.TorchStrategy):
    """Copies of the model, the MLPs of each divided over two ranks, which read the same micro-batches."""

    divides = True

    def __init__(self, settings, ranks, **how):
        super().__init__(settings, ranks, **how)
        if ranks.world_size % PAIR:
            raise forge_dist.StrategyError(f"strategy={self.name} takes pairs of ranks, and there are {ranks.world_size}")

    @property
    def dims(self):
        return forge_dist.ParallelDims(dp_replicate=self.world_size // PAIR, non_data=PAIR)

    def read(self, request):
        model = super().read(request)
        sizes = (self.data_parallel_size, PAIR)
        self.mesh = init_device_mesh(self.device.type, sizes, mesh_dim_names=("dp_replicate", "tp"))
        plan = {"gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
        for layer in model.model.layers:
            parallelize_module(layer.mlp, self.mesh["tp"], plan)
        return model

    def wrap_model(self, model):
        self.trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return model

    @contextmanager
    def micro_batch(self, last):
        yield
        for parameter in self.trained if last else ():
            grad = parameter.grad
            local = grad.to_local() if hasattr(grad, "to_local") else grad
            torch.distributed.all_reduce(local, group=self.mesh.get_group("dp_replicate"))
