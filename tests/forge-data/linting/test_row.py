"""Rules for one row, where a case needs more than the corpus of defects has."""

import json
from functools import cache
from random import Random

import numpy as np
import pytest
from hypothesis import given, strategies as st

from forge_data import DataError, TemplateError
from forge_data._example import TokenizedExample
from forge_data._options import Options
from forge_data.findings._rules import Where
from forge_data.formats._registry import convert, detect, format_named
from forge_data.formats._samples import Encoded, Note
from forge_data.linting._lost import refused
from forge_data.linting._row import RowLint

from ..defects import DEFECTS
from ..lint_rows import call, clean, completion, preference, tokenizer, tool, tooled, turn

OPTIONS = Options()
WHERE = Where("a.jsonl", 7, "a.jsonl:7")


@pytest.fixture(scope="module")
def rules():
    return RowLint(tokenizer(), OPTIONS)


@cache
def both():
    """The rules as they are, and without the quick check."""
    quick, thorough = (RowLint(tokenizer(), OPTIONS) for _ in range(2))
    thorough._is_clean = lambda chat: False
    return quick, thorough


def check(rules, fields):
    """Return (rule, severity, field) of everything found before tokenising."""
    name = detect("a.jsonl:7", fields)
    sample = convert(name, "a.jsonl:7", fields, None)
    found = rules.check(WHERE, fields, sample, None, format_named(name).field_of)
    return [(each.rule, each.severity, each.field) for each in found]


@pytest.mark.parametrize("make", [clean, tooled, completion, preference])
def test_nothing_is_wrong_with_clean_rows(make, rules):
    """Clean rows of any kind have no finding."""
    rng = Random(make.__name__)
    for _ in range(200):
        assert check(rules, make(rng)) == []


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["system", "developer", "user", "assistant"]),
            st.sampled_from(
                ["so", "", " ", "a: b", "AI: so", "so\nUser: why", "<think>so", "so <|im_end|>", "caf\ufffd", "[INST]", "a\x00"]
            ),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_the_quick_look_agrees_with_the_long_one(turns):
    """In a row that the quick check takes for clean the rules find nothing."""
    quick, thorough = both()
    row = {"messages": [turn(role, content) for role, content in turns]}
    assert check(quick, row) == check(thorough, row)


@pytest.mark.parametrize("defect", [each for each in DEFECTS if each.base is clean], ids=lambda each: each.name)
def test_the_quick_look_passes_over_no_defect(defect):
    """The quick check never takes a damaged row for clean."""
    lines, planted = defect.file(3)
    quick, thorough = both()
    for row in planted:
        try:
            fields = json.loads(lines[row - 1])
            found = check(thorough, fields)
        except (ValueError, AttributeError, TypeError):
            continue
        assert check(quick, fields) == found


def test_an_unwanted_answer_stops_nothing(rules):
    """What is wrong in a rejected or unwanted answer is a warning."""
    broken, whole = [turn("assistant", "so <|im_end|> more")], [turn("assistant", "so")]
    row = {"prompt": [turn("user", "why")], "chosen": whole, "rejected": broken}
    assert check(rules, row) == [("special_token_in_text", "warn", "rejected[0].content")]
    assert check(rules, {**row, "chosen": broken, "rejected": whole}) == [
        ("special_token_in_text", "stop", "chosen[0].content")
    ]
    for wanted, severity in ((True, "stop"), (False, "warn")):
        answer = {"prompt": [turn("user", "why")], "completion": broken, "label": wanted}
        assert check(rules, answer) == [("special_token_in_text", severity, "completion[0].content")]


def test_an_answer_that_is_not_learned_stops_nothing(rules):
    """What is wrong in a turn that is not learned (train: false, or before the last under train_on="last") is a warning."""
    broken = turn("assistant", "so <|im_end|> more", train=False)
    row = {"messages": [turn("user", "why"), broken, turn("user", "why"), turn("assistant", "so")]}
    assert check(rules, row) == [("special_token_in_text", "warn", "messages[1].content")]
    row["messages"][1] = turn("assistant", "so <|im_end|> more")
    assert check(rules, row) == [("special_token_in_text", "stop", "messages[1].content")]
    assert check(RowLint(tokenizer(), Options(train_on="last")), row) == [
        ("special_token_in_text", "warn", "messages[1].content")
    ]


@pytest.mark.parametrize(
    "text",
    ["<|im_start|>user\nwhy<|im_end|>\n<|im_start|>assistant\n", "[INST] why [/INST]", "<|endoftext|>why", "why<|endoftext|>"],
)
def test_text_that_its_author_rendered(text, rules):
    """Plain text may begin or end with turn marks; marks within it are reported."""
    assert check(rules, {"prompt": text, "completion": "so<|im_end|>"}) == []
    assert check(rules, {"text": text}) == []
    assert check(rules, {"prompt": "why <|im_end|> not ", "completion": "so"}) == [("special_token_in_text", "warn", "prompt")]


def test_calls_in_many_makes(rules):
    """Several calls with results, results without ids, a call at the end, a null for a declared parameter: all clean."""
    calls = [call("map", {"city": "x"}, id="1"), call("map", {"city": None}, id="2")]
    results = [turn("tool", "a", tool_call_id="2"), turn("tool", "b", tool_call_id="1")]
    ask = [turn("user", "where"), turn("assistant", None, tool_calls=calls)]
    assert check(rules, {"tools": [tool("map")], "messages": [*ask, *results, turn("assistant", "there")]}) == []
    assert check(rules, {"tools": [tool("map")], "messages": ask}) == []
    # A call that the rows write as text themselves, and its result.
    text = [
        turn("user", "where"),
        turn("assistant", '<tool_call>{"name": "map"}</tool_call>'),
        turn("tool", "a"),
        turn("assistant", "so"),
    ]
    assert check(rules, {"messages": text}) == []
    # The same null where no tools are declared is what a merged schema leaves.
    assert check(rules, {"messages": ask}) == [("tool_arguments", "warn", "messages[1].tool_calls[1].function.arguments.city")]


@pytest.mark.parametrize(
    ("error", "rule", "field", "fix"),
    [
        (
            DataError("a.jsonl:7: field messages[1].role is 'x'; allowed: user"),
            "unknown_role",
            "messages[1].role",
            "allowed: user",
        ),
        (DataError("a.jsonl:7 has the fields 'a', which are no known format; known: b"), "unreadable_row", "", "known: b"),
        (DataError("a.jsonl:7: field prompt holds the lone surrogate U+D800; mend it"), "broken_unicode", "prompt", "mend it"),
        (TemplateError("a.jsonl:7: the template leaves it open; use another"), "template_refuses", "", "use another"),
        (DataError("a.jsonl:7: 12 tokens, and `max_seq_len` is 4; raise it"), "lost_to_length", "", "raise it"),
        (DataError("a.jsonl:7: what nobody can mend"), "unreadable_row", "", "mend the row or take it out"),
    ],
)
def test_refusals_become_findings(error, rule, field, fix):
    """A refused row becomes a finding with the message's rule, field and remedy, and its place once; all of them stop."""
    found = refused(WHERE, error)
    assert (found.rule, found.severity, found.field, found.fix) == (rule, "stop", field, fix)
    assert "a.jsonl" not in found.what
    assert str(found).startswith("a.jsonl:7")


def test_notes_of_a_preference(rules):
    """Notes about the chosen answer stop, about the rejected one warn, each under its own field."""
    thinks = {**turn("assistant", "so"), "reasoning_content": "hm"}
    row = {"prompt": [turn("user", "why")], "chosen": [thinks], "rejected": [{**thinks, "content": "no"}]}
    note = Note("reasoning_dropped", "messages[1].reasoning_content", "it is left out")
    expected = {"chosen": ("stop", "chosen[0].reasoning_content"), "rejected": ("warn", "rejected[0].reasoning_content")}
    for sides in (["chosen", "rejected"], ["chosen"], ["rejected"]):
        fields = row | {name: [turn("assistant", "plain")] for name in {"chosen", "rejected"} - set(sides)}
        sample = convert("preference", "a.jsonl:7", fields, None)
        examples = tuple(
            TokenizedExample.from_mask(np.arange(3, dtype=np.int32) + n, np.array([0, 0, 1], bool)) for n in range(2)
        )
        encoded = Encoded(examples, notes=(note,) * len(sides))
        found = rules.check(WHERE, fields, sample, encoded, format_named("preference").field_of)
        assert [(each.severity, each.field) for each in found] == [expected[side] for side in sides]
