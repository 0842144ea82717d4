"""Settings → stores and a plan in the run's hidden folder, compared with those of a run that goes on; and both opened again."""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Any, NamedTuple

import forge_accel
import forge_dist
import forge_packing
from forge._errors import SettingsError
from forge._progress import Reporter
from forge._result import is_finished
from forge.run._choices import check_warmup, choose_sizes
from forge.run._resume import (
    compare_data,
    compare_model,
    compare_order,
    compare_settings,
    link_stores,
    same_request,
)
from forge.run._run_directory import NoDirectory, RunDirectory
from forge.tasks._task import Items, Task


class Prepared(NamedTuple):
    """What a run is made of, the same on every rank."""

    settings: Any
    """With everything chosen that depends on the data."""
    train: Items
    held_out: Items | None
    plan: forge_packing.BatchPlan


def begin(
    task: Task,
    s: Any,
    out: RunDirectory | NoDirectory,
    tokenizer: Any,
    machine: forge_accel.Accelerator,
    world_size: int,
    report: Reporter,
) -> dict[str, Any]:
    """Tokenise, check and plan; on the first rank only.

    Returns, as JSON, whether the run is finished; if not, where its data are and what its states belong to.

    Raises:
        SettingsError: the directory holds a run that this one cannot go on with.
        forge_data.DataError, forge_packing.PackingError, DataLintError: the data refuse.

    """
    assert isinstance(out, RunDirectory)
    again = s.checkpoints.resume in ("auto", "never")
    if out.resuming and again and is_finished(out.path) and same_request(out.path, s):
        report.note(f"finished already: {out.path} holds this very run, with its result")
        return {"finished": True}
    if not again and not Path(s.checkpoints.resume).expanduser().is_dir():
        raise SettingsError(
            f"resume={s.checkpoints.resume}: there is no such full state. Give the directory of one (full_state/step_N), or resume=auto."
        )
    models = {"model": s.model.model_path, **task.paths(s)}
    identity = {
        "run": secrets.token_hex(8),
        "verb": task.name,
        **{name: forge_dist.model_identity(at) for name, at in models.items()},
    }
    if out.resuming:
        identity = compare_model(out.path, identity)
        report.note(f"{out.path} holds this run already: going on with it")
        link_stores(out.path, out.staging)
    paths = {"train": s.data.data_path, **({"eval": s.data.eval_data_path} if s.data.eval_data_path else {})}
    for name, path in paths.items():
        _prepare(task, path, tokenizer, out.root / "data" / name, s, report)
    found = prepared(task, s, machine, out.root, world_size)
    if found.held_out is not None and not s.data.eval_data_path:
        report.note(f"held out {found.held_out}")
    report.note(f"training on {found.train}")
    task.check(s, report, found.train.store, None if found.held_out is None else found.held_out.store)
    (out.root / "plan").mkdir()
    found.plan.save(out.root / "plan" / "plan.npz")
    report.note(task.summary(found.plan))
    if not out.resuming:
        (out.root / "run.json").write_text(json.dumps(identity) + "\n", encoding="utf-8")
    else:
        for change in compare_settings(out.path, found.settings):
            report.note(f"changed since then: {change}")
        compare_data(task, out.path, out.root, list(paths))
        compare_order(out.path, found.plan)
    return {"finished": False, "root": str(out.path if out.resuming else out.root), "identity": identity}


def prepared(task: Task, s: Any, machine: forge_accel.Accelerator, root: Path, world_size: int) -> Prepared:
    """Open the stores under `root` and plan, as `begin` did: the same on every rank."""
    store, held_out_store = task.open(root / "data" / "train"), None
    if s.data.eval_data_path:
        held_out_store = task.open(root / "data" / "eval")
    elif s.data.validation_split:
        store, held_out_store = store.split(s.data.validation_split, seed=s.plan.seed)
    train = task.items(s, store)
    held_out = None if held_out_store is None else task.items(s, held_out_store)
    s = choose_sizes(task, s, machine, [train] if held_out is None else [train, held_out])
    assert s.plan.max_tokens_per_gpu is not None
    if s.plan.effective_batch_size < world_size:
        raise SettingsError(
            f"effective_batch_size={s.plan.effective_batch_size} is less than the {world_size} ranks: some would never have a sample. "
            f"Set effective_batch_size to {world_size} or more, or start fewer processes."
        )
    epochs, max_steps = task.length(s, train)
    plan = forge_packing.plan(
        train.lengths,
        batch_size=s.plan.effective_batch_size,
        max_tokens=s.plan.max_tokens_per_gpu,
        world_size=world_size,
        seed=s.plan.seed,
        epochs=epochs,
        max_steps=max_steps,
        loss_counts=train.loss_counts,
        sources=train.sources,
        weights=train.weights,
    )
    check_warmup(s, task.num_steps(s, plan))
    return Prepared(s, train, held_out, plan)


def _prepare(task: Task, path: Any, tokenizer: Any, directory: Path, s: Any, report: Reporter) -> None:
    directory.parent.mkdir(exist_ok=True)
    account = task.prepare(s, path, tokenizer, directory, report).accounting
    lost = "".join(f", dropped {count:,} ({reason})" for reason, count in account.dropped.items())
    report.note(f"{path}: read {account.read:,} rows, kept {account.kept:,}{lost}")
