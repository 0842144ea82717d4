"""Strategy ddp, by torch's DistributedDataParallel: gradients are summed, never averaged."""

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed import GradBucket, ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from forge_dist.strategies._torch import TorchStrategy

# torch 2.13 warns at the older name, and 2.11 does not know the newer one.
_NEWER = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
_NO_BUFFERS: dict[str, Any] = {"forward_sync_buffers" if _NEWER else "broadcast_buffers": False}


class DDP(TorchStrategy):
    """Whole copies of the model; for models that fit on each rank, and for adapters."""

    _model: DistributedDataParallel | None = None

    def wrap_model(self, model: nn.Module) -> nn.Module:
        # Its constructor makes every rank's weights rank 0's.
        self._model = DistributedDataParallel(
            model,
            process_group=self.ranks.group,
            **_NO_BUFFERS,
            gradient_as_bucket_view=True,
            find_unused_parameters=_leaves_out_layers(model),
        )
        self._model.register_comm_hook(self.ranks.group, _sum_bucket)
        return self._model

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last or self._model is None else self._model.no_sync()


def _leaves_out_layers(model: nn.Module) -> bool:
    """Tell whether a model leaves out some layers in rows without images (Mllama)."""
    return any(getattr(getattr(module, "config", None), "cross_attention_layers", None) for module in model.modules())


def _sum_bucket(group: ProcessGroup | None, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Sum a bucket of gradients over ranks.

    DDP's own hook divides by the number of ranks; multiplying again would round.
    """
    buffer = bucket.buffer()
    if buffer.device.type == "cpu":
        summed: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        summed.set_result(_sum_in_order(buffer, group))
        return summed
    work: Any = distributed.all_reduce(buffer, group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def _sum_in_order(buffer: torch.Tensor, group: ProcessGroup | None) -> torch.Tensor:
    """Sum over ranks in place, each value in the order of the ranks, wherever it stands.

    In a ring the order depends on the position, and DDP rearranges its buffers after the first step of a process: a run that
    was stopped and resumed would add up in another order than one that was not.
    """
    world_size = distributed.get_world_size(group)
    share = -(-buffer.numel() // world_size)
    sent = buffer.new_zeros(world_size * share)
    sent[: buffer.numel()] = buffer
    received = torch.empty_like(sent)
    distributed.all_to_all_single(received, sent, group=group)
    shares = received.view(world_size, share)
    total = shares[0]
    for other in shares[1:]:
        total += other
    parts = list(sent.view(world_size, share))
    distributed.all_gather(parts, total, group=group)
    return buffer.copy_(sent[: buffer.numel()])
