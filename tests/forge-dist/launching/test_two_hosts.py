"""Two hosts with a network between them, made of network namespaces: PET_* variables are all they get."""

import os
import re
import shutil
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.slow

LAUNCHER = """
import sys
from pathlib import Path
from forge_dist import LaunchSettings, launch, topology

here = Path(sys.argv[1])
t = topology(LaunchSettings(connect_seconds=60))
try:
    print("status", launch(t, [str(here / "worker.py"), *sys.argv[1:]], log_dir=here / f"logs_{t.node_rank}"))
except Exception as error:
    print("RAISED", type(error).__name__, error)
"""
WORKER = """
import sys, time
from pathlib import Path
import torch
from forge_dist import LaunchSettings, join, topology, worker_report

here, mode = Path(sys.argv[1]), sys.argv[2]
with worker_report(), join(topology(LaunchSettings())) as ranks:
    value = ranks.first(lambda: {"from": ranks.rank})
    ranks.connect("gloo", torch.device("cpu"))
    print("answers", value, ranks.sum([ranks.rank + 1.0]), ranks.gather(ranks.node_rank))
    if mode == "raise" and ranks.rank == 3:
        raise ArithmeticError("on the other host")
    if mode == "once" and not (here / "failed").exists():
        if ranks.rank == 3:
            (here / "failed").touch()
            raise ArithmeticError("the first time")
        mode = "go"
    step = 0
    while mode not in ("end", "once"):
        step += 1
        ranks.sum([step])
        if step == 5 and ranks.is_first:
            (here / "running").touch()
"""


def ip(*words):
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=False)


def reason_to_skip():
    if shutil.which("ip") is None or not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "network namespaces need root and the ip command"
    name = f"forge-try-{os.getpid()}"
    made = ip("netns", "add", name)
    ip("netns", "del", name)
    return made.stderr.strip() if made.returncode else ""


@pytest.fixture
def two_hosts():
    """Two namespaces, joined by a cable; yields their names and the name of the cable's end in each."""
    why = reason_to_skip()
    if why:
        pytest.skip(why)
    tag = str(os.getpid())
    names, ends = [f"forge-a-{tag}", f"forge-b-{tag}"], [f"fa{tag}", f"fb{tag}"]
    try:
        for name in names:
            assert ip("netns", "add", name).returncode == 0
        made = ip("link", "add", ends[0], "netns", names[0], "type", "veth", "peer", "name", ends[1], "netns", names[1])
        if made.returncode:
            pytest.skip(f"no veth: {made.stderr.strip()}")
        for number, (name, end) in enumerate(zip(names, ends, strict=True), 1):
            ip("-n", name, "addr", "add", f"10.213.7.{number}/24", "dev", end)
            ip("-n", name, "link", "set", end, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names, ends
    finally:
        for name in names:
            ip("netns", "del", name)


def start(names, folder, mode, **more):
    (folder / "worker.py").write_text(WORKER)
    (folder / "launcher.py").write_text(LAUNCHER)
    nodes = []
    for node_rank, name in enumerate(names):
        environ = {
            **{key: value for key, value in os.environ.items() if not key.startswith(("PET_", "GLOO_"))},
            "PET_NNODES": "2",
            "PET_NPROC_PER_NODE": "2",
            "PET_NODE_RANK": str(node_rank),
            "PET_MASTER_ADDR": "10.213.7.1",
            "PET_MASTER_PORT": "29500",
            "OMP_NUM_THREADS": "1",
            **more,
        }
        command = ["ip", "netns", "exec", name, sys.executable, str(folder / "launcher.py"), str(folder), mode]
        nodes.append(subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True))
    return nodes


def finish(nodes, timeout):
    try:
        return [node.communicate(timeout=timeout)[0] for node in nodes]
    finally:
        for node in nodes:
            if node.poll() is None:
                node.kill()
                node.communicate()


@pytest.mark.lane
def test_two_hosts_meet_and_add(two_hosts, tmp_path):
    """Four ranks on two hosts find each other over the cable, and rank 0's output comes out of its host only."""
    names, _ = two_hosts
    message = finish(start(names, tmp_path, "end"), 120)
    answers = "answers {'from': 0} [10.0] [0, 0, 1, 1]\n"
    assert message == [answers + "status 0\n", "status 0\n"]
    for node, rank in ((0, 1), (1, 2), (1, 3)):
        assert answers in (tmp_path / f"logs_{node}" / f"rank_{rank}.log").read_text()


def test_a_failure_on_the_other_host_is_raised_on_both(two_hosts, tmp_path):
    """The exception of rank 3 is what both launchers raise, with its rank, though one of them only saw connections close."""
    names, _ = two_hosts
    for message in finish(start(names, tmp_path, "raise"), 120):
        assert "RAISED ArithmeticError on the other host (rank 3 on " in message


@pytest.mark.lane
def test_the_ranks_of_all_hosts_are_started_again(two_hosts, tmp_path):
    """With max_restarts a failure on one host starts the ranks of both again, which meet once more and end well."""
    names, _ = two_hosts
    message = finish(start(names, tmp_path, "once", PET_MAX_RESTARTS="1"), 240)
    answers = "answers {'from': 0} [10.0] [0, 0, 1, 1]\n"
    assert message == [2 * answers + "status 0\n", "status 0\n"]


@pytest.mark.lane
def test_a_cut_cable_ends_both_sides(two_hosts, tmp_path):
    """Nothing arrives any more, not even an end: both launchers end by themselves and say who was not heard of."""
    names, ends = two_hosts
    nodes = start(names, tmp_path, "go", FORGE_HEARTBEAT_INTERVAL="0.5", FORGE_HEARTBEAT_LIMIT="6")
    end = time.monotonic() + 90
    while not (tmp_path / "running").exists() and time.monotonic() < end:
        time.sleep(0.1)
    # A few beats, so that both sides know each other's names.
    time.sleep(2)
    ip("-n", names[0], "link", "set", ends[0], "down")
    cut = time.monotonic()
    first, second = finish(nodes, 60)
    assert (tmp_path / "running").exists()
    # 6 s of silence here, 30 s in earnest, and then at most half a minute.
    assert time.monotonic() - cut < 36
    assert "RAISED WorkerError" in first
    assert "(rank 2) was not heard of for" in first
    assert "RAISED WorkerError" in second
    assert re.search(r"rank 0\)? was not heard of for", second)
    assert "10.213.7.1:29500" in second
