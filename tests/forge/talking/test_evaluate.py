"""`forge eval`: what is refused, and with the harness itself: scores of a task with local data."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import forge
from forge.cli._app import main
from forge.talking import _evaluate
from forge.talking._evaluate import _figures, as_table

from ...whole.conftest import conversations, write_rows


def test_a_metric_has_a_plain_name() -> None:
    """The harness' filter is named where there is one."""
    found = {"alias": "fruits", "acc,none": 1, "acc_stderr,none": "N/A", "exact_match,strict": 0.5}
    assert _figures(found) == {"acc": 1.0, "exact_match (strict)": 0.5}
    scores = {"before": {"fruits": {"acc": 0.25, "acc_stderr": 0.1}}, "samples_4": {"fruits": {"acc": 1.0, "acc_stderr": 0.1}}}
    assert as_table(scores) == "fruits  acc  before 0.2500  samples_4 1.0000"


def test_what_cannot_be_scored_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is loaded, and nothing is written."""
    with pytest.raises(forge.RunDirectoryError, match="no run directory"):
        forge.evaluate(tmp_path, tasks=["a"])
    (tmp_path / "config.yaml").write_text("model_path: a\n")
    for given, said in (
        ({"tasks": []}, "tasks is empty"),
        ({"tasks": ["a"], "limit": 0}, "limit must be at least 1"),
        ({"tasks": ["a"], "task_dir": tmp_path / "no"}, "there is no such directory"),
    ):
        with pytest.raises(forge.SettingsError, match=said):
            forge.evaluate(tmp_path, **given)  # ty: ignore
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    (tasks / "fine.yaml").write_text("task: fine\nprocess_docs: !function utils.process\n")
    monkeypatch.setattr(_evaluate, "find_spec", lambda _: None)
    with pytest.raises(forge.SettingsError, match="lm-evaluation-harness is not installed"):
        forge.evaluate(tmp_path, tasks=["fine"], task_dir=tasks)
    (tasks / "torn.yaml").write_text("task: torn\n  x: [\n")
    with pytest.raises(forge.SettingsError, match=r"task_dir: .*torn\.yaml cannot be read: .*line 2"):
        forge.evaluate(tmp_path, tasks=["torn"], task_dir=tasks)
    with pytest.raises(forge.SettingsError, match=r"pip install 'forge-llm\[eval\]'"):
        forge.evaluate(tmp_path, tasks=["a"])
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["config.yaml", "tasks"]


def test_git_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would print that a run's directory is no repository."""
    evaluator: Any = types.SimpleNamespace(get_git_commit_hash=lambda: "asked")
    monkeypatch.setitem(sys.modules, "lm_eval", types.ModuleType("lm_eval"))
    monkeypatch.setitem(sys.modules, "lm_eval.evaluator", evaluator)
    with _evaluate._without_git():
        assert evaluator.get_git_commit_hash() is None
    assert evaluator.get_git_commit_hash() == "asked"


@pytest.mark.lane
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_task_with_local_data(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Base and export are scored without a network; files and card have the scores; an unknown task is refused."""
    pytest.importorskip("lm_eval", reason="the extra `eval` of forge-llm")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    data = write_rows(tmp_path / "fruits.jsonl", [{"question": "what colour has the fig?", "answer": 0}] * 3)
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "fruits.yaml").write_text(
        f"task: forge_fruits\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\ntest_split: test\n"
        "output_type: multiple_choice\ndoc_to_text: '{{question}}'\ndoc_to_target: '{{answer}}'\n"
        "doc_to_choice: [' the fig is red.', ' zzz']\nmetric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]\n"
    )
    chats, run = write_rows(tmp_path / "chats.jsonl", conversations()), tmp_path / "run"
    forge.sft(
        model_path=model_dir, data_path=chats, ckpt_output_dir=run, max_steps=3, effective_batch_size=4, learning_rate=1e-2
    )
    words = ["eval", str(run), "--tasks", "forge_fruits", "--task-dir", str(tmp_path / "tasks")]
    assert "forge_fruits" not in (run / "report.html").read_text()
    assert main(words) == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines()[-1].startswith("forge_fruits  acc  before ")
    assert "already-initialized" not in printed.err
    assert "forge_fruits" in (run / "report.html").read_text()
    before, after = (json.loads((run / "evals" / f"{name}.json").read_text()) for name in ("before", "samples_12"))
    assert {each["results"]["forge_fruits"]["acc"] for each in (before, after)} <= {0.0, 1.0}, "three times the same question"
    assert (before["model"], after["model"]) == (model_dir.name, "samples_12")
    card = (forge.export(run, tmp_path / "out") / "README.md").read_text()
    assert "| forge_fruits: acc |" in card
    with pytest.raises(forge.SettingsError, match="Did you mean 'forge_fruits'"):
        forge.evaluate(run, tasks=["forge_fruit"], task_dir=tmp_path / "tasks")
    data.unlink()
    monkeypatch.setattr(_evaluate, "_score", lambda *_: pytest.fail("a model was loaded for data that are not there"))
    with pytest.raises(forge.SettingsError, match=r"tasks forge_fruits: .*fruits\.jsonl"):
        forge.evaluate(run, tasks=["forge_fruits"], task_dir=tmp_path / "tasks")


def test_the_network_is_asked_only_for_what_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Local data are loaded without it; for others the Hub is asked once for an answer, and waited for if it gives one."""
    from datasets import config
    from huggingface_hub import constants

    calls: list[str] = []

    class Session:
        answers = False

        def head(self, url: str, timeout: float) -> None:
            calls.append("head")
            assert (url, timeout) == (constants.ENDPOINT, 5.0)
            if not self.answers:
                raise ConnectionError("no route to host")

    class Manager:
        local = True

        def load(self, tasks: list[str]) -> None:
            assert constants.HF_HUB_OFFLINE is config.HF_HUB_OFFLINE
            calls.append("here" if config.HF_HUB_OFFLINE else "network")
            if not self.local and config.HF_HUB_OFFLINE:
                raise ConnectionError(f"{tasks[0]} is not here")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.get_session", Session)
    manager = Manager()
    with _evaluate._data(["a"], manager):
        assert config.HF_HUB_OFFLINE
    assert calls == ["here"]
    manager.local = False
    with pytest.raises(forge.SettingsError, match="tasks a: .*a is not here"), _evaluate._data(["a"], manager):
        pytest.fail("there are no data")
    assert calls == ["here"] * 2 + ["head"]
    assert constants.HF_HUB_OFFLINE is config.HF_HUB_OFFLINE is False
    Session.answers = True
    with _evaluate._data(["a"], manager):
        assert config.HF_HUB_OFFLINE is False
    assert calls[3:] == ["here", "head", "network"]
    constants.HF_HUB_OFFLINE = config.HF_HUB_OFFLINE = True
    with pytest.raises(forge.SettingsError), _evaluate._data(["a"], manager):
        pytest.fail("the user wants no network")
    assert calls[6:] == ["here"]
