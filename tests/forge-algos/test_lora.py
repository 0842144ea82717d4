"""LoRA through PEFT: what asks for it, where it goes, what it leaves alone."""

import pytest
import torch

from forge_algos import AdapterError, AdapterSettings, adapt

from .oracle import make
from .preferences import a_classifier

IDS = torch.arange(3, 12)[None]
LORA = AdapterSettings(adapter="lora", lora_r=3, lora_alpha=5.0)


def targets_of(model):
    return {name.split(".lora_A")[0].rpartition(".")[2] for name, _ in model.named_parameters() if ".lora_A" in name}


@pytest.mark.parametrize("architecture", ["llama-tied", "llama-untied", "qwen3", "gemma3"])
def test_every_linear_layer_but_the_head(architecture):
    """The default reaches all projections of every layer, and neither the head nor the embeddings."""
    model = adapt(make(architecture), LORA).model
    assert targets_of(model) == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert sum(".lora_A" in name for name, _ in model.named_parameters()) == 14


def test_a_reward_models_score_is_trained_whole():
    """Adapters on every linear layer but `score`, which is trained and saved itself, so that plain PEFT finds it again."""
    model = adapt(a_classifier(), LORA).model
    assert "score" not in targets_of(model)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {name for name in trained if "lora" not in name} == {"base_model.model.score.modules_to_save.default.weight"}
    assert model.peft_config["default"].task_type == "SEQ_CLS"
    assert "score" in model.peft_config["default"].modules_to_save
    with pytest.raises(
        AdapterError, match="Linear layers here: down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj$"
    ):
        adapt(a_classifier(), AdapterSettings(adapter="lora", target_modules=("scores",)))


def test_named_targets_only():
    """Last name parts and whole names both count."""
    model = adapt(make(), AdapterSettings(adapter="lora", target_modules=("q_proj", "model.layers.0.mlp.up_proj"))).model
    assert targets_of(model) == {"q_proj", "up_proj"}
    assert sum(".lora_A" in name for name, _ in model.named_parameters()) == 3


def test_rank_scale_and_dropout_arrive():
    """What is added is B A x times alpha / r, with the dropout that was asked for."""
    model = adapt(make(), AdapterSettings(adapter="lora", lora_r=3, lora_alpha=7.5, lora_dropout=0.25)).model
    layer = model.get_base_model().model.layers[0].self_attn.q_proj
    assert layer.lora_A["default"].weight.shape == (3, 16)
    assert layer.lora_dropout["default"].p == 0.25
    with torch.no_grad():
        layer.lora_B["default"].weight.normal_()
    x = torch.randn(2, 16)
    added = layer.eval()(x) - layer.base_layer(x)
    expected = x @ layer.lora_A["default"].weight.T @ layer.lora_B["default"].weight.T * (7.5 / 3)
    torch.testing.assert_close(added, expected, rtol=1e-4, atol=1e-5)


def test_a_fresh_adapter_adds_nothing_and_freezes_the_base():
    """Logits are the base's; only adapters train."""
    before = make()(input_ids=IDS).logits
    model = adapt(make(), LORA).model
    torch.testing.assert_close(model(input_ids=IDS).logits, before, rtol=0, atol=1e-6)
    assert {("lora_" in name) for name, p in model.named_parameters() if p.requires_grad} == {True}
    assert {("lora_" in name) for name, p in model.named_parameters() if not p.requires_grad} == {False}


def test_torch_seed_decides():
    """The same seed gives the same adapters, another seed others."""
    drawn = []
    for seed in (1, 1, 2):
        model = make()
        torch.manual_seed(seed)
        drawn.append(torch.cat([p.flatten() for n, p in adapt(model, LORA).model.named_parameters() if "lora_A" in n]))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_adapters_are_float32_on_a_bfloat16_base():
    """Small updates need the digits; the base keeps its dtype."""
    model = adapt(make().bfloat16(), LORA).model
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}


def test_a_target_that_matches_nothing_is_named():
    """The wrong name, the nearest right one, and all that exist."""
    settings = AdapterSettings(adapter="lora", target_modules=("q_proj", "down_prj"))
    with pytest.raises(AdapterError, match="down_prj matches no module.*Did you mean down_proj.*gate_proj, k_proj") as caught:
        adapt(make(), settings)
    assert "q_proj matches" not in str(caught.value)
    assert caught.value.exit_status == 2


def test_a_target_that_cannot_carry_one_is_refused():
    """A norm is a module, but no layer for an adapter."""
    with pytest.raises(AdapterError, match="PEFT cannot attach.*linear layers here"):
        adapt(make(), AdapterSettings(adapter="lora", target_modules=("input_layernorm",)))


def test_a_second_adapter_is_refused_and_none_trains_everything():
    """What carries an adapter is not wrapped again; adapter='none' is the model as it is."""
    model = adapt(make(), LORA).model
    with pytest.raises(AdapterError, match="already"):
        adapt(model, LORA)
    plain = make()
    assert adapt(plain, AdapterSettings()).model is plain
    assert all(p.requires_grad for p in plain.parameters())
