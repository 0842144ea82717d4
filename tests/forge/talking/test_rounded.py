"""What reads an export of a run with `qat`: the model of its GGUF file, or a line that says otherwise."""

from __future__ import annotations

import shutil
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import forge
import forge_algos
import forge_dist
from forge.saving._directories import trained_for
from forge.talking import _evaluate
from forge.talking._model import AnsweringModel
from forge.talking._rounded import load_rounded, rounding_of

pytest.importorskip("gguf")
pytest.importorskip("accelerate")


@pytest.fixture
def run(model_dir: Path, tmp_path: Path) -> Path:
    """What a run with qat=q4_0 leaves that is read later."""
    shutil.copytree(model_dir, tmp_path / "hf_format" / "samples_4")
    (tmp_path / "config.yaml").write_text(f"model_path: {model_dir}\nqat: q4_0\n")
    return tmp_path


def rounded(path: Path) -> dict[str, torch.Tensor]:
    """Return a model's weights as its file has them."""
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    kinds, found = forge_dist.rounded_weights(model, "q4_0"), model.state_dict()
    return {
        name: forge_algos.fake_quantize(found[name].transpose(-1, along), kind).transpose(-1, along)
        for name, (kind, along) in kinds.items()
    }


def test_whose_weights_are_rounded(run: Path, model_dir: Path) -> None:
    """Those in a run's hf_format/, and not its further exports, another model or another program's configuration."""
    assert trained_for(run / "hf_format" / "samples_4") == trained_for(run / "hf_format" / "best") == "q4_0"
    assert trained_for(run / "exports" / "float32") is trained_for(model_dir) is trained_for("org/model") is None
    for text in ("model_path: m\nqat: null\n", "model_path: m\n", "- a list\n"):
        (run / "config.yaml").write_text(text)
        assert rounding_of(run / "hf_format" / "samples_4") == (None, "")


def test_it_answers_with_the_weights_of_the_file(run: Path) -> None:
    """To the bit, in the type that the machine computes in, to which they are rounded last."""
    model = AnsweringModel(run)
    assert model.about.endswith("weights rounded to q4_0, as `forge export --format gguf` writes them")
    path = run / "hf_format" / "samples_4"
    wanted, found = rounded(path), model._model.state_dict()
    assert all(torch.equal(found[name], weight.to(found[name].dtype)) for name, weight in wanted.items())
    half = load_rounded(str(path), rounding_of(path), dtype=torch.bfloat16, device="cpu")
    assert all(torch.equal(half.get_parameter(name), weight.bfloat16()) for name, weight in wanted.items())
    assert {buffer.dtype for buffer in half.buffers()} == {torch.float32}


def test_without_gguf_it_says_so(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights are read as they are."""

    def missing() -> None:
        raise forge_dist.ModelError("GGUF files need gguf, which is not installed: `pip install x`")

    monkeypatch.setattr(forge_dist, "require_gguf", missing)
    model = AnsweringModel(run)
    assert "WARNING: weights as they are, and not those of the q4_0 file it was trained for: GGUF files need" in model.about
    plain = AutoModelForCausalLM.from_pretrained(run / "hf_format" / "samples_4")
    assert torch.equal(model._model.lm_head.weight, plain.lm_head.weight)


def test_scores_are_those_of_the_file(
    run: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The harness is given rounded weights, of the base too, and the scores' file names the type."""
    scored: list[Any] = []
    harness: Any = types.ModuleType("lm_eval")
    harness.simple_evaluate = lambda **_: {"results": {}}
    inner: Any = types.ModuleType("lm_eval.models.huggingface")
    inner.HFLM = lambda pretrained, **_: scored.append(pretrained)
    names = {"lm_eval": harness, "lm_eval.models.huggingface": inner, "lm_eval.evaluator": types.ModuleType("evaluator")}
    for name, module in names.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(_evaluate, "version", lambda _: "0")
    path = run / "hf_format" / "samples_4"
    for name, model in (("before", model_dir), ("samples_4", path)):
        _evaluate._score(run, name, str(model), rounding_of(path), ["fruits"], None, {})
        assert '"rounded_to": "q4_0"' in (run / "evals" / f"{name}.json").read_text()
    wanted = rounded(path)
    assert all(
        torch.equal(found.state_dict()[name], weight.to(found.dtype)) for found in scored for name, weight in wanted.items()
    )
    assert len(scored) == capsys.readouterr().err.count("; weights rounded to q4_0, as `forge export") == 2


def test_a_server_says_that_it_does_not_round(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the command that serves the rounded ones."""
    done: Any = types.SimpleNamespace(wait=lambda *_: 0, poll=lambda: 0)
    monkeypatch.setattr("forge.talking._serve.subprocess.Popen", lambda *_, **__: done)
    monkeypatch.setattr("forge.talking._serve.find_spec", lambda _: True)
    monkeypatch.setattr("forge.talking._serve._check_address", lambda *_: None)
    forge.serve(run)
    said = capsys.readouterr().err
    assert "serves the unrounded weights of a run with qat=q4_0" in said
    assert f"`forge export {run} --output model-gguf --format gguf && llama-server" in said
