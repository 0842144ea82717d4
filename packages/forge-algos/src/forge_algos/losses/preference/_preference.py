"""Preference losses that need no reference: ORPO, SimPO, CPO."""

import torch
from torch.nn.functional import logsigmoid

from forge_algos._errors import LossError
from forge_algos.losses import _check
from forge_algos.losses._numeric import log1mexp
from forge_algos.losses._terms import LossTerms, summed
from forge_algos.losses.preference._dpo_types import smoothed

CPO_TYPES = ("sigmoid", "hinge", "ipo")


def orpo(
    chosen_logps: torch.Tensor,
    rejected_logps: torch.Tensor,
    *,
    chosen_lengths: torch.Tensor,
    rejected_lengths: torch.Tensor,
    beta: float = 0.1,
    nll_logps: torch.Tensor | None = None,
    nll_lengths: torch.Tensor | None = None,
    tokens_per_pair: float | None = None,
) -> LossTerms:
    """Sum a likelihood part, and -β log σ of the log odds ratio.
    It is arXiv 2403.07691, equations 4, 6 and 7.

    With p = log π(y)/L a token: -β log σ(p_c - p_r - log(1 - e^p_c) + log(1 - e^p_r)), and -log π(chosen) a token.

    What is coupled: the likelihood part is a mean over tokens, so that its terms are divided by the tokens of a pair;
    `tokens_per_pair` over the global batch makes every cut the same, None takes this call's own mean (TRL's, whose gradients
    therefore depend on the cut).

    Args:
        chosen_logps: float[B], summed log-probabilities of the chosen completions, in nats.
        rejected_logps: float[B], of the rejected ones.
        chosen_lengths: int[B], tokens of the chosen completions.
        rejected_lengths: int[B], of the rejected ones.
        beta: weight of the odds ratio (the paper's λ), above 0.
        nll_logps: float[B], what the likelihood part learns; None is the chosen completions alone. TRL and the paper's code
            learn the prompt too.
        nll_lengths: int[B], tokens of `nll_logps`; with it or not at all.
        tokens_per_pair: tokens that the likelihood part learns / pairs over the global batch, above 0.

    Returns:
        LossTerms: over the B pairs. Stats: `nll` and `preference` (the two parts), `log_odds`, and those of `simpo` (whose β is
        this one).

    Raises:
        LossError: lengths that disagree or are missing, or a number out of range.

    >>> logps, lengths = torch.tensor([-2.0]), torch.tensor([4])
    >>> terms = orpo(logps, logps, chosen_lengths=lengths, rejected_lengths=lengths, beta=1.0)
    >>> round(terms.stats["nll"].item(), 4), round(terms.stats["preference"].item(), 4)
    (0.5, 0.6931)
    """
    _check.number("beta", beta, above=0)
    if (nll_logps is None) != (nll_lengths is None):
        raise LossError("nll_logps and nll_lengths: both or none")
    given = _check.samples("nll_logps", chosen_logps=chosen_logps, rejected_logps=rejected_logps, nll_logps=nll_logps)
    chosen, rejected = _a_token(given, chosen_lengths, rejected_lengths)
    lengths = chosen_lengths if nll_lengths is None else nll_lengths
    nll = _nll(given.get("nll_logps", given["chosen_logps"]), lengths, tokens_per_pair)
    log_odds = chosen - rejected - (log1mexp(chosen) - log1mexp(rejected))
    preference = -beta * logsigmoid(log_odds)
    stats = {"nll": nll, "preference": preference, "log_odds": log_odds}
    return summed(nll + preference, stats | _rewards(chosen, rejected, beta))


def simpo(
    chosen_logps: torch.Tensor,
    rejected_logps: torch.Tensor,
    *,
    chosen_lengths: torch.Tensor,
    rejected_lengths: torch.Tensor,
    beta: float = 2.0,
    gamma: float = 1.0,
    label_smoothing: float = 0.0,
    nll_weight: float = 0.0,
    tokens_per_pair: float | None = None,
) -> LossTerms:
    """Sum -log σ(β(p_c - p_r) - γ) with p = log π(y)/L a token (arXiv 2405.14734, equation 6).

    With `nll_weight` -log π(chosen) a token is added to it (CPO-SimPO), coupled exactly as in `orpo`.

    Args:
        chosen_logps: float[B], summed log-probabilities of the chosen completions, in nats.
        rejected_logps: float[B], of the rejected ones.
        chosen_lengths: int[B], tokens of the chosen completions.
        rejected_lengths: int[B], of the rejected ones.
        beta: above 0; the paper uses 2 to 10.
        gamma: the margin, from 0 (TRL's `simpo_gamma`).
        label_smoothing: from 0 and below 0.5, how often a preference is wrong.
        nll_weight: of the likelihood part (TRL's `cpo_alpha`), from 0.
        tokens_per_pair: chosen tokens / pairs over the global batch, above 0; read by the likelihood part.

    Returns:
        LossTerms: over the B pairs. Stats: `chosen_rewards` (βp_c), `rejected_rewards`, `margins`, `correct`, and `nll` (before
        its weight) where there is a likelihood part.

    Raises:
        LossError: lengths that disagree, or a number out of range.

    >>> logps, lengths = torch.tensor([-6.0]), torch.tensor([4])
    >>> terms = simpo(logps, logps, chosen_lengths=lengths, rejected_lengths=lengths, gamma=0.0)
    >>> round(terms.sum.item(), 4)
    0.6931
    """
    _check.number("beta", beta, above=0)
    _check.number("gamma", gamma, least=0)
    _check.number("label_smoothing", label_smoothing, least=0, below=0.5)
    _check_likelihood(nll_weight, tokens_per_pair)
    given = _check.samples(chosen_logps=chosen_logps, rejected_logps=rejected_logps)
    chosen, rejected = _a_token(given, chosen_lengths, rejected_lengths)
    losses, stats = smoothed(beta * (chosen - rejected) - gamma, label_smoothing), _rewards(chosen, rejected, beta)
    if nll_weight:
        nll = _nll(given["chosen_logps"], chosen_lengths, tokens_per_pair)
        losses, stats = losses + nll_weight * nll, stats | {"nll": nll}
    return summed(losses, stats)


def cpo(
    chosen_logps: torch.Tensor,
    rejected_logps: torch.Tensor,
    *,
    chosen_lengths: torch.Tensor | None = None,
    rejected_lengths: torch.Tensor | None = None,
    beta: float = 0.1,
    loss_type: str = "sigmoid",
    label_smoothing: float = 0.0,
    nll_weight: float = 1.0,
    tokens_per_pair: float | None = None,
) -> LossTerms:
    """Sum -log σ(β(log π(chosen) - log π(rejected))) and the chosen completion's likelihood.
    It is arXiv 2401.08417, equations 3 to 5.

    `hinge` is max(0, 1 - βd) instead, `ipo` (d - 1/2β)² with d between log-probabilities a token.

    What is coupled: the likelihood part, exactly as in `orpo`.

    Args:
        chosen_logps: float[B], summed log-probabilities of the chosen completions, in nats.
        rejected_logps: float[B], of the rejected ones.
        chosen_lengths: int[B], tokens of the chosen completions; needed by the likelihood part and `ipo`.
        rejected_lengths: int[B], of the rejected ones; needed by `ipo`.
        beta: above 0.
        loss_type: sigmoid, hinge or ipo.
        label_smoothing: from 0 and below 0.5; read by `sigmoid` alone.
        nll_weight: of the likelihood part (TRL's `cpo_alpha`), from 0.
        tokens_per_pair: chosen tokens / pairs over the global batch, above 0.

    Returns:
        LossTerms: over the B pairs. Stats: `nll` (before its weight), and those of `simpo`.

    Raises:
        LossError: lengths that disagree or are missing, an unknown name, or a number out of range.

    >>> logps = torch.tensor([-6.0])
    >>> round(cpo(logps, logps, chosen_lengths=torch.tensor([4]), nll_weight=2.0).sum.item(), 4)  # ln 2 + 2 · 6/4
    3.6931
    """
    _check.number("beta", beta, above=0)
    _check.one_of("loss_type", loss_type, CPO_TYPES)
    _check.number("label_smoothing", label_smoothing, least=0, below=0.5)
    _check_likelihood(nll_weight, tokens_per_pair)
    if label_smoothing and loss_type != "sigmoid":
        raise LossError(f"label_smoothing={label_smoothing}: {loss_type} does not read it; 'sigmoid' does")
    if chosen_lengths is None and (nll_weight or loss_type == "ipo"):
        raise LossError("chosen_lengths: the likelihood part and 'ipo' divide by numbers of tokens, which are not given")
    given = _check.samples(chosen_logps=chosen_logps, rejected_logps=rejected_logps)
    chosen, rejected = given["chosen_logps"], given["rejected_logps"]
    if loss_type == "ipo":
        if chosen_lengths is None or rejected_lengths is None:
            raise LossError("rejected_lengths: 'ipo' divides by numbers of tokens, which are not given")
        chosen, rejected = _a_token(given, chosen_lengths, rejected_lengths)
        losses = (chosen - rejected - 1 / (2 * beta)).square()
    elif loss_type == "hinge":
        losses = torch.relu(1 - beta * (chosen - rejected))
    else:
        losses = smoothed(beta * (chosen - rejected), label_smoothing)
    stats = _rewards(chosen, rejected, beta)
    if nll_weight and chosen_lengths is not None:
        nll = _nll(given["chosen_logps"], chosen_lengths, tokens_per_pair)
        losses, stats = losses + nll_weight * nll, stats | {"nll": nll}
    return summed(losses, stats)


def _check_likelihood(nll_weight: float, tokens_per_pair: float | None) -> None:
    _check.number("nll_weight", nll_weight, least=0)
    if tokens_per_pair is not None and not nll_weight:
        raise LossError(f"tokens_per_pair={tokens_per_pair}: nll_weight=0 leaves nothing that reads it")


def _a_token(
    given: dict[str, torch.Tensor], chosen_lengths: torch.Tensor, rejected_lengths: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean log-probabilities of the tokens of chosen and rejected."""
    chosen, rejected = given["chosen_logps"], given["rejected_logps"]
    return (
        chosen / _check.lengths("chosen_lengths", chosen_lengths, chosen, "chosen_logps"),
        rejected / _check.lengths("rejected_lengths", rejected_lengths, rejected, "rejected_logps"),
    )


def _nll(logps: torch.Tensor, lengths: torch.Tensor, tokens_per_pair: float | None) -> torch.Tensor:
    tokens = _check.lengths("lengths", lengths, logps, "logps")
    if tokens_per_pair is None:
        return -logps / (tokens.sum() / max(len(logps), 1))
    _check.number("tokens_per_pair", tokens_per_pair, above=0)
    return -logps / tokens_per_pair


def _rewards(chosen: torch.Tensor, rejected: torch.Tensor, beta: float) -> dict[str, torch.Tensor]:
    return {
        "chosen_rewards": beta * chosen,
        "rejected_rewards": beta * rejected,
        "margins": beta * (chosen - rejected),
        "correct": chosen > rejected,
    }
