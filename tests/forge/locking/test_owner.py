"""The record of an owner, and what proves that it is gone."""

from __future__ import annotations

import os
import subprocess
import sys

import attrs
import pytest

from forge.locking import _owner
from forge.locking._owner import Owner


@pytest.fixture
def me() -> Owner:
    """This process."""
    return Owner.here("token", 60.0)


def test_a_record_reads_back_and_keeps_its_length(me: Owner) -> None:
    """Renewals change digits alone, so that a record is written over in place and never torn."""
    texts = [
        attrs.evolve(me, host="rück\x1b[31m", renewals=count, renewed="2026-11-23 16:50:03").to_bytes() for count in (1, 10**9)
    ]
    assert Owner.read(texts[1]) == attrs.evolve(me, host="rück\x1b[31m", renewals=10**9, renewed="2026-11-23 16:50:03")
    assert len(texts[0]) == len(texts[1])


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"null", b"{}", b"\xff\xfe", b'{"token": 1}'])
def test_what_is_no_record(text: bytes) -> None:
    """A file that a kill left half written, or anybody else wrote, is no owner."""
    assert Owner.read(text) is None


def test_wrong_types_are_no_record(me: Owner) -> None:
    """A number where text belongs, or a truth where a number does, is not read."""
    for name, value in (("pid", True), ("pid", "1"), ("host", None), ("lease", "60")):
        fields = attrs.asdict(me) | {name: value}
        assert Owner.read(_owner.json.dumps(fields).encode()) is None


def test_a_living_process_is_not_gone(me: Owner) -> None:
    """This process, and one that /proc may hide, live."""
    assert not me.is_gone
    assert not attrs.evolve(me, pid=1, started=0).is_gone


def test_a_dead_process_is_gone(me: Owner) -> None:
    """One that ended, also before its parent asked for its status; and one whose number another process has now."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    dead = attrs.evolve(me, pid=child.pid, started=0)
    assert dead.is_gone, "a zombie writes nothing"
    child.wait()
    assert dead.is_gone
    if me.started:
        assert attrs.evolve(me, started=me.started - 1).is_gone, "started at another time: another process"
    assert attrs.evolve(me, pid=2**40).is_gone


@pytest.mark.parametrize("space", ["", "another boot pid:[1]"])
def test_nothing_is_proved_of_another_host(space: str, me: Owner) -> None:
    """The numbers of another boot, another namespace or an unknown place say nothing here."""
    assert not attrs.evolve(me, space=space, pid=2**40).is_gone


def test_a_hidden_process_is_not_gone(me: Owner, monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    """Where /proc shows no processes of others, the system is asked whether there is one."""
    space = _owner.space_here()
    monkeypatch.setattr(_owner, "_PROC", tmp_path)
    assert me.space == space
    assert not me.is_gone


def test_a_hostile_name_does_not_reach_a_terminal(me: Owner) -> None:
    """What somebody else wrote is shown in printable signs, and not at any length."""
    shown = str(attrs.evolve(me, host="\x1b[2J\n" + "x" * 500, renewed="\x07"))
    assert shown.isprintable()
    assert len(shown) < 300
