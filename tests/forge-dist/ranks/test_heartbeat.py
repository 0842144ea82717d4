"""A host that is gone is noticed, and one that is only slow is not."""

import ctypes
import json
import os
import signal
import threading
import time
from types import SimpleNamespace

import attrs
import pytest
import torch.distributed as dist

from forge_dist.environment._topology import Topology
from forge_dist.ranks import _heartbeat
from forge_dist.ranks._failure_report import failure_report
from forge_dist.ranks._heartbeat import Heartbeat
from forge_dist.ranks._messages import Messages
from forge_dist.ranks._store import publish_failure

from ...lanes import ci_keeps
from ...ranks import run_on_ranks


def hosts(folder, limit, **more):
    """Environments of ranks that take themselves for one on each of several hosts, and report into `folder`."""

    def environ(rank):
        return {
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "GROUP_RANK": str(rank),
            "GROUP_WORLD_SIZE": "3",
            "TORCHELASTIC_ERROR_FILE": str(folder / f"{rank}.json"),
            "FORGE_HEARTBEAT_INTERVAL": "0.2",
            "FORGE_HEARTBEAT_LIMIT": str(limit),
            "FORGE_HEARTBEAT_GRACE": "0.5",
            **more,
        }

    return environ


def report(folder, rank):
    return json.loads((folder / f"{rank}.json").read_text())["forge"]


def fall_silent(ranks, who):
    if ranks.rank == who:
        time.sleep(0.5)
        # Stopped, not killed: nothing is sent, as over a cut link.
        os.kill(os.getpid(), signal.SIGSTOP)
    while True:
        ranks.barrier()


@pytest.mark.slow
@pytest.mark.parametrize("who", ci_keeps([2], [0, 2]))
def test_a_silent_host_is_named_by_the_others(who, tmp_path):
    """A host that says nothing for the limit ends all others, which wait in a collective, with a report that names it."""
    with pytest.raises(RuntimeError, match="ended with status 1"):
        run_on_ranks(fall_silent, 3, who, environ=hosts(tmp_path, 2.5))
    for rank in {0, 1, 2} - {who}:
        message = report(tmp_path, rank)
        assert message["class"] == "WorkerError"
        assert f"(rank {who}) was not heard of for" in message["text"]


def test_a_first_rank_that_never_beat(monkeypatch):
    """One that was gone before its first beat is waited for as long as ranks wait for each other, and then named."""
    store = Messages(dist.HashStore(), "secret", "forge")
    monkeypatch.setattr(_heartbeat, "connect_store", lambda *_, **__: store)
    topology = Topology(role="worker", rank=1, world_size=2, local_rank=1, local_world_size=2, connect_seconds=60.0)
    beat = Heartbeat(topology, "host")
    monkeypatch.setattr(beat, "_clock", SimpleNamespace(seconds=80.0))
    assert beat._read_pulse() == ("", True)
    beat._clock.seconds = 91.0
    assert beat._read_pulse() == ("rank 0 was not heard of for 91 s: it died, or the network between the hosts is cut", True)
    store.set("pulse", json.dumps([1, "first", "", 0, False]))
    assert beat._read_pulse() == ("", False)


def test_a_rank_of_many_hears_of_a_failure_from_the_pulse(monkeypatch):
    """It asks for the failure once rank 0's pulse says that there is one, or stands still; rank 0 looks at each beat."""
    store, ended = dist.HashStore(), {}
    monkeypatch.setattr(_heartbeat, "connect_store", lambda *_, **__: Messages(store, "secret", "forge"))
    topology = Topology(role="worker", world_size=512, max_nodes=64, local_world_size=8)
    places = {0: (0, 0), 300: (37, 4), 304: (38, 0)}
    beats = {
        rank: Heartbeat(attrs.evolve(topology, rank=rank, node_rank=node, local_rank=local), "host")
        for rank, (node, local) in places.items()
    }
    for rank, beat in beats.items():
        monkeypatch.setattr(beat, "_exit_process", lambda reason, failure=None, rank=rank: ended.update({rank: reason}))
        monkeypatch.setattr(beat, "_clock", SimpleNamespace(seconds=1.0))
        beat._grace = 0.0
        beat._exchange(1)
    publish_failure(beats[300].store, failure_report(FloatingPointError("not finite"), rank=7, host="other"))
    for rank in (300, 304):
        beats[rank]._counts[-1] = (0, 0.0)  # as if they had not seen the pulse that is there
        beats[rank]._exchange(2)
    assert not ended, "they trust a pulse that moves"
    for rank in (300, 304):
        beats[rank]._clock.seconds = 2.0
        beats[rank]._exchange(3)
    assert set(ended) == {300, 304}, "they ask when it does not"
    ended.clear()
    beats[0]._exchange(4)
    beats[300]._exchange(4)
    assert set(ended) == {0, 300}
    assert all(reason == "rank 7 on other ended: FloatingPointError: not finite" for reason in ended.values())


def test_a_stopped_heartbeat_has_left_the_store(monkeypatch):
    """No thread is in a call of the store when `stop` returns: an interpreter that ended then ended with SIGABRT."""
    asked = threading.Event()

    class SlowMessages(Messages):
        def set(self, key, text):
            asked.set()
            time.sleep(0.5)
            super().set(key, text)

    monkeypatch.setattr(_heartbeat, "connect_store", lambda *_, **__: SlowMessages(dist.HashStore(), "secret", "forge"))
    beat = Heartbeat(Topology(role="worker", rank=0, world_size=1, local_rank=0, local_world_size=1), "host")
    beat.start()
    assert asked.wait(10)
    beat.stop()
    assert not [thread for thread in beat._threads if thread.is_alive()]


def be_slow(ranks):
    if ranks.rank == 0:
        # PyDLL keeps Python's lock: no thread of this process runs meanwhile.
        ctypes.PyDLL(None).usleep(2_500_000)
    ranks.barrier()
    if ranks.rank == 1:
        # Swapped out: another process wakes it again.
        if os.fork() == 0:
            time.sleep(2.5)
            os.kill(os.getppid(), signal.SIGCONT)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGSTOP)
    ranks.barrier()
    return True


@pytest.mark.slow
def test_a_slow_rank_is_left_alone(tmp_path):
    """A rank that misses a dozen beats, because it is busy or stopped, does not end anybody within the limit."""
    # Four times as long as it is slow: what a machine adds that has much else to do is not the rank's silence.
    assert run_on_ranks(be_slow, 3, environ=hosts(tmp_path, 10.0)) == [True] * 3


def fail_beside_a_hang(ranks):
    if ranks.rank == 1:
        raise FloatingPointError("step 3 is not finite")
    time.sleep(600)


@pytest.mark.slow
def test_another_ranks_failure_ends_a_rank_that_hangs(tmp_path):
    """A rank whose collective never returns hears of the failure elsewhere, and reports it as the cause."""
    with pytest.raises(FloatingPointError, match="step 3 is not finite"):
        run_on_ranks(fail_beside_a_hang, 2, environ=hosts(tmp_path, 30.0))
    message = report(tmp_path, 0)
    assert "rank 1 on" in message["text"]
    assert "FloatingPointError: step 3 is not finite" in message["text"]
    assert message["consequence"]
    assert message["cause"]["class"] == "FloatingPointError"
