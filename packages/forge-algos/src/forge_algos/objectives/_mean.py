"""Weights of micro-batches' sums, by which the loop's division gives the requested mean."""

from collections.abc import Sequence

from forge_algos._errors import LossError
from forge_algos.losses import LossTerms


def require_totals(totals: Sequence[float], needs: int) -> None:
    """Raise LossError unless there are as many totals as an objective measures."""
    if len(totals) < needs:
        raise LossError(
            f"totals: {needs} numbers are wanted, what `measure` returned for each micro-batch of the step, added up; got "
            f"{len(totals)}"
        )


class Mean:
    """Mean over a step: of all its terms ("global"), or of its micro-batches' means ("trl").

    The loop adds up the sums and divides by the number of terms N. So in the second case a micro-batch of n terms, one of K,
    gives its sum times N / (n·K). TRL 1.16's preference trainers divide like this (`loss_is_scaled_for_ga = False`): a pair in
    a small micro-batch counts more than one in a large one, and the gradients depend on the cut.
    """

    def __init__(self, normalize: str, *, per_token: bool = False) -> None:
        self.trl = normalize == "trl"
        self.per_token = per_token and not self.trl
        self.needs = 2 if self.trl or self.per_token else 0

    def measure(self, count: float, tokens: int = 0) -> list[float]:
        """Return (terms, tokens of the terms that are means over tokens), or (terms, 1) for "trl"."""
        return [float(count), 1.0 if self.trl else float(tokens)]

    def tokens_per_term(self, totals: Sequence[float]) -> float | None:
        """Return tokens a term over the whole step, or None where a call takes its own or has none."""
        if not self.per_token:
            return None
        require_totals(totals, 2)
        return totals[1] / totals[0]

    def __call__(self, terms: LossTerms, totals: Sequence[float]) -> LossTerms:
        """Weigh the terms by the totals of what `measure` returned."""
        if not self.trl:
            return terms
        require_totals(totals, 2)
        return terms._replace(sum=terms.sum * (totals[0] / (terms.count * totals[1])), per_sample=None)
