"""Losses: pure functions of tensors, each returning `LossTerms(sum, count, stats)`; nobody divides here."""

from forge_algos.losses._nll import nll, nll_of_logits
from forge_algos.losses._terms import LossTerms

__all__ = ["LossTerms", "nll", "nll_of_logits"]
