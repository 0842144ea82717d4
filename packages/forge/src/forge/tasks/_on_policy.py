"""Steps of distillation on rows, of which a share is on the model's own completions (GKD)."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import attrs
import numpy as np

import forge_algos
import forge_dist
from forge._counted import counted
from forge.tasks._media import sampled_media
from forge.tasks._offline import OfflineSteps
from forge.tasks._rollouts import LOOKED_AT, sampler_of
from forge.tasks._seeds import step_seed
from forge.tasks._task import Run
from forge.tasks.items._media import read_ahead
from forge.tasks.items._own_answers import OwnAnswers
from forge.tasks.items._own_taught import OwnTaught

_CHOICE = -1
"""Rank in the seed that chooses what a step learns from; there is none of this number."""


class OnPolicySteps(OfflineSteps):
    """Steps of which a share, `on_policy`, is on completions that are sampled for them.

    This is GKD (arXiv 2306.13649, algorithm 1): the prompts are those of the step's rows, and no gradient runs through the
    sampling. Steps and completions follow from the seed and the step, so that a resumed run samples the same ones.
    """

    def __init__(self, run: Run, objective: forge_algos.Objective) -> None:
        super().__init__(run, objective)
        self._sampler = sampler_of(run, sampled_media(run))

    def steps(self, first: int) -> Iterator[list[Any]]:
        """Yield this rank's micro-batches of each step."""
        run, seed = self.run, self.run.settings.plan.seed
        self._tell()
        for step in run.steps_from(first):
            sampled = self._samples(step)
            run.report.rollout_figures = ""
            batches = self._sampled(step) if sampled else self._batches(step)
            run.machine.seed(step_seed(seed, step, run.strategy.data_parallel_rank))
            yield read_ahead(batches) if sampled else batches

    def _samples(self, step: int) -> bool:
        """Whether a step is on sampled completions."""
        seed = step_seed(self.run.settings.plan.seed, step, _CHOICE)
        return bool(np.random.default_rng(seed).random() < self.run.settings.objective.on_policy)

    def _tell(self) -> None:
        """Say how many steps the seed has drawn, where they are few enough to be asked beforehand."""
        share, steps = self.run.settings.objective.on_policy, self.run.num_steps
        if share == 1 or steps is None or steps > LOOKED_AT:
            return
        drawn = sum(map(self._samples, range(steps)))
        self.run.report.note(
            f"{'' if drawn else 'WARNING: '}on_policy={share:g}: {drawn:,} of {counted(steps, 'steps')} "
            f"{'is' if drawn == 1 else 'are'} on completions of the model's own, as the seed draws them"
        )

    def _sampled(self, step: int) -> list[Any]:
        """Sample a completion of each prompt of a step; return this rank's micro-batches."""
        run, items = self.run, _items(self.run)
        rows = [int(i) for i in run.plan.samples(step) if items.prompt_lengths[i]]
        if not rows:
            return self._batches(step)
        forge_dist.doing("sampling completions")
        prompts = [items.prompt(i) for i in rows]
        with run.rounded():
            found = forge_algos.online.sample_self(
                self._sampler,
                prompts,
                prompts,
                settings=sampling_of(run.settings.objective),
                seed=step_seed(run.settings.plan.seed, step, 0),
                parallel=run.strategy,
                rank=run.strategy.data_parallel_rank,
                **items.media_of(rows),
            )
        run.ranks.first(lambda: self._write(step + 1, rows, found))
        lengths = [len(ids) for ids in found.completion_ids]
        completions, figures = items.read(rows, found.completion_ids, found.finished.tolist())
        cut_off = int((~found.finished).sum())
        figures |= {"rollout_length": float(np.mean(lengths)), "rollout_cut_off": cut_off}
        shown = ["sampled", f"length {np.mean(lengths):,.1f}", *([f"cut_off {cut_off / len(rows):.0%}"] if cut_off else [])]
        if (compared := figures.get("rollout_compared")) is not None:
            shown.append(f"compared {compared:.0%}")
        run.report.rollout_figures = "  ".join(shown)
        run.metrics({"step": step, **figures})
        # A row may stand in a step twice, with two completions.
        left: dict[int, list[Any]] = defaultdict(list)
        for row, completion in zip(rows, completions, strict=True):
            left[row].append(completion)
        batches = []
        for rank in range(run.plan.world_size):
            for micro_batch in run.plan.micro_batches(step, rank):
                asked = [int(i) for i in micro_batch if items.prompt_lengths[i]]
                taken = [left[i].pop(0) for i in asked]
                if rank == run.strategy.data_parallel_rank:
                    batches.append(items.with_completions(asked, taken))
        return batches

    def _write(self, step: int, rows: list[int], found: forge_algos.online.SelfSamples) -> None:
        """Write what was sampled for a step, in words and tokens."""
        folder, decode = self.run.root / "samples", self.run.tokenizer.decode
        folder.mkdir(exist_ok=True)
        lines = []
        for row, prompt, ids, finished in zip(rows, found.prompt_ids, found.completion_ids, found.finished, strict=True):
            texts = {"prompt": decode(prompt), "completion": decode(ids)}
            line = {"row": row, **texts, "completion_ids": ids.tolist(), "finished": bool(finished)}
            lines.append(json.dumps(line, ensure_ascii=False) + "\n")
        forge_dist.write_text_atomically(folder / f"step_{step}.jsonl", "".join(lines))


class RehearsedOnPolicy(OfflineSteps):
    """Steps of a run without numbers, with completions as long as they may be."""

    def __init__(self, run: Run, objective: forge_algos.Objective) -> None:
        super().__init__(attrs.evolve(run, train=_items(run).made_up()), objective)

    def caches(self) -> Iterator[Any]:
        """Sample the first and the last token of the largest batches."""
        run, items, own = self.run, _items(self.run), self.run.settings.objective
        step = max(self._looked_at(), key=lambda step: int(items.prompt_lengths[run.plan.samples(step)].sum()))
        rows = sorted(map(int, run.plan.samples(step)), key=lambda row: -int(items.prompt_lengths[row]))
        asked = [row for row in rows[: -(-len(rows) // run.plan.world_size)] if items.prompt_lengths[row]]
        yield from sampler_of(run, sampled_media(run)).first_and_last(
            [items.prompt(row) for row in asked],
            max_new_tokens=own.max_new_tokens,
            **forge_algos.online.draw_options(sampling_of(own)),
            **items.media_of(asked),
        )

    def largest(self) -> int:
        """Return the tokens of the largest micro-batch."""
        plan = self.run.plan
        of_ranks = ((step, rank) for step in self._looked_at() for rank in range(plan.world_size))
        return max(int(plan.places(rows)) for step, rank in of_ranks for rows in plan.micro_batches(step, rank))

    def _looked_at(self) -> range:
        plan = self.run.plan
        return range(LOOKED_AT if plan.endless else min(plan.num_steps, LOOKED_AT))


def sampling_of(own: forge_algos.DistillSettings) -> forge_algos.SDFTSettings:
    """Return how completions are sampled, in the words of a verb that samples."""
    return forge_algos.SDFTSettings(
        max_new_tokens=own.max_new_tokens,
        temperature=own.temperature if own.sample_temperature is None else own.sample_temperature,
        top_p=own.top_p,
        top_k=own.top_k,
        min_p=own.min_p,
        repetition_penalty=own.repetition_penalty,
    )


def _items(run: Run) -> OwnAnswers | OwnTaught:
    assert isinstance(run.train, OwnAnswers | OwnTaught)
    return run.train
