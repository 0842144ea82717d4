"""Workers started, watched and ended; their own exceptions in the launcher."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from forge_dist import ExportError, LaunchError, LaunchSettings, StallError, WorkerError, launch, topology

from ...lanes import ci_keeps

pytestmark = pytest.mark.slow

# A worker that needs no torch, so that ten launches cost seconds.
WORKER = """
import ctypes, os, signal, sys, time
from pathlib import Path
from forge_dist import ExportError, WorkerError, beat, signal_that_came, worker_report
from forge_dist.ranks._failure_report import beats_of_launcher, failure_report
from forge_dist.watching._beats import open_beats

here, what = Path(sys.argv[1]), sys.argv[2]
rank = int(os.environ["RANK"])
print("rank", rank, "of", os.environ["WORLD_SIZE"], "threads", os.environ["OMP_NUM_THREADS"])
print("to stderr", rank, file=sys.stderr)
# Both are here before either does what the test is about.
(here / f"here_{rank}").touch()
while not (here / "here_0").exists() or not (here / "here_1").exists():
    time.sleep(0.01)
signals, came = [], []
with worker_report():
    if what == "signals":
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda n, _: (signals.append(n), came.append(signal_that_came(n))))
        (here / f"ready_{rank}").write_text(str(os.getpid()))
        while len(signals) < 2:
            time.sleep(0.02)
        (here / f"got_{rank}").write_text(" ".join(map(str, signals)))
        (here / f"came_{rank}").write_text(" ".join(signal.Signals(number).name for number in came))
        time.sleep(1)
        sys.exit(75)
    if what == "orphan":
        (here / f"ready_{rank}").write_text(str(os.getpid()))
        time.sleep(120)
    if what == "ignore":
        # As a worker that hangs in a collective: it does not end by being asked.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(120)
    if what == "hangs":
        # Rank 0 in native code that holds Python's lock, rank 1 as in a collective: no handler runs in either.
        (here / f"ready_{rank}").write_text(str(os.getpid()))
        lock = ctypes.create_string_buffer(64)
        while True:
            ctypes.PyDLL(None).pthread_mutex_lock(lock)
    if what in ("stalls", "stalls once") and not (what == "stalls once" and (here / "stalled").exists()):
        open_beats(beats_of_launcher(), 2.0)
        for step in range(4):
            beat(step)
            time.sleep(0.1)
        if rank == 1:
            (here / "stalled").touch()
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(120)
    if what == "again" and not (here / "failed").exists():
        (here / "failed").touch()
        raise RuntimeError("the first time")
    if rank == 1:
        if what == "own":
            (here / "raised").touch()
            raise ExportError("no space left")
        if what == "told":
            error = WorkerError("rank 0 on here ended: ExportError: its disk is full")
            error.cause = failure_report(ExportError("its disk is full"), rank=0, host="here")
            raise error
        if what == "stranger":
            class Stranger(Exception):
                pass
            raise Stranger("who am I")
        if what == "exit":
            sys.exit(3)
        if what == "gone":
            os._exit(9)
        if what == "left":
            os._exit(0)
        if what == "75":
            sys.exit(75)
        if what == "echo":
            sys.exit(0)
    elif what == "own":
        while not (here / "raised").exists():
            time.sleep(0.001)
        # What follows from rank 1's end must not hide it.
        raise RuntimeError("Connection closed by peer [127.0.0.1]:1234")
    elif what == "told":
        # It is ended before it reported what rank 1 was told.
        time.sleep(120)
    elif what in ("stranger", "exit", "gone", "left"):
        time.sleep(120)
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """`run(what, processes=2)`: launch the worker; returns the status."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    (tmp_path / "worker.py").write_text(WORKER)

    def go(what, **settings):
        here = topology(LaunchSettings(nproc_per_node=2, **settings), environ={}, cores=6)
        return launch(here, [str(tmp_path / "worker.py"), str(tmp_path), what], log_dir=tmp_path / "logs")

    return go


def test_output_is_kept_and_that_of_rank_0_is_shown(run, tmp_path, capfd):
    """Every rank's output lies in its log, appended by the next run; rank 0's, and only that, also comes out here; cores are
    divided.
    """
    assert run("echo") == 0
    out, err = capfd.readouterr()
    assert (out, err) == ("rank 0 of 2 threads 3\n", "to stderr 0\n")
    assert sorted((tmp_path / "logs" / "rank_1.log").read_text().splitlines()) == ["rank 1 of 2 threads 3", "to stderr 1"]
    assert run("echo") == 0
    for rank in range(2):
        assert len((tmp_path / "logs" / f"rank_{rank}.log").read_text().splitlines()) == 4
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["rank_0.log", "rank_1.log"]


def test_a_ranks_own_exception_is_raised(run):
    """The class, the message with rank and host, the exit status, and the worker's traceback; though
    rank 0 fails in its wake.
    """
    with pytest.raises(ExportError) as caught:
        run("own")
    assert str(caught.value) == f"no space left (rank 1 on {os.uname().nodename})"
    assert caught.value.exit_status == 1
    assert 'raise ExportError("no space left")' in "".join(caught.value.__notes__)


def test_what_rank_0_told_is_raised_where_it_cannot_report(run):
    """Rank 1 ends first, because of rank 0's error, and rank 0 is ended before it wrote that: the error is rank 0's own."""
    with pytest.raises(ExportError) as caught:
        run("told")
    assert str(caught.value) == "its disk is full (rank 0 on here)"
    assert caught.value.exit_status == 1


def test_an_exception_of_an_unknown_class(run):
    """A class that the launcher cannot find is named in a WorkerError."""
    with pytest.raises(WorkerError, match=r"^rank 1 on \S+ ended: Stranger: who am I\n"):
        run("stranger")


def test_an_exit_status_is_kept(run):
    """sys.exit(3) in a worker is a WorkerError whose exit status is 3."""
    with pytest.raises(WorkerError, match="rank 1 on .* left with exit status 3") as caught:
        run("exit")
    assert caught.value.exit_status == 3


def test_an_end_without_a_report(run, tmp_path):
    """A worker that ends without a report is named with its status and its log, whose last lines are quoted."""
    with pytest.raises(WorkerError, match="rank 1 on .* ended with exit status 9") as caught:
        run("gone")
    assert str(tmp_path / "logs" / "rank_1.log") in str(caught.value)
    assert str(caught.value).endswith("\nThe log ends with:\nrank 1 of 2 threads 3\nto stderr 1")


def test_a_rank_that_leaves_with_status_0_has_failed(run):
    """os._exit(0) looks to torch's agent like a rank that finished: it is named, and the other does not wait for it."""
    with pytest.raises(WorkerError, match=r"rank 1 on \S+ ended with exit status 0 before its work was done") as caught:
        run("left")
    assert caught.value.exit_status == 1


def test_a_killed_rank_is_named_within_seconds(run, tmp_path):
    """SIGKILL of a rank is named as such, and a rank that hangs on does not hold its launcher up for torch's thirty seconds."""
    with pytest.raises(WorkerError, match="rank 1 on .* was killed by SIGKILL; out of memory"):
        run("ignore")
    # From the moment when both had started, which takes as long as the machine has other work.
    assert time.time() - max((tmp_path / f"here_{rank}").stat().st_mtime for rank in range(2)) < 25


def test_status_75_is_no_failure(run):
    """A worker that leaves with 75 makes launch() return 75, and is not started again."""
    assert run("75", max_restarts=2) == 75


def test_restarts(run, tmp_path):
    """With max_restarts the processes are started again, and only a failure that is left at the end counts."""
    assert run("again", max_restarts=1) == 0
    assert (tmp_path / "logs" / "rank_0.log").read_text().count("rank 0 of 2") == 2


def wait_for(*paths):
    end = time.monotonic() + 180
    while not all(path.exists() and path.read_text() for path in paths):
        assert time.monotonic() < end, f"{paths} did not appear"
        time.sleep(0.02)


def sent(run, tmp_path, *signals):
    """Run workers that note their signals, and send the launcher these in order; return the status."""

    def send():
        wait_for(tmp_path / "ready_0", tmp_path / "ready_1")
        for number in signals:
            os.kill(os.getpid(), number)
            time.sleep(0.3)

    thread = threading.Thread(target=send)
    thread.start()
    status = run("signals")
    thread.join()
    return status


def test_signals_are_passed_on(run, tmp_path):
    """SIGTERM, then SIGINT, reach every worker in this order; nobody is killed, and the status is the workers'."""
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    assert sent(run, tmp_path, signal.SIGTERM, signal.SIGINT) == 75
    expected = f"{int(signal.SIGTERM)} {int(signal.SIGINT)}"
    assert [(tmp_path / f"got_{rank}").read_text() for rank in range(2)] == [expected, expected]
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_a_closed_terminal_is_one_sigterm(run, tmp_path):
    """SIGHUP reaches the workers as a SIGTERM, and a second one, which the kernel sends after the shell's, asks for no more.
    Nor does SIGUSR1, which is another name of it.
    """
    assert sent(run, tmp_path, signal.SIGHUP, signal.SIGHUP, signal.SIGUSR1, signal.SIGINT) == 75
    assert (tmp_path / "got_0").read_text() == f"{int(signal.SIGTERM)} {int(signal.SIGINT)}"
    assert [(tmp_path / f"came_{rank}").read_text() for rank in range(2)] == ["SIGHUP SIGINT"] * 2


def test_a_signal_before_the_workers_listen(run, tmp_path):
    """Workers that die of the signal itself have nothing to save: that is a preemption too."""

    def send():
        wait_for(tmp_path / "ready_0", tmp_path / "ready_1")
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=send)
    thread.start()
    assert run("orphan") == 75
    thread.join()


def test_a_second_signal_ends_workers_that_do_not_hear_it(run, tmp_path):
    """Both hang in native code for good: they are killed seconds after the second signal, and not started again."""
    second = []

    def send():
        wait_for(tmp_path / "ready_0", tmp_path / "ready_1")
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.3)
        second.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=send)
    thread.start()
    assert run("hangs", max_restarts=3) == 75
    # Four seconds, and what a machine adds that has much else to do.
    assert time.monotonic() - second[0] < 60
    thread.join()
    assert (tmp_path / "logs" / "rank_0.log").read_text().count("rank 0 of 2") == 1


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_a_rank_that_stands_still_is_ended(run, tmp_path, capfd):
    """SIGSTOP of a rank: a word, an error that names it, the stacks of both; nobody lives on."""
    with pytest.raises(StallError) as caught:
        run("stalls")
    host = os.uname().nodename
    assert str(caught.value).startswith(f"rank 1 on {host} has not moved since step 3 for ")
    assert "its process is stopped (SIGSTOP) at " in str(caught.value)
    assert f"The stacks of all ranks: {tmp_path / 'logs'}/stacks_rank_*.txt" in str(caught.value)
    assert caught.value.exit_status == 1
    assert "forge: rank 1 has not moved since step 3 (1 s): its process is stopped (SIGSTOP)" in capfd.readouterr().err
    for rank in range(2):
        assert "worker.py" in (tmp_path / "logs" / f"stacks_rank_{rank}.txt").read_text()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_a_rank_that_stood_still_is_started_again(run, tmp_path):
    """With max_restarts a stall is a failure like any other."""
    assert run("stalls once", max_restarts=1) == 0
    assert (tmp_path / "logs" / "rank_0.log").read_text().count("rank 0 of 2") == 2


# SIGTERM in the middle of the launcher's imports, whose exception is lost there as it is in an import that native code makes.
LOST = """
import signal, sys
from importlib.abc import MetaPathFinder
from pathlib import Path
from forge_dist import LaunchSettings, launch, topology

here, what = Path(sys.argv[1]), sys.argv[2]

class Asked(KeyboardInterrupt):
    pass

def end(*_):
    print("asked", flush=True)
    if what == "raises":
        raise Asked

class Midway(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == sys.argv[3]:
            try:
                signal.raise_signal(signal.SIGTERM)
            except BaseException:
                pass

sys.meta_path.insert(0, Midway())
signal.signal(signal.SIGTERM, end)
command = ["-c", f"open({str(here / 'started')!r}, 'w')"]
try:
    print(launch(topology(LaunchSettings(nproc_per_node=2), environ={}), command, log_dir=here / "logs"))
except Asked:
    print("raised")
print(signal.getsignal(signal.SIGTERM) is end)
"""


@pytest.mark.parametrize(
    ("module", "what", "outcome"),
    ci_keeps(
        [("torch._C", "raises", "raised"), ("torch.distributed.elastic.agent.server.local_elastic_agent", "notes", "75")],
        [
            (module, *handler)
            for module in ("torch._C", "torch.distributed.elastic.agent.server.local_elastic_agent")
            for handler in (("raises", "raised"), ("notes", "75"))
        ],
    ),
)
def test_a_signal_amid_the_imports_ends_the_launch(tmp_path, module, what, outcome):
    """SIGTERM while torch is imported: its handler is called behind the imports, nothing is started, and it is put back."""
    command = [sys.executable, "-c", LOST, str(tmp_path), what, module]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["asked", outcome, "True"]
    assert list(tmp_path.iterdir()) == []


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
@pytest.mark.parametrize("how", ["orphan", "hangs", "stopped"])
def test_workers_do_not_outlive_their_launcher(how, tmp_path):
    """kill -9 of the launcher: its workers are gone within seconds, without anybody telling them; also those in which no
    thread of Python runs any more, in native code that holds its lock or stopped.
    """
    what = "hangs" if how == "hangs" else "orphan"
    (tmp_path / "worker.py").write_text(WORKER)
    code = (
        "import sys; from pathlib import Path; from forge_dist import *; here = Path(sys.argv[1]);"
        " launch(topology(LaunchSettings(nproc_per_node=2), environ={}), [str(here / 'worker.py'), str(here), sys.argv[2]], "
        "log_dir=here)"
    )
    launcher = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path), what], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        wait_for(tmp_path / "ready_0", tmp_path / "ready_1")
        pids = [int((tmp_path / f"ready_{rank}").read_text()) for rank in range(2)]
        if how == "hangs":
            time.sleep(0.5)
        elif how == "stopped":
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
    finally:
        launcher.kill()
        launcher.wait()
    # Seconds, and what a machine adds that has much else to do; by themselves they would stay for two minutes, or for good.
    end = time.monotonic() + 60
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    survivors = [pid for pid in pids if alive(pid)]
    for pid in survivors:
        os.kill(pid, signal.SIGKILL)
    assert not survivors


def test_nodes_that_do_not_meet(tmp_path):
    """What the rendezvous says reaches the caller, and nothing is started."""
    here = LaunchSettings(nnodes=2, node_rank=1, master_addr="127.0.0.1", master_port=1, connect_seconds=1.0)
    with pytest.raises(LaunchError, match="node 1 did not reach node 0 at 127.0.0.1:1 within 1 s"):
        launch(topology(here, environ={}), ["-c", f"open({str(tmp_path / 'started')!r}, 'w')"], log_dir=tmp_path / "logs")
    assert not (tmp_path / "started").exists()


def test_only_a_launcher_launches(tmp_path):
    """A single process's topology is refused."""
    with pytest.raises(LaunchError, match="is single"):
        launch(topology(LaunchSettings(), environ={}), ["-c", ""], log_dir=tmp_path)
