"""A function of a test → what it returned on each of several connected ranks.

`run_on_ranks(function, 2, ...)` starts gloo ranks on this machine and calls `function(ranks, ...)` on each. Starting them costs
a second or two, so put many scenarios into one call. The function and its arguments are pickled: a module-level function, plain
arguments.
"""

import contextlib
import faulthandler
import importlib
import math
import multiprocessing
import multiprocessing.connection
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import pickle
import runpy
import sys
import threading
import time
import traceback
import types
import warnings
from multiprocessing import forkserver
from pathlib import Path

ROOT = Path(__file__).resolve().parent
PRELOAD = ["tests.preload"]
# How long the other ranks may take to end once one of them failed.
GRACE_SECONDS = 5.0

_context = None
# Starting a process reaps whichever children have ended, of all threads: two that read one status at once lose it.
_alone = threading.Lock()


def run_on_ranks(function, world_size, *args, timeout=480, environ=None, joined=True):
    """Call `function(ranks, *args)` on `world_size` gloo ranks, connected by `forge_dist.Ranks`; returns their results by rank.

    The exception of the rank that failed first is raised here, its traceback as a note. After `timeout` seconds every rank is
    killed and TimeoutError is raised. `environ` is added to each rank's environment; a callable is called with the rank. With
    `joined=False` the function is called as `function(*args)` in the environment of a rank, and joins the others by itself.
    """
    import torch.distributed as dist

    # Port 0: the system picks a free one, and it is taken from this moment on.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    work = pickle.dumps((function.__module__, function.__qualname__, args, joined))
    ours, processes = [], []
    try:
        for rank in range(world_size):
            here, there = _forkserver().Pipe(duplex=False)
            extra = environ(rank) if callable(environ) else environ or {}
            variables = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "LOCAL_WORLD_SIZE": str(world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "OMP_NUM_THREADS": "1",
                **extra,
            }
            process = _forkserver().Process(target=_child, args=(there, variables, work), daemon=True)
            with _alone:
                process.start()
            there.close()
            ours.append(here)
            processes.append(process)
        return _results(ours, processes, timeout)
    finally:
        for process in processes:
            if not _ended(process, 0):
                process.kill()
            _status(process)
            process.close()
        for here in ours:
            here.close()


def fork_server():
    """Make the server of ranks a fork of this process, where what tests import, seconds of work, is imported already.

    To be called before any test: once a backward pass ran, or threads were started, what is forked cannot train. Elsewhere than
    on Linux, and for whoever does not call this, the server is a new process that imports everything by itself.
    """
    torch = sys.modules.get("torch")
    # A process that has looked at an accelerator cannot be forked into one that uses it.
    if sys.platform != "linux" or _context is not None or torch is None or torch.accelerator.is_available():
        return
    # Before the server comes this small process, which stays one of its own.
    multiprocessing.resource_tracker.ensure_running()
    own = multiprocessing.util.spawnv_passfds
    multiprocessing.util.spawnv_passfds = _spawn_by_fork
    try:
        _forkserver()
    finally:
        multiprocessing.util.spawnv_passfds = own


def _spawn_by_fork(_python, command, descriptors):
    """In the place of the function that starts a new Python: its last argument, the code of the server, runs in a fork."""
    with warnings.catch_warnings():
        # Of the threads beside this one, which pytest-xdist has: they listen to the session and hold nothing that ranks use.
        warnings.simplefilter("ignore", DeprecationWarning)
        process = os.fork()
    if process:
        return process
    try:
        faulthandler.disable()
        _warn_as_python_does()
        # The server ends once nobody holds the other end of this pipe, which a new process would not have.
        _, alive = descriptors
        pipe = os.readlink(f"/proc/self/fd/{alive}")
        for other in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError):
                if other != alive and os.readlink(f"/proc/self/fd/{other}") == pipe:
                    os.close(other)
        # Of the parent: it is about to have a server, and holds a lock meanwhile.
        forkserver._forkserver.__init__()
        runpy.run_path(str(ROOT / "preload.py"))
        exec(command[-1], {})
    except SystemExit:
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def _warn_as_python_does():
    """Take back that warnings are errors, or kept for a report: a rank is a process as any other."""

    def show(message, category, filename, lineno, file=None, line=None):
        print(warnings.formatwarning(message, category, filename, lineno, line), file=file or sys.stderr, end="")

    warnings.showwarning = show
    warnings.resetwarnings()
    for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", category)


def _forkserver():
    """One server for the whole test session, from which ranks are forked with the heavy imports done."""
    global _context
    if _context is None:
        # What a child unpickles is found by the name of this module.
        if str(ROOT.parent) not in sys.path:
            sys.path.append(str(ROOT.parent))
        _context = multiprocessing.get_context("forkserver")
        _context.set_forkserver_preload(PRELOAD)
        before = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = "1"
        try:
            forkserver.ensure_running()
        finally:
            if before is None:
                del os.environ["OMP_NUM_THREADS"]
            else:
                os.environ["OMP_NUM_THREADS"] = before
    return _context


def _results(pipes, processes, timeout):
    """What each rank sent, in order; raises the failure that came first, and before one that follows from it its cause."""
    world_size = len(pipes)
    answers, failures = {}, []
    end = time.monotonic() + timeout
    while len(answers) + len(failures) < world_size:
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in answers and rank not in {f[1] for f in failures}]
        ready = multiprocessing.connection.wait(waiting, timeout=max(0.0, end - time.monotonic()))
        if not ready and failures:
            break
        if not ready:
            missing = sorted(set(range(world_size)) - set(answers))
            raise TimeoutError(f"ranks {missing} of {world_size} did not answer within {timeout} s")
        for pipe in ready:
            rank = pipes.index(pipe)
            try:
                kind, when, payload = pickle.loads(pipe.recv_bytes())
            except EOFError:
                status = _status(processes[rank])
                ended = RuntimeError(f"rank {rank} ended with status {status} and without a result")
                # Others may say that they lost a rank before its end is seen here: a signal came before what follows from it.
                failures.append((time.monotonic() if status >= 0 else -math.inf, rank, ended))
                kind = "ended"
            if kind == "result":
                answers[rank] = payload
            elif kind == "failure":
                failures.append((when, rank, _rebuilt(rank, payload)))
            if failures:
                end = min(end, time.monotonic() + GRACE_SECONDS)
    if failures:
        # As a launcher does: a rank that is told of another's failure may be heard before that one has cleaned up.
        raise min(failures, key=lambda failure: (getattr(failure[2], "cause", None) is not None, failure[0]))[2]
    for process in processes:
        _ended(process, GRACE_SECONDS)
    return [answers[rank] for rank in range(world_size)]


def _ended(process, seconds):
    """Whether a process ended within so many seconds."""
    return bool(multiprocessing.connection.wait([process.sentinel], timeout=seconds))


def _status(process):
    """Wait for the end of a process; its exit status."""
    _ended(process, None)
    with _alone:
        process.join()
        return process.exitcode


def _rebuilt(rank, payload):
    pickled, text = payload
    try:
        error = pickle.loads(pickled) if pickled is not None else RuntimeError(text.strip().splitlines()[-1])
    except Exception:
        error = RuntimeError(text.strip().splitlines()[-1])
    error.add_note(f"On rank {rank}:\n{text}")
    return error


def _child(pipe, variables, work):
    """In a rank's process: join the others, call the function, send its result."""
    os.environ.update(variables)
    _leave_with_parent()
    _name_packages()
    try:
        import torch

        import forge_dist

        torch.set_num_threads(1)
        module, name, args, joined = pickle.loads(work)
        function = importlib.import_module(module)
        for part in name.split("."):
            function = getattr(function, part)
        if joined:
            with forge_dist.join(forge_dist.topology(forge_dist.LaunchSettings())) as ranks:
                ranks.connect("gloo", torch.device("cpu"))
                message = pickle.dumps(("result", time.monotonic(), function(ranks, *args)))
                # Nobody leaves while another still talks to it.
                ranks.barrier()
        else:
            message = pickle.dumps(("result", time.monotonic(), function(*args)))
        pipe.send_bytes(message)
    except BaseException as error:
        text = traceback.format_exc()
        try:
            pickled = pickle.dumps(error)
            pickle.loads(pickled)
        except Exception:
            pickled = None
        with contextlib.suppress(OSError):
            pipe.send_bytes(pickle.dumps(("failure", time.monotonic(), (pickled, text))))
        # A rank that failed does not wait for threads, nor for collectives that nobody will answer.
        os._exit(1)
    finally:
        pipe.close()


def _leave_with_parent():
    """A test session that is killed leaves no ranks behind."""
    parent = multiprocessing.parent_process()

    def watch():
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _name_packages():
    """Make `tests.forge-dist.test_x` importable by the names that pytest's importlib mode gives, whatever lies on sys.path."""
    for name, folder in [("tests", ROOT)] + [
        (f"tests.{folder.name}", folder)
        for folder in ROOT.iterdir()
        if folder.is_dir() and not folder.name.startswith((".", "_"))
    ]:
        if name not in sys.modules:
            package = types.ModuleType(name)
            package.__path__ = [str(folder)]
            sys.modules[name] = package
