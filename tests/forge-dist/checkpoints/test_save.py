"""What the first rank says when ranks could not write their files."""

import errno
import os

import attrs
import torch

from forge_dist.checkpoints import _save
from forge_dist.checkpoints._plan import local_pieces
from forge_dist.checkpoints._save import Job, save_job

from ...ranks import run_on_ranks


def failing_save(ranks, folder, different):
    """Save a state that no rank can write; return what all ranks hear."""

    def full(path, *_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), *([str(path)] if different else []))

    _save.write_file = full
    pieces, values = local_pieces({f"w{ranks.rank}": torch.ones(1024)})
    temporary = folder / ".step_6.tmp"
    temporary.mkdir(exist_ok=True)
    job = Job(
        step=6,
        serial=1,
        temporary=temporary,
        root=folder,
        keep=1,
        broken=(),
        pieces=pieces,
        values=values,
        tensors={},
        must_match="{}",
        about="{}",
    )
    return attrs.asdict(save_job(job, ranks, ranks))


def test_a_disk_that_is_full_for_all_ranks_is_said_once(tmp_path):
    """With one rank that it happened to and the number of the others; different texts are each named, up to three."""
    (one, *_), (each, *_) = (run_on_ranks(failing_save, 5, tmp_path, different) for different in (False, True))
    step, host = tmp_path / "step_6", os.uname().nodename
    takes = "; it takes 20.0 KiB, and "
    text, _, room = one["error"].partition(takes)
    assert text == f"{step} cannot be written: [Errno 28] No space left on device (rank 0 on {host} and 4 other ranks)"
    assert room.endswith(" are free there")
    text, _, room = each["error"].partition(takes)
    assert text.count("No space left") == 3
    assert text.endswith(f"rank_2.safetensors' (rank 2 on {host}); and 2 more such errors")
    assert room
    assert not (tmp_path / ".step_6.tmp").exists()
