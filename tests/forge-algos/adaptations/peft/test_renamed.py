"""Adapters whose names PEFT would change where it reads them: no default targets, refused by name."""

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model

from forge_algos import AdapterError, AdapterSettings, adapt
from forge_algos._cache_argument import cache_argument
from forge_algos.adaptations.peft._renamed import renamed_targets

LORA = {"adapter": "lora", "lora_r": 2}
_CONVOLUTION = "_sconv" if cache_argument() == "past_key_values" else "_proj.sconv"
FAMILIES = {
    "laguna": (
        {
            "num_hidden_layers": 1,
            "num_attention_heads_per_layer": [2],
            "layer_types": ["full_attention"],
            "mlp_layer_types": ["sparse"],
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 8,
            "shared_expert_intermediate_size": 8,
        },
        [f"model.layers.0.mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down")],
    ),
    "inkling2_text": (
        {
            "num_hidden_layers": 2,
            "layer_types": ["hybrid_sliding", "hybrid"],
            "mlp_layer_types": ["dense", "dense"],
            "sliding_window": 4,
        },
        # transformers 5.24 has each in the projection before it.
        [f"model.layers.1.self_attn.{name}{_CONVOLUTION}.weight_proj" for name in ("k", "v")],
    ),
}
KEPT = {"laguna": "o_proj", "inkling2_text": "sink_proj"}
"""A layer of each family's attention that is read back."""
SIZES = {
    "vocab_size": 32,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def make(family):
    config = transformers.AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family][0]})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(config).eval()


def shaken(model):
    """Give every adapter random numbers, as training would."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def read_back(model, family, folder):
    """Return the names of parameters that plain PEFT does not read back as they were written."""
    model.save_pretrained(folder)
    read = dict(PeftModel.from_pretrained(make(family), folder).named_parameters())
    return {name for name, p in model.named_parameters() if "lora_" in name and not torch.equal(p, read[name])}


@pytest.mark.filterwarnings("ignore:Found missing adapter keys", "ignore:.*is_gradient_checkpointing")
@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match")
@pytest.mark.parametrize("family", FAMILIES)
def test_what_plain_peft_would_lose_is_no_default_target(family, tmp_path):
    """Plain PEFT writes adapters on these layers and does not read them back.
    They are left out, with a line in the log, and all others are read back; asked for by name they are refused.
    """
    lost = FAMILIES[family][1]
    plain = shaken(get_peft_model(make(family), LoraConfig(r=2, target_modules=[*lost, KEPT[family]])))
    assert read_back(plain, family, tmp_path / "plain") == {
        f"base_model.model.{name}.lora_{half}.default.weight" for name in lost for half in "AB"
    }
    adaptation = adapt(make(family), AdapterSettings(**LORA))
    held = {name.partition(".lora_")[0].removeprefix("base_model.model.") for name in adaptation.model.state_dict()}
    assert not held & set(lost)
    assert f"model.layers.0.self_attn.{KEPT[family]}" in held
    assert any(line.startswith(f"no target: {len(lost)} layers") for line in adaptation.describe())
    assert read_back(shaken(adaptation.model), family, tmp_path / "ours") == set()
    with pytest.raises(AdapterError, match=r"write the tensor base_model.model.model.layers.*read it back under another name"):
        adapt(make(family), AdapterSettings(**LORA, target_modules=(lost[0],)))


def test_adapters_of_other_kinds_are_read_under_their_names():
    """PEFT renames those of LoRA alone."""
    from peft import AdaLoraConfig

    names = FAMILIES["laguna"][1]
    assert renamed_targets(make("laguna"), LoraConfig, names) == names
    assert renamed_targets(make("laguna"), lambda **_: AdaLoraConfig(total_step=10), names) == []
