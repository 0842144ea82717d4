"""What a token store is on disk: five files, and the one that vouches for the other four.

```
store.json       format and version, sizes, SHA-256, source files, accounting
input_ids.bin    int32[T]    token ids of all samples, one after another
loss_mask.bin    uint8[T]    1 where a token is learned
offsets.bin      int64[N+1]  sample i is tokens offsets[i] to offsets[i+1]
rows.bin         int64[N]    the row of its source file that sample i came from
```

All little-endian. `store.json` is written last, and the directory gets its name once all is on disk.
"""

import json
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from forge_data._accounting import Accounting
from forge_data._errors import StoreError

FORMAT = "forge-data token store"
VERSION = 1
MANIFEST = "store.json"
DTYPES = {
    "input_ids.bin": np.dtype("<i4"),
    "loss_mask.bin": np.dtype("u1"),
    "offsets.bin": np.dtype("<i8"),
    "rows.bin": np.dtype("<i8"),
}
FINGERPRINTED = ("input_ids.bin", "loss_mask.bin", "offsets.bin")
"""What is trained on; where a row stood in its file is not."""


@attrs.frozen
class SourceFile:
    """A file that samples came from; samples stand in the order of the sources."""

    name: str
    path: str
    samples: int


@attrs.frozen
class Manifest:
    """What `store.json` says."""

    samples: int
    tokens: int
    fingerprint: str
    sha256: dict[str, str]
    sources: list[SourceFile]
    accounting: Accounting
    settings: dict[str, Any] = attrs.field(factory=dict)

    def sizes(self) -> dict[str, int]:
        """Bytes that each file must have."""
        counts = {
            "input_ids.bin": self.tokens,
            "loss_mask.bin": self.tokens,
            "offsets.bin": self.samples + 1,
            "rows.bin": self.samples,
        }
        return {name: count * DTYPES[name].itemsize for name, count in counts.items()}

    def dumps(self) -> str:
        """The text of `store.json`."""
        fields = {
            "format": FORMAT,
            "version": VERSION,
            "samples": self.samples,
            "tokens": self.tokens,
            "fingerprint": self.fingerprint,
            "sha256": self.sha256,
            "sources": [attrs.asdict(source) for source in self.sources],
            "accounting": self.accounting.as_dict(),
            "settings": self.settings,
        }
        return json.dumps(fields, indent=2, ensure_ascii=False) + "\n"


def read_manifest(directory: Path) -> Manifest:
    """What `store.json` of a directory says, held against the files beside it.

    Raises:
        StoreError: no store, a foreign or newer one, or files whose sizes are not those that were written.
    """
    path = directory / MANIFEST
    if not path.is_file():
        found = "there is no such directory" if not directory.is_dir() else f"it holds no {MANIFEST}"
        raise StoreError(f"{directory} is not a token store: {found}; forge_data.prepare(...) makes one")
    try:
        fields = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise StoreError(f"{path} cannot be read: {error}; prepare the store again") from error
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        raise StoreError(f"{path} is not of a {FORMAT}; it belongs to something else")
    if fields.get("version") != VERSION:
        raise StoreError(
            f"{path} has format version {fields.get('version')!r}, this forge-data reads {VERSION}; prepare it again"
        )
    try:
        manifest = Manifest(
            samples=int(fields["samples"]),
            tokens=int(fields["tokens"]),
            fingerprint=str(fields["fingerprint"]),
            sha256={name: str(fields["sha256"][name]) for name in DTYPES},
            sources=[SourceFile(**source) for source in fields["sources"]],
            accounting=Accounting(**fields["accounting"]),
            settings=dict(fields["settings"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise StoreError(f"{path} is damaged ({type(error).__name__}: {error}); prepare the store again") from error
    _check_sizes(directory, manifest)
    return manifest


def _check_sizes(directory: Path, manifest: Manifest) -> None:
    for name, expected in manifest.sizes().items():
        path = directory / name
        found = path.stat().st_size if path.is_file() else None
        if found != expected:
            raise StoreError(
                f"{path} is torn: {'missing' if found is None else f'{found:,} bytes'} where {expected:,} bytes were written; "
                "prepare the store again"
            )
    kept = manifest.accounting.kept
    if manifest.samples < 1 or not manifest.samples == kept == sum(source.samples for source in manifest.sources):
        raise StoreError(f"{directory / MANIFEST} is damaged: {manifest.samples} samples, but {kept} rows kept")
