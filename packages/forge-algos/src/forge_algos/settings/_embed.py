"""Settings of embedding training: which loss, and which hidden states are an embedding."""

from typing import Literal

import attrs

from forge_algos.settings._validators import logits_divisor, number, one_of

EmbedLoss = Literal["contrastive", "batch_all_triplet"]
Pooling = Literal["auto", "last", "mean", "cls"]


@attrs.frozen(kw_only=True)
class EmbedSettings:
    """How text embeddings are trained.

    >>> EmbedSettings(temperature=0)
    Traceback (most recent call last):
        ...
    ValueError: temperature must be at least 1e-06 and finite, got 0
    """

    loss: EmbedLoss = attrs.field(default="contrastive", validator=one_of(EmbedLoss))
    """contrastive: rows of a query and its document, with all other documents of the step as negatives (InfoNCE,
    MultipleNegativesRankingLoss). batch_all_triplet: rows of a text and its label, with all triplets of the step."""
    pooling: Pooling = attrs.field(default="auto", validator=one_of(Pooling))
    """Which hidden states of a text are its embedding: that of its last token, their mean, or that of its first token (cls). By
    default what 1_Pooling/config.json of the model says, else the last of a causal model, and the mean of any other."""
    temperature: float | None = attrs.field(default=None, validator=attrs.validators.optional(logits_divisor))
    """Divides the cosines of loss=contrastive; 0.05 by default, which is sentence-transformers' scale 20. At least 1e-6."""
    exclude_same_text: bool = attrs.field(default=False, validator=attrs.validators.instance_of(bool))
    """Whether a document of the step with the same text as a query's own is left out of that query's negatives. Without it that
    is a negative like any other, as in sentence-transformers."""
    margin: float | None = attrs.field(default=None, validator=attrs.validators.optional(number(kind=float)))
    """By how much farther away a text of another label must be with loss=batch_all_triplet; 5 by default, as in
    sentence-transformers. Distances are at most 2."""

    def __attrs_post_init__(self) -> None:
        other = {"contrastive": ("margin",), "batch_all_triplet": ("temperature", "exclude_same_text")}
        for name in other[self.loss]:
            if getattr(self, name) not in (None, False):
                raise ValueError(f"{name} has no effect with loss={self.loss}: leave it out")
