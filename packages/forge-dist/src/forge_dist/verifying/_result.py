"""What a successful check of an export has found."""

import attrs


@attrs.frozen(kw_only=True)
class ExportCheck:
    """The loss of the model in memory and of its export read back, both in nats per learned token over the same samples.

    Of a reward model: the mean reward instead of the loss, and `loss_tokens` is the number of rewards.
    """

    in_memory: float
    """Loss of the model in memory, in nats per learned token."""

    reloaded: float
    """Loss of the export as plain transformers or plain PEFT loads it, in nats per learned token."""

    difference: float
    """Difference of the two, relative to `in_memory`; in nats per learned token where that is below 1. Of rewards: the largest of a sample's."""

    tolerance: float
    """The largest `difference` that passes: 1e-5 in float32, 2e-2 for a model held in 16 bits, 1e-1 where the export rounded to 16 bits."""

    loss_tokens: int
    """Number of learned tokens that the two losses are means of."""

    tensors: int
    """Number of tensors in the export's files, each of them bit-equal to the one in memory cast to the stored type."""
