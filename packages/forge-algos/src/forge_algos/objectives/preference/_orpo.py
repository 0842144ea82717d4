"""Odds-ratio preference optimisation: the chosen completion's likelihood, and the odds."""

from collections.abc import Sequence
from typing import ClassVar

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from forge_algos.batches._copies import to_device
from forge_algos.batches._groups import PackedGroups
from forge_algos.heads._completions import Completions, sum_by_completion
from forge_algos.losses import LossTerms, orpo
from forge_algos.objectives._mean import Mean
from forge_algos.objectives.preference._pairs import Pairwise, PreferenceBatch, check_pairs, chosen_tokens, lengths, sides
from forge_algos.settings._preference import ORPOSettings


@attrs.frozen
class ORPO(Pairwise):
    """ORPO (arXiv 2403.07691, equations 4, 6, 7): -log π(chosen) a token, and the odds ratio.

    The ratio's part is -β log σ of the log odds ratio. One forward a row; no reference. Batches are `PreferenceBatch`. The
    likelihood is a mean over the tokens of the whole step and the odds ratio one over its pairs, so the gradients do not depend
    on how the step is cut. The reward in the figures is β times the log-probability a token.
    """

    settings: ORPOSettings = attrs.field(factory=ORPOSettings)

    shown: ClassVar[dict[str, str]] = Pairwise.shown | {"nll": "nll", "log_odds": "log_odds"}

    def bind(self, model: nn.Module, *, device: torch.device) -> "_BoundORPO":
        """Choose how this model is run.

        Raises:
            PackedBatchError: the model does not keep the completions of a row apart.
            AdapterError: virtual tokens that the model cannot be given.
        """
        return _BoundORPO(self.settings, model, device)


class _BoundORPO:
    def __init__(self, settings: ORPOSettings, model: nn.Module, device: torch.device) -> None:
        self.settings = settings
        self.policy = Completions(model, device=device)
        self.mean = Mean(settings.normalize, per_token=True)
        self.needs = self.mean.needs

    def measure(self, batch: PreferenceBatch) -> Sequence[float]:
        prompts = len(self._prompts(batch.groups)[0])
        return self.mean.measure(len(batch.groups.group_sizes), chosen_tokens(batch.groups) + prompts)

    def __call__(self, batch: PreferenceBatch, totals: Sequence[float]) -> LossTerms:
        check_pairs(batch)
        groups, sizes = batch.groups, lengths(batch.groups)
        rows, targets, pairs = self._prompts(groups)
        tokens = self.policy.tokens(groups, beside=(rows, targets))
        tokens, prompts = tokens.split([len(tokens) - len(rows), len(rows)])
        chosen, rejected = sides(sum_by_completion(tokens, groups))
        terms = orpo(
            chosen,
            rejected,
            **sizes,
            beta=self.settings.beta,
            nll_logps=chosen.index_add(0, to_device(pairs, chosen.device), prompts),
            nll_lengths=sizes["chosen_lengths"] + torch.tensor(np.bincount(pairs, minlength=len(chosen))),
            tokens_per_pair=self.mean.tokens_per_term(totals),
        )
        return self.mean(terms, totals)

    def _prompts(self, groups: PackedGroups) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return what the likelihood learns beside the chosen completions.

        A pair's first segment is its prompt and its chosen completion, whether the prompt is shared or not.

        Returns:
            tuple: positions, next tokens, and the pair of each, int64[N].
        """
        ids, starts = np.asarray(groups.input_ids), np.asarray(groups.cu_seqlens)
        segment = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
        wanted = (segment % 2 == 0) & self.settings.learn_prompt
        wanted[starts[1:] - 1] = False
        wanted[np.asarray(groups.rows)[np.repeat(np.arange(len(groups.lengths)) % 2 == 0, groups.lengths)]] = False
        rows = np.flatnonzero(wanted)
        return rows, ids[rows + 1].astype(np.int64), segment[rows] // 2
