"""The lint stops `forge.sft` unless lint=off; data may come from several weighted sources."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

import forge
from forge.cli._app import main
from forge.tasks._lint_check import warn_of_plain_text

from .conftest import conversations, write_rows

FEW: dict[str, Any] = {"max_steps": 2, "effective_batch_size": 4, "max_tokens_per_gpu": 256}


@pytest.fixture(scope="module")
def doubtful(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations, and on line 13 one whose answer is empty."""
    rows = [*conversations(12), {"messages": [{"role": "user", "content": "hello?"}, {"role": "assistant", "content": ""}]}]
    return write_rows(tmp_path_factory.mktemp("doubtful") / "doubtful.jsonl", rows)


def test_what_the_lint_stops_is_not_trained_on(model_dir: Path, doubtful: Path, tmp_path: Path) -> None:
    """The refusal names file, row, field, what was found and what overrules it; nothing is left behind."""
    with pytest.raises(forge.DataLintError, match="1 reasons? not to train on it") as caught:
        forge.sft(model_path=model_dir, data_path=doubtful, ckpt_output_dir=tmp_path / "run", **FEW)
    assert "doubtful.jsonl:13 messages[1].content" in str(caught.value)
    assert "(on_bad_row=skip leaves such rows out; `max_bad_rows` is the share" in str(caught.value)
    assert "lint=off" in str(caught.value)
    assert caught.value.exit_status == 2
    assert not (tmp_path / "run").exists()


def test_lint_off_is_recorded(model_dir: Path, doubtful: Path, tmp_path: Path) -> None:
    """With lint=off the run continues with a warning, and config.yaml has the origin; a bare off in YAML is a word."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("lint: off\n")
    forge.sft(recipe, model_path=model_dir, data_path=doubtful, ckpt_output_dir=tmp_path / "run", **FEW)
    config = (tmp_path / "run" / "config.yaml").read_text()
    assert yaml.safe_load(config)["lint"] == "off"
    assert "recipe" in next(line for line in config.splitlines() if line.startswith("lint:"))
    assert "WARNING: lint=off" in (tmp_path / "run" / "log.txt").read_text()


TEXTS = [{"question": f"what colour has the fig {at}?", "answer": "red"} for at in range(8)]
PLAIN = "learned without the chat template"


@pytest.mark.parametrize(
    ("names", "template", "warns"),
    [
        ({"question": "prompt", "answer": "completion"}, True, True),
        ({"question": "instruction", "answer": "output"}, True, False),
        pytest.param({"question": "prompt", "answer": "completion"}, False, False, marks=pytest.mark.slow),
    ],
)
def test_texts_beside_a_chat_template_are_warned_of(
    names: dict[str, str], template: bool, warns: bool, model_dir: Path, tmp_path: Path
) -> None:
    """A model that is asked by its template is warned of rows without it; conversations and base models are not."""
    model = model_dir
    if not template:
        model = tmp_path / "base"
        shutil.copytree(model_dir, model, ignore=shutil.ignore_patterns("chat_template*"))
        file = model / "tokenizer_config.json"
        settings = json.loads(file.read_text())
        settings.pop("chat_template", None)
        file.write_text(json.dumps(settings))
    run = tmp_path / "run"
    rows = write_rows(tmp_path / "rows.jsonl", TEXTS)
    forge.sft(model_path=model, data_path=rows, rename_columns=names, ckpt_output_dir=run, **FEW)
    assert (PLAIN in (run / "log.txt").read_text()) is warns
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert any(event["event"] == "warning" for event in events) is warns


def test_one_file_of_texts_among_others_is_warned_of(model_dir: Path, tmp_path: Path) -> None:
    """By its own first row: the rows before it are conversations."""
    chats = write_rows(tmp_path / "chats.jsonl", conversations(3))
    texts = write_rows(tmp_path / "texts.jsonl", [{"prompt": "a b", "completion": "red"}])
    tokenizer, said = forge.data.load_tokenizer(model_dir), []
    for number, files in enumerate(([chats], [chats, texts])):
        store = forge.data.prepare(files, tokenizer, tmp_path / f"{number}", progress=False)
        data = SimpleNamespace(data_path=files)
        warn_of_plain_text(tokenizer, data, store, SimpleNamespace(note=said.append))  # type: ignore[arg-type]
    assert len(said) == 1
    assert said[0].startswith("WARNING: prompt and answer of texts.jsonl:1 and others are text")


@pytest.mark.parametrize(
    ("named", "remedy"),
    [
        ("axolotl:alpaca", "leave out data_format axolotl:alpaca, which asks in Axolotl's text, or give alpaca"),
        ('axolotl:{"format": "{instruction}"}', "leave out data_format axolotl:{...}, which asks in Axolotl's text; rows need"),
    ],
)
@pytest.mark.parametrize("own", [True, False])
def test_a_format_that_asks_in_a_text_of_its_own(named: str, remedy: str, own: bool, model_dir: Path, tmp_path: Path) -> None:
    """The rows have the columns; it is the format that is to go, of all of data_path or of one entry."""
    chats = write_rows(tmp_path / "chats.jsonl", conversations(3))
    rows = write_rows(tmp_path / "rows.jsonl", [{"instruction": "a b", "input": "c", "output": "red"}])
    paths: Any = {str(chats): {}, str(rows): {"data_format": named}} if own else [rows]
    more: Any = {} if own else {"data_format": named}
    tokenizer, said = forge.data.load_tokenizer(model_dir), []
    store = forge.data.prepare(paths, tokenizer, tmp_path / "s", progress=False, format=more.get("data_format", "auto"))
    data = SimpleNamespace(data_path=paths, **more)
    warn_of_plain_text(tokenizer, data, store, SimpleNamespace(note=said.append))  # type: ignore[arg-type]
    assert len(said) == 1
    assert f"rows.jsonl:1 and others are text, and are {PLAIN}" in said[0]
    assert f"To learn them as they will be asked: {remedy}" in said[0]
    assert "rename_columns" not in said[0]


@pytest.mark.slow
def test_preferences_in_text_are_warned_of(model_dir: Path, tmp_path: Path) -> None:
    """Their remedy is another: lists of messages. A reward model writes nothing, and is not warned."""
    pairs = [{"prompt": f"what colour has the fig {at}?", "chosen": "red", "rejected": "blue"} for at in range(8)]
    rows = write_rows(tmp_path / "pairs.jsonl", pairs)
    forge.dpo(model_path=model_dir, data_path=rows, ckpt_output_dir=tmp_path / "dpo", **FEW)
    forge.reward(model_path=model_dir, data_path=rows, ckpt_output_dir=tmp_path / "reward", **FEW)
    assert f"{PLAIN} with which" in (tmp_path / "dpo" / "log.txt").read_text()
    assert "as lists of messages" in (tmp_path / "dpo" / "log.txt").read_text()
    assert PLAIN not in (tmp_path / "reward" / "log.txt").read_text()


def test_held_out_rows_that_are_trained_on_are_found(model_dir: Path, chats: Path, tmp_path: Path) -> None:
    """Measuring on rows that are trained on would flatter the model: refused, naming the row."""
    copy = write_rows(tmp_path / "held_out.jsonl", conversations(30)[22:])
    with pytest.raises(forge.DataLintError, match=r"held_out.jsonl:1\b.*trained on"):
        forge.sft(model_path=model_dir, data_path=chats, eval_data_path=copy, ckpt_output_dir=tmp_path / "run", **FEW)


@pytest.mark.slow
def test_a_split_keeps_repetitions_on_one_side(model_dir: Path, tmp_path: Path) -> None:
    """Rows that are there twice are held out together or trained on together, so a split of them is no overlap.
    The run's data say which they are.
    """
    rows = write_rows(tmp_path / "twice.jsonl", conversations(20) * 2)
    result = forge.sft(model_path=model_dir, data_path=rows, validation_split=0.3, ckpt_output_dir=tmp_path / "run", **FEW)
    assert result.eval_loss_after is not None
    store = forge.data.TokenStore.open(tmp_path / "run" / "data" / "train")
    held_out = {tuple(store[index].input_ids.tolist()) for index in store.held_out}
    trained = {tuple(store[index].input_ids.tolist()) for index in range(len(store)) if index not in store.held_out}
    assert len(store.held_out) == 2 * len(held_out) == 12
    assert not held_out & trained


def test_preferences_are_not_imitated(model_dir: Path, tmp_path: Path) -> None:
    """A file of preferences is refused by `forge.sft`: imitating the rejected answers too is not what anybody asked for."""
    rows = write_rows(
        tmp_path / "pairs.jsonl", [{"prompt": f"{n}?", "chosen": f"yes {n}", "rejected": f"no {n}"} for n in range(8)]
    )
    with pytest.raises(forge.SettingsError, match="preference"):
        forge.sft(model_path=model_dir, data_path=rows, ckpt_output_dir=tmp_path / "run", **FEW)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_several_files_with_weights(model_dir: Path, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Several files train together; weights give each its share of every step, whatever its size."""
    few = write_rows(tmp_path / "few.jsonl", conversations(40)[36:])
    assert (
        main(
            [
                "sft",
                "--model-path",
                str(model_dir),
                "--data-path",
                str(chats),
                str(few),
                "--ckpt-output-dir",
                str(tmp_path / "a"),
                "--effective-batch-size",
                "4",
                "--max-tokens-per-gpu",
                "256",
            ]
        )
        == 0
    )
    assert "read 28 rows" in (tmp_path / "a" / "log.txt").read_text()
    capsys.readouterr()
    forge.sft(model_path=model_dir, data_path={chats: 1, few: 1}, ckpt_output_dir=tmp_path / "b", **FEW)
    plan = forge.packing.BatchPlan.load(tmp_path / "b" / "plan" / "plan.npz")
    for step in range(plan.num_steps):
        assert sum(sample >= 24 for sample in plan.samples(step)) == 2
