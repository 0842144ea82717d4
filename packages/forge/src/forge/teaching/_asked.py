"""Rows and a teacher → its likeliest tokens at each learned token, part by part."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

import forge_accel
import forge_algos
import forge_dist
import forge_packing
from forge._errors import SettingsError
from forge._progress import Reporter
from forge.tasks.items._samples import learned_positions
from forge.tasks.items._stored_teacher import Part

_MOST_TOKENS = 8192
"""Tokens of a forward at most, or those of a longer row."""


@attrs.frozen(kw_only=True)
class Asking:
    """What is asked of which teacher."""

    teacher: str
    store: str
    """Directory of the rows."""
    top_k: int
    below: int
    """Number of ids that the tokenizer may give."""
    temperature: float

    @property
    def dtype(self) -> str:
        """Name of the type in which the teacher computes here."""
        return str(forge_accel.accelerator().dtype("auto").value)

    def __call__(
        self, parts: Mapping[int, Sequence[int]], store: Any, write: Callable[[int, Part], None], report: Reporter
    ) -> None:
        """Write parts, by their numbers, of these samples each; in this process.

        Raises:
            SettingsError: a row is beyond the teacher's positions, or its answers are not finite.
            forge_dist.ModelError: the teacher cannot be loaded.
            RunWriteError: a part cannot be written.
        """
        machine = forge_accel.accelerator()
        device, dtype = machine.device.value, machine.dtype("auto").value
        with report.taking(f"loading {self.teacher}", f"loaded {self.teacher}"):
            model: Any = forge_dist.load_trained(self.teacher, dtype=dtype, device=device)
        _check_positions(model, store, [at for part in parts.values() for at in part], self.teacher)
        forge_algos.keep_documents_apart(model, device=device)
        show, done, of = report.progress("asking the teacher"), 0, sum(map(len, parts.values()))
        for number, part in parts.items():
            lengths = store.lengths[part]
            rows = forge_packing.divide(lengths, max_tokens=max(_MOST_TOKENS, int(lengths.max())))[0]
            order = [part[int(at)] for row in rows for at in row]
            batches = (forge_packing.collate([store[part[int(at)]] for at in row]) for row in rows)
            answers = forge_algos.top_logps(
                model, batches, k=self.top_k, below=self.below, temperature=self.temperature, device=device
            )
            write(number, _as_part(store, order, list(answers)))
            done += len(part)
            show(done, of)


def _check_positions(model: Any, store: Any, samples: Sequence[int], teacher: str) -> None:
    """Raise SettingsError for a row beyond the teacher's table of positions."""
    table = forge_dist.position_table(model)
    longest = max(samples, key=lambda index: store.lengths[index])
    if table is not None and store.lengths[longest] > table:
        raise SettingsError(
            f"{store.source(longest)} has {store.lengths[longest]:,} tokens, and teacher_path {teacher} has a table of "
            f"{table:,} positions, beyond which it reads nothing. Take a teacher with more positions, or set max_seq_len to "
            f"{table} here and in the runs."
        )


def _as_part(store: Any, order: Sequence[int], answers: Sequence[forge_algos.TopBatch]) -> Part:
    """Return samples with the teacher's answers, in the order in which it was asked."""
    import numpy as np

    samples = [store[index] for index in order]
    ids, logps, rest = (np.concatenate([getattr(each, name) for each in answers]) for name in ("ids", "logps", "rest"))
    if not (np.isfinite(logps[:, 0]).all() and (logps < np.inf).all() and (rest < np.inf).all()):
        raise SettingsError("teacher_path: the teacher's log-probabilities are not finite: its weights are NaN, or overflow.")
    return Part(
        rows=[str(store.source(index)) for index in order],
        input_ids=[np.asarray(each.input_ids, np.int32) for each in samples],
        positions=[learned_positions(each).astype(np.int32) for each in samples],
        ids=ids,
        logps=logps,
        rest=rest,
    )
