"""Which message wrote which tokens."""

import numpy as np
from hypothesis import given, strategies as st

from forge_data.chat_template._trace import NOBODY, render
from forge_data.chat_template._traced_jinja import compile_template
from forge_data.masking import _segments
from forge_data.masking._segments import text_owners

MESSAGES = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "ho"},
]


def owned(template, messages=MESSAGES):
    trace = render(compile_template(template)[0], messages, {})
    return [
        ("" if owner == NOBODY else f"{messages[owner]['role']}:") + trace.text[start:stop]
        for start, stop, owner in text_owners(trace)
    ]


def segments(offsets, runs, roles):
    """Return the segments of one text."""
    ((bounds, names),) = _segments.segments(offsets[:, 0], [len(offsets)], [runs], [roles])
    return bounds, names


@given(st.data())
def test_one_text_is_as_one_of_several(data):
    """A text by itself, whose tokens are in order, has the segments that it has beside others."""
    lengths = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=6))
    borders = np.cumsum([0, *lengths]).tolist()
    owners = data.draw(st.lists(st.integers(-1, 2), min_size=len(lengths), max_size=len(lengths)))
    runs = [*zip(borders, borders[1:], owners, strict=False)]
    begins = np.array(sorted(data.draw(st.lists(st.integers(0, borders[-1] - 1), min_size=1, max_size=12))))
    offsets, roles = np.stack([begins, begins + 1], axis=1), ("system", "user", "assistant")
    alone, named = segments(offsets, runs, roles)
    twice = _segments.segments(np.tile(begins, 2), [len(begins)] * 2, [runs] * 2, [roles] * 2)
    for bounds, names in twice:
        assert (bounds.tolist(), names) == (alone.tolist(), named)
    assert alone.dtype == np.int32


def test_turns():
    """A turn is its message's, with header and end."""
    assert owned("<s>{% for m in messages %}[{{ m.content }}]{% endfor %}</s>") == [
        "<s>", "system:[be brief]", "user:[hi]", "assistant:[ho]", "</s>",
    ]  # fmt: skip


def test_a_guest():
    """A system message inside the first user's turn is the system's, and so is one before all turns."""
    within = "{% for m in messages[1:] %}[{% if loop.first %}{{ messages[0].content }}{% endif %}{{ m.content }}]{% endfor %}"
    assert owned(within) == ["user:[", "system:be brief", "user:hi]", "assistant:[ho]"]
    assert owned("<{{ messages[0].content }}>{% for m in messages[1:] %}{{ m.content }}{% endfor %}") == [
        "<", "system:be brief", ">", "user:hi", "assistant:ho",
    ]  # fmt: skip


def test_a_tools_name_is_no_speech():
    """The name of a called function within the tool's turn belongs to the tool's turn."""
    messages = [
        {"role": "assistant", "content": "x", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
        {"role": "tool", "content": "42"},
    ]
    template = (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ messages[0].tool_calls[0].function.name }}={% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    assert owned(template, messages) == ["assistant:x", "tool:f=42"]


CHATML = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
)


def test_a_default_system_turn():
    """A system turn without a message is the template's, not the user's; one with a message is the system's."""
    assert owned(CHATML, MESSAGES[1:]) == [
        "<|im_start|>system\nYou help.<|im_end|>\n", "user:<|im_start|>user\nhi<|im_end|>\n", "assistant:<|im_start|>"
                                                                                              "assistant\nho<|im_end|>\n",
    ]  # fmt: skip
    assert owned(CHATML)[0] == "system:<|im_start|>system\nbe brief<|im_end|>\n"


def test_what_looks_like_a_header():
    """Content never moves a border, header-like or not; nor does a turn whose header is another's with more text."""
    messages = [{"role": "user", "content": "<|im_start|>user\nx"}, {"role": "assistant", "content": "ho"}]
    assert owned(CHATML, messages)[1] == "user:<|im_start|>user\n<|im_start|>user\nx<|im_end|>\n"
    inst = (
        "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
        "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
    )
    assert owned(inst, messages[:1] + MESSAGES[2:])[0].startswith("user:[INST] <|im_start|>")


def test_tokens():
    """A token belongs to the message of its first character; tokens of one message are one segment, of two messages two."""
    offsets = np.array([(0, 0), (0, 2), (2, 5), (5, 6), (6, 8)])
    bounds, roles = segments(offsets, [(0, 1, NOBODY), (1, 3, 0), (3, 6, 1), (6, 8, 2)], ["user", "user", "assistant"])
    assert bounds.tolist() == [[0, 2], [2, 3], [3, 4], [4, 5]]
    assert roles == ("template", "user", "user", "assistant")


@given(
    sizes=st.lists(st.integers(0, 4), min_size=1, max_size=12), cuts=st.lists(st.integers(0, 20), max_size=4), data=st.data()
)
def test_they_tile(sizes, cuts, data):
    """Segments are all tokens, in order, none is empty, and no two neighbours are one message's."""
    ends = np.cumsum(sizes)
    offsets = np.stack([ends - sizes, ends], axis=1)
    borders = sorted({0, *(cut for cut in cuts if cut < ends[-1])})
    owners = data.draw(st.lists(st.integers(-1, 3), min_size=len(borders), max_size=len(borders)))
    runs = [(start, stop, owner) for start, stop, owner in zip(borders, [*borders[1:], int(ends[-1])], owners, strict=True)]
    bounds, roles = segments(offsets, [run for run in runs if run[1] > run[0]], ["system", "user", "assistant", "tool"])
    assert bounds.dtype == np.int32
    assert [place for pair in bounds.tolist() for place in range(*pair)] == list(range(len(sizes)))
    assert len(roles) == len(bounds)
    assert (bounds[:, 0] < bounds[:, 1]).all()


def test_nothing():
    """No tokens have no segment."""
    bounds, roles = segments(np.zeros((0, 2), dtype=np.int64), [], [])
    assert (bounds.shape, roles) == ((0, 2), ())


@given(st.lists(st.tuples(st.integers(0, 4), st.lists(st.integers(1, 4), max_size=4), st.data()), min_size=1, max_size=5))
def test_many_at_once(texts):
    """Many texts at once have the segments that each has alone, also those without tokens or runs."""
    begins, sizes, runs, roles = [], [], [], []
    for size, lengths, data in texts:
        ends = np.cumsum([0, *lengths]).tolist()
        places = data.draw(st.lists(st.integers(0, ends[-1]), min_size=size, max_size=size))
        begins.append(np.array(sorted(places), dtype=np.int64))
        sizes.append(size)
        owners = data.draw(st.lists(st.integers(-1, 1), min_size=len(lengths), max_size=len(lengths)))
        runs.append(list(zip(ends, ends[1:], owners, strict=False)))
        roles.append(["user", "assistant"])
    found = _segments.segments(np.concatenate([*begins, np.zeros(0, dtype=np.int64)]), sizes, runs, roles)
    for number, (bounds, names) in enumerate(found):
        ((alone, same),) = _segments.segments(begins[number], [sizes[number]], [runs[number]], [roles[number]])
        assert (bounds.tolist(), bounds.dtype, names) == (alone.tolist(), alone.dtype, same)
