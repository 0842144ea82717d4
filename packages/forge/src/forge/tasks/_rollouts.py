"""Prompts → rollouts (sampled, rewarded completions) in the run directory → micro-batches."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, cast

import attrs
import numpy as np

import forge_algos
import forge_data
import forge_dist
from forge._disk import writing
from forge._errors import SettingsError
from forge.settings._settings import row_keys, row_tokens
from forge.tasks._media import sampled_media
from forge.tasks._reference_model import moving_reference, note_moves, why_not_off
from forge.tasks._reward_model import reward_model
from forge.tasks._sampling_server import SamplingServer
from forge.tasks._seeds import step_seed
from forge.tasks._sharing import sharing
from forge.tasks._task import Evaluation, Run
from forge.tasks.items._media import read_ahead
from forge.tasks.items._prompts import Prompts

LOOKED_AT = 4096
"""Steps of a batch plan among which the largest is looked for: bins are filled alike in all of them."""
_HELD_OUT = -1
"""Step index in the seed of held-out completions: every evaluation of the same weights samples the same ones."""
_ROUNDED = 1e-5
"""Differences of rewards, relative to the largest reward, of which float32's rounding (6e-8) is more than a hundredth."""
_ADDED = 1e-4
"""What `group_advantages` adds to a deviation."""
_SHOWN = ("reward", "greedy_reward", "kl", "length", "cut_off", "unscored")
"""Figures of held-out completions that are reported, beside each reward's own."""


class RolloutSteps:
    """Steps of the online verbs: `updates` optimizer steps on each rollout."""

    def __init__(self, run: Run, objective: forge_algos.Objective, updates: int) -> None:
        self.objective, self._policy = objective, cast("Any", objective)
        self._run, self._updates, self._own = run, updates, run.settings.objective
        self.average = moving_reference(run)
        self._reference: Any = None
        if self.average is not None:
            self._reference = self.average.exchanged
        elif self._own.kl_weight:
            off = why_not_off(run.settings) is None
            self._reference = "adapter_off" if off else run.load_frozen(None)
        # A reference of its own may be loaded in another dtype, and found to be another one.
        self._share = sharing(run, *([self._reference] if hasattr(self._reference, "forward") else []))
        self._share.note(run, "a group" if self._share.prompt else "a completion", "prompts")
        self._server = None if self._own.sampler == "transformers" else SamplingServer(run, end_ids(run))
        media = sampled_media(run)
        self._sampler = sampler_of(run, media) if self._server is None else self._server.sampler
        self._loaded = False
        self._warned: set[str] = set()
        self._episodes = None if self._own.env is None else _episodes(run, frozenset() if media is None else media.token_ids)
        self._rewards = _rewards(run)
        self._held_out: forge_algos.online.Rollout | None = None

    def check_start(self) -> None:
        """Say when the reference moves.

        There is nothing to check: the first rollout is made of the initial model itself.
        """
        note_moves(self._run)

    def steps(self, first: int) -> Iterator[list[Any]]:
        """Yield the updates on one rollout after another.

        A rollout that was begun before the run was resumed is read back.
        """
        run, batches = self._run, []
        for step in run.steps_from(first):
            planned, update = divmod(step, self._updates)
            if update == 0 or not batches:
                batches = self._batches(self._rollout(planned, begun=update > 0))
            run.machine.seed(step_seed(run.settings.plan.seed, step, run.strategy.data_parallel_rank))
            self._loaded = False  # by the time that anything is sampled again, the step has moved the weights
            yield read_ahead(batches[update])

    def evaluate(self, model: Any) -> Evaluation | None:
        """Measure the mean reward on held-out prompts; None for any model but the trained one."""
        run = self._run
        if run.held_out is None or model is not run.model:
            return None
        rows = range(len(run.held_out))
        self._held_out = self._make(run.held_out, rows, step_seed(run.settings.plan.seed, _HELD_OUT, 0))
        found = self._held_out.figures()
        figures = {name: found[name] for name in found if name in _SHOWN or name.startswith("reward/")}
        return Evaluation(loss=None, count=int(found["completions"]), unit="completions", figures=figures)

    def held_out_rows(self) -> Iterator[Any]:
        """Yield the completions of held-out prompts that were sampled last, with their prompts."""
        assert self._held_out is not None
        every = np.ones_like(self._held_out.trained)
        held_out: Any = self._run.held_out
        whole = attrs.evolve(self._held_out, trained=every, masked=~every)
        (batches,) = forge_algos.online.rollout_batches(
            whole,
            max_tokens=row_tokens(self._run.settings),
            max_keys=row_keys(self._run.settings),
            **self._share.of_rows,
            parallel=self._run.strategy,
            rank=self._run.strategy.data_parallel_rank,
            **held_out.how,
        )
        return (batch.groups for batch in batches)

    def _rollout(self, planned: int, *, begun: bool) -> forge_algos.online.Rollout:
        """Sample and store the rollout of a step of the plan, or read the one that was stored."""
        run = self._run
        file = run.root / "rollouts" / f"step_{planned * self._updates + 1}.jsonl"
        if begun:
            try:
                stored = forge_algos.online.Rollout.read(file)
            except forge_algos.RolloutError as error:
                raise forge_algos.RolloutError(
                    f"{error}. The run was stopped within the steps on this rollout, which cannot be sampled again: put the "
                    f"file back, go on from a full state of step {planned * self._updates} or before (resume=PATH), or give "
                    "another ckpt_output_dir"
                ) from error
            run.report.rollout_figures = shown_figures(stored.figures())
            return stored
        rows = [int(i) for i in run.plan.samples(planned)]
        made = self._make(run.train, rows, step_seed(run.settings.plan.seed, planned, 0))
        self._warn_of_nothing_learned(made, planned)

        def write() -> None:
            with writing(file):
                file.parent.mkdir(exist_ok=True)
                made.write(file)

        run.ranks.first(write)
        figures = {name: value for name, value in made.figures().items() if value == value}  # noqa: PLR0124 - NaN is not equal
        if self._own.kl_target is not None:
            figures["kl_weight"] = self._policy.kl_weight
            known = made.completion_kl[~np.isnan(made.completion_kl)]
            self._policy.after_rollout(float(known.mean()) if len(known) else 0.0, len(known))
        run.report.rollout_figures = shown_figures(figures)
        self._warn_of_cut_off(figures, planned)
        run.metrics({"step": planned * self._updates, **{f"rollout_{name}": value for name, value in figures.items()}})
        self._warn_of_a_gap(figures.get("sampler_gap", 0.0), planned)
        return made

    def _warn_of_a_gap(self, gap: float, planned: int) -> None:
        """Warn once of a server whose log-probabilities are not the trained model's."""
        if gap > self._own.tis_above:
            weighed = "" if self._own.paired else ": each advantage is weighed by their ratio"
            self._warn_once(
                "gap",
                f"WARNING: step {planned * self._updates + 1}: the server's log-probabilities are {gap:.3g} nats a token from "
                f"the trained model's, above tis_above={self._own.tis_above:g}{weighed}. A "
                "server in another precision differs as much at every step; one that differs more and more "
                "(rollout_sampler_gap) has not taken all weights",
            )

    def _warn_of_nothing_learned(self, made: forge_algos.online.Rollout, planned: int) -> None:
        """Refuse a first rollout without a score, and warn once of a later one that teaches nothing."""
        scored = int((~np.isnan(made.rewards)).sum())
        names = ", ".join(made.scores)
        step = planned * self._updates + 1
        nothing = "nothing but the KL" if self._own.kl_weight and not self._own.paired else "nothing"
        if not scored and not planned:
            first, last = (self._run.train.source(row(made.prompt_rows)) for row in (min, max))
            raise forge_algos.RewardError(
                f"no completion of the first rollout could be scored: {names} gave no number (None or NaN, or an error that "
                f"on_reward_error=skip passes over) for any of {len(made.rewards):,} completions of {first} to {last}, so "
                "there is nothing to learn from; return a number for those that can be scored"
            )
        if not scored:
            self._warn_once(
                "nothing", f"WARNING: step {step}: {names} gave no completion a number; {nothing} is learned from this rollout"
            )
        elif self._own.mask_truncated and not made.finished.any():
            self._warn_once(
                "masked",
                f"WARNING: step {step}: every completion was cut off at max_new_tokens={self._own.max_new_tokens:,}, and "
                f"mask_truncated leaves those out; {nothing} is learned from this rollout. Raise max_new_tokens, or ask for "
                "shorter answers in the prompts",
            )
        elif not made.advantages.any() and made.spread and getattr(self._own, "baseline", "mean") == "second_best":
            self._warn_once(
                "nothing",
                f"WARNING: step {step}: in every prompt several completions share the best reward of {names}, and "
                f"baseline=second_best learns what the best has above the second; {nothing} is learned from this rollout. "
                "Where that goes on: a reward that tells the best apart, or another baseline",
            )
        elif not made.advantages.any() and made.greedy_rewards is not None:
            self._warn_once(
                "nothing",
                f"WARNING: step {step}: {names} gave every completion the reward of its prompt's greedy answer; {nothing} is "
                "learned from this rollout. Where that goes on: a reward that tells them apart, or a higher temperature",
            )
        elif not made.advantages.any():
            self._warn_once(
                "nothing",
                f"WARNING: step {step}: {names} gave all completions of a prompt the same reward, for every prompt; {nothing} "
                "is learned from this rollout. Where that goes on: a reward that tells them apart (rewards are float32, of "
                "seven digits), more num_generations, or a higher temperature",
            )
        else:
            self._warn_of_a_spread(made, step)

    def _warn_of_a_spread(self, made: forge_algos.online.Rollout, step: int) -> None:
        """Warn once of rewards whose differences are next to nothing.

        The optimizer makes steps of them all the same.
        """
        spread, size = made.spread, float(np.nanmax(np.abs(made.rewards)))
        if not spread:
            return
        said = f"WARNING: step {step}: the rewards of a prompt's completions differ by {spread:.2g} at the most"
        steps = "the optimizer makes steps of the usual length all the same. Give rewards that are further apart"
        if spread < _ROUNDED * size:
            self._warn_once(
                "spread",
                f"{said}, of rewards of {size:.3g}: float32 has seven digits, so that what is learned is mostly how they are "
                f"rounded, and {steps}, or leave out what they have in common",
            )
        elif spread < _ADDED and getattr(self._own, "scale", "none") != "none":
            self._warn_once(
                "spread",
                f"{said}, less than the {_ADDED:g} that is added to the deviation by which they are divided: advantages are "
                f"next to 0, and {steps}: multiply them, or give reward_weights",
            )

    def _warn_of_cut_off(self, figures: Mapping[str, float], planned: int) -> None:
        """Warn once of a rollout of which most completions have no end."""
        cut_off, number = int(figures["cut_off"]), int(figures["completions"])
        if 2 * cut_off <= number or "masked" in self._warned:
            return
        most, masked = self._own.max_new_tokens, self._own.mask_truncated
        them = "mask_truncated leaves them out" if masked else "are rewarded as they stand, without their end"
        remedy = "or ask for" if masked else "ask for"
        further = "" if masked else ", or set missing_eos_penalty or mask_truncated"
        self._warn_once(
            "cut_off",
            f"WARNING: step {planned * self._updates + 1}: {cut_off:,} of {number:,} completions were cut off at "
            f"max_new_tokens={most:,}, and {them}. Raise max_new_tokens, {remedy} shorter answers in the prompts{further}. "
            "The step line shows their share as cut_off",
        )

    def _warn_once(self, about: str, line: str) -> None:
        """Print and log a line unless one about the same was before."""
        if about not in self._warned:
            self._run.report.note(line)
        self._warned.add(about)

    def _make(self, prompts: Any, rows: Any, seed: int) -> forge_algos.online.Rollout:
        """Sample completions of rows of prompts, and reward them."""
        run, tokenizer = self._run, self._run.tokenizer
        if self._server is not None and not self._loaded:
            self._server.load()
            self._loaded = True
        forge_dist.doing("sampling completions and rewarding them")
        own = self._own if self._own.kl_target is None else attrs.evolve(self._own, kl_weight=self._policy.kl_weight)
        with run.rounded():
            return forge_algos.online.make_rollout(
                run.model,
                self._sampler,
                prompts.batch(rows),
                settings=own,
                rewards=self._rewards,
                decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=True),
                decode_whole=tokenizer.decode,
                max_tokens=row_tokens(run.settings),
                max_keys=row_keys(run.settings),
                seed=seed,
                rows=rows,
                device=run.device,
                autocast=run.autocast,
                parallel=run.strategy,
                rank=run.strategy.data_parallel_rank,
                reference=self._reference,
                **self._share.of_rows,
                source=prompts.source,
                episodes=self._episodes,
                **prompts.how,
                **({} if self._server is None else self._server.media_of(prompts)),
            )

    def _batches(self, rollout: forge_algos.online.Rollout) -> list[list[Any]]:
        """Divide a rollout into this rank's micro-batches of each update."""
        run, prompts = self._run, cast("Prompts", self._run.train)
        return forge_algos.online.rollout_batches(
            rollout,
            max_tokens=row_tokens(run.settings),
            max_keys=row_keys(run.settings),
            updates=self._own.updates_per_pass,
            passes=self._own.num_iterations,
            **self._share.of_rows,
            parallel=run.strategy,
            rank=run.strategy.data_parallel_rank,
            **prompts.how,
            lots=self._own.policy.chooses,
        )


def shown_figures(figures: Mapping[str, float]) -> str:
    """Write what a step's line shows of its rollout, of all completions.

    >>> shown_figures({"reward_std": 0.25, "length": 30.5, "cut_off": 6, "completions": 8})
    'reward_std 0.25  length 30.5  cut_off 75%'
    """
    cut_off = f"  cut_off {figures['cut_off'] / figures['completions']:.0%}" if figures["cut_off"] else ""
    return f"reward_std {figures['reward_std']:.3g}  length {figures['length']:,.1f}{cut_off}"


def sampler_of(run: Run, media: forge_algos.online.SampledMedia | None) -> forge_algos.online.GenerateSampler:
    """Return what samples from the model of a run, given prompts with these images."""
    ends, padding = end_ids(run), run.tokenizer.pad_token_id
    # A model would take the padding for media where it looks at ids alone.
    usable = padding is not None and (media is None or padding not in media.token_ids)
    return forge_algos.online.GenerateSampler(
        run.model,
        eos_ids=ends,
        pad_id=padding if usable else ends[0],
        batch_tokens=run.settings.plan.max_tokens_per_gpu,
        synced=run.strategy.divides,
        autocast=run.autocast,
        parallel=run.strategy,
        media=media,
    )


def _episodes(run: Run, never: Collection[int]) -> forge_algos.online.Episodes:
    """Return what plays episodes of the run's environment."""
    name = run.settings.objective.env
    turns = forge_data.TurnReader(run.tokenizer, end_ids=end_ids(run))
    return forge_algos.online.Episodes(forge_algos.online.load_environment(name), turns, name=name, never=never)


def end_ids(run: Run) -> list[int]:
    """Return the token ids that end a completion: the model's and the tokenizer's."""
    found = [getattr(getattr(run.model, "generation_config", None), "eos_token_id", None), run.tokenizer.eos_token_id]
    ids = [one for each in found if each is not None for one in (each if isinstance(each, list) else [each])]
    if not ids:
        raise SettingsError(
            f"model_path {run.settings.model.model_path}: neither generation_config.json nor the tokenizer names a token that "
            "ends a text: set eos_token in tokenizer_config.json."
        )
    return sorted(set(ids))


def _rewards(run: Run) -> list[forge_algos.online.Reward]:
    """Load the reward functions and the reward model, each with its weight."""
    own = run.settings.objective
    functions = [(name, forge_algos.online.load_reward(name)) for name in own.reward]
    if own.reward_model_path is not None:
        functions.append(("reward_model", reward_model(run, own.reward_model_path)))
    weights = own.reward_weights or (1.0,) * len(functions)
    return [
        forge_algos.online.Reward(
            name=name,
            function=function,
            weight=weight,
            columns=forge_algos.online.reward_columns(name) if name in own.reward else (),
        )
        for (name, function), weight in zip(functions, weights, strict=True)
    ]
