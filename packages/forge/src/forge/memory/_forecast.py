"""Settings, data and a batch plan → the memory plan, by a step without numbers.

`forge_algos.Rehearsal` runs what a run runs: the same loop, objective, adapter and optimizer, on the plan's largest
micro-batch, with tensors that hold no data. What several ranks divide is divided afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import attrs

import forge_accel
import forge_algos
import forge_dist
from forge._progress import Reporter
from forge.memory._divided import Groups, divided, keeps_casts, shares
from forge.memory._largest import largest_batch, largest_held_out, largest_micro_batch, largest_micro_batches
from forge.memory._memory_plan import MemoryPlan
from forge.memory._outline import outline_of
from forge.memory._planned import Planned
from forge.memory._target import Target
from forge.tasks._base_kl import BaseDivergence
from forge.tasks._media import media_documents, media_join, with_rehearsed_media
from forge.tasks._parts import adapted_parts, freeze_unreached
from forge.tasks._reference_logps import make_up_references
from forge.tasks._rehearsed_rollouts import RehearsedRollouts
from forge.tasks._rollouts import LOOKED_AT
from forge.tasks._task import Run
from forge.tasks.items._items import Items
from forge.tasks.items._media import media_names
from forge.tasks.items._own_answers import OwnAnswers
from forge.tasks.items._own_taught import OwnTaught
from forge.tasks.items._prompts import Prompts

ROLLOUT = "rollout"
"""Name of the phase in which completions are sampled."""
_ROLLOUTS = (
    "completions are sampled for as long as they may be, and learned from with lengths that take the most; reward functions "
    "and the forward pass of a reward model are not counted"
)


def plan_of(bare: Rehearsed | Derived, target: Target) -> MemoryPlan:
    """Rehearse the phases of a run with its largest micro-batch.

    Without images where they need values.
    """
    if not bare.planned.media:
        return _plan_of(bare, target)
    what = media_names(bare.planned.train.store)
    kinds = {"spectrograms" if kind == "audio" else "pixels" for kind in bare.planned.train.store.media_kinds}
    computed = " and ".join(sorted(kinds))
    try:
        plan, note = _plan_of(bare, target), ""
        if bare.planned.media_rows == "lines":
            note = f"samples with {what} are counted in padded lines: masks of this model show that they are not packed"
        elif bare.planned.settings.packing.packing != "off" and media_join(bare.planned.settings, bare.planned.train.store):
            note = f"samples with {what} are counted as packed, which not every model can be"
    except (forge_algos.RehearsalError, forge_accel.AttentionError) as error:
        # A run takes another attention than the one of a text where that cannot compute images (Mllama's queries of a text).
        plan = _plan_of(bare.with_plan(attrs.evolve(bare.planned, media=False)), target)
        note = f"{computed}, and the forward of what computes on them, are not counted: {error}"
    return attrs.evolve(plan, notes=(*plan.notes, *([note] if note else [])))


def _plan_of(bare: Rehearsed | Derived, target: Target) -> MemoryPlan:
    planned = bare.rows
    notes = [] if planned.draft is not None else ["no small model of its configuration could be probed: packing is assumed"]
    tried = []
    for worst, several in largest_micro_batches(planned):
        step = bare.step(worst, several=several, first=planned.num_steps == 1)
        phase = divided(planned, "step", step.parts, bare.groups, on_host=target.block == 1)
        tried.append((phase, step, planned.plan.places(worst)))
    phase, step, tokens = max(tried, key=lambda each: each[0].planned)
    phases = [phase]
    online = isinstance(planned.train, Prompts)
    if online or isinstance(planned.train, (OwnAnswers, OwnTaught)):
        rollout, tokens = bare.rollout()
        phases.insert(0, divided(planned, ROLLOUT, rollout.parts, bare.groups, on_host=target.block == 1))
        notes.append(_ROLLOUTS)
    if planned.held_out is not None and not online:
        evaluation = bare.evaluation()
        phases.append(divided(planned, "evaluation", evaluation.parts, bare.groups, on_host=target.block == 1))
    held = bare.held(step.parts)
    phases += [
        divided(planned, name, parts, bare.groups, on_host=target.block == 1)
        for name, parts in _copies(bare, held, on_host=target.block == 1)
    ]
    if compiled := 0 if target.elsewhere else planned.machine.compiled_bytes(planned.dtype, _row_lengths(planned)):
        phases = [
            attrs.evolve(phase, planned=phase.planned + compiled, parts={**phase.parts, "compiled": compiled})
            for phase in phases
        ]
        notes.append("compiled are products that this processor's libraries keep, at most; no tensors, and not measured")
    if forge_accel.bfloat16 == planned.dtype != planned.weights and not planned.frozen and planned.gathers is None:
        notes.append("activations have bfloat16 copies of the weights in them, made once a step, and their gradients")
    if step.guesses:
        notes.append(f"assumed where the model asks for a value: {', '.join(step.guesses[:3])}")
    if (sharing := planned.settings.strategy.cp_size) > 1:
        notes.append(f"activations are those of one of the {sharing} ranks that share a row (cp_size)")
    if planned.settings.strategy.tp_size > 1 or planned.settings.strategy.ep_size > 1:
        notes.append("activations are counted as without tp_size and ep_size, which divide a part of them")
    if planned.ranks > 1:
        notes.append(f"what {planned.ranks} ranks divide is computed from one rank's step (strategy={planned.strategy})")
    return MemoryPlan(
        target=target,
        ranks=planned.ranks,
        tokens=tokens,
        phases=tuple(phases),
        notes=tuple(notes),
        trained=held["gradients"],
        state=held["gradients"] + held["optimizer"],
    )


def _copies(bare: Rehearsed | Derived, held: dict[str, int], *, on_host: bool) -> list[tuple[str, dict[str, int]]]:
    """Return the parts of what is held while a state is saved and an export loaded back."""
    planned, trained = bare.planned, held["gradients"]
    # Each rank writes a part of the state, and copies that.
    state = -(-(trained + held["optimizer"]) // planned.ranks) if planned.settings.checkpoints.async_save else 0
    # A device other than the host gets one layer of the copy that is loaded back at a time.
    beside = on_host or planned.strategy == "zero3" or bool(planned.loading)
    loaded = bare.weights + (trained if planned.frozen else 0) if beside else bare.weights // max(1, bare.groups.layers)
    return [("saving", {**held, "copies": state if on_host else 0}), ("export", {**held, "copies": loaded})]


_MANY = 100
"""Lengths of rows beyond which more are not told apart."""


def _row_lengths(planned: Planned) -> int:
    """Return how many lengths the rows of a run have, up to `_MANY`."""
    if isinstance(planned.train, (OwnAnswers, OwnTaught, Prompts)):
        return _MANY  # completions end anywhere
    plan, found = planned.plan, set[int]()
    for step in range(LOOKED_AT if plan.endless else min(plan.num_steps, LOOKED_AT)):
        for rank in range(plan.world_size):
            found.update(plan.places(row) for row in plan.micro_batches(step, rank))
        if len(found) >= _MANY:
            break
    return len(found)


def _groups(model: Any, layers: int, *, media: bool) -> Groups:
    """Return what ranks that divide a model gather together, where rows may have `media`."""
    whole = [model.get_submodule(name) for name in forge_dist.passed_over(model)] if media else []
    blocks = [each for each in forge_algos.repeated_blocks(model) if not any(each is outer for outer in whole)]
    sizes = [sum(p.numel() for p in each.parameters()) for each in blocks]
    beside = {p: p.numel() * p.element_size() for outer in whole for p in outer.parameters()}
    return Groups(layers, max(sizes, default=0), sum(p.numel() for p in model.parameters()) - sum(sizes), sum(beside.values()))


class Rehearsed(NamedTuple):
    """Model without numbers, adapted and wrapped as the run's would be."""

    planned: Planned
    rows: Planned
    """The same with images read for its rows, and its plan of those."""
    rehearsal: Any
    model: Any
    optimizer: Any
    adaptation: Any
    quantized: Any
    """What rounds weights while the model computes; None for nothing."""
    others: list[Any]
    weights: int
    """Bytes of the model itself."""
    groups: Groups
    """What ranks that divide it gather together."""

    blocks: int
    """Repeated blocks of the whole model."""

    @classmethod
    def of(
        cls, planned: Planned, target: Target, *, blocks: int | None = None, check: Callable[[], None] = lambda: None
    ) -> Rehearsed:
        """Make it, with the first `blocks` of its equal blocks or all; `check` may raise to end it.

        Raises:
            forge_algos.RehearsalError: it needs values, or its blocks are not alike or are no more than that.
        """
        s, machine = planned.settings, planned.machine
        rehearsal = forge_algos.Rehearsal(
            device=machine.device.value,
            allocated=target.allocated,
            autocast=planned.autocast,
            product_scratch=None if target.elsewhere else machine.product_scratch,
            library_bytes=0 if target.elsewhere else machine.library_bytes(),
            gather_dtype=planned.gathers,
            shares=shares(planned),
            media_way="lines" if planned.media_rows == "lines" or (planned.media and not planned.packed) else None,
            check=check,
        )
        check()
        outline = outline_of(planned, planned.model_path)
        number = len(forge_algos.repeated_blocks(outline))
        model: Any = rehearsal.model(outline, planned.draft, packed=planned.packed, blocks=blocks)
        forge_algos.score_rows_at_once(model, machine.head_rows)
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        layers = getattr(model.config.get_text_config(), "num_hidden_layers", 1)
        groups = _groups(model, layers, media=planned.media)
        with rehearsal.adapting():
            adaptation = forge_algos.adapt(
                model,
                without_measurements(s.adapter),
                tokenizer_path=planned.model_path,
                new_tokens=planned.new_tokens,
                **adapted_parts(s, model),
            )
            planned.task.add_modules(adaptation.model, s)
            forge_algos.cast_trained(adaptation.model, planned.weights)
        single = forge_dist.make_strategy(
            forge_dist.StrategySettings(
                strategy="single",
                activation_checkpointing=s.strategy.activation_checkpointing,
                activation_offloading=s.strategy.activation_offloading,
            ),
            one_rank(),
            device=machine.device.value,
            adapter=planned.frozen,
        )
        placed: Any = rehearsal.placed(adaptation.model)
        with suppress(forge_algos.RehearsalError):  # where values are needed, all of a part is counted
            freeze_unreached(
                s,
                placed,
                media_documents(s, planned.tokenizer, planned.train, planned.held_out),
                lambda document: rehearsal.unreached(placed, document),
            )
        model, optimizer = single.wrap(
            placed,
            lambda model: forge_algos.make_optimizer(model, s.optimizer, fused=machine.fused_optimizer.value),
        )
        kind = s.qat.qat
        quantized = None
        if kind is not None:
            kinds = forge_dist.rounded_weights(placed, kind, without=planned.task.extra_modules)
            quantized = forge_algos.QuantizedWeights(placed, kinds)
        made = rehearsal, model, optimizer, adaptation, quantized
        return cls(planned, _with_rows(planned), *made, [], weights, groups, number)

    def with_plan(self, planned: Planned) -> Rehearsed:
        """Return it for another plan of steps."""
        return self._replace(planned=planned, rows=_with_rows(planned))

    def step(self, worst: Any, *, several: bool, first: bool) -> Any:
        """Rehearse a step on the largest micro-batch, after a small one where a rank has several."""

        def rehearse(source: Any, items: Items, _: Any) -> Any:
            if isinstance(source, RehearsedRollouts):
                found = [self._step(source, batches, first=first) for batches in source.worst()]
                return max(found, key=lambda peak: sum(size / peak.shares.get(part, 1) for part, size in peak.parts.items()))
            plan, largest = getattr(source, "run", self.rows).plan, (worst, several)
            if plan is not self.rows.plan:  # it shares nothing after all
                largest = largest_micro_batch(plan)
            before = [items.batch([int(items.lengths.argmin())])] if largest[1] else []
            return self._step(source, [*before, largest_batch(plan, items, largest[0])], first=first)

        return self._within(rehearse)

    def rollout(self) -> tuple[Any, int]:
        """Rehearse the sampling; return that and the tokens of the largest micro-batch."""

        def rehearse(source: RehearsedRollouts, *_: Any) -> tuple[Any, int]:
            return (
                self.rehearsal.sampling(
                    self.model, self.optimizer, source.caches, others=self.others, quantized=self.quantized
                ),
                source.largest(),
            )

        return self._within(rehearse)

    def run_step(self, batches: list[Any], *, first: bool) -> Any:
        """Rehearse a step on micro-batches of a run."""
        return self._within(lambda source, *_: self._step(source, batches, first=first))

    def evaluation(self) -> Any:
        """Rehearse the measuring of the held-out rows of which most is computed."""

        def rehearse(source: Any, _: Any, held_out: Any) -> Any:
            batch = largest_held_out(self.rows, held_out)
            return self.rehearsal.evaluation(
                self.model,
                self.optimizer,
                batch,
                objective=lambda: source.objective,
                others=self.others,
                quantized=self.quantized,
            )

        return self._within(rehearse)

    def held(self, step: Mapping[str, int]) -> dict[str, int]:
        """Return weights, gradients and the optimizer's state between two steps."""
        trained = sum(p.numel() * p.element_size() for p in self.model.parameters() if p.requires_grad)
        # The state of an optimizer is there after its first step, which may be the only one.
        kept = [t for state in self.optimizer.state.values() for t in state.values() if hasattr(t, "nbytes")]
        return {
            "weights": step["weights"],
            "gradients": trained,
            "optimizer": max(step["optimizer"], sum(t.nbytes for t in kept)),
        }

    def _step(self, source: Any, batches: list[Any], *, first: bool) -> Any:
        s = self.planned.settings
        return self.rehearsal.step(
            self.model,
            self.optimizer,
            batches,
            objective=lambda: source.objective,
            adaptation=self.adaptation,
            others=self.others,
            first=first,
            buckets=self.planned.ranks > 1 and self.planned.strategy == "ddp",
            max_grad_norm=s.optimizer.max_grad_norm,
            moe_aux_loss=s.moe.moe_aux_loss,
            router_aux_loss_coef=s.moe.router_aux_loss_coef,
            keep_casts=keeps_casts(self.planned.strategy),
            average=getattr(source, "average", None),
            quantized=self.quantized,
        )

    def _within(self, body: Callable[[Any, Items, Items | None], Any]) -> Any:
        """Call `body` with the run's step source, whose further models have no numbers either."""
        planned, machine = self.rows, self.planned.machine
        self.others.clear()
        for path in planned.task.text_readers(planned.settings).values():
            self.others.append(self.rehearsal.placed(_judge(planned, path)).requires_grad_(requires_grad=False))
        with TemporaryDirectory() as folder:
            run = Run(
                settings=planned.settings,
                model=self.model,
                tokenizer=planned.tokenizer,
                train=planned.train,
                held_out=planned.held_out,
                plan=planned.plan,
                num_steps=planned.num_steps,
                strategy=forge_dist.make_strategy(
                    forge_dist.StrategySettings(strategy="single"),
                    one_rank(),
                    device=machine.device.value,
                    adapter=planned.frozen,
                ),
                ranks=one_rank(),
                machine=machine,
                device=machine.device.value,
                autocast=planned.autocast,
                root=Path(folder),
                load_frozen=self._other,
                report=Reporter(lambda _: None, quiet=True),
                metrics=lambda _: None,
                identity=planned.identity,
                optimizer=self.optimizer,
            )
            make_up_references(run)
            source: Any = planned.task.rehearsal_source(run)
            BaseDivergence(run)  # A second copy of the model is held beside it, where there is one.
            return body(source, getattr(source, "run", run).train, getattr(source, "run", run).held_out)

    def _other(self, path: str | None) -> Any:
        """Return a further model without numbers; None is the model as the run begins."""
        planned = self.planned
        outline = outline_of(planned, path or planned.model_path, frozen=True, initial=path is None)
        found = self.rehearsal.model(outline, None, packed=planned.packed)
        if path is None and planned.settings.adapter.adapter_path is not None:
            with self.rehearsal.adapting():
                found = forge_algos.adapt(found, planned.settings.adapter, **adapted_parts(planned.settings, found)).model
        found = self.rehearsal.placed(found)
        self.others.append(found.requires_grad_(requires_grad=False))
        return found


_FEWER = 3
"""Blocks of the smaller of two models from which a deeper one is derived: the first, the last, and one between."""


class Derived(NamedTuple):
    """Model as `Rehearsed`, of which only a few of its equal blocks are rehearsed, twice."""

    fewer: Rehearsed
    more: Rehearsed
    """With one block more."""

    @classmethod
    def of(cls, planned: Planned, target: Target, *, check: Callable[[], None] = lambda: None) -> Derived:
        """Make it; `check` may end what is rehearsed with an error.

        Raises:
            forge_algos.RehearsalError: it needs values, its blocks are not alike, or they are so few that all may be rehearsed.
        """
        fewer = Rehearsed.of(planned, target, blocks=_FEWER, check=check)
        if fewer.blocks <= 3 * _FEWER:
            raise forge_algos.RehearsalError(f"it has no more than {fewer.blocks} blocks")
        return cls(fewer, Rehearsed.of(planned, target, blocks=_FEWER + 1, check=check))

    def with_plan(self, planned: Planned) -> Derived:
        """Return it for another plan of steps."""
        return Derived(self.fewer.with_plan(planned), self.more.with_plan(planned))

    @property
    def planned(self) -> Planned:
        """The run."""
        return self.fewer.planned

    @property
    def rows(self) -> Planned:
        """The same with images read for its rows."""
        return self.fewer.rows

    @property
    def groups(self) -> Groups:
        """What ranks that divide the whole model gather together."""
        return self.fewer.groups

    @property
    def weights(self) -> int:
        """Bytes of the whole model itself."""
        return self._deeper(self.fewer.weights, self.more.weights)

    def step(self, worst: Any, *, several: bool, first: bool) -> Any:
        """Derive a step on the largest micro-batch, as `Rehearsed.step`."""
        return self._both(lambda one: one.step(worst, several=several, first=first))

    def run_step(self, batches: list[Any], *, first: bool) -> Any:
        """Derive a step on micro-batches of a run, as `Rehearsed.run_step`."""
        return self._both(lambda one: one.run_step(batches, first=first))

    def rollout(self) -> tuple[Any, int]:
        """Derive the sampling, as `Rehearsed.rollout`."""
        tokens: list[int] = []

        def peak(one: Rehearsed) -> Any:
            found, number = one.rollout()
            tokens.append(number)
            return found

        return self._both(peak), tokens[0]

    def evaluation(self) -> Any:
        """Derive the measuring of held-out rows, as `Rehearsed.evaluation`."""
        return self._both(lambda one: one.evaluation())

    def held(self, step: Mapping[str, int]) -> dict[str, int]:
        """Derive weights, gradients and optimizer's state between two steps, as `Rehearsed.held`."""
        without = dict.fromkeys(step, 0)
        fewer, more = self.fewer.held(without), self.more.held(without)
        found = {name: self._deeper(fewer[name], more[name]) for name in fewer}
        return {**found, "weights": step["weights"], "optimizer": max(step["optimizer"], found["optimizer"])}

    def _both(self, peak: Callable[[Rehearsed], Any]) -> Any:
        found = peak(self.fewer).with_blocks(peak(self.more), fewer=_FEWER, blocks=self.fewer.blocks)
        if found is None:
            raise forge_algos.RehearsalError("a model with fewer blocks computes otherwise")
        return found

    def _deeper(self, fewer: int, more: int) -> int:
        return fewer + (self.fewer.blocks - _FEWER) * (more - fewer)


def _with_rows(planned: Planned) -> Planned:
    return with_rehearsed_media(planned, planned.media_rows) if planned.media else planned


def one_rank() -> forge_dist.Ranks:
    """Return the ranks of one process, without a process group."""
    return forge_dist.Ranks(forge_dist.topology(forge_dist.LaunchSettings(), environ={}))


def _judge(planned: Planned, path: str) -> Any:
    """Return the outline of a reward model, of an adapter that of its base."""
    return forge_dist.outline_model(
        forge_dist.LoadRequest(
            model_path=path,
            dtype=planned.dtype,
            attention="eager",
            task="reward",
            other_dtype=planned.dtype if planned.media and planned.dtype.itemsize == 4 else None,
        )
    )


def without_measurements(adapter: Any) -> Any:
    """Return adapter settings without what is measured or cached on a real model.

    A model without data has any directions.
    """
    if adapter.adapter != "osft":
        return adapter
    rows = adapter.osft_calibration_path if adapter.protects == "inputs" else None
    return attrs.evolve(adapter, osft_rank="uniform", osft_calibration_path=rows, osft_cache=None)
