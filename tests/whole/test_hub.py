"""`forge.hub`: the snippets of training_hub's README run, with the line of the import changed."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import forge
from forge import SettingsError
from forge.backends import Backend, Capabilities
from forge.hub import SFTAlgorithm, TrainingHubCallback, _estimate, create_algorithm, estimate, osft, sft, translate
from forge.settings._settings import resolve

from .conftest import FRUITS, write_rows
from .starts import metrics

# The README of training_hub 0.11.2.
SNIPPETS = {
    "sft": """
from training_hub import sft

result = sft(
    model_path="Qwen/Qwen2.5-1.5B-Instruct",
    data_path="/path/to/data",
    ckpt_output_dir="/path/to/checkpoints",
    num_epochs=3,
    effective_batch_size=8,
    learning_rate=1e-5,
    max_seq_len=256,
    max_tokens_per_gpu=1024,
)
""",
    "osft": """
from training_hub import osft

result = osft(
    model_path="/path/to/model",
    data_path="/path/to/data.jsonl", 
    ckpt_output_dir="/path/to/outputs",
    unfreeze_rank_ratio=0.25,
    effective_batch_size=16,
    max_tokens_per_gpu=2048,
    max_seq_len=1024,
    learning_rate=5e-6,
)
""",  # noqa: W291 - as it stands there
    "lora_sft": """
from training_hub import lora_sft

result = lora_sft(
    model_path="Qwen/Qwen2.5-1.5B-Instruct",
    data_path="/path/to/data.jsonl",
    ckpt_output_dir="/path/to/outputs",
    lora_r=16,
    lora_alpha=32,
    num_epochs=3,
    learning_rate=2e-4
)
""",
    "lora_grpo art": """
from training_hub import lora_grpo

# Single GPU (ART backend)
result = lora_grpo(
    model_path="Qwen/Qwen3-4B",
    data_path="./tool_call_traces.jsonl",
    ckpt_output_dir="./grpo_output",
    backend="art",
    lora_r=32,
    lora_alpha=64,
    num_iterations=15,
)
""",
    "lora_grpo verl": """
from training_hub import lora_grpo

# Multi GPU (verl backend)
result = lora_grpo(
    model_path="Qwen/Qwen3-4B",
    data_path="./tool_call_traces.jsonl",
    ckpt_output_dir="./grpo_output",
    backend="verl",
    n_gpus=4,
)
""",
    "grpo": """
from training_hub import grpo

result = grpo(
    model_path="Qwen/Qwen3-8B",
    data_path="./tool_call_traces.jsonl",
    ckpt_output_dir="./grpo_full_output",
    n_gpus=8,
    num_iterations=8,
)
""",
    "gepa": """
from training_hub import gepa

result = gepa(
    seed_candidate={"system_prompt": "You are a helpful assistant. Answer the question."},
    task_lm="openai/gpt-4o-mini",
    data_path="./eval_data.jsonl",
    output_dir="./gepa_output",
    reflection_lm="openai/gpt-4o",
    max_metric_calls=200,
)
""",
    "embedding_sft": """
from training_hub import embedding_sft

result = embedding_sft(
    model_path="sentence-transformers/all-MiniLM-L6-v2",
    data_path="routing_train.jsonl",    # {"text": "...", "label": 0}
    ckpt_output_dir="./routing_model",
    loss_type="batch_all_triplet",
    num_epochs=20,
    batch_size=32,
    learning_rate=2e-5,
)
""",
}
STEPS = {"sft": 9, "osft": 2, "lora_sft": 36}
"""24 conversations: 3 epochs of batches of 8, one of 16 and 8, 3 of 2 (its default for one GPU)."""


def snippet(name: str, **places: object) -> Any:
    """Run a snippet with its import changed and other paths; its result."""
    code = SNIPPETS[name].replace("from training_hub import", "from forge.hub import")
    for setting, place in places.items():
        code = re.sub(rf'{setting}="[^"]*"', lambda _, s=setting, p=place: f"{s}={str(p)!r}", code)
    found: dict[str, Any] = {}
    exec(compile(code, name, "exec"), found)
    return found["result"]


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_snippets(name: str, model_dir: Path, chats: Path, tmp_path: Path) -> None:
    """They train, for the epochs and with the batches that they ask for, and leave what the page says."""
    run = tmp_path / "run"
    result = snippet(name, model_path=model_dir, data_path=chats, ckpt_output_dir=run)
    assert isinstance(result, forge.RunResult)
    assert result.steps == STEPS[name]
    exports = {path.name for path in (run / "hf_format").glob("*/")}
    assert len(exports) == (3 if name == "sft" else 1), "instructlab-training exports after every epoch"
    assert (result.model_dir / ("adapter_config.json" if name == "lora_sft" else "config.json")).exists()
    config = (run / "config.yaml").read_text()
    assert re.search(
        rf"^adapter: {'lora' if name == 'lora_sft' else 'osft' if name == 'osft' else 'none'}\b", config, re.MULTILINE
    )


@pytest.mark.parametrize("name", ["lora_grpo art", "lora_grpo verl", "grpo"])
def test_snippets_of_grpo_are_understood(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings that their calls become are whole and valid; the lane runs one of them."""
    seen: list[tuple[str, dict[str, Any]]] = []

    def instead(**settings: object) -> None:
        settings.pop("callbacks")
        seen.append((name, settings))

    task = forge.grpo.task
    monkeypatch.setattr(
        forge, "grpo", type("Verb", (), {"task": task, "__call__": lambda _, **settings: instead(**settings)})()
    )
    snippet(name)
    ((_, settings),) = seen
    s = resolve(task.settings, ("argument", settings))
    assert s.objective.reward == ("forge.hub._tool_calls:tool_call",)
    assert s.objective.loss_type == "dr_grpo"
    assert s.plan.effective_batch_size == 100
    expected = {"lora_grpo art": (None, 15, 1), "lora_grpo verl": (15, None, 4), "grpo": (8, None, 8)}
    assert (s.plan.num_epochs, s.plan.max_steps, s.launch.nproc_per_node) == expected[name]


def traces(path: Path) -> Path:
    """Conversations with tool calls."""
    rows = []
    for city in ("Bonn", "Ulm", "Kiel"):
        call = {"type": "function", "function": {"name": "weather", "arguments": json.dumps({"city": city})}}
        turns = [{"role": "user", "content": f"weather in {city}?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        rows.append({"messages": [*turns, {"role": "tool", "content": "rain"}, {"role": "assistant", "content": "Rain."}]})
    return write_rows(path, rows)


@pytest.mark.slow
def test_tool_call_traces_are_prompts(model_dir: Path, tmp_path: Path) -> None:
    """`lora_grpo` on traces: a prompt a call, the built-in reward, an adapter; at a size that is tried here."""
    result = forge.hub.lora_grpo(
        str(model_dir),
        str(tmp_path / "run"),
        str(traces(tmp_path / "traces.jsonl")),
        backend="art",
        num_iterations=1,
        group_size=2,
        prompt_batch_size=3,
        max_tokens=4,
    )
    assert result.steps == 1
    (line,) = [line for line in metrics(tmp_path / "run") if "loss" in line]
    assert "reward" in json.dumps(line)
    assert (result.model_dir / "adapter_config.json").exists()


@pytest.mark.lane
def test_the_snippet_of_grpo(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its 15 steps run, with 8 completions for each of three prompts; of 32 tokens, where it leaves the default of 512."""
    shorter = SNIPPETS["lora_grpo art"].replace("num_iterations=15,", "num_iterations=15,\n    max_tokens=32,")
    monkeypatch.setitem(SNIPPETS, "lora_grpo art", shorter)
    places = {"model_path": model_dir, "data_path": traces(tmp_path / "t.jsonl"), "ckpt_output_dir": tmp_path / "run"}
    assert snippet("lora_grpo art", **places).steps == 15


def test_the_snippet_that_is_refused() -> None:
    """With what to use instead."""
    with pytest.raises(SettingsError, match="Use the package gepa"):
        snippet("gepa")


@pytest.mark.slow
def test_the_snippet_of_embeddings(model_dir: Path, tmp_path: Path) -> None:
    """Its 20 epochs of batches of 32 run on labelled texts, and leave a model that sentence-transformers finds its files in."""
    texts = [f"{fruit} number {at} is " + ("red", "green")[at % 2] for at, fruit in enumerate(FRUITS * 5)]
    data = write_rows(tmp_path / "rows.jsonl", [{"text": text, "label": at % 2} for at, text in enumerate(texts)])
    result = snippet("embedding_sft", model_path=model_dir, data_path=data, ckpt_output_dir=tmp_path / "run")
    assert result.steps == 40
    assert (result.model_dir / "modules.json").exists()
    text = (tmp_path / "run" / "config.yaml").read_text()
    assert re.search(r"^loss: batch_all_triplet\b", text, re.MULTILINE)
    assert re.search(r"^margin: 5.0\b", text, re.MULTILINE)


class Keeper(TrainingHubCallback):
    """A callback that keeps what it saw."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.ended = ""

    def on_log(self, context: Any) -> None:
        """Keep the loss."""
        self.losses.append(context.loss)

    def on_train_end(self, context: Any) -> None:
        """Keep the directory."""
        self.ended = context.output_dir


class Mine(Backend):
    """A backend of one's own: forge with another seed."""

    name = "mine"

    def capabilities(self) -> Capabilities:
        """Return that it has everything."""
        return Capabilities()

    def execute_training(self, params: Mapping[str, object]) -> Any:
        """Pass the training on."""
        given = {name: params[name] for name in ("model_path", "data_path", "ckpt_output_dir")}
        return getattr(forge, str(params["verb"]))(**given, max_steps=1, effective_batch_size=4, seed=7)


@pytest.mark.slow
def test_classes_and_documents(model_dir: Path, chats: Path, tmp_path: Path) -> None:
    """An algorithm with a backend by name, and with an object; a callback that keeps its state; documents under OSFT."""
    keeper, short = Keeper(), {"effective_batch_size": 8, "learning_rate": 1e-3, "max_seq_len": 256}
    given = {"model_path": str(model_dir), "data_path": str(chats), **short}
    result = create_algorithm("sft", "forge").train(
        **given, ckpt_output_dir=str(tmp_path / "a"), callbacks=[keeper], max_steps=2
    )
    assert len(keeper.losses) == result.steps == 2
    assert keeper.ended == str(tmp_path / "a")
    plain = forge.sft(**given, ckpt_output_dir=str(tmp_path / "b"), max_steps=2, checkpoint_at_epoch=True)
    assert plain.loss == result.loss, "the same call of the verb"
    mine = SFTAlgorithm(backend=Mine()).train(**given, ckpt_output_dir=str(tmp_path / "c"))
    assert mine.steps == 1
    assert "seed: 7" in (tmp_path / "c" / "config.yaml").read_text()
    pages = write_rows(tmp_path / "pages.jsonl", [{"page": "the apple is red because it likes the sun. " * 3}] * 8)
    documents = osft(
        **{**given, "data_path": str(pages)},
        unfreeze_rank_ratio=0.5,
        max_tokens_per_gpu=256,
        ckpt_output_dir=str(tmp_path / "d"),
        is_pretraining=True,
        block_size=16,
        document_column_name="page",
    )
    assert documents.steps >= 1
    with pytest.raises(SettingsError, match="unknown parameter 'num_epoch'"):
        sft(**given, ckpt_output_dir=str(tmp_path / "e"), num_epoch=2)
    assert not (tmp_path / "e").exists()


@pytest.mark.slow
def test_estimate(model_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """More tokens take more, LoRA takes less, and a step has the optimizer's state; nothing is printed or left behind."""
    asked: list[tuple[dict[str, Any], str]] = []
    planned = _estimate._planned
    monkeypatch.setattr(_estimate, "_planned", lambda *given: asked.append(given) or planned(*given))
    sizes = {
        name: estimate(model_path=str(model_dir), verbose=0, **{"num_gpus": 1, "max_seq_len": 64, "batch_size": 4, **more})
        for name, more in {
            "plain": {},
            "long": {"max_seq_len": 256},
            "lora": {"training_method": "lora", "lora_r": 4},
        }.items()
    }  # fmt: skip
    assert all(0 < step <= worst < must for step, worst, must in sizes.values())
    assert sizes["lora"][0] < sizes["plain"][0] < sizes["long"][0]
    settings, target = asked[1]
    first = planned({**settings, "max_steps": 1}, target)
    assert {phase["name"]: phase["planned"] for phase in first["phases"]}["step"] < sizes["long"][0]
    assert capsys.readouterr().out == ""
    estimate("osft", 1, 2**30, str(model_dir), max_tokens_per_gpu=64)
    assert "it fits" in capsys.readouterr().out
    for wrong, why in (
        ({"training_method": "osft-e"}, "give osft"),
        ({"max_seq_len": None}, "give max_seq_len, max_tokens_per_gpu"),
        ({"max_tokens_per_gpu": 8}, "is less than max_seq_len"),
        ({"num_gpus": 0}, "num_gpus must be"),
    ):
        with pytest.raises(SettingsError, match=why):
            estimate(**{"model_path": str(model_dir), "max_seq_len": 64, **wrong})


NODE = """
import sys
from forge.hub import sft

model, data, out, endpoint, rank = sys.argv[1:]
result = sft(
    model_path=model, data_path=data, ckpt_output_dir=out, num_epochs=1, effective_batch_size=8, learning_rate=1e-3,
    max_seq_len=256, nproc_per_node=1, nnodes=2, node_rank=int(rank), rdzv_id=100, rdzv_endpoint=endpoint,
)
print("steps", result.steps)
"""


@pytest.mark.lane
def test_two_numbered_nodes(model_dir: Path, chats: Path, tmp_path: Path) -> None:
    """node_rank, rdzv_id and rdzv_endpoint as training_hub's table has them: two processes on loopback, one run."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    script = tmp_path / "node.py"
    script.write_text(NODE)
    words = [sys.executable, str(script), str(model_dir), str(chats), str(tmp_path / "run"), endpoint]
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PET_", "SLURM_"))}
    nodes = [subprocess.Popen([*words, str(rank)], env=environ, stdout=subprocess.PIPE, text=True) for rank in (1, 0)]
    for node in nodes:
        out, _ = node.communicate(timeout=480)
        assert node.returncode == 0
        assert out.splitlines()[-1] == "steps 3"
    alone = sft(str(model_dir), str(chats), str(tmp_path / "alone"), num_epochs=1, effective_batch_size=8, learning_rate=1e-3)
    found = [[line["loss"] for line in metrics(tmp_path / run) if "loss" in line] for run in ("run", "alone")]
    assert found[0] == pytest.approx(found[1], abs=1e-5)
    assert alone.steps == 3
    assert translate("sft", model_path="m", data_path="d", ckpt_output_dir="o", rdzv_id=100).settings["rdzv_id"] == "100"
