"""Strings that remember their origin: strings to a template, and what they remember is true."""

import pytest
from hypothesis import given, strategies as st
from markupsafe import Markup

from forge_data.chat_template._traced_text import UNPLACED, Leaf, Mark, Traced, concat, join, leaf_of, pieces_of

TEXT = st.text(st.sampled_from("ab \n\t<>é🙂|"), max_size=12)
SEPARATOR = st.text(st.sampled_from("ab <|"), min_size=1, max_size=2)
NUMBER = st.integers(-14, 14)
COUNT = st.integers(-1, 3)
OPERATIONS = [
    st.tuples(st.sampled_from(["strip", "lstrip", "rstrip"]), st.tuples(st.none() | TEXT)),
    st.tuples(st.sampled_from(["removeprefix", "removesuffix"]), st.tuples(TEXT)),
    st.tuples(st.sampled_from(["split", "rsplit"]), st.tuples(st.none() | SEPARATOR, COUNT)),
    st.tuples(st.sampled_from(["partition", "rpartition"]), st.tuples(SEPARATOR)),
    st.tuples(st.just("splitlines"), st.tuples(st.booleans())),
    st.tuples(st.just("replace"), st.tuples(TEXT, TEXT, COUNT)),
    st.tuples(st.just("join"), st.tuples(st.lists(TEXT, max_size=3))),
    st.tuples(st.sampled_from(["__add__", "__radd__"]), st.tuples(TEXT)),
    st.tuples(st.just("__getitem__"),
    st.tuples(st.builds(slice, st.none() | NUMBER, st.none() | NUMBER, st.sampled_from([None, 1, 2, -1])))),
    st.tuples(st.sampled_from(["upper", "title", "swapcase", "casefold"]), st.just(())),
]  # fmt: skip


def traced(text, message=0):
    return Traced.of(Leaf(message, "content", text))


def strings(result):
    return [result] if isinstance(result, str) else list(result)


def true(text):
    """Check what a string remembers."""
    plain = "".join(map(str, list(text)))
    for start, stop, leaf, offset in pieces_of(text):
        assert 0 <= start <= stop <= len(text)
        if isinstance(leaf, Leaf) and offset >= 0:
            assert plain[start:stop] == leaf.text[offset : offset + stop - start]


@given(text=TEXT, operations=st.lists(st.one_of(OPERATIONS), min_size=1, max_size=4), data=st.data())
def test_a_string_like_any_other(text, operations, data):
    """Every str method returns what it returns for a plain str, and the origins of the result are true."""
    ours, plain = traced(text), text
    for name, args in operations:
        if name == "__radd__":
            got, wanted = args[0] + ours, args[0] + plain
        else:
            got, wanted = getattr(ours, name)(*args), getattr(plain, name)(*args)
        assert strings(got) == strings(wanted)
        for part in strings(got):
            true(part)
        if not strings(got):
            return
        which = data.draw(st.integers(0, len(strings(got)) - 1))
        ours, plain = strings(got)[which], str.__str__(strings(wanted)[which])


@given(text=TEXT.filter(bool), sep=SEPARATOR)
def test_nothing_is_forgotten(text, sep):
    """Splitting at a separator and joining with one keeps the origin of every character but the separators'."""
    parts = traced(text).split(sep)
    again = join(sep, parts)
    assert again == text
    remembered = sum(stop - start for start, stop, _, _ in pieces_of(again))
    assert remembered == len(text) - len(sep) * (len(parts) - 1)


@given(text=TEXT, index=NUMBER)
def test_one_character(text, index):
    """A character by index keeps its origin, and an index out of range is an IndexError."""
    ours = traced(text)
    if -len(text) <= index < len(text):
        assert ours[index] == text[index]
        ((start, stop, leaf, offset),) = pieces_of(ours[index])
        assert (start, stop, leaf.text[offset]) == (0, 1, text[index])
    else:
        with pytest.raises(IndexError):
            ours[index]


def test_two_of_one_text():
    """Two equal strings are distinguished by their origin."""
    one, two = traced("same", 1), traced("same", 2)
    assert one == two
    assert [leaf.message for _, _, leaf, _ in pieces_of(one + "same" + two)] == [1, 2]


def test_what_is_not_known_is_plain():
    """A method that is not overridden returns a plain str: without origin, never with a wrong one."""
    for made in (traced("ab").upper(), traced("ab").center(9), f"<{traced('ab')}>", traced("ab") * 2):
        assert type(made) is str


def test_str_keeps_it():
    """jinja2 calls str() on whatever it writes; that must not lose the origin."""
    text = traced("ab")
    assert str(text) is text


def test_markup_escapes():
    """Added to Markup it is escaped as a plain str is, on either side."""
    assert traced("<") + Markup("b") == "<" + Markup("b")
    assert Markup("b") + traced("<") == Markup("b") + "<"


def test_marks_stay_in_their_place():
    """Marks have no characters; they keep their place through joining and stripping."""
    begin, end = Traced.mark(Mark("enter", 1, 0)), Traced.mark(Mark("leave", 1))
    text = concat(["  x", begin, traced("a"), end, "y "]).strip()
    assert [(start, origin.kind) for start, _, origin, _ in pieces_of(text) if isinstance(origin, Mark)] == [
        (1, "enter"),
        (2, "leave"),
    ]


def test_marks_of_a_cut():
    """What began before a cut has not ended in it, and what begins after it is empty at its end."""
    text = concat(["a", Traced.mark(Mark("enter", 1, 0)), "bc", Traced.mark(Mark("leave", 1)), "d"])
    placed = [[place for place, _, _, _ in pieces_of(part)] for part in (text[:1], text[2:], text[1:3], text.split("b")[1])]
    assert placed == [[1, 1], [0, 1], [0, 2], [0, 1]]


def test_leaves_in_a_nest():
    """A leaf is found anywhere in lists and objects, in a key too."""
    leaf = Leaf(0, "x", "b")
    assert leaf_of({"a": [1, {Traced.of(leaf): 2}]}) is leaf
    assert leaf_of({"a": ("b", None)}) is None


def test_no_place():
    """A piece in another spelling has no places, and slicing gives it none."""
    text = Traced('"\\n"', ((0, 4, Leaf(0, "content", "\n"), UNPLACED),))
    assert [offset for _, _, _, offset in pieces_of(text[1:3])] == [UNPLACED]
