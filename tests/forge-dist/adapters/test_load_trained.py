"""What was trained, loaded for use."""

import json
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from forge_dist import ModelError, export_model, load_model, load_trained

CPU32 = {"dtype": torch.float32, "device": "cpu"}


def test_a_model_directory_is_loaded_as_it_is(base):
    """A full export is what load_model loads."""
    model, expected = load_trained(base, **CPU32), load_model(base, **CPU32)
    assert type(model) is type(expected)
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in expected.state_dict().items())


def test_a_path_that_is_none_is_refused():
    """The refusals are those of load_model."""
    with pytest.raises(ModelError, match="neither a directory here"):
        load_trained("/no/such/model", **CPU32)


@pytest.fixture
def gemma2(tmp_path):
    """Path of a tiny Gemma 2, whose soft-capped attention sdpa cannot compute."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        vocab_size=61,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        attn_logit_softcapping=50.0,
        max_position_embeddings=64,
    )
    Gemma2ForCausalLM(config).save_pretrained(tmp_path / "gemma2")
    return str(tmp_path / "gemma2")


def test_attention_is_what_the_architecture_has(gemma2, base):
    """Sdpa where there is sdpa; a Gemma 2, which trains with eager attention, is loaded with it."""
    assert load_trained(base, **CPU32).config._attn_implementation == "sdpa"
    model, trained = load_trained(gemma2, **CPU32), load_model(gemma2, attention="eager", **CPU32)
    assert model.config._attn_implementation == "eager"
    assert not model.training
    input_ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(model(input_ids=input_ids).logits, trained(input_ids=input_ids).logits)


def test_the_attention_that_a_directory_names_is_not_taken(base, edit_config):
    """A config.json cannot have a kernel fetched from the hub."""
    edit_config(base, attn_implementation="nobody/no-such-kernel")
    assert load_trained(base, **CPU32).config._attn_implementation == "sdpa"


def test_a_path_that_cannot_be_looked_up_is_refused():
    """What the file system does not even look up is a ModelError as well."""
    with pytest.raises(ModelError, match="cannot be looked up"):
        load_trained("m" * 300, **CPU32)


def test_an_adapter_without_peft_says_what_to_install(tmp_path, monkeypatch):
    """Where the extra is missing the exact command is given."""
    (tmp_path / "adapter_config.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ModelError, match=r"pip install 'forge-dist\[peft\]'"):
        load_trained(str(tmp_path), **CPU32)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
class TestWithPeft:
    """Adapters, where the extra is installed."""

    @pytest.fixture
    def model(self, base):
        """A base with an adapter that does something."""
        peft = pytest.importorskip("peft", reason="peft is an extra of forge-dist: pip install 'forge-dist[peft]'")
        config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
        return peft.get_peft_model(load_model(base, **CPU32), config).eval()

    @pytest.fixture
    def adapter(self, model, tmp_path):
        """Its export."""
        return export_model(model, tmp_path / "adapter")

    def test_an_adapter_comes_on_its_base(self, model, adapter):
        """The logits are those of the model that was exported, in eval mode, and it generates."""
        back = load_trained(str(adapter), **CPU32)
        input_ids = torch.tensor([[5, 6, 7]])
        assert not back.training
        assert torch.equal(back(input_ids=input_ids).logits, model(input_ids=input_ids).logits)
        assert back.generate(input_ids=input_ids, max_new_tokens=2, do_sample=False, pad_token_id=0).shape[1] > 3

    def test_an_adapter_on_a_base_without_sdpa(self, gemma2, tmp_path):
        """Of an adapter it is the base's attention that must fit."""
        import peft

        config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
        model = peft.get_peft_model(load_model(gemma2, attention="eager", **CPU32), config)
        back = load_trained(str(export_model(model, tmp_path / "out")), **CPU32)
        assert back.get_base_model().config._attn_implementation == "eager"

    def test_a_base_that_is_gone_is_named(self, adapter, tmp_path):
        """The error says that the adapter's base is missing, and which."""
        (tmp_path / "base").rename(tmp_path / "moved")
        with pytest.raises(ModelError, match="base model cannot be loaded: .*tmp|base"):
            load_trained(str(adapter), **CPU32)

    def test_no_base_named(self, adapter):
        """An adapter that names no base is refused."""
        config = json.loads((adapter / "adapter_config.json").read_text()) | {"base_model_name_or_path": None}
        (adapter / "adapter_config.json").write_text(json.dumps(config))
        with pytest.raises(ModelError, match="does not name its base model"):
            load_trained(str(adapter), **CPU32)

    def test_an_incomplete_adapter_is_refused(self, adapter):
        """A missing tensor, of which PEFT would only warn, is named."""
        tensors = load_file(adapter / "adapter_model.safetensors")
        tensors.pop(min(tensors))
        save_file(tensors, adapter / "adapter_model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ModelError, match=r"disagree about the tensor .*lora_A"):
            load_trained(str(adapter), **CPU32)

    def test_a_pickled_adapter_is_not_read(self, adapter):
        """PEFT would unpickle adapter_model.bin; here it is refused."""
        (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
        with pytest.raises(ModelError, match=r"holds neither adapter_model\.safetensors"):
            load_trained(str(adapter), **CPU32)

    @pytest.mark.parametrize("text", ["{", "{}", '{"peft_type": "NOSUCH"}'])
    def test_a_broken_configuration_is_refused(self, adapter, text):
        """An adapter_config.json that says nothing usable is a ModelError."""
        (adapter / "adapter_config.json").write_text(text)
        with pytest.raises(ModelError, match="adapter"):
            load_trained(str(adapter), **CPU32)
