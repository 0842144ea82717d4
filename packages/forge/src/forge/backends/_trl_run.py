"""Composed settings → a run in forge's directory whose steps a trainer of TRL makes."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import forge_accel
import forge_algos
import forge_data
import forge_dist
from forge._counted import counted
from forge._errors import SettingsError
from forge._progress import Reporter
from forge._result import RunResult, read_result
from forge._turn_end import stop_as_trained
from forge.backends._end import export_trained, write_finished
from forge.backends._trl_arguments import CLASSES, arguments
from forge.backends._trl_plan import Plan, check_rows, plan_steps
from forge.backends._trl_rows import Rows as PlannedRows, planned_batches, rows_of
from forge.backends._trl_steps import Steps
from forge.run._adaptation import adapt_model
from forge.run._choices import absolute_paths, choose_machine
from forge.run._early_checks import check_names
from forge.run._explained import explained
from forge.run._launching import on_ranks
from forge.run._loading import quantized
from forge.run._prepare import Prepared, open_prepared, prepare, with_chosen
from forge.run._rows import Rows, with_descriptions
from forge.run._run_directory import NoDirectory, RunDirectory
from forge.run._starting_model import Start
from forge.settings._recipe import as_recipe, as_values
from forge.tasks._task import Task
from forge.trackers._callbacks import Callbacks
from forge.trackers._watchers import Watchers

_PROMISES = (
    "backend: TRL makes the steps. Not promised with it: losses of pairs that do not depend on how a step is cut, a run that "
    "is resumed where it was stopped, the same numbers on any number of ranks."
)


def run(task: Task, s: Any, rows: Rows, callbacks: Callbacks) -> RunResult:
    """Run a verb on the ranks that its settings ask for."""
    s = _chosen(task, s, rows)
    return on_ranks(task, s, rows, callbacks, partial(_on_rank, task, rows, callbacks))


def rehearse(task: Task, s: Any, rows: Rows) -> str:
    """Check, tokenize and plan, leave nothing behind, and return what TRL would be given."""
    s = _chosen(task, s, rows)
    where = forge_dist.topology(s.launch, devices=forge_accel.device_count(s.device.device))
    shards = where.world_size or 1
    machine = forge_accel.accelerator(s.device.device)
    with RunDirectory(s.checkpoints.ckpt_output_dir, resume=s.checkpoints.resume) as out:
        report = Reporter(out.log, every=s.report.logging_steps, brief=s.report.quiet)
        found = prepare(task, s, rows, out, machine, ("ddp" if shards > 1 else "single", shards), report, target=None)
        if found["finished"]:
            return f"{out.path} holds this very run, finished: the same command would return its result and train nothing."
        s = with_chosen(with_descriptions(s, found["rows"]), found["chosen"])
        prepared = open_prepared(task, s, machine, Path(found["root"]), shards)
        plan = plan_steps(task, prepared, shards)
        given = _arguments(task, prepared.settings, plan, machine, out.path, shards)
        check_rows(task, prepared, plan)
    lines = [f"  {name}={value!r}" for name, value in given.items()]
    config, trainer = CLASSES[task.name]
    return "\n".join(
        [
            f"forge {task.name} would write {s.checkpoints.ckpt_output_dir}, by {trainer} of TRL:",
            f"  data: {prepared.train}",
            f"  steps: {plan.optimizer_steps:,}, each in {plan.cut_in_words}",
            f"{config}:",
            *lines,
            "Nothing was trained, and nothing is left behind.",
        ]
    )


def _chosen(task: Task, s: Any, rows: Rows) -> Any:
    """Make the choices that TRL's trainers leave no other."""
    s = absolute_paths(task, s)
    check_names(task, s, rows)
    return s.resolved("packing", "off", "TRL pads the rows of a micro-batch")


def _arguments(task: Task, s: Any, plan: Plan, machine: forge_accel.Accelerator, path: Path, shards: int) -> dict[str, Any]:
    return arguments(
        task.name,
        s,
        plan.cut,
        steps=plan.optimizer_steps,
        output_dir=str(path),
        on_cpu=machine.device.value.type == "cpu",
        bf16=machine.dtype(s.device.dtype).value == forge_accel.bfloat16,
        ddp=str(machine.collective_backend.value) if shards > 1 else None,
    )


def _on_rank(task: Task, rows: Rows, callbacks: Callbacks, s: Any, ranks: forge_dist.Ranks) -> RunResult:
    """Open the run directory on the first rank, and run."""
    path = s.checkpoints.ckpt_output_dir
    with RunDirectory(path, resume=s.checkpoints.resume) if ranks.is_first else NoDirectory(path) as out:
        report = Reporter(out.log, every=s.report.logging_steps, brief=s.report.quiet, quiet=not ranks.is_first)
        watching = Watchers(callbacks if ranks.is_first else Callbacks(), report.note)
        with explained(s, out, ranks), watching as watchers:
            return watchers.end(_run(task, s, rows, out, report, ranks, watchers))


def _run(
    task: Task,
    s: Any,
    rows: Rows,
    out: RunDirectory | NoDirectory,
    report: Reporter,
    ranks: forge_dist.Ranks,
    watchers: Watchers,
) -> RunResult:
    machine = forge_accel.accelerator(s.device.device)
    machine.check_ranks(ranks.world_size)
    dtype = machine.dtype(s.device.dtype)
    s = choose_machine(s, machine, dtype)
    device = machine.device.value
    shards = ranks.world_size
    if s.strategy.strategy == "auto":
        s = s.resolved("strategy", "ddp" if shards > 1 else "single", "TRL holds the whole model on each rank")
    report.note(_PROMISES)
    report.note(f"device: {machine.device.reason}")
    report.note(f"dtype: {dtype.reason}")
    report.note(f"ranks: {shards}", event="machine", ranks=shards, device=machine.name)

    # data and plan: forge's own, so that the rows and their order are those of any backend
    found = ranks.first(lambda: prepare(task, s, rows, out, machine, (s.strategy.strategy, shards), report, target=None))
    if found["finished"]:
        return read_result(out.path)
    s = with_chosen(with_descriptions(s, found["rows"]), found["chosen"])
    start, root = Start(**found["start"]), Path(found["root"])
    tokenizer = forge_data.load_tokenizer(start.path)
    prepared = open_prepared(task, s, machine, root, shards)
    s, train = prepared.settings, prepared.train
    tokenizer.chat_template = train.store.chat_template
    if tokenizer.pad_token is None and tokenizer.eos_token is None:
        raise SettingsError(
            f"model_path {s.model.model_path}: its tokenizer names neither pad_token nor eos_token, and TRL pads with one of "
            "them: set one in tokenizer_config.json."
        )
    plan = plan_steps(task, prepared, shards)
    given = _arguments(task, s, plan, machine, out.path, shards)
    ranks.first(lambda: check_rows(task, prepared, plan))
    ranks.connect(machine.collective_backend.value, device)
    ranks.agree({"settings": s.digest(), "data": train.store.fingerprint, "plan": prepared.plan.fingerprint})

    # model: forge's loader, adapter and optimizer, so that every one of their settings holds
    strategy = forge_dist.make_strategy(
        s.strategy, ranks, device=device, adapter=s.adapter.adapter != "none", optimizer=s.optimizer.optimizer
    )
    machine.seed(s.plan.seed)
    attention = "sdpa" if s.device.attention == "auto" else s.device.attention
    s = s if s.device.attention != "auto" else s.resolved("attention", attention, "rows are padded")

    def load(path: str) -> Any:
        full = s.adapter.adapter == "none"
        return strategy.load(
            path,
            dtype=forge_accel.float32 if full else dtype.value,
            attention=attention,
            task=task.model_task(s),
            **quantized(s, machine, dtype.value),
        )

    model = load(start.path)
    _check_routers(task, s, model, device)
    stop_as_trained(s, model, tokenizer, report, found["turn_end"])
    pads = _pad_ids(model)
    adaptation = adapt_model(
        task,
        s,
        start,
        model,
        tokenizer,
        train,
        root,
        strategy,
        partial(machine.autocast, dtype.value),
        report,
        found["identity"],
    )
    optimizer = forge_algos.make_optimizer(adaptation.model, s.optimizer, fused=machine.fused_optimizer.value, seed=s.plan.seed)
    scheduler = forge_algos.schedule(optimizer, s.optimizer, num_steps=plan.optimizer_steps)

    # the run begins; what an earlier start left of it is made again
    ranks.first(lambda: out.check(None))
    out.publish(as_recipe(s, task.name))
    ranks.barrier()
    for name in out.rewind(0, 0):
        report.note(f"removed hf_format/{name}: the steps that led to it are made again")
    prepared = open_prepared(task, s, machine, out.path, shards)
    left = f", without the {counted(plan.left_out, 'prompts')} of short rollouts" if plan.left_out else ""
    report.note(
        f"step 1 of {plan.optimizer_steps:,}; TRL cuts a step into {plan.cut_in_words}{left}",
        event="started",
    )
    if isinstance(out, RunDirectory):
        watchers.begin(out.place("trackers"), found["identity"]["run"], s.tracking, as_values(s), machine)
        out.watch = watchers.record

    began = time.perf_counter()
    steps = Steps(task, prepared, plan.steps, plan.updates, out, report, machine, plan.optimizer_steps)
    reference = _reference(task, s, start, adaptation.model, load)
    with report.steps(plan.optimizer_steps), _without_accelerate():
        _train(task, s, prepared, plan, given, tokenizer, adaptation.model, reference, (optimizer, scheduler), steps, ranks)
    _restore(adaptation.model, pads)

    directory = export_trained(task, s, out, adaptation, tokenizer, strategy, train, f"samples_{steps.samples}", report)
    return write_finished(
        out,
        directory,
        report,
        steps=steps.step,
        samples=steps.samples,
        loss=steps.loss,
        began=began,
        unit=task.items_are,
        first=ranks.is_first,
    )


@contextmanager
def _without_accelerate() -> Iterator[None]:
    """Hide Accelerate's variables of a launcher, an earlier run or another shell.

    It would wrap the model, or change its dtype, by them.
    """

    def take() -> dict[str, str]:
        names = [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_"))]
        return {name: os.environ.pop(name) for name in names}

    left = take()
    try:
        yield
    finally:
        take()
        os.environ.update(left)


def _train(
    task: Task,
    s: Any,
    prepared: Prepared,
    plan: Plan,
    given: dict[str, Any],
    tokenizer: Any,
    model: Any,
    reference: Any,
    optimizers: tuple[Any, Any],
    steps: Steps,
    ranks: forge_dist.Ranks,
) -> None:
    """Let TRL's trainer make the steps."""
    if ranks.world_size > 1:
        os.environ.update(LOCAL_RANK=str(ranks.local_rank), RANK=str(ranks.rank), WORLD_SIZE=str(ranks.world_size))
    import trl
    from datasets import Dataset
    from torch.utils.data import DataLoader
    from transformers import PrinterCallback

    config_name, trainer_name = CLASSES[task.name]
    config = getattr(trl, config_name)(**given)
    kind = getattr(trl, trainer_name)
    named: dict[str, Any] = {
        "model": model,
        "args": config,
        # TRL may give it a padding token, which the export does not have.
        "processing_class": copy.deepcopy(tokenizer),
        "optimizers": optimizers,
        "callbacks": [steps.callback()],
    }
    if task.name == "grpo":
        from forge.backends._trl_prompts import prompts_of, reward_functions

        rows = prompts_of(prepared.train, plan.steps, tokenizer)
        with _nothing_sent():
            trainer = kind(**named, train_dataset=Dataset.from_list(rows), reward_funcs=reward_functions(s))
    else:
        planned: Any = PlannedRows(rows_of(task.name, prepared.train), len(prepared.train))
        batches: Any = planned_batches(plan.steps, plan.cut, ranks.rank, ranks.world_size)

        class Planned(kind):
            """Trainer that takes the steps of forge's batch plan as they are."""

            def get_train_dataloader(self) -> Any:
                """Return the micro-batches of this rank, collated as the trainer collates."""
                return DataLoader(
                    planned,
                    batch_sampler=batches,
                    collate_fn=lambda items: self.data_collator([row for item in items for row in item]),
                )

        # The trainer prepares a data set of its own, of which it makes no step: one row is enough.
        Planned.__name__ = Planned.__qualname__ = kind.__name__
        named |= {"ref_model": reference} if task.name in ("dpo", "kto") else {}
        with _nothing_sent():
            trainer = Planned(**named, train_dataset=Dataset.from_list(_SEEN[task.name]))
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    if "ref" in getattr(model, "peft_config", {}):
        # The copy of the adapter's first weights with which TRL compares.
        model.delete_adapter("ref")


@contextmanager
def _nothing_sent() -> Iterator[None]:
    """Keep a trainer that is being made from sending telemetry.

    The environment variable for that is read once, when huggingface_hub is imported, which is long ago.
    """
    from huggingface_hub import constants

    before = constants.HF_HUB_DISABLE_TELEMETRY
    constants.HF_HUB_DISABLE_TELEMETRY = True
    try:
        yield
    finally:
        constants.HF_HUB_DISABLE_TELEMETRY = before


_SEEN: dict[str, list[dict[str, Any]]] = {
    "sft": [{"input_ids": [0, 0], "labels": [0, 0]}],
    "dpo": [{"prompt": "a", "chosen": "b", "rejected": "c"}],
    "kto": [{"prompt": "a", "completion": "b", "label": True}, {"prompt": "a", "completion": "c", "label": False}],
    "reward": [{"chosen_ids": [0, 0], "rejected_ids": [0, 0]}],
}
"""Verb → rows that the trainer looks at when it is made."""


def _reference(task: Task, s: Any, start: Start, model: Any, load: Any) -> Any:
    """Load the reference of DPO and KTO; None where TRL takes the model without its adapter."""
    if task.name not in ("dpo", "kto"):
        return None
    path = s.objective.reference_path
    if path is None and hasattr(model, "peft_config"):
        return None
    return load(start.path if path is None else path).eval().requires_grad_(requires_grad=False)


def _check_routers(task: Task, s: Any, model: Any, device: Any) -> None:
    """Raise SettingsError for a mixture of experts whose router loss is not TRL's."""
    asked = s.moe.moe_aux_loss
    if asked == "off" or (asked == "trl" and task.name != "reward"):
        return
    routers, _ = forge_algos.routers_of(model, device=device, coefficient=s.moe.router_aux_loss_coef)
    if routers is not None:
        ways = "off" if task.name == "reward" else "trl or off"
        raise SettingsError(f"moe_aux_loss={asked} is not available with backend=trl: choose {ways}, or backend=forge.")


def _pad_ids(model: Any) -> list[tuple[Any, Any]]:
    """Return the configurations of a model with their padding token."""
    configs = [model.config, model.config.get_text_config(), getattr(model, "generation_config", None)]
    # That of a model of several modalities has none beside its text's.
    return [(config, config.pad_token_id) for config in configs if hasattr(config, "pad_token_id")]


def _restore(model: Any, pads: list[tuple[Any, Any]]) -> None:
    """Take back what TRL changed of a model beside its weights."""
    for config, pad in pads:
        config.pad_token_id = pad
    model.eval()
