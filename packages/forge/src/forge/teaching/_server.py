"""Rows and a server (vLLM, SGLang) → its model's likeliest tokens at each learned token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import forge_algos
from forge._errors import SettingsError
from forge._progress import Reporter
from forge.tasks.items._samples import learned_positions
from forge.tasks.items._stored_teacher import Part
from forge.teaching._rows import AnsweredRow, checked_answer, part_of_rows

_AT_ONCE = 16
"""Requests that a server has at a time, which it computes together."""


def is_server(teacher_path: str) -> bool:
    """Return whether a teacher is the address of a server."""
    return teacher_path.startswith(("http://", "https://"))


class ServedTeacher:
    """A server that was found, whose tokens are those of the rows.

    Args:
        url: its address.
        tokenizer: of the model that will learn.
        timeout: seconds for an answer.

    Raises:
        SettingsError: it serves a model with another tokenizer.
        forge_algos.RolloutError: nothing answers there that is known.
    """

    def __init__(self, url: str, tokenizer: Any, *, timeout: float) -> None:
        self._url, self._tokenizer = url, tokenizer
        self._reader = forge_algos.online.PromptReader(url, timeout=timeout, limit="server_timeout")
        self.model = self._reader.model

    def check(self, store: Any, samples: Sequence[int]) -> None:
        """Compare tokenizer and length with the rows. Raises SettingsError."""
        text = self._tokenizer.decode(store[samples[0]].input_ids)
        ours, theirs = self._tokenizer(text, add_special_tokens=False)["input_ids"], self._reader.tokenize(text)
        if ours != theirs:
            raise SettingsError(
                f"teacher_path {self._url}: serves {self.model!r}, whose tokenizer gives other ids than that of model_path "
                f"({theirs[:8]}, not {ours[:8]}), so that its predictions are about other words. Serve a teacher of the same "
                "family."
            )
        longest = max(samples, key=lambda index: store.lengths[index])
        # A request has room for one more token, which it draws.
        if self._reader.longest is not None and store.lengths[longest] >= self._reader.longest:
            raise SettingsError(
                f"{store.source(longest)} has {store.lengths[longest]:,} tokens, and teacher_path {self._url} reads fewer than "
                f"{self._reader.longest:,}. Serve the teacher with a longer context, or set max_seq_len here and in the runs."
            )

    def ask(
        self,
        parts: Mapping[int, Sequence[int]],
        store: Any,
        write: Callable[[int, Part], None],
        report: Reporter,
        *,
        top_k: int,
        vocabulary: int,
    ) -> None:
        """Write parts, by their numbers, of these samples each.

        Raises:
            SettingsError: an answer is no distribution over this vocabulary.
            forge_algos.RolloutError: the server failed, or says less than is asked for.
            RunWriteError: a part cannot be written.
        """
        width = min(top_k, vocabulary)

        def answered(index: int) -> AnsweredRow:
            sample, where = store[index], str(store.source(index))
            found = self._reader.likeliest(sample.input_ids, width)
            answers = {
                at: checked_answer(found[at - 1], top_k, vocabulary, f"teacher_path {self._url}: {where}: token {at}")
                for at in learned_positions(sample).tolist()
            }
            return AnsweredRow(where, sample.input_ids.tolist(), answers)

        show, done, of = report.progress("asking the teacher"), 0, sum(map(len, parts.values()))
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            for number, part in parts.items():
                rows = []
                for row in pool.map(answered, part):
                    rows.append(row)
                    done += 1
                    show(done, of)
                write(number, part_of_rows(rows, width))
