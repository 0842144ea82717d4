"""Rank 0's word, which the first rank of a node hands on to the others."""

import json
import os
import re
import signal
import threading
import time

import attrs
import pytest
import torch
import torch.distributed as dist

from forge_dist import LaunchSettings, MeetingError, WorkerError, join, topology
from forge_dist.environment._topology import Topology
from forge_dist.ranks import _relay
from forge_dist.ranks._first import run_on_first
from forge_dist.ranks._messages import Messages
from forge_dist.ranks._relay import Relay, leave_run, relays

from ...lanes import ci_keeps
from ...ranks import run_on_ranks


@pytest.fixture
def server():
    """The store of a run."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def messages(server):
    """A connection of its own to the run's store."""
    return Messages(dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False), "secret", "forge/1")


def topology_of(rank, local=2, ranks=4):
    return Topology(
        node_known=True,
        role="worker",
        rank=rank,
        world_size=ranks,
        local_rank=rank % local,
        local_world_size=local,
        node_rank=rank // local,
        max_nodes=ranks // local,
        connect_seconds=5.0,
    )


def opened(server, local=2, ranks=4):
    """The relays of all ranks, by rank."""
    return [Relay(messages(server), topology_of(rank, local, ranks)) for rank in range(ranks)]


def in_thread(function, *arguments):
    """Begin to call a function; its thread, and what it returned or raised."""
    found = []

    def call():
        try:
            found.append(function(*arguments))
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread, found


def first(relay, rank, function, key="first/1"):
    return run_on_first(relay, key, function, rank=rank, host="host")


def test_only_the_first_rank_of_a_node_asks_the_runs_store(server):
    """A value, and an error of rank 0, reach every rank that waits; only the first of a node asks the run's store."""
    made = opened(server)
    before = [each._run.requests for each in made]
    waiting = [in_thread(first, made[rank], rank, None) for rank in (1, 2, 3)]
    time.sleep(0.3)
    assert not any(found for _, found in waiting)
    assert first(made[0], 0, lambda: {"made": "ü"}) == {"made": "ü"}
    for thread, found in waiting:
        thread.join(30)
        assert found == [{"made": "ü"}]
    assert [each._run.requests - asked for each, asked in zip(made, before, strict=True)] == [1, 0, 2, 0]
    waiting = [in_thread(first, made[rank], rank, None, "first/2") for rank in (1, 2, 3)]
    with pytest.raises(ZeroDivisionError):
        first(made[0], 0, lambda: 1 / 0, "first/2")
    for thread, (error,) in [(thread.join(30), found) for thread, found in waiting]:
        assert thread is None
        assert isinstance(error, WorkerError)
        assert str(error) == "rank 0 on host ended: ZeroDivisionError: division by zero"
        assert error.cause["class"] == "ZeroDivisionError"


def test_the_first_rank_of_a_node_ends_while_the_others_wait(server):
    """They ask the run's store from then on, and miss nothing."""
    made = opened(server)
    thread, found = in_thread(first, made[3], 3, None)
    time.sleep(0.3)
    made[2].close()
    first(made[0], 0, lambda: 7)
    thread.join(30)
    assert found == [7]
    first(made[0], 0, lambda: 8, "first/2")
    asked = made[3]._run.requests
    assert first(made[3], 3, None, "first/2") == 8
    assert made[3]._run.requests - asked == _relay.REQUESTS_OF_A_MESSAGE


def test_the_runs_store_ends_while_ranks_wait():
    """Nobody waits for a word that nobody can send any more: the first rank of a node leaves, and the others see it gone."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    made = {rank: Relay(messages(server), topology_of(rank)) for rank in (2, 3)}
    waiting = [in_thread(first, made[rank], rank, None) for rank in (2, 3)]
    time.sleep(0.3)
    del server
    for rank, (thread, found) in zip((2, 3), waiting, strict=True):
        thread.join(30)
        assert isinstance(found[0], dist.DistNetworkError)
        made[rank].close()


def all_leave(made):
    """Let all relays but rank 0's leave, which wait; then rank 0's, upon which all are gone."""
    leaving = [in_thread(relay.leave) for relay in made[1:]]
    time.sleep(0.5)
    assert not any(found for _, found in leaving)
    made[0].leave()
    for thread, found in leaving:
        thread.join(30)
        assert found == [None]


def test_nobody_leaves_before_all_do(server):
    """The first rank of a node counts for the others: two requests of each node, and the last one's word reaches all."""
    made = opened(server)
    before = [each._run.requests for each in made]
    all_leave(made)
    assert [each._run.requests - asked for each, asked in zip(made, before, strict=True)] == [2, 0, 2, 0]


@pytest.mark.parametrize("when", ["from the beginning", "before it leaves", "while it waits"])
def test_ranks_that_do_without_the_first_of_their_node_leave_with_all(when, server, monkeypatch):
    """Each counts for itself, and the first rank, which looks for them now and then, for the others."""
    monkeypatch.setattr(_relay, "_LOOK_SECONDS", 0.2)
    if when == "from the beginning":
        monkeypatch.setattr(_relay, "_CONNECT_SECONDS", 0.0)
        monkeypatch.setattr(_relay, "unreachable", lambda *_: "no way")
    made = [Relay(messages(server), topology_of(rank, 4, 8)) for rank in (0, 1, 2, 3, 4)]
    monkeypatch.undo()
    monkeypatch.setattr(_relay, "_LOOK_SECONDS", 0.2)
    made += [Relay(messages(server), topology_of(rank, 4, 8)) for rank in (5, 6, 7)]

    def closed(*_):
        raise dist.DistNetworkError("closed")

    if when == "before it leaves":
        monkeypatch.setattr(made[6]._node, "count", closed)
    if when == "while it waits":
        monkeypatch.setattr(made[6]._node, "receive", closed)
        made[0].set("first/1", '{"value": 7}')
        assert first(made[6], 6, None) == 7
    all_leave(made)


@pytest.mark.parametrize("how", ["cannot listen", "elsewhere", "closed", "late"])
def test_a_node_without_a_store_of_its_own(how, server, monkeypatch):
    """Where its first rank cannot listen, or cannot be reached, every rank asks the run's store."""
    monkeypatch.setattr(_relay, "_CONNECT_SECONDS", 0.5)
    monkeypatch.setattr(_relay, "_LOOK_SECONDS", 0.2)
    topology = attrs.evolve(topology_of(3), connect_seconds=1.0)
    if how == "cannot listen":

        def refused(*_, **__):
            raise OSError("no port")

        monkeypatch.setattr(_relay, "host_store", refused)
    if how != "late":
        leader = Relay(messages(server), topology_of(2))
    if how == "elsewhere":  # a port of this network where another run's store listens
        other = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        other.set("forge/1/relay/1", "0" * 32 + str(other.port))
        leader._run.set("relay/1", str(other.port))
    if how == "closed":
        leader.close()
    relay = Relay(messages(server), topology)
    Relay(messages(server), topology_of(0)).set("first/1", '{"value": 1}')
    assert first(relay, 3, None) == 1
    assert relay._node is None
    if how != "late":
        leaving = [in_thread(each.leave) for each in (leader, relay)]
        leave_run(messages(server), topology, 2)
        for thread, found in leaving:
            thread.join(30)
            assert found == [None]


def test_a_message_of_somebody_else_is_none(server):
    """On a node's store as on the run's."""
    leader, other = (Relay(messages(server), topology_of(rank)) for rank in (2, 3))
    leader._node.store.set("first/1", "0" * 32 + '{"value": 1}')
    with pytest.raises(MeetingError, match="was not written by this run"):
        other.receive("first/1")


def test_which_runs_have_relays():
    """Those whose ranks would ask more than 200 times at once, where a node has several of them."""
    assert not relays(topology_of(0, 2, 100))
    assert relays(topology_of(0, 2, 102))
    assert relays(topology_of(0, 8, 1024))
    assert not relays(topology_of(0, 1, 1024))


def two_nodes(folder, **more):
    """Environments of four ranks that take themselves for two on each of two hosts, and report into `folder`."""
    return lambda rank: {
        "LOCAL_RANK": str(rank % 2),
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": str(rank // 2),
        "GROUP_WORLD_SIZE": "2",
        "TORCHELASTIC_ERROR_FILE": str(folder / f"{rank}.json"),
        "FORGE_HEARTBEAT_INTERVAL": "0.2",
        **more,
    }


def run_of_many(folder, stopped):
    """Be a rank of a run that counts as one of many: a value, an error of rank 0, or a rank that is stopped, and the end."""
    _relay.BUDGET = 1
    with join(topology(LaunchSettings())) as ranks:
        assert isinstance(ranks._relay, Relay)
        own, first_of_node = ranks.rank, ranks.local_rank == 0
        before = ranks._store.requests
        assert ranks.first(lambda: {"made by": own}) == {"made by": 0}
        if stopped is None:  # heartbeats of a short limit ask in between on a busy machine
            assert ranks._store.requests - before == (1 if own == 0 else 2 * first_of_node)
        if own == stopped:
            while not ranks._store.has("pulse", "beat/0", "beat/1"):
                time.sleep(0.05)  # a host that was never heard of is waited for longer
            os.kill(os.getpid(), signal.SIGSTOP)
        if stopped is not None:
            ranks.first(lambda: time.sleep(600))
        ranks.connect("gloo", torch.device("cpu"))
        assert ranks.sum([1.0]) == [4.0]
        try:
            ranks.first(lambda: 1 / 0)
        except (ZeroDivisionError, WorkerError) as error:
            (folder / f"said_{own}").write_text(f"{type(error).__name__}: {error}")
        assert ranks.first(lambda: own) == 0
    return True


@pytest.mark.slow
def test_a_run_with_a_store_on_each_node(tmp_path):
    """Values and errors of rank 0 reach every rank, before the process group and after; all leave together."""
    assert run_on_ranks(run_of_many, 4, tmp_path, None, environ=two_nodes(tmp_path), joined=False) == [True] * 4
    said = [(tmp_path / f"said_{rank}").read_text() for rank in range(4)]
    assert said[0] == "ZeroDivisionError: division by zero"
    for text in said[1:]:
        assert text.startswith("WorkerError: rank 0 on ")
        assert text.endswith("ended: ZeroDivisionError: division by zero")


@pytest.mark.slow
@pytest.mark.parametrize("stopped", ci_keeps([0], [0, 2]))
def test_a_silent_host_while_its_word_is_waited_for(stopped, tmp_path):
    """Rank 0, or the rank that hands its word on, says nothing more: the others end in the time of a silence, by name."""
    environ = two_nodes(tmp_path, FORGE_HEARTBEAT_LIMIT="2.5", FORGE_HEARTBEAT_GRACE="0.5")
    with pytest.raises(RuntimeError, match="ended with status 1"):
        run_on_ranks(run_of_many, 4, tmp_path, stopped, environ=environ, joined=False)
    # Who is still leaving when the first has left is ended by the test.
    reports = [file for rank in {0, 1, 2, 3} - {stopped} if (file := tmp_path / f"{rank}.json").is_file()]
    assert reports
    for report in reports:
        message = json.loads(report.read_text())["forge"]
        assert message["class"] == "WorkerError"
        # Whoever waits for rank 0's store rather than for its pulse says so.
        assert re.search(rf"rank {stopped}\)? was not heard of for", message["text"])


@pytest.mark.parametrize("missing", [None, "GROUP_RANK", "LOCAL_WORLD_SIZE"])
def test_ranks_whose_launcher_names_no_node_ask_for_themselves(missing):
    """mpirun and DeepSpeed's launcher leave it to be computed, which is wrong where ranks lie on nodes in another order."""
    environ = {"RANK": "130", "WORLD_SIZE": "256", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "8", "GROUP_RANK": "16"}
    environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    environ.pop(missing, None)
    assert relays(topology(LaunchSettings(), environ=environ)) == (missing is None)
