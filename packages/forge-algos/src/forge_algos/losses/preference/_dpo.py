"""Direct preference optimisation in sixteen forms and their mixtures."""

from collections.abc import Sequence
from typing import get_args

import torch

from forge_algos._counted import counted
from forge_algos._errors import LossError
from forge_algos.losses import _check
from forge_algos.losses._sums import completion_logps
from forge_algos.losses._terms import LossTerms, summed
from forge_algos.losses.preference._dpo_types import TERMS, Pairs, scores
from forge_algos.settings._dpo_types import ALPHA, DPO_TYPES, TAU, Divergence, readers


def dpo(
    chosen_logps: torch.Tensor,
    rejected_logps: torch.Tensor,
    ref_chosen_logps: torch.Tensor,
    ref_rejected_logps: torch.Tensor,
    *,
    beta: float = 0.1,
    loss_type: str | Sequence[str] = "sigmoid",
    label_smoothing: float = 0.0,
    chosen_lengths: torch.Tensor | None = None,
    rejected_lengths: torch.Tensor | None = None,
    f_divergence: str = "reverse_kl",
    f_divergence_alpha: float = ALPHA,
    discopop_tau: float = TAU,
    loss_weights: Sequence[float] | None = None,
    tokens_per_pair: float | None = None,
    sft_logps: torch.Tensor | None = None,
    pair_weights: torch.Tensor | None = None,
) -> LossTerms:
    """Sum a form of direct preference optimisation over pairs; by default -log σ(β(c - r)).

    The default is arXiv 2305.18290, equation 7. c and r are log π/π_ref of the chosen and the rejected completion, L their
    tokens, ε the smoothing, S = log σ, x = β(c - r):

    - `sigmoid` -S(x) · `hinge` max(0, 1 - x) (SLiC, 2305.10425; RSO, 2309.06657)
    - `cdpo` -(1-ε)S(x) - εS(-x) (Mitchell 2023: a note on DPO with noisy preferences)
    - `ipo` (c/L_c - r/L_r - 1/2β)² (2310.12036, equation 17, a token) · `sigmoid_norm` -S(β(c/L_c - r/L_r)) (Tülu 3,
      2411.15124)
    - `robust` (-(1-ε)S(x) + εS(-x)) / (1 - 2ε) (2403.00409)
    - `exo_pair` σ(x)(S(x) - ln(1-ε)) + σ(-x)(S(-x) - ln ε) (2402.00856, equation 16)
    - `nca_pair` -S(βc) - ½S(-βc) - ½S(-βr) (2402.05369) · `bco_pair` -S(βc) - S(-βr) (2404.04656)
    - `sppo_hard` (c - 1/2β)² + (r + 1/2β)² (2405.00675, equation 4.7, with wins of 1 and 0)
    - `apo_zero` 1 - σ(βc) + σ(βr) · `apo_down` σ(βc) + 1 - σ(x) (2408.06266, equations 7 and 8)
    - `discopop` -S(x)(1 - m) + e⁻ˣm, m = σ(x/τ) (2406.08414, equation 5)
    - `aot`, `aot_unpaired` -(1-ε)S(βδ) - εS(-βδ), δ the difference of quantiles (2406.05882)
    - `sft` -log π(chosen) a token

    What is coupled, and over which set: `aot` sorts log π(chosen)/π(rejected) and the reference's, `aot_unpaired` sorts c and
    r, over the pairs of one call; so these two depend on the cut by definition. `sft` is a mean over tokens, so that its terms
    are divided by the tokens of a pair: `tokens_per_pair` over the global batch makes every cut the same, and None takes this
    call's own mean (TRL's). `bco_pair` has no running reward shift δ (nor has TRL's) and `sppo_hard` no estimated win rates: no
    pair's term depends on another, as in all others. Per-sample terms of `aot` stand at the pair whose policy log-ratio they
    hold.

    f-divergences replace c and r by f′ of the ratio (2309.16240), in the losses in which only the difference counts: `sigmoid`,
    `sigmoid_norm`, `hinge`, `ipo`, `exo_pair`, `robust`, `cdpo`, `discopop`. Exponents above 40 (300 in float64) count as 40
    (300).

    Args:
        chosen_logps: float[B], summed log-probabilities of the chosen completions, in nats.
        rejected_logps: float[B], of the rejected ones.
        ref_chosen_logps: float[B], the reference's; no gradient reaches them.
        ref_rejected_logps: float[B], the reference's.
        beta: above 0.
        loss_type: one of the above, or several, added up.
        label_smoothing: ε, from 0 and below 0.5; above 0 for `exo_pair`; 0 unless one of the types reads it.
        chosen_lengths: int[B], tokens of the chosen completions; for `ipo`, `sigmoid_norm` and `sft`.
        rejected_lengths: int[B], of the rejected ones; for `ipo` and `sigmoid_norm`.
        f_divergence: reverse_kl, forward_kl, js_divergence or alpha_divergence, whose f′(t) is (t^(α-1) - 1)/(α-1).
        f_divergence_alpha: α of alpha_divergence, from 0 (forward KL) over 1 (reverse KL); the paper's is 1 - α.
        discopop_tau: τ, above 0; read by `discopop`.
        loss_weights: a number for each type; None is 1 for each.
        tokens_per_pair: chosen tokens / pairs over the global batch, above 0; read by `sft`.
        sft_logps: float[B], what `sft` learns, where `chosen_logps` are weighted sums; None is `chosen_logps`.
        pair_weights: float[B], by which each pair's terms are multiplied, as by `wpo_weights`; no gradient reaches them. Not
            for `aot` and `aot_unpaired`, whose terms are no single pair's.

    Returns:
        LossTerms: over the B pairs. Stats: `chosen_rewards` (βc), `rejected_rewards`, `margins`, `correct` (c > r),
        `chosen_logps`, `rejected_logps`.

    Raises:
        LossError: lengths that disagree or are missing, an unknown name, a number out of range, or one that nothing reads.

    >>> start = torch.tensor([-10.0, -20.0]), torch.tensor([-12.0, -18.0])
    >>> terms = dpo(*start, *start)
    >>> round(terms.sum.item() / terms.count, 4)  # ln 2
    0.6931
    """
    types, weights = _types(loss_type, loss_weights)
    _check_settings(types, beta, label_smoothing, f_divergence, tokens_per_pair)
    _check_parameters(types, f_divergence, f_divergence_alpha, discopop_tau)
    if pair_weights is not None and (sorting := [kind for kind in types if DPO_TYPES[kind].sorts]):
        raise LossError(f"pair_weights: {', '.join(sorting)} sorts the pairs, so that no term is that of one pair")
    given = _check.samples(
        "pair_weights",
        chosen_logps=chosen_logps,
        rejected_logps=rejected_logps,
        ref_chosen_logps=ref_chosen_logps,
        ref_rejected_logps=ref_rejected_logps,
        sft_logps=chosen_logps if sft_logps is None else sft_logps,
        pair_weights=pair_weights,
    )
    each = given.pop("pair_weights", None)
    chosen, rejected, ref_chosen, ref_rejected, likelihood = given.values()
    c, r = chosen - ref_chosen.detach(), rejected - ref_rejected.detach()
    lengths = {
        name: _check.lengths(name, found, chosen, "chosen_logps")
        for name, found in (("chosen_lengths", chosen_lengths), ("rejected_lengths", rejected_lengths))
        if found is not None
    }
    missing = sorted({name for kind in types for name in DPO_TYPES[kind].lengths} - set(lengths))
    if missing:
        raise LossError(
            f"{' and '.join(missing)}: loss_type {', '.join(types)} divides by numbers of tokens, which are not given"
        )
    ones = torch.ones_like(chosen)
    chosen_tokens = lengths.get("chosen_lengths", ones)
    pairs = Pairs(
        c=c,
        r=r,
        chosen_scores=scores(c, f_divergence, f_divergence_alpha),
        rejected_scores=scores(r, f_divergence, f_divergence_alpha),
        policy=chosen - rejected,
        ref=(ref_chosen - ref_rejected).detach(),
        chosen_nll=-likelihood / (chosen_tokens.sum() / max(len(chosen), 1) if tokens_per_pair is None else tokens_per_pair),
        chosen_lengths=chosen_tokens,
        rejected_lengths=lengths.get("rejected_lengths", ones),
        beta=beta,
        smoothing=label_smoothing,
        tau=discopop_tau,
    )
    losses = sum((weight * TERMS[kind](pairs) for kind, weight in zip(types, weights, strict=True)), torch.zeros_like(chosen))
    if each is not None:
        losses = losses * each.detach()
    stats = {
        "chosen_rewards": beta * c,
        "rejected_rewards": beta * r,
        "margins": beta * (c - r),
        "correct": c > r,
        "chosen_logps": chosen,
        "rejected_logps": rejected,
    }
    return summed(losses, stats)


def wpo_weights(logps: torch.Tensor, collisions: torch.Tensor, lengths: torch.Tensor | Sequence[int]) -> torch.Tensor:
    """Compute weights of pairs from the model's own probabilities (WPO, arXiv 2406.11827).

    A completion of L tokens has exp((1/L) Σ (log p(token) - log Σ p²)), so that one that the model would hardly sample counts
    less; that of a pair is the product of both.

    Args:
        logps: float[T], log-probabilities of the completions' tokens, in nats; no gradient reaches them.
        collisions: float[T], log of the sum of the squared probabilities of all tokens at each of them.
        lengths: int[2P], tokens of each completion, the chosen and the rejected one of each pair in turn; they add up to T. On
            the CPU, so that nothing waits for the device.

    Returns:
        torch.Tensor: float32[P], the pairs' weights.

    Raises:
        LossError: lengths that do not add up to T, or of no pairs.

    >>> wpo_weights(torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-1.0, -1.0, -1.0]), [1, 2])
    tensor([0.2231])
    """
    given = _check.samples(logps=logps, collisions=collisions)
    counts = _check.integers("lengths", lengths)
    if len(counts) % 2:
        raise LossError(f"lengths: two completions a pair are wanted, got {len(counts)}")
    aligned = completion_logps((given["logps"] - given["collisions"]).detach(), counts)
    means = aligned / counts.to(device=aligned.device, dtype=aligned.dtype, non_blocking=True).clamp(min=1)
    return means.view(-1, 2).sum(1).exp()


def _types(loss_type: str | Sequence[str], loss_weights: Sequence[float] | None) -> tuple[list[str], list[float]]:
    types = [loss_type] if isinstance(loss_type, str) else list(loss_type)
    for kind in types:
        _check.one_of("loss_type", kind, sorted(DPO_TYPES))
    weights = [1.0] * len(types) if loss_weights is None else list(loss_weights)
    if not types or len(weights) != len(types):
        raise LossError(
            f"loss_weights: one for each of loss_type is wanted; there are {counted(len(types), 'types')} and "
            f"{counted(len(weights), 'weights')}"
        )
    for weight in weights:
        _check.number("loss_weights", weight)
    return types, weights


def _check_settings(types: list[str], beta: float, smoothing: float, divergence: str, tokens_per_pair: float | None) -> None:
    """Raise LossError for a number out of range, an unknown divergence, or an unread argument."""
    _check.number("beta", beta, above=0)
    _check.number("label_smoothing", smoothing, least=0, below=0.5)
    if smoothing and not set(readers("smoothing")) & set(types):
        raise LossError(
            f"label_smoothing={smoothing}: {', '.join(types)} does not read it; those that do: "
            f"{', '.join(readers('smoothing'))}"
        )
    if "exo_pair" in types and not smoothing:
        raise LossError("label_smoothing: 'exo_pair' takes its logarithm, so it must be above 0; the paper recommends 1e-3")
    _check.one_of("f_divergence", divergence, get_args(Divergence))
    wrong = [kind for kind in types if not DPO_TYPES[kind].divergence and kind != "sft"]
    if divergence != "reverse_kl" and (wrong or set(types) == {"sft"}):
        raise LossError(
            f"f_divergence={divergence!r}: {', '.join(wrong or types)} is defined for reverse_kl alone; the others: "
            f"{', '.join(readers('divergence'))}"
        )
    if tokens_per_pair is not None:
        _check.number("tokens_per_pair", tokens_per_pair, above=0)
        if "sft" not in types:
            raise LossError(f"tokens_per_pair={tokens_per_pair}: {', '.join(types)} does not read it; 'sft' does")


def _check_parameters(types: list[str], divergence: str, alpha: float, tau: float) -> None:
    """Raise LossError for a number out of range, or one that nothing reads."""
    _check.number("f_divergence_alpha", alpha, least=0)
    _check.number("discopop_tau", tau, above=0)
    if alpha != ALPHA and divergence != "alpha_divergence":
        raise LossError(f"f_divergence_alpha={alpha}: {divergence} does not read it; 'alpha_divergence' does")
    if tau != TAU and "discopop" not in types:
        raise LossError(f"discopop_tau={tau}: {', '.join(types)} does not read it; 'discopop' does")
