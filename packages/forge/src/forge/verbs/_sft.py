"""`forge.sft`: supervised fine-tuning on conversations, prompts with completions, or tokens."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import attrs

import forge_algos
import forge_data
from forge.settings._settings import RunSettings
from forge.tasks._lint_check import check_kind, check_lint
from forge.tasks._media import check_media, check_media_texts, has_media, with_media
from forge.tasks._offline import OfflineSteps
from forge.tasks._sharing import may_share
from forge.tasks._task import Run, Task
from forge.tasks.items._items import in_own_lines
from forge.tasks.items._samples import Conversations, Samples, items_of
from forge.verbs._registry import verb

if TYPE_CHECKING:
    from forge._progress import Reporter


@attrs.frozen(kw_only=True)
class SFTSettings(RunSettings):
    """Settings of `forge.sft`."""

    data: forge_data.DataSettings
    objective: forge_algos.SupervisedSettings


class SFT(Task):
    """Cross-entropy of the learned tokens of every row."""

    name = "sft"
    settings = SFTSettings
    media = True
    about = "Supervised fine-tuning: train a model on conversations, prompts with completions, or tokens."

    def items(self, s: Any, store: Any) -> Samples:  # noqa: ARG002 - the same for all settings
        """Plan each row as one item: a sample, or a conversation of samples; refuse other kinds."""
        check_kind(self.name, store, "supervised", "rows to imitate: messages, prompt and completion, documents, or tokens")
        return items_of(store)

    def check_data(self, s: Any, report: Reporter, train: Any, held_out: Any) -> None:
        """Refuse what the lint stops, and settings that rows with images cannot have."""
        check_media(s, train, held_out)
        check_lint(s, report, train, held_out)
        check_media_texts(s, train, held_out)

    def shared(self, s: Any, items: Any) -> dict[str, Any]:
        """Return what samples begin with, where none has noise of its own."""
        noise = s.adapter.lora_dropout or getattr(s.objective, "neftune_alpha", None)
        return items.prefixes if may_share(s) and not noise and isinstance(items, Samples) else {}

    def step_source(self, run: Run) -> OfflineSteps:
        """Take the steps of the batch plan, with the cross-entropy loss of `forge_algos.SFT`."""
        return self.rehearsal_source(with_media(run))

    def rehearsal_source(self, run: Run) -> OfflineSteps:
        """Take the same steps, with images where the plan has put them in."""
        own = run.settings.objective
        reason = f"neftune_alpha={own.neftune_alpha:g} draws noise for each sample" if own.neftune_alpha else ""
        return OfflineSteps(with_shared_prefixes(run, run.model, unless=reason), forge_algos.SFT(own))


_LOOKED_AT = 8
"""Micro-batches whose samples are looked at for what they begin with, or steps of a plan that knows it."""
_STEPS = 512
"""Steps of such a plan that are looked at where none before them have anything in common."""


def with_shared_prefixes(run: Run, *models: Any, unless: str = "") -> Run:
    """Return the run with shared prefixes, where rows have such and the models allow it.

    Args:
        run: the run.
        models: those that are given its rows; every rank calls this.
        unless: a reason against it, from the settings.
    """
    if has_media(run.train.store, run.held_out and run.held_out.store):
        return run  # the same tokens may stand for other images
    parts = {"train": run.train, "held_out": run.held_out}
    of_rows = {name: items for name, items in parts.items() if isinstance(items, Samples)}
    apart = [items for items in of_rows.values() if isinstance(items, Conversations)]
    # Which divides the first steps: a long run compiles what divides them, for seconds, once in an installation.
    with run.report.taking("looking for what rows begin with alike"):
        spared = 0.0 if apart or in_own_lines(run.settings) else _in_common(run)
    if not apart and not spared:
        return attrs.evolve(run, plan=run.plan.alone())
    drops = forge_algos.first_dropout(run.model)
    if not apart and not unless and drops is not None:
        unless = f"{drops[0]} drops {drops[1]:g} of its inputs, of each sample others"
    share, why = not unless, unless
    for model in models if share else ():
        share, why = forge_algos.shares_prompts(model, device=run.device, autocast=run.autocast)
        if not share:
            break
    if apart:
        most = max(int(items.unshared.max()) for items in apart)
        cost = "" if share else f"; max_tokens_per_gpu counts it once, and the longest row has {most:,} tokens with repetitions"
        run.report.note(f"history: computed once a {'row' if share else 'turn'}: {why}{cost}")
    else:
        run.report.note(
            f"prefixes: computed {'once a micro-batch' if share else 'for each sample'}, where samples begin alike "
            f"({spared:.0%} of the first micro-batches' tokens): {why}"
        )
    # Turns of a row have the dropout of one history; rows have each their own.
    across = share and drops is None
    plan = run.plan if across else run.plan.alone()
    if plan is not run.plan:
        run.report.note("micro-batches are planned anew, each row with all of its tokens")
    how: dict[str, Any] = {"share_history": share, "share_prefix": across, "max_tokens": plan.max_tokens}
    return attrs.evolve(run, plan=plan, **{name: items.sharing(**how) for name, items in of_rows.items()})


def _in_common(run: Run) -> float:
    """Return the share of tokens in a run's first micro-batches that need not be computed again.

    Of a plan that knows prefixes by its own count, else of what is put together.
    """
    assert isinstance(run.train, Samples)
    plan = run.plan
    if plan.prefixes is not None:
        # Samples with one prefix are together on few ranks, and may all come late.
        whole = once = 0
        for number, step in enumerate(itertools.islice(run.steps_from(0), _STEPS)):
            whole += int(plan.tokens[step])
            once += sum(plan.places(rows) for rank in range(plan.world_size) for rows in plan.micro_batches(step, rank))
            if number + 1 >= _LOOKED_AT and once < whole:
                break
        if once < whole:
            return 1 - once / whole
    items, tokens, computed, looked = run.train.sharing(share_prefix=True), 0, 0, 0
    for step in run.steps_from(0):
        for rows in plan.micro_batches(step):
            tokens += int(items.lengths[rows].sum())
            computed += len(items.batch(rows).input_ids)
            looked += 1
            if looked == _LOOKED_AT:
                return 1 - computed / max(1, tokens)
    return 1 - computed / max(1, tokens)


sft = verb(SFT())
