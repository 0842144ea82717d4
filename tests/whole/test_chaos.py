"""A few of the random faults of `hatch run chaos`, and what they are drawn from."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from multiprocessing import forkserver

import pytest

from ..ranks import run_on_ranks
from .chaos import KINDS, WAYS, Fault, Ground, draw, section, table


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Ground:
    """Model, rows and undisturbed runs."""
    return Ground(tmp_path_factory.mktemp("chaos"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(Fault("single", "single", "kill at a file", "file", 60, 0, "none", 2, 11), marks=pytest.mark.lane),
        pytest.param(Fault("single", "single", "full disk", "file", 49, 0, "none", 1, 12), marks=pytest.mark.lane),
        Fault("single", "single", "flipped byte", "exporting", 3, 0, "none", 0, 13),
        pytest.param(Fault("ddp x2", "fsdp2 x2", "kill", "backward", 7, 1, "lora", 0, 14), marks=pytest.mark.lane),
        pytest.param(Fault("fsdp2 x2", "single", "cut link", "optimizer", 3, 1, "none", 1, 15), marks=pytest.mark.lane),
    ],
    ids=str,
)
def test_the_same_command_ends_it_as_if_nothing_had_been(fault: Fault, ground: Ground) -> None:
    """Struck, started again, and compared with a run that nothing struck."""
    found = ground.case(fault)
    assert not found["failed"], found["says"]


def test_every_kind_is_drawn() -> None:
    """Of 200 cases each kind strikes often, every way of ranks is there on both sides, and the same seed draws the same."""
    drawn = [draw(7, number) for number in range(200)]
    assert drawn == [draw(7, number) for number in range(200)]
    assert min(Counter(fault.kind for fault in drawn)[kind] for kind in KINDS) >= 28
    assert {fault.way for fault in drawn} == set(WAYS)
    assert {WAYS[fault.again][1] for fault in drawn if fault.way != fault.again} == {1, 2, 3, 4}
    assert sum(WAYS[fault.way][1] > 2 for fault in drawn) > 50
    assert all(fault.rank < WAYS[fault.way][1] for fault in drawn)
    assert sum(fault.way != fault.again for fault in drawn) > 20


def test_the_table() -> None:
    """Each kind has a row with what its cases came to; a failure is counted."""
    results = [
        {"kind": "kill", "outcome": "bit-equal", "failed": False},
        {"kind": "kill", "outcome": "within 1e-5", "failed": False},
        {"kind": "stop", "outcome": "failed", "failed": True},
    ]
    lines = table(results).splitlines()
    assert "| kill | 2 | 1 | 1 | 0 | 0 |" in lines
    assert "| stop | 1 | 0 | 0 | 0 | 1 |" in lines
    assert section({"origin": "Written by.", "results": results}).endswith(table(results))


def killed() -> None:
    """Kill this process."""
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_cases_at_once_do_not_take_each_others_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start in another thread reaps every process that ended: whoever waits for one still gets its own status."""
    read, others = forkserver.read_signed, []

    def interrupted(descriptor: int) -> int:
        # The first answer is the new process's number, the second the status of the one that was killed.
        reads.append(descriptor)
        if len(reads) == 2:
            others.append(threading.Thread(target=run_on_ranks, args=(os.getpid, 1), kwargs={"joined": False}))
            others[0].start()
            others[0].join(1.0)
        return read(descriptor)

    reads: list[int] = []
    monkeypatch.setattr(forkserver, "read_signed", interrupted)
    with pytest.raises(RuntimeError, match="rank 0 ended with status -9 and without a result"):
        run_on_ranks(killed, 1, joined=False)
    others[0].join()
