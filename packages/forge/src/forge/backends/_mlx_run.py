"""Composed settings → a run in forge's directory whose steps mlx-lm's tuner makes."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

import forge_accel
import forge_algos
import forge_data
import forge_dist
from forge._progress import Reporter
from forge._result import RunResult, read_result
from forge._turn_end import stop_as_trained
from forge.backends._end import export_trained, write_finished
from forge.backends._mlx_model import attach, bring_back, check_logits, load_base, peft_layers
from forge.backends._trl_arguments import spread
from forge.backends._trl_rows import rows_of
from forge.backends._trl_steps import Steps
from forge.run._adaptation import adapt_model
from forge.run._choices import absolute_paths
from forge.run._early_checks import check_names
from forge.run._prepare import Prepared, open_prepared, prepare, with_chosen
from forge.run._rows import Rows, with_descriptions
from forge.run._run_directory import RunDirectory
from forge.run._starting_model import Start
from forge.settings._recipe import as_recipe, as_values
from forge.tasks._task import Task
from forge.trackers._callbacks import Callbacks
from forge.trackers._watchers import Watchers

SAYS = (
    "backend: mlx-lm makes the steps. Not promised with it: a run that is resumed where it was stopped, forge's own random "
    "numbers of dropout, its memory plan. transformers' model lies beside mlx-lm's in memory, for the start and the export."
)
_PAD = 32
"""Rows are padded to a multiple of so many tokens: each length is compiled anew."""
_TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}


def run(task: Task, s: Any, rows: Rows, callbacks: Callbacks) -> RunResult:
    """Run SFT with LoRA by mlx-lm, in this process."""
    s = absolute_paths(task, s)
    check_names(task, s, rows)
    s = s.resolved("packing", "off", "mlx-lm's rows are padded")
    with RunDirectory(s.checkpoints.ckpt_output_dir, resume=s.checkpoints.resume) as out:
        report = Reporter(out.log, every=s.report.logging_steps, brief=s.report.quiet)
        with Watchers(callbacks, report.note) as watchers:
            return watchers.end(_run(task, s, rows, out, report, watchers))


def _run(task: Task, s: Any, rows: Rows, out: RunDirectory, report: Reporter, watchers: Watchers) -> RunResult:
    import mlx.core as mx

    # torch's side of the run, which starts and ends it, is the CPU's
    machine, ranks = forge_accel.accelerator("cpu"), forge_dist.Ranks(forge_dist.topology(s.launch, devices=1))
    report.note(SAYS)
    dtype = "float32" if s.device.dtype == "auto" else s.device.dtype
    s = s if s.device.dtype != "auto" else s.resolved("dtype", dtype, "the exact choice")
    s = s if s.strategy.strategy != "auto" else s.resolved("strategy", "single", "MLX computes in one process")
    report.note(f"device: {mx.default_device()}, by MLX", event="machine", ranks=1, device="mlx")

    # data and plan: forge's own, so that rows, masks and their order are those of any backend
    found = prepare(task, s, rows, out, machine, ("single", 1), report, target=None)
    if found["finished"]:
        return read_result(out.path)
    s = with_chosen(with_descriptions(s, found["rows"]), found["chosen"])
    start = Start(**found["start"])
    tokenizer = forge_data.load_tokenizer(start.path)
    prepared = open_prepared(task, s, machine, Path(found["root"]), 1)
    s, train = prepared.settings, prepared.train
    tokenizer.chat_template = train.store.chat_template

    # model: forge's loader and adapter, whose first weights mlx-lm is given
    strategy = forge_dist.make_strategy(s.strategy, ranks, device=machine.device.value, adapter=True, optimizer="adamw")
    machine.seed(s.plan.seed)
    model = strategy.load(start.path, dtype=forge_accel.float32, attention="sdpa", task=task.model_task(s))
    stop_as_trained(s, model, tokenizer, report, found["turn_end"])
    root, identity = Path(found["root"]), found["identity"]
    adaptation = adapt_model(task, s, start, model, tokenizer, train, root, strategy, nullcontext, report, identity)
    adapted = adaptation.model.eval()
    layers = peft_layers(adapted)
    out.check(None)
    out.publish(as_recipe(s, task.name))
    out.rewind(0, 0)
    prepared = open_prepared(task, s, machine, out.path, 1)
    twin = load_base(start.path, out.path / "backend" / "model", dtype)
    attach(twin, layers, s.adapter.lora_dropout)
    twin.eval()
    probe = rows_of("sft", prepared.train)(0)[0]["input_ids"][:64]
    apart = check_logits(twin, adapted, probe, _TOLERANCE[dtype], "before the first step")
    report.note(f"mlx-lm's model and transformers' agree: logits of {len(probe)} tokens differ by {apart:.1g} of the largest")
    num_steps = prepared.plan.num_steps
    report.note(f"step 1 of {num_steps:,}", event="started")
    watchers.begin(out.place("trackers"), found["identity"]["run"], s.tracking, as_values(s), machine)
    out.watch = watchers.record

    began = time.perf_counter()
    planned = [prepared.plan.samples(step) for step in range(num_steps)]
    steps = Steps(task, prepared, planned, 1, out, report, machine, num_steps)
    with report.steps(num_steps), contextlib.redirect_stdout(sys.stderr):
        _train(s, prepared, planned, twin, steps, out.path / "backend")

    # the adapter as PEFT's, compared with mlx-lm's model and with its export
    bring_back(twin, layers)
    twin.eval()
    apart = check_logits(twin, adapted, probe, _TOLERANCE[dtype], "after training")
    report.note(f"the adapter is PEFT's: logits of {len(probe)} tokens differ from mlx-lm's by {apart:.1g} of the largest")
    directory = export_trained(
        task, s, out, adaptation, tokenizer, strategy, prepared.train, f"samples_{steps.samples}", report
    )
    return write_finished(
        out, directory, report, steps=steps.step, samples=steps.samples, loss=steps.loss, began=began, unit=task.items_are
    )


def _train(s: Any, prepared: Prepared, planned: list[Any], model: Any, steps: Steps, folder: Path) -> None:
    """Let mlx-lm's tuner make the steps of the plan, each cut into as many micro-batches."""
    import mlx.core as mx
    import mlx.optimizers as optim
    from mlx import nn
    from mlx_lm.tuner.callbacks import TrainingCallback
    from mlx_lm.tuner.trainer import TrainingArgs, train

    o, making = s.optimizer, rows_of("sft", prepared.train)
    longest = int(prepared.train.longest.max())
    parts = max(1, -(-max(map(len, planned)) * longest // s.plan.max_tokens_per_gpu))
    parts = min([parts, *map(len, planned)])
    rates = [
        (o.learning_rate or 0.0)
        * forge_algos.lr_factor(
            step,
            num_steps=len(planned),
            warmup_steps=o.warmup(len(planned)),
            lr_scheduler=o.lr_scheduler,
            min_lr_ratio=o.min_lr_ratio,
            decay_steps=o.decay_steps,
            power=o.power,
            num_cycles=o.num_cycles,
        )
        for step in range(1, len(planned) + 1)
    ]
    table = mx.array([*rates, rates[-1]])

    class Clipped(optim.AdamW):
        """AdamW as torch's, after clipping as forge does; keeps the norm."""

        def update(self, model: Any, gradients: Any) -> None:
            """Clip, and move the weights."""
            gradients, norm = optim.clip_grad_norm(gradients, o.max_grad_norm or float("inf"))
            self.state["grad_norm"] = norm
            super().update(model, gradients)

    optimizer = Clipped(
        learning_rate=lambda step: table[mx.minimum(step, len(rates) - 1)],
        betas=[o.beta1, o.beta2],
        eps=o.eps,
        weight_decay=o.weight_decay,
        bias_correction=True,
    )
    optimizer.init(model.trainable_parameters())
    optimizer.state["grad_norm"] = mx.array(0.0)

    def loss(model: Any, tokens: Any, labels: Any, scale: Any) -> tuple[Any, Any]:
        """Return the share of a micro-batch in the mean over the step's learned tokens.

        `scale` is micro-batches / tokens, as mlx-lm takes the mean of the micro-batches.
        """
        logits, targets = model(tokens[:, :-1]), labels[:, 1:]
        learned = targets != -100
        losses = nn.losses.cross_entropy(logits.astype(mx.float32), mx.where(learned, targets, 0)) * learned
        return losses.sum() * scale, learned.sum()

    def batches(**_: Any) -> Iterator[tuple[Any, Any, Any]]:
        """Micro-batches of the plan's steps, padded; masks are forge-data's labels."""
        for indices in planned:
            begin = 0
            step_rows = [making(int(index)) for index in indices]
            count = sum(sum(label != -100 for label in row["labels"][1:]) for rows in step_rows for row in rows)
            for size in spread(len(indices), parts):
                chosen = [row for rows in step_rows[begin : begin + size] for row in rows]
                begin += size
                width = 1 + _PAD * -(-max(len(row["input_ids"]) for row in chosen) // _PAD)
                tokens = np.zeros((len(chosen), width), np.int32)
                labels = np.full((len(chosen), width), -100, np.int32)
                for at, row in enumerate(chosen):
                    tokens[at, : len(row["input_ids"])] = row["input_ids"]
                    labels[at, : len(row["labels"])] = row["labels"]
                yield mx.array(tokens), mx.array(labels), mx.array(parts / count)

    class Recorder(TrainingCallback):
        """Writes a line of metrics.jsonl a step."""

        def on_train_loss_report(self, train_info: dict[str, Any]) -> None:
            """Record the step that ended."""
            step = train_info["iteration"] // parts
            logs = {
                "loss": train_info["train_loss"],
                "grad_norm": optimizer.state["grad_norm"].item(),
                "learning_rate": rates[step - 1],
            }
            steps.record(step, logs)

    mx.random.seed(s.plan.seed)
    arguments = TrainingArgs(
        iters=len(planned) * parts,
        steps_per_report=parts,
        steps_per_save=len(planned) * parts + 1,
        max_seq_length=longest,
        adapter_file=str(folder / "adapters.safetensors"),
        grad_accumulation_steps=parts,
    )
    train(
        model=model,
        optimizer=optimizer,
        train_dataset=None,
        args=arguments,
        loss=loss,
        iterate_batches=batches,
        training_callback=Recorder(),
    )
