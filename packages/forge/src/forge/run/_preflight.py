"""Settings and a cluster's nodes → whether the run could begin on them."""

from __future__ import annotations

import contextlib
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import attrs

import forge
import forge_accel
import forge_dist
from forge._counted import counted
from forge._dry_run import DryRun
from forge._errors import RunDirectoryError, SettingsError
from forge.run._choices import absolute_paths, begins_of
from forge.run._starting_model import ADAPTER, with_adapter
from forge.settings._data_sets import paths_in
from forge.tasks._task import Task

_SEEN_SECONDS = 30.0
"""How long a node looks for what another one wrote: a network's directory may show it late."""
_POLL_SECONDS = 0.2


def preflight(task: Task, s: Any, rehearse: Callable[[], DryRun], *, for_others: bool = False) -> DryRun:
    """Meet the other nodes as the run will, compare them, and rehearse the run on the first.

    One process a node, started as the run is: by PET_*, srun, or the launch settings.

    Args:
        task: the verb.
        s: its settings.
        rehearse: says what the run would do, on the first node, as it is there.
        for_others: whether its memory plan is for the devices of other machines.

    Returns:
        Text for a person, with the memory plan, the same on all nodes.

    Raises:
        forge_dist.MeetingError: nodes do not reach each other.
        Exception: what the run would raise before its first step, or what differs between the nodes.

    """
    s = with_adapter(absolute_paths(task, s))
    devices = forge_accel.device_count(s.device.device)
    where = forge_dist.topology(s.launch, devices=devices)
    if where.role == "worker":
        raise SettingsError("cluster=true is for one process on each node: start it without torchrun, as the run's launcher.")
    if where.rdzv_endpoint is not None:
        raise SettingsError(
            "cluster=true needs nodes with numbers: leave rdzv_endpoint out, and set master_addr and node_rank."
        )
    node = attrs.evolve(
        where,
        role="worker" if where.max_nodes > 1 else "single",
        rank=where.node_rank or 0,
        world_size=where.max_nodes,
        local_world_size=1,
        nproc_per_node=1,
    )
    cpu = forge_accel.accelerator("cpu")
    path = Path(s.checkpoints.ckpt_output_dir)
    with forge_dist.worker_report(), forge_dist.join(node) as ranks:
        ranks.connect(cpu.collective_backend.value, cpu.device.value)
        with _mark(path, ranks) as mark:
            seen = ranks.is_first or _seen(mark)
            facts = ranks.gather(_facts(s, ranks.host, devices, where.nproc_per_node, seen=seen))
        faults = [line for number, fact in enumerate(facts) for line in _faults(number, fact, facts[0], path)]
        if faults:
            raise SettingsError("\n".join(faults))
        found = DryRun(*ranks.first(lambda: _text_and_memory(rehearse())))
    # A container that checks may see fewer devices than the one that trains; then its memory plan is of neither.
    if found.fits is False and (for_others or devices):
        raise SettingsError(f"the run would not fit into memory.\n{found}")
    hosts = ", ".join(fact["host"] for fact in facts)
    return DryRun(
        f"cluster: {len(facts)} node{'s' * (len(facts) > 1)} ({hosts}) with {where.nproc_per_node} "
        f"process{'es' * (where.nproc_per_node > 1)} each; they reach each other and share {path}\n{found}",
        found.memory,
    )


def _text_and_memory(found: DryRun) -> tuple[str, Any]:
    """Return the parts of an answer, which travel as JSON."""
    return str(found), found.memory


@contextlib.contextmanager
def _mark(path: Path, ranks: forge_dist.Ranks) -> Iterator[Path]:
    """Write a hidden file near the run directory until all nodes have looked for it."""
    folder = next(each for each in (path, *path.parents) if each.is_dir())

    def write() -> str:
        mark = folder / f".forge-preflight-{uuid.uuid4().hex}"
        try:
            mark.touch(exist_ok=False)
        except OSError as error:
            raise RunDirectoryError(f"{folder}: cannot be written ({error.strerror}). Give another ckpt_output_dir.") from error
        return str(mark)

    mark = Path(ranks.first(write))
    try:
        yield mark
        ranks.barrier()
    finally:
        if ranks.is_first:
            mark.unlink(missing_ok=True)


def _seen(mark: Path) -> bool:
    """Look for a file that another node wrote."""
    end = time.monotonic() + _SEEN_SECONDS
    while not mark.exists():
        if time.monotonic() > end:
            return False
        # Listing makes a network's directory look again.
        with contextlib.suppress(OSError):
            os.listdir(mark.parent)
        time.sleep(_POLL_SECONDS)
    return True


def _facts(s: Any, host: str, devices: int, processes: int, *, seen: bool) -> dict[str, Any]:
    """Return what must be alike on all nodes, and what this one lacks."""
    data = [path for part in (s.data.data_path, s.data.eval_data_path) for path in paths_in(part)]
    # A run that is resumed has a copy of its adapter.
    own = (Path(s.checkpoints.ckpt_output_dir) / ADAPTER).is_dir()
    beside = [s.adapter.adapter_path] if s.adapter.adapter_path is not None and not own else []
    paths = [s.model.model_path, *beside, *data]
    return {
        "host": host,
        "seen": seen,
        "versions": {"forge": forge.__version__, "torch": version("torch"), "transformers": version("transformers")},
        "devices": devices,
        "processes": processes,
        "missing": [path for path in paths if os.path.isabs(path) and not _exists(path)],
    }


def _exists(path: str) -> bool:
    """Return whether a path, or a pattern's or `name:split`'s folder, is here."""
    plain = re.split(r"[*?[]", path)[0]
    return any(os.path.exists(each) for each in (*begins_of(path), os.path.dirname(plain) if plain != path else ""))


def _faults(number: int, fact: Mapping[str, Any], first: Mapping[str, Any], path: Path) -> Iterator[str]:
    """Yield what is wrong with a node."""
    name = f"node {number} ({fact['host']})"
    if not fact["seen"]:
        yield f"{name} does not see what node 0 wrote for {path}: ckpt_output_dir must lie where all nodes see it."
    for missing in fact["missing"]:
        yield f"{name} has no {missing}: it must be on a directory that all nodes share."
    processes = counted(fact["processes"], "processes")
    if fact["processes"] != first["processes"]:
        yield (f"{name} would start {processes} and node 0 {first['processes']}: nproc_per_node must be alike.")
    if fact["devices"] and fact["processes"] > fact["devices"]:
        yield f"{name} has {counted(fact['devices'], 'accelerators')} for {processes}: lower nproc_per_node."
    if bool(fact["devices"]) != bool(first["devices"]):
        yield (
            f"{name} has {counted(fact['devices'], 'accelerators')} and node 0 has {first['devices']}: the nodes must be of "
            "one kind."
        )
    for package, here in fact["versions"].items():
        if here != first["versions"][package]:
            yield f"{name} has {package} {here} and node 0 has {first['versions'][package]}: install one version on all nodes."
