"""What did not fit into max_seq_len to one finding: how much of the data set was lost, and where to look first."""

from collections.abc import Iterator, Mapping

from forge_data._accounting import NOTHING_WITHIN, TOO_LONG, TRUNCATED
from forge_data.findings._report import Finding
from forge_data.findings._rules import Where, found

REASONS = (TOO_LONG, NOTHING_WITHIN, TRUNCATED)
"""Reasons of the accounting that are the length's fault."""


def lost_to_length(
    tokens_read: int, tokens_lost: Mapping[str, int], longest: Where | None, longest_tokens: int, file: str
) -> Iterator[Finding]:
    """One finding if tokens were lost to length, none otherwise.

    Args:
        tokens_read: tokens of all rows.
        tokens_lost: tokens left out, by reason.
        longest: the longest row that was left out or cut, where that is known.
        longest_tokens: its tokens.
        file: a source's name, where no row is known.
    """
    lost = sum(tokens_lost.get(reason, 0) for reason in REASONS)
    if not lost:
        return
    told = f"{lost / tokens_read:.1%} of all tokens ({lost:,} of {tokens_read:,}) are lost to max_seq_len"
    if longest is not None:
        told += f"; this row is the longest of them, with {longest_tokens:,} tokens"
    yield found("lost_to_length", longest or Where(file, None, file), "", told)
