"""Full states of several ranks: divided in any way, saved on some, read on others, bit for bit."""

import functools
import json
import os
import re
import signal
from pathlib import Path

import pytest
import torch

from forge_dist import CheckpointError, Checkpoints, WorkerError

from ...ranks import run_on_ranks
from ..alone import Alone

pytestmark = pytest.mark.slow

SAME = {"seed": 7, "data": "abc"}
# Name → shape, dtype. Some are larger than any world, some smaller, some divide evenly, some never do.
TENSORS = {
    "model/odd": ((7, 3), torch.float32),
    "model/few": ((2, 5), torch.float32),
    "model/wide": ((3, 10), torch.float32),
    "model/half": ((6, 4), torch.bfloat16),
    "model/vector": ((5,), torch.float64),
    "model/even": ((8, 8), torch.float32),
    "model/nothing": ((0, 4), torch.float32),
    "optimizer/odd/step": ((), torch.float32),
    "count": ((), torch.int64),
    "ids": ((9,), torch.int32),
    "flags": ((3, 2), torch.bool),
}
# How a tensor can be divided: on a mesh of one dimension, or of two (replicas × shards).
EACH = 6 * 2 * len(TENSORS)  # comparisons: steps, ways to read, tensors; what only one rank has is counted beside it
WAYS = ("plain", "copies", "rows", "columns", "replicated rows", "rows and columns")


def value(name, step):
    """What the tensor holds at a step: the same on every rank, different everywhere."""
    shape, dtype = TENSORS[name]
    numbers = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)
    if dtype == torch.bool:
        return (numbers + step) % 2 == 0
    return (numbers * 1.25 + step + len(name)).to(dtype)


def divided(tensor, way):
    """The tensor as this rank holds it."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    if way == "plain" or tensor.ndim == 0 or not torch.distributed.is_initialized():
        return tensor.clone()
    world = torch.distributed.get_world_size()
    columns = tensor.ndim - 1
    shape, placements = {
        "copies": ((world,), [Replicate()]),
        "rows": ((world,), [Shard(0)]),
        "columns": ((world,), [Shard(columns)]),
        "replicated rows": ((2, world // 2) if world % 2 == 0 else (1, world), [Replicate(), Shard(0)]),
        "rows and columns": ((world // 2, 2) if world % 2 == 0 else (world, 1), [Shard(0), Shard(columns)]),
    }[way]
    # Every rank has it all and keeps its part: no communication.
    return distribute_tensor(tensor, mesh(shape), placements, src_data_rank=None)


@functools.cache
def mesh(shape):
    """Once each: every new mesh makes new groups."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")[: len(shape)])


def state(step, shift, rank):
    """Every tensor, each divided in the way whose turn it is, and one that only this rank has."""
    tensors = {name: divided(value(name, step), WAYS[(index + shift) % len(WAYS)]) for index, name in enumerate(TENSORS)}
    tensors[f"rng/rank_{rank}"] = torch.full((4,), rank + step, dtype=torch.uint8)
    return tensors


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def saved(ranks, root, *, background):
    """Save steps 1 and 2, divided in every way; what is overwritten right after a save must not be in it."""
    with Checkpoints(Path(root), ranks, keep=12, background=background) as checkpoints:
        assert checkpoints.newest(SAME, pytest.fail) is None
        for step, shift in [(1, 0), (2, 1), (3, 2), (4, 3), (5, 4), (6, 5)]:
            tensors = state(step, shift, ranks.rank)
            checkpoints.save(step, tensors, {"position": step * 10, "nested": {"a": [1, None]}})
            if background:
                for tensor in tensors.values():
                    local(tensor).zero_()
        checkpoints.wait()
        assert checkpoints.failed is None
        assert checkpoints.last_good == Path(root) / "step_6"


def check_read(ranks, root, saved_on):
    """Every full state under `root`, read in every way, is bit for bit what was saved; returns how many were compared."""
    compared = 0
    checkpoints = Checkpoints(Path(root), ranks, keep=2, background=False)
    for step in range(1, 7):
        found = checkpoints.at(Path(root) / f"step_{step}", SAME)
        assert (found.step, found.about, found.world_size) == (
            step,
            {"position": step * 10, "nested": {"a": [1, None]}},
            saved_on,
        )
        wanted = {name: (shape, dtype) for name, (shape, dtype) in TENSORS.items()}
        assert found.tensors == wanted | {f"rng/rank_{rank}": ((4,), torch.uint8) for rank in range(saved_on)}
        # Two ways a step: over the steps and the worlds every tensor is read in every way, whatever way it was saved in.
        for shift in ((step + saved_on) % 6, (step + saved_on + 3) % 6):
            expected = {name: tensor for name, tensor in state(step, shift, 0).items() if name in TENSORS}
            into = {name: torch.full_like(tensor, 1) for name, tensor in expected.items()}
            if ranks.rank < saved_on:
                into[f"rng/rank_{ranks.rank}"] = torch.zeros(4, dtype=torch.uint8)
                expected[f"rng/rank_{ranks.rank}"] = torch.full((4,), ranks.rank + step, dtype=torch.uint8)
            found.read(into)
            for name, tensor in into.items():
                assert torch.equal(local(tensor), local(expected[name])), (name, step, shift)
                compared += 1
    return compared


def on_ranks(ranks, root, others):
    """Save in this world, then read what this world and the others saved."""
    saved(ranks, f"{root}/{ranks.world_size}", background=ranks.world_size != 2)
    return sum(check_read(ranks, f"{root}/{world}", world) for world in (*others, ranks.world_size))


def test_any_world_reads_what_any_other_saved(tmp_path):
    """Saved on 1, 2, 3 and 4 ranks, plain, replicated, in rows, columns, on two-dimensional meshes, with shards of no
    rows, scalars,
    bfloat16, integers and flags; read on 1, 2, 3 and 4 ranks in each of these ways: the same bits. In the background what is
    saved is the copy, whatever the training does to the weights meanwhile."""
    alone = Alone()
    saved(alone, tmp_path / "1", background=True)
    assert check_read(alone, tmp_path / "1", 1) == EACH + 12
    assert run_on_ranks(on_ranks, 4, str(tmp_path), (1,)) == [2 * EACH + 24, *[2 * EACH + 12] * 3]
    assert run_on_ranks(on_ranks, 2, str(tmp_path), (1, 4)) == [3 * EACH + 36, 3 * EACH + 24]
    assert run_on_ranks(on_ranks, 3, str(tmp_path), (1, 2, 4)) == [4 * EACH + 48, 4 * EACH + 36, 4 * EACH + 24]
    for world in (2, 3, 4):
        assert check_read(alone, tmp_path / str(world), world) == EACH + 12
    check_sizes_add_up(tmp_path)


def check_sizes_add_up(root):
    """Nothing is written twice, no rank writes a piece of no rows, and ranks share the writing."""
    for world in (1, 2, 3, 4):
        manifest = json.loads((root / str(world) / "step_1" / "manifest.json").read_text())
        wholes = {name: manifest["layouts"][layout] for name, layout in manifest["tensors"].items()}
        chunks = {name: whole["chunks"] for name, whole in wholes.items() if 0 not in whole["shape"]}
        assert not [name for name, each in chunks.items() for _, sizes, _ in each if 0 in sizes]
        total = sum(value(name, 1).nbytes for name in TENSORS) + 4 * world
        written = 0
        for name in manifest["files"]:
            data = (root / str(world) / "step_1" / name).read_bytes()
            written += len(data) - 8 - int.from_bytes(data[:8], "little")
        assert written == total
        assert len(manifest["files"]) == world


def check_tidy(ranks, root):
    """Nothing hidden is left; looked at while no rank saves."""
    ranks.barrier()
    hidden = list(Path(root).glob(".*"))
    ranks.barrier()
    assert hidden == []


def disagreements(ranks, root):
    """What goes wrong on one rank, or between them, is the same exception on all, and the next save works."""
    checkpoints = Checkpoints(Path(root), ranks, keep=2, background=True)
    message = []
    good = {"w": torch.ones(3)}
    for tensors, about, step in [
        ({"w": torch.ones(3 + ranks.rank)}, {}, 1),
        (good if ranks.rank == 0 else {"w": 3}, {}, 1),
        (good, {} if ranks.is_first else {"x": object()}, 1),
        (good, {}, 1 + ranks.rank),
    ]:
        with pytest.raises(CheckpointError) as caught:
            checkpoints.save(step, tensors, about)
        message.append(str(caught.value))
    check_tidy(ranks, root)
    checkpoints.save(1, good, {})
    checkpoints.close()
    # A disk that is full for one rank only: nobody raises, everybody knows.
    heard = []
    checkpoints = Checkpoints(Path(root), ranks, keep=2, background=True, note=heard.append)
    if ranks.rank == 1:
        import resource

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    checkpoints.save(2, {"w": divided(torch.ones(2000), "rows")}, {}, wait=True)
    check_tidy(ranks, root)
    assert not (Path(root) / "step_2").exists()
    message += [checkpoints.failed, *heard]
    checkpoints.save(3, good, {}, wait=True)
    assert checkpoints.failed is None
    assert checkpoints.newest({}, message.append).step == 3
    # Damage that only one rank's share of the hashing sees.
    if ranks.is_first:
        for file in (Path(root) / "step_3").glob("*.safetensors"):
            file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    ranks.barrier()
    assert checkpoints.newest({}, message.append).step == 1
    return message


def test_all_ranks_report_the_same(tmp_path):
    """A tensor that ranks disagree about, a value that cannot be saved, another step, a disk full on one rank, a damaged
    file: every rank
    gets the same words, which name the rank; none waits for another for ever."""
    first, second = run_on_ranks(disagreements, 2, str(tmp_path))
    assert first == second
    for message, words in zip(
        first,
        [
            "disagree about w",
            r"w is int.*\(rank 1\)",
            r"about of a full state must be JSON.*\(rank 1\)",
            "different steps",
            "rank 1 on",
        ],
        strict=False,
    ):
        assert re.search(words, message)
    assert "File too large" in first[4]
    assert "the last good" in first[5] or "no other" in first[5]
    assert "step_3 is not whole" in first[6]
    assert "step_1 is whole and is taken instead" in first[7]


def dies(ranks, root):
    """Rank 1 is killed while it writes its part of step 2."""
    from forge_dist.checkpoints import _save as _checkpoint_save

    checkpoints = Checkpoints(Path(root), ranks, keep=1, background=True)
    checkpoints.save(1, {"w": divided(torch.ones(5), "rows")}, {}, wait=True)

    def killed(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    if ranks.rank == 1:
        _checkpoint_save.write_file = killed
    checkpoints.save(2, {"w": divided(torch.zeros(5), "rows")}, {}, wait=True)
    raise CheckpointError(f"{checkpoints.failed}")


def test_a_rank_that_dies_while_saving_costs_that_save_only(tmp_path):
    """The other rank does not commit what is not all there; the next start finds the one before it, and tidies up."""
    with pytest.raises((RuntimeError, WorkerError)):
        run_on_ranks(dies, 2, str(tmp_path))
    assert not (tmp_path / "step_2").exists()
    checkpoints = Checkpoints(tmp_path, Alone(), keep=2, background=False)
    found = checkpoints.newest({}, pytest.fail)
    assert found.step == 1
    into = {"w": torch.zeros(5)}
    found.read(into)
    assert into["w"].tolist() == [1] * 5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_1"]
