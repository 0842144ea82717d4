"""LoRA adapters: out, back and proved."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from forge_dist import ExportError, check_export, export_model, load_model, load_trained

peft = pytest.importorskip("peft", reason="peft is an extra of forge-dist: pip install 'forge-dist[peft]'")
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")


def attach(base, name="default", **options):
    """A PeftModel on the base of that path, trained a little, in training mode."""
    options = {
        "r": 2,
        "lora_alpha": 4,
        "lora_dropout": 0.5,
        "target_modules": ["q_proj", "down_proj"],
        "task_type": "CAUSAL_LM",
    } | options
    model = peft.get_peft_model(
        load_model(base, dtype=torch.float32, device="cpu"), peft.LoraConfig(**options), adapter_name=name
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.train()


@pytest.mark.parametrize("name", ["default", "mine"])
def test_round_trip_through_plain_peft(save_base, architecture, tmp_path, tokenizer, name):
    """Plain PEFT on a fresh base reads every adapter tensor back as it was, whatever the adapter was called."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base = save_base(architecture)
    model = attach(base, name)
    directory = export_model(model, tmp_path / "out", tokenizer=tokenizer)
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {file.name for file in directory.iterdir()}
    assert not [file for file in directory.iterdir() if file.is_dir() or file.name in {"model.safetensors", "README.md"}]
    config = json.loads((directory / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["inference_mode"], config["r"]) == (base, True, 2)
    back = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), directory, adapter_name=name)
    for key, tensor in model.state_dict().items():
        assert torch.equal(back.state_dict()[key], tensor), key
    assert AutoTokenizer.from_pretrained(directory).chat_template == tokenizer.chat_template


def test_the_model_in_memory_goes_on(base, tmp_path, state_of, samples):
    """After export and check: same bits, same trainable parameters, same mode, same random state, same configuration."""
    model = attach(base)
    before, trainable = state_of(model), [name for name, p in model.named_parameters() if p.requires_grad]
    config = model.peft_config["default"].to_dict()
    state = torch.random.get_rng_state()
    check_export(model, export_model(model, tmp_path / "out", dtype=torch.bfloat16), samples)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())
    assert [name for name, p in model.named_parameters() if p.requires_grad] == trainable
    assert model.peft_config["default"].to_dict() == config
    assert model.training


def test_an_export_passes(save_base, architecture, tmp_path, samples):
    """The adapter passes its check with dropout in its configuration; tensors are counted without the base."""
    model = attach(save_base(architecture))
    found = check_export(model, export_model(model, tmp_path / "out"), samples)
    assert found.difference <= 1e-6
    assert found.tolerance == 1e-5
    assert found.tensors == 8  # A and B of two projections in two layers


def test_an_adapter_in_bfloat16_passes(base, tmp_path, samples):
    """Floats are cast on the way out, in the file alone, and the looser bound holds."""
    model = attach(base)
    directory = export_model(model, tmp_path / "out", dtype=torch.bfloat16)
    assert {t.dtype for t in load_file(directory / "adapter_model.safetensors").values()} == {torch.bfloat16}
    found = check_export(model, directory, samples)
    assert found.tolerance == 1e-1
    assert found.difference <= 1e-2


def test_modules_to_save_travel(base, tmp_path, samples):
    """A module that is trained whole beside the adapter is exported and checked with it."""
    model = attach(base, modules_to_save=["norm"])
    directory = export_model(model, tmp_path / "out")
    assert "base_model.model.model.norm.weight" in load_file(directory / "adapter_model.safetensors")
    assert check_export(model, directory, samples).difference <= 1e-6


def change_file(directory, change):
    """Load the adapter's tensors, change the dict, save them again."""
    file = directory / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(min(t)), "lacks tensor"),
        (lambda t: t.update({"extra": torch.zeros(1)}), "unknown tensor extra"),
        (lambda t: t[min(t)].view(torch.int32)[0, 0].add_(1), "is not the one in memory"),
    ],
)
def test_sabotage_is_found(base, tmp_path, samples, change, message):
    """A tensor that is missing, too many or different by its last bit is named."""
    model = attach(base)
    directory = export_model(model, tmp_path / "out")
    change_file(directory, change)
    with pytest.raises(ExportError, match=message):
        check_export(model, directory, samples)


@pytest.mark.parametrize("file", ["adapter_model.safetensors", "adapter_config.json"])
def test_a_missing_file_is_found(base, tmp_path, samples, file):
    """Neither file can be done without."""
    model = attach(base)
    directory = export_model(model, tmp_path / "out")
    (directory / file).unlink()
    with pytest.raises(ExportError, match=file.split(".")[0]):
        check_export(model, directory, samples)


def test_a_wrong_scale_is_found(base, tmp_path, samples):
    """Right tensors with a wrong lora_alpha compute another loss."""
    model = attach(base)
    directory = export_model(model, tmp_path / "out")
    config = json.loads((directory / "adapter_config.json").read_text())
    (directory / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 400}))
    with pytest.raises(ExportError, match="nats per token instead of"):
        check_export(model, directory, samples)


def test_a_changed_base_is_found(base, tmp_path, samples):
    """If the base in memory is no longer the base on disk, the adapter alone is not the model; that is refused."""
    model = attach(base)
    directory = export_model(model, tmp_path / "out")
    with torch.no_grad():
        model.get_base_model().model.norm.weight[0] += 1e-3
    with pytest.raises(ExportError, match=r"norm\.weight that is not the one in memory"):
        check_export(model, directory, samples)


def test_an_adapter_without_a_base_is_exported_and_not_vouched_for(make_model, tmp_path, samples):
    """A base that came from no directory: the adapter is written (no work is lost), the check says what is missing."""
    model = peft.get_peft_model(make_model("llama-tied"), peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    directory = export_model(model, tmp_path / "out")
    with pytest.raises(ExportError, match="does not name its base model"):
        check_export(model, directory, samples)


def test_the_hub_is_not_asked(base, tmp_path):
    """Writing an adapter whose base is a hub name looks nothing up (PEFT warns, offline, where it did)."""
    model = attach(base)
    model.peft_config["default"].base_model_name_or_path = "nobody/no-such-model"
    directory = export_model(model, tmp_path / "out")
    assert json.loads((directory / "adapter_config.json").read_text())["base_model_name_or_path"] == "nobody/no-such-model"


def test_a_relative_base_is_found_from_anywhere(base, tmp_path, monkeypatch, samples):
    """A base that was loaded by a relative path is named by its absolute one, in the export alone."""
    from transformers import AutoModelForCausalLM

    monkeypatch.chdir(Path(base).parent)
    model = attach(Path(base).name)
    before = model.peft_config["default"].to_dict()
    directory = export_model(model, "out")
    assert model.peft_config["default"].to_dict() == before
    assert before["base_model_name_or_path"] == Path(base).name
    config = json.loads((directory / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == base
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    check_export(model, directory, samples)
    plain = AutoModelForCausalLM.from_pretrained(peft.PeftConfig.from_pretrained(directory).base_model_name_or_path)
    for back in (
        load_trained(str(directory), dtype=torch.float32, device="cpu"),
        peft.PeftModel.from_pretrained(plain, directory),
        peft.AutoPeftModelForCausalLM.from_pretrained(directory),
    ):
        for key, tensor in model.state_dict().items():
            assert torch.equal(back.state_dict()[key], tensor), key


def test_several_adapters_are_refused(base, tmp_path):
    """A directory holds one adapter; which one is not guessed."""
    model = attach(base)
    model.add_adapter("second", peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    with pytest.raises(ExportError, match="2 adapters .default, second."):
        export_model(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()
