"""Prompts of a run without data → made-up rollouts that take the most memory."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, cast

import numpy as np

import forge_algos
from forge.settings._settings import row_keys, row_tokens
from forge.tasks._fullest_rows import MadeUpRow, Update, fullest_lines, most_media, with_keys
from forge.tasks._media import sampled_media
from forge.tasks._reference_model import moving_reference, why_not_off
from forge.tasks._rollouts import LOOKED_AT, sampler_of
from forge.tasks._sharing import sharing
from forge.tasks._task import Run
from forge.tasks.items._items import Ints
from forge.tasks.items._prompts import Prompts


class RehearsedRollouts:
    """Rollouts of a run without data, of lengths with which a micro-batch takes the most memory."""

    def __init__(self, run: Run, objective: forge_algos.Objective) -> None:
        self.objective = objective
        self._run, self._own = run, run.settings.objective
        self._share = sharing(run)
        media = sampled_media(run)
        self._never = frozenset() if media is None else media.token_ids
        self.average = moving_reference(run)
        if self.average is None and self._own.kl_weight and why_not_off(run.settings) is not None:
            run.load_frozen(None)

    @property
    def _in_lines(self) -> bool:
        """Whether completions lie in padded lines, behind prompts with images."""
        return getattr(self._run.train, "layout", "packed") == "lines"

    def worst(self) -> list[list[Any]]:
        """Return the micro-batches of steps one of which takes the most memory.

        One step has the micro-batch with the most tokens, the other that with the most tokens and gathered keys, if that is
        another. Of padded lines they are those of `fullest_lines`.
        """
        if self._in_lines:
            chosen = {id(row): (rows, row) for rows in self._looked_at() for row in self._lines(rows)}
        else:
            found = [(rows, row) for rows in self._looked_at() for row in self._update(rows).fullest()]
            most = (max(found, key=lambda each, size=size: size(each[1].tokens, each[1].keys)) for size in (_tokens, with_keys))
            chosen = {id(row): (rows, row) for rows, row in most}
            if getattr(self._run.train, "media", None) is not None:
                of_media = [(rows, most_media(*self._media_sizes(rows), **self._limits(rows))) for rows in self._looked_at()]
                chosen |= {id(row): (rows, row) for rows, row in of_media if row is not None}
        steps = []
        for rows, row in chosen.values():
            # A short one where its step may have another, beside whose gradients it runs.
            update = self._update(rows)
            before = [self._batch(rows, update.shortest())] if update.several(row) else []
            steps.append([*before, self._batch(rows, row)])
        return steps

    def largest(self) -> int:
        """Return the tokens of the largest micro-batch."""
        return max(int(step[-1].groups.input_ids.size) for step in self.worst())

    def caches(self) -> Iterator[Any]:
        """Sample the first and the last token of the largest batches, held-out prompts included."""
        run, own = self._run, self._own
        # SDFT has no such setting: it samples with the model itself.
        if getattr(own, "sampler", "transformers") != "transformers":
            return
        sampler = sampler_of(run, sampled_media(run))
        parts: list[tuple[Any, Any]] = [(run.train, self._prompts())]
        parts += [] if run.held_out is None else [(run.held_out, range(len(run.held_out)))]
        for items, rows in parts:
            yield from sampler.first_and_last(
                [prompt.input_ids for prompt in items.batch(rows)],
                max_new_tokens=own.max_new_tokens,
                **forge_algos.online.draw_options(own),
                **items.media_of(rows),
            )

    def _prompts(self) -> list[int]:
        """Return a rank's share of the prompts of the step that has most tokens."""
        rows = sorted(next(self._looked_at()), key=lambda row: -int(self._run.train.lengths[row]))
        return rows[: -(-len(rows) // self._run.plan.world_size)]

    def _looked_at(self) -> Iterator[list[int]]:
        """Yield the prompts of the steps with most tokens, and the longest one.

        Beside images also with most tokens of images, and fewest of all.
        """
        plan, items = self._run.plan, self._run.train
        steps = range(LOOKED_AT if plan.endless else min(plan.num_steps, LOOKED_AT))
        lengths = [items.lengths[plan.samples(step)] for step in steps]
        chosen = dict.fromkeys(max(steps, key=lambda step, of=of: int(of(lengths[step]))) for of in (np.sum, np.max))
        if items.store.has_media:
            tokens = items.store.media_counts[:, 1]
            chosen[max(steps, key=lambda step: int(tokens[plan.samples(step)].sum()))] = None
            # Lines behind short prompts have most room for completions.
            chosen[min(steps, key=lambda step: int(lengths[step].sum()))] = None
        for step in chosen:
            rows = [*map(int, plan.samples(step))]
            yield rows if self._in_lines else sorted(rows, key=lambda row: -int(items.lengths[row]))

    def _prompt_ids(self, rows: list[int]) -> list[list[Any]]:
        """Return the token ids of prompts, of each kind that a completion is computed behind."""
        return [[prompt.input_ids for prompt in self._run.train.batch(rows)]]

    def _update(self, rows: list[int]) -> Update:
        """Return these prompts as those of the optimizer steps that a rollout is divided into."""
        prompts = self._prompt_ids(rows)
        return Update(
            **self._limits(rows),
            prompt_tokens=np.array([list(map(len, kind)) for kind in prompts], np.int64).T,
            max_keys=row_keys(self._run.settings),
            shares=self._share.prompt,
            ranks=self._run.plan.world_size,
            beginnings=self._share.beginnings(*prompts),
        )

    def _lines(self, rows: list[int]) -> list[MadeUpRow]:
        """Return the fullest micro-batches of padded lines of these prompts."""
        shuffled = getattr(self._own, "updates_per_pass", 1) > 1
        ranks = self._run.plan.world_size
        return fullest_lines(*self._media_sizes(rows), **self._limits(rows), ranks=ranks, shuffled=shuffled)

    def _media_sizes(self, rows: list[int]) -> tuple[Ints, Ints]:
        """Return int64[G] twice: tokens of prompts, and those of them that stand for images."""
        items: Any = self._run.train
        return np.max([list(map(len, kind)) for kind in self._prompt_ids(rows)], axis=0), items.media_counts[rows, 1]

    def _limits(self, rows: list[int]) -> dict[str, int]:
        own = self._own
        return {
            "groups": -(-len(rows) // getattr(own, "updates_per_pass", 1)),
            "each": own.num_generations,
            "max_new_tokens": own.max_new_tokens,
            "max_tokens": row_tokens(self._run.settings),
        }

    def _batch(self, rows: list[int], row: MadeUpRow) -> Any:
        """Make up a rollout of these completions, all of them trained, as one micro-batch."""
        used, groups = np.unique(row.prompts, return_inverse=True)
        prompts = self._run.train.batch([rows[at] for at in used])
        number = len(row.lengths)
        zeros, tokens = np.zeros(number, np.float32), np.zeros(int(row.lengths.sum()), np.float32)
        values = tokens if self._own.credit == "gae" else None
        rollout = forge_algos.online.Rollout(
            seed=0,
            prompt_rows=np.array([rows[at] for at in used], np.int64),
            prompt_ids=tuple(np.asarray(prompt.input_ids, np.int32) for prompt in prompts),
            prompt_texts=("",) * len(prompts),
            groups=groups,
            completion_ids=made_up(row.lengths, [prompt.input_ids for prompt in prompts], never=self._never),
            completion_texts=("",) * number,
            finished=np.zeros(number, bool),
            scores={},
            rewards=zeros,
            trained=np.ones(number, bool),
            masked=np.zeros(number, bool),
            old_logps=tokens,
            ref_logps=tokens if self._own.kl_weight else None,
            values=values,
            advantages=tokens,
            returns=values,
        )
        ((batch,),) = forge_algos.online.rollout_batches(
            rollout,
            max_tokens=row_tokens(self._run.settings),
            max_keys=row_keys(self._run.settings),
            **self._share.of_rows,
            **cast("Prompts", self._run.train).pictures,
            lots=self._own.policy.chooses,
        )
        return batch


def made_up(lengths: Ints, prompts: list[Any], never: Collection[int] = ()) -> tuple[Any, ...]:
    """Make up completions of these lengths, without the tokens `never`.

    Neighbours differ from their first token on, so that they share no more than their prompts.
    """
    tokens = [token for token in range(1 + max(int(np.max(ids)) for ids in prompts)) if token not in never]
    return tuple(np.full(length, tokens[number % len(tokens)], np.int32) for number, length in enumerate(lengths.tolist()))


def _tokens(tokens: int, keys: int) -> tuple[int, int]:
    return tokens, keys
