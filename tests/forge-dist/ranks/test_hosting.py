"""The store of a run listens where its ranks are."""

import resource
import socket
import sys
from pathlib import Path

import pytest

from forge_dist.ranks import _hosting
from forge_dist.ranks._hosting import host_store

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/net")


def listening(port):
    """The addresses on which this port is open, in hexadecimal as the kernel writes them."""
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            address, _, number = local.partition(":")
            if state == "0A" and int(number, 16) == port:
                found.append(address)
    return found


@linux
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_one_node_listens_on_the_loopback_alone(host):
    """All interfaces were open: whoever reached the machine could speak in the run's name."""
    store = host_store(host, 0, alone=True, ranks=2)
    assert listening(store.port) == ["0100007F"] or listening(store.port) == ["00000000000000000000000001000000"]
    store.set("a", "b")
    with socket.create_connection((host, store.port), timeout=10):
        pass


@linux
def test_several_nodes_listen_everywhere():
    """The others may know node 0 by an address that is none of its own."""
    store = host_store("127.0.0.1", 0, alone=False, ranks=2)
    assert all(set(address) == {"0"} for address in listening(store.port))
    assert listening(store.port)


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_an_address_that_is_not_here(host, monkeypatch):
    """An address behind which this machine stands, and a name that is known elsewhere alone, still give a store."""
    assert _hosting._listening(host, 0) is None


def test_a_port_that_is_taken():
    """The system's reason passes: a launcher makes a sentence of it."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(OSError, match="in use"):
            host_store("127.0.0.1", other.getsockname()[1], alone=True, ranks=2)


def test_a_thousand_ranks_find_room(monkeypatch):
    """A connection is an open file, of which a process may have 1,024 at first: the limit is raised as far as it may be."""
    asked = []
    monkeypatch.setattr(_hosting.resource, "getrlimit", lambda _: (1024, 4096))
    monkeypatch.setattr(_hosting.resource, "setrlimit", lambda _, limits: asked.append(limits))
    _hosting._allow_files(500)
    assert asked == []
    _hosting._allow_files(2304)
    _hosting._allow_files(10**6)
    assert asked == [(2304, 4096), (4096, 4096)]
    monkeypatch.setattr(_hosting.resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    _hosting._allow_files(10**6)
    assert len(asked) == 2
