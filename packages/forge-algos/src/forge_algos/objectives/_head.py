"""A model → how its learned positions are scored, decided once, with the reason.

The fast way computes the chunked loss in the head's place, from the hidden states that the model feeds its head and the head's
weight: logits exist for a few hundred labelled rows at a time. It is right only if the head is that weight and nothing else, or
something that the loss knows (a scale, a softcap), so the model itself is asked first. Otherwise the model computes its own
logits, at the labelled positions alone. Either way the forward is one call of the outermost module.
"""

import inspect
from typing import Any, Literal

import attrs
import torch
from torch import nn

from forge_algos._modules import causal_model, head
from forge_algos.losses import LossTerms, nll, nll_of_logits
from forge_algos.objectives._probe import PROBED_TOKENS, problem_of, transform_of
from forge_algos.objectives._swap import carry, join, swapped_forward


@attrs.frozen(kw_only=True, eq=False)
class Head:
    """How learned positions are scored, and why so. Call it with the forward's inputs, the rows and their targets."""

    model: nn.Module = attrs.field(repr=False)
    name: Literal["chunked", "logits"]
    """"chunked": the chunked loss in the head's place, on its weight. "logits": the model's own logits at those rows."""
    reason: str
    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, inputs: dict[str, Any], rows: torch.Tensor, targets: torch.Tensor) -> LossTerms:
        """Inputs of one row [1, T] → the terms of rows int64[M] with targets int64[M]."""
        if self.name == "chunked":
            return self._chunked(inputs, rows, targets)
        if "logits_to_keep" in inspect.signature(causal_model(self.model).forward).parameters:
            return nll_of_logits(self.model(**inputs, logits_to_keep=rows).logits[0], targets)
        return nll_of_logits(self.model(**inputs).logits[0].index_select(0, rows), targets)

    def _chunked(self, inputs: dict[str, Any], rows: torch.Tensor, targets: torch.Tensor) -> LossTerms:
        linear = head(self.model)
        assert isinstance(linear, nn.Linear)
        found: list[LossTerms] = []

        def score(hidden: torch.Tensor) -> torch.Tensor:
            terms = nll(
                hidden[0].index_select(0, rows),
                linear.weight,
                targets,
                bias=linear.bias,
                scale=self.scale,
                softcap=self.softcap,
                ignore_index=None,
            )
            found.append(terms)
            return carry(terms.sum, hidden, linear.out_features)

        with swapped_forward(linear, score):
            logits = self.model(**inputs).logits
        (terms,) = found
        return terms._replace(sum=join(terms.sum, logits))


def choose_head(model: nn.Module, *, device: torch.device) -> Head:
    """Compare what the head's weight gives with the model's own logits on a few tokens, and take the fast way if equal.

    Leaves the model's modes, its gradients and the random state as they were. Where a model is divided over ranks, every rank
    calls it, and all decide alike.
    """
    linear = head(model)
    if linear is None:
        return Head(model=model, name="logits", reason="the model names no head of its own")
    if not isinstance(linear, nn.Linear) or type(linear).forward is not nn.Linear.forward or "forward" in vars(linear):
        kind = f"{type(linear).__module__}.{type(linear).__qualname__}"
        return Head(model=model, name="logits", reason=f"the head is no plain linear layer but {kind}")
    scale, softcap = transform_of(model)
    problem = problem_of(model, linear, device, scale, softcap)
    if problem:
        return Head(model=model, name="logits", reason=problem)
    how = "".join([f", scaled by {scale:g}" if scale != 1 else "", f", capped at {softcap:g}" if softcap else ""])
    return Head(
        model=model,
        name="chunked",
        reason=f"{type(linear).__name__} head{how} gives the model's own logits on {PROBED_TOKENS} tokens",
        scale=scale,
        softcap=softcap,
    )
