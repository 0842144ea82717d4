"""Small random model of a directory's configuration.

What an architecture does can be tried on it before data are tokenized and weights are read.
"""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from forge_dist._errors import ModelError
from forge_dist._third_party_logs import quiet_transformers
from forge_dist.loading._attention import register_attention
from forge_dist.loading._config_changes import choose_experts
from forge_dist.loading._load import LOADING_ERRORS, check_attention_fits
from forge_dist.loading._model_path import Task, expand_user, is_hub_name
from forge_dist.loading._moving import moved
from forge_dist.loading._request import LoadRequest
from forge_dist.loading._task import auto_class, task_config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_VOCABULARY = 256
_WIDTH = 64
"""Largest inner width of a feed-forward layer or an expert."""
_WINDOW = 16
"""Largest window or chunk of attention, so that short documents cross it."""
_LAYERS = 12
_PARAMETERS = 60_000_000
_SCALES = (1, 2, 4, 8, 16)
"""Divisors of the attention's widths that are tried until the model is small."""
_RHYTHM = re.compile("interval|period|offset|freq|first_k|every|_step|pattern")
"""Names of a configuration's numbers that say which layers are of which kind."""


def draft_model(request: LoadRequest, *, device: torch.device) -> "PreTrainedModel | None":
    """Make a small random float32 model of a directory's configuration, in eval mode.

    It has the first layers, to one of each kind, the widths of the attention, narrow feed-forward layers and experts, a small
    vocabulary, and windows of 16 tokens at most. No weight is read, and torch's random state stays as it was.

    Args:
        request: model, task and attention; of a model of several modalities the language part alone is made.
        device: where it goes.

    Returns:
        PreTrainedModel: the model; None for a name on the hub, and where no such model can be made or would be large.

    Raises:
        ModelError: the attention is unknown, or does not fit the architecture.
    """
    if is_hub_name(request.model_path):
        return None
    register_attention(request.attention, request.attention_function)
    errors = (*LOADING_ERRORS, ModelError)
    with quiet_transformers(bars=False), torch.random.fork_rng(devices=[]):
        try:
            found = _of_a_size(expand_user(request.model_path), request.task)
        except errors:
            return None
        if found is None:
            return None
        config, kind = found
        torch.manual_seed(0)
        try:
            how = {"dtype": torch.float32, "attn_implementation": request.attention}
            model = kind.from_config(config, trust_remote_code=False, **how)
        except errors as error:
            raise ModelError(f"model_path {request.model_path} does not take attention={request.attention}: {error}") from error
        with torch.no_grad():
            for parameter in model.parameters():
                # Weights as small as new ones' would hide most of what a layer does.
                parameter.add_(torch.randn_like(parameter), alpha=parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.1)
    choose_experts(model)
    check_attention_fits(model, request)
    return moved(model, device).eval()


def _of_a_size(path: str, task: Task) -> "tuple[PreTrainedConfig, Any] | None":
    """Return the configuration and class of a model below the bound, None where none is."""
    for scale in _SCALES:
        config = _small(path, task, scale)
        kind = auto_class(task, config)
        with torch.device("meta"):
            model = kind.from_config(config, trust_remote_code=False)
        if sum(p.numel() for p in model.parameters()) <= _PARAMETERS:
            return config, kind
    return None


def _small(path: str, task: Task, scale: int) -> "PreTrainedConfig":
    """Return the configuration of a small model with the layers of the one at `path`.
    Its attention is `scale` times narrower.
    """
    config = task_config(path, task)
    config._attn_implementation = None
    # A text model inside a larger one is what the class for text is made from.
    config = config.get_text_config()
    config.architectures = None
    known = config.to_dict()
    layers = known.get("num_hidden_layers") or config.num_hidden_layers
    number = min(layers, _first_of_each_kind(known, layers))
    for name, value in known.items():
        if isinstance(value, list) and len(value) == layers:
            setattr(config, name, value[:number])
        elif name.endswith(("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner")) and isinstance(value, int):
            setattr(config, name, min(value, _WIDTH))
        elif name in {"sliding_window", "attention_chunk_size"} and isinstance(value, int):
            setattr(config, name, min(value, _WINDOW))
        elif name in {"hidden_size", "num_attention_heads", "num_key_value_heads"} and isinstance(value, int):
            setattr(config, name, value // scale if value % scale == 0 else value)
        elif name.endswith("token_id") and isinstance(value, int):
            setattr(config, name, min(value, _VOCABULARY - 1))
        elif name.startswith("vocab_size") and isinstance(value, int):
            setattr(config, name, min(value, _VOCABULARY))
        elif name == "num_kv_shared_layers":
            # Those that share are the last ones, which are left out.
            setattr(config, name, 0)
    config.num_hidden_layers = number
    return config


def _first_of_each_kind(known: dict[str, Any], layers: int) -> int:
    """Return how many of the first layers have one of each kind among them."""
    several = [value for value in known.values() if isinstance(value, list) and len(value) == layers]
    numbers = [2, *(value.index(kind) + 1 for value in several for kind in value if value.index(kind) < _LAYERS)]
    numbers += [number for number in _rhythms(known) if number <= _LAYERS]
    return max(numbers)


def _rhythms(known: dict[str, Any]) -> Iterator[int]:
    for name, value in known.items():
        if _RHYTHM.search(name) and isinstance(value, int) and not isinstance(value, bool):
            yield value + ("offset" in name)
