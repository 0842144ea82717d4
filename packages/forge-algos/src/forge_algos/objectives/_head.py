"""A model → how its learned positions are scored, decided once, with the reason.

The fast way runs the decoder alone and gives its hidden states and the head's weight to the chunked loss: logits exist for a
few hundred labelled rows at a time. It is right only if the head is that weight and nothing else, or something that the loss
knows (a scale, a softcap), so the model itself is asked first. Otherwise the model computes its own logits, at the labelled
positions alone.
"""

import inspect
from typing import Any, Literal

import attrs
import torch
from torch import nn

from forge_algos._isolation import packed_inputs
from forge_algos._modules import causal_model, decoder, head, mode, vocabulary
from forge_algos.losses import LossTerms, nll, nll_of_logits

_PROBED_TOKENS = 4
_PROBED_LOGIT = 50.0
"""The probe's largest logit: big enough that a softcap (30 in Gemma 2) shows, which a fresh model's own logits would hide."""


@attrs.frozen(kw_only=True, eq=False)
class Head:
    """How learned positions are scored, and why so. Call it with the forward's inputs, the rows and their targets."""

    model: nn.Module = attrs.field(repr=False)
    name: Literal["chunked", "logits"]
    """"chunked": decoder, then the chunked loss on the head's weight. "logits": the model's own logits at those rows."""
    reason: str
    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, inputs: dict[str, Any], rows: torch.Tensor, targets: torch.Tensor) -> LossTerms:
        """Inputs of one row [1, T] → the terms of rows int64[M] with targets int64[M]."""
        if self.name == "chunked":
            body, linear = decoder(self.model), head(self.model)
            assert body is not None
            assert isinstance(linear, nn.Linear)
            hidden_MD = body(**inputs).last_hidden_state[0].index_select(0, rows)
            return nll(
                hidden_MD,
                linear.weight,
                targets,
                bias=linear.bias,
                scale=self.scale,
                softcap=self.softcap,
                ignore_index=None,
            )
        if "logits_to_keep" in inspect.signature(causal_model(self.model).forward).parameters:
            return nll_of_logits(self.model(**inputs, logits_to_keep=rows).logits[0], targets)
        return nll_of_logits(self.model(**inputs).logits[0].index_select(0, rows), targets)


def choose_head(model: nn.Module, *, device: torch.device) -> Head:
    """Compare the decoder and the head's weight with the model's own logits on a few tokens, and take the fast way if equal.

    Leaves the model's modes, its gradients and the random state as they were.
    """
    linear = head(model)
    if decoder(model) is None or linear is None:
        return Head(model=model, name="logits", reason="the model names no decoder or no head of its own")
    if not isinstance(linear, nn.Linear) or type(linear).forward is not nn.Linear.forward:
        kind = f"{type(linear).__module__}.{type(linear).__qualname__}"
        return Head(model=model, name="logits", reason=f"the head is no plain linear layer but {kind}")
    if linear._forward_hooks or linear._forward_pre_hooks:
        return Head(model=model, name="logits", reason="the head has forward hooks, which scoring by its weight would skip")
    scale, softcap = _transform(getattr(causal_model(model), "config", None))
    problem = _probe(model, linear, device, scale, softcap)
    if problem:
        return Head(model=model, name="logits", reason=problem)
    how = "".join([f", scaled by {scale:g}" if scale != 1 else "", f", capped at {softcap:g}" if softcap else ""])
    return Head(
        model=model,
        name="chunked",
        reason=f"decoder and {type(linear).__name__} head{how} give the model's own logits on {_PROBED_TOKENS} tokens",
        scale=scale,
        softcap=softcap,
    )


def _transform(config: Any) -> tuple[float, float | None]:
    """(scale, softcap) of the logits, as the families that have one write it in their config; the probe judges."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    scale = 1.0
    if (divisor := getattr(text, "logits_scaling", None)) is not None:  # Granite
        scale /= divisor
    for name in ("logit_scale", "lm_head_multiplier"):  # Cohere; Falcon-H1
        if isinstance(factor := getattr(text, name, None), int | float):
            scale *= factor
    return scale, getattr(text, "final_logit_softcapping", None)  # Gemma 2, 3, 4


def _probe(model: nn.Module, linear: nn.Linear, device: torch.device, scale: float, softcap: float | None) -> str | None:
    """Why the fast way would be wrong, or None.

    One forward of the model, in which the head is fed a large made-up input: so what stands behind the head shows at any size
    of the model's own logits. What the head would have been fed is compared with what the decoder gives.
    """
    body = decoder(model)
    assert body is not None
    vocab = vocabulary(model) or linear.out_features
    ids = torch.arange(_PROBED_TOKENS, device=device).mul(vocab // _PROBED_TOKENS)
    inputs = packed_inputs(ids, torch.arange(_PROBED_TOKENS, device=device), torch.tensor([0, _PROBED_TOKENS]), _PROBED_TOKENS)
    fed: list[torch.Tensor] = []
    made_up: list[torch.Tensor] = []

    def replace(_module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        fed.append(args[0])
        pattern = torch.arange(args[0].numel(), device=device, dtype=torch.float32).sin().view(args[0].shape)
        largest = nn.functional.linear(pattern.to(linear.weight.dtype), linear.weight).abs().max().float()
        made_up.append((pattern * (_PROBED_LOGIT / scale / largest)).to(args[0].dtype))
        return (made_up[-1],)

    with mode(model, training=False), torch.no_grad():
        handle = linear.register_forward_pre_hook(replace)
        try:
            logits = model(**inputs).logits
        finally:
            handle.remove()
        if len(fed) != 1:
            return f"the model calls its head {len(fed)} times in a forward, not once"
        hidden = body(**inputs).last_hidden_state
        if hidden.shape != fed[0].shape or not _close(hidden, fed[0]):
            return "what the decoder gives is not what the head is fed"
        expected = nn.functional.linear(made_up[0].to(linear.weight.dtype), linear.weight, linear.bias).float() * scale
        if softcap is not None:
            expected = torch.tanh(expected / softcap) * softcap
        if expected.shape != logits.shape or not _close(expected, logits):
            return "the model's logits are not its head's output, nor a scale or a softcap of it that its config names"
    return None


def _close(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Equal as far as the coarser dtype can say, beside the largest value."""
    tolerance = 64 * max(torch.finfo(ours.dtype).eps, torch.finfo(theirs.dtype).eps)
    largest = theirs.float().abs().max()
    return bool((ours.float() - theirs.float()).abs().max() <= min(tolerance, 0.05) * largest)
