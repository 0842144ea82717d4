"""Settings → token stores and a plan in the run's hidden folder, compared with those of a run that goes on; and both opened again."""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Any, NamedTuple

import forge_accel
import forge_data
import forge_packing
from forge._choices import check_warmup, choose_sizes
from forge._errors import SettingsError
from forge._lint import check_data
from forge._progress import Reporter
from forge._result import is_finished
from forge._resume import (
    compare_data,
    compare_model,
    compare_order,
    compare_settings,
    link_stores,
    model_identity,
    same_request,
)
from forge._run_directory import NoDirectory, RunDirectory
from forge._settings import SFTSettings


class Prepared(NamedTuple):
    """What a run is made of, the same on every rank."""

    settings: SFTSettings
    """With everything chosen that depends on the data."""
    train: forge_data.TokenStore
    held_out: forge_data.TokenStore | None
    plan: forge_packing.BatchPlan


def begin(
    s: SFTSettings,
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
    identity = {"run": secrets.token_hex(8), "model": model_identity(s.model.model_path)}
    if out.resuming:
        identity = compare_model(out.path, identity)
        report.note(f"{out.path} holds this run already: going on with it")
        link_stores(out.path, out.staging)
    paths = {"train": s.data.data_path, **({"eval": s.data.eval_data_path} if s.data.eval_data_path else {})}
    for name, path in paths.items():
        _prepare(path, tokenizer, out.root / "data" / name, s, report)
    found = prepared(s, machine, out.root, world_size)
    if found.held_out is not None and not s.data.eval_data_path:
        report.note(f"held out {len(found.held_out):,} of these rows")
    train = found.train
    report.note(f"training on {len(train):,} rows, in which {int(train.loss_counts.sum()):,} tokens are learned")
    check_data(s, report, train, found.held_out)
    (out.root / "plan").mkdir()
    found.plan.save(out.root / "plan" / "plan.npz")
    report.note(found.plan.summary())
    if not out.resuming:
        (out.root / "run.json").write_text(json.dumps(identity) + "\n", encoding="utf-8")
    else:
        for change in compare_settings(out.path, found.settings):
            report.note(f"changed since then: {change}")
        compare_data(out.path, out.root, list(paths))
        compare_order(out.path, found.plan)
    return {"finished": False, "root": str(out.path if out.resuming else out.root), "identity": identity}


def prepared(s: SFTSettings, machine: forge_accel.Accelerator, root: Path, world_size: int) -> Prepared:
    """Open the stores under `root` and plan, as `begin` did: the same on every rank."""
    train = forge_data.TokenStore.open(root / "data" / "train")
    held_out: forge_data.TokenStore | None = None
    if s.data.eval_data_path:
        held_out = forge_data.TokenStore.open(root / "data" / "eval")
    elif s.data.validation_split:
        train, held_out = train.split(s.data.validation_split, seed=s.plan.seed)
    s = choose_sizes(s, machine, [train] if held_out is None else [train, held_out])
    assert s.plan.max_tokens_per_gpu is not None
    if s.plan.effective_batch_size < world_size:
        raise SettingsError(
            f"effective_batch_size={s.plan.effective_batch_size} is less than the {world_size} ranks: some would never have a sample. "
            f"Set effective_batch_size to {world_size} or more, or start fewer processes."
        )
    plan = forge_packing.plan(
        train.lengths,
        batch_size=s.plan.effective_batch_size,
        max_tokens=s.plan.max_tokens_per_gpu,
        world_size=world_size,
        seed=s.plan.seed,
        epochs=s.plan.num_epochs,
        max_steps=s.plan.max_steps,
        loss_counts=train.loss_counts,
        sources=None if train.weights is None else train.sources,
        weights=train.weights,
    )
    check_warmup(s, plan.num_steps)
    return Prepared(s, train, held_out, plan)


def _prepare(path: Any, tokenizer: Any, directory: Path, s: SFTSettings, report: Reporter) -> None:
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
