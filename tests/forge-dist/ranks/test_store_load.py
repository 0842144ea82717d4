"""How much a thousand ranks ask of one store, counted on the calls that they make."""

import attrs
import pytest
import torch.distributed as dist

from forge_dist.environment._topology import Topology
from forge_dist.launching import _rendezvous
from forge_dist.ranks import _heartbeat
from forge_dist.ranks._first import run_on_first
from forge_dist.ranks._heartbeat import Heartbeat, beat_seconds
from forge_dist.ranks._messages import Messages
from forge_dist.ranks._relay import Relay, relays

BUDGET = 200.0


@pytest.mark.parametrize(
    ("nodes", "ranks"),
    [
        (1, 2),
        (1, 8),
        (8, 64),
        (64, 64),
        (9, 72),
        (36, 108),
        (26, 104),
        (36, 288),
        (37, 296),
        (64, 512),
        (128, 1024),
        (1024, 1024),
    ],
)
def test_all_heartbeats_of_a_run_together(nodes, ranks, monkeypatch):
    """At most 200 requests a second, of every rank's own count and its own pause; a silence is noticed after four beats."""
    store = dist.HashStore()
    monkeypatch.setattr(_heartbeat, "connect_store", lambda *_, **__: Messages(store, "secret", "forge"))
    local = ranks // nodes
    topology = Topology(role="worker", world_size=ranks, max_nodes=nodes, local_world_size=local, node_rank=0)
    beats = [
        Heartbeat(attrs.evolve(topology, rank=rank, local_rank=rank % local, node_rank=rank // local), "host")
        for rank in range(ranks)
    ]
    for count in (1, 2):  # first the ranks find each other
        for beat in [*beats[1:], beats[0]]:
            beat._exchange(count)
    rate = 0.0
    for beat in beats:
        before = beat.store.requests
        beat._exchange(3)
        rate += (beat.store.requests - before) / beat._interval
        assert beat._limit >= 4 * beat._interval
    # Of many ranks a third is left for what they ask when rank 0 is done with something.
    assert rate <= (140.0 if ranks > 64 else BUDGET)
    if ranks <= 64 and nodes <= 8:
        assert {beat._interval for beat in beats} == {2.0}
        assert {beat._limit for beat in beats} == {30.0}


@pytest.mark.parametrize(("nodes", "ranks"), [(1, 8), (8, 64), (13, 104), (64, 512), (128, 1024)])
def test_all_ranks_that_wait_for_rank_0(nodes, ranks, monkeypatch):
    """At most 200 requests once it is done, and as many when they begin to wait: of many ranks the first of each node asks."""
    # What the others ask of it is counted in test_relay.py, over sockets.
    monkeypatch.setattr(Relay, "_host", lambda relay: (relay._run.over(dist.HashStore()), 1))
    store, local = dist.HashStore(), ranks // nodes
    topology = Topology(role="worker", world_size=ranks, max_nodes=nodes, local_world_size=local, node_known=True)
    relayed = relays(topology)
    asking = [rank for rank in range(ranks) if not (relayed and rank % local)]
    messages = {rank: Messages(store, "secret", "forge") for rank in asking}
    places = {
        rank: Relay(each, attrs.evolve(topology, rank=rank, node_rank=rank // local)) if relayed else each
        for rank, each in messages.items()
    }
    before = sum(each.requests for each in messages.values())
    values = [run_on_first(places[rank], "first/1", lambda: 7, rank=rank, host="host") for rank in asking]
    assert values == [7] * len(asking)
    # One of two of each rank is sent when it begins to wait.
    assert (sum(each.requests for each in messages.values()) - before) / 2 <= BUDGET


def test_nodes_that_wait_for_each_other(monkeypatch):
    """Launchers that wait for a late node look less often the more they are."""
    looks = []

    class Late:
        requests = 0

        def has(self, key):
            self.requests += 1
            return key != "missing" and (key != "node/127" or len(looks) > 2)

        @property
        def store(self):
            return self

        def wait(self, keys, timeout):
            looks.append((keys, timeout.total_seconds()))

    topology = Topology(role="launcher", max_nodes=128, nproc_per_node=8, world_size=1024, node_rank=3)
    waiting = _rendezvous._StaticRendezvous(topology, "secret")
    store = Late()
    waiting._wait_for_all(store, end=float("inf"))
    assert {tuple(keys) for keys, _ in looks} == {("node/127",)}, "one node is waited for, not each of 128"
    requests, seconds = store.requests - 127, sum(seconds for _, seconds in looks)
    # A wait that runs out is two requests, of which one is counted above.
    assert 128 * (requests + len(looks)) / seconds <= BUDGET


def test_pauses_grow_with_the_run():
    """A small run beats every two seconds; nobody is slower than what its share of the requests asks for."""
    assert beat_seconds(1, 8, leads=True, least=2.0) == 2.0
    assert beat_seconds(1, 8, leads=False, least=0.2) == 0.2
    pauses = [beat_seconds(ranks // 8, ranks, leads=False, least=2.0) for ranks in (8, 64, 128, 512, 1024)]
    assert pauses == sorted(pauses)
