"""What the host still has is read from the kernel, and from the container's limit."""

import pytest

from forge_dist import _host_memory
from forge_dist._host_memory import available_bytes, room_for

MEMINFO = "MemTotal: 1000 kB\nMemFree: 10 kB\nMemAvailable: 400 kB\n"


@pytest.fixture
def host(tmp_path, monkeypatch):
    """Write what the kernel would say: `host(name=text)`."""
    monkeypatch.setattr(_host_memory, "_PROC", tmp_path)
    monkeypatch.setattr(_host_memory, "_GROUP", tmp_path)

    def write(**files):
        for name, text in files.items():
            (tmp_path / name.replace("__", ".")).write_text(text)

    return write


def test_the_smaller_one_counts(host):
    """Without a limit what the kernel calls available; with one what it leaves, page cache counted as free."""
    assert available_bytes() is None
    assert room_for(10**18)
    host(meminfo=MEMINFO)
    assert available_bytes() == 400 * 1024
    host(memory__max="max\n", memory__current="5\n")
    assert available_bytes() == 400 * 1024
    host(memory__max="300000\n", memory__current="200000\n", memory__stat="anon 1\nfile 50000\n")
    assert available_bytes() == 150_000
    host(memory__max="9000000\n")
    assert available_bytes() == 400 * 1024


def test_a_tenth_stays_free(host):
    """Processes that share the host ask for as much each."""
    host(meminfo="MemAvailable: 1000 kB\n")
    assert room_for(900 * 1024)
    assert not room_for(930 * 1024)
    assert room_for(450 * 1024, sharing=2)
    assert not room_for(450 * 1024, sharing=3)


def test_this_machine():
    """This machine has room for a kilobyte, and none for an exabyte where it says what it has."""
    assert room_for(1024)
    assert available_bytes() is None or not room_for(2**60)
