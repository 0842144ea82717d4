"""Experts of a layer that ranks would divide: enough for each, or refused by name."""

import pytest
import torch
from transformers import (
    ApertusConfig,
    AutoModelForCausalLM,
    Gemma3nTextConfig,
    Gemma4TextConfig,
    LlamaConfig,
    MixtralConfig,
)

from forge_dist import StrategyError
from forge_dist.loading._divisible import check_divisible, check_expert_shards
from forge_dist.loading._parallel_plan import keep_plan, partial_parameters

SHAPE = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """A Mixtral of two experts a layer."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("mixtral")
    config = MixtralConfig(**SHAPE, num_key_value_heads=2, num_local_experts=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


def test_fewer_experts_than_ranks_are_refused(mixture):
    """Where a rank's part would hold no expert, the error names the weight, the numbers and what to do."""
    check_expert_shards(mixture, shards=2)
    with pytest.raises(StrategyError, match=r"3 ranks would divide the 2 experts of .*gate_up_proj.* shard_size of at most 2"):
        check_expert_shards(mixture, shards=3)
    with pytest.raises(StrategyError, match=r"2 ranks would divide the 2 experts .*ep_size=2 leaves 1 of them"):
        check_expert_shards(mixture, shards=2, ep_size=2)


def test_dense_models_are_divided_as_they_are(tmp_path):
    """A model without experts may have any number of ranks."""
    LlamaConfig(**SHAPE).save_pretrained(tmp_path)
    check_expert_shards(str(tmp_path), shards=512)


def test_a_mean_over_what_ranks_divide_is_refused(tmp_path):
    """Gemma 3n's sparse layers compare each number with the mean of all, of which a rank would have a part."""
    sparse = {**SHAPE, "num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 8, "num_kv_shared_layers": 0}
    layers = {"layer_types": ["full_attention"] * 2, "intermediate_size": [24, 24], "vocab_size_per_layer_input": 64}
    for pattern, refused in (([0.0, 0.0], False), ([0.0, 0.95], True)):
        Gemma3nTextConfig(**{**sparse, **layers, "activation_sparsity_pattern": pattern}).save_pretrained(tmp_path)
        if not refused:
            check_divisible(str(tmp_path), tp_size=2)
            continue
        with pytest.raises(StrategyError, match=r"model\.layers\.1\.mlp compares each number with the mean of all"):
            check_divisible(str(tmp_path), tp_size=2)


def test_rows_of_several_weights_in_turn_are_refused(tmp_path):
    """Inkling 2's experts become gates before the others while they are read: a rank would have gates alone."""
    transformers = pytest.importorskip("transformers", "5.24")
    transformers.Inkling2TextConfig(**SHAPE, num_key_value_heads=2, n_routed_experts=2).save_pretrained(tmp_path)
    with pytest.raises(StrategyError, match=r"experts\.gate_up_proj is several weights in one.* leave tp_size out"):
        check_divisible(str(tmp_path), tp_size=2)


GEMMA4 = {**SHAPE, "num_key_value_heads": 2, "head_dim": 8, "num_kv_shared_layers": 0, "layer_types": ["full_attention"]}


def test_rules_of_experts_that_a_model_lacks_do_not_count(tmp_path):
    """A dense Gemma 4 has the plan of one with experts."""
    Gemma4TextConfig(**GEMMA4).save_pretrained(tmp_path / "dense")
    check_divisible(str(tmp_path / "dense"), tp_size=2)
    mixture = {"enable_moe_block": True, "num_experts": 2, "top_k_experts": 1, "moe_intermediate_size": 8}
    Gemma4TextConfig(**GEMMA4, **mixture).save_pretrained(tmp_path / "mixture")
    with pytest.raises(StrategyError, match=r"gate_up_proj is several weights in one.*: divide its experts by ep_size=2 too"):
        check_divisible(str(tmp_path / "mixture"), tp_size=2)


def test_heads_of_layers_without_a_window_are_divided_too(tmp_path):
    """Gemma 4's larger models have fewer keys in them."""
    Gemma4TextConfig(**GEMMA4, attention_k_eq_v=True, num_global_key_value_heads=1).save_pretrained(tmp_path)
    with pytest.raises(StrategyError, match="tp_size=2 does not divide its 1 num_key_value_heads"):
        check_divisible(str(tmp_path), tp_size=2)


def test_weights_that_compute_with_a_part_have_a_part_of_their_gradient():
    """Apertus' activations and Sarvam MoE's norms of queries, for which transformers' plans have no rules."""
    transformers = pytest.importorskip("transformers", "5.24")
    shape = {**SHAPE, "num_key_value_heads": 2}
    apertus = ApertusConfig(**shape, hidden_act="xielu")
    sarvam = transformers.SarvamMoEConfig(**shape, head_dim=8, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=8)
    for config, own in ((apertus, {"mlp.act_fn.alpha_p", "mlp.act_fn.alpha_n"}), (sarvam, set())):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        keep_plan(model)
        names = {parameter: name for name, parameter in model.named_parameters()}
        found = {names[parameter].removeprefix("model.layers.0.") for parameter in partial_parameters(model)}
        assert {"self_attn.q_norm.weight", "self_attn.k_norm.weight"} | own == found


def test_experts_that_a_model_has_not_are_not_divided(tmp_path):
    """Gemma 4 has experts where its configuration says so."""
    transformers = pytest.importorskip("transformers", "5.24")
    transformers.Gemma4TextConfig(**SHAPE, num_key_value_heads=2, head_dim=8).save_pretrained(tmp_path)
    with pytest.raises(StrategyError, match="no layer of it has experts: leave ep_size out"):
        check_divisible(str(tmp_path), ep_size=2)
