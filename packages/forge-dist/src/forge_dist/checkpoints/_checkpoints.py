"""The full states of one run: saved beside the training, found whole again, whatever killed the run in between."""

import hashlib
import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch

from forge_dist._errors import CheckpointError
from forge_dist.checkpoints import _folder as folder
from forge_dist.checkpoints._find import find_newest, look_at
from forge_dist.checkpoints._host_copy import HostCopy
from forge_dist.checkpoints._manifest import jsonable
from forge_dist.checkpoints._plan import Piece, Whole, divide, local_pieces
from forge_dist.checkpoints._read import Checkpoint
from forge_dist.checkpoints._save import Job, Outcome, save_job
from forge_dist.ranks._collectives import from_json, gather_bytes, to_json

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from forge_dist.ranks._ranks import Ranks

__all__ = ["Checkpoint", "Checkpoints"]

_LEAVE_SECONDS = 60.0  # how long a run that fails waits for a save that is under way; dead ranks may never answer


def _silent(_text: str) -> None:
    """Who wants to know of failures while training hands in a `note`, or asks `failed`."""


class Checkpoints:
    """Full states under `root`, which this run alone writes to (the run's lock sees to that) and all its ranks can reach.

    Every method is collective: all ranks call it, in the same order. What goes wrong while saving never raises, so that a full disk
    does not end the training: `failed` says what it was (the same on all ranks), `note` hears of it, and the last good one stays.

    Args:
        root: the directory `full_state`; made when something is saved.
        ranks: connected ranks.
        keep: how many full states are kept; for a moment there is one more.
        background: write in a thread; `save` returns once everything is copied to host memory, which is kept for the next copy.
        note: hears, on every rank, of what went wrong while saving, at the next `save` or `wait`. `newest` hands in one too.
    """

    def __init__(
        self, root: Path, ranks: "Ranks", *, keep: int, background: bool, note: Callable[[str], None] = _silent
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep must be 1 or more; got {keep}")
        self._root, self._ranks, self._keep, self._background, self._note = Path(root), ranks, keep, background, note
        self._must_match: dict[str, Any] = {}
        self._broken: list[Path] = []
        self._tidy = False
        self._copy = HostCopy()
        self._division: tuple[list[str], dict[str, Whole]] = ([], {})
        self._thread: threading.Thread | None = None
        self._outcome: Outcome | None = None
        self._last_good: Path | None = None
        self._failed: str | None = None

    @property
    def last_good(self) -> Path | None:
        """The full state that was last saved or found whole in this process. One that is still being written is not counted."""
        return self._last_good

    @property
    def failed(self) -> str | None:
        """Why the last save failed, or None: it went well, or none was finished yet. Looked at after `wait()` it is up to date."""
        return self._failed

    def save(
        self,
        step: int,
        tensors: Mapping[str, torch.Tensor],
        about: Mapping[str, Any],
        *,
        wait: bool = False,
        must_match: Mapping[str, Any] | None = None,
    ) -> None:
        """Save the state after optimizer step `step`. What bears this step's name already is replaced; full states of later steps, which
        a run has that went back to an earlier one, are deleted.

        Args:
            step: 0 or more.
            tensors: name → plain tensor (the same on all ranks that have it; written once) or DTensor. Any device, any strides. A name
                need not be there on all ranks.
            about: JSON, taken from the first rank.
            wait: return when it is on the disk.
            must_match: JSON, taken from the first rank; by default what `newest` or `at` were given. A later run must have the same.

        Raises:
            CheckpointError: these tensors cannot be saved (on all ranks alike). Failing disks do not raise: see `failed`.
        """
        self.wait()
        temporary, problem = self._begin(step) if self._ranks.is_first else (None, None)
        pieces: dict[str, Piece] = {}
        values: dict[str, torch.Tensor] = {}
        wrong, texts = None, ("", "")
        try:
            pieces, values = local_pieces(tensors)
            texts = (
                jsonable(must_match if must_match is not None else self._must_match, "must_match"),
                jsonable(about, "about"),
            )
        except CheckpointError as error:
            wrong = str(error)
        said = self._ranks.gather(
            {"step": step, "wrong": wrong, "pieces": _short(pieces), "place": temporary, "problem": problem}
        )
        try:
            self._agree(said, step)
            wholes = self._divide(pieces, [each["pieces"] for each in said])
        except CheckpointError:
            if temporary is not None:
                folder.discard(Path(temporary))
            raise
        if said[0]["problem"] is not None:
            self._settle(Outcome(error=said[0]["problem"]))
            return
        names = [name for name, whole in wholes.items() if any(chunk.rank == self._ranks.rank for chunk in whole.chunks)]
        own = {name: values[name] for name in names}
        job = Job(
            step=step,
            temporary=Path(said[0]["place"]),
            root=self._root,
            keep=self._keep,
            broken=tuple(self._broken),
            pieces=pieces,
            values=self._copy.take(own) if self._background else own,
            wholes=wholes,
            must_match=texts[0],
            about=texts[1],
        )
        if not self._background:
            self._settle(save_job(job, self._ranks, self._ranks.gather))
            return
        self._thread = threading.Thread(target=self._work, args=(job, self._exchange()), name=f"save step {step}", daemon=True)
        self._thread.start()
        if wait:
            self.wait()

    def wait(self) -> None:
        """Return when nothing is being saved any more; `failed` and `last_good` are up to date then."""
        self._join(None)

    def close(self) -> None:
        """Wait for the last save and free the host copy."""
        self.wait()
        self._copy = HostCopy()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_rest: object) -> None:
        self._join(None if kind is None else _LEAVE_SECONDS)

    def newest(self, must_match: Mapping[str, Any], note: Callable[[str], None]) -> Checkpoint | None:
        """The full state that was finished last, if its every file has the size and SHA-256 that its manifest says.

        One that is not whole is told to `note`, on every rank (which file, what is wrong with it), and the one before it is taken; it is
        deleted after the next save. Before that, what a killed run left half-written is deleted.

        Args:
            must_match: what a run must have in common with the one that saved; remembered for `save`.
            note: hears of what is passed over, and from now on of what goes wrong while saving.

        Returns:
            None where nothing was ever saved.

        Raises:
            CheckpointError: there are some and none is whole; or the newest whole one is of another run (every differing value is named)
                or of another format version. The same on all ranks.
        """
        self.wait()
        self._note = note
        self._must_match = dict(must_match)
        self._start()
        found, self._broken = find_newest(self._root, self._ranks, must_match, note)
        if found is not None:
            self._last_good = found.path
            self._catch_up(found.path)
        return found

    def at(self, path: Path, must_match: Mapping[str, Any]) -> Checkpoint:
        """The full state in the directory `path`, wherever it lies.

        Raises:
            CheckpointError: it is not there, not whole, of another run or of another format version. The same on all ranks.
        """
        self.wait()
        self._must_match = dict(must_match)
        found = look_at(Path(path), self._ranks, must_match)
        self._last_good = found.path
        return found

    def forget_later(self, step: int) -> None:
        """Delete the full states of steps after `step`: the run went back, and what is written from now on does not fit them."""
        if self._ranks.is_first:
            for path in folder.listed(self._root):
                if (folder.step_of(path) or 0) > step:
                    folder.throw_away(path)
        self._ranks.barrier()

    def _catch_up(self, newest: Path) -> None:
        """Do what a run that was killed right after a full state got its name had no time for."""
        if not self._ranks.is_first or self._broken:
            return
        for problem in (folder.announce(self._root, newest), folder.prune(self._root, newest, self._keep, ())):
            if problem is not None:
                self._note(problem)

    def _start(self) -> None:
        # Once, and not in the constructor: reading one full state with at() must not touch anything.
        if not self._tidy and self._ranks.is_first:
            try:
                folder.tidy(self._root)
            except OSError as error:
                self._note(f"{self._root} could not be tidied: {error}")
        self._tidy = True

    def _begin(self, step: int) -> tuple[str | None, str | None]:
        self._start()
        try:
            return str(folder.begin(self._root, step)), None
        except OSError as error:
            return None, f"{self._root / folder.name_of(step)} cannot be written: {error}"

    def _agree(self, said: list[dict[str, Any]], step: int) -> None:
        for rank, each in enumerate(said):
            if each["wrong"] is not None:
                raise CheckpointError(each["wrong"] + (f" (rank {rank})" if len(said) > 1 else ""))
        if step < 0 or {each["step"] for each in said} != {step}:
            raise CheckpointError(f"ranks save different steps, or a negative one: {[each['step'] for each in said]}")

    def _divide(self, pieces: dict[str, Piece], digests: list[str]) -> dict[str, Whole]:
        # What ranks hold hardly ever changes, and telling it takes longer than copying it: mostly digests are exchanged.
        if digests != self._division[0]:
            holdings = self._ranks.gather(pieces)
            self._division = (digests, divide([{name: Piece(*piece) for name, piece in each.items()} for each in holdings]))
        return self._division[1]

    def _exchange(self) -> Callable[[Any], list[Any]]:
        """`gather` for the background thread, over a group that the training's collectives do not use."""
        group = self._ranks.checkpoint_group()
        if group is None:
            return lambda value: [value]

        # Nothing is on an accelerator here: the group is gloo's.
        cpu = torch.device("cpu")

        def exchange(value: Any, group: "ProcessGroup" = group) -> list[Any]:
            return [from_json(part) for part in gather_bytes(to_json(value), group, cpu)]

        return exchange

    def _work(self, job: Job, exchange: Callable[[Any], list[Any]]) -> None:
        self._outcome = save_job(job, self._ranks, exchange)

    def _join(self, seconds: float | None) -> None:
        if self._thread is None:
            return
        self._thread.join(seconds)
        if self._thread.is_alive():
            return
        self._thread = None
        if self._outcome is not None:
            self._settle(self._outcome)
            self._outcome = None

    def _settle(self, outcome: Outcome) -> None:
        self._failed = outcome.error
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


def _short(pieces: Mapping[str, Piece]) -> str:
    return hashlib.sha256(json.dumps(pieces, sort_keys=True).encode()).hexdigest()
