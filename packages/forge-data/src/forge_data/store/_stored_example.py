"""A sample of a store as an example that is read lazily.

The ids are a view of the file; labels, segments and roles are made when they are first used.
"""

from typing import TYPE_CHECKING, Any

import numpy as np

from forge_data._example import IGNORED, ROLES, TokenizedExample
from forge_data.store._manifest import WEIGHTS
from forge_data.store._media import media_at

if TYPE_CHECKING:
    from numpy.typing import NDArray

Arrays = dict[str, "NDArray[Any]"]
"""File name → array, as in `_manifest`."""

_new = object.__new__
_set_ids = TokenizedExample.__dict__["input_ids"].__set__


class StoredExample(TokenizedExample):
    """Sample `_at` of a store; `__getattr__` makes the attributes that are not set yet."""

    __slots__ = ("_arrays", "_at")

    _arrays: Arrays
    _at: int

    def __getattr__(self, name: str) -> Any:
        match name:
            case "labels":
                offsets = self._arrays["offsets.bin"]
                mask = self._arrays["loss_mask.bin"][offsets[self._at] : offsets[self._at + 1]]
                made: Any = np.where(mask, self.input_ids, np.int32(IGNORED))
            case "segments":
                starts = self._segments("segment_starts.bin")
                made = (
                    np.stack([starts, np.append(starts[1:], np.int32(len(self)))], axis=1) if len(starts) else np.zeros((0, 2))
                )
                made = made.astype(np.int32)
            case "roles":
                made = tuple(ROLES[number] for number in self._segments("segment_roles.bin"))
            case "weights":
                made = None
                if WEIGHTS in self._arrays:
                    offsets = self._arrays["offsets.bin"]
                    weights = self._arrays[WEIGHTS][offsets[self._at] : offsets[self._at + 1]]
                    # A sample without weights of its own is as it would be in a store without any.
                    made = None if np.isin(weights, (0, 1)).all() else weights
            case "media":
                made = media_at(self._arrays, self._at)
            case _:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        object.__setattr__(self, name, made)
        return made

    def __reduce__(self) -> tuple[type[TokenizedExample], tuple[Any, ...]]:
        weights = _own(self.weights)
        return TokenizedExample, (np.array(self.input_ids), self.labels, self.segments, self.roles, weights, self.media)

    def _segments(self, name: str) -> "NDArray[Any]":
        offsets = self._arrays["segment_offsets.bin"]
        return self._arrays[name][offsets[self._at] : offsets[self._at + 1]]


def _own(array: "NDArray[Any] | None") -> "NDArray[Any] | None":
    return None if array is None else np.array(array)


_set_arrays = StoredExample.__dict__["_arrays"].__set__
_set_at = StoredExample.__dict__["_at"].__set__


def stored_example(arrays: Arrays, at: int, ids: "NDArray[np.int32]") -> StoredExample:
    """Make the example of sample `at`, without `__init__`, which would need everything."""
    example = _new(StoredExample)
    _set_ids(example, ids)
    _set_arrays(example, arrays)
    _set_at(example, at)
    return example
