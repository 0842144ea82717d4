"""`forge config`: recipes checked, converted and described."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forge.cli import _app as _cli


def test_convert_and_validate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A converted file is a recipe of its verb; what is missing and what was lost is said, and nothing is written over."""
    theirs, ours = tmp_path / "axolotl.yaml", tmp_path / "recipe.yaml"
    theirs.write_text(
        "base_model: m\ndatasets: [{path: a.jsonl, type: chat_template}]\nmicro_batch_size: 4\nwarmup_ratio: 0.1\n"
        "hub_model_id: x\n"
    )
    assert _cli.main(["config", "convert", str(theirs), "--output", str(ours)]) == 0
    said = capsys.readouterr().out
    for part in (
        "forge sft",
        "to be given: ckpt_output_dir",
        "not carried over, to be looked at: 1",
        "not carried over, without effect on what is trained: 1\n  hub_model_id: 'x'",
    ):
        assert part in said
    assert "# Not carried over, without effect on what is trained:\n#   hub_model_id" in ours.read_text()
    assert _cli.main(["config", "validate", str(ours)]) == 0
    assert "7 settings; to be given: ckpt_output_dir" in capsys.readouterr().out
    assert _cli.main(["config", "convert", str(theirs), "--output", str(ours)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert _cli.main(["config", "convert", str(theirs)]) == 0
    assert capsys.readouterr().out == ours.read_text()
    assert "beta2: 0.999  # Axolotl's default\n" in ours.read_text()
    assert _cli.main(["config", "convert", str(theirs), "--verb", "stf"]) == 2
    assert "there is no verb 'stf'" in capsys.readouterr().err


def test_validate_refuses_more_warmup_than_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where the recipe says both; nothing has to be prepared for it."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("verb: sft\nmodel_path: m\ndata_path: d\nckpt_output_dir: o\nmax_steps: 10\nwarmup_steps: 50\n")
    assert _cli.main(["config", "validate", str(recipe)]) == 2
    assert "warmup_steps=50 is more than the 10 steps of this run" in capsys.readouterr().err


def test_validate_says_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All faults of a recipe in one message, status 2, and nothing is run."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("verb: sft\nlr: 3\nseed: x\nbase_model: m\nlora_r: 4\n")
    assert _cli.main(["config", "validate", str(recipe)]) == 2
    said = capsys.readouterr().err
    for part in ("2 unknown settings", "learning_rate", "model_path", "seed must be a whole number", "lora_r"):
        assert part in said
    recipe.write_text("seed: 3\nbeta: 0.2\n")
    assert _cli.main(["config", "validate", str(recipe)]) == 2
    said = capsys.readouterr().err
    assert "which verb" in said
    assert "Of no verb" not in said
    recipe.write_text("seed: 3\nlearning_rat: 0.1\nnone_such_name: 1\n")
    assert _cli.main(["config", "validate", str(recipe)]) == 2
    said = capsys.readouterr().err
    for part in ("which verb", "Of no verb: 2 unknown settings", "did you mean `learning_rate`?", "'none_such_name'"):
        assert part in said
    recipe.write_text("seed: 3\n")
    assert _cli.main(["config", "validate", str(recipe), "dpo"]) == 0
    recipe.write_text("verb: dpo\n")
    assert _cli.main(["sft", str(recipe)]) == 2
    assert "is a recipe for forge dpo" in capsys.readouterr().err


def test_a_runs_config_names_its_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The verb of a config.yaml stands in the run.json beside it."""
    (tmp_path / "config.yaml").write_text("beta: 0.3\n")
    (tmp_path / "run.json").write_text('{"verb": "dpo"}')
    assert _cli.main(["config", "validate", str(tmp_path / "config.yaml")]) == 0
    assert "forge dpo" in capsys.readouterr().out


def test_schema(capsys: pytest.CaptureFixture[str]) -> None:
    """`forge config schema VERB` prints JSON."""
    assert _cli.main(["config", "schema", "dpo"]) == 0
    assert "beta" in json.loads(capsys.readouterr().out)["properties"]


@pytest.mark.slow
def test_completion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`forge --install-completion` writes a script that knows commands and their options."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert _cli.main(["--install-completion", "--shell", "bash"]) == 0
    assert "completion" in capsys.readouterr().out
    script = max((file for file in tmp_path.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size).read_text()
    for word in ("--learning-rate", "validate", "--num-generations"):
        assert word in script
