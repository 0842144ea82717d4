"""Settings → what a run would do: all is checked that can be, and nothing left behind."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import attrs

import forge_accel
import forge_dist
from forge._counted import counted
from forge._dry_run import DryRun
from forge._progress import Reporter
from forge._templates import duration
from forge.memory._forecast import one_rank
from forge.memory._memory_plan import room, size
from forge.memory._target import Target
from forge.run._choices import absolute_paths, choose_machine
from forge.run._early_checks import check_names
from forge.run._memory import FILE
from forge.run._precision import choose_dtype
from forge.run._prepare import open_prepared, prepare, with_chosen
from forge.run._rows import Rows, with_descriptions
from forge.run._run_directory import RunDirectory
from forge.run._starting_model import with_adapter
from forge.saving._room import exports_kept
from forge.settings._recipe import as_values
from forge.storage._storage import Storage
from forge.tasks._task import Task

_NO_MEMORY = "It would not fit into memory: "


def rehearse(task: Task, s: Any, rows: Rows | None = None, *, target: str | None = None, quiet: bool = False) -> DryRun:
    """Check, tokenize and plan a run in its directory, which is left as it was.

    Args:
        task: the verb.
        s: its settings.
        rows: those that are given in memory.
        target: devices that the memory plan is for, such as `8xH100-80GB`; this machine by default.
        quiet: whether nothing is printed.

    Returns:
        Text for a person, with the memory plan; "" on all ranks but the first.

    Raises:
        Exception: what the run would raise before its first step.

    """
    where = forge_dist.topology(s.launch, devices=forge_accel.device_count(s.device.device))
    if where.role == "worker" and where.rank:
        return DryRun()  # torchrun started several: one answer is enough, and one directory is looked at
    wanted = None if target is None else Target.parse(target)
    s = with_adapter(absolute_paths(task, s))
    check_names(task, s, rows or {}, weights=wanted is None)
    machine = forge_accel.accelerator(s.device.device)
    if wanted is not None and s.device.dtype == "auto":
        s = s.resolved("dtype", "bfloat16", f"what {wanted.name} computes fastest")
    s = choose_machine(s, machine, choose_dtype(s, machine))
    ranks = _ranks(where, wanted)
    # What a strategy sets in this process ends with the rehearsal, which is that of one rank.
    with ranks.at_exit, machine.with_threads(where.threads):
        strategy = forge_dist.make_strategy(
            s.strategy,
            ranks,
            device=machine.device.value,
            adapter=s.adapter.adapter not in ("none", "osft"),
            optimizer=s.optimizer.optimizer,
        )
        aim = wanted or Target.here(machine, processes=where.local_world_size or 1)
        path = Path(s.checkpoints.ckpt_output_dir)
        with RunDirectory(path, resume=s.checkpoints.resume) as out:
            report, began = Reporter(out.log, every=s.report.logging_steps, brief=s.report.quiet, quiet=quiet), time.monotonic()
            if (line := Storage(s.storage.checkpoint_storage).check()) is not None:
                report.note(line)
            found = prepare(
                task, s, rows or {}, out, machine, (strategy.name, strategy.data_parallel_size), report, target=aim, dry=True
            )
            if found["finished"]:
                return DryRun(
                    f"{path} holds this very run, finished: the same command would return its result and train nothing."
                )
            s = with_chosen(with_descriptions(s, found["rows"]), found["chosen"])
            prepared = open_prepared(task, s, machine, Path(found["root"]), strategy.data_parallel_size)
            memory = json.loads((out.root / FILE).read_text(encoding="utf-8"))
            lines = _lines(task, prepared, found, memory, aim, path, resuming=out.resuming)
            lines += [_again(time.monotonic() - began), "Nothing was trained, and nothing is left behind."]
            return DryRun("\n".join(lines), memory)


def _ranks(where: forge_dist.Topology, target: Target | None) -> forge_dist.Ranks:
    """Return ranks that are not there, as many as the run would have."""
    number = where.world_size or 1 if target is None or target.devices is None else target.devices
    if number == 1:
        return one_rank()
    return forge_dist.Ranks(attrs.evolve(where, role="worker", rank=0, world_size=number, local_world_size=number))


def _lines(task: Task, prepared: Any, found: Any, memory: Any, aim: Target, path: Path, *, resuming: bool) -> list[str]:
    """Say in plain words what the run would do."""
    s, plan = prepared.settings, prepared.plan
    steps = task.num_steps(s, plan)
    chosen = [
        f"  {name}={value}: {s.origins[name].removeprefix('chosen: ')}"
        for name, value in as_values(s).items()
        if s.origins[name].startswith("chosen")
    ]
    number = f"{counted(plan.batch_size, task.items_are)} a step"
    if steps is not None:
        number = f"{counted(plan.num_samples, task.items_are)} in all, up to epoch {plan.epoch(plan.num_steps - 1) + 1:g}"
    return [
        f"forge {task.name} would {'go on with the run in' if resuming else 'write'} {path}:",
        f"  data: {prepared.train}" + (f"; held out {prepared.held_out}" if prepared.held_out is not None else ""),
        f"  steps: {'without end' if steps is None else f'{steps:,}'}, {number}",
        f"  exports: {_number(exports_kept(s, plan, len(prepared.train), steps))}",
        *_memory(memory, aim),
        *(f"  {line}" for line in found["disk"]),
        *([f"chosen{', device, compile and kernels for this machine' if aim.elsewhere else ''}:", *chosen] if chosen else []),
        *((_NO_MEMORY * (not number) + line) for number, line in enumerate(found["lacks"])),
    ]


def _memory(memory: Any, aim: Target) -> list[str]:
    """Return the line of peak memory; none where it does not fit, which is said apart."""
    if memory.get("refused"):
        return [f"  memory: not computed: {memory['refused']}"]
    most = max(memory["phases"], key=lambda phase: phase["planned"], default=None)
    if most is None or memory["fits"] is False:
        return []
    of = "" if aim.limit is None else f", of {room(aim)}"
    return [f"  memory: {size(most['planned'])} at the peak ({most['name']}){of}"]


def _again(seconds: float) -> str:
    """Say how long it took, and that the run checks, tokenizes and plans by itself."""
    return f"To check, tokenize and plan took {duration(seconds)}, which the run does again; a step's time is not known before."


def _number(exports: int | None) -> str:
    """Write a number of exports; None is without end."""
    return "without end (keep_last_checkpoint_only keeps the newest alone)" if exports is None else str(exports)
