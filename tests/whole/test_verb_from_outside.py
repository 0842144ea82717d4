"""A training verb is one file and one row: a made-up one is called, listed, documented and launched."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

import forge
from forge.cli._app import main
from forge.cli._settings_page import settings_page
from forge.verbs._registry import VERBS, task_of

from .starts import metrics

TOY = '''"""`toy`: supervised fine-tuning that keeps the logits small."""

import attrs

import forge_algos
from forge.tasks._offline import OfflineSteps
from forge.verbs._registry import verb
from forge.verbs._sft import SFT, SFTSettings


@attrs.frozen(kw_only=True)
class ToyObjectiveSettings:
    """Settings of the toy objective."""

    logit_penalty: float = attrs.field(default=0.5, validator=attrs.validators.gt(0.0))
    """Weight of the squared log-partition function, above 0."""


@attrs.frozen(kw_only=True)
class ToySettings(SFTSettings):
    """Settings of the toy verb."""

    objective: ToyObjectiveSettings


class Toy(SFT):
    """SFT with a penalty on the logits."""

    name = "toy"
    settings = ToySettings
    about = "Toy: supervised fine-tuning with small logits."

    def step_source(self, run):
        """Take the steps of the batch plan."""
        penalty = run.settings.objective.logit_penalty
        return OfflineSteps(run, forge_algos.SFT(forge_algos.SupervisedSettings(z_loss=penalty)))


toy = verb(Toy())
'''
SHORT: dict[str, Any] = {"max_steps": 2, "effective_batch_size": 4, "max_tokens_per_gpu": 256, "max_grad_norm": 0.0}


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The verb's function, once its file lies on the path and its row is in the table."""
    (tmp_path / "forge_test_toy.py").write_text(TOY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(VERBS, "toy", "forge_test_toy")
    yield importlib.import_module("forge_test_toy").toy
    sys.modules.pop("forge_test_toy")


def losses(run: Path) -> list[float]:
    """The loss of every step."""
    return [line["loss"] for line in metrics(run) if "loss" in line]


@pytest.mark.slow
def test_by_a_call_and_by_the_command_line(
    toy: Any, model_dir: Path, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both train, to the same bits, with its own setting; an error about that setting names the flag."""
    given = {"model_path": str(model_dir), "data_path": str(chats), **SHORT}
    assert toy(**given, logit_penalty=0.25, ckpt_output_dir=tmp_path / "python").steps == 2
    words = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    assert main(["toy", *words, "--logit-penalty", "0.25", "--ckpt-output-dir", str(tmp_path / "shell")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'shell' / 'hf_format' / 'samples_8'}\n"
    forge.sft(**given, z_loss=0.25, ckpt_output_dir=tmp_path / "sft")
    assert losses(tmp_path / "shell") == losses(tmp_path / "python") == losses(tmp_path / "sft")
    assert main(["toy", *words, "--logit-penalty", "-1", "--ckpt-output-dir", str(tmp_path / "no")]) == 2
    assert "--logit-penalty" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.lane
def test_on_two_ranks(toy: Any, model_dir: Path, chats: Path, tmp_path: Path) -> None:
    """Processes that a launcher starts find the verb by its module."""
    given = {"model_path": str(model_dir), "data_path": str(chats), **SHORT}
    toy(**given, ckpt_output_dir=tmp_path / "one")
    toy(**given, nproc_per_node=2, ckpt_output_dir=tmp_path / "two")
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)


@pytest.mark.usefixtures("toy")
def test_it_is_listed_and_documented(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """`forge --help`, `forge toy --help` and docs/settings.md have it, from its row and its docstrings alone."""
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["--help"]) == 0
    assert task_of("toy").about in capsys.readouterr().out
    assert main(["toy", "--help"]) == 0
    assert "Weight of the squared log-partition function, above 0." in capsys.readouterr().out
    page = settings_page()
    assert "## forge toy\n\nToy: supervised fine-tuning with small logits.\n" in page
    assert "| `logit_penalty` | number | `0.5` | Weight of the squared log-partition function, above 0. |" in page
