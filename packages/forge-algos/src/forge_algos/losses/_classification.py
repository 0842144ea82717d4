"""Loss of sequence classification: one class of several, or several labels at once."""

import torch
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from forge_algos._errors import LossError
from forge_algos.losses import _check
from forge_algos.losses._numeric import wide
from forge_algos.losses._terms import LossTerms


def classification(logits_BC: torch.Tensor, targets: torch.Tensor) -> LossTerms:
    """Sum the cross-entropy of B samples over C classes, or that of C labels by themselves.

    Divided by the count they are transformers' losses of `problem_type` single_label_classification, -log softmax(z)_y, and
    multi_label_classification, the mean over the labels of -y log σ(z) - (1 - y) log(1 - σ(z)).

    Args:
        logits_BC: float[B, C].
        targets: int64[B], each sample's class; or float[B, C] from 0 to 1, how far each label is there.

    Returns:
        LossTerms: over the B samples, in nats; no sample's term depends on another. Stats: `correct`, samples whose class, or
        all of whose labels, are predicted; and of each class c `hits_c`, `predicted_c` and `actual_c`: samples of it that are
        predicted so, that are predicted so, that are of it. A label is predicted where σ(z) > 1/2, and there where y > 1/2.

    Raises:
        LossError: shapes, dtypes or values that do not fit. On a GPU a class that is none ends in torch's own error, since
            looking for it would wait for the device; no value is passed over, -100 neither.

    >>> terms = classification(torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0]))
    >>> round(terms.sum.item(), 4), terms.count, terms.stats["correct"].item()
    (1.4402, 2, 1.0)
    """
    if not isinstance(logits_BC, torch.Tensor) or not logits_BC.is_floating_point() or logits_BC.dim() != 2:
        raise LossError(f"logits_BC: a tensor of floats with two dimensions is wanted, not {_check.described(logits_BC)}")
    logits = logits_BC.to(torch.promote_types(torch.float32, wide(logits_BC.dtype)))
    B, C = logits.shape
    if not isinstance(targets, torch.Tensor):
        raise LossError(f"targets: a tensor of classes or of labels is wanted, not {_check.described(targets)}")
    if targets.is_floating_point():
        if targets.shape != logits.shape:
            raise LossError(
                f"targets: labels of the shape {[B, C]} are wanted, as the logits', not {_check.described(targets)}"
            )
        if targets.is_cpu and not ((targets >= 0) & (targets <= 1)).all():
            raise LossError(f"targets: numbers from 0 to 1 are wanted, found {targets.min():g} to {targets.max():g}")
        targets = targets.to(logits)
        per_sample = binary_cross_entropy_with_logits(logits, targets, reduction="none").mean(1)
        predicted, actual = logits > 0, targets > 0.5
    else:
        if targets.shape != (B,) or targets.dtype != torch.int64:
            raise LossError(f"targets: classes in int64 of the shape {[B]} are wanted, not {_check.described(targets)}")
        if targets.is_cpu and B and not 0 <= targets.min() <= targets.max() < C:
            raise LossError(f"targets: classes from 0 to {C - 1} are wanted, found {targets.min()} to {targets.max()}")
        # By default torch leaves -100 out of the sum, and the count would still have it.
        per_sample = cross_entropy(logits, targets, reduction="none", ignore_index=torch.iinfo(torch.int64).min)
        classes = torch.arange(C, device=logits.device)
        predicted, actual = logits.argmax(1)[:, None] == classes, targets[:, None] == classes
    sums = {"hits": predicted & actual, "predicted": predicted, "actual": actual}
    stats = {"correct": (predicted == actual).all(1).sum().to(logits)}
    for name, values in sums.items():
        stats |= {f"{name}_{c}": number for c, number in enumerate(values.sum(0).to(logits).unbind())}
    return LossTerms(per_sample.sum(), B, stats, per_sample)
