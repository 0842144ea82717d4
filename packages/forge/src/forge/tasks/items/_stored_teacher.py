"""A teacher's likeliest tokens on disk → batches for `forge_algos.TopDistill`.

A directory of `forge teach` has teacher.json and parts in safetensors. Each part has the token ids of its samples, the
positions that are learned, and of each position the teacher's K tokens: rows are known again by their token ids alone. The
CRC-32 of each sample is compared whenever it is read.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import forge_algos
import forge_data
import forge_dist
import forge_packing
from forge._counted import counted
from forge._disk import write_remedy
from forge._errors import RunWriteError, SettingsError
from forge.tasks.items._items import Ints
from forge.tasks.items._samples import Conversations, Samples, learned_positions

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

RECORD = "teacher.json"
_VERSION = 1
_FIELDS = {"key": str, "parts": int, "tokenizer": str, "temperature": float}
"""What each version has in teacher.json."""
_ROWS = "rows"
"""Entry of a part's metadata: the file and row of each sample, as JSON."""
_ANSWERS = ("ids", "logps", "rest")


class Part(NamedTuple):
    """Samples of one file, S tokens and M learned positions in all."""

    rows: Sequence[str]
    """File and row of each sample."""
    input_ids: Sequence[npt.NDArray[np.int32]]
    """int32[S] of each sample."""
    positions: Sequence[npt.NDArray[np.int32]]
    """int32[M] of each sample, ascending: the tokens that are learned."""
    ids: npt.NDArray[np.int32]
    """int32[M, K] of all samples."""
    logps: npt.NDArray[np.float32]
    """float32[M, K]."""
    rest: npt.NDArray[np.float32]
    """float32[M]."""


def part_file(folder: Path, number: int) -> Path:
    """Return the path of a part."""
    return folder / f"part_{number:05d}.safetensors"


def write_part(file: Path, part: Part, key: str) -> None:
    """Write a part beside teacher.json; it is there when it is complete.

    Raises:
        RunWriteError: it cannot be written.

    """
    import numpy as np
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    temporary = file.with_name(f".{file.name}.tmp")
    starts = np.append(0, np.cumsum([len(each) for each in part.positions]))
    answers = part.ids, part.logps, part.rest
    bounds = zip(part.positions, starts[:-1], starts[1:], strict=True)
    tensors = {
        "input_ids": np.concatenate(part.input_ids),
        "offsets": np.append(0, np.cumsum([len(each) for each in part.input_ids])),
        "positions": np.concatenate(part.positions),
        "starts": starts,
        **dict(zip(_ANSWERS, answers, strict=True)),
        "checks": np.array([_checksum(at, *(each[a:b] for each in answers)) for at, a, b in bounds], np.uint32),
    }
    try:
        save_file(tensors, temporary, metadata={"key": key, _ROWS: json.dumps(list(part.rows))})
        # safetensors lets nobody else read its files; a directory of log-probabilities may be shared.
        temporary.chmod((file.parent / RECORD).stat().st_mode)
        temporary.replace(file)
    except (OSError, SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        raise RunWriteError(
            f"{file}: the teacher's log-probabilities cannot be written: {error}. The same command goes on from here: "
            f"{write_remedy(error)}."
        ) from error


def part_key(file: Path) -> str | None:
    """Return what a part was computed of; None where there is none that can be read."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy") as opened:
            return (opened.metadata() or {}).get("key")
    except (OSError, SafetensorError):
        return None


def write_record(folder: Path, about: Mapping[str, Any]) -> None:
    """Write what all parts are of: teacher.json."""
    forge_dist.write_text_atomically(folder / RECORD, json.dumps({"version": _VERSION, **about}, indent=2) + "\n")


def read_record(path: str | Path) -> dict[str, Any]:
    """Read teacher.json of a directory. Raises SettingsError where there is none."""
    file = Path(path).expanduser() / RECORD
    remedy = "Give a directory that `forge teach --output` wrote."
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if (version := found["version"]) == _VERSION:
            return {**found, **{name: kind(found[name]) for name, kind in _FIELDS.items()}}
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        missing = f"there is no {RECORD} in it" if file.parent.is_dir() else "there is no such directory"
        what = missing if isinstance(error, FileNotFoundError | NotADirectoryError) else f"its {RECORD} cannot be read"
        raise SettingsError(f"teacher_logprobs {path}: {what}. {remedy}") from error
    raise SettingsError(f"teacher_logprobs {path}: is of another version of forge ({version}). {remedy}")


def vocabulary_digest(tokenizer: Any) -> str:
    """Return a digest of which id each token has."""
    tokens = sorted(tokenizer.get_vocab().items(), key=lambda each: (each[1], each[0]))
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()


class StoredTeacher:
    """The parts of a directory, memory-mapped; rows are found by their tokens.

    Args:
        path: of the directory.
        left_out: leave out the probability of all other tokens.
        temperature: of the answers where it is left out; by default the stored one.

    Raises:
        SettingsError: a part is missing, damaged, or of another teacher or other rows.

    """

    def __init__(self, path: str | Path, *, left_out: bool = False, temperature: float | None = None) -> None:
        from safetensors import SafetensorError, safe_open

        self.path = Path(path).expanduser()
        about = read_record(path)
        self._left_out = left_out
        self._scale = 1.0 if temperature is None else about["temperature"] / temperature
        self._parts: list[dict[str, Any]] = []
        self._rows: list[list[str]] = []
        self._found: dict[bytes, list[tuple[int, int]]] = {}
        """Digest of a sample's tokens → its places: rows with the same tokens may be learned at others."""
        for number in range(about["parts"]):
            file = part_file(self.path, number)
            try:
                opened: Any = safe_open(file, framework="numpy")
                metadata = opened.metadata() or {}
                part = {name: opened.get_tensor(name) for name in ("input_ids", "offsets", "positions", "starts", "checks")}
                part |= {name: opened.get_slice(name) for name in _ANSWERS}
                rows = json.loads(metadata[_ROWS])
            except (OSError, SafetensorError, KeyError, ValueError) as error:
                raise SettingsError(
                    f"teacher_logprobs {path}: part {number + 1} of {about['parts']} is missing or damaged ({file.name}). "
                    "Start the `forge teach` that wrote it again: it goes on from the parts that are there."
                ) from error
            if metadata.get("key") != about["key"]:
                raise SettingsError(
                    f"teacher_logprobs {path}: {file.name} was computed from another teacher, other rows or other settings "
                    f"than {RECORD} says. Remove the directory, and start `forge teach` again."
                )
            self._parts.append(part)
            self._rows.append(rows)
            for at, (begin, end) in enumerate(zip(part["offsets"][:-1], part["offsets"][1:], strict=True)):
                self._found.setdefault(_digest(part["input_ids"][begin:end]), []).append((number, at))

    def __len__(self) -> int:
        return sum(map(len, self._rows))

    def covered(self) -> float:
        """Return the mean share of the teacher's probability that the stored tokens hold."""
        import numpy as np

        rests = [np.exp(np.asarray(part["rest"][:], np.float64)) for part in self._parts]
        return 1 - float(np.concatenate(rests).mean())

    def places(self, store: Any) -> list[tuple[int, int] | None]:
        """Find the part and the sample of each sample of a store; None for one that learns nothing.

        Raises:
            SettingsError: the teacher was not asked about a row, or not about all that is learned of it.

        """
        return [self._place(store, index) for index in range(len(store))]

    def _place(self, store: Any, index: int) -> tuple[int, int] | None:
        import numpy as np

        sample = store[index]
        learned = learned_positions(sample)
        if not len(learned):
            return None
        where = f"teacher_logprobs {self.path}: {store.source(index)}"
        found = self._found.get(_digest(sample.input_ids))
        if found is None:
            raise SettingsError(
                f"{where}: {self._difference(store, index)}. Give `forge teach` the same rows, model and settings of the data "
                "as this run."
            )
        lacks = [np.setdiff1d(learned, self._positions(place)) for place in found]
        least = min(range(len(found)), key=lambda at: len(lacks[at]))
        if len(missing := lacks[least]):
            more = f", and nothing of {counted(len(missing) - 1, 'others')}" if len(missing) > 1 else ""
            raise SettingsError(
                f"{where}: its token {int(missing[0])} is learned, and the teacher says nothing of it{more}. Give "
                "`forge teach` what this run has of train_on, turns, turn_end and train_on_turn_end."
            )
        return found[least]

    def _difference(self, store: Any, index: int) -> str:
        """Say how the nearest of the teacher's rows differs from a sample that it has not."""
        import numpy as np

        name, own = Path(store.source(index)).name, np.asarray(store[index].input_ids)
        best: tuple[int, Any] = (-1, ())
        for part, rows in zip(self._parts, self._rows, strict=True):
            for at, row in enumerate(rows):
                if Path(row).name == name:
                    theirs = part["input_ids"][part["offsets"][at] : part["offsets"][at + 1]]
                    least = min(len(own), len(theirs))
                    differs = np.flatnonzero(own[:least] != theirs[:least])
                    first = int(differs[0]) if len(differs) else least
                    best = max(best, (first, theirs), key=lambda each: each[0])
        if best[0] < 0:
            return f"the teacher was asked about {counted(len(self), 'samples')}, and this row is none of them"
        first, theirs = best
        here, there = (f"{int(ids[first])}" if first < len(ids) else "none" for ids in (own, theirs))
        return f"its tokens are others there: token {first} is {here}, and the teacher read {there}"

    def _positions(self, place: tuple[int, int]) -> Any:
        part, at = self._parts[place[0]], place[1]
        return part["positions"][part["starts"][at] : part["starts"][at + 1]]

    def tokens_of(self, place: tuple[int, int], sample: Any) -> tuple[Any, Any, Any]:
        """Return (int32[M, K], float32[M, K], float32[M]) of a sample's M learned tokens.

        Raises:
            forge_data.StoreError: what is read is not what was written.

        """
        import numpy as np

        part, number = self._parts[place[0]], place[1]
        begin, end = (int(each) for each in part["starts"][number : number + 2])
        positions = self._positions(place)
        answers = tuple(part[name][begin:end] for name in _ANSWERS)
        if _checksum(positions, *answers) != part["checks"][number]:
            file = part_file(self.path, place[0])
            raise forge_data.StoreError(
                f"teacher_logprobs {file}: what it holds of {self._rows[place[0]][number]} is damaged: it is not what was "
                "written. Remove this file and start the `forge teach` that wrote it again, which makes it anew"
            )
        ids, logps, rest = (each[np.searchsorted(positions, learned_positions(sample))] for each in answers)
        if self._left_out:
            return ids, (logps * self._scale).astype(np.float32), np.full_like(rest, -np.inf)
        return ids, logps, rest

    @property
    def empty(self) -> tuple[Any, Any, Any]:
        """The tokens of no position."""
        import numpy as np

        width = self._parts[0]["ids"].get_shape()[1]
        return np.zeros((0, width), np.int32), np.zeros((0, width), np.float32), np.zeros(0, np.float32)


def _digest(ids: Any) -> bytes:
    import numpy as np

    return hashlib.sha256(np.ascontiguousarray(ids, dtype=np.int32).tobytes()).digest()


def _checksum(positions: Any, *answers: Any) -> int:
    """Return the CRC-32 of what is stored of a sample."""
    import numpy as np

    found = 0
    for each in (positions, *answers):
        found = zlib.crc32(np.ascontiguousarray(each).tobytes(), found)
    return found


class StoredSamples(Samples):
    """Samples whose batches have the teacher's tokens beside them; none share a prefix."""

    def __init__(self, store: Any, teacher: StoredTeacher) -> None:
        super().__init__(store)
        self._teacher, self._places = teacher, teacher.places(store)

    def batch(self, indices: Sequence[int] | Ints) -> Any:
        """Pack samples into one row, with the teacher's tokens of all that is learned in it."""
        import numpy as np

        at = self._samples(indices)
        samples, places = [self.store[i] for i in at], [self._places[i] for i in at]
        pairs = zip(places, samples, strict=True)
        found = [self._teacher.empty, *(self._teacher.tokens_of(place, each) for place, each in pairs if place is not None)]
        ids, logps, rest = (np.concatenate(each) for each in zip(*found, strict=True))
        return forge_algos.TopBatch(row=forge_packing.collate(samples), ids=ids, logps=logps, rest=rest)

    def _samples(self, indices: Sequence[int] | Ints) -> list[int]:
        return [int(i) for i in indices]


class StoredConversations(StoredSamples, Conversations):
    """Rows of which some are several samples, as `Conversations`; each repeats its history."""

    def __init__(self, store: Any, teacher: StoredTeacher) -> None:
        super().__init__(store, teacher)
        self.lengths = self.unshared

    def _samples(self, indices: Sequence[int] | Ints) -> list[int]:
        return [at for i in map(int, indices) for at in range(self._ends[i], self._ends[i + 1])]


def with_teacher(store: Any, teacher: StoredTeacher) -> StoredSamples:
    """Return the items of a store with the teacher's tokens."""
    return (StoredSamples if store.conversations is None else StoredConversations)(store, teacher)
