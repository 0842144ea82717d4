"""A model and samples → its loss, one unpadded sample at a time, with plain attention, no dropout and no autocast."""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from forge_dist._adapter import base_of, unwrapped

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

Sample = tuple[Any, Any]
"""(input_ids [S], labels [S]): whole numbers in anything that torch.tensor takes; a label of -100 is not learned."""

IGNORED = -100


class Score(NamedTuple):
    """A loss before its division."""

    nll: float  # summed negative log-likelihood in nats
    loss_tokens: int
    in_16_bits: bool = False  # whether the logits came in 16 bits

    @property
    def mean(self) -> float:
        """Nats per learned token."""
        return self.nll / self.loss_tokens


def score(model: "PreTrainedModel | PeftModel | torch.nn.Module", samples: Sequence[Sample], device: torch.device) -> Score:
    """Sum over `samples` of -log p(labels[t] | input_ids[:t]) for every t > 0 with a label, in float32.

    Only learned positions are sent through the head where the architecture allows it, so [S, V] logits need not fit. A divided model is
    called as what its strategy put around it, by all ranks together.
    """
    selects = "logits_to_keep" in inspect.signature(base_of(unwrapped(model)).forward).parameters
    nll, count, in_16_bits = 0.0, 0, False
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        for input_ids, labels in samples:
            input_ids_S, labels_S = _vector(input_ids, device), _vector(labels, device)
            positions = (labels_S[1:] != IGNORED).nonzero().squeeze(1)
            if not len(positions):
                continue
            keep = {"logits_to_keep": positions} if selects else {}
            logits = model(input_ids=input_ids_S[None], use_cache=False, **keep).logits[0]
            logits = logits if selects else logits[positions]
            nll += torch.nn.functional.cross_entropy(logits.float(), labels_S[1:][positions], reduction="sum").item()
            count += len(positions)
            in_16_bits = logits.element_size() == 2
    return Score(nll, count, in_16_bits)


def has_learned_token(labels: Any) -> bool:
    """Whether a label [S] beside the first one, which nothing predicts, counts."""
    return any(int(label) != IGNORED for label in labels[1:])


def _vector(values: Any, device: torch.device) -> torch.Tensor:
    # A copy: memory-mapped arrays cannot be written, and torch warns when it shares one.
    copied = values.clone() if isinstance(values, torch.Tensor) else torch.tensor(values)
    return copied.to(device=device, dtype=torch.long)


@contextmanager
def as_for_inference(model: torch.nn.Module, base: "PreTrainedModel", attention: str) -> Iterator[None]:
    """Every module of `model` in eval mode and `base` on `attention`; then each as it was (some may be in eval mode by intent)."""
    training = {module: module.training for module in model.modules()}
    before = str(base.config._attn_implementation)
    model.eval()
    base.set_attn_implementation(attention)
    try:
        yield
    finally:
        base.set_attn_implementation(before)
        for module, mode in training.items():
            module.training = mode
