"""Written files, read back by another rank and compared by hash with what was written."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from forge_dist._errors import ExportError
from forge_dist._safetensors import read_header
from forge_dist.exporting._shares import files_of, next_rank
from forge_dist.ranks._errors_on_all_ranks import errors_on_all_ranks

if TYPE_CHECKING:
    from forge_dist.ranks._ranks import Ranks

_BLOCK = 8 << 20  # bytes per read and hash update


def read_back(
    folder: Path,
    owners: Mapping[str, int],
    hashes: Mapping[str, Mapping[str, str]],
    ranks: "Ranks",
    errors: tuple[type[Exception], ...],
    cannot: str,
) -> None:
    """Compare every file with what its rank wrote, as the next rank reads it; collective.

    Args:
        folder: of the files.
        owners: file → the rank that wrote it.
        hashes: of this rank's files: file → name → SHA-256 of the tensor's bytes.
        ranks: all of them.
        errors: what reading may raise.
        cannot: begins the message of such an error.

    Raises:
        ExportError: a file does not hold what was written, or cannot be read; on all ranks.
    """
    wrote = {file: _combined(found) for file, found in hashes.items()}
    expected = {file: found for each in ranks.gather(wrote) for file, found in each.items()}
    with errors_on_all_ranks(ranks, errors, cannot):
        for file in files_of(next_rank(owners, ranks.world_size), ranks.rank):
            if _combined(hashes_of(folder / file)) != expected[file]:
                raise ExportError(
                    f"{folder / file} does not hold what rank {owners[file]} wrote: rank {ranks.rank} on {ranks.host} reads "
                    "other bytes; nothing was kept. Check the file system that the ranks share"
                )


def hashes_of(file: Path) -> dict[str, str]:
    """Return name → SHA-256 of each tensor's bytes in a file.

    Raises:
        ValueError: it is no whole safetensors file.
        OSError: it cannot be read.
    """
    found = {}
    with open(file, "rb", buffering=0) as stream:
        for name, entry in read_header(file).items():
            digest, left = hashlib.sha256(), entry.size
            stream.seek(entry.start)
            while left and (block := stream.read(min(left, _BLOCK))):
                digest.update(block)
                left -= len(block)
            found[name] = digest.hexdigest()
    return found


def _combined(hashes: Mapping[str, str]) -> str:
    return hashlib.sha256("\n".join(f"{hashes[name]} {name}" for name in sorted(hashes)).encode()).hexdigest()
