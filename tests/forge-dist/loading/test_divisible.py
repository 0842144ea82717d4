"""Experts of a layer that ranks would divide: enough for each, or refused by name."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

from forge_dist import StrategyError
from forge_dist.loading._divisible import check_expert_shards

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
