"""Choice of tokens by covariance among all of a step's, in a forward before its first term."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from forge_algos._errors import LossError
from forge_algos._parallel import Parallel
from forge_algos.batches._online import OnlineBatch
from forge_algos.losses import LossTerms, clip_cov_tokens, kl_cov_tokens
from forge_algos.objectives._objective import BeginsSteps
from forge_algos.objectives._whole_step import random_state, set_random_state
from forge_algos.objectives.policy._online import BoundOnline, OnlineObjective
from forge_algos.settings._grpo import GRPOSettings


class BoundChoosing(BoundOnline, BeginsSteps):
    """GRPO on one model, with tokens chosen by the covariance of log-probability and advantage.

    The choice is of the policy as it is before the step, among the tokens of all micro-batches and data shards: it does not
    depend on how the step is cut.
    """

    def __init__(self, objective: OnlineObjective[GRPOSettings], model: nn.Module, *, device: torch.device) -> None:
        super().__init__(objective, model, device=device)
        self._settings = objective.settings
        self._wanted = (*self._wanted, "lots")
        self._begun = False
        # The batches are held, so that an address stands for one of them.
        self._batches: list[OnlineBatch] = []
        self._chosen: dict[int, torch.Tensor] = {}

    def begin(self, batches: Sequence[Any | None], parallel: Parallel) -> None:
        """Choose tokens of a step, from a forward of each of its micro-batches; collective.

        Args:
            batches: this rank's, None where it has nothing and other ranks have: it makes a forward all the same.
            parallel: the ranks.
        """
        # The step's own forwards, which come in this order, then have the dropout of these.
        state = random_state(self.device)
        logps = []
        with torch.no_grad():
            for batch in batches:
                found, _, _ = self.forward(self._objective.idle() if batch is None else batch)
                logps += [] if batch is None else [found]
        set_random_state(self.device, state)
        self._begun, self._batches = True, [batch for batch in batches if batch is not None]
        numbers = [
            np.stack([np.asarray(values, np.float64) for values in (each.old_logps, each.advantages, each.lots)])
            for each in self._batches
        ]
        known = torch.cat([torch.zeros(0, dtype=torch.float64), *(each.double().cpu() for each in logps)])
        mine = torch.cat([known[None], torch.from_numpy(np.concatenate([np.zeros((3, 0)), *numbers], axis=1))])
        every, at = (mine.T.contiguous(), 0) if parallel.data_parallel_size == 1 else parallel.gather(mine.T.contiguous())
        chosen = self._choose(*every.unbind(1))
        self._chosen = {}
        for batch in self._batches:
            self._chosen[id(batch)] = chosen[at : at + len(batch.old_logps)].to(self.device)
            at += len(batch.old_logps)

    def _choose(
        self, logps: torch.Tensor, old_logps: torch.Tensor, advantages: torch.Tensor, lots: torch.Tensor
    ) -> torch.Tensor:
        s = self._settings
        if s.policy.clipped == "cov_kl":
            return kl_cov_tokens(logps, advantages, lots, share=s.kl_cov_ratio)
        low, high = s.policy.bounds(s.clip, s.clip_high)
        assert low is not None
        bounds = {"share": s.clip_cov_ratio, "least": s.clip_cov_lb, "most": s.clip_cov_ub, "clip": low, "clip_high": high}
        return clip_cov_tokens(logps, old_logps, advantages, lots, **bounds)

    def policy(self, batch: OnlineBatch, logps: torch.Tensor, entropy: torch.Tensor) -> LossTerms:
        """Compute the policy's terms, and the number of chosen tokens."""
        terms = super().policy(batch, logps, entropy)
        return terms._replace(stats={**terms.stats, "chosen": self.chosen(batch)["chosen"].sum().to(logps)})

    def chosen(self, batch: OnlineBatch) -> dict[str, Any]:
        """Return bool[M], what was chosen of the batch's tokens.

        Raises:
            LossError: no step was begun, so that nothing is known of the other tokens.
        """
        if not self._begun:
            raise LossError(
                f"loss_type={self._settings.loss_type!r} chooses among all tokens of a step: before its first micro-batch call "
                "begin(micro_batches, forge_algos.ALONE), or with the strategy of several ranks, as train does"
            )
        found = self._chosen.get(id(batch))
        nothing = torch.zeros(len(batch.old_logps), dtype=torch.bool, device=self.device)
        return {"chosen": nothing if found is None else found}
