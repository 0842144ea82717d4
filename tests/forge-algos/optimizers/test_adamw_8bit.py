"""AdamW with moments in 8 bits: AdamW's steps but for rounding, for rows of any width, in float32 and bfloat16."""

from functools import partial

import pytest
import torch

from forge_algos import OptimizerError, OptimizerSettings, cast_trained, make_optimizer
from forge_algos.optimizers import _adamw_8bit
from forge_algos.optimizers._adamw_8bit import BLOCK, ZEROS, AdamW8bit

bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes is an optional package")

ADAM = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8}


def matrices(*shapes, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def move(optimizer, parameters, steps, *, seed=1):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for p in parameters:
            p.grad = (torch.randn(p.shape, generator=generator) * 0.1 + 0.02).to(p.dtype)
        optimizer.step()


def moved(kind, shapes, steps=20, *, dtype=torch.float32, **options):
    """Return how far parameters moved, in float64."""
    parameters = matrices(*shapes, dtype=dtype)
    before = [p.detach().double() for p in parameters]
    move(kind([{"params": parameters}], **ADAM, **options), parameters, steps)
    return [p.detach().double() - was for p, was in zip(parameters, before, strict=True)]


def distance(found, expected):
    return max(((a - b).norm() / b.norm()).item() for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("width", [256, 300, 576, 1024])
def test_it_is_as_near_to_adamw_as_bitsandbytes(width):
    """Over 20 steps the weights move as AdamW moves them, as nearly as bitsandbytes' own optimizer does.

    Rows that no block of 256 numbers fits are padded, of which nothing remains.
    """
    exact = moved(torch.optim.AdamW, [(48, width)], weight_decay=0.0)
    theirs = distance(moved(bitsandbytes.optim.AdamW8bit, [(48, width)], weight_decay=0.0), exact)
    found = distance(moved(AdamW8bit, [(48, width)]), exact)
    assert found < 1.1 * theirs < 0.1


def test_a_row_moves_by_itself():
    """A matrix's rows move as each would in a matrix of others: no block crosses a row."""
    for width in (256, 300):
        whole, parts = matrices((40, width)), []
        parts = [torch.nn.Parameter(whole[0].detach()[rows].clone()) for rows in (slice(0, 18), slice(18, 40))]
        first, second = AdamW8bit([{"params": whole}], **ADAM), AdamW8bit([{"params": parts}], **ADAM)
        generator = torch.Generator().manual_seed(1)
        for _ in range(3):
            whole[0].grad = torch.randn(40, width, generator=generator)
            parts[0].grad, parts[1].grad = whole[0].grad[:18], whole[0].grad[18:]
            first.step()
            second.step()
        assert torch.equal(whole[0], torch.cat(list(parts))), width


@pytest.mark.parametrize("shape", [(32, 512), (32, 600), (8, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_matrix_moves_alike_however_it_lies_in_memory(shape, dtype, monkeypatch):
    """Transposed in memory, as factors of a decomposition are, it has the same bits; kernels know no strides."""
    kernels, found = _adamw_8bit._kernels(), []

    def checked(own, *given, **more):
        assert all(each.is_contiguous() for each in (*given, *more.values()) if isinstance(each, torch.Tensor))
        own(*given, **more)

    for name in ("optimizer_update_8bit_blockwise", "optimizer_update_32bit"):
        monkeypatch.setattr(kernels, name, partial(checked, getattr(kernels, name)))
    for transposed in (False, True):
        (parameter,) = matrices(shape, dtype=dtype)
        if transposed:
            parameter.data = parameter.data.T.contiguous().T
        optimizer = AdamW8bit([{"params": [parameter]}], **ADAM)
        generator = torch.Generator().manual_seed(1)
        for _ in range(3):
            parameter.grad = torch.empty_like(parameter).copy_(torch.randn(shape, generator=generator))
            optimizer.step()
        assert parameter.is_contiguous() is not transposed
        found.append([parameter.detach(), *(each for each in optimizer.state[parameter].values() if torch.is_tensor(each))])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_what_has_8_bits():
    """Large matrices with rows of a block or more; scales are of rows; all else has 32 bits. Codes of 0 are bitsandbytes'."""
    shapes = [(16, 256), (15, 256), (14, 300), (4096, 16), (5000,), (3, 20, 100)]
    parameters = matrices(*shapes)
    optimizer = AdamW8bit([{"params": parameters}], **ADAM)
    move(optimizer, parameters, 1)
    found = [(s["state1"].dtype, s["state1"].shape, s.get("absmax1", torch.empty(0)).shape) for s in optimizer.state.values()]
    f32, u8 = torch.float32, torch.uint8
    expected = [(u8, (16, 256), (16, 1)), (f32, (15, 256), (0,)), (u8, (14, 300), (14, 2)), (f32, (4096, 16), (0,))]
    expected += [(f32, (5000,), (0,)), (u8, (3, 20, 100), (3, 8))]
    assert found == expected
    maps = [bitsandbytes.functional.create_dynamic_map(signed=signed) for signed in (True, False)]
    assert [values[code].item() for values, code in zip(maps, ZEROS, strict=True)] == [0, 0]
    assert BLOCK == 256


@pytest.mark.parametrize("shape", [(48, 256), (48, 300), (40, 16), (64,)])
def test_bfloat16_weights_move_as_float32_ones_on_average(shape):
    """Steps of a tenth of bfloat16's spacing arrive; without stochastic rounding nearly none would."""
    parameters = [torch.nn.Parameter(torch.full(shape, 1.5, dtype=torch.bfloat16))]
    optimizer = AdamW8bit([{"params": parameters}], **{**ADAM, "lr": 2**-7 / 10})
    for _ in range(100):
        parameters[0].grad = torch.ones(shape, dtype=torch.bfloat16)
        optimizer.step()
    assert parameters[0].dtype == torch.bfloat16
    went = (1.5 - parameters[0].detach().double()) / 2**-7
    assert went.mean().item() == pytest.approx(10, abs=5 * 3 / went.numel() ** 0.5)
    assert went.std() > 1


def test_rounding_follows_from_the_seed():
    """The same seed gives the same bits; another seed other ones; and a resumed optimizer goes on with them."""
    shapes = [(48, 256), (10, 10)]

    def run(seed, *, halfway=False):
        parameters = matrices(*shapes, dtype=torch.bfloat16)
        optimizer = AdamW8bit([{"params": parameters}], **ADAM, seed=seed)
        move(optimizer, parameters, 2)
        if halfway:
            state = optimizer.state_dict()
            optimizer = AdamW8bit([{"params": parameters}], **ADAM, seed=seed)
            optimizer.load_state_dict(state)
            assert [s["state1"].dtype for s in optimizer.state.values()] == [torch.uint8, torch.float32]
        move(optimizer, parameters, 2, seed=2)
        return parameters

    first = run(7)
    assert all(map(torch.equal, first, run(7)))
    assert all(map(torch.equal, first, run(7, halfway=True)))
    assert not any(map(torch.equal, first, run(8)))


def test_trained_weights_are_cast_and_frozen_ones_are_not():
    """`cast_trained` casts what needs a gradient, and keeps ties."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model[0].weight = model[1].weight
    model[0].bias.requires_grad_(False)
    cast_trained(model, torch.bfloat16)
    assert model[0].weight is model[1].weight
    assert [p.dtype for p in model.parameters()] == [torch.bfloat16, torch.float32, torch.bfloat16]
    optimizer = make_optimizer(model, OptimizerSettings(optimizer="adamw_8bit"), seed=3)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert model[0].weight.dtype == torch.bfloat16


def test_columns_that_ranks_divide_are_refused(tmp_path):
    """Of a matrix whose columns ranks divide no rank has a row's block: refused before a step."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

        mesh = init_device_mesh("cpu", (1,))
        for dim, refused in ((0, False), (1, True)):
            parameter = torch.nn.Parameter(distribute_tensor(torch.ones(16, 256), mesh, [Shard(dim)]))
            if refused:
                with pytest.raises(OptimizerError, match=r"divide by rows.*leave tp_size and ep_size out"):
                    AdamW8bit([{"params": [parameter]}], **ADAM)
            else:
                AdamW8bit([{"params": [parameter]}], **ADAM)
    finally:
        torch.distributed.destroy_process_group()
