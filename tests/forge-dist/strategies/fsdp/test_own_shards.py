"""What a rank holds after it read its shards."""

import pytest
import torch

from forge_dist import load_model

from ....ranks import run_on_ranks
from ...divided import strategy_of


def held(ranks, path, dtype):
    """(bytes of each shard, bytes of the memory behind it, whether the tied weight is one object still, the whole weights)."""
    strategy = strategy_of(ranks, "fsdp2")
    model = strategy.load(path, dtype=dtype)
    shards = {name: parameter.to_local() for name, parameter in model.named_parameters()}
    sizes = {name: (shard.nbytes, shard.untyped_storage().nbytes()) for name, shard in shards.items()}
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    whole = {name: tensor for name, tensor in strategy.whole(model) if tensor is not None}
    loss = model(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None], use_cache=False).loss.item()
    return sizes, tied, whole, loss


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_more_than_the_shards_is_held(save_base, dtype):
    """Behind each shard lies memory of its size, not a mapped file; weights and loss are those of one process."""
    path = save_base("llama-tied", dtype)
    alone = load_model(path, dtype=dtype, device="cpu")
    expected = alone(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None], use_cache=False).loss.item()
    for rank, (sizes, tied, whole, loss) in enumerate(run_on_ranks(held, 2, path, dtype)):
        assert {name for name, (shard, memory) in sizes.items() if memory > shard} == set()
        assert tied
        assert loss == pytest.approx(expected, rel=1e-2 if dtype == torch.bfloat16 else 1e-6)
        if rank == 0:
            state = alone.state_dict()
            assert all(torch.equal(tensor, state[name]) for name, tensor in whole.items())
            assert sum(shard for shard, _ in sizes.values()) < 0.6 * sum(p.nbytes for p in alone.parameters())
