"""A user's preprocessing, and its errors."""

import functools
import pickle
import subprocess
import sys

import pytest

from forge_data import DataError
from forge_data.reading._preprocess import load_preprocess

MODULE = """
LIMIT = 3
class Tools:
    @staticmethod
    def shout(row):
        return {"text": row["text"].upper(), "note": None}
def twice(row):
    return [row, dict(row)]
def nothing(row):
    return None
def broken(row):
    return row["absent"]
def wrong(row):
    return "text"
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A user's module in the working directory."""
    (tmp_path / "user_rows.py").write_text(MODULE)
    (tmp_path / "user_exits.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "user_rows", raising=False)
    yield tmp_path / "user_rows.py"
    sys.modules.pop("user_rows", None)


def test_by_name(module):
    """A function is named as package.module:function, and found in the working directory."""
    made = load_preprocess("user_rows:Tools.shout")
    assert made("f:1", {"text": "a"}) == [{"text": "A"}]
    assert made.name == "user_rows:Tools.shout"
    assert load_preprocess("user_rows:twice")("f:1", {"text": "a"}) == [{"text": "a"}] * 2
    assert load_preprocess("user_rows:nothing")("f:1", {"text": "a"}) == []
    assert load_preprocess(None) is None
    assert load_preprocess(made) is made


@pytest.mark.slow
def test_pickled(module):
    """A function with a name is imported again where it is unpickled."""
    made = load_preprocess("user_rows:twice")
    again = pickle.loads(pickle.dumps(made))
    assert (again.name, again.identity) == (made.name, made.identity)
    code = f"import pickle; print(pickle.loads({pickle.dumps(made)!r})('f:1', dict(a=1)))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[{'a': 1}, {'a': 1}]"


def test_identity(module):
    """Its identity is its source file: equal while the file is, different once it is not."""
    first = load_preprocess("user_rows:twice").identity
    assert first == load_preprocess("user_rows:twice").identity != load_preprocess("user_rows:nothing").identity
    module.write_text(MODULE + "# changed\n")
    del sys.modules["user_rows"]
    assert first != load_preprocess("user_rows:twice").identity


def test_what_has_no_identity():
    """A lambda, a closure, a partial or an object has state that no file holds: such a store is never reused."""
    limit = 3

    class Cut:
        def __call__(self, row):
            return row

    def closure(row):
        return row if limit else None

    for function in (lambda row: row, closure, functools.partial(dict, a=1), Cut()):
        made = load_preprocess(function)
        assert made.identity is None
        assert made("f:1", {"text": "a"})[0]["text"] == "a"


def test_a_function_that_was_made():
    """Defaults of a made function may hold state: two of one factory differ, and no file distinguishes them."""

    def made_with(limit):
        def first(row, limit=limit):
            return row if limit else None

        return first

    assert load_preprocess(made_with(1)).identity is None
    assert load_preprocess(made_with).identity is not None


def test_a_function():
    """A function given as such has the identity of its file."""
    made = load_preprocess(test_a_function)
    assert made.identity is not None
    assert made.name.endswith(".test_a_function")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "broken",
            r"f:7: preprocess user_rows:broken raised KeyError: 'absent' \(user_rows.py:12\); correct the function or the row",
        ),
        ("wrong", "f:7: preprocess user_rows:wrong returned the string 'text'; it must return a row"),
    ],
)
def test_faults(module, name, expected):
    """Errors within it name the row, the function and its line."""
    with pytest.raises(DataError, match=expected):
        load_preprocess(f"user_rows:{name}")("f:7", {"text": "a"})


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_interrupted(stop):
    """What is no error of the row passes through."""

    def function(row):
        raise stop

    with pytest.raises(stop):
        load_preprocess(function)("f:1", {})


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("user_rows", "`preprocess` is 'user_rows'; name a function as 'package.module:function'"),
        ("user_rows:", "name a function as"),
        ("user rows:x", "name a function as"),
        ("no_such_module:x", "`preprocess` is 'no_such_module:x', but no_such_module cannot be imported: ModuleNotFoundError"),
        ("user_exits:x", "user_exits cannot be imported: SystemExit: 0; looked on sys.path"),
        ("user_rows:absent", "user_rows has no 'absent'; its functions: broken, nothing, twice, wrong"),
        ("user_rows:LIMIT", "`preprocess` is 'user_rows:LIMIT', which is int 3 and not a function"),
        (7, "`preprocess` is int 7; give a function or its name"),
    ],
)
def test_no_function(module, spec, expected):
    """A name without a function is refused, with the functions that there are."""
    with pytest.raises(DataError, match=expected):
        load_preprocess(spec)
