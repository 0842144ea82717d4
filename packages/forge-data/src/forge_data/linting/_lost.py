"""Rows that `prepare` refuses, and tokens lost to `max_seq_len` → findings."""

import re
from collections.abc import Iterator, Mapping

from forge_data._accounting import NOTHING_WITHIN, SAME_ANSWERS, SAME_WITHIN, TOO_LONG, TRUNCATED
from forge_data._errors import BadPairError, ForgeDataError, TemplateError
from forge_data.findings._finding import STOP, WARN, Finding
from forge_data.findings._rules import RULES, Where, found

REASONS = (TOO_LONG, NOTHING_WITHIN, TRUNCATED)
"""Reasons of the accounting that are due to `max_seq_len`."""

# Every message of this package is: place, field, what was found; what to do.
_FIELD = re.compile(r"\bfields? ([A-Za-z_]\w*(?:\[\d+\]|\.\w+)*)")


def lost_to_length(
    tokens_read: int, tokens_lost: Mapping[str, int], longest: Where | None, longest_tokens: int, file: str
) -> Iterator[Finding]:
    """Make one finding if tokens were lost to `max_seq_len`.

    Args:
        tokens_read: tokens of all rows.
        tokens_lost: tokens left out, by reason.
        longest: the longest row that was left out or cut, if known.
        longest_tokens: its tokens.
        file: a source's name, where no row is known.
    """
    lost = sum(tokens_lost.get(reason, 0) for reason in REASONS)
    if not lost:
        return
    what = f"{lost / tokens_read:.1%} of all tokens ({lost:,} of {tokens_read:,}) are lost to max_seq_len"
    if longest is not None:
        what += f"; this row is the longest of them, with {longest_tokens:,} tokens"
    yield found("lost_to_length", longest or Where(file, None, file), "", what)


def reason_of(error: ForgeDataError, finding: Finding) -> str:
    """Name the reason in the accounting of a refused row, with the finding that `refused` made."""
    if isinstance(error, BadPairError):
        return error.reason
    return TOO_LONG if finding.rule == "lost_to_length" else finding.rule


def refused(where: Where, error: ForgeDataError, *, skipped: bool = False) -> Finding:
    """Make the finding of a row that was refused; `skipped` if it is left out on request."""
    message = str(error).removeprefix(where.place).lstrip(": ")
    what, _, remedy = message.rpartition("; ")
    if not what:
        what, remedy = remedy, ""
    named = _FIELD.search(what)
    field = named[1] if named else ""
    rule = _rule(what, field, error)
    return found(rule, where, field, what, severity=WARN if skipped else STOP, fix=remedy or RULES[rule].fix)


def _rule(what: str, field: str, error: ForgeDataError) -> str:
    if isinstance(error, BadPairError):
        return SAME_ANSWERS if error.reason == SAME_WITHIN else error.reason
    if isinstance(error, TemplateError) or "refuses the conversation" in what:
        return "template_refuses"
    if "surrogate" in what:
        return "broken_unicode"
    if field.endswith((".role", ".from")):
        return "unknown_role"
    if field.endswith((".content", ".value")) and what.startswith(f"field {field} is null"):
        return "empty_turn"
    if "max_seq_len" in what:
        return "lost_to_length"
    return "unreadable_row"
