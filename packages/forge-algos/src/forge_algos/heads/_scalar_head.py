"""Scores of a sequence classifier, one or several numbers, at positions of a packed row.

Such a model scores every position and then keeps one of them, by its own rule for where a padded sequence ends, which does not
apply to packed rows. So the positions are scored inside the scoring layer's own call, where its weight is whole.
"""

from typing import Any

import attrs
import torch
from torch import nn

from forge_algos._errors import LossError
from forge_algos._modules import causal_model, mode, override_forward, text_config, virtual_tokens
from forge_algos.batches._media import packs_media
from forge_algos.batches._packed import packed_inputs
from forge_algos.heads._forward_override import compute_inside
from forge_algos.heads._layout import lay_out

_LAYER = "score"
_PROBED_TOKENS = 3


@attrs.frozen(kw_only=True, eq=False)
class ScalarHead:
    """Scoring of positions of a row by one number each, or by one for each label."""

    model: nn.Module = attrs.field(repr=False)

    def scores(self, inputs: dict[str, Any], rows: torch.Tensor) -> torch.Tensor:
        """Compute the scores of a model with one label: float32[M]; arguments as of `logits`."""
        return self.logits(inputs, rows).squeeze(-1)

    def logits(self, inputs: dict[str, Any], rows: torch.Tensor) -> torch.Tensor:
        """Compute scores with gradients at positions int64[M] of one row [1, T]: float32[M, C].

        float64 where the model is.
        """
        layer = _layer(self.model)
        assert layer is not None
        plain = layer.forward
        layout = lay_out(self.model, inputs)

        def score(hidden: torch.Tensor) -> tuple[torch.Tensor]:
            scores = plain(layout.packed(hidden).squeeze(0).index_select(0, rows))
            return (scores.to(torch.promote_types(scores.dtype, torch.float32)),)

        (scores,) = compute_inside(self.model, layer, layout.inputs, score)
        return scores


def choose_scalar_head(model: nn.Module, *, device: torch.device, labels: int = 1) -> ScalarHead:
    """Test that the model's logits are its layer `score` at the sequence's last token.

    Leaves the model's modes, its gradients and the random state as they were. Where a model is divided over ranks, every rank
    calls it.

    Raises:
        LossError: the model is no sequence classifier, has another number of labels, or does more than that with its scores.
    """
    causal = causal_model(model)
    found = getattr(getattr(causal, "config", None), "num_labels", None)
    remedy = f"load it with transformers' AutoModelForSequenceClassification and num_labels={labels}"
    if _layer(model) is None:
        raise LossError(f"{type(causal).__name__} has no layer `{_LAYER}` that gives a sequence {_numbers(labels)}: {remedy}")
    if found != labels:
        wanted = "one" if labels == 1 else labels
        raise LossError(f"{type(causal).__name__} gives a sequence {found} numbers and not {wanted}: {remedy}")
    if (virtual_tokens(model) or packs_media(model) == "lines") and _pad_id(model) is None:
        raise LossError(
            f"{type(causal).__name__} has no pad_token_id, and the documents of a row are filled up to one length where "
            "virtual tokens stand before each, or images are in them: set pad_token_id in its config.json"
        )
    if problem := _problem(model, device, labels):
        raise LossError(f"{type(causal).__name__} gives a sequence something else than its layer `{_LAYER}` does: {problem}")
    return ScalarHead(model=model)


def _layer(model: nn.Module) -> nn.Module | None:
    found = getattr(causal_model(model), _LAYER, None)
    return found if isinstance(found, nn.Module) else None


def _pad_id(model: nn.Module) -> int | None:
    return getattr(text_config(model), "pad_token_id", None)


def _numbers(labels: int) -> str:
    return "one number" if labels == 1 else f"{labels} numbers"


def _problem(model: nn.Module, device: torch.device, labels: int) -> str | None:
    layer = _layer(model)
    assert layer is not None
    ids = torch.full((_PROBED_TOKENS,), 1 if _pad_id(model) == 0 else 0, device=device)
    inputs = packed_inputs(ids, torch.arange(_PROBED_TOKENS, device=device), torch.tensor([0, _PROBED_TOKENS]), _PROBED_TOKENS)
    fed: list[tuple[int, ...]] = []

    def answer(hidden: torch.Tensor) -> torch.Tensor:
        fed.append(tuple(hidden.shape[:-1]))
        places = torch.arange(1, hidden[..., 0].numel() + 1, device=hidden.device, dtype=hidden.dtype)
        return places.view(*hidden.shape[:-1], 1).expand(*hidden.shape[:-1], labels)

    try:
        with mode(model, training=False), torch.no_grad(), override_forward(layer, answer):
            scores = model(**lay_out(model, inputs).inputs).logits
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        return f"it cannot be run ({error})"
    if len(fed) != 1 or fed[0] not in {(1, _PROBED_TOKENS), (1, _PROBED_TOKENS + virtual_tokens(model))}:
        return f"the layer is fed {fed} for a row of {_PROBED_TOKENS} tokens"
    if scores.flatten().tolist() != [fed[0][1]] * labels:
        return f"scores 1 to {fed[0][1]} of as many tokens become {scores.flatten().tolist()}, not the last one"
    return None
