"""Shares of the ranks in an export: who writes which file, and needs which tensors."""

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain, zip_longest
from pathlib import Path
from queue import SimpleQueue
from threading import Semaphore, Thread

import torch

from forge_dist.exporting._layout import Layout


def rank_of_files(files: Sequence[str], layout: Layout, world_size: int) -> dict[str, int]:
    """Return file → the one rank that writes it.

    As many ranks as there are files, spread over the nodes. Rank 0 writes them all where the files' layout can only be made of
    all tensors at once.
    """
    if len(set(layout.blocks.values())) == 1:
        return dict.fromkeys(files, 0)
    return {file: index * world_size // len(files) for index, file in enumerate(files)}


def next_rank(ranks: Mapping[str, int], world_size: int) -> dict[str, int]:
    """Return file → the rank after the one that wrote it: another one reads what one wrote."""
    return {file: (rank + 1) % world_size for file, rank in ranks.items()}


def destinations(layout: Layout, first_names: Mapping[str, str], rank_of: Mapping[str, int]) -> dict[str, Collection[int]]:
    """Return name in the model → ranks that need the whole tensor: `Strategy.whole`'s argument.

    The ranks take turns, so that one may work on a tensor while others get theirs.

    Args:
        layout: of the export.
        first_names: name in the model's state → the first name of the same tensor.
        rank_of: name in the files → the rank that writes, or reads, it.
    """
    turns: dict[int, list[tuple[tuple[str, ...], tuple[int, ...]]]] = {}
    for block in dict.fromkeys(layout.blocks.values()):
        ranks = tuple(sorted({rank_of[name] for name in layout.made[block[0]]}))
        if ranks:
            turns.setdefault(ranks[0], []).append((block, ranks))
    ordered = filter(None, chain.from_iterable(zip_longest(*turns.values())))
    return {first_names[name]: ranks for block, ranks in ordered for name in block}


class Beside:
    """Calls made in a thread, beside what follows; a context manager that waits for the last.

    One at a time: `call` waits until the one before it is done, so no more than one tensor waits to be written.
    """

    def __init__(self, function: Callable[[str, torch.Tensor], object]) -> None:
        self._function = function
        self._free = Semaphore(1)
        self._calls: SimpleQueue[tuple[str, torch.Tensor] | None] = SimpleQueue()
        self._error: Exception | None = None
        self._thread = Thread(target=self._run, name="forge-export", daemon=True)

    def call(self, name: str, tensor: torch.Tensor) -> None:
        """Call the function soon.

        Raises:
            Exception: what a call before this one raised.
        """
        self._free.acquire()
        if self._error is not None:
            self._free.release()
            raise self._error
        self._calls.put((name, tensor))

    def _run(self) -> None:
        while (given := self._calls.get()) is not None:
            try:
                self._function(*given)
            except Exception as error:  # noqa: BLE001  raised in `call` or at the end
                self._error = error
            given = None  # or the tensor would stay until the next one
            self._free.release()

    def __enter__(self) -> "Beside":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_rest: object) -> None:
        self._free.acquire()
        self._calls.put(None)
        self._thread.join()
        if kind is None and self._error is not None:
            raise self._error


def files_of(ranks: Mapping[str, int], rank: int) -> list[str]:
    """Return the files of one rank."""
    return [file for file, owner in ranks.items() if owner == rank]


def by_tensor(ranks: Mapping[str, int], tensors: Mapping[str, str | Path]) -> dict[str, int]:
    """Return name in the files → the rank of its file, given name → file."""
    return {name: ranks[Path(file).name] for name, file in tensors.items()}
