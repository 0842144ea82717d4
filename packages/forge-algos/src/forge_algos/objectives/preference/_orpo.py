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
from forge_algos.settings._validators import settings_of


@attrs.frozen
class ORPO(Pairwise):
    """ORPO (arXiv 2403.07691, equations 4, 6, 7): -log π(chosen) a token, and the odds ratio.

    The ratio's part is -β log σ of the log odds ratio. One forward a row; no reference. Batches are `PreferenceBatch`. The
    likelihood is a mean over the tokens of the whole step and the odds ratio one over its pairs, so the gradients do not depend
    on how the step is cut. The reward in the figures is β times the log-probability a token.
    """

    settings: ORPOSettings = attrs.field(factory=ORPOSettings, validator=settings_of(ORPOSettings))

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

        Returns:
            tuple: positions, next tokens, and the pair of each, int64[N].
        """
        ids = np.asarray(groups.input_ids)
        # All that each completion sees: its prompt, shared or not, and itself.
        shares = groups.kv_rows is not None
        seen = np.asarray(groups.kv_rows) if shares else np.arange(len(ids))
        ends = np.asarray(groups.cu_seqlens_k if shares else groups.cu_seqlens)
        learned = np.split(np.asarray(groups.rows), np.cumsum(groups.lengths)[:-1])
        found = [(np.zeros(0, np.int64),) * 3]
        for chosen in range(0, len(ends) - 1 if self.settings.learn_prompt else 0, 2):
            path = seen[ends[chosen] : ends[chosen + 1]]
            beside = np.flatnonzero(~np.isin(path[:-1], learned[chosen]))
            found.append((path[beside], ids[path[beside + 1]], np.full(len(beside), chosen // 2)))
        positions, targets, pairs = (np.concatenate(each).astype(np.int64) for each in zip(*found, strict=True))
        return positions, targets, pairs
