"""Run of any verb, the whole algorithm on one page: data → plan → launch → train → result.

What a verb adds (its data, its objective) is its `Task`, in `verbs/`.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import attrs

import forge_accel
import forge_algos
import forge_data
import forge_dist
from forge._progress import Reporter
from forge._result import BEST, RunResult, read_result, write_result
from forge._turn_end import stop_as_trained
from forge._uncollected import uncollected
from forge.memory._divided import keeps_casts
from forge.memory._target import Target
from forge.run._adaptation import adapt_model, check_projections, exported_as, frozen_with_adapter
from forge.run._choices import (
    absolute_paths,
    choose_machine,
    note_best,
    report_packing,
    report_routers,
    warn_of_higher_loss,
    warn_of_rounding,
)
from forge.run._early_checks import check_names
from forge.run._explained import explained, out_of_memory
from forge.run._fused import StepsMade, compile_blocks, fuse_layers
from forge.run._launching import on_ranks, preempted
from forge.run._loading import computing, load_frozen, load_with_attention
from forge.run._memory import FILE as MEMORY, FirstSteps, planned_of
from forge.run._precision import choose_dtype, dtype_of_exports, report_weights, rounded_weights, trained_dtype
from forge.run._prepare import Prepared, open_prepared, prepare, with_chosen
from forge.run._resume import Identity, must_match
from forge.run._rows import Rows, with_descriptions
from forge.run._run_directory import NoDirectory, RunDirectory
from forge.run._starting_model import Start, check_adapter_base, with_adapter, with_kept_adapter
from forge.run._stop_signal import StopSignal, lost_interrupts
from forge.run._stores import refuse_damaged, verify_on_node
from forge.saving._best import remove_outdated_best, write_best
from forge.saving._directories import newest_state
from forge.saving._exports import Exports, due_after
from forge.saving._full_state import FullStates, Position, keeps_states, remove_states, resumed
from forge.settings._recipe import as_recipe, as_values
from forge.storage._storage import Storage
from forge.tasks._answers import Answers, documents_of, read_prompts
from forge.tasks._base_kl import BaseDivergence, ended_by
from forge.tasks._media import media_documents
from forge.tasks._task import Evaluation, Run, Task
from forge.trackers._callbacks import Callbacks
from forge.trackers._watchers import Watchers


def run(task: Task, s: Any, rows: Rows | None = None, callbacks: Callbacks | None = None) -> RunResult:
    """Run a verb with composed settings, and rows in memory, on the ranks that they ask for."""
    s = with_adapter(absolute_paths(task, s))
    check_names(task, s, rows or {})
    callbacks = callbacks or Callbacks()
    return on_ranks(task, s, rows or {}, callbacks, partial(_on_rank, task, rows or {}, callbacks))


def _on_rank(task: Task, rows: Rows, callbacks: Callbacks, s: Any, ranks: forge_dist.Ranks) -> RunResult:
    """Open the run directory on the first rank, and run."""
    path, resume = s.checkpoints.ckpt_output_dir, s.checkpoints.resume
    storage = Storage(s.storage.checkpoint_storage if ranks.is_first else None, resume)
    with RunDirectory(path, resume=resume, prepare=storage.prepare) if ranks.is_first else NoDirectory(path) as out:
        report = Reporter(out.log, every=s.report.logging_steps, brief=s.report.quiet, quiet=not ranks.is_first)
        watching = Watchers(callbacks if ranks.is_first else Callbacks(), report.note)
        with lost_interrupts(), explained(s, out, ranks), storage, watching as watchers:
            return watchers.end(_run(task, s, rows, out, report, ranks, watchers, storage))


def _run(  # noqa: C901, PLR0912, PLR0915 - one flat page, on purpose
    task: Task,
    s: Any,
    rows: Rows,
    out: RunDirectory | NoDirectory,
    report: Reporter,
    ranks: forge_dist.Ranks,
    watchers: Watchers,
    storage: Storage,
) -> RunResult:
    # device: what this machine can do, each choice with its reason
    with uncollected():  # which imports torch
        machine = forge_accel.accelerator(s.device.device)
    machine.check_ranks(ranks.world_size)
    dtype = choose_dtype(s, machine)

    def autocast() -> Any:
        # Called for each micro-batch, of steps and of evaluations: whoever watches this rank sees that it moves.
        forge_dist.beat()
        return computing(machine, dtype, strategy)()

    s = choose_machine(s, machine, dtype)
    device = machine.device.value
    forge_algos.pin_batches(machine.pins_memory)
    with uncollected():
        strategy = forge_dist.make_strategy(
            s.strategy,
            ranks,
            device=device,
            # OSFT trains the weights themselves, which are divided like any others.
            adapter=s.adapter.adapter not in ("none", "osft"),
            optimizer=s.optimizer.optimizer,
            dtype=dtype.value,
        )
    check_projections(s, strategy)
    s = s if s.strategy.strategy != "auto" else s.resolved("strategy", strategy.name, strategy.reason)
    report.note(f"device: {machine.device.reason}")
    if machine.support.value != "exercised":
        report.note(f"support: {machine.support.reason}")
    report.note(f"dtype: {dtype.reason}")
    report_weights(report, s)
    report.note(f"ranks: {ranks.world_size}, {strategy.reason}", event="machine", ranks=ranks.world_size, device=machine.name)

    # data and plan: the first rank makes them, before there is a process group whose collectives could time out
    divided = (strategy.name, strategy.data_parallel_size)
    target = Target.here(machine, processes=ranks.local_world_size)
    identity = Identity()
    found = ranks.first(lambda: prepare(task, s, rows, out, machine, divided, report, target=target, identity=identity))
    if found["finished"]:
        return read_result(out.path)
    s = with_chosen(with_descriptions(s, found["rows"]), found["chosen"])
    recomputed = s.strategy.activation_checkpointing
    strategy.settings = attrs.evolve(strategy.settings, activation_checkpointing=recomputed)
    start = Start(**found["start"])
    with uncollected():  # of the ranks but the first this one imports transformers
        tokenizer = forge_data.load_tokenizer(start.path)
    s, train, held_out, plan = open_prepared(task, s, machine, Path(found["root"]), strategy.data_parallel_size)
    # The model is exported, and asked from then on, with the template and the arguments that it was trained with.
    tokenizer.chat_template = train.store.chat_template
    ranks.connect(machine.collective_backend.value, device, traces=machine.collective_traces)
    ranks.agree({"settings": s.digest(), "data": train.store.fingerprint, "plan": plan.fingerprint})
    verify_on_node(ranks, train, held_out)

    # model: on its ranks, with an attention that computes it, with its adapter, its optimizer and its schedule
    machine.seed(s.plan.seed)
    longest = max(int(items.longest.max()) for items in (train, held_out) if items is not None)
    with report.taking(f"loading {start.path}", f"loaded {start.path}, and checked how its samples are kept apart,"):
        media = media_documents(s, tokenizer, train, held_out)
        seen = media or documents_of(s, tokenizer, read_prompts(task, s))
        s, model, reasons = load_with_attention(task, s, start.path, machine, dtype, strategy, longest, seen)
    stop_as_trained(s, model, tokenizer, report, found["turn_end"])
    # Its files were hashed meanwhile: from here on the run goes on from what it began with, or is refused.
    with report.taking(f"hashing {start.path}", f"hashed {start.path}, which was not done when it was loaded,"):
        found["identity"] = ranks.first(lambda: identity.settle(out))
        ranks.first(lambda: check_adapter_base(s, start, found["identity"]["model"]))
    report_packing(report, s, model, strategy, reasons, plan, train)
    fuse_layers(s, machine, dtype, model, report)
    adaptation = adapt_model(
        task, s, start, model, tokenizer, train, Path(found["root"]), strategy, autocast, report, found["identity"], media
    )
    model = adaptation.model
    task.add_modules(model, s)
    forge_algos.cast_trained(model, trained_dtype(s))
    steps_made = StepsMade(strategy, report)
    model, optimizer = strategy.wrap(
        model,
        lambda model: forge_algos.make_optimizer(model, s.optimizer, fused=machine.fused_optimizer.value, seed=s.plan.seed),
    )
    quantized = rounded_weights(task, s, adaptation.model, report)
    rounded = nullcontext if quantized is None else quantized.in_place
    steps_made.compiled = compile_blocks(s, machine, model, report)
    report_routers(report, s, model, plan, device)
    num_steps = task.num_steps(s, plan)
    scheduler = forge_algos.schedule(optimizer, s.optimizer, num_steps=num_steps)
    export_dtype = dtype_of_exports(task, s, adaptation.writes)
    rounds = export_dtype not in (None, forge_accel.float32, trained_dtype(s))
    as_plain: Any = exported_as(task, adaptation)

    def frozen(path: str | None, *, as_trained: bool = False) -> Any:
        if path is None:
            found = load_frozen(start.path, s, machine, dtype, strategy, longest, report, media, initial=model)
            found = frozen_with_adapter(with_kept_adapter(s, start), found, strategy)
        else:
            given = start.path if path == s.model.model_path else path
            own: Any = {"weights": trained_dtype(s) if as_trained else None, "several": bool(forge_algos.packs_media(model))}
            found = load_frozen(given, s, machine, dtype, strategy, longest, report, media, **own)
        this.others.add(found)
        return found

    this = Run(
        settings=s,
        model=model,
        tokenizer=tokenizer,
        train=train,
        held_out=held_out,
        plan=plan,
        num_steps=num_steps,
        strategy=strategy,
        ranks=ranks,
        machine=machine,
        device=device,
        autocast=autocast,
        root=Path(found["root"]),
        load_frozen=frozen,
        report=report,
        metrics=out.metrics,
        write_model=lambda directory: forge_dist.export_model(
            model, directory, tokenizer=tokenizer, dtype=export_dtype, strategy=strategy, **as_plain
        ),
        writes=adaptation.writes,
        rounded=rounded,
        identity=found["identity"],
        optimizer=optimizer,
        adapter=adaptation.identity if s.adapter.adapter_path is not None else "",
    )
    task.score_reference(this)

    # the run begins, or is resumed: from here everything is read from its directory
    past = must_match(s, train, plan, found["identity"], adaptation.identity)
    states = FullStates(s, out.path, ranks, past, report.note)
    restored = states.restore(strategy, model, optimizer, scheduler, num_steps)
    at = restored or Position()
    # Opened anew below, the stores would pass for what was verified, whatever was written to them meanwhile.
    ranks.first(lambda: refuse_damaged(train, held_out))
    ranks.first(lambda: out.check(None if restored is None else restored.metrics_bytes))
    out.publish(as_recipe(s, task.name))
    ranks.barrier()
    s, train, held_out, plan = open_prepared(task, s, machine, out.path, strategy.data_parallel_size)
    source = task.step_source(
        attrs.evolve(this, settings=s, train=train, held_out=held_out, plan=plan, root=out.path, done=at.step)
    )
    divided = getattr(getattr(source, "run", this), "plan", plan)
    if divided is not plan:  # what was planned to be shared is not
        ranks.first(lambda: divided.save(out.path / "plan" / "plan.npz"))
    follows = resumed(source.objective, at)
    divergence = BaseDivergence(this)
    if restored is None:
        source.check_start()
    states.files.forget_later(at.step)
    for name in out.rewind(at.metrics_bytes, None if restored is None else at.samples):
        report.note(f"removed hf_format/{name}: the steps that led to it are made again")
    if ranks.first(lambda: out.resuming and remove_outdated_best(out.path, at.best)):
        report.note(f"removed hf_format/{BEST}: a later step's; the best so far was that of step {at.best.step}")
    out.step = at.step
    if restored is None:
        again = "no full state was saved before it ended: it begins at its first step, " if out.resuming else ""
        first = "" if held_out is None else "held-out rows are measured first, then "
        steps = "a run without end" if num_steps is None else f"{num_steps:,}"
        report.note(f"{again}{first}step 1 of {steps}", event="started")
    if out.resuming and out.metrics_bytes < at.metrics_bytes:
        report.note(f"WARNING: metrics.jsonl was lost; it begins anew after step {at.step}")
    if isinstance(out, RunDirectory):
        watchers.begin(out.place("trackers"), found["identity"]["run"], s.tracking, as_values(s), machine, num_steps)
        storage.begin(found["identity"]["run"], report.note)

        def watch(values: dict[str, Any]) -> None:
            storage.tell()
            watchers.record(values)

        out.watch = watch
    answers = Answers(this, read_prompts(task, s), out.path, -1 if restored is None else at.step)
    ranks.barrier()

    said = "" if quantized is None else f", with weights rounded to {s.qat.qat}"

    def evaluate(step: int, of: Any = None, where: str = said) -> Evaluation | None:
        if of is None:
            forge_dist.doing("answering eval_prompts")
            with rounded():
                answers.write(step)
        if held_out is None:
            return None
        report.doing("measuring on held-out rows", line=False)
        with rounded() if of is None else strategy.computing(of):
            found = source.evaluate(model if of is None else of)
            found = None if found is None else divergence.added(found, source, model if of is None else of)
        if found is not None:
            out.metrics({"step": step, **{("" if of is None else "exported_") + k: v for k, v in found.metrics().items()}})
            report.note(f"held out, after step {step}{where}: {found}")
        return found

    exports = Exports(
        out.path,
        model=model,
        strategy=strategy,
        tokenizer=tokenizer,
        dtype=export_dtype,
        model_task=task.model_task(s),
        samples=(train if held_out is None else held_out).short_samples(),
        attach=adaptation.attach,
        as_plain=as_plain,
        newest_only=s.checkpoints.keep_last_checkpoint_only,
        report=report,
        lack=lambda error: out_of_memory(error, s, out.path),
        beside=task.export_files(s, model),
    )
    if restored is not None:
        exports.verify()

    def keep_if_best(at: Position, found: Evaluation) -> Position:
        at = attrs.evolve(at, measured=found, best=at.best.after(found, at.step, s.evaluation.metric_for_best))
        if s.evaluation.keep_best and at.best.step == at.step:
            exports.write(BEST, then=partial(write_best, out.path, at.best))
        return at

    def save(*, wait: bool = False) -> None:
        forge_dist.doing("saving a full state")
        if ranks.is_first:
            refuse_damaged(train, held_out)
        states.save(strategy, model, optimizer, scheduler, position(), wait=wait)

    def position() -> Position:
        return attrs.evolve(at, metrics_bytes=out.settle(), seconds=at.seconds + time.perf_counter() - began)

    def stop_if_asked() -> None:
        if ranks.any(stop.received is not None):
            try:
                save(wait=True)
            except KeyboardInterrupt:
                # A second signal. Where the state is whole, only older ones were left to remove.
                if newest_state(out.path) != f"step_{at.step}":
                    raise
            stop.settle()
            why, failed = stop.received or "a signal to another rank", states.files.failed
            rescued, remedy = states.rescue(strategy, model, optimizer, scheduler, position()) if failed else (None, "")
            raise preempted(out.path, why, failed, rescued, remedy)

    # train: the one loop; saving, evaluating and reporting are the body of this `for`
    began = time.perf_counter()
    first_steps = None
    if ranks.world_size == 1 and restored is None and (out.path / MEMORY).exists():
        known = Prepared(s, train, held_out, plan)
        first_steps = FirstSteps.of(
            planned_of(task, s, machine, (strategy.name, 1), start, tokenizer, known, found["identity"]),
            out.path,
            report,
            stopping=lambda: stop.received is not None,
        )

    def watched(steps: Any) -> Any:
        models = (model, *this.others)
        found = steps if first_steps is None else first_steps.watched(steps, models, optimizer, source.objective, strategy)
        for each in found:
            forge_dist.doing()
            yield each

    def ended() -> tuple[str, str] | None:
        return ended_by(s, waited=at.best.waited, measured=at.measured)

    updates = task.updates(s)
    with StopSignal() as stop, states.files, report.steps(num_steps, done=at.step), first_steps or nullcontext():
        if restored is None and (before := evaluate(0)) is not None:
            best = at.best.after(before, 0, s.evaluation.metric_for_best)
            at = attrs.evolve(at, eval_before=before.metrics(), best=best)
        stop_if_asked()
        machine.reset_peak_memory()
        try:
            for last in forge_algos.train(
                model,
                () if ended() else watched(source.steps(at.step)),
                objective=source.objective,
                optimizer=optimizer,
                scheduler=scheduler,
                adaptation=adaptation,
                max_grad_norm=s.optimizer.max_grad_norm,
                device=device,
                autocast=autocast if first_steps is None else first_steps.forwards(autocast),
                parallel=strategy,
                first_step=at.step + 1,
                on_nan=s.optimizer.on_nan,
                moe_aux_loss=s.moe.moe_aux_loss,
                router_aux_loss_coef=s.moe.router_aux_loss_coef,
                average=source.average,
                quantized=quantized,
                keep_casts=keeps_casts(strategy.name),
                media=getattr(train.store, "has_media", False),
            ):
                seen, planned = at.samples, (last.step - 1) // updates
                # Those of the plan: a row of several documents, as a block of pretraining, is one of its samples.
                made = last.samples if task.samples_are else plan.position(planned + 1) - plan.position(planned)
                at = attrs.evolve(
                    at,
                    step=last.step,
                    loss=last.loss,
                    samples=at.samples + made,
                    skipped=at.skipped + last.skipped,
                    measured=None,
                    objective={} if follows is None else follows.state(),
                )
                out.began = True
                measuring = 0.0 if first_steps is None else first_steps.made()
                tokens_per_second = last.tokens / max(last.seconds - measuring, 1e-6)
                steps_made.made()
                out.metrics(
                    {
                        "step": last.step,
                        "epoch": plan.epoch(planned),
                        "samples": at.samples,
                        "loss": last.loss,
                        "lr": last.learning_rate,
                        "grad_norm": last.grad_norm,
                        "tokens": last.tokens,
                        f"loss_{source.objective.unit}": last.loss_count,
                        **last.figures,
                        **({"expert_load": last.expert_load} if last.expert_load else {}),
                        "tokens_per_second": round(tokens_per_second, 1),
                        "memory": machine.peak_memory_bytes(),
                        **({} if (reserved := machine.peak_reserved_bytes()) is None else {"memory_reserved": reserved}),
                        **({"skipped": True} if last.skipped else {}),
                    }
                )
                report.step(last, tokens_per_second)
                if last.skipped:
                    report.note(f"step {last.step} moved nothing: its loss or gradient was not finite", event="skipped")
                final, every = last.step == num_steps, s.evaluation.steps_between(num_steps)
                epoch_ends = final or (last.step % updates == 0 and plan.epoch(last.step // updates) != plan.epoch(planned))
                measures = final or (every and last.step % every == 0) or (s.evaluation.eval_at_epoch and epoch_ends)
                if measures and (found_now := evaluate(last.step)) is not None:
                    at = keep_if_best(at, found_now)
                    if not final and (end := ended()) is not None:
                        final = True
                        report.note(f"stopping early: {end[1]}", event="stopped_early")
                epoch_ends = epoch_ends or final
                exporting = due_after(s.checkpoints.save_samples, last.step, num_steps, seen, at.samples)
                if not final and (exporting or (s.checkpoints.checkpoint_at_epoch and epoch_ends)):
                    exports.write(f"samples_{at.samples}")
                # One exchange for both; a signal during a save is seen after it.
                due = states.due(last.step, num_steps, epoch_ends=epoch_ends) or final
                due, asked = (number > 0 for number in ranks.sum([float(due), float(stop.received is not None)]))
                if due:
                    save()
                if due or asked:
                    stop_if_asked()
                if final:
                    break
        except forge_algos.DivergedError as error:
            raise states.diverged(error, train, plan, at.step, updates) from error

        # result: a run succeeds only once its export was loaded back
        if at.measured is None and (late := evaluate(at.step)) is not None:
            # The state that it was resumed from was not the run's last when it was saved.
            at = keep_if_best(at, late)
        after = at.measured
        loss_before = (at.eval_before or {}).get("eval_loss")
        best_step = at.best.step if s.evaluation.keep_best else None
        if source.average is None:  # else both losses are beside different references
            warn_of_higher_loss(report, loss_before, None if after is None else after.loss, best_step=best_step)
        if after is not None and (source.average is None or s.evaluation.metric_for_best):
            note_best(report, at.best, at.step, after, kept=s.evaluation.keep_best)
        stop_if_asked()
        if states.files.failures:
            # On a disk that is nearly full the last state would take the room of the last export, and find none itself.
            states.files.wait()
        try:
            directory = exports.write(f"samples_{at.samples}", final=True)
        except forge_dist.ExportError as error:
            _, remedy = states.rescue(strategy, model, optimizer, scheduler, position(), unwritten=error)
            raise type(error)(f"{error}. {remedy}") from error
        assert directory is not None
        states.files.wait()
    if rounds and after is not None and after.loss is not None:
        # Trained in float32, exported in fewer digits: the figures to report are those of the exported model. It takes the
        # place of what only further steps would need.
        strategy.zero_grad(optimizer)
        if isinstance(strategy, forge_dist.TorchStrategy):
            optimizer.state.clear()
        try:
            exported = load_with_attention(task, s, str(directory), machine, dtype, strategy, longest, media, like=model)[1]
            trained, after = after, evaluate(at.step, exported, f" as exported in {export_dtype}") or after
        except Exception as error:  # noqa: BLE001 - the run is finished, and its figures are those in memory
            why = out_of_memory(error, s, out.path) or error
            report.note(f"WARNING: the export could not be measured, the figures are those of the model in memory: {why}")
        else:
            warn_of_rounding(report, s, loss_before, trained.loss, after.loss, str(export_dtype))
    seconds = at.seconds + time.perf_counter() - began
    result = RunResult(
        output_dir=out.path,
        model_dir=directory,
        steps=at.step,
        samples=at.samples,
        skipped=at.skipped,
        loss=at.loss,
        eval_before=at.eval_before,
        eval_after=None if after is None else after.metrics(),
        best_step=at.best.step if at.best.value is not None else None,
        best_value=at.best.value,
        stopped_by=None if (end := ended()) is None or at.step == num_steps else end[0],
        seconds=seconds,
    )
    report.finished(result, task.samples_are or task.items_are)
    if ranks.is_first:
        write_result(result)
        if not keeps_states(s) and not exports.faults:
            remove_states(out.path)
    states.forget_rescued()
    if exports.faults:
        raise exports.faults[0]
    return result
