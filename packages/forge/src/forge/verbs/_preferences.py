"""`forge.dpo`, `orpo`, `simpo`, `kto`, `reward`: learn from preferred and rejected answers."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

import attrs

import forge_algos
import forge_data
from forge._errors import SettingsError
from forge.settings._settings import RunSettings
from forge.tasks._lint_check import check_kind, check_lint
from forge.tasks._media import check_media, check_media_texts, has_media, with_media
from forge.tasks._offline import OfflineSteps
from forge.tasks._reference_logps import read_references, store_references
from forge.tasks._reference_model import (
    check_moves,
    check_moving,
    check_moving_preferences,
    check_reference,
    live_reference,
    moving_reference,
    note_moves,
    require_same_tokens,
)
from forge.tasks._sharing import may_share, sharing
from forge.tasks._task import Evaluation, Run, Task
from forge.tasks.items._media import media_names
from forge.tasks.items._pairs import Answers, LoneAnswers, Pairs
from forge.verbs._registry import verb

if TYPE_CHECKING:
    from forge._progress import Reporter


@attrs.frozen(kw_only=True)
class PreferenceSettings(RunSettings):
    """Settings that all preference verbs share."""

    data: forge_data.PreferenceDataSettings


class Preferences(Task):
    """Base of the preference verbs; each names its objective."""

    items_are = "pairs"
    kind = "preference"
    """Kind of the rows, as the store has it."""
    needs = "rows with chosen and rejected answers"

    def prepare(self, s: Any, path: Any, tokenizer: Any, directory: Any, report: Reporter, **more: Any) -> Any:
        """Tokenize rows of two answers."""
        return super().prepare(s, path, tokenizer, directory, report, on_bad_pair=s.data.on_bad_pair, **more)

    def items(self, s: Any, store: Any) -> Pairs:  # noqa: ARG002 - the same for all settings
        """Plan pairs of answers."""
        check_kind(self.name, store, self.kind, self.needs)
        return Pairs(store)

    def check_data(self, s: Any, report: Reporter, train: Any, held_out: Any) -> None:
        """Refuse what the lint stops, and settings that rows with images cannot have."""
        check_media(s, train, held_out)
        check_lint(s, report, train, held_out)
        check_media_texts(s, train, held_out)

    def shared(self, s: Any, items: Any) -> dict[str, Any]:
        """Return the prompts of pairs, and what these begin with where no dropout is their own."""
        return items.sharing(prompt=True, prefix=not s.adapter.lora_dropout) if may_share(s) else {}

    @abstractmethod
    def objective(self, run: Run) -> forge_algos.Objective:
        """Return the objective on the pairs."""

    def step_source(self, run: Run) -> OfflineSteps:
        """Take the steps of the batch plan, with shared prompts where the model allows it."""
        return self.steps_of(with_media(run))

    def rehearsal_source(self, run: Run) -> OfflineSteps:
        """Take the same steps, with images where the plan has put them in."""
        return self.steps_of(run)

    def steps_of(self, run: Run) -> OfflineSteps:
        """Return the steps of a run whose rows have their images."""
        return OfflineSteps(with_prompts_and_references(run), self.objective(run))


def with_prompts_and_references(run: Run, *others: Any) -> Run:
    """Return the run with shared prompts, where all models allow it, and stored references."""
    assert isinstance(run.train, Pairs)
    media = has_media(run.train.store, run.held_out and run.held_out.store)
    share = sharing(run, *others)
    one = "pair" if share.prompt and run.train.noun == "pairs" else "answer"
    share.note(run, "a pair" if one == "pair" else "an answer", run.train.noun)
    stored = getattr(run.settings.objective, "reference", None) == "stored"

    def using(name: str, items: Any) -> Any:
        if items is None:
            return None
        references = read_references(run, name, items) if stored else None
        return items.using(share_prompt=share.prompt, share_prefix=share.prefix, references=references)

    plan = run.plan if share.prefix or media else run.plan.alone(repeat=not share.prompt)
    if plan is not run.plan:
        what = "what it begins with" if share.prompt else "its prompt"
        run.report.note(f"micro-batches are planned anew, each {one} with {what}")
    return attrs.evolve(run, plan=plan, train=using("train", run.train), held_out=using("eval", run.held_out))


# Verbs without a reference model.


@attrs.frozen(kw_only=True)
class ORPOSettings(PreferenceSettings):
    """Settings of `forge.orpo`."""

    objective: forge_algos.ORPOSettings


class ORPO(Preferences):
    """Odds-ratio preference optimization."""

    name = "orpo"
    settings = ORPOSettings
    media = True
    about = "Odds-ratio preference optimization: imitate the chosen of two answers and prefer it, without a reference model."

    def check_data(self, s: Any, report: Reporter, train: Any, held_out: Any) -> None:
        """Refuse to learn prompts with images too: what stands for an image is never learned."""
        if s.objective.learn_prompt and has_media(train, held_out):
            raise SettingsError(
                f"learn_prompt and rows with {media_names(train, held_out)}: tokens that stand for those are never learned, "
                "and it learns all of a prompt. Leave learn_prompt out."
            )
        super().check_data(s, report, train, held_out)

    def objective(self, run: Run) -> forge_algos.Objective:
        """Return the ORPO objective."""
        return forge_algos.ORPO(run.settings.objective)


@attrs.frozen(kw_only=True)
class SimPOSettings(PreferenceSettings):
    """Settings of `forge.simpo`."""

    objective: forge_algos.SimPOSettings


class SimPO(Preferences):
    """Simple preference optimization."""

    name = "simpo"
    settings = SimPOSettings
    media = True
    about = (
        "Simple preference optimization: prefer the chosen of two answers by its likelihood a token, without a reference model."
    )

    def objective(self, run: Run) -> forge_algos.Objective:
        """Return the SimPO objective."""
        return forge_algos.SimPO(run.settings.objective)


@attrs.frozen(kw_only=True)
class RewardSettings(PreferenceSettings):
    """Settings of `forge.reward`."""

    objective: forge_algos.RewardSettings


class Reward(Preferences):
    """Reward modelling by the model of Bradley and Terry."""

    name = "reward"
    settings = RewardSettings
    media = True
    about = "Reward modelling: train a model with a scalar head to give the chosen of two answers the higher reward."

    def model_task(self, s: Any) -> str:  # noqa: ARG002 - the same for all settings
        """Load the model with a head of one number."""
        return "reward"

    def probe_objective(self, s: Any) -> forge_algos.Objective:
        """Return the reward objective: the language model's head is not there."""
        return forge_algos.Reward(s.objective)

    def objective(self, run: Run) -> forge_algos.Objective:
        """Return the reward objective."""
        return forge_algos.Reward(run.settings.objective)


# Verbs with a reference model.


@attrs.frozen(kw_only=True)
class ReferencedSettings(PreferenceSettings):
    """Settings that the verbs with a reference model share."""

    def check(self) -> None:
        """Refuse adapter_off where it is not the initial model, and moving where it cannot."""
        super().check()
        check_reference(self)
        check_moving(self)
        check_moving_preferences(self)

    def check_length(self, num_steps: int | None) -> None:
        """Refuse a moving reference that would not move before the run's last step."""
        super().check_length(num_steps)
        check_moves(self, num_steps)


class ReferencedPreferences(Preferences):
    """Base of the preference verbs that compare with a reference model."""

    def other_models(self, s: Any) -> dict[str, str]:
        """Return the path of the reference model, where it is not the initial model."""
        return {} if s.objective.reference_path is None else {"reference_path": s.objective.reference_path}

    def check_settings(self, s: Any) -> None:
        """Check the reference, which must have the same vocabulary."""
        super().check_settings(s)
        for name, path in self.other_models(s).items():
            require_same_tokens(s, name, path)

    def score_reference(self, run: Run) -> None:
        """Score every completion with the reference, once."""
        if run.settings.objective.reference == "stored":
            store_references(run, {"train": run.train, "eval": run.held_out})

    def rehearsal_source(self, run: Run) -> OfflineSteps:
        """Leave out the model that a moving reference begins as: it is gone before the first step."""
        own = run.settings.objective
        if own.reference == "moving":
            run = attrs.evolve(run, settings=attrs.evolve(run.settings, objective=attrs.evolve(own, reference_path=None)))
        return self.steps_of(run)

    def steps_of(self, run: Run) -> OfflineSteps:
        """Return the steps of a run, whose first loss is checked against the reference."""
        objective: Any = self.objective(run)
        others = [] if objective.reference is None else [objective.reference]
        average = moving_reference(run)
        if average is not None:
            objective = attrs.evolve(objective, reference=average.exchanged)
        return ReferencedSteps(with_prompts_and_references(run, *others), objective, average)


class ReferencedSteps(OfflineSteps):
    """Steps of a model that begins as its own reference, so that its first loss is known."""

    def __init__(self, run: Run, objective: forge_algos.Objective, average: forge_algos.WeightAverage | None = None) -> None:
        super().__init__(run, objective)
        self.average = average

    def evaluate(self, model: Any) -> Evaluation | None:
        """Compute the loss and figures over the held-out rows.

        None for another model than the trained one, whose weights a moving reference takes the place of.
        """
        return None if self.average is not None and model is not self.run.model else super().evaluate(model)

    def check_start(self) -> None:
        """Raise ReferenceMismatchError unless the first loss is that of the reference itself."""
        run = self.run
        note_moves(run)
        if run.settings.objective.reference_path is not None:
            return
        if run.settings.adapter.adapter_path is not None and run.settings.objective.reference == "adapter_off":
            run.report.note(
                "reference: adapter_off is the base without any adapter, and not the model as this run began, with the "
                "adapter of adapter_path: that is reference=stored or live"
            )
            return
        # The first step's rows: only items that the run uses have reference log-probabilities.
        rows = run.plan.micro_batches(0, run.strategy.data_parallel_rank)
        objective: Any = self.objective
        found = forge_algos.check_reference(
            run.model,
            [run.train.batch(indices) for indices in rows],
            objective=objective,
            device=run.device,
            autocast=run.autocast,
            parallel=run.strategy,
        )
        run.report.note(f"reference: the loss of {found:.4f} before the first step is that of a model equal to its reference")


@attrs.frozen(kw_only=True)
class DPOSettings(ReferencedSettings):
    """Settings of `forge.dpo`."""

    objective: forge_algos.DPOSettings


class DPO(ReferencedPreferences):
    """Direct preference optimization, in one of its forms or several."""

    name = "dpo"
    settings = DPOSettings
    media = True
    about = "Direct preference optimization: train a model to prefer the chosen of two answers, near a reference model."

    def objective(self, run: Run) -> forge_algos.Objective:
        """Return the DPO objective."""
        return forge_algos.DPO(run.settings.objective, reference=live_reference(run))


@attrs.frozen(kw_only=True)
class KTOSettings(ReferencedSettings):
    """Settings of `forge.kto`."""

    objective: forge_algos.KTOSettings


class KTO(ReferencedPreferences):
    """Kahneman-Tversky optimization, with one estimate of the KL a step or none."""

    name = "kto"
    settings = KTOSettings
    media = True
    items_are = "answers"
    about = "Kahneman-Tversky optimization: learn from single answers that are marked as wanted or not, near a reference model."
    kind = "unpaired_preference"
    needs = "rows of prompt, completion and label (true where the completion is wanted)"

    def items(self, s: Any, store: Any) -> Pairs:
        """Plan single answers, some of which are desirable and some not."""
        check_kind(self.name, store, self.kind, self.needs)
        return Answers(store) if s.objective.estimates_kl else LoneAnswers(store)

    def check_data(self, s: Any, report: Reporter, train: Any, held_out: Any) -> None:
        """Refuse answers of one class, and what the lint stops."""
        forge_data.check_classes(train)
        super().check_data(s, report, train, held_out)

    def objective(self, run: Run) -> forge_algos.Objective:
        """Return the KTO objective."""
        return forge_algos.KTO(run.settings.objective, reference=live_reference(run))


dpo, kto = verb(DPO()), verb(KTO())
orpo, simpo, reward = verb(ORPO()), verb(SimPO()), verb(Reward())
