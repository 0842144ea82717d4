"""Launchers that meet, or say who did not come."""

import socket
import threading

import pytest

from forge_dist import LaunchError, LaunchSettings, topology
from forge_dist.launching import _rendezvous
from forge_dist.launching._rendezvous import make_rendezvous
from forge_dist.ranks._network import address_towards


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def meet(*nodes, nnodes=2, seconds=60.0):
    """Each node's launcher in a thread of its own; what each found or raised."""
    port, found = free_port(), {}

    def go(number, node):
        settings = {"nnodes": nnodes, "master_addr": "127.0.0.1", "master_port": port, "connect_seconds": seconds, **node}
        try:
            meeting = make_rendezvous(topology(LaunchSettings(**settings), environ={}))
            info = meeting.next_rendezvous()
            found[number] = (info.rank, info.world_size, meeting)
            together.wait(60)
        except LaunchError as error:
            found[number] = str(error)
            together.abort()
        except threading.BrokenBarrierError:
            pass

    together = threading.Barrier(len(nodes))
    threads = [threading.Thread(target=go, args=pair) for pair in enumerate(nodes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(180)
    return [found[number] for number in range(len(nodes))]


def test_nodes_meet():
    """Each node has its rank, all the same number of nodes and one name for the round."""
    found = meet({"node_rank": 2}, {"node_rank": 0}, {"node_rank": 1}, nnodes=3)
    assert [(rank, size) for rank, size, _ in found] == [(2, 3), (0, 3), (1, 3)]
    assert len({meeting.round for _, _, meeting in found}) == 1
    assert len({meeting.store_address for _, _, meeting in found}) == 1


def test_numbered_nodes_meet_at_an_endpoint():
    """rdzv_endpoint with node_rank on each: the ranks are those numbers, whichever node comes first."""
    endpoint = {"rdzv_endpoint": f"127.0.0.1:{free_port()}", "rdzv_id": "me", "master_addr": None, "master_port": None}
    found = meet({"node_rank": 1, **endpoint}, {"node_rank": 0, **endpoint})
    assert [(rank, size) for rank, size, _ in found] == [(1, 2), (0, 2)]


def test_a_restart_is_another_round():
    """Ranks that are started again do not read what the ones before them wrote."""
    meeting = make_rendezvous(topology(LaunchSettings(nproc_per_node=2), environ={}))
    rounds = []
    for _ in range(2):
        meeting.next_rendezvous()
        rounds.append((meeting.round, meeting.store_address))
    assert rounds[0][0] != rounds[1][0]
    assert rounds[0][1] == rounds[1][1]


@pytest.mark.slow
def test_who_did_not_come_is_named():
    """Both nodes that came say which one is missing, after how long, and what to check, though one would wait longer."""
    for message in meet({"node_rank": 0}, {"node_rank": 1, "connect_seconds": 60.0}, nnodes=3, seconds=4.0):
        assert "node 2 of 3 did not come to 127.0.0.1:" in message
        assert "within 4 s: check that they were started, with nnodes=3 and a node_rank of their own" in message


@pytest.mark.slow
def test_a_rank_that_is_taken():
    """Two nodes with one rank: the error names the other."""
    found = meet({"node_rank": 0}, {"node_rank": 1}, {"node_rank": 1}, nnodes=3, seconds=3.0)
    assert any("node_rank 1 is taken by" in str(message) and "each node needs its own" in str(message) for message in found[1:])


@pytest.mark.parametrize(
    ("second", "name"), [({"nproc_per_node": 2}, "nproc_per_node"), ({"nnodes": 2, "nproc_per_node": 1}, "")]
)
def test_nodes_that_do_not_fit(second, name):
    """Different numbers of processes are refused on both nodes, naming both numbers."""
    found = meet({"node_rank": 0, "nproc_per_node": 1}, {"node_rank": 1, **second})
    if not name:
        assert [rank for rank, _, _ in found] == [0, 1]
        return
    for message in found:
        assert f"{name}=1" in message
        assert f"{name}=2" in message


def test_nobody_is_there():
    """Node 1 names the address, the time, what it met and what to check; no name and no listener are distinguished."""
    port = free_port()
    cases = {
        "127.0.0.1": rf"node 1 did not reach node 0 at 127.0.0.1:{port} within 1 s \(Connection refused\): "
        "check that node 0 was started",
        "no-such-host.invalid": "the name no-such-host.invalid does not resolve here",
    }
    for host, message in cases.items():
        here = LaunchSettings(nnodes=2, node_rank=1, master_addr=host, master_port=port, connect_seconds=1.0)
        with pytest.raises(LaunchError, match=message):
            make_rendezvous(topology(here, environ={})).next_rendezvous()


def test_a_port_that_is_taken():
    """Node 0 says that it cannot listen, and what to do."""
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        other.listen()
        here = LaunchSettings(
            nnodes=2, node_rank=0, master_addr="127.0.0.1", master_port=other.getsockname()[1], connect_seconds=1.0
        )
        with pytest.raises(LaunchError, match="node 0 cannot listen on port .*set master_port"):
            make_rendezvous(topology(here, environ={})).next_rendezvous()


@pytest.mark.slow
def test_elastic_nodes_meet_and_are_missed():
    """An elastic run starts with the nodes that came, and says so where there were too few."""
    place = f"127.0.0.1:{free_port()}"
    alone = topology(LaunchSettings(nnodes="1:2", rdzv_endpoint=place, rdzv_id="a", connect_seconds=24.0), environ={})
    with pytest.raises(LaunchError, match="did not meet at .*rdzv_id"):
        few = topology(LaunchSettings(nnodes="2:3", rdzv_endpoint=place, rdzv_id="b", connect_seconds=1.0), environ={})
        make_rendezvous(few).next_rendezvous()
    meeting = make_rendezvous(alone)
    info = meeting.next_rendezvous()
    assert (info.rank, info.world_size, bool(meeting.round)) == (0, 1, True)
    meeting.shutdown()


@pytest.mark.parametrize(
    ("endpoint", "here"),
    [("127.0.0.1:29400", True), ("localhost:29400", True), ("192.0.2.1:29400", False), ("no-such-host.invalid:29400", False)],
)
def test_the_node_that_listens_knows_its_address(endpoint, here):
    """An endpoint at any address of this machine is listened at; one elsewhere, or without an address, is not."""
    assert _rendezvous._is_here(endpoint) is here


def test_the_address_by_which_others_reach_this_node():
    """It is that of the network that leads to the endpoint; None where nothing does."""
    assert address_towards("127.0.0.1", 1) == "127.0.0.1"
    assert address_towards("no-such-host.invalid", 1) is None
