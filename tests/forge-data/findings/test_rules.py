"""The page of the lint's rules."""

from pathlib import Path

from forge_data.findings._rules import RULES

PAGE = Path(__file__).parents[3] / "docs" / "data-lint.md"


def line(name):
    """The line of one rule in the page's table; tags are code there, so that a browser shows them."""
    rule = RULES[name]
    cells = [f"`{name}`", "stops" if rule.severity == "stop" else "warns", rule.why, rule.fix]
    return f"| {' | '.join(cells)} |".replace("</think>", "`</think>`")


def test_the_page_lists_every_rule():
    """docs/data-lint.md has a line for each rule, in the order of the table, with its severity, reason and remedy."""
    lines = [written for written in PAGE.read_text(encoding="utf-8").splitlines() if written.startswith("| `")]
    assert lines == [line(name) for name in RULES]
