"""Ranks that know each other, and what they tell each other."""

import json
import math
import socket
import time

import pytest
import torch

from forge_dist import ExportError, LaunchError, LaunchSettings, WorkerError, join, topology
from forge_dist.ranks._agreement import disagreement

from ...ranks import run_on_ranks

ODD = torch.tensor([-0.0, math.inf, math.pi, 1e-45]), torch.tensor([2**53 + 1, -1]), torch.zeros(3, dtype=torch.bfloat16)


def rows_of(n):
    """Rows of several types and shapes: n of them, and of one type none on rank 0; a NaN whose bits are its own."""
    nan = torch.tensor([0x7FC01234], dtype=torch.int32).view(torch.float32)
    return [*(each.repeat(n + 1, 1) + n for each in ODD), nan, torch.zeros(n, 2, 3), torch.zeros(0, 5), torch.zeros(n, 0)]


def bits_of(rows):
    return rows.dtype, tuple(rows.shape), rows.contiguous().view(torch.uint8).tolist() if rows.numel() else []


def talk(ranks, extra):
    n = ranks.rank
    reported = {
        "who": (n, ranks.world_size, ranks.local_rank, ranks.local_world_size, ranks.is_first),
        "sum": ranks.sum([n + 1, 0.5, 2.0**53 if n == 0 else 1.0]),
        "odd": [math.isnan(x) for x in ranks.sum([math.nan if n == 1 else 1.0, 1.0])],
        "inf": ranks.sum([math.inf, math.inf if n else -math.inf]),
        "nothing": ranks.sum([]),
        "any": (ranks.any(n == 2), ranks.any(False)),
        "gather": ranks.gather({"rank": n, "text": "ü" * n}),
        "empty": ranks.gather(None),
        "rows": [[bits_of(part) for part in ranks.gather_rows(rows)] for rows in rows_of(n)],
        "broadcast": ranks.broadcast([n, extra]),
        # Short and long values, of different lengths on each rank.
        "collect": ranks.collect({"rank": n, "text": "ü" * n * 1000}),
        "scatter": ranks.scatter([f"é{rank}" * (1 + 2000 * rank) for rank in range(3)] if n == 0 else ["ignored"]),
        # Sums that depend on the order of addition, in float64.
        "order": ranks.sum([[1e16, 1.0, -1e16][n]]),
        "first": [ranks.first(lambda: {"made by": n}), ranks.first(lambda: n)],
    }
    group = ranks.checkpoint_group()
    assert group is ranks.checkpoint_group()
    assert group is not ranks.group
    tensor = torch.tensor([float(n)])
    torch.distributed.all_reduce(tensor, group=group)
    reported["checkpoint group"] = tensor.item()
    ranks.agree({"data": "ab", "settings": "cd"})
    try:
        ranks.agree({"data": "ab", "settings": "ef" if n == 1 else "cd"})
    except LaunchError as error:
        reported["disagree"] = str(error)
    try:
        ranks.connect("gloo", torch.device("cpu"))
    except LaunchError as error:
        reported["twice"] = str(error)
    return reported


@pytest.mark.slow
def test_what_ranks_exchange():
    """Sums are exact and equal in every bit on every rank; values travel as JSON; disagreement is reported alike on all."""
    answers = run_on_ranks(talk, 3, "x")
    assert [answer.pop("who") for answer in answers] == [(0, 3, 0, 3, True), (1, 3, 1, 3, False), (2, 3, 2, 3, False)]
    for rank, answer in enumerate(answers):
        collected = [{"rank": n, "text": "ü" * n * 1000} for n in range(3)]
        assert answer.pop("collect") == (collected if rank == 0 else None)
        assert answer.pop("scatter") == f"é{rank}" * (1 + 2000 * rank)
        endless, neither = answer.pop("inf")
        assert endless == math.inf
        assert math.isnan(neither)
    assert answers[0] == answers[1] == answers[2]
    reported = answers[0]
    assert reported["sum"] == [6.0, 1.5, 2.0**53 + 2]
    assert reported["odd"] == [True, False]
    assert reported["nothing"] == []
    assert reported["any"] == (True, False)
    assert reported["gather"] == [{"rank": n, "text": "ü" * n} for n in range(3)]
    assert reported["empty"] == [None] * 3
    assert reported["rows"] == [[bits_of(rows_of(n)[kind]) for n in range(3)] for kind in range(len(rows_of(0)))]
    assert reported["broadcast"] == [0, "x"]
    assert reported["order"] == [1.0]
    assert reported["first"] == [{"made by": 0}, 0]
    assert reported["checkpoint group"] == 3.0
    assert "settings is cd on ranks 0, 2 and ef on rank 1" in reported["disagree"]
    assert "data" not in reported["disagree"].split("settings")[0]
    assert "connected already" in reported["twice"]


def first_fails(ranks, folder):
    ranks.explain = lambda error: ExportError(f"{type(error).__name__}: {error}: divide by another number")
    try:
        if ranks.is_first:
            ranks.first(lambda: 1 / 0)
        ranks.first(lambda: None)
    except (ZeroDivisionError, WorkerError) as error:
        cause = getattr(error, "cause", None)
        (folder / str(ranks.rank)).write_text(json.dumps([type(error).__name__, str(error), time.monotonic(), cause]))
        # What a run does next: it ends.
        raise


@pytest.mark.slow
def test_the_first_ranks_failure_reaches_the_others(tmp_path):
    """Rank 0's own exception is raised on rank 0, and a WorkerError on the others, at once: it names what explains that."""
    with pytest.raises((ZeroDivisionError, WorkerError)):
        run_on_ranks(first_fails, 3, tmp_path)
    reported = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(3)]
    assert reported[0][0] == "ZeroDivisionError"
    for name, text, when, cause in reported[1:]:
        assert name == "WorkerError"
        assert text.startswith("rank 0 on ")
        assert text.endswith("ended: ExportError: ZeroDivisionError: division by zero: divide by another number")
        assert (cause["class"], cause["rank"], cause["exit_status"]) == ("ExportError", 0, 1)
        # At once: a rank that waits for what never comes does so for minutes.
        assert when - reported[0][2] < 60


def fail(ranks):
    if ranks.rank == 1:
        raise KeyError("me")
    ranks.barrier()


def wait_forever(ranks):
    time.sleep(600)


@pytest.mark.slow
def test_the_helper_raises_what_a_rank_raised():
    """run_on_ranks raises the first failing rank's exception with its traceback, and ends ranks that do not."""
    with pytest.raises(KeyError, match="me") as caught:
        run_on_ranks(fail, 2)
    assert 'raise KeyError("me")' in "".join(caught.value.__notes__)
    with pytest.raises(TimeoutError, match=r"ranks \[0, 1\] of 2 did not answer within 2 s"):
        run_on_ranks(wait_forever, 2, timeout=2)


def test_a_world_of_one_needs_nothing():
    """One process has the same calls, without a process group and before connect() or after."""
    with join(topology(LaunchSettings(), environ={})) as ranks:
        for _ in range(2):
            assert (ranks.rank, ranks.world_size, ranks.is_first, ranks.group, ranks.checkpoint_group()) == (
                0,
                1,
                True,
                None,
                None,
            )
            assert ranks.first(lambda: (1, 2)) == [1, 2]
            assert ranks.sum([1, 2.5]) == [1.0, 2.5]
            assert ranks.any(True)
            assert ranks.gather("x") == ["x"]
            assert ranks.broadcast({"a": None}) == {"a": None}
            ranks.barrier()
            ranks.agree({"data": "ab"})
            if _ == 0:
                ranks.connect("gloo", torch.device("cpu"))
        with pytest.raises(LaunchError, match="connected already"):
            ranks.connect("gloo", torch.device("cpu"))
        with pytest.raises(TypeError):
            ranks.first(object)
    assert not torch.distributed.is_initialized()


def test_a_launcher_is_no_rank():
    """Joining as a launcher is refused."""
    with pytest.raises(LaunchError, match="launcher is no rank"), join(topology(LaunchSettings(nproc_per_node=2), environ={})):
        pass


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def worker(port, seconds=1.0, rank=0):
    environ = {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    return topology(LaunchSettings(connect_seconds=seconds), environ=environ)


def test_nobody_at_the_meeting_place(monkeypatch):
    """A worker whose launcher's store is not there names the address, the time and what to check."""
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with pytest.raises(LaunchError, match=r"rank 1 did not reach .* 127.0.0.1:\d+ within 1 s .*check that node 0 is up"):
        join(worker(free_port(), rank=1)).__enter__()


def test_a_rank_that_does_not_come(monkeypatch):
    """Without a launcher's store rank 0 holds it; connect() says who is missing."""
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with pytest.raises(LaunchError, match="rank 1 of 2 did not come within 1 s"), join(worker(free_port())) as ranks:
        with pytest.raises(LaunchError, match="not connected yet"):
            ranks.sum([1.0])
        ranks.connect("gloo", torch.device("cpu"))


@pytest.mark.parametrize(
    ("digests", "message"),
    [
        ([{"a": "1"}, {"a": "1"}], ""),
        ([{}, {}], ""),
        ([{"a": "1"}, {}], "a is 1 on rank 0 and missing on rank 1"),
        ([{"a": str(n)} for n in range(2)] + [{"a": "1"}] * 12, "1 on ranks 1, 2, 3, 4, 5, 6, 7, 8 and 5 more"),
    ],
)
def test_disagreement(digests, message):
    """Nothing where all agree; otherwise each value with its ranks."""
    assert message in disagreement(digests)
    assert bool(disagreement(digests)) == bool(message)
