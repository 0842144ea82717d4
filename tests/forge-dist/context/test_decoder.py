"""Models whose packed rows are cut over ranks: hidden states, losses and gradients of one process."""

import pytest
import torch

import forge_dist
from forge_dist import StrategyError, StrategySettings

from ...ranks import run_on_ranks
from ..training import Absent, adamw, gradients

LENGTHS = (9, 1, 14, 3, 6)


def by_documents(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
    """An attention as forge_accel hands one over: causal within the documents of a packed row, whose last query is at its last
    key; shared prompts by kv_rows.
    """
    assert attention_mask is None
    ends, key_ends, rows = (kwargs.get(name) for name in ("cu_seq_lens_q", "cu_seq_lens_k", "kv_rows"))
    if rows is not None:
        key, value = key[:, :, rows], value[:, :, rows]
    if ends is None:
        ends, key_ends = torch.tensor([0, query.shape[2]]), torch.tensor([0, key.shape[2]])
    outputs = []
    window = kwargs.get("sliding_window") or 10**6
    for (start, stop), (first, last) in zip(ends.unfold(0, 2, 1).tolist(), key_ends.unfold(0, 2, 1).tolist(), strict=True):
        behind = torch.arange(last - first - (stop - start), last - first)[:, None] - torch.arange(last - first)
        outputs.append(
            torch.nn.functional.scaled_dot_product_attention(
                query[:, :, start:stop],
                key[:, :, first:last],
                value[:, :, first:last],
                attn_mask=(behind >= 0) & (behind < window),
                scale=scaling,
                enable_gqa=True,
            )
        )
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


def packed_row(lengths=LENGTHS, seed=0):
    """The arguments of a forward of one packed row."""
    tokens = sum(lengths)
    ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return {
        "input_ids": torch.randint(0, 61, (1, tokens), generator=torch.Generator().manual_seed(seed)),
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
        "use_cache": False,
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
    }


def loss_of(model, row):
    """Summed next-token loss within documents."""
    logits = model(**row).logits[0, :-1].float()
    targets = row["input_ids"][0, 1:].clone()
    targets[row["cu_seq_lens_q"][1:-1].long() - 1] = -100
    return torch.nn.functional.cross_entropy(logits, targets, reduction="sum")


def trained(ranks, path, options, lengths=LENGTHS, checkpointing=False):
    """Hidden states, loss, gradients, norm, and the weights after a step."""
    settings = StrategySettings(**options, activation_checkpointing=checkpointing)
    strategy = forge_dist.make_strategy(settings, ranks, device=torch.device("cpu"), adapter=False)
    model = strategy.load(path, dtype=torch.float32, attention="by_documents", attention_function=by_documents)
    model, optimizer = strategy.wrap(model, adamw)
    model.train()
    # Each data shard has rows of its own.
    row = packed_row(lengths, seed=strategy.data_parallel_rank)
    with strategy.micro_batch(last=True):
        loss = loss_of(model, row)
        strategy.backward(loss / 100)
    norm = strategy.grad_norm(model.parameters())
    found = {"loss": strategy.sum([loss.item()])[0], "norm": norm.item(), "gradients": gradients(model)}
    strategy.step(optimizer)
    with torch.no_grad():
        found["after"] = strategy.sum([loss_of(model, row).item()])[0]
        found["uncut"] = model(input_ids=row["input_ids"][:, : lengths[0]], use_cache=False).logits.clone()
    found["data"] = strategy.data_parallel_size, strategy.data_parallel_rank
    found["names"] = list(strategy.state(model, optimizer))
    return found


@pytest.fixture(scope="module")
def paths(tmp_path_factory, make_model):
    """architecture → its directory"""
    folder = tmp_path_factory.mktemp("context")
    for architecture in ("llama-tied", "qwen3", "gemma3"):
        make_model(architecture).save_pretrained(folder / architecture)
    return {path.name: str(path) for path in folder.iterdir()}


def scenarios(ranks, cases):
    """Several cases in one set of ranks."""
    return [trained(ranks, *case) for case in cases]


def equal(found, expected):
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert found["after"] == pytest.approx(expected["after"], rel=1e-5)
    assert found["norm"] == pytest.approx(expected["norm"], rel=1e-5)
    assert found["gradients"].keys() == expected["gradients"].keys()
    for name, gradient in expected["gradients"].items():
        torch.testing.assert_close(found["gradients"][name], gradient, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found["uncut"], expected["uncut"], rtol=1e-4, atol=1e-5)
    assert found["names"] == expected["names"]


@pytest.mark.slow
def test_two_ranks_share_each_row(paths):
    """Loss, gradients, norm and the step after them are one process's: windows, tied heads, recomputed layers, rows of fewer
    tokens than there are chunks; a call that is not packed is made whole.
    """
    cases = [
        (paths["llama-tied"], {"strategy": "fsdp2"}),
        (paths["gemma3"], {"strategy": "fsdp2"}, LENGTHS, True),
        (paths["qwen3"], {"strategy": "ddp"}),
        (paths["llama-tied"], {"strategy": "ddp"}, (2, 1)),
    ]
    (expected,) = run_on_ranks(scenarios, 1, [(path, {"strategy": "single"}, *rest) for path, _, *rest in cases])
    shared = [(path, {**options, "cp_size": 2}, *rest) for path, options, *rest in cases]
    for found in run_on_ranks(scenarios, 2, shared):
        for case, mine, one in zip(cases, found, expected, strict=True):
            assert mine["data"] == (1, 0), case
            equal(mine, one)


@pytest.mark.slow
@pytest.mark.lane
def test_four_ranks_in_two_pairs(paths):
    """Two data shards of two ranks each: the sums of both shards, whose rows differ; one shard of four ranks."""
    path = paths["llama-tied"]
    expected = run_on_ranks(scenarios, 2, [(path, {"strategy": "ddp"})])
    (alone,) = run_on_ranks(scenarios, 1, [(path, {"strategy": "single"})])
    cases = [
        (path, {"strategy": "fsdp2", "cp_size": 2}),
        (path, {"strategy": "hsdp", "shard_size": 2, "cp_size": 2}),
        (path, {"strategy": "fsdp2", "cp_size": 4}),
    ]
    for rank, found in enumerate(run_on_ranks(scenarios, 4, cases)):
        for mine in found[:2]:
            assert mine["data"] == (2, rank // 2)
            equal(mine, expected[rank // 2][0])
        assert found[2]["data"] == (1, 0)
        equal(found[2], alone[0])


@pytest.mark.parametrize(
    ("world_size", "options", "said"),
    [
        (3, {"cp_size": 2}, "cp_size=2 does not divide 3 ranks"),
        (1, {"cp_size": 2}, "cp_size=2 has no effect with one rank"),
        (4, {"strategy": "hsdp", "shard_size": 2, "cp_size": 4}, r"cp_size=4 does not divide the 2 ranks of a copy"),
    ],
)
def test_what_does_not_divide_is_refused(world_size, options, said):
    """Before a model is read."""
    with pytest.raises(StrategyError, match=said):
        forge_dist.make_strategy(StrategySettings(**options), Absent(world_size), device=torch.device("cpu"), adapter=False)


def test_cp_size_makes_auto_choose_fsdp2():
    """Also for an adapter."""
    made = forge_dist.make_strategy(StrategySettings(cp_size=2), Absent(4), device=torch.device("cpu"), adapter=True)
    assert (made.name, made.data_parallel_size) == ("fsdp2", 2)


@pytest.mark.parametrize("strategy", ["single", "zero1", "zero3"])
def test_other_strategies_have_none(strategy):
    """The message names those that have it."""
    with pytest.raises(
        ValueError, match=f"cp_size=2 has no effect with strategy={strategy}; leave it out, or use ddp, fsdp2, hsdp"
    ):
        StrategySettings(strategy=strategy, cp_size=2)


def test_another_attention_is_refused(paths):
    """What does not gather keys would attend to a part of them."""
    made = forge_dist.make_strategy(StrategySettings(cp_size=2), Absent(2), device=torch.device("cpu"), adapter=False)
    with pytest.raises(StrategyError, match="cp_size=2 cuts packed rows, which attention=sdpa cannot attend over ranks"):
        made.load(paths["qwen3"], dtype=torch.float32, attention="sdpa")
