"""Settings → starting model, token stores and a batch plan, checked for a resumed run."""

from __future__ import annotations

import logging
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import forge_accel
import forge_dist
import forge_packing
from forge._counted import counted
from forge._errors import SettingsError
from forge._progress import Reporter
from forge._turn_end import TURN_END
from forge._uncollected import uncollected
from forge.memory._changes import forecast
from forge.memory._memory_plan import MemoryPlan
from forge.memory._target import Target
from forge.memory._tokens import choose_checkpointing, choose_tokens
from forge.reports._plan import plan_figures
from forge.run._choices import check_shards, choose_compile, choose_sizes, choose_turn_end, few_steps, moved_run, operations_of
from forge.run._early_checks import check_before_rows, check_prompts
from forge.run._loading import try_packing
from forge.run._memory import is_small, planned_of, write_plan
from forge.run._positions import check_positions
from forge.run._precision import check_qat_model
from forge.run._resume import (
    ORDER,
    Identity,
    compare_order,
    compare_settings,
    former_choice,
    former_tokens,
    is_finished,
    other_request,
)
from forge.run._rows import Rows, describe_rows
from forge.run._run_directory import NoDirectory, RunDirectory
from forge.run._starting_model import ADAPTER, Start, check_adapter_base, starting_model
from forge.run._stores import STORES, compare_stores, copy_linked, fingerprints, link_stores
from forge.saving._changed_inputs import changed_inputs
from forge.saving._damage import refuse_damaged_run
from forge.saving._emergency import check_emergency_dir
from forge.saving._full_state import OPENED, ended_for_good, finished_error, refuse_closed_states
from forge.saving._inputs import Inputs
from forge.saving._room import room_of
from forge.tasks._answers import read_prompts
from forge.tasks._lint_check import check_system_prompt, warn_of_plain_text, warn_of_system_message
from forge.tasks._task import Task
from forge.tasks.items._items import Items


class Prepared(NamedTuple):
    """Data and plan of a run, the same on every rank."""

    settings: Any
    """With every choice made that depends on the data."""
    train: Items
    held_out: Items | None
    plan: forge_packing.BatchPlan


def prepare(
    task: Task,
    s: Any,
    rows: Rows,
    out: RunDirectory | NoDirectory,
    machine: forge_accel.Accelerator,
    divided: tuple[str, int],
    report: Reporter,
    *,
    target: Target | None,
    dry: bool = False,
    identity: Identity | None = None,
) -> dict[str, Any]:
    """Tokenize, check and plan; on the first rank only.

    Args:
        task: the verb.
        s: its settings.
        rows: those that are given in memory.
        out: the run directory.
        machine: the accelerator of this process.
        divided: name of the strategy, and into how many data-parallel shards it divides a step.
        report: the progress report.
        target: devices that the memory plan is for; None where the steps are not those of forge's own loop.
        dry: whether there is a memory plan in any case: else for a new run of a model that is not small.
        identity: of the run, which the caller settles; without one the models' files are read when this returns.

    Returns:
        As JSON: `finished`; where it is false also `root`, the folder of data and plan, `identity`, for full states, `start`,
        the model that the run starts from, `rows`, the descriptions of rows in memory, and `chosen`, settings that were left
        open and that only the first rank can choose, each with its value and the reason, `turn_end`, the token that ends an
        answer beside the EOS, `lacks`, in words what does not fit into memory and what helps, and `disk`, the room that it
        takes, in words.

    Raises:
        SettingsError: the directory holds a run that cannot be resumed with these settings.
        RunDirectoryError: the disk has less room than the run takes, or a finished run is damaged.
        forge_data.DataError, forge_packing.PackingError, DataLintError: the data are refused.

    """
    assert isinstance(out, RunDirectory)
    since = time.time_ns()
    s = describe_rows(s, rows)
    if (moved := moved_run(s)) is not None:
        report.note(moved)
    if out.resuming and is_finished(out.path, s, task.name):
        refuse_damaged_run(out.path, task.name)
        _note_finished(task, s, out.path, report)
        return {"finished": True}
    _check_states(s, out)
    check_shards(s, divided[1])
    # It imports transformers and the model's class.
    with report.taking(f"loading the tokenizer of {s.model.model_path}"), uncollected():
        start, tokenizer = starting_model(task, s, out, report, weights=not (dry and target is not None and target.elsewhere))
    check_qat_model(s, start.path, tokenizer)
    own = identity is None
    identity = identity or Identity()
    _begin_reading(identity, task, s, start, read=out.resuming or not dry)
    with _replacing_stepless(out, identity, report):
        if out.resuming:
            identity.resume(out.path, wait=not out.has_steps)
            compare_settings(out.path, s, open_left=True)
            if s.checkpoints.resume in ("auto", "never") and ended_for_good(out.path):
                raise finished_error(out.path, other_request(out.path, s))
            report.note(f"{out.path} holds this run already: resuming it")
            link_stores(task, out.path, out.staging)
    chosen: dict[str, tuple[Any, str]] = {}
    open_tokens = s.plan.max_tokens_per_gpu is None
    if open_tokens and (former := former_tokens(s, out.path if out.resuming else None)) is not None:
        chosen["max_tokens_per_gpu"] = former
        s = with_chosen(s, chosen)
    asked = check_prompts(task, s, tokenizer)
    tried = None if out.resuming else try_packing(task, s, machine, report)
    if tried is not None:
        check_before_rows(task, s, machine, start, tried)
    paths = {"train": "data_path", **({"eval": "eval_data_path"} if s.data.eval_data_path else {})}
    for name, setting in paths.items():
        s = _tokenize(task, s, rows, setting, tokenizer, out.root / "data" / name, report)
    found = open_prepared(task, s, machine, out.root, divided[1])
    if found.held_out is not None and not s.data.eval_data_path:
        report.note(f"held out {found.held_out}", event="data", part="eval_data_path", items=str(found.held_out))
    report.note(f"training on {found.train}", event="data", part="data_path", items=str(found.train))
    task.check_data(s, report, found.train.store, None if found.held_out is None else found.held_out.store)
    parts = [found.train] if found.held_out is None else [found.train, found.held_out]
    check_positions(task, s, start.path, parts, asked, report)
    planned = partial(planned_of, task, s, machine, divided, start, tokenizer, identity=identity.known, tried=tried)
    s, found = _with_checkpointing(s, found, start.path, target, planned, chosen, report)
    memory = None
    open_tokens = open_tokens and "max_tokens_per_gpu" not in chosen
    if open_tokens and target is not None and (target.elsewhere or not is_small(start.path)):
        s, memory = _with_tokens(s, found, target, planned, chosen, report)
        found = open_prepared(task, s, machine, out.root, divided[1])
    found = _with_compiling(task, found, start.path, machine, target, out, chosen)
    (out.root / "plan").mkdir()
    found.plan.save(out.root / "plan" / "plan.npz")
    _report_plan(task, found, report, divided=target is not None)
    with _replacing_stepless(out, identity, report):
        if out.resuming:
            for change in compare_settings(out.path, found.settings):
                report.note(f"changed since then: {change}")
            compare_stores(task, out.path, out.root, paths, report)
            compare_order(out.path, found.plan, report.note)
    turn_end = choose_turn_end(task, found.settings, found.train.store, tokenizer, out.path if out.resuming else None)
    _record(task, found, out, paths, identity, report, turn_end=turn_end, since=None if dry else since)
    if memory is None and target is not None and (dry or not is_small(start.path)):
        memory = forecast(planned(prepared=found), target, report)
    if memory is not None:
        write_plan(memory, out.path, out.root, report, dry=dry)
    return {
        "finished": False,
        "root": str(out.path if out.resuming else out.root),
        "identity": identity.settle(out) if own else identity.known,
        "start": start._asdict(),
        "rows": {setting: getattr(s.data, setting) for setting in rows},
        "chosen": chosen,
        "turn_end": turn_end,
        "lacks": [] if memory is None or memory.fits is not False else [f"{memory.lack}.", *memory.remedies()],
        "disk": _check_room(task, found, start.path, memory, out.path, report, target, identity.known["run"]),
    }


def _begin_reading(identity: Identity, task: Task, s: Any, start: Start, *, read: bool) -> None:
    """Begin to read the models of a run.

    Small ones are known at once, and with them whether one is the base of `adapter_path`.
    """
    models = {"model": s.model.model_path, **task.other_models(s), **({"base_model": start.path} if start.new_ids else {})}
    identity.begin(task.name, models, read=read)
    check_adapter_base(s, start, identity.known["model"])


def _record(
    task: Task,
    found: Prepared,
    out: RunDirectory,
    paths: Mapping[str, str],
    identity: Identity,
    report: Reporter,
    *,
    turn_end: str | None,
    since: int | None,
) -> None:
    """Write which files were read, and of a new run what it is known by and what is held out.

    Files are not recorded without `since`, the time from before they were read.
    """
    root = out.root
    if since is not None:
        out.inputs = Inputs(task, found.settings, root, report, since=since, former=out.path if out.resuming else None)
    if out.resuming:
        return
    about = {STORES: fingerprints(task, root, paths), ORDER: found.plan.order_fingerprint}
    about |= {TURN_END: turn_end} if turn_end is not None else {}
    about |= {} if found.settings.qat.qat is None else {"qat": found.settings.qat.qat}
    identity.record(root / "run.json", about)
    if found.held_out is not None and "eval" not in paths:
        found.held_out.store.record_as_held_out()


def _check_states(s: Any, out: RunDirectory) -> None:
    """Refuse full states to go on from that this user may not read, and a `resume` that is none."""
    resume = s.checkpoints.resume
    if resume in ("auto", "never"):
        if out.resuming:
            refuse_closed_states(out.path)
        return
    state = Path(resume).expanduser()
    if (closed := forge_dist.unreadable(state)) is not None:
        raise SettingsError(f"resume={resume}: {closed}. {OPENED}, or give the command as one who may.")
    if not state.is_dir():
        raise SettingsError(
            f"resume={resume}: there is no such full state. Give the directory of one (full_state/step_N), or resume=auto."
        )


def _with_checkpointing(
    s: Any,
    found: Prepared,
    model_path: str,
    target: Target | None,
    planned: Callable[..., Any],
    chosen: dict[str, tuple[Any, str]],
    report: Reporter,
) -> tuple[Any, Prepared]:
    """Choose what activation_checkpointing=auto is, into settings and `chosen`."""
    if s.strategy.activation_checkpointing != "auto":
        return s, found
    small = target is None or (not target.elsewhere and is_small(model_path))
    kind, why = choose_checkpointing(None if small else planned(prepared=found), target, report)
    report.note(f"activation_checkpointing: {kind} ({why})")
    chosen["activation_checkpointing"] = kind, why
    return with_chosen(s, chosen), found._replace(settings=with_chosen(found.settings, chosen))


def _with_tokens(
    s: Any,
    found: Prepared,
    target: Target,
    planned: Callable[..., Any],
    chosen: dict[str, tuple[Any, str]],
    report: Reporter,
) -> tuple[Any, MemoryPlan]:
    """Choose a max_tokens_per_gpu that is left open, into settings and `chosen`."""
    tokens, why, memory = choose_tokens(planned(prepared=found), target, report)
    if tokens is None:
        tokens, default = found.settings.plan.max_tokens_per_gpu, found.settings.origins["max_tokens_per_gpu"]
        why = f"{default.removeprefix('chosen: ')}; {why}"
    chosen["max_tokens_per_gpu"] = tokens, why
    report.note(f"max_tokens_per_gpu: {tokens:,} ({why})")
    return with_chosen(s, chosen), memory


def _with_compiling(
    task: Task,
    found: Prepared,
    model_path: str,
    machine: forge_accel.Accelerator,
    target: Target | None,
    out: RunDirectory,
    chosen: dict[str, tuple[Any, str]],
) -> Prepared:
    """Choose what compile=auto is in a run of this length, into settings and `chosen`.

    A run that is resumed on a device of the same kind goes on as it began, whether that was given or chosen.
    """
    s = found.settings
    if target is None or target.elsewhere:
        return found
    of = out.path if out.resuming else None
    before, device = former_choice(s, of, "compile"), former_choice(s, of, "device")
    if before is None or device is None or before[0] not in ("off", "blocks") or device[0] != s.device.device:
        before = None  # another device computes other bits anyway
    operations = operations_of(task, s, found.plan, model_path) if before is None else 0.0
    compiling = choose_compile(s, machine, operations, before=before)
    if compiling is None or with_chosen(s, {"compile": compiling}).origins == s.origins:
        return found
    chosen["compile"] = compiling
    return found._replace(settings=with_chosen(s, chosen))


def _check_room(
    task: Task,
    found: Prepared,
    model_path: str,
    memory: MemoryPlan | None,
    path: Path,
    report: Reporter,
    target: Target | None,
    run: str,
) -> list[str]:
    """Log the room that the run takes on each disk; raise RunDirectoryError where there is less.

    A plan for other devices than this machine's is not refused: the run will not write to this machine's disks.

    """
    s, plan = found.settings, found.plan
    here, folder = target is None or not target.elsewhere, s.checkpoints.emergency_dir
    if folder is not None and Path(folder).is_relative_to(path):
        raise SettingsError(
            f"emergency_dir {folder}: lies in ckpt_output_dir {path}, in the place of which it is to be written. Give a "
            "directory on another disk."
        )
    if folder is not None and here:
        check_emergency_dir(folder, path, run, report.note)
    room = room_of(s, plan, len(found.train), task.num_steps(s, plan), model_path, memory)
    for line in room.lines():
        report.note(line)
    if here:
        room.check(path)
    return room.lines()


def with_chosen(s: Any, chosen: Mapping[str, tuple[Any, str]]) -> Any:
    """Return settings with what the first rank chose for those that were left open."""
    for name, (value, reason) in chosen.items():
        s = s.resolved(name, value, reason)
    return s


def _report_plan(task: Task, found: Prepared, report: Reporter, *, divided: bool) -> None:
    """Log the plan, and that it has few steps where nobody chose them."""
    report.note(task.plan_summary(found.plan, divided=divided), event="planned", **plan_figures(found.plan, divided=divided))
    if (few := few_steps(found.settings, task.num_steps(found.settings, found.plan))) is not None:
        report.note(few)


def _note_finished(task: Task, s: Any, run: Path, report: Reporter) -> None:
    """Say that the run is there, and which of what it read holds something else by now."""
    report.note(f"finished already: {run} holds this very run, with its result and every file as it was exported")
    for warning in changed_inputs(task, s, run, report, adapter=run / ADAPTER):
        report.note(warning)


@contextmanager
def _replacing_stepless(out: RunDirectory, identity: Identity, report: Reporter) -> Iterator[None]:
    """Let a run that holds no steps be replaced where it cannot be resumed with these settings."""
    try:
        yield
    except SettingsError as error:
        if out.has_steps:
            # Another model, which may be what the refused rows or settings come from, is said first.
            identity.refuse_other_model(out.path)
            raise
        out.replace()
        identity.replace()
        why = str(error).partition("; ")[0].partition(". ")[0]
        report.note(f"{out.path} holds a run without a step, which is replaced: {why}")


def open_prepared(task: Task, s: Any, machine: forge_accel.Accelerator, root: Path, shards: int) -> Prepared:
    """Open the stores under `root` and plan as `prepare` did: the same on every rank."""
    store, held_out_store = task.open_store(root / "data" / "train"), None
    s = task.choose(s, store)
    if s.data.eval_data_path:
        held_out_store = task.open_store(root / "data" / "eval")
    elif s.data.validation_split:
        store, held_out_store = store.split(s.data.validation_split, seed=s.plan.seed)
    train = task.items(s, store)
    held_out = None if held_out_store is None else task.items(s, held_out_store)
    s = choose_sizes(s, machine, [train] if held_out is None else [train, held_out])
    assert s.plan.max_tokens_per_gpu is not None
    plan = task.batch_plan(s, train, shards)
    s.check_length(task.num_steps(s, plan))
    return Prepared(s, train, held_out, plan)


def _named(data: Any) -> str:
    """Name the rows of a setting: one source, a list of them, or a mapping of them to weights.

    A file that is there several times has a number, as its rows have.
    """
    if not isinstance(data, (list, tuple, Mapping)):
        return str(data)
    paths = [str(each["path"]) if isinstance(each, Mapping) else str(each) for each in data]
    times, seen = Counter(paths), Counter[str]()
    seen_at = [seen.update([path]) or seen[path] for path in paths]
    return ", ".join(f"{path}#{at}" if times[path] > 1 else path for path, at in zip(paths, seen_at, strict=True))


@contextmanager
def _counted_once(s: Any) -> Iterator[None]:
    """Disable forge_data's log of kept and dropped rows where the report says the same."""
    counts = logging.getLogger("forge_data.accounting")
    before, counts.disabled = counts.disabled, counts.disabled or not s.report.quiet
    try:
        yield
    finally:
        counts.disabled = before


def _tokenize(task: Task, s: Any, rows: Rows, setting: str, tokenizer: Any, directory: Path, report: Reporter) -> Any:
    """Tokenize rows into a store, or take the launcher's; log how many were kept and dropped.

    Returns:
        The settings, in which rows in memory are described now that all were read, with what the training rows decide.

    """
    directory.parent.mkdir(exist_ok=True)
    given = rows.get(setting, getattr(s.data, setting))
    if isinstance(given, Path):
        shutil.rmtree(directory, ignore_errors=True)
        copy_linked(given, directory)
        store = task.open_store(directory)
    else:
        # A terminal has the count of rows that `task.prepare` shows.
        with report.taking(f"reading {_named(getattr(s.data, setting))}", live=False), _counted_once(s):
            store = task.prepare(s, given, tokenizer, directory, report)
    s = describe_rows(s, rows)
    account = store.accounting
    lost = "".join(f", dropped {count:,} ({reason})" for reason, count in account.dropped.items())
    report.note(
        f"{_named(getattr(s.data, setting))}: read {counted(account.read, 'rows')}, kept {account.kept:,}{lost}",
        event="read",
        rows=setting,
        kind=store.kind,
        **account.as_dict(),
    )
    if setting != "data_path":
        return s
    check_system_prompt(s, account)
    if task.model_task(s) == "causal":
        warn_of_plain_text(tokenizer, s.data, store, report)
        warn_of_system_message(read_prompts(task, s), store, report)
    return task.choose(s, store)
