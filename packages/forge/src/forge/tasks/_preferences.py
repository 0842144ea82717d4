"""What the verbs that learn from preferences share: pairs of answers, their prompts, and the reference that some compare with."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import attrs

import forge_algos
from forge._errors import SettingsError
from forge._progress import Reporter
from forge.run._adaptation import why_not_off
from forge.run._choices import require_same_tokens
from forge.tasks._lint_check import check_data, check_kind
from forge.tasks._offline import Offline
from forge.tasks._reference_logps import read_references, refer
from forge.tasks._task import Run, Task
from forge.tasks.items._pairs import Pairs


class Preferences(Task):
    """What the verbs that learn from pairs of answers share; each names its objective."""

    needs = "rows with chosen and rejected answers"
    kind = "preference"

    def prepare(self, s: Any, path: Any, tokenizer: Any, directory: Any, report: Reporter, **more: Any) -> Any:
        """Tokenise rows of two answers."""
        return super().prepare(s, path, tokenizer, directory, report, on_bad_pair=s.data.on_bad_pair, **more)

    def items(self, s: Any, store: Any) -> Pairs:  # noqa: ARG002 - the same for all settings
        """Plan pairs."""
        check_kind(self.name, store, self.kind, self.needs)
        return Pairs(store)

    def check(self, s: Any, report: Reporter, train: Any, held_out: Any) -> None:
        """Refuse what the lint stops."""
        check_data(s, report, train, held_out)

    @abstractmethod
    def objective(self, run: Run) -> forge_algos.Objective:
        """What is learned from the pairs."""

    def begin(self, run: Run) -> Offline:
        """Make the work of pairs whose prompts are shared where the model's attention allows it."""
        return Offline(with_what_the_model_can(run), self.objective(run))


class Referred(Preferences):
    """Those of them that compare with a reference model."""

    def paths(self, s: Any) -> dict[str, str]:
        """The reference model, where it is another."""
        return {} if s.objective.reference_path is None else {"reference_path": s.objective.reference_path}

    def check(self, s: Any, report: Reporter, train: Any, held_out: Any) -> None:
        """Refuse a reference that reads other tokens, and what the lint stops."""
        for name, path in self.paths(s).items():
            require_same_tokens(s.model.model_path, name, path)
        super().check(s, report, train, held_out)

    def refer(self, run: Run) -> None:
        """Score every completion with the reference, once."""
        if run.settings.objective.reference == "stored":
            refer(run, {"train": run.train, "eval": run.held_out})

    def begin(self, run: Run) -> Offline:
        """Make the work of pairs beside their reference."""
        return FromReference(with_what_the_model_can(run), self.objective(run))


class FromReference(Offline):
    """Work that begins at its reference: there the loss is known."""

    def first(self) -> None:
        """Raise unless the loss of some pairs is that of a model which equals its reference."""
        run = self._run
        if run.settings.objective.reference_path is not None:
            return
        # Of the first step: the reference was asked for what the run will use alone.
        rows = run.plan.micro_batches(0, run.ranks.rank)
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


def check_reference(s: Any) -> None:
    """Refuse to switch off an adapter that there is not, or that is no step away from the base. Raises SettingsError."""
    if s.objective.reference == "adapter_off" and (why := why_not_off(s)):
        raise SettingsError(
            f"reference='adapter_off' is the model without its adapter, and {why}: set another adapter, or reference='stored' or 'live'."
        )


def with_what_the_model_can(run: Run) -> Run:
    """The run with items that know whether prompts are shared, and what the reference said."""
    share, why = forge_algos.shares_prompts(run.model, device=run.device)
    run.report.note(f"prompts: {'computed once a pair' if share else 'computed once an answer'}: {why}")
    stored = getattr(run.settings.objective, "reference", None) == "stored"

    def told(name: str, items: Any) -> Any:
        if items is None:
            return None
        return items.using(share_prompt=share, references=read_references(run, name, items) if stored else None)

    return attrs.evolve(run, train=told("train", run.train), held_out=told("eval", run.held_out))


def reference_of(run: Run) -> Any:
    """The second model of `reference=live`, or None."""
    own = run.settings.objective
    return run.load_frozen(own.reference_path or run.settings.model.model_path) if own.reference == "live" else None
