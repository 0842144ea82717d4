"""A process group that a program made before: the run takes it, and leaves it as it was."""

import os
import shutil
import subprocess
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from forge_dist import LaunchError, LaunchSettings, join, topology
from forge_dist.ranks._network import machine_here

from ...ranks import run_on_ranks

VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_USE_AGENT_STORE",
)


def two_runs_in_a_group(with_variables):
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    if not with_variables:
        for name in VARIABLES:
            os.environ.pop(name, None)
    group, answers = dist.group.WORLD, []
    for _ in range(2):
        where = topology(LaunchSettings())
        with join(where) as ranks:
            made = ranks.first(lambda: "by rank 0")
            ranks.connect("gloo", "cpu")
            same = ranks.group is group
            ranks.checkpoint_group()
            answers.append(
                [made, same, ranks.rank, ranks.world_size, ranks.local_rank, ranks.local_world_size, ranks.node_rank]
            )
            answers[-1].append(ranks.sum([ranks.rank + 1.0]))
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    refused = []
    for name, value in (("RANK", "7"), ("WORLD_SIZE", "7")):
        os.environ[name] = value
        try:
            topology(LaunchSettings())
        except LaunchError as error:
            refused.append(str(error))
        os.environ[name] = str(dist.get_rank() if name == "RANK" else dist.get_world_size())
    try:
        topology(LaunchSettings(nproc_per_node=3))
    except LaunchError as error:
        refused.append(str(error))
    role = where.role
    dist.destroy_process_group()
    return role, answers, tensor.item(), refused


@pytest.mark.slow
@pytest.mark.parametrize("with_variables", [True, False])
def test_a_run_takes_the_group_that_is_there(with_variables):
    """Rank, world and group are the group's, with variables or without; after two runs it still works, and is its maker's."""
    found = run_on_ranks(two_runs_in_a_group, 2, with_variables, joined=False)
    for rank, (role, answers, total, refused) in enumerate(found):
        assert role == "worker"
        assert answers == [["by rank 0", True, rank, 2, rank, 2, 0, [3.0]]] * 2
        assert total == 2.0
        assert "RANK=7" in refused[0]
        assert "WORLD_SIZE=7" in refused[1]
        assert "nproc_per_node=3" in refused[2]


def twins():
    from forge_dist.ranks import _meeting

    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    _meeting.machine_here = lambda: f"one name, machine {rank // 2}"
    with join(topology(LaunchSettings())) as ranks:
        ranks.connect("gloo", torch.device("cpu"))
        found = [ranks.host, ranks.node_rank, ranks.local_rank, ranks.local_world_size, ranks.sum([1.0])]
    dist.destroy_process_group()
    return found


@pytest.mark.slow
def test_hosts_of_one_name_are_two_hosts():
    """Ranks that share a name and no machine do not share devices: they were numbered as if they did."""
    found = run_on_ranks(twins, 3, joined=False)
    assert len({name for name, *_ in found}) == 1
    assert [rest for _, *rest in found] == [[0, 0, 2, [3.0]], [0, 1, 2, [3.0]], [1, 0, 1, [3.0]]]


def test_a_machine_is_more_than_its_name():
    """Another network of this host, which has its name and its boot, is another machine; a second process is not."""
    code = "from forge_dist.ranks._network import machine_here; print(machine_here())"
    inside = ["unshare", "--map-root-user", "--net"]
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == machine_here() + "\n"
    )
    if shutil.which("unshare") is None or subprocess.run([*inside, "true"], check=False, capture_output=True).returncode:
        pytest.skip("no network namespaces here")
    other = subprocess.run([*inside, sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert other != machine_here()
    assert other.split()[:2] == machine_here().split()[:2]


def test_a_group_of_one_is_no_world():
    """A process group of one rank leaves the settings to decide."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert topology(LaunchSettings(nproc_per_node=2)).role == "launcher"
        assert topology(LaunchSettings()).role == "single"
    finally:
        dist.destroy_process_group()
