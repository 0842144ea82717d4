"""Load a model whose weights are partitioned over the ranks as each is read (ZeRO stage 3)."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from forge_dist._errors import ModelError
from forge_dist._third_party_logs import quiet_transformers
from forge_dist.loading._load import LOADING_ERRORS, check_report, read_model
from forge_dist.loading._model_path import Task, check_model_path, expand_user, is_hub_name
from forge_dist.loading._request import LoadRequest
from forge_dist.loading._task import Broadcast, auto_class, init_reward_head, reward_config

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

    _check_on_first(request.model_path, ranks, dtype=request.dtype, task=request.task)
    # transformers keeps a weak reference: it reads this object while it builds and reads the model, and not afterwards.
    switch = HfDeepSpeedConfig(config)
    try:
        return read_model(request, device, broadcast=broadcast)
    finally:
        unset_hf_deepspeed_config()
        del switch


def _check_on_first(model_path: str, ranks: "Ranks", *, dtype: torch.dtype, task: Task) -> None:
    """Raise ModelError on all ranks unless files and architecture agree.

    Under ZeRO-3 transformers reports neither unexpected weights nor, on ranks other than 0, those of another shape.
    """
    message = None
    if ranks.is_first:
        try:
            _check(model_path, dtype, task)
        except ModelError as error:
            message = str(error)
    message = ranks.broadcast(message)
    if message is not None:
        raise ModelError(str(message))


def _check(model_path: str, dtype: torch.dtype, task: Task) -> None:
    from transformers import AutoConfig

    check_model_path(model_path, task=task)
    try:
        with quiet_transformers(bars=is_hub_name(model_path)), torch.random.fork_rng(devices=[]):
            path = expand_user(model_path)
            config = reward_config(path) if task == "reward" else AutoConfig.from_pretrained(path, trust_remote_code=False)
            model, report = auto_class(task, config).from_pretrained(
                path,
                dtype=dtype,
                device_map="meta",
                attn_implementation="eager",  # a kernel that the directory names is not downloaded for this check
                use_safetensors=True,
                trust_remote_code=False,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                **({"config": config} if task == "reward" else {}),
            )
            if task == "reward":
                init_reward_head(model, config, report, model_path, lambda drawn: drawn)
    except LOADING_ERRORS as error:
        raise ModelError(f"model_path {model_path} cannot be loaded: {error}") from error
    check_report(report, model_path)


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
