"""`forge sft` with several processes: started by it, by torchrun, or on two hosts; failing, killed and stopped."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import forge
from forge.settings._settings import dashed

from ..ranks import run_on_ranks
from .conftest import conversations, write_rows
from .starts import RUN, final_state, metrics, sft, untimed, weights

pytestmark = pytest.mark.slow

SETTINGS: dict[str, Any] = {**RUN, "num_epochs": 2, "logging_steps": 1}


def words(settings: dict[str, Any]) -> list[str]:
    """Settings as a command line has them."""
    return [word for name, value in settings.items() for word in (f"--{dashed(name)}", str(value))]


def environment(**more: str) -> dict[str, str]:
    """This process's environment, without what a launcher would read."""
    return {**{name: value for name, value in os.environ.items() if not name.startswith(("PET_", "GLOO_", "SLURM_"))}, **more}


def command(settings: dict[str, Any], *before: str, **more: str) -> subprocess.Popen[str]:
    """Start `forge sft` as a process of its own."""
    line = [*(before or (sys.executable, "-m", "forge")), "sft", *words(settings)]
    return subprocess.Popen(line, env=environment(**more), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str], seconds: float = 480) -> tuple[int, str, str]:
    """Status, stdout and stderr of a process; it is killed if it takes too long."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        pytest.fail(f"not ended after {seconds} s: {err}")
    return process.returncode, out, err


def until(condition: Any, seconds: float = 300) -> None:
    """Wait for something to become true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.fixture(scope="module")
def given(model_dir: Path, chats: Path) -> dict[str, Any]:
    """Eight steps."""
    return {"model_path": str(model_dir), "data_path": str(chats), **SETTINGS}


@pytest.fixture(scope="module")
def alone(given: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process."""
    return Path(sft({**given, "ckpt_output_dir": str(tmp_path_factory.mktemp("alone") / "run")})["model_dir"]).parents[1]


@pytest.fixture(scope="module")
def two(given: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run of two processes, started from Python."""
    run = tmp_path_factory.mktemp("two") / "run"
    result = forge.sft(**given, ckpt_output_dir=run, nproc_per_node=2, keep_full_state=True)
    assert result.steps == 8
    assert result.model_dir == run / "hf_format" / f"samples_{result.samples}"
    return run


def losses(run: Path) -> list[float]:
    """The loss of every step."""
    return [line["loss"] for line in metrics(run) if "loss" in line]


def test_two_processes_learn_what_one_does(alone: Path, two: Path) -> None:
    """The same losses, one line a step, and the log of every rank."""
    np.testing.assert_allclose(losses(two), losses(alone), rtol=1e-5)
    assert [file.name for file in sorted(two.glob("logs/*/*.log"))] == ["rank_0.log", "rank_1.log"]
    assert "ranks: 2" in (two / "log.txt").read_text()


@pytest.mark.lane
def test_the_environment_starts_them_too(given: dict[str, Any], alone: Path, tmp_path: Path) -> None:
    """PET_NPROC_PER_NODE=2 does; config.yaml names it as origin, and rank 0's output is printed once."""
    status, out, err = ended(command({**given, "ckpt_output_dir": tmp_path / "run"}, PET_NPROC_PER_NODE="2", PET_NNODES="1"))
    assert status == 0, err
    assert out == f"{tmp_path / 'run' / 'hf_format' / 'samples_48'}\n"
    assert err.count("step 8/8") == 1
    np.testing.assert_allclose(losses(tmp_path / "run"), losses(alone), rtol=1e-5)
    assert re.search(r"nproc_per_node: 2  # environment: PET_NPROC_PER_NODE", (tmp_path / "run" / "config.yaml").read_text())
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["strategy"] == "fsdp2"


def test_torchrun_starts_them_too(given: dict[str, Any], alone: Path, tmp_path: Path) -> None:
    """`torchrun -m forge sft ...`, as Kubeflow's images call it."""
    torchrun = (
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        f"--master-port={free_port()}",
        "-m",
        "forge",
    )
    status, out, err = ended(command({**given, "ckpt_output_dir": tmp_path / "run"}, *torchrun))
    assert status == 0, err
    assert out.strip() == str(tmp_path / "run" / "hf_format" / "samples_48")
    np.testing.assert_allclose(losses(tmp_path / "run"), losses(alone), rtol=1e-5)


def free_port() -> int:
    """A free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_bad_input_on_a_rank_is_printed_once(given: dict[str, Any], tmp_path: Path) -> None:
    """The first rank's own error is printed, with its exit status and no traceback; nothing is left on disk."""
    (tmp_path / "broken.jsonl").write_text('{"messages": 3}\n')
    settings = {
        **given,
        "data_path": tmp_path / "broken.jsonl",
        "ckpt_output_dir": tmp_path / "runs" / "one",
        "nproc_per_node": 2,
    }
    status, out, err = ended(command(settings))
    assert status == 2
    assert out == ""
    assert err.count("broken.jsonl:1") == 1
    assert "Traceback" not in err
    assert [entry.name for entry in tmp_path.iterdir()] == ["broken.jsonl"]
    with pytest.raises(forge.data.DataError, match=r"broken\.jsonl:1"):
        forge.sft(**settings)


def test_fewer_samples_a_step_than_ranks(given: dict[str, Any], tmp_path: Path) -> None:
    """A batch of fewer samples than ranks is refused by name."""
    settings = {**given, "effective_batch_size": 1, "ckpt_output_dir": str(tmp_path / "run")}
    with pytest.raises(forge.SettingsError, match="effective_batch_size=1 is less than the 2 ranks"):
        run_on_ranks(sft, 2, settings, joined=False)
    assert not (tmp_path / "run").exists()


def goes_on(settings: dict[str, Any], two: Path) -> None:
    """Assert that two ranks of the same settings end the run with the bits of an uninterrupted one.

    Forked: what the launcher itself starts again is seen where a rank was killed."""
    of_a_rank = {name: value for name, value in settings.items() if name != "nproc_per_node"}
    result = run_on_ranks(sft, 2, {**of_a_rank, "ckpt_output_dir": str(settings["ckpt_output_dir"])}, joined=False)[0]
    assert result["steps"] == 8
    assert untimed(settings["ckpt_output_dir"]) == untimed(two)
    assert weights(settings["ckpt_output_dir"]) == weights(two)


def workers(run: Path) -> list[int]:
    """Process ids of a run's ranks, by rank, found by the settings file on their command lines."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            line = (entry / "cmdline").read_bytes().decode().split("\0")
            variables = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if "forge.cli._worker" in line and any(str(run) in word for word in line):
            rank = next((v for v in variables if v.startswith("RANK=")), "RANK=-1")
            found[int(rank.removeprefix("RANK="))] = int(entry.name)
    return [found[rank] for rank in sorted(found)]


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="processes are found in /proc")
def test_a_rank_is_killed_then_the_launcher_stopped(given: dict[str, Any], two: Path, hanging: Any, tmp_path: Path) -> None:
    """The run ends and names the killed rank; the same command goes on, and a signal to its launcher stops it with status 75.

    Given once more it ends with the bits of an uninterrupted run."""
    run = tmp_path / "run"
    settings = {**given, "ckpt_output_dir": run, "nproc_per_node": 2}
    # A second a step, so that none of the two comes too late.
    slowly = hanging[0](0, 0, "slowly")
    process = command(settings, **slowly)
    until(lambda: (run / "metrics.jsonl").exists() and (run / "full_state" / "latest").exists())
    os.kill(workers(run)[1], signal.SIGKILL)
    status, _, err = ended(process)
    assert status == 1
    assert re.search(r"rank 1 on .* was killed by SIGKILL", err)
    state = run / "full_state" / (run / "full_state" / "latest").read_text().strip()
    assert err.rstrip().endswith(f"The same command goes on from {state}.")
    assert "Traceback" not in err, "what the other rank makes of it is in its log"
    (log,) = run.glob("logs/*/rank_0.log")
    assert "Traceback" in log.read_text()
    stopped_by_a_signal(settings, lambda process: process.pid, **slowly)
    assert "resuming after step " in (run / "log.txt").read_text()
    goes_on(settings, two)
    assert final_state(run) == final_state(two)


def stopped_by_a_signal(settings: dict[str, Any], whom: Callable[[subprocess.Popen[str]], int], **more: str) -> None:
    """Assert that SIGTERM to one process lets the step be finished and the state be saved, and ends all with status 75."""
    run = settings["ckpt_output_dir"]
    latest = run / "full_state" / "latest"
    before = latest.read_text() if latest.exists() else None
    process = command(settings, **more)
    until(lambda: latest.exists() and latest.read_text() != before)
    os.kill(whom(process), signal.SIGTERM)
    status, _, err = ended(process)
    assert status == 75, err
    assert "holds the state to resume from; the same command resumes it" in err
    assert not workers(run)
    assert latest.read_text().strip() == f"step_{len(losses(run))}"


@pytest.mark.lane
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="processes are found in /proc")
@pytest.mark.parametrize("whom", ["the launcher", "rank 1"])
def test_a_signal_to_one_stops_all(whom: str, given: dict[str, Any], two: Path, tmp_path: Path) -> None:
    """The step is finished, the state saved, the status 75; and the same command resumes it."""
    settings = {**given, "ckpt_output_dir": tmp_path / "run", "nproc_per_node": 2}
    stopped_by_a_signal(settings, lambda process: process.pid if whom == "the launcher" else workers(tmp_path / "run")[1])
    goes_on(settings, two)


@pytest.mark.lane
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="processes are found in /proc")
@pytest.mark.parametrize("how", ["stopped", "native", "asleep"])
def test_a_rank_that_stands_still_ends_the_run(
    how: str, given: dict[str, Any], two: Path, hanging: Any, tmp_path: Path
) -> None:
    """A word first, then a message with rank, step and place, and the stacks of both; the same command ends with equal bits."""
    variables, _ = hanging
    run = tmp_path / "run"
    settings = {**given, "ckpt_output_dir": run, "nproc_per_node": 2, "stall_timeout": 8}
    process = command(settings, **variables(1, 3, how))
    status, _, err = ended(process)
    assert status == 1, err
    assert re.search(r"forge: rank [01] has not moved since step 2 \(\d+ s\)", err)
    told = re.search(r"^forge: rank 1 on \S+ has not moved since step 2 for \d+ s: .*$", err, re.MULTILINE)
    assert told, err
    assert "hang.py" in told[0] or "sitecustomize.py" in told[0]
    assert "rank 0 waits for it" in told[0]
    assert ("its process is stopped (SIGSTOP)" in told[0]) is (how == "stopped")
    stacks = sorted(run.glob("logs/*/stacks_rank_*.txt"))
    assert [file.name for file in stacks] == ["stacks_rank_0.txt", "stacks_rank_1.txt"]
    assert "in hang" in stacks[1].read_text()
    assert "torch/distributed" in stacks[0].read_text()
    assert not workers(run)
    goes_on(settings, two)


def ip(*line: str) -> subprocess.CompletedProcess[str]:
    """Run the ip command."""
    return subprocess.run(["ip", *line], capture_output=True, text=True, check=False)


@pytest.fixture
def hosts() -> Any:
    """Two network namespaces and a link between them: ((name, end of the link), (name, end))."""
    tag = f"{os.getpid() % 100000}"
    names, ends = (f"forge-c-{tag}", f"forge-d-{tag}"), (f"fc{tag}", f"fd{tag}")
    try:
        for name in names:
            try:
                made = ip("netns", "add", name)
            except FileNotFoundError:
                pytest.skip("there is no ip command")
            if made.returncode:
                pytest.skip(f"no network namespaces: {made.stderr.strip()}")
        made = ip("link", "add", ends[0], "netns", names[0], "type", "veth", "peer", "name", ends[1], "netns", names[1])
        if made.returncode:
            pytest.skip(f"no veth: {made.stderr.strip()}")
        for number, (name, end) in enumerate(zip(names, ends, strict=True), 1):
            ip("-n", name, "addr", "add", f"10.214.7.{number}/24", "dev", end)
            ip("-n", name, "link", "set", end, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield list(zip(names, ends, strict=True))
    finally:
        for name in names:
            ip("netns", "del", name)


def on_hosts(hosts: Any, settings: dict[str, Any], **more: str) -> list[subprocess.Popen[str]]:
    """The same command on both hosts, which differ in PET_* variables alone."""
    return [
        command(
            settings,
            *("ip", "netns", "exec", name, sys.executable, "-m", "forge"),
            PET_NNODES="2",
            PET_NPROC_PER_NODE="1",
            PET_NODE_RANK=str(node),
            PET_MASTER_ADDR="10.214.7.1",
            PET_MASTER_PORT="29500",
            **more,
        )
        for node, (name, _) in enumerate(hosts)
    ]


@pytest.mark.lane
def test_two_hosts_learn_what_one_does_and_survive_a_cut(hosts: Any, model_dir: Path, tmp_path: Path) -> None:
    """Over a network link the losses are those of two ranks on one host.

    When the link breaks, both sides end within a minute and name the lost peer; the same commands resume once it is back."""
    rows = write_rows(tmp_path / "rows.jsonl", conversations(96))
    given = {"model_path": str(model_dir), "data_path": str(rows), **SETTINGS, "num_epochs": 6}
    run = tmp_path / "run"
    settings = {**given, "ckpt_output_dir": run}
    nodes = on_hosts(hosts, settings)
    until(lambda: (run / "full_state" / "latest").exists())
    ip("-n", hosts[0][0], "link", "set", hosts[0][1], "down")
    cut = time.monotonic()
    first, second = (ended(node) for node in nodes)
    assert time.monotonic() - cut < 60
    assert (first[0], second[0]) == (1, 1)
    assert "was not heard of for" in first[2]
    assert "was not heard of for" in second[2]
    assert len(losses(run)) < 96
    ip("-n", hosts[0][0], "link", "set", hosts[0][1], "up")
    for status, _, err in [ended(node) for node in on_hosts(hosts, settings)]:
        assert status == 0, err
    whole = forge.sft(**given, ckpt_output_dir=tmp_path / "one_host", nproc_per_node=2)
    assert untimed(run) == untimed(whole.output_dir)
