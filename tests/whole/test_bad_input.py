"""Bad input on the command line: one message with place and remedy, exit status 2, nothing left behind."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from forge.cli._app import main
from forge.settings._settings import flat_fields
from forge.verbs._sft import SFTSettings

from ..lanes import ci_keeps, quick_keeps
from ..ranks import run_on_ranks
from . import tiny
from .conftest import conversations, write_rows
from .starts import command_with_signal

SETTING = re.compile(
    rf"""(?<![\w./'])({"|".join(field.name for _, field in flat_fields(SFTSettings) if "_" in field.name)})\b"""
)
"""Settings as Python and recipes spell them."""
GOOD = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello there"}]}


@pytest.fixture
def refused(model_dir: Path, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """A function: run `forge sft` with options, expect status 2 and one message, nothing on disk; returns the message."""

    def call(recipe: Path | None = None, *, expect: int = 2, **options: Any) -> str:
        out = tmp_path / "parent" / "run"
        given = {"model_path": model_dir, "data_path": chats, "ckpt_output_dir": out, "max_steps": 2, **options}
        words = ["sft", *([str(recipe)] if recipe else [])]
        for name, value in given.items():
            if value is not None:
                words += [f"--{name.replace('_', '-')}", *(map(str, value) if isinstance(value, list) else [str(value)])]
        status = main(words)
        said = capsys.readouterr()
        message = said.err[said.err.rindex("forge: ") :]
        assert status == expect, said.err
        assert "Traceback" not in said.err
        assert not said.out
        # Settings are named as flags, but in a message about a recipe.
        assert recipe or not SETTING.search(message)
        assert not out.exists()
        assert not out.parent.exists()
        return message

    return call


def jsonl(path: Path, *lines: object) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


BAD_ROWS: dict[str, tuple[list[object], list[str]]] = {
    "broken JSON": ([GOOD, '{"messages": ['], ["data.jsonl:2", "JSON"]),
    "not an object": ([GOOD, "[1, 2]"], ["data.jsonl:2"]),
    "no known shape": ([{"question": "a", "answer": "b"}], ["data.jsonl:1", "question", "answer", "messages", "prompt"]),
    "unknown role": ([GOOD, {"messages": [{"role": "robot", "content": "x"}]}], ["data.jsonl:2", "robot", "assistant"]),
    "no assistant anywhere": ([{"messages": [{"role": "user", "content": "x"}]}], ["no", "token"]),
    "no messages": ([{"messages": []}], ["data.jsonl:1", "messages"]),
    "null content": ([{"messages": [{"role": "user", "content": None}]}], ["data.jsonl:1", "content"]),
    "mixed shapes": ([GOOD, {"prompt": "a", "completion": "b"}], ["data.jsonl:2"]),
    "labels of another length": ([{"input_ids": [5, 6], "labels": [5]}], ["data.jsonl:1", "labels"]),
    "ids beyond the vocabulary": ([{"input_ids": [5, 999999], "labels": [-100, 999999]}], ["data.jsonl:1", "999999"]),
    "empty file": ([], ["data.jsonl", "empty"]),
}


@pytest.mark.parametrize("kind", sorted(BAD_ROWS))
def test_bad_rows(kind: str, refused: Any, tmp_path: Path) -> None:
    """A bad row is named by file and line, with what was found."""
    lines, words = BAD_ROWS[kind]
    message = refused(data_path=jsonl(tmp_path / "data.jsonl", *lines))
    for word in words:
        assert word in message


def test_missing_file(refused: Any, tmp_path: Path) -> None:
    """A data file that is not there is named."""
    assert "nowhere.jsonl" in refused(data_path=tmp_path / "nowhere.jsonl")


def test_bad_eval_file(refused: Any, tmp_path: Path) -> None:
    """A bad held-out file is found before anything trains."""
    assert "eval.jsonl:1" in refused(eval_data_path=jsonl(tmp_path / "eval.jsonl", "{"))


def test_sample_over_the_budget(refused: Any) -> None:
    """A sample longer than max_tokens_per_gpu is named by file and row, with its length and what to set."""
    message = refused(max_tokens_per_gpu=20, validation_split=0.3)
    assert re.search(r"chats\.jsonl:\d+ has \d+ tokens, more than --max-tokens-per-gpu 20", message)
    assert "--max-seq-len" in message


def test_a_warm_up_longer_than_the_run(refused: Any) -> None:
    """A warm-up that never reaches learning_rate is refused with the number of steps."""
    assert "--warmup-steps 5 is more than the 2 steps" in refused(warmup_steps=5)


@pytest.mark.slow
def test_a_model_that_cannot_run_packed_rows(refused: Any, model_dir: Path, tmp_path: Path) -> None:
    """With --packing on an architecture that mixes packed samples is refused by name; the message has what trains it."""
    import torch
    from transformers import AutoTokenizer, BloomConfig, BloomForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    torch.manual_seed(0)
    config = BloomConfig(vocab_size=len(tokenizer), hidden_size=32, n_layer=2, n_head=4)
    BloomForCausalLM(config).save_pretrained(tmp_path / "bloom")
    tokenizer.save_pretrained(tmp_path / "bloom")
    message = refused(model_path=tmp_path / "bloom", packing="on")
    assert "--packing on" in message
    assert "BloomForCausalLM" in message
    assert "--packing auto" in message
    assert ".." not in message


def test_everything_too_long(refused: Any) -> None:
    """When --max-seq-len drops every row, that is an error with the count."""
    assert "--max-seq-len" in refused(max_seq_len=3)


def test_no_chat_template(refused: Any, model_dir: Path, tmp_path: Path) -> None:
    """A tokenizer without a chat template cannot format messages, and the message says what can be done."""
    bare = tmp_path / "bare"
    shutil.copytree(model_dir, bare)
    (bare / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((bare / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (bare / "tokenizer_config.json").write_text(json.dumps(config))
    assert "chat template" in refused(model_path=bare)


def test_a_template_that_asks_for_no_answer(refused: Any, tmp_path: Path) -> None:
    """Rows of which it is unclear what an assistant wrote are one message; their error is the cause of its own cause."""
    template = tmp_path / "template.jinja"
    template.write_text("{% for message in messages %}{{ message.role }} says: {{ message.content }}<|im_end|>{% endfor %}")
    said = refused(chat_template=template)
    assert "leaves open which tokens the assistant wrote in message 1" in said


def test_model_directory_that_is_none(refused: Any, tmp_path: Path) -> None:
    """An empty directory, a file and a path that does not exist are no models."""
    (tmp_path / "empty").mkdir()
    assert "empty" in refused(model_path=tmp_path / "empty")
    assert "data.jsonl" in refused(model_path=jsonl(tmp_path / "data.jsonl", GOOD))
    assert "nowhere" in refused(model_path=tmp_path / "nowhere")


def test_torn_weights(refused: Any, model_dir: Path, tmp_path: Path) -> None:
    """A truncated weight file is found before the run directory is published."""
    torn = tmp_path / "torn"
    shutil.copytree(model_dir, torn)
    weights = (torn / "model.safetensors").read_bytes()
    (torn / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    assert "torn" in refused(model_path=torn)


@pytest.mark.parametrize(
    "name", quick_keeps(["llama-untied"], ["llama-untied", "qwen3.5: a state, and an error of transformers"])
)
def test_a_configuration_that_is_not_the_models(name: str, refused: Any, model_dir: Path, tmp_path: Path) -> None:
    """Of a transformer and of a hybrid: a class that does not exist, values that make no model, another model's weights, and
    a tokenizer with more tokens than the embedding; each is said of what it is, and not of the tokenizer.
    """
    tiny.save(name, tmp_path / "whole")
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(model_dir / file, tmp_path / "whole")
    config = json.loads((tmp_path / "whole" / "config.json").read_text())

    def refusal(**values: object) -> str:
        (tmp_path / "whole" / "config.json").write_text(json.dumps(config | values))
        return refused(model_path=tmp_path / "whole")

    assert "tokens without a row in the embedding" in refusal()
    assert "has no such class" in refusal(architectures=["Qwen9ForCausalLM"])
    assert "values in its config.json make no model: ZeroDivisionError" in refusal(num_key_value_heads=0)
    assert "cannot be loaded: Validation error for field 'num_hidden_layers'" in refusal(num_hidden_layers="two")
    shutil.copy(model_dir / "model.safetensors", tmp_path / "whole")
    assert "its safetensors do not fit" in refusal()


def test_unknown_settings(refused: Any, tmp_path: Path) -> None:
    """An unknown setting is answered with the nearest valid one, from a flag and from a recipe."""
    assert "--learning-rate" in refused(learning_rat=1e-3)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("num_epoch: 3\n")
    message = refused(recipe)
    assert "num_epoch" in message
    assert "`num_epochs`" in message
    assert "recipe.yaml" in message


OUT_OF_RANGE: dict[str, list[object]] = {
    "num_epochs": [-1, 0, "two", 1.5],
    "max_steps": [0, -3],
    "effective_batch_size": [0, -1, "many"],
    "learning_rate": [-1e-5, "nan", "inf", "fast"],
    "max_tokens_per_gpu": [0],
    "max_seq_len": [0],
    "warmup_steps": [-1],
    "weight_decay": [-0.1, "nan"],
    "beta1": [1.0, -0.1],
    "beta2": [1.5],
    "eps": [-1e-8],
    "max_grad_norm": [-1],
    "seed": [-1],
    "dtype": ["float8"],
    "lr_scheduler": ["cosin"],
    "validation_split": [1.5, -0.5, -3],
    "adapter": ["lor"],
    "attention": ["flash"],
    "save_samples": [-1],
    "logging_steps": [0],
}


@pytest.mark.parametrize(
    ("name", "value"),
    quick_keeps(
        [(name, values[-1]) for name, values in OUT_OF_RANGE.items()],
        [(name, value) for name, values in OUT_OF_RANGE.items() for value in values],
    ),
)
def test_out_of_range(name: str, value: object, refused: Any) -> None:
    """A value of the wrong kind or range is refused by the setting's name, with the value."""
    message = refused(**{name: value})
    assert name in message.replace("-", "_")
    assert str(value).lstrip("-").rstrip("0").rstrip(".") in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- a\n- b\n", ["holds a list"]),
        ("learning_rate: [1\n", ["recipe.yaml:"]),
        ("seed: 1\nseed: 2\n", ["recipe.yaml:2", "seed", "twice"]),
        ("effective_batch_size: many\n", ["effective_batch_size", "many", "recipe.yaml"]),
        ("checkpoint_at_epoch: 3\n", ["checkpoint_at_epoch", "true or false"]),
    ],
)
def test_bad_recipes(text: str, words: list[str], refused: Any, tmp_path: Path) -> None:
    """A recipe that is no mapping of settings is refused with its file and line."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(text)
    message = refused(recipe)
    for word in words:
        assert word in message


def test_missing_required(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a model there is no run; the message says which option is missing."""
    assert main(["sft"]) == 2
    assert "--model-path" in capsys.readouterr().err


@pytest.mark.slow
def test_output_directory_with_another_run(
    model_dir: Path, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A directory that holds another run is refused, saying in what it differs, and left as it was."""
    words = ["sft", "--model-path", str(model_dir), "--data-path", str(chats), "--ckpt-output-dir", str(tmp_path / "run")]
    assert main([*words, "--max-steps", "1"]) == 0
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    capsys.readouterr()
    assert main([*words, "--max-steps", "2"]) == 2
    said = capsys.readouterr().err
    assert "holds a run with --max-steps 1, and now --max-steps is 2;" in said
    (export,) = (tmp_path / "run" / "hf_format").glob("samples_*")
    assert f"That run is finished: give another --ckpt-output-dir to begin anew, and --model-path {export} to go on" in said
    assert main([*words, "--max-steps", "1", "--resume", "never"]) == 2
    assert "holds another run, and --resume never" in capsys.readouterr().err
    assert before == {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}


def test_output_directory_with_other_files(
    model_dir: Path, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A directory with other files is refused, the files named and kept."""
    (tmp_path / "thesis.tex").write_text("x")
    assert main(["sft", "--model-path", str(model_dir), "--data-path", str(chats), "--ckpt-output-dir", str(tmp_path)]) == 2
    assert "thesis.tex" in capsys.readouterr().err
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.tex"]


def test_output_directory_that_is_a_file_or_cannot_be_written(
    model_dir: Path, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file in the place of the directory, or a place where none can be made, is refused."""
    (tmp_path / "file").write_text("x")
    for place in (tmp_path / "file", tmp_path / "file" / "run", Path("/proc/run")):
        assert main(["sft", "--model-path", str(model_dir), "--data-path", str(chats), "--ckpt-output-dir", str(place)]) == 2
        assert str(place) in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "x"


def test_diverged_is_a_failed_run(model_dir: Path, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A loss that is no number ends the run with status 1, names the step, and leaves no export."""
    words = ["sft", "--model-path", str(model_dir), "--data-path", str(chats), "--ckpt-output-dir", str(tmp_path / "run")]
    assert main([*words, *"--learning-rate 1e6 --max-grad-norm 0 --max-steps 9 --effective-batch-size 4".split()]) == 1
    assert "step" in capsys.readouterr().err
    assert not (tmp_path / "run" / "hf_format").exists()
    assert "failed" in (tmp_path / "run" / "log.txt").read_text().splitlines()[-1]


@pytest.mark.slow
def test_a_real_shell_sees_message_and_status(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The installed command: status 2, the message on stderr, no traceback; --debug shows it."""
    words = ["sft", "--model-path", str(model_dir), "--data-path", "nowhere.jsonl", "--ckpt-output-dir", str(tmp_path / "run")]
    command = [sys.executable, "-m", "forge", *words]
    plain = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=os.environ, check=False)
    assert plain.returncode == 2
    assert plain.stderr.strip().splitlines()[-1].startswith("forge: ")
    assert "Traceback" not in plain.stderr
    monkeypatch.chdir(tmp_path)
    assert main([*words, "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_two_runs_at_once(model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """While one run holds its directory a second on the same one is refused, and the first is not disturbed."""
    from forge.run._run_directory import RunDirectory

    data = write_rows(tmp_path / "data.jsonl", conversations())
    with RunDirectory(tmp_path / "run") as first:
        assert (
            main(["sft", "--model-path", str(model_dir), "--data-path", str(data), "--ckpt-output-dir", str(tmp_path / "run")])
            == 2
        )
        assert "another run is writing" in capsys.readouterr().err
        assert first.root.is_dir()


@pytest.mark.slow
@pytest.mark.parametrize("number", ci_keeps([signal.SIGTERM], [signal.SIGTERM, signal.SIGINT]))
def test_a_stopped_run_says_so(number: int, model_dir: Path, chats: Path, tmp_path: Path) -> None:
    """SIGTERM and SIGINT while training: status 75, a message, the log's last line, whole lines of metrics."""
    words = ["sft", "--model-path", str(model_dir), "--data-path", str(chats), "--ckpt-output-dir", str(tmp_path / "run")]
    words += ["--max-steps", "100", "--effective-batch-size", "2"]
    status, printed = run_on_ranks(command_with_signal, 1, words, "optimizer", 4, "before", number, joined=False)[0]
    assert status == 75
    last = printed.strip().splitlines()[-1]
    assert last.startswith(f"forge: stopped by {signal.Signals(number).name}: ")
    assert last.endswith("step_4 holds the state to resume from; the same command resumes it.")
    assert "stopped by" in (tmp_path / "run" / "log.txt").read_text().splitlines()[-1]
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4]
