"""What a row was refused with to a finding, so that a lint goes on where `prepare` stops."""

import re

from forge_data._accounting import SAME_ANSWERS, SAME_WITHIN
from forge_data._errors import BadPairError, ForgeDataError, TemplateError
from forge_data.findings._report import STOP, WARN, Finding
from forge_data.findings._rules import RULES, Where, found

# As every message of this package is made: the place, the field, what was found; what to do.
_FIELD = re.compile(r"\bfields? ([A-Za-z_]\w*(?:\[\d+\]|\.\w+)*)")


def refused(where: Where, error: ForgeDataError, *, skipped: bool = False) -> Finding:
    """The finding that stands for a row of which nothing can be made; `skipped` if it is left out, as was asked for."""
    told = str(error).removeprefix(where.place).lstrip(": ")
    what, _, remedy = told.rpartition("; ")
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
