"""Prompts with demonstrations → own completions at each step → micro-batches for SDFT."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np

import forge_algos
import forge_dist
from forge._content import content_text
from forge.settings._settings import row_keys, row_tokens
from forge.tasks._fullest_rows import MadeUpRow
from forge.tasks._media import sampled_media
from forge.tasks._reference_model import why_not_off
from forge.tasks._rehearsed_rollouts import RehearsedRollouts, made_up
from forge.tasks._rollouts import sampler_of
from forge.tasks._seeds import step_seed
from forge.tasks._sharing import Sharing, sharing
from forge.tasks._task import Evaluation, Run
from forge.tasks.items._media import read_ahead

_HELD_OUT = -1
"""Step index in the seed of held-out completions: every evaluation of the same weights samples the same ones."""


class SelfSampleSteps:
    """Steps of SDFT: one optimizer step on completions that are sampled for it."""

    def __init__(self, run: Run) -> None:
        self._run, self._own = run, run.settings.objective
        self.average: forge_algos.WeightAverage | None = None
        teacher = self._teacher()
        self._share = sharing(run, *([teacher] if hasattr(teacher, "forward") else []))
        several = self._share.prompt and self._own.num_generations > 1
        self._share.note(run, "a group" if several else "a completion", "prompts")
        media = sampled_media(run)
        self._sampler, self._of_media = sampler_of(run, media), frozenset() if media is None else media.token_ids
        self._held_out: list[Any] = []
        self.objective: forge_algos.Objective = forge_algos.SelfDistill(settings=self._own, teacher=teacher)

    def _teacher(self) -> Any:
        """Return a frozen copy, or what gives the model the teacher's weights."""
        run, kind = self._run, self._own.teacher
        if kind == "ema":
            self.average = forge_algos.WeightAverage(run.optimizer, self._own.teacher_rate)
            return self.average.exchanged
        if kind == "current":
            return lambda _: nullcontext()
        if why_not_off(run.settings) is None:
            return forge_algos.adaptations.switched_off
        return run.load_frozen(None)

    def check_start(self) -> None:
        """Check nothing: the first completions are sampled from the initial model itself."""

    def steps(self, first: int) -> Iterator[list[Any]]:
        """Yield this rank's micro-batches of each step, sampled from the model as it is then."""
        run = self._run
        for step in run.steps_from(first):
            rows = [int(i) for i in run.plan.samples(step)]
            samples = self._sample(run.train, rows, step_seed(run.settings.plan.seed, step, 0))
            run.ranks.first(lambda rows=rows, samples=samples, step=step: self._write(step + 1, rows, samples))
            run.machine.seed(step_seed(run.settings.plan.seed, step, run.strategy.data_parallel_rank))
            yield read_ahead(self._batches(run.train, rows, samples))

    def evaluate(self, model: Any) -> Evaluation | None:
        """Measure the divergence from the teacher on held-out prompts.

        None for any model but the trained one.
        """
        run = self._run
        if run.held_out is None or model is not run.model:
            return None
        rows = list(range(len(run.held_out)))
        samples = self._sample(run.held_out, rows, step_seed(run.settings.plan.seed, _HELD_OUT, 0))
        self._held_out = self._batches(run.held_out, rows, samples)
        found = forge_algos.evaluate(
            model, self._held_out, objective=self.objective, device=run.device, autocast=run.autocast, parallel=run.strategy
        )
        return Evaluation(loss=found.loss, count=found.loss_count, unit=self.objective.unit, figures=found.figures)

    def held_out_rows(self) -> Iterator[Any]:
        """Yield the held-out completions that were sampled last, with the student's prompts."""
        return (batch.groups for batch in self._held_out)

    def _sample(self, items: Any, rows: list[int], seed: int) -> forge_algos.online.SelfSamples:
        run = self._run
        forge_dist.doing("sampling completions")
        with run.rounded():
            return forge_algos.online.sample_self(
                self._sampler,
                [prompt.input_ids for prompt in items.batch(rows)],
                items.teacher_ids(rows),
                settings=self._own,
                seed=seed,
                parallel=run.strategy,
                rank=run.strategy.data_parallel_rank,
                **items.media_of(rows),
            )

    def _batches(self, items: Any, rows: list[int], samples: forge_algos.online.SelfSamples) -> list[Any]:
        run, how = self._run, items.both_media(rows)
        how |= {"layout": items.layout} if how else {}
        return _taught(run, self._share, samples, parallel=run.strategy, rank=run.strategy.data_parallel_rank, **how)

    def _write(self, step: int, rows: list[int], samples: forge_algos.online.SelfSamples) -> None:
        """Write what was sampled for a step, in words."""
        folder, decode = self._run.root / "samples", self._run.tokenizer.decode
        folder.mkdir(exist_ok=True)
        lines = []
        for group, ids, finished in zip(samples.groups, samples.completion_ids, samples.finished, strict=True):
            row = rows[int(group)]
            texts = {
                "prompt": self._in_words(row, samples.prompt_ids[group]),
                "teacher_prompt": self._in_words(row, samples.teacher_ids[group]),
                "completion": decode(ids),
            }
            lines.append(json.dumps({"row": row, **texts, "finished": bool(finished)}, ensure_ascii=False) + "\n")
        forge_dist.write_text_atomically(folder / f"step_{step}.jsonl", "".join(lines))

    def _in_words(self, row: int, ids: Any) -> str:
        """Return a prompt as text, with the names of its media in the place of their tokens."""
        decode = self._run.tokenizer.decode
        if not self._of_media.intersection(ids.tolist()):
            return decode(ids)
        (prompt,) = self._run.train.batch([row])
        parts = [part for each in prompt.prompt if isinstance(each["content"], list) for part in each["content"]]
        names = content_text([part for part in parts if part.get("type") != "text"])
        return names + decode([token for token in ids.tolist() if token not in self._of_media])


class RehearsedSelfSamples(RehearsedRollouts):
    """Steps of a run without data, of lengths with which a micro-batch takes the most memory."""

    def __init__(self, run: Run) -> None:
        self._run, self._own = run, run.settings.objective
        self._share = sharing(run)
        media = sampled_media(run)
        self._never = frozenset() if media is None else media.token_ids
        teacher: Any = lambda _: nullcontext()  # noqa: E731 - the same weights: other ones would be as large
        if self._own.teacher != "current" and why_not_off(run.settings) is not None:
            # The copy of the initial model, or the averages of all weights.
            copy = run.load_frozen(None)
            teacher = copy if self._own.teacher == "initial" else teacher
        self.objective = forge_algos.SelfDistill(settings=self._own, teacher=teacher)

    def _prompt_ids(self, rows: list[int]) -> list[list[Any]]:
        """Return the token ids of prompts, as student and teacher are asked."""
        items: Any = self._run.train
        return [*super()._prompt_ids(rows), items.teacher_ids(rows)]

    def _batch(self, rows: list[int], row: MadeUpRow) -> Any:
        """Make up samples of these completions, and lay them out as one micro-batch."""
        run: Any = self._run
        used, groups = np.unique(row.prompts, return_inverse=True)
        chosen = [rows[at] for at in used]
        own, teacher = self._prompt_ids(chosen)
        samples = forge_algos.online.SelfSamples(
            prompt_ids=tuple(own),
            teacher_ids=tuple(teacher),
            groups=groups,
            completion_ids=made_up(row.lengths, own, never=self._never),
            finished=np.zeros(len(row.lengths), bool),
        )
        (batch,) = _taught(run, self._share, samples, **run.train.both_media(chosen))
        return batch


def _taught(run: Run, share: Sharing, samples: forge_algos.online.SelfSamples, **more: Any) -> list[Any]:
    """Divide samples into micro-batches as the run's settings have it."""
    return forge_algos.online.taught_batches(
        samples,
        max_tokens=row_tokens(run.settings),
        max_keys=row_keys(run.settings),
        skip_tokens=run.settings.objective.skip_tokens,
        **share.of_rows,
        **more,
    )
