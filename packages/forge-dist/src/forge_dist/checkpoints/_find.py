"""Find the newest whole full state on disk, the same on all ranks.

The first rank reads the directory and broadcasts the result, so that a file system that shows ranks different contents cannot
make them disagree. All ranks together hash the files, each its share.
"""

import socket
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_dist._errors import CheckpointError
from forge_dist._files import unreadable
from forge_dist.checkpoints._folder import listed, step_of
from forge_dist.checkpoints._manifest import Damaged, Manifest, check_hash, check_sizes, read_manifest, refuse_foreign
from forge_dist.checkpoints._read import Checkpoint

if TYPE_CHECKING:
    from forge_dist.ranks._ranks import Ranks

_FOREIGN = "it belongs to another run"
_CLOSED = "A full state that may not be read is not passed over: have it given to this user (`chmod`, `chown`)"
_THREADS = 4  # hashing releases the GIL; more than this and the disk is the limit


def find_newest(
    root: Path, ranks: "Ranks", must_match: Mapping[str, Any], note: Callable[[str], None]
) -> tuple[Checkpoint | None, list[Path]]:
    """Return the newest whole full state under `root`, and those that were passed over.

    Raises:
        CheckpointError: there are some and none is whole; the newest has other values in `must_match`, or another format
            version, or may not be read by this user. Where only its "run" differs, it was copied in from another run, and is
            passed over like a broken one.
    """
    try:
        order = _from_first_rank(ranks, lambda: [str(path) for path in _by_age(root)])
    except Damaged as error:
        raise CheckpointError(f"{root}: {error}") from None
    broken: dict[Path, str] = {}
    for path in map(Path, order):
        try:
            found = _verified(path, ranks, must_match, pass_over=True)
        except Damaged as error:
            broken[path] = str(error)
            what = "is of another run" if str(error).startswith(_FOREIGN) else "is not whole"
            note(f"{path} {what} and is passed over: {error}")
            continue
        if broken:
            note(f"{found.path} is whole and is taken instead")
        return found, list(broken)
    if broken:
        reasons = "; ".join(f"{path.name}: {problem}" for path, problem in broken.items())
        raise CheckpointError(
            f"none of the full states in {root} is whole and of this run ({reasons}); start anew in another directory, or "
            "mend one"
        )
    return None, []


def open_checkpoint(path: Path, ranks: "Ranks", must_match: Mapping[str, Any]) -> Checkpoint:
    """Return the full state in `path`.

    Raises:
        CheckpointError: it does not exist, is not whole, may not be read, or is of another run or format version.
    """
    if not _from_first_rank(ranks, path.is_dir):
        raise CheckpointError(f"{path} is no directory of a full state")
    try:
        return _verified(path, ranks, must_match)
    except Damaged as error:
        raise CheckpointError(f"{path} is not whole: {error}") from None


def _by_age(root: Path) -> list[Path]:
    """Sort the full states, the newest first, those of unreadable age before them.

    A newer one that is damaged must not be passed over silently.
    """

    def age(path: Path) -> tuple[float, int]:
        try:
            serial: float = read_manifest(path, step_of(path)).serial
        except (Damaged, CheckpointError, OSError):
            serial = float("inf")
        return serial, step_of(path) or 0

    return sorted(listed(root), key=age, reverse=True)


def _verified(path: Path, ranks: "Ranks", must_match: Mapping[str, Any], *, pass_over: bool = False) -> Checkpoint:
    def read() -> Manifest:
        manifest = read_manifest(path, step_of(path))
        if pass_over and manifest.must_match.get("run") != must_match.get("run"):
            raise Damaged(f"{_FOREIGN} ({manifest.must_match.get('run')}; this one is {must_match.get('run')})")
        # A full state given by path may come from another run: its data must agree, not the run's identity.
        named = {} if pass_over or "run" not in manifest.must_match else {"run": manifest.must_match["run"]}
        refuse_foreign(path, manifest.must_match, {**must_match, **named})
        check_sizes(path, manifest.files)
        for name in manifest.files:
            if (closed := unreadable(path / name)) is not None:
                raise CheckpointError(f"{closed}. {_CLOSED}.")
        return manifest

    manifest = Manifest.from_text(_from_first_rank(ranks, lambda: read().to_text()))
    names = sorted(manifest.files, key=lambda name: (-manifest.files[name].size, name))[ranks.rank :: ranks.world_size]
    with ThreadPoolExecutor(_THREADS) as threads:
        found = [
            problem for problem in threads.map(lambda name: check_hash(path / name, manifest.files[name]), names) if problem
        ]
    if found and ranks.world_size > 1:
        found = [f"{problem} (seen by rank {ranks.rank} on {socket.gethostname()})" for problem in found]
    problems = [problem for each in ranks.gather(found) for problem in each]
    if problems:
        raise Damaged("; ".join(problems))
    return Checkpoint(path, manifest)


def _from_first_rank(ranks: "Ranks", read: Callable[[], Any]) -> Any:
    """Return the first rank's `read()` (JSON) on all ranks, or raise there what it raised."""
    answer = None
    if ranks.is_first:
        try:
            answer = ["value", read()]
        except Damaged as error:
            answer = ["damaged", str(error)]
        except CheckpointError as error:
            answer = ["refused", str(error)]
        except OSError as error:
            closed = unreadable(error.filename) if isinstance(error, PermissionError) and error.filename else None
            answer = ["damaged", f"it cannot be read: {error}"] if closed is None else ["refused", f"{closed}. {_CLOSED}."]
    kind, value = ranks.broadcast(answer)
    if kind == "damaged":
        raise Damaged(value)
    if kind == "refused":
        raise CheckpointError(value)
    return value
