"""Cost of a sample: linear in its tokens, plus attention's share, quadratic in its length."""

from typing import Any, Self

import attrs
import numpy as np
import numpy.typing as npt

from forge_packing._checks import Int64Array, checked_integer
from forge_packing._errors import PackingError

# Llama-3.1-8B: for_model(hidden=4096, layers=32, parameters=8_030_261_248), rounded.
_PER_TOKEN_SQUARED = 1 / 61_000
# Costs are summed as integers of at most 62 bits; far outside this range a weight is a mistake anyway.
_SMALLEST, _LARGEST = 1e-30, 1e30


def _weight(_instance: Any, attribute: "attrs.Attribute[Any]", value: Any) -> None:
    number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    if not number or not (value == 0 or _SMALLEST <= value <= _LARGEST):
        raise PackingError(
            f"Cost: {attribute.name} must be 0, or a number from {_SMALLEST} to {_LARGEST}, got {value!r}. "
            "Give weights in any unit (the default's is the cost of a token without attention)"
        )


@attrs.frozen
class Cost:
    """Cost of a micro-batch: the sum over its samples of per_token * S + per_token_squared * S².

    Samples do not attend to each other, so what counts is each one's own length, not the row's: a row of one sample of
    65,536 tokens costs twice as much as one of 128 samples of 512. All ranks wait for the slowest, in every pass:

        makespan = sum over passes of (the costliest micro-batch of the pass + per_micro_batch)

    A division has the fewest passes that were found, and among those the least makespan; so `per_micro_batch` changes
    what is reported, never the division, unless prefixes are shared: then the least makespan alone decides. The unit is
    free. Raises PackingError for weights that are no cost.

    >>> Cost(per_token=1.0, per_token_squared=0.5).of(np.array([2, 4])).tolist()
    [4.0, 12.0]
    """

    per_token: float = attrs.field(default=1.0, validator=_weight)
    """Cost of a token without attention: everything linear in the length."""
    per_token_squared: float = attrs.field(default=_PER_TOKEN_SQUARED, validator=_weight)
    """Cost of attention in a sample of one token; S**2 times as much in one of S. The default is an 8B Llama's."""
    per_micro_batch: float = attrs.field(default=0.0, validator=_weight)
    """Fixed cost of a pass: gathering the weights, launching kernels."""

    def __attrs_post_init__(self) -> None:
        if self.per_token == 0 and self.per_token_squared == 0:
            raise PackingError("Cost: per_token and per_token_squared are both 0: no sample costs anything. Set one of them")

    @classmethod
    def for_model(
        cls,
        *,
        hidden: int,
        layers: int,
        parameters: int | None = None,
        intermediate: int | None = None,
        vocab: int = 0,
        attention: int | None = None,
        key_value: int | None = None,
        per_micro_batch: float = 0.0,
    ) -> Self:
        """Return the cost of a decoder model, in units of one token's matrix products.

        A token takes 2 FLOPs a weight forward. A pair of tokens takes 4 * attention FLOPs a layer forward (scores and
        values), and a sample of S tokens has S**2 / 2 pairs under a causal mask. Backward is twice forward in both, so
        the share is attention * layers / parameters. Sources: Kaplan et al. 2020, section 2.1; Chowdhery et al. 2022
        (PaLM), appendix B, which counts attention without the mask; Dao 2023 (FlashAttention-2), section 4.1, with it.

        Args:
            hidden: The model's width.
            layers: The model's depth.
            parameters: Weights that a token is multiplied with; where it is not given, counted from the shape.
            intermediate: Width of a gated MLP's three products; by default an MLP of 8 * hidden**2 weights.
            vocab: Rows of the output head; 0 leaves it out.
            attention: Heads times their size; by default `hidden`.
            key_value: Key-value heads times their size; by default `attention`.
            per_micro_batch: As the field.

        Raises:
            PackingError: a size is below 1, or `parameters` is given beside `intermediate` or `vocab`.

        >>> round(1 / Cost.for_model(hidden=4096, layers=32, parameters=8_030_261_248).per_token_squared)
        61266
        """
        hidden, layers = checked_integer("hidden", hidden, 1), checked_integer("layers", layers, 1)
        attention = hidden if attention is None else checked_integer("attention", attention, 1)
        key_value = attention if key_value is None else checked_integer("key_value", key_value, 1)
        vocab = checked_integer("vocab", vocab, 0)
        if parameters is None:
            mlp = 8 * hidden**2 if intermediate is None else 3 * hidden * checked_integer("intermediate", intermediate, 1)
            parameters = layers * (2 * hidden * (attention + key_value) + mlp) + vocab * hidden
        elif intermediate is not None or vocab:
            raise PackingError("Cost.for_model: give parameters, or intermediate and vocab to count them from, not both")
        parameters = checked_integer("parameters", parameters, 1)
        return cls(1.0, attention * layers / parameters, per_micro_batch)

    def of(self, lengths: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Return the cost of each sample alone: float64[N].

        One rounded operation after another, as IEEE 754 defines them, so that the costs are the same on every machine.
        """
        tokens = np.asarray(lengths, dtype=np.float64)
        return tokens * (self.per_token + self.per_token_squared * tokens)


DEFAULT_COST = Cost()
"""Cost of an 8B Llama, in tokens."""


def integer_costs(costs: npt.NDArray[np.float64], step_starts: Int64Array) -> Int64Array:
    """Return costs as integers int64[P], each step in a unit of its own.

    costs: float64[P], overwritten. step_starts: int64[steps+1], where each step begins in them.

    Integers add up to the same in any order and by any compiler, so a division is the same on every machine. The unit is
    a power of two that leaves a step's costliest sample about 40 bits, and its sum at most 62. A sample costs at least 1.
    """
    sizes = np.diff(step_starts)
    _, exponents = np.frexp(np.maximum.reduceat(costs, step_starts[:-1]))
    bits = np.minimum(40, 61 - np.frexp(sizes.astype(np.float64))[1])
    # Times a power of two is exact; in place, for ten million samples fill a new array as slowly as they are computed.
    costs *= np.repeat(np.ldexp(1.0, bits - exponents), sizes)
    np.maximum(np.rint(costs, out=costs), 1, out=costs)
    return costs.astype(np.int64)
