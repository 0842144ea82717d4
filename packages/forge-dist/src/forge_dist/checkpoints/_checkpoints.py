"""Full states of one run: saved in the background, found whole again after any crash."""

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch

from forge_dist._errors import CheckpointError
from forge_dist._host_memory import room_for
from forge_dist.checkpoints import _folder as folder
from forge_dist.checkpoints._coordinate import SharedPlan, digest_of
from forge_dist.checkpoints._find import find_newest, open_checkpoint
from forge_dist.checkpoints._host_copy import HostCopy
from forge_dist.checkpoints._manifest import jsonable, next_serial
from forge_dist.checkpoints._plan import Piece, local_pieces
from forge_dist.checkpoints._read import Checkpoint
from forge_dist.checkpoints._save import Exchange, Job, Outcome, save_job
from forge_dist.ranks._collectives import broadcast_bytes, collect_bytes, from_json, to_json

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from forge_dist.ranks._ranks import Ranks

__all__ = ["Checkpoint", "Checkpoints"]

_FAILED_RUN_SECONDS = 60.0  # how long a run that fails waits for a save in progress; dead ranks may never answer


def _silent(_text: str) -> None:
    """Ignore a message; `Checkpoints(note=)` or `.failed` has the reasons of failed saves."""


class Checkpoints:
    """Full states under `root`, a directory that all ranks reach and this run alone writes to.

    Every method is collective: all ranks call it, in the same order. A failing save never raises, so that a full disk does not
    end the
    training: `failed` has the reason (the same on all ranks), `note` is called with it, and the last good full state stays.

    Args:
        root: the directory `full_state`; created at the first save.
        ranks: connected ranks.
        keep: number of full states to keep; for a moment there is one more.
        background: write in a thread; `save` returns once everything is copied to host memory, which is kept for the next copy.
            Where a host has no room for that, `save` writes tensor by tensor, and returns when it is on the disk.
        note: called on every rank with what went wrong while saving, at the next `save` or `wait`. `newest` sets it too.
    """

    def __init__(
        self, root: Path, ranks: "Ranks", *, keep: int, background: bool, note: Callable[[str], None] = _silent
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep must be 1 or more; got {keep}")
        self._root, self._ranks, self._keep, self._background, self._note = Path(root), ranks, keep, background, note
        self._must_match: dict[str, Any] = {}
        self._broken: list[Path] = []
        self._tidied = False
        self._copy = HostCopy()
        self._told_of_room = False
        self._plan = SharedPlan(ranks)
        self._serial: int | None = None
        self._thread: threading.Thread | None = None
        self._outcome: Outcome | None = None
        self._last_good: Path | None = None
        self._failed: str | None = None
        self._failures = 0

    @property
    def last_good(self) -> Path | None:
        """Full state that was last saved or found whole in this process; None before.

        One still being written does not count.
        """
        return self._last_good

    @property
    def failed(self) -> str | None:
        """Reason why the last finished save failed, or None. Up to date after `wait()`."""
        return self._failed

    @property
    def failures(self) -> int:
        """Number of saves in a row that failed, up to the last finished one; the same on all ranks."""
        return self._failures

    def save(
        self,
        step: int,
        tensors: Mapping[str, torch.Tensor],
        about: Mapping[str, Any],
        *,
        wait: bool = False,
        must_match: Mapping[str, Any] | None = None,
    ) -> None:
        """Save the state after an optimizer step.

        A full state of the same step is replaced; those of later steps, which a run has that went back to an earlier one, are
        deleted.

        Args:
            step: 0 or more.
            tensors: name → plain tensor (the same on all ranks that have it; written once) or DTensor. Any device, any strides.
                A name need not be present on all ranks.
            about: JSON, taken from the first rank.
            wait: return when it is on the disk.
            must_match: JSON, taken from the first rank; by default what `newest` or `at` were given. A later run must have the
                same.

        Raises:
            CheckpointError: these tensors cannot be saved (on all ranks alike). Failing disks do not raise: see `failed`.
        """
        self.wait()
        # A step of 2.0 would be a directory that no later run finds, and for which the states before it are deleted.
        step, invalid = folder.whole_step(step)
        temporary, problem = self._begin(step) if self._ranks.is_first else (None, None)
        pieces: dict[str, Piece] = {}
        values: dict[str, torch.Tensor] = {}
        texts = ("", "")
        try:
            pieces, values = local_pieces(tensors)
            texts = (
                jsonable(must_match if must_match is not None else self._must_match, "must_match"),
                jsonable(about, "about"),
            )
        except CheckpointError as error:
            invalid = invalid or str(error)
        reports = self._ranks.collect({"step": step, "invalid": invalid, "pieces": digest_of(pieces)})
        try:
            verdict = self._ranks.broadcast(None if reports is None else self._judge(reports, step, temporary, problem))
            if verdict["refused"] is not None:
                raise CheckpointError(verdict["refused"])
            if not verdict["planned"]:
                self._plan.make(pieces, [] if reports is None else [each["pieces"] for each in reports])
        except CheckpointError:
            if temporary is not None:
                folder.discard(Path(temporary))
            raise
        if verdict["problem"] is not None:
            self._record(Outcome(error=verdict["problem"]))
            return
        own = {name: values[name] for name in self._plan.names}
        background = self._background and self._has_room(own)
        job = Job(
            step=step,
            serial=self._next_serial(),
            temporary=Path(verdict["folder"]),
            root=self._root,
            keep=self._keep,
            broken=tuple(self._broken),
            pieces=pieces,
            values=self._copy.take(own) if background else own,
            tensors=self._plan.tensors,
            must_match=texts[0],
            about=texts[1],
        )
        if not background:
            self._record(save_job(job, self._ranks, self._ranks))
            return
        self._thread = threading.Thread(
            target=self._work, args=(job, self._background_exchange()), name=f"save step {step}", daemon=True
        )
        self._thread.start()
        if wait:
            self.wait()

    def _has_room(self, own: Mapping[str, torch.Tensor]) -> bool:
        """Return whether every rank's host has room for a copy of its part; collective."""
        short = not room_for(self._copy.missing(own), sharing=self._ranks.local_world_size)
        if not self._ranks.any(short):
            return True
        if not self._told_of_room:
            self._told_of_room = True
            self._note(
                "the host's memory has no room for a copy of the full state: it is written tensor by tensor, and the training "
                "waits for it (async_save=true has no effect)"
            )
        return False

    def wait(self) -> None:
        """Wait until nothing is being saved; `failed` and `last_good` are up to date then."""
        self._join(None)

    def close(self) -> None:
        """Wait for the last save and free the host copy."""
        self.wait()
        self._copy = HostCopy()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_rest: object) -> None:
        self._join(None if kind is None else _FAILED_RUN_SECONDS)

    def newest(self, must_match: Mapping[str, Any], note: Callable[[str], None]) -> Checkpoint | None:
        """Find the full state that was finished last and is whole.

        Its files must have the sizes and SHA-256s of its manifest.

        For one that is not whole `note` is called on every rank (which file, what is wrong with it), and the one before it is
        taken; it is deleted after the next save. Before that, half-written files of a killed run are deleted.

        Args:
            must_match: what a run must have in common with the one that saved; remembered for `save`.
            note: called with what is passed over, and from now on with what goes wrong while saving.

        Returns:
            None where nothing was ever saved.

        Raises:
            CheckpointError: there are some and none is whole; or the newest whole one is of another run (every differing value
                is named) or of another format version. The same on all ranks.
        """
        self.wait()
        self._note = note
        self._must_match = dict(must_match)
        self._tidy_once()
        found, self._broken = find_newest(self._root, self._ranks, must_match, note)
        if found is not None:
            self._last_good = found.path
            # The newest of them all, unless one could not be read.
            self._serial = None if self._broken else found.manifest.serial
            self._finish_interrupted(found.path)
        return found

    def at(self, path: Path, must_match: Mapping[str, Any]) -> Checkpoint:
        """Open the full state in the directory `path`, wherever that is.

        Raises:
            CheckpointError: it does not exist, is not whole, of another run or of another format version. The same on all
                ranks.
        """
        self.wait()
        self._must_match = dict(must_match)
        found = open_checkpoint(Path(path), self._ranks, must_match)
        self._last_good = found.path
        return found

    def forget_later(self, step: int) -> None:
        """Delete the full states of steps after `step`, for a run that went back."""
        if self._ranks.is_first:
            for path in folder.listed(self._root):
                if (folder.step_of(path) or 0) > step:
                    folder.delete(path)
        self._ranks.barrier()

    def _finish_interrupted(self, newest: Path) -> None:
        """Announce and prune, which a run killed right after renaming a full state had no time for."""
        if not self._ranks.is_first or self._broken:
            return
        for problem in (folder.announce(self._root, newest), folder.prune(self._root, newest, self._keep, ())):
            if problem is not None:
                self._note(problem)

    def _tidy_once(self) -> None:
        # Not in the constructor: reading one full state with at() must not change anything.
        if not self._tidied and self._ranks.is_first:
            try:
                folder.tidy(self._root)
            except OSError as error:
                self._note(f"{self._root} could not be tidied: {error}")
        self._tidied = True

    def _begin(self, step: int) -> tuple[str | None, str | None]:
        self._tidy_once()
        try:
            return str(folder.begin(self._root, step)), None
        except OSError as error:
            return None, f"{self._root / folder.name_of(step)} cannot be written: {error}"

    def _judge(self, reports: list[dict[str, Any]], step: int, temporary: str | None, problem: str | None) -> dict[str, Any]:
        """Return what all ranks hear before a save; on the first rank."""
        refused = None
        for rank, each in enumerate(reports):
            if each["invalid"] is not None and refused is None:
                refused = each["invalid"] + (f" (rank {rank})" if len(reports) > 1 else "")
        steps = sorted({each["step"] for each in reports})
        if refused is None and (step < 0 or steps != [step]):
            refused = f"ranks save different steps, or a negative one: {steps}"
        planned = self._plan.covers([each["pieces"] for each in reports])
        return {"refused": refused, "problem": problem, "folder": temporary, "planned": planned}

    def _next_serial(self) -> int:
        """Return the serial of the next save.

        The first rank reads the manifests on disk for it, once.
        """
        if self._ranks.is_first:
            self._serial = next_serial(folder.listed(self._root)) if self._serial is None else self._serial + 1
        return self._serial or 0

    def _background_exchange(self) -> Exchange:
        """Return what the background thread exchanges values by, over a group of its own."""
        group = self._ranks.checkpoint_group()
        return self._ranks if group is None else _GroupExchange(group)

    def _work(self, job: Job, exchange: Exchange) -> None:
        self._outcome = save_job(job, self._ranks, exchange)

    def _join(self, seconds: float | None) -> None:
        if self._thread is None:
            return
        if self._thread.ident is None:
            # An exception, such as that of a stall, came while it was being started.
            self._thread = None
            return
        self._thread.join(seconds)
        if self._thread.is_alive():
            return
        self._thread = None
        if self._outcome is not None:
            self._record(self._outcome)
            self._outcome = None

    def _record(self, outcome: Outcome) -> None:
        self._failed = outcome.error
        self._failures = 0 if outcome.error is None else self._failures + 1
        if outcome.path is not None:
            self._last_good = outcome.path
            self._broken = []
        else:
            good = (
                f"the last good full state is {self._last_good}"
                if self._last_good is not None
                else "there is no other full state"
            )
            self._note(f"a full state could not be saved: {outcome.error}; {good}")
        if outcome.remark is not None:
            self._note(outcome.remark)


class _GroupExchange:
    """Values between the ranks of a gloo group, whatever the accelerator."""

    def __init__(self, group: "ProcessGroup") -> None:
        self._group, self._cpu = group, torch.device("cpu")

    def collect(self, value: object) -> list[Any] | None:
        parts = collect_bytes(to_json(value), self._group, self._cpu)
        return None if parts is None else [from_json(part) for part in parts]

    def broadcast(self, value: object) -> Any:
        return from_json(broadcast_bytes(to_json(value), self._group, self._cpu))
