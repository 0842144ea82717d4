"""Trained model → exports in hf_format/, each whole, loaded back and recorded by hash.

An export in the place of another one, such as a better best, is made beside it, and the other one goes afterwards::

    hf_format/
    ├── samples_32/  best/  best.json  hashes.json
    ├── .best.new.tmp             being made, or left by a killed run
    ├── .best.replaced            was best until a better one took its name
    └── .best.json.replaced       was best.json until then
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import forge_dist
from forge._counted import counted, figure
from forge._progress import Reporter
from forge._result import BEST
from forge.saving._directories import remove_at_once
from forge.saving._hashes import FOLDER, REPLACED, Hashes, damaged_files, hash_export, known_hashes, write_hashes
from forge.saving._mend import mend_exports
from forge.settings._share import steps_between

MARK = "best.json"


def due_after(save_samples: float, step: int, num_steps: int | None, before: int, samples: int) -> bool:
    """Return whether `save_samples` asks for an export after a step.

    Args:
        save_samples: samples from one export to the next, or below 1 a share of the run's steps; 0 for none.
        step: the step.
        num_steps: those of the run.
        before: samples seen before the step.
        samples: samples seen after it.

    >>> due_after(8, 1, 4, 0, 6), due_after(8, 2, 4, 6, 12), due_after(0.5, 2, 4, 6, 12), due_after(0, 2, 4, 6, 12)
    (False, True, True, False)
    """
    if save_samples < 1:
        every = steps_between(save_samples, num_steps)
        return bool(every) and step % every == 0
    return before // save_samples != samples // save_samples


class Exports:
    """Exports of a run; every method is collective.

    Args:
        run: the run directory.
        model: what the strategy's `wrap` returned.
        strategy: that divides the model.
        tokenizer: written with the model; None for none.
        dtype: of the files; None as in memory.
        model_task: task that the model was loaded for.
        samples: on which the loaded export is compared with the model in memory.
        attach: loads an adapter onto a divided base.
        as_plain: further arguments of writing and of checking.
        newest_only: whether the former export goes once a new one is whole.
        report: the progress report.
        lack: turns a lack of memory into an error that says what to set; None for any other error.
        beside: writes further files into each export; None for none.

    """

    def __init__(
        self,
        run: Path,
        *,
        model: Any,
        strategy: forge_dist.Strategy,
        tokenizer: Any,
        dtype: Any,
        model_task: Any,
        samples: Sequence[Any],
        attach: Any,
        as_plain: Mapping[str, Any],
        newest_only: bool,
        report: Reporter,
        lack: Callable[[Exception], Exception | None],
        beside: Callable[[Path], None] | None = None,
    ) -> None:
        self.faults: list[Exception] = []
        """Why the last export of the run differs from the model in memory."""
        self._damaged: list[str] = []
        self._run, self._model, self._strategy, self._ranks = run, model, strategy, strategy.ranks
        self._tokenizer, self._dtype, self._task = tokenizer, dtype, model_task
        self._samples, self._attach, self._as_plain = list(samples), attach, dict(as_plain)
        self._newest_only, self._report, self._lack, self._beside = newest_only, report, lack, beside

    def write(self, name: str, *, final: bool = False, then: Callable[[], None] | None = None) -> Path | None:
        """Write an export, load it back and record it; one of that name that is whole already stays.

        Args:
            name: `samples_N`, or `best`, which always is another model than the one before.
            final: whether it is the run's last, without which the run fails.
            then: called on the first rank once it has its name, and before the one that it replaces goes.

        Returns:
            Its directory; None where it could not be written, which is logged.

        Raises:
            forge_dist.ExportError: the last one cannot be written.

        """
        directory = self._run / FOLDER / name
        self._report.doing(f"exporting {name} and loading it back")
        state = self._ranks.first(lambda: self._state_of(directory))
        place = _beside(directory) if state == "replaced" else directory
        check, error = None, None
        if state == "kept":
            check, error = self._check(directory)
            if self._ranks.any(error is not None):
                self._report.note(f"{directory} is there, is not of this model, and is made again: {error}")
                state, place = "replaced", _beside(directory)
        if state != "kept":
            try:
                self._make(place, directory)
            except forge_dist.ExportError as unwritten:
                if final:
                    raise
                self._report.note(f"WARNING: training goes on without this export: {unwritten}")
                return None
            check, error = self._check(place)
        lack = None if error is None else self._lack(error)
        # On any rank: a device or host without room for the copy says nothing of the files.
        differs = self._ranks.first(lambda: isinstance(error, forge_dist.ExportError) and lack is None)
        if error is not None:
            why = lack or str(error).replace(str(place), str(directory))
            self._report.note(f"WARNING: {directory} is written, and could not be compared with the model in memory: {why}")
        if differs and final:
            self.faults.append(error or forge_dist.ExportError(f"{directory} differs from the model in memory"))
        if differs and state == "replaced" and not final:
            # What is there is whole, and this is not.
            self._ranks.first(lambda: remove_at_once(place))
            return None
        files = hash_export(place, self._ranks)
        # A last export that differs from the model in memory is not recorded: the run is not proved.
        self._ranks.first(lambda: take_name(self._run, place, directory, None if differs and final else files, then))
        if check is not None:
            note_exported(self._report, directory, self._task, len(self._samples), check, files)
            if name != BEST:
                self._ranks.first(lambda: self._remove_others(directory, final=final))
        if final and self._damaged:
            self.verify()
        return directory

    def verify(self) -> None:
        """Compare what an earlier start exported with its record; mend or name what is damaged.

        At the end of the run what was damaged is looked at once more: the last export may have the same files.
        """
        mended, self._damaged = self._ranks.first(lambda: mend_exports(self._run))
        for line in mended:
            self._report.note(line, event="mended")
        if self._damaged:
            what = "; ".join(self._damaged)
            self._report.note(f"WARNING: not as it was exported: {what}. An export of steps that are made already stays so")

    def _state_of(self, directory: Path) -> str:
        """Return whether an export is `new`, is `kept` for it is whole, or is to be `replaced`."""
        if (left := _beside(directory)).exists():
            remove_at_once(left)
        if not directory.exists():
            return "new"
        if directory.name == BEST:
            return "replaced"
        files = known_hashes(self._run).get(directory.name)
        # Killed before its hashes were recorded, nothing tells of its files (of the tokenizer, say) what they were.
        if files is None or damaged_files(directory, files):
            return "replaced"
        try:
            same = self._dtype is None or forge_dist.base_dtype(str(directory), task=self._task) == self._dtype
        except forge_dist.ModelError:
            return "replaced"
        return "kept" if same else "replaced"

    def _make(self, place: Path, directory: Path) -> None:
        try:
            forge_dist.export_model(
                self._model,
                place,
                tokenizer=self._tokenizer,
                dtype=self._dtype,
                strategy=self._strategy,
                beside=self._beside,
                **self._as_plain,
            )
        except forge_dist.ExportError as error:  # it may name the place beside
            raise type(error)(str(error).replace(str(place), str(directory))) from error

    def _check(self, place: Path) -> tuple[forge_dist.ExportCheck | None, Exception | None]:
        """Compare an export with the model in memory; return the figures, or why there are none."""
        try:
            return forge_dist.check_export(
                self._model, place, self._samples, strategy=self._strategy, attach=self._attach, **self._as_plain
            ), None
        except Exception as error:  # noqa: BLE001 - whatever a check meets, what was trained is written and stays
            return None, error

    def _remove_others(self, directory: Path, *, final: bool) -> None:
        """Remove former exports where only the newest is kept; after the last one, later ones."""
        own = samples_of(directory.name)
        for other in sorted(directory.parent.glob("samples_*")):
            count = samples_of(other.name)
            if count is not None and own is not None and ((self._newest_only and count < own) or (final and count > own)):
                remove_at_once(other)


def compared_by(task: str) -> str:
    """Return in words the figure by which an export is compared with the model in memory."""
    return {"reward": "mean reward", "causal": "loss", "embedding": "mean hidden state"}.get(task, "mean logit")


def note_exported(
    report: Reporter, directory: Path, task: str, samples: int, check: forge_dist.ExportCheck, files: Hashes
) -> None:
    """Log an export that was loaded back, with the figures and the hashes of its files."""
    what = compared_by(task)
    report.note(
        f"exported {directory}: loaded back, on {counted(samples, 'short samples')} its {what} is {figure(check.reloaded)}, "
        f"{figure(check.in_memory)} in memory",
        event="exported",
        export=directory.name,
        measure=what,
        on=samples,
        reloaded=check.reloaded,
        in_memory=check.in_memory,
        files=files,
    )


def take_name(run: Path, place: Path, directory: Path, files: Hashes | None, then: Callable[[], None] | None = None) -> None:
    """Give an export its name and record it; then the one that had the name goes.

    `put_back` undoes what a kill leaves of this.

    Args:
        run: the run directory.
        place: where the export was made; its own name where there was none of it.
        directory: its name.
        files: hashes to record; None takes it out of the record.
        then: called before the one that had the name goes.

    """
    forge_dist.check_guards(directory)
    former, mark = directory.with_name(f".{directory.name}{REPLACED}"), directory.with_name(MARK)
    known = known_hashes(run)
    if place != directory:
        if directory.name == BEST and mark.exists():
            mark.rename(_former_mark(mark))
        if directory.exists():
            directory.rename(former)
        place.rename(directory)
    # What the former one held stays known until it is gone: `put_back` must not take damage for what was exported.
    others = {name: of for name, of in known.items() if name != directory.name}
    if former.exists():
        others[former.name] = known.get(directory.name, {})
    write_hashes(run, others if files is None else {**others, directory.name: files})
    if then is not None:
        then()
    if former.exists():
        remove_at_once(former)
        with suppress(forge_dist.ExportError):  # what is gone may as well stay in it
            write_hashes(run, known_hashes(run))
    _former_mark(mark).unlink(missing_ok=True)


def samples_of(name: str) -> int | None:
    """Return the samples in the name of an export; None for another name."""
    count = name.removeprefix("samples_")
    return int(count) if count.isdigit() and count != name else None


def put_back(run: Path) -> None:
    """Undo the replacing of exports that a kill broke off; best.json has its former content."""
    folder = run / FOLDER
    mark = folder / MARK
    for former in sorted(folder.glob(f".*{REPLACED}")):
        name = former.name[1 : -len(REPLACED)]
        if not former.is_dir():
            continue
        # best.json first: once the folder has its name back, nothing tells whose mark it is.
        if name == BEST and _former_mark(mark).exists():
            _former_mark(mark).replace(mark)
        known = known_hashes(run)
        files = known.get(former.name, known.get(name))
        known = {other: of for other, of in known.items() if other != name} | ({name: files} if files else {})
        write_hashes(run, known)
        if (folder / name).exists():
            remove_at_once(folder / name)
        former.rename(folder / name)
        write_hashes(run, {other: of for other, of in known.items() if other != former.name})
    if _former_mark(mark).exists():
        _former_mark(mark).unlink() if mark.exists() else _former_mark(mark).rename(mark)


def _beside(directory: Path) -> Path:
    """Return the place in which an export is made that replaces another one."""
    return directory.with_name(f".{directory.name}.new.tmp")


def _former_mark(mark: Path) -> Path:
    return mark.with_name(f".{mark.name}{REPLACED}")
