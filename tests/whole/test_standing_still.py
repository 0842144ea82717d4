"""A run that stands still ends by itself and says where; one that hangs ends when it is told to, twice."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import forge

from ..ranks import run_on_ranks
from .starts import sft, sft_with_signal
from .test_launched import SETTINGS, command, ended, free_port, until, workers

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not Path("/proc").is_dir(), reason="processes are found in /proc")]

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2")


@pytest.fixture(scope="module")
def given(model_dir: Path, chats: Path) -> dict[str, Any]:
    """Eight steps."""
    return {"model_path": str(model_dir), "data_path": str(chats), **SETTINGS}


def asleep() -> None:
    """Do nothing for longer than anybody waits."""
    time.sleep(600)


def test_a_step_that_does_not_end_ends_the_run(given: dict[str, Any], tmp_path: Path) -> None:
    """Steps of a whole run are watched: one that sleeps is an error that names step and place, and the same command goes on."""
    settings = {**given, "ckpt_output_dir": str(tmp_path / "run"), "stall_timeout": 10}
    with pytest.raises(forge.dist.StallError, match=r"has not moved since step 2 for \d+ s: it is at .* in asleep"):
        run_on_ranks(sft_with_signal, 1, settings, "optimizer", 3, "before", asleep, joined=False)
    assert "in asleep" in next((tmp_path / "run").glob("logs/*/stacks_rank_0.txt")).read_text()
    assert run_on_ranks(sft, 1, settings, joined=False)[0]["steps"] == 8


@pytest.mark.lane
@pytest.mark.parametrize(("how", "expected"), [("stopped", 1), ("asleep", 1), ("native", -signal.SIGKILL)])
def test_one_process_that_stands_still(how: str, expected: int, given: Any, hanging: Any, tmp_path: Path) -> None:
    """A guard notices it: the run fails as others do, or is killed where native code lets nothing else happen."""
    variables, _ = hanging
    run = tmp_path / "run"
    status, _, err = ended(command({**given, "ckpt_output_dir": run, "stall_timeout": 8}, **variables(0, 3, how)))
    assert status == expected, err
    assert re.search(r"forge: the run has not moved since step 2 for \d+ s", err)
    (stacks,) = run.glob("logs/*/stacks_rank_0.txt")
    assert "in hang" in stacks.read_text()
    assert "Traceback" not in err
    if expected == 1:
        assert "StallError" in (run / "log.txt").read_text()


@pytest.mark.lane
@pytest.mark.parametrize("launcher", ["forge", "one process", "torchrun"])
def test_a_second_signal_ends_what_hangs(launcher: str, given: Any, hanging: Any, tmp_path: Path) -> None:
    """Rank 0 in native code that holds Python's lock, rank 1 in a collective: two SIGINTs end all within seconds."""
    variables, mark = hanging
    run = tmp_path / "run"
    settings = {**given, "ckpt_output_dir": run, **({"nproc_per_node": 2} if launcher == "forge" else {})}
    before = (*TORCHRUN, f"--master-port={free_port()}", "-m", "forge") if launcher == "torchrun" else ()
    process = command(settings, *before, **variables(0, 3, "native"))
    until(mark.exists)
    ranks = workers(run) if launcher == "forge" else [int(mark.read_text())]
    assert len(ranks) == (2 if launcher == "forge" else 1)
    whom = process.pid if launcher != "torchrun" else ranks[0]
    os.kill(whom, signal.SIGINT)
    time.sleep(2)
    assert process.poll() is None
    os.kill(whom, signal.SIGINT)
    # A zombie has no command line any more.
    lines = [Path(f"/proc/{rank}/cmdline") for rank in ranks]
    until(lambda: not any(line.exists() and line.read_bytes() for line in lines), 60)
    if launcher == "torchrun":
        assert ended(process)[0] == 1
        return
    status, _, err = ended(process)
    if launcher == "forge":
        assert status == 75, err
        assert "full_state/step_2 holds the state to resume from" in err
        assert not workers(run)
    else:
        assert status == -signal.SIGKILL
        assert "a second SIGINT did not end the run within 5 s; its process did not answer and was killed" in err


@pytest.fixture
def waiting(tmp_path: Path) -> tuple[dict[str, Any], str, Path, Path]:
    """Two ranks that wait while they prepare their rows: settings, PYTHONPATH, what says that they do, what lets them go on."""
    begun, go_on = tmp_path / "begun", tmp_path / "go"
    (tmp_path / "waits.py").write_text(
        "import pathlib\nimport time\n\n\ndef wait(row):\n"
        f"    pathlib.Path({str(begun)!r}).touch()\n    while not pathlib.Path({str(go_on)!r}).exists():\n"
        "        time.sleep(0.05)\n    return row\n"
    )
    settings = {"ckpt_output_dir": tmp_path / "run", "nproc_per_node": 2, "preprocess": "waits:wait"}
    return settings, os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]), begun, go_on


@pytest.mark.lane
def test_of_two_launchers_the_second_is_refused(given: Any, waiting: Any) -> None:
    """It ends with one message and leaves no logs; the first goes on and finishes."""
    settings, path, begun, go_on = waiting
    settings = {**given, **settings}
    first = command(settings, PYTHONPATH=path)
    until(begun.exists)
    logs = sorted(settings["ckpt_output_dir"].glob("logs/*"))
    status, _, err = ended(command(settings, PYTHONPATH=path))
    assert status == 2, err
    assert len(re.findall(r"^forge: ", err, re.MULTILINE)) == 1, err
    assert "another run is writing" in err
    assert "Traceback" not in err
    assert sorted(settings["ckpt_output_dir"].glob("logs/*")) == logs
    go_on.touch()
    status, _, err = ended(first)
    assert status == 0, err
    assert (settings["ckpt_output_dir"] / "result.json").exists()


@pytest.mark.lane
def test_a_second_interrupt_while_preparing_leaves_nothing(given: Any, waiting: Any) -> None:
    """Two ranks that prepare are ended by a second Ctrl-C within seconds: status 130, and the same command begins anew."""
    settings, path, begun, go_on = waiting
    settings = {**given, **settings}
    process = command(settings, PYTHONPATH=path)
    until(begun.exists)
    os.kill(process.pid, signal.SIGINT)
    time.sleep(0.5)
    if process.poll() is None:
        os.kill(process.pid, signal.SIGINT)
    until(lambda: process.poll() is not None, 60)
    status, _, err = ended(process)
    # The second may meet Python on its way out; a shell says 130 of both.
    assert status in (130, -signal.SIGINT), err
    assert "Traceback" not in err
    assert err.rstrip().endswith("nothing was saved to go on from, and the same command begins anew."), err
    assert not workers(settings["ckpt_output_dir"])
    assert not [*settings["ckpt_output_dir"].glob("[!.l]*")], "nothing but what the next start takes over"
    go_on.touch()
    status, _, err = ended(command(settings, PYTHONPATH=path))
    assert status == 0, err


def test_the_log_of_an_early_death_is_there(given: Any, tmp_path: Path) -> None:
    """A rank that dies while it prepares is named with a log that exists, whose last lines are printed."""
    (tmp_path / "dies.py").write_text(
        "import os\n\n\ndef die(row):\n    print('the last words', flush=True)\n    os.kill(os.getpid(), 9)\n"
    )
    run = tmp_path / "run"
    settings = {**given, "ckpt_output_dir": run, "nproc_per_node": 2, "preprocess": "dies:die"}
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    status, _, err = ended(command(settings, PYTHONPATH=path))
    assert status == 1, err
    named = re.search(r"rank 0 on \S+ was killed by SIGKILL; out of memory\?; its log: (\S+)\nThe log ends with:\n", err)
    assert named, err
    assert "the last words" in err[named.end() :]
    assert "the last words" in Path(named[1]).read_text()
    assert forge.sft(**{**settings, "preprocess": None, "max_steps": 1, "num_epochs": None, "nproc_per_node": None}).steps == 1


@pytest.mark.lane
def test_under_torchrun_a_users_error_is_one_message(given: Any, tmp_path: Path) -> None:
    """Each rank finds the same fault: it is printed once, without a traceback of forge, and the rank's status is 2."""
    settings = {**given, "ckpt_output_dir": tmp_path / "run", "data_path": tmp_path / "missing.jsonl"}
    process = command(settings, *TORCHRUN, f"--master-port={free_port()}", "-m", "forge")
    status, _, err = ended(process)
    assert status == 1
    assert len(re.findall(r"^forge: ", err, re.MULTILINE)) == 1, err
    assert re.search(r"exitcode\s*: 2 ", err)
    assert "forge/cli" not in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("timeout", [0.0, 60.0])
def test_no_watch_where_it_is_switched_off(timeout: float, given: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """stall_timeout=0 starts no guard; else one lives as long as the run."""
    from forge_dist.watching import _under_guard

    started: list[Any] = []
    original = _under_guard._start

    def start(*args: Any) -> Any:
        started.append(original(*args))
        return started[-1]

    monkeypatch.setattr(_under_guard, "_start", start)
    monkeypatch.setattr("forge_dist.ranks._ranks.under_guard", _under_guard.under_guard)  # which tests do without
    forge.sft(**{**given, "num_epochs": None, "max_steps": 1}, ckpt_output_dir=tmp_path / "run", stall_timeout=timeout)
    assert len(started) == (timeout > 0)
    assert all(guard.returncode == 0 for guard in started)
