"""One process, or a refusal."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_dist import LaunchError, require_single_process


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"PATH": "/bin"},
        {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"},
        {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "1"},
        {"RANK": "0", "WORLD_SIZE": "1", "PET_NPROC_PER_NODE": "auto"},
        {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "4"},
        {"WORLD_SIZE": ""},
    ],
)
def test_one_process_is_let_through(environ):
    """An environment that asks for one process, or says nothing, passes; a launcher's WORLD_SIZE outranks PET_*."""
    require_single_process(environ)


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "WORLD_SIZE=2"),
        ({"RANK": "0"}, "RANK=0 and not WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 and not RANK"),
        ({"RANK": "1", "WORLD_SIZE": "1"}, "RANK=1"),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "4"}, "LOCAL_WORLD_SIZE=4"),
        ({"RANK": "zero", "WORLD_SIZE": "1"}, "RANK is 'zero'"),
        ({"PET_NNODES": "2"}, "PET_NNODES=2"),
        ({"PET_NNODES": "1:4"}, "PET_NNODES is '1:4'"),
        ({"PET_NNODES": "1", "PET_NPROC_PER_NODE": "auto"}, "PET_NPROC_PER_NODE is 'auto'"),
        ({"PET_NPROC_PER_NODE": "8"}, "PET_NPROC_PER_NODE=8"),
        ({"SLURM_STEP_NUM_TASKS": "4"}, "SLURM_STEP_NUM_TASKS=4"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE=2"),
        ({"PET_NNODES": "0"}, "PET_NNODES=0"),
    ],
)
def test_more_than_one_is_refused_by_name(environ, named):
    """More processes, a contradiction, or half an environment is refused; the message names the variable and what to do."""
    with pytest.raises(LaunchError, match=named) as caught:
        require_single_process(environ)
    assert "start it once" in str(caught.value)


@given(st.integers(min_value=2, max_value=10**6), st.sampled_from(["WORLD_SIZE", "PET_NNODES", "PET_NPROC_PER_NODE"]))
def test_no_world_above_one_passes(number, name):
    """Whatever the number, more than one process never passes."""
    with pytest.raises(LaunchError):
        require_single_process({name: str(number)} | ({"RANK": "0"} if name == "WORLD_SIZE" else {}))


def test_the_real_environment_is_the_default(monkeypatch):
    """Without an argument, os.environ is read."""
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(LaunchError, match="WORLD_SIZE=4"):
        require_single_process()
