"""Position of a run → a full state on disk, and back; and when one is due."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

import forge_algos
import forge_dist
import forge_packing
from forge._counted import counted
from forge._disk import is_everywhere, write_remedy
from forge._errors import RunDirectoryError, RunWriteError, SettingsError
from forge.saving._best import Best
from forge.saving._directories import remove_at_once
from forge.saving._emergency import adopt, claim, disown, emergency_place
from forge.settings._settings import RunSettings
from forge.settings._share import steps_between
from forge.tasks._task import Evaluation
from forge.tasks.items._items import Items

FOLDER = "full_state"
"""Folder of the full states in a run directory."""

OPENED = "Have it given to this user (`chmod`, `chown`)"
"""What to do about full states that this user may not read."""

_LISTED = 8


@attrs.frozen(kw_only=True)
class Position:
    """Progress of a run; its fields are the keys of `position` in a full state."""

    step: int = 0
    """Steps made."""
    samples: int = 0
    """Samples seen, repetitions counted."""
    skipped: int = 0
    """Steps that updated nothing because their loss or gradient was not finite."""
    loss: float = 0.0
    """Training loss of the last step."""
    eval_before: dict[str, float] | None = None
    """Held-out figures before the first step."""
    measured: Evaluation | None = attrs.field(
        default=None, converter=lambda found: Evaluation(**found) if isinstance(found, dict) else found
    )
    """Evaluation after this very step."""
    best: Best = attrs.field(factory=Best, converter=lambda found: Best(**found) if isinstance(found, dict) else found)
    """Best evaluation so far."""
    objective: dict[str, float] = attrs.field(factory=dict)
    """Numbers of the objective that steps change."""
    metrics_bytes: int = 0
    """Length of metrics.jsonl."""
    seconds: float = 0.0
    """Wall-clock time of the steps so far."""


def resumed(objective: Any, at: Position) -> Any:
    """Return an objective that follows the steps, as it was at a position; None for another."""
    if not isinstance(objective, forge_algos.FollowsSteps):
        return None
    if at.objective:
        objective.resume(at.objective)
    return objective


def keeps_states(s: RunSettings) -> bool:
    """Return whether a finished run keeps its full states: only where the user asks for it."""
    at_epoch = s.checkpoints.accelerate_full_state_at_epoch and s.origins["accelerate_full_state_at_epoch"] != "default"
    return s.checkpoints.keep_full_state or at_epoch


def remove_states(path: Path) -> None:
    """Remove the full states of a finished run.

    A folder that is a link to another place stays, without them.
    """
    folder = path / FOLDER
    if folder.is_symlink():
        for state in folder.iterdir():
            if state.name == "latest" or step_in(state) >= 0:
                remove_at_once(state)
    elif folder.exists():
        remove_at_once(folder)


def ended_for_good(path: Path) -> bool:
    """Return whether a run is finished and without the state that more steps would need."""
    return (path / "result.json").exists() and not any((path / FOLDER).glob("step_*"))


def closed_states(path: Path) -> str | None:
    """Return why this user may not read the full states of a run; None where it may."""
    if (closed := forge_dist.unreadable(path / FOLDER)) is not None or not (path / FOLDER).is_dir():
        return closed
    states = sorted((state for state in (path / FOLDER).iterdir() if step_in(state) >= 0), key=step_in, reverse=True)
    return next((closed for state in states if (closed := forge_dist.unreadable(state)) is not None), None)


def refuse_closed_states(path: Path) -> None:
    """Raise RunDirectoryError where a run has full states that this user may not read."""
    if (closed := closed_states(path)) is not None:
        raise RunDirectoryError(
            f"ckpt_output_dir {path}: its run goes on from {FOLDER}/, and {closed}. {OPENED}, give the command as one who "
            "may, or give another ckpt_output_dir."
        )


def finished_error(path: Path, changed: Sequence[str]) -> RunDirectoryError:
    """Return the error of a run that ended for good and is asked for more.

    Args:
        path: the run directory.
        changed: what is asked for now, setting: before → now each.

    """
    what = f" ({'; '.join(changed)})" if changed else ""
    return RunDirectoryError(
        f"ckpt_output_dir {path}: its run is finished, and these settings ask for another one{what}. Its training state was "
        "removed at its end, so that it cannot be trained further: keep_full_state=true keeps it. Give another "
        "ckpt_output_dir; with model_path naming its export, training begins from what it learned."
    )


class FullStates:
    """Full states of a run: `restore` once, `save` when `due`."""

    def __init__(
        self, s: RunSettings, path: Path, ranks: forge_dist.Ranks, must_match: Mapping[str, Any], note: Callable[..., None]
    ) -> None:
        self._s = s.checkpoints
        self._path = path
        self._ranks = ranks
        self._must_match = must_match
        self._note = note
        keep = 1 if s.checkpoints.keep_last_checkpoint_only else s.checkpoints.keep_last_n
        self.files = forge_dist.Checkpoints(path / FOLDER, ranks, keep=keep, background=s.checkpoints.async_save, note=note)
        self._emergency = emergency_place(s.checkpoints.emergency_dir, path, str(must_match.get("run", "")))
        self._rescued: int | None = None
        """Step of the full state in emergency_dir that the run was resumed from."""
        self._saved = -1
        self._saved_at = time.monotonic()

    def restore(
        self, strategy: forge_dist.Strategy, model: Any, optimizer: Any, scheduler: Any, num_steps: int | None
    ) -> Position | None:
        """Restore model, optimizer and schedule from the newest whole state, or that of `resume`.

        Returns:
            The position of that state; None where there is none.

        Raises:
            SettingsError: the run is to be shorter than it is already.

        """
        # A process that torchrun restarted resumes from what it saved last, not from what its first start was given.
        if self._s.resume not in ("auto", "never") and not int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")):
            found = self.files.at(Path(self._s.resume).expanduser(), self._must_match)
        else:
            found = self._newest()
        if found is None:
            return None
        if num_steps is not None and found.step > num_steps:
            raise SettingsError(
                f"{found.path}: is of step {found.step}, and num_epochs, max_steps or max_tokens now ask for {num_steps} "
                "steps: what was trained cannot be taken back. Ask for more, name an earlier state (resume=PATH), or give "
                "another ckpt_output_dir."
            )
        strategy.load_state(model, optimizer, found)
        scheduler.load_state_dict(_for_groups(found.about["schedule"], len(optimizer.param_groups)))
        for group, rate in zip(optimizer.param_groups, scheduler.get_last_lr(), strict=True):
            group["lr"] = rate
        self._saved = found.step
        self._note(f"resuming after step {found.step}, from {found.path}", event="resumed", step=found.step)
        return Position(**found.about["position"])

    def diverged(
        self, error: forge_algos.DivergedError, train: Items, plan: forge_packing.BatchPlan, step: int, updates: int
    ) -> forge_algos.DivergedError:
        """Return the error with the samples of the step after `step` and the last good state."""
        self.files.wait()
        samples = plan.samples(step // updates)
        rows = ", ".join(train.source(int(sample)) for sample in samples[:_LISTED])
        more = f" and {len(samples) - _LISTED} more" if len(samples) > _LISTED else ""
        good = self.files.last_good
        state = f"the last good state is {good}" if good else "no state was saved yet"
        return type(error)(f"{error}. Its samples: {rows}{more}; {state}")

    def due(self, step: int, num_steps: int | None, *, epoch_ends: bool) -> bool:
        """Return whether a state is to be saved after this step.

        Only the first rank looks at the clock, so the caller combines the answers of all ranks.
        """
        every = steps_between(self._s.full_state_every_steps, num_steps)
        minutes = self._s.full_state_every_minutes
        late = bool(minutes) and self._ranks.is_first and time.monotonic() - self._saved_at >= 60 * minutes
        return late or (bool(every) and step % every == 0) or (self._s.accelerate_full_state_at_epoch and epoch_ends)

    def save(
        self, strategy: forge_dist.Strategy, model: Any, optimizer: Any, scheduler: Any, at: Position, *, wait: bool
    ) -> None:
        """Save a full state, unless that of this step was saved; `wait` until it is on disk.

        Raises:
            RunWriteError: too many in a row could not be saved; the last one is in emergency_dir where that is set.

        """
        if wait:
            self.files.wait()
        if at.step != self._saved or self.files.failed:
            about = {"position": attrs.asdict(at), "schedule": scheduler.state_dict()}
            self.files.save(at.step, strategy.state(model, optimizer), about, must_match=self._must_match, wait=wait)
            self._saved, self._saved_at = at.step, time.monotonic()
        if self.files.failures >= self._s.max_failed_saves:
            why = f"{counted(self.files.failures, 'full states')} in a row could not be saved: {self.files.failed}"
            _, remedy = self.rescue(strategy, model, optimizer, scheduler, at)
            raise RunWriteError(f"{why}. The run ends at step {at.step}, before more is lost. {remedy}")
        good = self.files.last_good
        if self._rescued is not None and good is not None and step_in(good) > self._rescued:
            self.forget_rescued()

    def rescue(
        self,
        strategy: forge_dist.Strategy,
        model: Any,
        optimizer: Any,
        scheduler: Any,
        at: Position,
        unwritten: Exception | None = None,
    ) -> tuple[Path | None, str]:
        """Save the state to emergency_dir where ckpt_output_dir did not take it.

        Args:
            strategy: that divides the model.
            model: what its `wrap` returned.
            optimizer: of the run.
            scheduler: of the run.
            at: position that the state is of.
            unwritten: why an export, and not a state, could not be written.

        Returns:
            The full state of this position, if one is on a disk, and a sentence on what the same command does.

        """
        self.files.wait()
        good, why = self.files.last_good, unwritten or self.files.failed
        if self._rescued is not None and self._emergency is not None and (good is None or step_in(good) < self._rescued):
            good = self._emergency / f"step_{self._rescued}"
        if good is not None and step_in(good) == at.step and not self.files.failed:
            return good, f"{good} holds the state, and the same command goes on from there: {write_remedy(why)}."
        goes_on = "begins anew, for no state was saved"
        if good is not None:
            lost, last = at.step - step_in(good), f"{step_in(good) + 1:,} to {at.step:,}"
            again = f", and makes step{'s' * (lost > 1)} {last if lost > 1 else f'{at.step:,}'} again" if lost else ""
            goes_on = f"goes on from {good}{again}"
        if self._emergency is None:
            elsewhere = " With emergency_dir, a directory on another disk, the state would have been saved there."
            return None, f"The same command {goes_on}: {write_remedy(why)}.{'' if is_everywhere(why) else elsewhere}"
        place = self._emergency
        self._ranks.first(lambda: claim(place, self._path))
        files = forge_dist.Checkpoints(place, self._ranks, keep=1, background=False)
        about = {"position": attrs.asdict(at), "schedule": scheduler.state_dict()}
        files.save(at.step, strategy.state(model, optimizer), about, must_match=self._must_match)
        if files.failed is not None:
            self._ranks.first(lambda: disown(place))
            remedy, there = write_remedy(why), write_remedy(files.failed)
            both = f"{remedy}, there or in emergency_dir" if there == remedy else f"{remedy}; or in emergency_dir: {there}"
            both = remedy if there == remedy and is_everywhere(why) else both
            return None, f"Nor could it be saved to emergency_dir: {files.failed}. The same command {goes_on}: {both}."
        return files.last_good, f"Its state is in {files.last_good} (emergency_dir): the same command goes on from there."

    def forget_rescued(self) -> None:
        """Remove the run's full state in emergency_dir."""
        self._rescued = None
        if self._ranks.is_first and self._emergency is not None:
            shutil.rmtree(self._emergency, ignore_errors=True)

    def _newest(self) -> forge_dist.Checkpoint | None:
        """Return the newest whole full state of the run, there or in emergency_dir."""
        found = self.files.newest(self._must_match, self._note)
        place = self._emergency
        if place is None or not self._ranks.first(lambda: adopt(place, self._path)):
            return found
        files = forge_dist.Checkpoints(place, self._ranks, keep=1, background=False)
        try:
            rescued = files.newest(self._must_match, self._note)
        except forge_dist.CheckpointError as error:
            self._note(f"WARNING: emergency_dir: {error}")
            return found
        if rescued is None or (found is not None and found.step >= rescued.step):
            return found
        self._rescued = rescued.step
        return rescued


def step_in(state: Path) -> int:
    """Return the step in the name of a full state; -1 for another name."""
    number = state.name.removeprefix("step_")
    return int(number) if number.isdigit() else -1


def _for_groups(schedule: dict[str, Any], groups: int) -> dict[str, Any]:
    """Return a schedule's state for so many groups of parameters.

    Weights that ranks divide have groups of their own beside whole ones, so their number depends on the division; where their
    values are alike, they are those of any number.
    """
    had = len(schedule["base_lrs"])

    def alike(value: Any) -> bool:
        return isinstance(value, list) and len(value) == had and all(each == value[0] for each in value)

    return {name: value[:1] * groups if had != groups and alike(value) else value for name, value in schedule.items()}
