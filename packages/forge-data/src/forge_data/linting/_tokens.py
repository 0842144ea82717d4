"""Tokens of one row of any format → findings."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from forge_data._example import IGNORED, TokenizedExample
from forge_data._values import counted
from forge_data.findings._finding import Finding
from forge_data.findings._rules import Where, found
from forge_data.formats._format import FieldOf, Fields
from forge_data.formats._samples import Chat, Document, Encoded, Pieces, Preference, Sample, Text, Tokens

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

_TAIL = 8
"""Learned tokens at the end in which a turn end is searched: templates may write a line feed after it."""


class TokenLint:
    """Linter of ids and labels, with one tokenizer's special tokens."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._bos: int | None = tokenizer.bos_token_id
        self._bos_token = tokenizer.bos_token
        ends = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.content.strip()}
        self._ends: NDArray[np.int32] = np.array(sorted(ends | {tokenizer.eos_token_id} - {None}), dtype=np.int32)

    def check(self, where: Where, fields: Fields, sample: Sample, encoded: Encoded, field_of: FieldOf) -> Iterator[Finding]:
        """Find what is wrong with the examples of a row."""
        # Where nothing but the row itself ends what is learned.
        tokens = isinstance(sample, Tokens) or (isinstance(sample, Pieces) and sample.bare)
        for number, example in enumerate(encoded.examples):
            if tokens or not self._is_clean(example):
                yield from self.example(where, _field(fields, sample, number, field_of), example, tokens=tokens)

    def example(self, where: Where, field: str, example: TokenizedExample, *, tokens: bool) -> Iterator[Finding]:
        """Find what is wrong with one example; `tokens` if only its ids and labels are known."""
        ids, labels = example.input_ids, "segments" if field == "segments" else "labels"
        if self._bos is not None and len(ids) > 1 and ids[0] == ids[1] == self._bos:
            yield found("double_bos", where, field, f"the sample begins with {self._bos_token!r} twice")
        if not example.loss_count:
            yield found(
                "no_trained_token", where, labels if tokens else field, f"none of {counted(len(ids), 'tokens')} is learned"
            )
        elif tokens and not self._ends_turn(example):
            last = ids[np.flatnonzero(example.labels != IGNORED)[-1]]
            yield found("missing_eos", where, labels, f"the last learned token is {last}, which ends no text and no turn")

    def _is_clean(self, example: TokenizedExample) -> bool:
        """Check quickly whether nothing is wrong, as with most examples."""
        ids, labels = example.input_ids, example.labels
        learned = len(ids) > 2 and (labels[-1] != IGNORED or labels[-2] != IGNORED)
        return learned and (ids[0] != self._bos or ids[1] != self._bos)

    def _ends_turn(self, example: TokenizedExample) -> bool:
        learned = example.input_ids[example.labels != IGNORED][-_TAIL:]
        return bool(np.isin(learned, self._ends).any())


def _field(fields: Fields, sample: Sample, number: int, field_of: FieldOf) -> str:
    """Name the field that example `number` of a sample is reported under."""
    match sample:
        case Preference():
            return "rejected" if number else "chosen"
        case Tokens():
            return "input_ids"
        case Pieces(bare=True):
            return "segments"
        case Document() | Text() | Pieces():
            return field_of(fields, 0, "", "completion")
        case Chat():
            return ""
        case _:
            return "completion"
