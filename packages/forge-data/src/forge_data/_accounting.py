"""Rows and tokens read, kept and dropped by reason: counts that must add up."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import attrs

from forge_data._values import counted

NO_TRAINED_TOKEN = "no_trained_token"  # noqa: S105
TOO_LONG = "longer_than_max_seq_len"
NOTHING_WITHIN = "no_trained_token_within_max_seq_len"
PREPROCESS = "preprocess"
EMPTY_PROMPT = "empty_prompt"
LONG_PROMPT = "longer_than_max_prompt_len"
EMPTY_DOCUMENT = "empty_document"
SAME_ANSWERS = "same_answers"
SAME_WITHIN = "same_answers_within_max_seq_len"
PROMPTS_DIFFER = "prompts_differ"
EMPTY_ANSWER = "empty_answer"
TRUNCATED = "truncated"
UNTRAINED_PIECE = "piece_without_trained_token"


def _frozen(reasons: Mapping[str, int]) -> Mapping[str, int]:
    return MappingProxyType(dict(sorted(reasons.items())))


@attrs.frozen
class Accounting:
    """Counts of what became of every row and token; `kept + sum(dropped.values()) == read`.

    The same holds for tokens.

    >>> print(Accounting(read=10, kept=7, dropped={"no_trained_token": 1, "longer_than_max_seq_len": 2}))
    kept 7 of 10 rows; dropped 2 longer_than_max_seq_len, 1 no_trained_token
    """

    read: int
    """Rows read. Where `preprocess` makes several rows of one, each counts; a row that it leaves out counts as one."""

    kept: int
    """Rows that became samples."""

    dropped: Mapping[str, int] = attrs.field(converter=_frozen, factory=dict)
    """Rows left out, by reason."""

    samples: int = attrs.field(default=attrs.Factory(lambda self: self.kept, takes_self=True))
    """Samples in the store: more than rows where long rows are split or a conversation becomes one for each learned turn, and
    two a row for preferences."""

    tokens_read: int = 0
    """Tokens of all rows as they were tokenised; a row that `preprocess` left out has none."""

    tokens_kept: int = 0
    """Tokens of all samples."""

    tokens_lost: Mapping[str, int] = attrs.field(converter=_frozen, factory=dict)
    """Tokens left out, by reason: of dropped rows, and cut off others."""

    forms: Mapping[str, int] = attrs.field(converter=_frozen, factory=dict)
    """Kept rows whose conversation was rendered in a way that the row does not say: `enable_thinking=false` (an argument of the
    chat template), `one_sample_a_turn`, `as_history` (see `turns`), `behind_empty_block` (a prompt ends with a block of
    reasoning that is closed and empty), `behind_open_block` (one that is open, and that the learned text closes),
    `with_system_prompt` (it was given that message) and `with_own_system_message`, where there is a `system_prompt`."""

    def __attrs_post_init__(self) -> None:
        numbers = (self.read, self.kept, self.samples, self.tokens_read, self.tokens_kept)
        counts = (*numbers, *self.dropped.values(), *self.tokens_lost.values(), *self.forms.values())
        if any(isinstance(count, bool) or not isinstance(count, int) or count < 0 for count in counts):
            raise ValueError(f"counts of rows and tokens must be whole and not negative, got {counts}")
        if self.kept + sum(self.dropped.values()) != self.read:
            raise ValueError(f"rows do not add up: read {self.read}, kept {self.kept}, dropped {dict(self.dropped)}")
        if self.tokens_kept + sum(self.tokens_lost.values()) != self.tokens_read:
            raise ValueError(
                f"tokens do not add up: read {self.tokens_read}, kept {self.tokens_kept}, lost {dict(self.tokens_lost)}"
            )
        if self.samples < self.kept:
            raise ValueError(f"{self.kept} rows were kept but became {self.samples} samples; each becomes one at least")

    def __str__(self) -> str:
        text = f"kept {self.kept:,} of {counted(self.read, 'rows')}"
        if self.samples != self.kept:
            text += f" as {counted(self.samples, 'samples')}"
        text += _listed("dropped", self.dropped)
        # Tokens of dropped rows are listed with the rows; what was cut off kept rows is not.
        cut = {reason: count for reason, count in self.tokens_lost.items() if reason not in self.dropped}
        return text + _listed("lost", cut, "tokens") + _listed("rendered", self.forms)

    def __reduce__(self) -> tuple[type["Accounting"], tuple[Any, ...]]:
        # A read-only mapping does not pickle; the dict that it was made of does.
        return Accounting, tuple(self.as_dict().values())

    def as_dict(self) -> dict[str, Any]:
        """Return plain numbers and strings, for JSON."""
        plain = attrs.asdict(self, recurse=False)
        return {name: dict(value) if isinstance(value, Mapping) else value for name, value in plain.items()}


def _listed(verb: str, reasons: Mapping[str, int], unit: str = "") -> str:
    text = ", ".join(f"{counted(count, unit) if unit else f'{count:,}'} {reason}" for reason, count in reasons.items())
    return f"; {verb} {text}" if text else ""
