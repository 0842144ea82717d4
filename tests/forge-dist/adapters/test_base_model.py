"""An adapter directory knows its base by what that holds, and is not put on another."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from forge_dist import (
    ExportError,
    ModelError,
    adapter_base,
    check_export,
    export_model,
    load_model,
    load_trained,
    model_identity,
)

from ...ranks import run_on_ranks
from ..divided import SAMPLES, ready, strategy_of
from ..loading.test_identity import changed_config, changed_weight

peft = pytest.importorskip("peft", reason="peft is an extra of forge-dist: pip install 'forge-dist[peft]'")
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
CPU32 = {"dtype": torch.float32, "device": "cpu"}


def attach(base):
    model = peft.get_peft_model(
        load_model(base, **CPU32), peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    )
    return model.eval()


def test_an_adapter_says_its_base(base, tmp_path):
    """Path and identity, and that the base was not quantized; PEFT reads the directory as ever."""
    directory = export_model(attach(base), tmp_path / "out")
    found = adapter_base(directory)
    assert (found.path, found.identity, found.quantization) == (base, model_identity(base), None)
    peft.PeftModel.from_pretrained(load_model(base, **CPU32), directory)


@pytest.mark.parametrize("change", [changed_config, changed_weight])
def test_another_base_is_refused(base, tmp_path, change):
    """An adapter whose base was changed under its path is neither loaded nor called right."""
    model = attach(base)
    directory = export_model(model, tmp_path / "out")
    load_trained(str(directory), **CPU32)
    change(Path(base))
    with pytest.raises(
        ModelError, match=r"out is an adapter of another base model than .*base holds now \(\w{12} then, \w{12} now"
    ):
        load_trained(str(directory), **CPU32)
    with pytest.raises(ExportError, match="an adapter of another base model"):
        check_export(model, directory, SAMPLES)


def test_the_right_base_may_move(base, tmp_path):
    """What counts is what it holds."""
    directory = export_model(attach(base), tmp_path / "out")
    shutil.move(base, tmp_path / "elsewhere")
    file = directory / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": str(tmp_path / "elsewhere")}))
    assert load_trained(str(directory), **CPU32)
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": str(tmp_path / "gone")}))
    with pytest.raises(ModelError, match="its base model cannot be loaded.*gone"):
        load_trained(str(directory), **CPU32)


def test_an_adapter_of_plain_peft_is_taken_as_it_is(base, tmp_path):
    """It says nothing of its base, so nothing is held against it."""
    attach(base).save_pretrained(tmp_path / "plain")
    assert adapter_base(tmp_path / "plain").identity is None
    changed_weight(Path(base))
    assert load_trained(str(tmp_path / "plain"), **CPU32)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("forge_base.json", "{}", "forge_base.json is not what an export writes"),
        ("forge_base.json", "[", "forge_base.json is not what an export writes"),
        ("adapter_config.json", "{}", r"does not name its base model \(base_model_name_or_path\)"),
        ("adapter_config.json", "[]", "is no adapter directory"),
    ],
)
def test_broken_files_are_named(base, tmp_path, file, text, message):
    """With what to do about them."""
    directory = export_model(attach(base), tmp_path / "out")
    (directory / file).write_text(text)
    with pytest.raises(ModelError, match=message):
        adapter_base(directory)
    with pytest.raises(ModelError, match=r"no adapter directory"):
        adapter_base(tmp_path)


def test_a_model_without_a_path(make_model, tmp_path):
    """Of a base that was made in memory nothing is noted."""
    model = peft.get_peft_model(make_model("qwen3"), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    assert not (export_model(model, tmp_path / "out") / "forge_base.json").exists()


def _on_ranks(ranks, base, directory):
    strategy = strategy_of(ranks, "fsdp2", adapter=True)
    model, _ = ready(strategy, base, lora=True)
    where = export_model(model, Path(directory, "two"), strategy=strategy)
    ranks.barrier()
    if ranks.is_first:
        changed_config(Path(base))
    ranks.barrier()
    try:
        check_export(model, where, SAMPLES, strategy=strategy)
    except ExportError as error:
        return str(error)


@pytest.mark.slow
def test_on_two_ranks(base, tmp_path):
    """A divided model's adapter notes it too, and a changed base is refused on every rank."""
    identity = model_identity(base)
    reported = run_on_ranks(_on_ranks, 2, base, str(tmp_path))
    assert all("an adapter of another base model" in message for message in reported)
    assert adapter_base(tmp_path / "two").identity == identity
