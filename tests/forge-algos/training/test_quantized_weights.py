"""Weights rounded to GGUF's blocks: the package gguf's own values, a naive straight-through step, and every division."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from forge_algos import (
    SFT,
    OptimizerError,
    OptimizerSettings,
    QuantizedWeights,
    evaluate,
    fake_quantize,
    make_optimizer,
    schedule,
    train,
)
from forge_algos.training import _quantized_weights

from ...ranks import run_on_ranks
from ..oracle import CPU, make, naive, pack, samples

KINDS = ("q8_0", "q5_0", "q5_1", "q4_0", "q4_1")
SCALES = st.sampled_from([0.0, 1e-45, 1e-40, 1e-30, 6e-8, 1e-4, 0.02, 1.0, 3e4, 60000.0])
ROUND = st.sampled_from([0.0, -0.0, 0.5, -0.5, 1.0, -1.0, 1.5, 7.5, -8.0, 8.0, 126.5, 127.0, -127.0])
NUMBERS = st.one_of(ROUND, st.floats(-1, 1, width=32))


def kinds_of(model, kind):
    return {name: (kind, -1) for name, p in model.named_parameters() if p.ndim == 2 and p.shape[-1] % 32 == 0}


def wide(seed=0):
    """A tiny model whose rows hold blocks of 32."""
    import transformers

    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        tie_word_embeddings=True,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


@pytest.mark.parametrize("kind", [*KINDS, "float16"])
@settings(max_examples=300)
@given(rows=st.lists(st.tuples(SCALES, st.lists(NUMBERS, min_size=32, max_size=32)), min_size=1, max_size=3))
def test_a_reader_of_the_file_finds_these_values(kind, rows):
    """What gguf writes and reads again: of zeros, denormals, halves, ties in magnitude, and scales beyond float16's."""
    gguf = pytest.importorskip("gguf", reason="gguf is an extra of forge-dist")
    numbers = np.array([[np.float32(scale) * np.float32(n) for n in row] for scale, row in rows], dtype=np.float32)
    stored = gguf.GGMLQuantizationType["F16" if kind == "float16" else kind.upper()]
    with np.errstate(all="ignore"):
        wanted = gguf.quants.dequantize(gguf.quants.quantize(numbers, stored), stored)
    found = fake_quantize(torch.from_numpy(numbers), kind).numpy()
    # Zeros of either sign are equal: of a scale without a finite inverse gguf casts NaN to an integer, times 0.
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_a_random_matrix_by_its_bits(kind):
    """Of common weights the sign of zero is gguf's too; bfloat16 ones are rounded from what they are in float32."""
    gguf = pytest.importorskip("gguf", reason="gguf is an extra of forge-dist")
    weight = torch.randn(65, 96, generator=torch.Generator().manual_seed(3)) * 0.02
    for given_as in (weight, weight.bfloat16()):
        stored, numbers = gguf.GGMLQuantizationType[kind.upper()], given_as.float().numpy()
        wanted = gguf.quants.dequantize(gguf.quants.quantize(numbers, stored), stored)
        assert np.array_equal(fake_quantize(given_as, kind).numpy().view(np.uint32), wanted.view(np.uint32))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_numbers_that_are_not_finite_show(kind, bad):
    """They make their block NaN and no other, so that the step diverges instead of training on."""
    weight = torch.ones(1, 64)
    weight[0, 40] = bad
    found = fake_quantize(weight, kind)
    assert found[0, :32].isfinite().all()
    assert found[0, 32:].isnan().any()


def test_what_no_block_divides_is_refused():
    """A type that is none, and a row of 33 numbers."""
    with pytest.raises(ValueError, match="kind must be float16 or one of"):
        fake_quantize(torch.ones(32), "q2_k")
    with pytest.raises(ValueError, match="a row has 33"):
        fake_quantize(torch.ones(2, 33), "q4_0")
    model = make()
    with pytest.raises(OptimizerError, match="no weight nothing"):
        QuantizedWeights(model, {"nothing": ("q4_0", -1)})


def run(model, kind, number=3, micro_batches=2):
    config = OptimizerSettings(learning_rate=1e-2, eps=1e-3, warmup_steps=0, weight_decay=0.1)
    optimizer = make_optimizer(model, config)
    quantized = None if kind is None else QuantizedWeights(model, kinds_of(model, kind))
    data = [samples((5, 9, 2, 7), seed=step) for step in range(number)]
    cut = [[pack(rows[:2]), pack(rows[2:])] if micro_batches == 2 else [pack(rows)] for rows in data]
    outputs = train(
        model, cut, objective=SFT(), optimizer=optimizer, scheduler=schedule(optimizer, config, number), device=CPU,
        max_grad_norm=0.0, quantized=quantized,
    )  # fmt: skip
    return [each.loss for each in outputs], quantized, data


@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
def test_a_step_is_straight_through(kind):
    """Loss and gradient are those at the rounded weights; the gradient moves the unrounded ones: a naive reference."""
    model, reference = wide(), wide()
    losses, quantized, data = run(model, kind)
    config = OptimizerSettings(learning_rate=1e-2, eps=1e-3, warmup_steps=0, weight_decay=0.1)
    optimizer = make_optimizer(reference, config)
    scheduler = schedule(optimizer, config, len(data))
    for rows, loss in zip(data, losses, strict=True):
        rounded = copy.deepcopy(reference)
        for name in kinds_of(rounded, kind):
            weight = rounded.get_parameter(name)
            weight.data = fake_quantize(weight.data, kind)
        rounded.zero_grad()
        total, count = naive(rounded, rows)
        (total / count).backward()
        assert loss == pytest.approx(total.item() / count, rel=1e-6)
        for p, q in zip(reference.parameters(), rounded.parameters(), strict=True):
            p.grad = q.grad.clone()
        optimizer.step()
        scheduler.step()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    before = [p.detach().clone() for p in model.parameters()]
    with quantized.in_place():
        inside = evaluate(model, [pack(data[0])], objective=SFT(), device=CPU).loss
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert inside != evaluate(model, [pack(data[0])], objective=SFT(), device=CPU).loss


def test_the_gradient_norm_does_not_depend_on_micro_batches():
    """The weights are rounded once a step, however it is cut."""
    two, one = run(wide(), "q4_0")[0], run(wide(), "q4_0", micro_batches=1)[0]
    assert two == pytest.approx(one, rel=1e-5)
    assert run(wide(), None)[0] != pytest.approx(two, rel=1e-5)


def on_rank(ranks, folder, name):
    """Return losses of three steps, whole weights after them, and the loss of the rounded model."""
    import forge_dist

    strategy = forge_dist.make_strategy(forge_dist.StrategySettings(strategy=name), ranks, device=CPU, adapter=False)
    model = strategy.load(folder, dtype=torch.float32, attention="sdpa")
    kinds, config = kinds_of(model, "q4_0"), OptimizerSettings(learning_rate=1e-2, eps=1e-3, warmup_steps=0)
    model, optimizer = strategy.wrap(model, lambda module: make_optimizer(module, config))
    quantized = QuantizedWeights(model, kinds)
    steps = [[pack(samples((5, 9, 2, 7), seed=step)[ranks.rank :: ranks.world_size])] for step in range(3)]
    common = {"objective": SFT(), "device": CPU, "parallel": strategy}
    scheduler = schedule(optimizer, config, 3)
    outputs = list(train(model, steps, optimizer=optimizer, scheduler=scheduler, quantized=quantized, **common))
    with quantized.in_place():
        measured = evaluate(model, steps[0], **common).loss
    weights = {n: t.detach().clone().numpy() for n, t in strategy.whole(model) if t is not None}
    return [each.loss for each in outputs], measured, weights


@pytest.mark.slow
@pytest.mark.together
@pytest.mark.parametrize("name", ["ddp", "fsdp2", "zero2"])
def test_ranks_train_what_one_process_does(name, tmp_path):
    """Whole rows on each rank: the same losses, weights, and loss of the rounded model."""
    pytest.importorskip("forge_dist", reason="forge_dist is not installed beside forge_algos")
    if name.startswith("zero"):
        pytest.importorskip("deepspeed", reason="ZeRO is DeepSpeed's")
    wide().save_pretrained(tmp_path)
    (alone,) = run_on_ranks(on_rank, 1, str(tmp_path), "ddp")
    for losses, measured, weights in run_on_ranks(on_rank, 2, str(tmp_path), name):
        assert losses == pytest.approx(alone[0], rel=1e-6)
        assert measured == pytest.approx(alone[1], rel=1e-6)
        for key, weight in weights.items():
            np.testing.assert_allclose(weight, alone[2][key], rtol=1e-4, atol=1e-5)


def divided_by_columns(ranks):
    """Return whether columns of 32 of 64 are rounded as whole ones, and the refusal of 16 of 32."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (ranks.world_size,))
    layer, narrow = torch.nn.Linear(64, 3, bias=False), torch.nn.Linear(32, 3, bias=False)
    torch.manual_seed(0)
    wanted = torch.randn(3, 64)
    layer.weight = torch.nn.Parameter(distribute_tensor(wanted.clone(), mesh, [Shard(1)]))
    narrow.weight = torch.nn.Parameter(distribute_tensor(torch.randn(3, 32), mesh, [Shard(1)]))
    with QuantizedWeights(layer, {"weight": ("q4_0", -1)}).in_place():
        found = torch.equal(layer.weight.detach().full_tensor(), fake_quantize(wanted, "q4_0"))
    with pytest.raises(OptimizerError, match="ranks divide weight inside of them"):
        QuantizedWeights(narrow, {"weight": ("q4_0", -1)})
    return found


@pytest.mark.slow
@pytest.mark.together
def test_columns_of_whole_blocks():
    """Ranks that divide columns (tp_size) round them as one process does, or refuse on all ranks."""
    pytest.importorskip("forge_dist", reason="forge_dist is not installed beside forge_algos")
    assert run_on_ranks(divided_by_columns, 2) == [True, True]


@pytest.mark.parametrize("at_once", [1 << 22, 40])
def test_a_matrix_that_is_stored_transposed(at_once, monkeypatch):
    """Blocks along dimension -2 are those of the transposed matrix, in experts and in parts of any size."""
    monkeypatch.setattr(_quantized_weights, "_AT_ONCE", at_once)
    layer = torch.nn.Module()
    layer.experts = torch.nn.Parameter(torch.randn(3, 64, 5, generator=torch.Generator().manual_seed(1)))
    wanted = torch.stack([fake_quantize(each.T.contiguous(), "q4_1").T for each in layer.experts.detach()])
    with QuantizedWeights(layer, {"experts": ("q4_1", -2)}).in_place():
        assert torch.equal(layer.experts, wanted)
    with pytest.raises(OptimizerError, match="ranks divide experts inside of them"):
        QuantizedWeights(layer, {"experts": ("q4_1", -1)})
