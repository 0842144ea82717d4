"""Run directory → the next snapshot of it at a URL, with what is gone here removed there."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from forge._errors import StorageError
from forge.storage._remote import BLOCK, LocalFileError, Remote
from forge.storage._snapshot import FOLDER, HOLDER, Snapshot, StoredFile, group_of, grows, local_files, newest_step, snapshots

_LINKS = ".forge-storage.tmp"
"""Hidden folder of a run directory with links to what is copied now, which outlast pruning."""


class Upload:
    """Copies of one run directory to a URL, by one process.

    Args:
        remote: the URL.
        run: the run directory.
        identity: of the run, as in its run.json.
        progress: called with the bytes of each block.

    """

    def __init__(self, remote: Remote, run: Path, identity: str, progress: Callable[[int], None]) -> None:
        self._remote, self._run, self._identity, self._progress = remote, run, identity, progress
        self._owner = secrets.token_hex(8)
        self._newest: Snapshot | None = None
        self._tidied = False
        self._seen: object = None
        self.copied = 0
        """Snapshots that were written."""

    def take(self) -> None:
        """Take the URL over for this process; an earlier process of the run copies nothing more.

        Raises:
            StorageError: it cannot be written.

        """
        shutil.rmtree(self._run / _LINKS, ignore_errors=True)
        names = self._remote.names()
        found = snapshots(self._remote, names)
        self._number = max((each.number for each in found), default=0)
        self._newest = next((each for each in found if each.run == self._identity), None)
        holder = {"run": self._identity, "owner": self._owner}
        self._remote.write(HOLDER, iter([(json.dumps(holder) + "\n").encode()]))

    def sync(self) -> bool:
        """Copy what is new if a state, an export or the result is; return whether there was any.

        States come first: an export of many gigabytes keeps none waiting.

        Raises:
            StorageError: the URL cannot be read or written, or another process took it over.

        """
        # Most looks find nothing new: then only two folders are listed.
        look = _complete(self._run)
        if look == self._seen:
            return False
        local = local_files(self._run)
        fresh = {path for path in local if not self._known(path, local[path])}
        groups = {group_of(path) for path in fresh} - {""}
        before = None if self._newest is None else self._newest.step
        went_back = before is not None and (newest_step(local) or 0) < before
        if not groups and not went_back and "result.json" not in fresh:
            self._seen = look
            return False
        if not {"config.yaml", "run.json"} <= local.keys():
            raise StorageError(
                f"checkpoint_storage {self._remote.url}: nothing more is copied to it, for {self._run} is no run any more."
            )
        try:
            linked, vanished = self._link([path for path in fresh if group_of(path)])
            local = {path: about for path, about in local.items() if group_of(path) not in vanished}
            states = [group for group in groups - vanished if group.startswith("full_state/")]
            exports = {group for group in groups - vanished if not group.startswith("full_state/")}
            if states and exports:
                self._snapshot({path: at for path, at in local.items() if group_of(path) not in exports}, linked)
            self._snapshot(local, linked)
        except LocalFileError:
            return True  # what was pruned while it was copied is not there any more: look again
        finally:
            shutil.rmtree(self._run / _LINKS, ignore_errors=True)
        return True

    def _known(self, path: str, about: tuple[int, int]) -> bool:
        stored = None if self._newest is None else self._newest.files.get(path)
        return stored is not None and stored.modified == about[1] and (stored.bytes == about[0] or grows(path))

    def _link(self, paths: list[str]) -> tuple[dict[str, Path], set[str]]:
        """Link files that may be pruned; return the links, and the groups that are gone already."""
        linked: dict[str, Path] = {}
        vanished: set[str] = set()
        for path in paths:
            link = self._run / _LINKS / path
            try:
                link.parent.mkdir(parents=True, exist_ok=True)
                os.link(self._run / path, link)
            except FileNotFoundError:
                vanished.add(group_of(path))
            except OSError:
                continue  # a file system without links: the file itself is read
            else:
                linked[path] = link
        return linked, vanished

    def _snapshot(self, local: Mapping[str, tuple[int, int]], linked: Mapping[str, Path]) -> None:
        number = self._number + 1
        before = {} if self._newest is None else self._newest.files
        files: dict[str, StoredFile] = {}
        for path, about in local.items():
            if self._known(path, about):
                files[path] = before[path]
                continue
            new = path not in before and not grows(path)
            at = path if new else f"versions/{number:06}/{path}"
            source = linked.get(path, self._run / path)
            try:
                modified = source.stat().st_mtime_ns
                size, sha256 = self._remote.write(at, self._blocks(source, whole_lines=grows(path)))
            except FileNotFoundError as error:
                raise LocalFileError(path) from error
            files[path] = StoredFile(at=at, bytes=size, sha256=sha256, modified=modified)
        self._check_owner()
        snapshot = Snapshot(number=number, run=self._identity, files=files)
        self._remote.write(snapshot.name, iter([snapshot.to_bytes()]))
        self._number, self._newest = number, snapshot
        self.copied += 1
        self._remove_unnamed(snapshot, before)

    def _blocks(self, file: Path, *, whole_lines: bool) -> Iterator[bytes]:
        """Yield the content of a local file; of one that grows up to the end of its last line."""
        try:
            with file.open("rb") as content:
                rest = b""
                while block := content.read(BLOCK):
                    self._progress(len(block))
                    if whole_lines:
                        lines, end, rest = (rest + block).rpartition(b"\n")
                        block = lines + end
                    yield block
        except FileNotFoundError as error:
            raise LocalFileError(str(file)) from error

    def _check_owner(self) -> None:
        try:
            owner = json.loads(self._remote.read(HOLDER)).get("owner")
        except (FileNotFoundError, ValueError, AttributeError):
            owner = None
        if owner != self._owner:
            raise StorageError(
                f"checkpoint_storage {self._remote.url}: another process copies a run to it now: this one copies nothing more. "
                "Give each run an address of its own."
            )

    def _remove_unnamed(self, snapshot: Snapshot, before: Mapping[str, StoredFile]) -> None:
        """Remove earlier snapshots and what only they named; the first time all that none names."""
        named = {file.at for file in snapshot.files.values()} | {snapshot.name, HOLDER}
        if self._tidied:
            left = {f"{FOLDER}/{snapshot.number - 1:06}.json", *(file.at for file in before.values())}
        else:
            left = set(self._remote.names())
        for name in sorted(left - named, key=lambda name: (not name.startswith(f"{FOLDER}/"), name)):
            self._remote.remove(name)
        self._tidied = True


def _complete(run: Path) -> list[tuple[str, int, int]]:
    """Return what tells states, exports and the result from those of an earlier look."""
    found = []
    for place in (*run.glob("full_state/step_*"), *run.glob("hf_format/*"), run / "result.json"):
        try:
            about = place.stat()
        except FileNotFoundError:
            continue
        found.append((place.name, about.st_ino, about.st_mtime_ns))
    return sorted(found)
