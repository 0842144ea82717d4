"""Slurm and Kubeflow's controller, as far as a run sees them: the commands of rendered files as processes of this machine.

`commands` makes a folder with `srun`, `scontrol` and `forge`. `Controller` starts the pods of a TrainJob: preflight, then node,
with PET_* as Kubeflow Trainer V2 sets them, and a new pod in the place of one that failed, by the rules of its runtime.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import attrs

_SRUN = '''#!{python}
"""srun: one task a node, each told what Slurm tells it; signals are passed on."""
import os, signal, subprocess, sys
from pathlib import Path

words = [word for word in sys.argv[1:]]
while words[0].startswith("--"):
    words.pop(0)
count = Path(__file__).with_name("steps")
step = int(count.read_text()) if count.exists() else 0
count.write_text(str(step + 1))
nodes = int(os.environ["SLURM_NNODES"])
tasks = []
for node in range(nodes):
    told = dict(
        SLURM_STEP_ID=step, SLURM_STEP_NUM_TASKS=nodes, SLURM_STEP_NUM_NODES=nodes, SLURM_NODEID=node, SLURM_PROCID=node,
        SLURM_LOCALID=0, SLURM_STEP_TASKS_PER_NODE=f"1(x{{nodes}})", SLURM_STEP_NODELIST="localhost",
    )
    env = os.environ | {{name: str(value) for name, value in told.items()}}
    tasks.append(subprocess.Popen(words, env=env, start_new_session=True))
signal.signal(signal.SIGTERM, lambda *_: [task.send_signal(signal.SIGTERM) for task in tasks])
sys.exit(max(status if (status := task.wait()) >= 0 else 128 - status for task in tasks))
'''
_SCONTROL = """#!/bin/sh
echo "$@" >> "$(dirname "$0")/asked"
case "$1" in show) echo "JobId=$SLURM_JOB_ID JobState=${FAKE_STATE:-RUNNING}" ;; esac
"""
_FORGE = """#!/bin/sh
exec {python} -m forge "$@"
"""
_FAST = {"FORGE_HEARTBEAT_INTERVAL": "0.5", "FORGE_HEARTBEAT_LIMIT": "10", "FORGE_HEARTBEAT_GRACE": "1"}
"""A heartbeat that notices lost nodes within a test's time."""
_READ = ("PET_", "GLOO_", "SLURM_", "JOB_COMPLETION", "KUBEFLOW_")


def environment(folder: Path, **more: object) -> dict[str, str]:
    """This process's environment without what a launcher would read, with the commands of a folder first."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_READ)}
    return {
        **kept,
        **_FAST,
        "PATH": f"{folder}{os.pathsep}{kept['PATH']}",
        **{name: str(value) for name, value in more.items()},
    }


def free_port(ports: range = range(1)) -> int:
    """A free port, of a range."""
    for port in ports:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise AssertionError(ports)


def commands(folder: Path) -> Path:
    """Write `srun`, `scontrol` and `forge` into a folder."""
    folder.mkdir()
    for name, text in (
        ("srun", _SRUN.format(python=sys.executable)),
        ("scontrol", _SCONTROL),
        ("forge", _FORGE.format(python=sys.executable)),
    ):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder


def sbatch(script: Path, folder: Path, nodes: int, **more: object) -> subprocess.Popen[str]:
    """Start an sbatch file as Slurm does: on the first node, in a session of its own."""
    # The port follows from the job's number.
    job = free_port(range(21000 + os.getpid() % 5000, 30000)) - 20000
    told = {"SLURM_JOB_ID": job, "SLURM_NNODES": nodes, "SLURM_NTASKS": nodes, "SLURM_PROCID": 0, **more}
    return subprocess.Popen(
        ["bash", str(script)],
        env=environment(folder, **told),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@attrs.define
class Pod:
    """A pod: what it ran, and what runs in it."""

    index: int
    log: Path
    container: str = "preflight"
    process: subprocess.Popen[bytes] | None = None

    def kill(self) -> None:
        """End it as a lost node does: nothing of it goes on, and nothing is said."""
        assert self.process is not None
        os.killpg(self.process.pid, signal.SIGKILL)


@attrs.define
class Controller:
    """Kubeflow Trainer V2 and the job controller of Kubernetes, for the trainer's job of one TrainJob."""

    job: dict[str, Any]
    runtime: dict[str, Any]
    volume: Path
    """Mounted at /workspace."""
    bin: Path
    preflight: bool = True
    """Whether the runtime's init container is started before a node."""
    pods: list[Pod] = attrs.field(factory=list)
    history: list[tuple[int, str, int]] = attrs.field(factory=list)
    """(pod, container, exit status) of each container that ended."""

    def run(self, seconds: float, tick: Any = lambda: None) -> str:
        """Run the job until it is complete or failed; `tick` is called meanwhile."""
        spec, trainer = self._node["spec"], self.job["spec"]["trainer"]
        port, end = free_port(), time.monotonic() + seconds
        waiting = set(range(trainer["numNodes"]))
        failures, done = 0, set()
        try:
            while len(done) < trainer["numNodes"]:
                assert time.monotonic() < end, self.logs()
                for index in sorted(waiting):
                    pod = Pod(
                        index, self.volume / f"pod-{index}-{len(self.pods)}.log", "preflight" if self.preflight else "node"
                    )
                    self.pods.append(self._start(pod, port))
                waiting.clear()
                tick()
                for pod in self.pods:
                    status = None if pod.process is None else pod.process.poll()
                    if status is None:
                        continue
                    pod.process = None
                    self.history.append((pod.index, pod.container, status))
                    if status == 0 and pod.container == "preflight":
                        pod.container = "node"
                        self._start(pod, port)
                    elif status == 0:
                        done.add(pod.index)
                    else:
                        waiting.add(pod.index)
                        action = self._action(pod.container, status)
                        failures += action is None
                        if action == "FailJob" or failures > spec["backoffLimit"]:
                            return "Failed"
                time.sleep(0.05)
            return "Complete"
        finally:
            for pod in self.pods:
                if pod.process is not None:
                    pod.kill()
                    pod.process.wait()

    def logs(self) -> str:
        """What all pods printed."""
        return "\n".join(f"== {pod.log.name}\n{pod.log.read_text()}" for pod in self.pods)

    @property
    def _node(self) -> dict[str, Any]:
        return next(
            each["template"] for each in self.runtime["spec"]["template"]["spec"]["replicatedJobs"] if each["name"] == "node"
        )

    def _action(self, container: str, status: int) -> str | None:
        """What the runtime's rules say of a container's exit status."""
        for rule in self._node["spec"]["podFailurePolicy"]["rules"]:
            codes = rule.get("onExitCodes", {})
            if codes.get("containerName") == container and status in codes["values"]:
                return str(rule["action"])
        return None

    def _start(self, pod: Pod, port: int) -> Pod:
        """Start a container of a pod, with the paths of the volume where it is mounted."""
        trainer, spec = self.job["spec"]["trainer"], self._node["spec"]["template"]["spec"]
        env = {
            "PET_NNODES": trainer["numNodes"],
            "PET_NPROC_PER_NODE": trainer["numProcPerNode"],
            "PET_NODE_RANK": pod.index,
            # On a cluster the name of the first pod, and 29500.
            "PET_MASTER_ADDR": "127.0.0.1",
            "PET_MASTER_PORT": port,
            "JOB_COMPLETION_INDEX": pod.index,
        }
        if pod.container == "node":
            words = [*trainer["command"], *(word.replace("$$", "$") for word in trainer["args"])]
        else:
            (container,) = spec["initContainers"]
            words = container["command"]
            for patch in self.job["spec"].get("runtimePatches", []):
                (job,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
                for patched in job["template"]["spec"]["template"]["spec"]["initContainers"]:
                    env |= {
                        each["name"]: each["value"].replace("$$", "$").replace("/workspace", str(self.volume))
                        for each in patched["env"]
                    }
        own = self.volume.parent / f"recipe-{pod.index}.yaml"  # each container has a /tmp of its own
        with pod.log.open("ab") as log:
            pod.process = subprocess.Popen(
                [word.replace("/workspace", str(self.volume)).replace("/tmp/recipe.yaml", str(own)) for word in words],
                env=environment(self.bin, **env),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return pod
