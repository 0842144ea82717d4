"""Supervised fine-tuning, the whole algorithm on one page: data → plan → launch → train → result."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import attrs

import forge_accel
import forge_algos
import forge_data
import forge_dist
import forge_packing
from forge._choices import absolute_paths, choose_machine, load_fitting, warn_of_positions, warn_of_rounding
from forge._directories import discard
from forge._full_state import FullStates, Position
from forge._launching import on_ranks, preempted
from forge._prepare import begin, prepared
from forge._progress import Reporter
from forge._recipe import as_recipe, read_recipe
from forge._result import RunResult, read_result, write_result
from forge._resume import must_match, step_seed
from forge._run_directory import NoDirectory, RunDirectory
from forge._settings import SFTSettings, resolve, signature_of
from forge._stop import StopWish


def sft(recipe: str | Path | None = None, /, **settings: object) -> RunResult:
    """Fine-tune a language model on conversations, prompts with completions, or tokens.

    Takes every setting of `SFTSettings` by name (`help(forge.sft)` lists them; `docs/settings.md` explains them), and
    optionally a YAML recipe that they override. `model_path`, `data_path` and `ckpt_output_dir` are required.

    The same call with the same `ckpt_output_dir` goes on where the run was left: killed, stopped, or failed. A run that is
    finished gives its result again.

    Returns:
        A `RunResult`, once the export was loaded back and found to be the model that was trained.

    Raises:
        SettingsError, RecipeError, RunDirectoryError: the request is wrong; nothing was written.
        PreemptedError: a signal asked the run to stop, and its state is saved.
        forge_data.ForgeDataError, forge_packing.PackingError, forge_dist.ForgeDistError, forge_algos.ForgeAlgosError,
        forge_accel.ForgeAccelError: a room refuses what it was given, saying what, where and what to do.

    """
    layers = [(f"recipe {recipe}", read_recipe(recipe))] if recipe is not None else []
    return run(resolve(SFTSettings, *layers, ("argument", settings)))


sft.__signature__ = signature_of(SFTSettings)  # type: ignore[attr-defined]


def run(s: SFTSettings) -> RunResult:
    """Run supervised fine-tuning with settings that are already composed, on the ranks that they ask for."""
    forge_dist.check_model_path(s.model.model_path)
    return on_ranks("sft", absolute_paths(s), _on_rank)


def _on_rank(s: SFTSettings, ranks: forge_dist.Ranks) -> RunResult:
    path = s.checkpoints.ckpt_output_dir
    with RunDirectory(path, resume=s.checkpoints.resume) if ranks.is_first else NoDirectory(path) as out:
        return _run(s, out, Reporter(out.log, every=s.report.logging_steps, quiet=not ranks.is_first), ranks)


def _run(s: SFTSettings, out: RunDirectory | NoDirectory, report: Reporter, ranks: forge_dist.Ranks) -> RunResult:  # noqa: C901, PLR0915 - one flat page, on purpose
    # device: what this machine can do, each decision with its reason
    machine = forge_accel.accelerator(s.device.device)
    dtype = machine.dtype(s.device.dtype)
    s = choose_machine(s, machine, dtype)
    device = machine.device.value
    strategy = forge_dist.make_strategy(s.strategy, ranks, device=device, adapter=s.adapter.adapter != "none")
    s = s if s.strategy.strategy != "auto" else s.resolved("strategy", strategy.name, strategy.reason)
    report.note(f"device: {machine.device.reason}")
    report.note(f"dtype: {dtype.reason}")
    report.note(f"ranks: {ranks.world_size}, {strategy.reason}")

    # data and plan: the first rank makes them, before there is a group of processes that could lose its patience
    tokenizer = forge_data.load_tokenizer(s.model.model_path)
    found = ranks.first(lambda: begin(s, out, tokenizer, machine, ranks.world_size, report))
    if found["finished"]:
        return read_result(out.path)
    s, train, held_out, plan = prepared(s, machine, Path(found["root"]), ranks.world_size)
    ranks.connect(machine.collective_backend.value, device)
    ranks.agree({"settings": s.digest(), "data": train.fingerprint, "plan": plan.fingerprint})

    # model: on its ranks, with the attention that fits it and the adapter that was asked for
    machine.seed(s.plan.seed)
    objective = forge_algos.SFT()
    s, model, reason = load_fitting(s, machine, dtype, objective, strategy)
    report.note(f"attention: {reason}")
    warn_of_positions(report, model, [train] if held_out is None else [train, held_out])
    if s.adapter.adapter == "lora":
        model = forge_algos.attach_lora(model, s.adapter)
    model, optimizer = strategy.wrap(
        model, lambda model: forge_algos.adamw(model, s.optimizer, fused=machine.fused_optimizer.value)
    )
    scheduler = forge_algos.schedule(optimizer, s.optimizer, num_steps=plan.num_steps)
    # A model goes back to the dtype of its directory; adapters stay in the float32 that they were trained in.
    kept = forge_dist.base_dtype(s.model.model_path) if s.adapter.adapter == "none" else None
    rounds = kept is not None and kept != forge_accel.float32

    # the run begins, or goes on: from here everything is read from its directory
    states = FullStates(s, out.path, ranks, must_match(s, train, plan, found["identity"]), report.note)
    restored = states.restore(strategy, model, optimizer, scheduler, plan.num_steps)
    at = restored or Position()
    ranks.first(lambda: out.check(None if restored is None else restored.metrics_bytes))
    out.publish(as_recipe(s))
    ranks.barrier()
    s, train, held_out, plan = prepared(s, machine, out.path, ranks.world_size)
    states.files.forget_later(at.step)
    for name in out.rewind(at.metrics_bytes, at.samples):
        report.note(f"removed hf_format/{name}: the steps that led to it are made again")
    if out.resuming and out.metrics_bytes < at.metrics_bytes:
        report.note(f"WARNING: metrics.jsonl was lost; it begins anew after step {at.step}")
    ranks.barrier()

    def autocast() -> Any:
        return machine.autocast(dtype.value)

    def batches(store: forge_data.TokenStore, rows: Sequence[Any]) -> Iterator[forge_packing.PackedBatch]:
        return (forge_packing.collate([store[int(i)] for i in indices]) for indices in rows)

    def steps(first: int) -> Iterator[list[forge_packing.PackedBatch]]:
        for step in range(first, plan.num_steps):
            # Random numbers follow from the position, so that a run that goes on draws what it would have drawn.
            machine.seed(step_seed(s.plan.seed, step, ranks.rank))
            yield list(batches(train, plan.micro_batches(step, ranks.rank)))

    eval_rows: Sequence[Any] = []
    if held_out is not None:
        assert s.plan.max_tokens_per_gpu is not None
        divided = forge_packing.divide(held_out.lengths, max_tokens=s.plan.max_tokens_per_gpu, world_size=ranks.world_size)
        eval_rows = divided[ranks.rank]

    def held_out_loss(step: int, of: Any = None, what: str = "eval_loss", where: str = "") -> float | None:
        if held_out is None:
            return None
        with nullcontext() if of is None else strategy.computing(of):
            measured = forge_algos.evaluate(
                model if of is None else of,
                batches(held_out, eval_rows),
                objective=objective,
                device=device,
                autocast=autocast,
                parallel=strategy,
            )
        out.metrics({"step": step, what: measured.loss, "eval_loss_tokens": measured.loss_tokens})
        report.note(f"held-out loss after step {step}{where}: {measured.loss:.4f} over {measured.loss_tokens:,} tokens")
        return measured.loss

    def export(samples: int, *, final: bool) -> Path:
        directory = out.path / "hf_format" / f"samples_{samples}"
        others = sorted(directory.parent.glob("samples_*"))
        if not ranks.broadcast(directory.exists()):
            try:
                forge_dist.export_model(model, directory, tokenizer=tokenizer, dtype=kept, strategy=strategy)
            except forge_dist.ExportError as error:
                if final:
                    raise
                report.note(f"WARNING: training goes on without this export: {error}")
                return directory
        few = [(example.input_ids, example.labels) for example in _few(held_out if held_out is not None else train)]
        check = forge_dist.check_export(model, directory, few, strategy=strategy)
        report.note(
            f"exported {directory}: loaded back, on {len(few)} short samples its loss is {check.reloaded:.4f}, "
            f"{check.in_memory:.4f} in memory"
        )
        if s.checkpoints.keep_last_checkpoint_only and ranks.is_first:
            for other in others:
                if other != directory:
                    discard(other)
        return directory

    def save(*, wait: bool = False) -> None:
        where = attrs.evolve(at, metrics_bytes=out.metrics_bytes, seconds=at.seconds + time.perf_counter() - began)
        states.save(strategy, model, optimizer, scheduler, where, wait=wait)

    def leave_if_asked() -> None:
        if ranks.any(stop.asked is not None):
            save(wait=True)
            raise preempted(out.path, stop.asked or "a signal to another rank", states.files.failed)

    # train: the one loop; saving, measuring and reporting are the body of this `for`
    began = time.perf_counter()
    with StopWish() as stop, states.files, report.steps(plan.num_steps, done=at.step):
        if restored is None:
            at = attrs.evolve(at, eval_before=held_out_loss(0))
        leave_if_asked()
        machine.reset_peak_memory()
        try:
            for last in forge_algos.train(
                model,
                steps(at.step),
                objective=objective,
                optimizer=optimizer,
                scheduler=scheduler,
                max_grad_norm=s.optimizer.max_grad_norm,
                device=device,
                autocast=autocast,
                parallel=strategy,
                first_step=at.step + 1,
                on_nan=s.optimizer.on_nan,
            ):
                seen, at = (
                    at.samples,
                    attrs.evolve(
                        at, step=last.step, loss=last.loss, samples=at.samples + last.samples, skipped=at.skipped + last.skipped
                    ),
                )
                out.began = True
                out.metrics(
                    {
                        "step": last.step,
                        "epoch": plan.epoch(last.step - 1),
                        "samples": at.samples,
                        "loss": last.loss,
                        "lr": last.learning_rate,
                        "grad_norm": last.grad_norm,
                        "tokens": last.tokens,
                        "loss_tokens": last.loss_tokens,
                        "tokens_per_second": round(last.tokens / last.seconds, 1),
                        "memory": machine.peak_memory_bytes(),
                        **({"skipped": True} if last.skipped else {}),
                    }
                )
                report.step(last, last.tokens / last.seconds)
                final = last.step == plan.num_steps
                if not final and s.report.eval_every_steps and last.step % s.report.eval_every_steps == 0:
                    held_out_loss(last.step)
                epoch_ends = final or plan.epoch(last.step) != plan.epoch(last.step - 1)
                every = s.checkpoints.save_samples
                if not final and (
                    (every and seen // every != at.samples // every) or (s.checkpoints.checkpoint_at_epoch and epoch_ends)
                ):
                    export(at.samples, final=False)
                if ranks.any(states.due(last.step, epoch_ends=epoch_ends) or final):
                    save()
                leave_if_asked()
        except forge_algos.DivergedError as error:
            raise states.diverged(error, train, plan, at.step) from error

        # result: nothing is called a success before it was loaded back
        after = held_out_loss(at.step)
        leave_if_asked()
        directory = export(at.samples, final=True)
        states.files.wait()
    if rounds and held_out is not None:
        # What was trained in float32 is written in fewer digits: what counts is the model that is there now.
        exported = load_fitting(s.with_value("model", "model_path", str(directory)), machine, dtype, objective, strategy)[1]
        trained, after = after, held_out_loss(at.step, exported, "exported_eval_loss", f" as exported in {kept}")
        warn_of_rounding(report, at.eval_before, trained, after, str(kept))
    seconds = at.seconds + time.perf_counter() - began
    left = f" ({at.skipped:,} skipped: not finite)" if at.skipped else ""
    report.note(f"finished: {at.step} steps{left}, {at.samples:,} samples, {seconds:.0f} s; the model lies in {directory}")
    result = RunResult(
        output_dir=out.path,
        model_dir=directory,
        steps=at.step,
        samples=at.samples,
        skipped=at.skipped,
        loss=at.loss,
        eval_loss_before=at.eval_before,
        eval_loss_after=after,
        seconds=seconds,
    )
    if ranks.is_first:
        write_result(result)
    return result


def _few(store: forge_data.TokenStore, most: int = 4) -> list[forge_data.TokenizedExample]:
    """Pick the shortest few of the first samples that have something to learn: enough to compare two models by."""
    rows = sorted(range(min(len(store), 64)), key=lambda row: int(store.lengths[row]))
    return [store[row] for row in rows if store.loss_counts[row]][:most]
