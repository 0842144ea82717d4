"""SIGKILL at every file operation of a save, and at random moments: what is found afterwards is whole."""

import gc
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

import pytest

from ...lanes import ci_keeps

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")]
KEEP = 2


def tensors(step):
    import torch

    return {"w": torch.arange(300.0) * step, "half": torch.full((7, 5), step).bfloat16(), "step": torch.tensor(step)}


def prepare(root):
    """Two full states, and what an earlier kill left."""
    checkpoints = opened(root)
    checkpoints.newest({}, print)
    for step in (1, 2):
        checkpoints.save(step, tensors(step), {"step": step}, wait=True)
    for name in (".step_3.0a1b2c3d.tmp", ".step_1.0a1b2c3d.pruned", ".step_2.0a1b2c3d.replaced"):
        (root / name).mkdir()
        (root / name / "rank_0.safetensors").write_text("half")


def opened(root):
    from forge_dist import Checkpoints

    from ..alone import Alone

    return Checkpoints(root, Alone(), keep=KEEP, background=True)


def life(root, tell):
    """The run that is killed: start, save two steps and one of them again, which deletes and replaces older ones.

    `tell` is called with each step that is finished.
    """
    checkpoints = opened(root)
    found = checkpoints.newest({}, print)
    first = found.step + 1
    for step in (first, first + 1, first + 1):
        checkpoints.save(step, tensors(step), {"step": step}, wait=True)
        tell(step)


def check_whole(root, at_least):
    """The newest full state is whole, with the values of its step, and not older than what was finished.

    The others are whole too, and nothing hidden is left.
    """
    import torch

    message = []
    found = opened(root).newest({}, message.append)
    assert message == [], message
    assert found.step >= at_least, (found.step, at_least)
    expected = tensors(found.step)
    into = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    found.read(into)
    assert found.about == {"step": found.step}
    assert all(torch.equal(into[name], tensor) for name, tensor in expected.items())
    kept = [opened(root).at(path, {}).step for path in root.glob("step_*")]
    assert found.step in kept
    assert [path.name for path in root.iterdir() if path.name.startswith(".")] == []
    return found.step


def die_at(count):
    """Let the `count`th operation on files, of whatever thread, kill this process; blocks are written in small parts."""
    from forge_dist.checkpoints import _write as _checkpoint_write

    _checkpoint_write._BLOCK = 512
    left = [count]
    watched = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.scandir", "os.listdir"}

    def hook(event, _args):
        if event in watched:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    real = os.fsync

    def sync(descriptor):
        hook("os.remove", ())
        real(descriptor)
        hook("os.remove", ())

    os.fsync = sync


def one(root, count, delay):
    """Fork a run that is killed at the `count`th operation, or after `delay` seconds.

    Returns whether it was, and the last step that it had finished.
    """
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if count is not None:
                die_at(count)
            life(root, lambda step: os.write(theirs, f"{step}\n".encode()))
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    os.close(theirs)
    if delay is not None:
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL), status
    with os.fdopen(ours) as pipe:
        return status != 0, max(map(int, pipe), default=0)


def drive(scratch, stride, number):
    """Kills at each `stride`th operation and at `number` random moments, in a process that has no threads.

    Prints how many there were, and which steps were found.
    """
    template = Path(scratch) / "template"
    prepare(template)
    # What is forked goes through none of what was imported, and copies no page of it.
    gc.collect()
    gc.freeze()
    found, chosen, at_random = [], 0, 0
    root = Path(scratch) / "full_state"
    killed = True
    while killed:
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(template, root)
        killed, finished = one(root, chosen * stride + 1, None)
        found.append(check_whole(root, max(2, finished)))
        chosen += killed
    # The same directory all the time: what one kill left is what the next run meets.
    began = time.monotonic()
    life(root, print)
    seconds = time.monotonic() - began
    draw, step = random.Random(0), check_whole(root, 2)
    for attempt in range(300):
        # On a machine whose speed changes, many a run is over before its moment comes: such a one proves nothing and is not
        # counted.
        if at_random == number and attempt >= 2 * number:
            break
        killed, finished = one(root, None, draw.uniform(0, seconds))
        at_random += killed
        step = check_whole(root, max(step, finished))
    life(root, print)
    assert len(list(root.glob("step_*"))) == KEEP, "what kills left over is not thrown away by the save after them"
    print(json.dumps({"chosen": chosen, "random": at_random, "found": found, "last": step}))


@pytest.fixture
def scratch(tmp_path):
    """A folder in memory where the system has one: a SIGKILL loses nothing written, and a disk's fsyncs take minutes."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Path(folder)


@pytest.mark.parametrize(("stride", "number"), ci_keeps([(7, 5)], [(7, 5), (1, 15)]))
def test_a_kill_leaves_a_whole_one(scratch, stride, number):
    """A run that tidies up, saves, replaces and deletes is killed at its file operations, then at random moments.

    Each time on what the last one left: the newest is whole every time, never older than the one before, nothing accumulates.
    """
    here = Path(__file__)
    code = (
        "import importlib, sys, types\n"
        "package = types.ModuleType('tested'); package.__path__ = [sys.argv[1]]; sys.modules['tested'] = package\n"
        "importlib.import_module('tested.forge-dist.checkpoints.' + sys.argv[2]).drive(sys.argv[3], *map(int, sys.argv[4:]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(here.parents[2]), here.stem, str(scratch), str(stride), str(number)],
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["chosen"] >= 60 // stride, report
    assert report["random"] >= number, report
    # Kills before the first commit find the old one, later ones the new ones.
    assert set(report["found"]) == {2, 3, 4}, report
    assert report["last"] > 4, report
