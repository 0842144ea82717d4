"""Settings of a reference model or a teacher → checks of it, and the loaded model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

import forge_algos
import forge_data
from forge._counted import counted
from forge._errors import SettingsError

if TYPE_CHECKING:
    from forge.tasks._task import Run


def why_not_off(s: Any) -> str | None:
    """Explain why the model without its adapter is not the initial one; None where it is."""
    a = s.adapter
    if a.adapter == "none":
        return "adapter=none trains the model itself"
    if a.adapter in ("prefix", "prompt"):
        return f"adapter={a.adapter} begins as another model than the one without it"
    if a.adapter_path is not None:
        return "adapter_path begins as another model than the one without it"
    if a.adapter != "osft":
        return None
    if a.osft_rule == "paper":
        return "osft_rule=paper moves the weights themselves"
    if a.unfreeze_rank_ratio == 1:
        return "unfreeze_rank_ratio=1 trains the targets of osft themselves"
    return "osft_train_rest moves weights of the model itself" if a.osft_train_rest else None


def check_reference(s: Any) -> None:
    """Raise SettingsError where reference=adapter_off is not the initial model.

    With adapter_path it may be asked for: there it is the base, from which the adapter began in an earlier run.
    """
    if s.objective.reference == "adapter_off" and s.adapter.adapter_path is None and (why := why_not_off(s)):
        raise SettingsError(
            f"reference=adapter_off is the model without its adapter, and {why}: set another adapter, or reference=stored or "
            "reference=live."
        )


def check_moving(s: Any) -> None:
    """Raise SettingsError where reference=moving cannot be kept beside the trained weights."""
    if s.objective.reference != "moving":
        return
    if s.strategy.strategy.startswith("zero"):
        raise SettingsError(
            f"reference=moving with strategy={s.strategy.strategy}: DeepSpeed holds the weights in a buffer of its own, in "
            "which they cannot be exchanged for the reference's. Take strategy=fsdp2, or another reference."
        )
    if s.optimizer.optimizer == "schedule_free":
        raise SettingsError(
            "optimizer=schedule_free with reference=moving: it computes its gradients at other weights than those that it has "
            "found, and which of them a reference should follow is not said. Take another optimizer, or another reference."
        )


def check_moving_preferences(s: Any) -> None:
    """Raise SettingsError where a moving reference does not fit the adapter or the evaluation."""
    if s.objective.reference != "moving":
        return
    if s.objective.reference_path is not None and s.adapter.adapter != "none":
        raise SettingsError(
            f"reference_path with reference=moving and adapter={s.adapter.adapter}: the reference is then a second set of the "
            "adapter's weights, beside the same base, and begins as the trained one. Leave reference_path out, or set "
            "reference=live."
        )
    compares = [name for name in ("keep_best", "early_stopping_patience") if getattr(s.evaluation, name)]
    if compares and s.evaluation.metric_for_best is None:
        raise SettingsError(
            f"{compares[0]} with reference=moving: held-out losses before and after a move are beside different references, so "
            "that the lowest is not that of the best step. Set metric_for_best, to a figure without the reference (of dpo "
            f"chosen_logp or rejected_logp) or to loss all the same, or leave {compares[0]} out."
        )


def check_moves(s: Any, num_steps: int | None, *, each: int = 1) -> None:
    """Raise SettingsError where a moving reference would not move before it is last asked.

    It is asked at each `each`-th step, the first among them.
    """
    own = s.objective
    if own.reference == "moving" and num_steps is not None and own.reference_sync_steps > (num_steps - 1) // each * each:
        asked = "the last one" if each == 1 else f"the last rollout, which is for {each} of them"
        still = attrs.fields(type(own)).reference.default
        raise SettingsError(
            f"reference_sync_steps={own.reference_sync_steps} with the {counted(num_steps, 'steps')} of this run: "
            f"reference=moving would never move before {asked}. Lower reference_sync_steps, train longer, or set "
            f"reference={still}."
        )


def note_moves(run: Run) -> None:
    """Say when a moving reference moves, and what that does to the figures."""
    own = run.settings.objective
    if own.reference == "moving":
        run.report.note(
            f"reference: it moves {own.reference_mixup:g} of the way to the trained model every "
            f"{own.reference_sync_steps:,} steps; the figures that are measured from it jump there"
        )


def moving_reference(run: Run) -> forge_algos.WeightAverage | None:
    """Return the average that reference=moving is; None with another reference."""
    own = run.settings.objective
    if own.reference != "moving":
        return None
    average = forge_algos.WeightAverage(run.optimizer, own.reference_mixup, every=own.reference_sync_steps)
    if (path := getattr(own, "reference_path", None)) is not None:
        why = None
        try:
            average.begin_as(run.model, run.load_frozen(path, as_trained=True), after=run.done)
        except forge_algos.OptimizerError as error:
            why = str(error)
        # A frozen weight may differ in what another rank holds of it.
        if found := [each for each in run.ranks.gather(why) if each is not None]:
            raise SettingsError(
                f"reference_path {path} with reference=moving: {found[0]}. Take a model that differs from model_path in "
                "trained weights alone, or reference=live."
            )
    return average


def require_same_tokens(s: Any, name: str, path: str, otherwise: str = "") -> None:
    """Raise SettingsError unless a second model's tokenizer gives every token the same id.

    The trained model's is taken with the tokens that are added to it. `otherwise` is a further remedy.
    """
    own, theirs = (forge_data.load_tokenizer(each) for each in (s.model.model_path, path))
    added = forge_data.add_tokens(own, s.model.add_tokens, special=s.model.add_special_tokens)
    if own.get_vocab() != theirs.get_vocab():
        lacking = [token for token in added.new if token not in theirs.get_vocab()]
        remedy = (
            f"It lacks {lacking[0]!r} of add_tokens, of which it can say nothing: take one that was trained with these tokens."
            if lacking
            else " ".join(["Take a model of the same family.", *([otherwise] if otherwise else [])])
        )
        raise SettingsError(
            f"{name} {path}: its tokenizer gives other ids to tokens than that of model_path, so that its predictions are "
            f"about other words. {remedy}"
        )


def live_reference(run: Run) -> Any:
    """Load the second model of reference=live; None with another reference."""
    own = run.settings.objective
    return run.load_frozen(own.reference_path) if own.reference == "live" else None
