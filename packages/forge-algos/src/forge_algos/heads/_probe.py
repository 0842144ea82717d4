"""Test whether a model's logits are its head's output and nothing else, in one forward."""

import torch
from torch import nn

from forge_algos._modules import mode, text_config, virtual_tokens, vocabulary
from forge_algos.batches._packed import packed_inputs
from forge_algos.heads._forward_override import override_forward
from forge_algos.heads._layout import lay_out

PROBED_TOKENS = 4
_PROBED_LOGIT = 50.0
"""Largest logit of the probe: enough to show a softcap (30 in Gemma 2),
which a fresh model's own logits would hide."""


def transform_of(model: nn.Module) -> tuple[float, float | None]:
    """Return (scale, softcap) of the logits as the model's config names them.
    These are the names of the families that have one; the probe decides.
    """
    text = text_config(model)
    scale = 1.0
    if (divisor := getattr(text, "logits_scaling", None)) is not None:  # Granite
        scale /= divisor
    for name in ("logit_scale", "lm_head_multiplier"):  # Cohere; Falcon-H1
        if isinstance(factor := getattr(text, name, None), int | float):
            scale *= factor
    return scale, getattr(text, "final_logit_softcapping", None)  # Gemma 2, 3, 4


def problem_of(model: nn.Module, linear: nn.Linear, device: torch.device, scale: float, softcap: float | None) -> str | None:
    """Return why the fast way would be wrong, or None.

    One forward of the model, in which the head returns logits of a large made-up input: so whatever follows the head shows at
    any size of the model's own logits. It returns one row less than it is fed: a model that depends on which row is which, or
    on their number, could not do with the one row that stands for all while the loss is computed. The head's weight is read
    inside its own call only, where a model divided over ranks has it whole.
    """
    vocab = vocabulary(model) or linear.out_features
    ids = torch.arange(PROBED_TOKENS, device=device).mul(vocab // PROBED_TOKENS)
    inputs = packed_inputs(ids, torch.arange(PROBED_TOKENS, device=device), torch.tensor([0, PROBED_TOKENS]), PROBED_TOKENS)
    wanted = {(1, PROBED_TOKENS), (1, PROBED_TOKENS + virtual_tokens(model))}
    fed: list[tuple[int, ...]] = []
    expected: list[torch.Tensor] = []

    def answer(hidden: torch.Tensor) -> torch.Tensor:
        fed.append(tuple(hidden.shape))
        if fed[-1][:-1] not in wanted:
            return nn.functional.linear(hidden, linear.weight, linear.bias)
        pattern = torch.arange(hidden.numel(), device=device, dtype=torch.float32).sin().view(hidden.shape)[:, 1:]
        pattern = pattern.to(linear.weight.dtype)
        largest = nn.functional.linear(pattern, linear.weight).abs().max().float()
        logits = nn.functional.linear(
            (pattern.float() * (_PROBED_LOGIT / scale / largest)).to(pattern.dtype), linear.weight, linear.bias
        )
        transformed = logits.float() * scale
        expected.append(transformed if softcap is None else torch.tanh(transformed / softcap) * softcap)
        return logits

    try:
        with mode(model, training=False), torch.no_grad(), override_forward(linear, answer):
            logits = model(**lay_out(model, inputs).inputs).logits
    except torch.OutOfMemoryError:
        raise
    except (IndexError, RuntimeError, ValueError) as error:
        return f"the model needs all rows of its logits ({error})"
    if len(fed) != 1:
        return f"the model calls its head {len(fed)} times in a forward, not once"
    if fed[0][:-1] not in wanted:
        return f"the head is fed {list(fed[0])} for a row of {PROBED_TOKENS} tokens"
    if expected[0].shape != logits.shape or not _close(expected[0], logits):
        return "the model's logits are not its head's output, nor a scale or a softcap of it that its config names"
    return None


def _close(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Compare within 64 units in the last place of the coarser dtype, 0.05 at most.
    The bound is relative to the largest value.
    """
    tolerance = 64 * max(torch.finfo(ours.dtype).eps, torch.finfo(theirs.dtype).eps)
    largest = theirs.float().abs().max()
    return bool((ours.float() - theirs.float()).abs().max() <= min(tolerance, 0.05) * largest)
