"""What `hatch run templates` makes of answers, and which templates it finds. The comparison itself: tests/whole."""

import pytest
import templates
from template_check import CASES, ITSELF, OTHERWISE, REFUSED, RIGHT, WRONG


def answers(**others):
    """Answers of a template that is right but for the cases given by number."""
    found = {case: {"state": RIGHT, "says": ""} for case in CASES}
    for number, (state, says) in others.items():
        found[[*CASES][int(number[1:]) - 1]] = {"state": state, "says": says}
    return found


FOUND = {
    "ours/a, trl/a": answers(),
    "trl/b": answers(
        c2=(WRONG, "learned 'x' behind 'y'; message 3 is not learned as 'z' behind 'w'"),
        c4=(REFUSED, "row.jsonl:1: the chat template of trl/b leaves open message 3: it lacks 'Paris'"),
        c5=(REFUSED, 'row.jsonl:1: the chat template of trl/b leaves open message 17: it lacks "O\'slo"'),
        c6=(ITSELF, ""),
        c7=(OTHERWISE, "row.jsonl:1: the chat template of trl/b prompts for message 1 with 'a'"),
    ),
    "llama.cpp/c": answers(
        c4=(ITSELF, "row.jsonl:1: the chat template of llama.cpp/c does not write out the tool 'weather'"),
        c2=(WRONG, "learned 'other text' behind ''; message 5 is not learned as any prompt of the template asks it"),
    ),
}


def test_there_are_fifteen_cases():
    """The page's columns are as many as it says."""
    assert len(CASES) == 15


def test_the_page_counts_and_gives_every_reason():
    """Each template has a row, shares are of what is rendered and accepted, and equal reasons stand together."""
    text = templates.page(FOUND)
    assert "3 chat templates, each with 15 conversations: the template itself writes 43 of these 45" in text
    assert "accepts 40 of them, and **38 (95.0 %) are learned as the template asks for them**; 2 are not. 1 (2.3 %)" in text
    assert "and are refused; 2 (4.7 %) others are refused" in text
    assert f"| `ours/a, trl/a` |{' + |' * 15}" in text
    assert f"| `trl/b` | + | **wrong** | + | refused | refused |  | prompt |{' + |' * 8}" in text
    assert "- learned ...; message N is not learned as ...: `trl/b` (2)" in text
    assert "- learned ...; message N is not learned as any prompt of the template asks it: `llama.cpp/c` (2)" in text
    assert "- leaves open message N: it lacks ...: `trl/b` (4 5)" in text
    assert "- prompts for message N with ...: `trl/b` (7)" in text
    assert "## What templates leave out\n\n- does not write out the tool ...: `llama.cpp/c` (4)" in text


def test_a_template_that_several_ship_is_checked_once(tmp_path, monkeypatch):
    """Equal files have one entry, which names all of them; a folder without templates is an error."""
    pytest.importorskip("trl")
    with pytest.raises(SystemExit, match=r"holds no \*\.jinja"):
        templates.found_templates(tmp_path)
    file = templates.ROOT / "tests" / "forge-data" / "templates" / "qwen3.jinja"
    (tmp_path / "Copy.jinja").write_text(file.read_text(encoding="utf-8"), encoding="utf-8")
    found = templates.found_templates(tmp_path)
    assert [names for names in found.values() if "ours/qwen3" in names] == [["ours/qwen3", "trl/qwen3", "llama.cpp/Copy"]]
