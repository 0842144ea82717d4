"""What a model is loaded for → transformers' class for it; for rewards also the new head, and the id that pads a batch.

A reward is what one linear layer, `score`, gives at a row's last token.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from forge_dist._errors import ModelError
from forge_dist.loading._model_path import Task
from forge_dist.strategies.zero._parameters import is_partitioned

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

Share = Callable[[torch.Tensor], torch.Tensor]
"""A tensor on the CPU → rank 0's."""

HEAD = "score"
_NEVER_LAST = ("pad", "reserved", "unused")


def auto_class(task: Task) -> Any:
    """Transformers' factory of the classes for `task`."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    return AutoModelForSequenceClassification if task == "reward" else AutoModelForCausalLM


def is_reward(model: object) -> bool:
    """Whether `model` (not a PeftModel around it) gives rewards."""
    return type(model).__name__.endswith("ForSequenceClassification")


def reward_config(path: str) -> "PreTrainedConfig":
    """The configuration of `path` with one label and an id for padding, as an export will say it."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    pad = _pad_id(path, config.get_text_config())
    for part in (config, config.get_text_config()):
        part.num_labels = 1
        part.pad_token_id = pad
    return config


def _pad_id(path: str, config: "PreTrainedConfig") -> int | None:
    """A token that no row ends with: transformers reads a reward at the last token that is another. None where there is none.

    The end of a text is no such token, though many models name it for padding: the reward would be read before it.
    """
    known = config.eos_token_id
    ends = set(known if isinstance(known, list) else [known])
    declared = config.pad_token_id
    if declared is not None and declared >= 0 and declared not in ends:
        return declared
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception:  # noqa: BLE001  whatever it is: many models come without one
        return config.bos_token_id if config.bos_token_id not in ends else None
    special = {number: str(token) for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    named = [number for number, token in special.items() if any(word in token.lower() for word in _NEVER_LAST)]
    ends.add(tokenizer.eos_token_id)
    wishes = [tokenizer.pad_token_id, *named, tokenizer.bos_token_id, tokenizer.unk_token_id, *reversed(special)]
    return next((number for number in wishes if number is not None and number not in ends), None)


def kept_random_state(task: Task) -> AbstractContextManager[None]:
    """Around the reading of a reward model: transformers draws the new head too, by as many numbers as its division needs."""
    return torch.random.fork_rng(devices=[]) if task == "reward" else nullcontext()


def settle_head(model: "PreTrainedModel", config: "PreTrainedConfig", report: dict[str, Any], where: str, share: Share) -> None:
    """Draw the head of a reward model where the directory of a causal one was read, and take from the `report` what that explains.

    The head is drawn from N(0, initializer_range²) in float32 on the CPU, from torch's seeded state, whatever the division.

    Args:
        model: as it was read, divided or not.
        config: what the directory says that it holds, with one label.
        report: transformers' report of what was missing and left over; changed in place.
        where: the model_path, for errors.
        share: makes what this rank drew what rank 0 drew.

    Raises:
        ModelError: the architecture's head for rewards is not a linear layer `score` of one output.
    """
    head = getattr(model, HEAD, None)
    if not isinstance(head, torch.nn.Linear):
        raise ModelError(f"model_path {where}: {type(model).__name__} has no linear layer {HEAD!r}, so it cannot give rewards")
    names = {f"{HEAD}.{name}" for name, _ in head.named_parameters()}
    if is_classifier(config) or not names <= set(report["missing_keys"]):
        return
    report["missing_keys"] = set(report["missing_keys"]) - names
    if report["unexpected_keys"]:
        report["unexpected_keys"] = set(report["unexpected_keys"]) - _causal_head(config)
    spread = getattr(config.get_text_config(), "initializer_range", 0.02)
    drawn = share(torch.empty(1, head.in_features).normal_(0.0, spread))
    with torch.no_grad():
        _put(head.weight, drawn)
        if head.bias is not None:
            _put(head.bias, torch.zeros(1))


def is_classifier(config: Any) -> bool:
    """Whether a configuration (or its dictionary) is that of a directory with a classification head."""
    found = config.get("architectures") if isinstance(config, dict) else config.architectures
    return any(str(name).endswith("ForSequenceClassification") for name in found or ())


def _causal_head(config: "PreTrainedConfig") -> set[str]:
    """The tensors that a causal model of this configuration has, and a reward model has not."""
    with torch.device("meta"):
        causal, reward = (auto_class(task).from_config(config, trust_remote_code=False) for task in ("causal", "reward"))
    return set(causal.state_dict()) - set(reward.state_dict())


def _put(parameter: torch.Tensor, whole: torch.Tensor) -> None:
    """Set a parameter, divided or not, to the same values on every rank."""
    if is_partitioned(parameter):
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            parameter.copy_(whole)
        return
    whole = whole.to(device=parameter.device, dtype=parameter.dtype)
    if isinstance(parameter, DTensor):
        whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.copy_(whole)
