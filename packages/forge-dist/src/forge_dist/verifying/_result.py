"""Result of a successful check of an export."""

import attrs


@attrs.frozen(kw_only=True)
class ExportCheck:
    """Losses of the model in memory and of its export, in nats per learned token.

    For a reward model: the mean rewards instead of the losses, and `loss_tokens` is the number of rewards.
    """

    in_memory: float
    """Loss of the model in memory, in nats per learned token."""

    reloaded: float
    """Loss of the export as plain transformers or plain PEFT loads it, in nats per learned token."""

    difference: float
    """Difference of the two, relative to `in_memory`; absolute where that is below 1. For rewards: the largest of a sample."""

    tolerance: float
    """Largest `difference` that passes: 1e-5 in float32, 2e-2 for a model in 16 bits, 1e-1 for an export rounded to 16 bits."""

    loss_tokens: int
    """Number of learned tokens over which the losses are means."""

    tensors: int
    """Number of tensors in the export's files, each of them bit-equal to the one in memory cast to the stored type."""
