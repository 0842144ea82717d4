"""Supervised fine-tuning, the whole algorithm on one page: data → plan → launch → train → result."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import forge_accel
import forge_algos
import forge_data
import forge_dist
import forge_packing
from forge._choices import (
    absolute_paths,
    check_warmup,
    choose_machine,
    choose_sizes,
    load_fitting,
    warn_of_positions,
    warn_of_rounding,
)
from forge._lint import check_data
from forge._progress import Reporter
from forge._recipe import as_recipe, read_recipe
from forge._result import RunResult
from forge._run_directory import RunDirectory
from forge._settings import SFTSettings, resolve, signature_of


def sft(recipe: str | Path | None = None, /, **settings: object) -> RunResult:
    """Fine-tune a language model on conversations, prompts with completions, or tokens.

    Takes every setting of `SFTSettings` by name (`help(forge.sft)` lists them; `docs/settings.md` explains them), and
    optionally a YAML recipe that they override. `model_path`, `data_path` and `ckpt_output_dir` are required.

    Returns:
        A `RunResult`, once the export was loaded back and found to be the model that was trained.

    Raises:
        SettingsError, RecipeError, RunDirectoryError: the request is wrong; nothing was written.
        forge_data.ForgeDataError, forge_packing.PackingError, forge_dist.ForgeDistError, forge_algos.ForgeAlgosError,
        forge_accel.ForgeAccelError: a room refuses what it was given, saying what, where and what to do.

    """
    layers = [(f"recipe {recipe}", read_recipe(recipe))] if recipe is not None else []
    return run(resolve(SFTSettings, *layers, ("argument", settings)))


sft.__signature__ = signature_of(SFTSettings)  # type: ignore[attr-defined]


def run(s: SFTSettings) -> RunResult:
    """Run supervised fine-tuning with settings that are already composed."""
    forge_dist.require_single_process()
    forge_dist.check_model_path(s.model.model_path)
    s = absolute_paths(s)
    with RunDirectory(s.checkpoints.ckpt_output_dir) as out:
        return _run(s, out, Reporter(out.log, every=s.report.logging_steps))


def _run(s: SFTSettings, out: RunDirectory, report: Reporter) -> RunResult:  # noqa: PLR0915 - one flat page, on purpose
    # device: what this machine can do, each decision with its reason
    machine = forge_accel.accelerator(s.device.device)
    dtype = machine.dtype(s.device.dtype)
    s = choose_machine(s, machine, dtype)
    report.note(f"device: {machine.device.reason}")
    report.note(f"dtype: {dtype.reason}")

    # data: records → tokens and labels, on disk
    tokenizer = forge_data.load_tokenizer(s.model.model_path)
    train = _prepare(s.data.data_path, tokenizer, out.root / "data" / "train", s, report)
    held_out: forge_data.TokenStore | None = None
    if s.data.eval_data_path:
        held_out = _prepare(s.data.eval_data_path, tokenizer, out.root / "data" / "eval", s, report)
    elif s.data.validation_split:
        train, held_out = train.split(s.data.validation_split, seed=s.plan.seed)
        report.note(f"held out {len(held_out):,} of these rows")
    report.note(f"training on {len(train):,} rows, in which {int(train.loss_counts.sum()):,} tokens are learned")
    check_data(s, report, train, held_out)
    stores = [train] if held_out is None else [train, held_out]
    s = choose_sizes(s, machine, stores)

    # plan: which samples form which step, and how a step is cut into micro-batches
    assert s.plan.max_tokens_per_gpu is not None
    plan = forge_packing.plan(
        train.lengths,
        batch_size=s.plan.effective_batch_size,
        max_tokens=s.plan.max_tokens_per_gpu,
        seed=s.plan.seed,
        epochs=s.plan.num_epochs,
        max_steps=s.plan.max_steps,
        loss_counts=train.loss_counts,
        sources=None if train.weights is None else train.sources,
        weights=train.weights,
    )
    check_warmup(s, plan.num_steps)
    eval_rows = forge_packing.divide(held_out.lengths, max_tokens=s.plan.max_tokens_per_gpu)[0] if held_out is not None else []
    (out.root / "plan").mkdir()
    plan.save(out.root / "plan" / "plan.npz")
    report.note(plan.summary())

    # launch: the model on its device, with the attention that fits it and the adapter that was asked for
    machine.seed(s.plan.seed)
    objective = forge_algos.SFT()
    s, model, reason = load_fitting(s, machine, dtype, objective)
    report.note(f"attention: {reason}")
    warn_of_positions(report, model, stores)
    if s.adapter.adapter == "lora":
        model = forge_algos.attach_lora(model, s.adapter)
    optimizer = forge_algos.adamw(model, s.optimizer, fused=machine.fused_optimizer.value)
    scheduler = forge_algos.schedule(optimizer, s.optimizer, num_steps=plan.num_steps)
    # A model goes back to the dtype of its directory; adapters stay in the float32 that they were trained in.
    kept = forge_dist.base_dtype(s.model.model_path) if s.adapter.adapter == "none" else None
    rounds = kept is not None and kept != forge_accel.float32
    (out.root / "config.yaml").write_text(as_recipe(s), encoding="utf-8")
    out.publish()

    def autocast() -> Any:
        return machine.autocast(dtype.value)

    def batches(store: forge_data.TokenStore, rows: Sequence[Any]) -> Iterator[forge_packing.PackedBatch]:
        return (forge_packing.collate([store[int(i)] for i in indices]) for indices in rows)

    def steps() -> Iterator[list[forge_packing.PackedBatch]]:
        for step in range(plan.num_steps):
            yield list(batches(train, plan.micro_batches(step)))

    def held_out_loss(step: int, of: Any = None, what: str = "eval_loss", where: str = "") -> float | None:
        if held_out is None:
            return None
        found = forge_algos.evaluate(
            model if of is None else of,
            batches(held_out, eval_rows),
            objective=objective,
            device=machine.device.value,
            autocast=autocast,
        )
        out.metrics({"step": step, what: found.loss, "eval_loss_tokens": found.loss_tokens})
        report.note(f"held-out loss after step {step}{where}: {found.loss:.4f} over {found.loss_tokens:,} tokens")
        return found.loss

    def export(samples: int) -> Path:
        directory = out.path / "hf_format" / f"samples_{samples}"
        if not directory.exists():
            forge_dist.export_model(model, directory, tokenizer=tokenizer, dtype=kept)
            probe = held_out if held_out is not None else train
            few = [(example.input_ids, example.labels) for example in _few(probe)]
            check = forge_dist.check_export(model, directory, few)
            report.note(
                f"exported {directory}: loaded back, on {len(few)} short samples its loss is {check.reloaded:.4f}, "
                f"{check.in_memory:.4f} in memory"
            )
        return directory

    # train: the one loop; saving, measuring and reporting are the body of this `for`
    began = time.perf_counter()
    before = after = held_out_loss(0)
    samples = 0
    last = None
    machine.reset_peak_memory()
    with report.steps(plan.num_steps):
        for last in forge_algos.train(
            model,
            steps(),
            objective=objective,
            optimizer=optimizer,
            scheduler=scheduler,
            max_grad_norm=s.optimizer.max_grad_norm,
            device=machine.device.value,
            autocast=autocast,
        ):
            seen, samples = samples, samples + last.samples
            out.began = True
            out.metrics(
                {
                    "step": last.step,
                    "epoch": plan.epoch(last.step - 1),
                    "samples": samples,
                    "loss": last.loss,
                    "lr": last.learning_rate,
                    "grad_norm": last.grad_norm,
                    "tokens": last.tokens,
                    "loss_tokens": last.loss_tokens,
                    "tokens_per_second": round(last.tokens / last.seconds, 1),
                    "memory": machine.peak_memory_bytes(),
                }
            )
            report.step(last, last.tokens / last.seconds)
            final = last.step == plan.num_steps
            if not final and s.report.eval_every_steps and last.step % s.report.eval_every_steps == 0:
                held_out_loss(last.step)
            epoch_ends = not final and plan.epoch(last.step) != plan.epoch(last.step - 1)
            every = s.checkpoints.save_samples
            if (every and seen // every != samples // every) or (s.checkpoints.checkpoint_at_epoch and epoch_ends):
                export(samples)

    # result: nothing is called a success before it was loaded back
    assert last is not None
    after = held_out_loss(last.step)
    directory = export(samples)
    if rounds and held_out is not None:
        # What was trained in float32 is written in fewer digits: what counts is the model that is there now.
        exported = load_fitting(s.with_value("model", "model_path", str(directory)), machine, dtype, objective)[1]
        trained, after = after, held_out_loss(last.step, exported, "exported_eval_loss", f" as exported in {kept}")
        warn_of_rounding(report, before, trained, after, str(kept))
    seconds = time.perf_counter() - began
    report.note(f"finished: {last.step} steps, {samples:,} samples, {seconds:.0f} s; the model lies in {directory}")
    return RunResult(
        output_dir=out.path,
        model_dir=directory,
        steps=last.step,
        samples=samples,
        loss=last.loss,
        eval_loss_before=before,
        eval_loss_after=after,
        seconds=seconds,
    )


def _prepare(path: Any, tokenizer: Any, directory: Path, s: SFTSettings, report: Reporter) -> forge_data.TokenStore:
    directory.parent.mkdir(exist_ok=True)
    store = forge_data.prepare(
        path,
        tokenizer,
        directory,
        format=s.data.data_format,
        train_on=s.data.train_on,
        max_seq_len=s.data.max_seq_len,
        on_overflow=s.data.on_overflow,
        preprocess=s.data.preprocess,
        num_proc=s.data.num_proc,
        progress=report.count("tokenising"),
    )
    account = store.accounting
    lost = "".join(f", dropped {count:,} ({reason})" for reason, count in account.dropped.items())
    report.note(f"{path}: read {account.read:,} rows, kept {account.kept:,}{lost}")
    return store


def _few(store: forge_data.TokenStore, most: int = 4) -> list[forge_data.TokenizedExample]:
    """Pick the shortest few of the first samples that have something to learn: enough to compare two models by."""
    rows = sorted(range(min(len(store), 64)), key=lambda row: int(store.lengths[row]))
    return [store[row] for row in rows if store.loss_counts[row]][:most]
