"""Load a model whose weights are partitioned over the ranks as each is read (ZeRO stage 3)."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from forge_dist._errors import ModelError
from forge_dist.loading._load import read_model
from forge_dist.loading._model_path import Task
from forge_dist.loading._outline import check_model
from forge_dist.loading._request import LoadRequest
from forge_dist.loading._task import Broadcast

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from forge_dist.ranks._ranks import Ranks


def load_partitioned(
    request: LoadRequest, ranks: "Ranks", config: dict[str, Any], *, device: torch.device, broadcast: Broadcast
) -> "PreTrainedModel":
    """Load a model for ZeRO-3: rank 0 reads each tensor, and every rank keeps its part of it.

    Raises:
        ModelError: as `load_model`, on every rank.
    """
    from transformers.integrations import HfDeepSpeedConfig
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    _check_on_first(request.model_path, ranks, task=request.task)
    # transformers keeps a weak reference: it reads this object while it builds and reads the model, and not afterwards.
    switch = HfDeepSpeedConfig(config)
    try:
        model = read_model(request, device, broadcast=broadcast)
    finally:
        unset_hf_deepspeed_config()
        del switch
    _keep_used_renamings(model)
    return model


def _keep_used_renamings(model: "PreTrainedModel") -> None:
    """Keep the renamings of files that gave a weight its name.

    So does transformers where a model is not partitioned. All of them are turned round for an export, whose names would be
    those of no release of the architecture.
    """
    from transformers.core_model_loading import WeightRenaming

    if (conversions := getattr(model, "_weight_conversions", None)) is not None:
        kept = [each for each in conversions if not isinstance(each, WeightRenaming) or each.was_used()]
        model._weight_conversions = kept  # pyrefly: ignore[bad-argument-type]  transformers' own attribute


def _check_on_first(model_path: str, ranks: "Ranks", *, task: Task) -> None:
    """Raise ModelError on all ranks unless files and architecture agree.

    Under ZeRO-3 transformers reports neither unexpected weights nor, on ranks other than 0, those of another shape.
    """
    message = None
    if ranks.is_first:
        try:
            check_model(model_path, task=task)
        except ModelError as error:
            message = str(error)
    message = ranks.broadcast(message)
    if message is not None:
        raise ModelError(str(message))


@contextmanager
def with_whole_shapes(model: nn.Module) -> Iterator[None]:
    """Give each partitioned parameter the shape of the whole one meanwhile, without its data.

    Which parameters decay follows from their number of dimensions, and a partitioned one has none of its own.
    """
    shapes = [(p, p.data, getattr(p, "ds_shape", p.shape)) for p in model.parameters()]
    hidden = [entry for entry in shapes if entry[0].shape != entry[2]]
    try:
        for parameter, data, shape in hidden:
            parameter.data = data.new_empty(()).expand(shape)
        yield
    finally:
        for parameter, data, _ in hidden:
            parameter.data = data
