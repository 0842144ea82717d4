"""Settings and environment → what this process is, or a refusal by name."""

import subprocess
import sys

import pytest
from hypothesis import given, strategies as st

from forge_dist import LaunchError, LaunchSettings, topology

KUBEFLOW = {
    "PET_NNODES": "4",
    "PET_NPROC_PER_NODE": "2",
    "PET_NODE_RANK": "3",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29500",
}
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}
MEETING = {"MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    **MEETING,
}
SRUN = {
    "SLURM_JOB_ID": "1234567",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_JOB_NODELIST": "gpu[07-08]",
}


def of(environ=(), devices=0, cores=8, **settings):
    return topology(LaunchSettings(**settings), environ=dict(environ), devices=devices, cores=cores)


@pytest.mark.parametrize(
    ("environ", "settings"),
    [
        ({}, {}),
        ({"PATH": "/bin"}, {}),
        ({"PET_NNODES": "1", "PET_NPROC_PER_NODE": "1"}, {}),
        (KUBEFLOW | {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": "0"}, {}),
        ({"PET_NPROC_PER_NODE": "auto"}, {}),
        ({"WORLD_SIZE": ""}, {}),
        ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "4", "SLURM_NNODES": "1", "SLURM_PROCID": "0"}, {}),
        ({"SLURM_NTASKS": "4", "SLURM_NNODES": "1", "SLURM_PROCID": "0"}, {"nproc_per_node": 1}),
        ({"SLURM_NTASKS": "1", "SLURM_NNODES": "1", "SLURM_PROCID": "0"}, {}),
        ({"OMPI_COMM_WORLD_SIZE": "1"}, {}),
        (KUBEFLOW, {"nnodes": 1, "nproc_per_node": 1}),
        (SRUN, {"nnodes": 1}),
        ({}, {"nnodes": 1, "node_rank": 0}),
    ],
)
def test_one_process_on_one_node_is_single(environ, settings):
    """Whatever says it, one process on one node is the whole run."""
    t = of(environ, **settings)
    assert (t.role, t.world_size, t.rank, t.master, t.rdzv_endpoint) == ("single", 1, 0, None, None)


def test_steps_of_slurm_do_not_share_a_port():
    """Two steps of one job, and the steps of jobs that run side by side, meet on ports of their own."""
    ports = {
        (job, step): of(SRUN | {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}).master[1]
        for job in range(1234567, 1234667)
        for step in range(9)
    }
    assert len(set(ports.values())) == len(ports)
    assert ports[1234567, 0] == of(SRUN).master[1]


def test_a_pod_that_nobody_told_of_the_others_is_refused():
    """A TrainJob without spec.trainer gets no PET_*: every pod but the first ends, which ends the job."""
    with pytest.raises(LaunchError, match=r"pod 1 .*PET_NNODES is not set.*spec.trainer"):
        of({"JOB_COMPLETION_INDEX": "1"})
    assert of({"JOB_COMPLETION_INDEX": "0"}).role == "single"
    assert of({"JOB_COMPLETION_INDEX": "1"}, nnodes=1).role == "single"
    assert of(KUBEFLOW | {"JOB_COMPLETION_INDEX": "3"}).node_rank == 3


def test_kubeflow_makes_a_launcher():
    """The five variables of a TrainJob are all a node needs."""
    t = of(KUBEFLOW)
    assert (t.role, t.world_size, t.nproc_per_node, t.node_rank) == ("launcher", 8, 2, 3)
    assert (t.min_nodes, t.max_nodes, t.master) == (4, 4, ("job-node-0-0.job", 29500))
    assert t.origins["nnodes"] == "PET_NNODES"
    assert t.origins["master_port"] == "PET_MASTER_PORT"
    assert t.origins["max_restarts"] == "default"


def test_settings_outrank_the_environment():
    """An explicit setting outranks the environment's, and its origin says so; what is not set stays the environment's."""
    t = of(KUBEFLOW, nproc_per_node=5, master_port=1234)
    assert (t.nproc_per_node, t.world_size, t.master) == (5, 20, ("job-node-0-0.job", 1234))
    assert (t.origins["nproc_per_node"], t.origins["master_port"], t.origins["nnodes"]) == (
        "argument",
        "argument",
        "PET_NNODES",
    )


def test_one_node_meets_nobody():
    """On one node the master's address of the environment is not used: its name need not resolve yet."""
    t = of(KUBEFLOW | {"PET_NNODES": "1", "PET_NODE_RANK": "0"})
    assert (t.role, t.world_size, t.master) == ("launcher", 2, None)
    assert of({}, nproc_per_node=2, master_addr="localhost", master_port=7777).master == ("localhost", 7777)


@pytest.mark.parametrize(
    ("word", "devices", "processes"),
    [("auto", 4, 4), ("auto", 0, 1), ("gpu", 2, 2), ("cpu", 4, 8), ("3", 4, 3), (3, 0, 3)],
)
def test_processes_of_a_node(word, devices, processes):
    """auto and gpu count accelerators, cpu counts cores, a number is itself; by setting and by variable."""
    assert of({"PET_NPROC_PER_NODE": str(word)}, devices=devices).nproc_per_node == processes
    assert of({}, devices=devices, nproc_per_node=word).nproc_per_node == processes


def test_spaces_in_a_variable_say_nothing():
    """A manifest's quotes may hold spaces: " gpu " is gpu, and " 2 " is 2."""
    assert of({"PET_NPROC_PER_NODE": " gpu "}, devices=2).nproc_per_node == 2
    assert of({"PET_NPROC_PER_NODE": " 2 "}).nproc_per_node == 2


def test_sbatch_with_several_tasks_may_launch():
    """A script that sbatch gave four tasks to, and that starts this process once, may say how many
    processes that shall start.
    """
    sbatch = {"SLURM_NTASKS": "4", "SLURM_NNODES": "1", "SLURM_PROCID": "0"}
    for environ, settings in ((sbatch, {"nproc_per_node": 4}), (sbatch | {"PET_NPROC_PER_NODE": "4"}, {})):
        t = of(environ, **settings)
        assert (t.role, t.world_size, t.master) == ("launcher", 4, None)


def test_elastic():
    """MIN:MAX meets at rdzv_endpoint, has no node rank and no size yet."""
    environ = {
        "PET_NNODES": "1:4",
        "PET_NPROC_PER_NODE": "2",
        "PET_RDZV_ENDPOINT": "host:2000",
        "PET_RDZV_ID": "me",
        "PET_MAX_RESTARTS": "3",
    }
    t = of(environ)
    assert (t.role, t.world_size, t.min_nodes, t.max_nodes, t.node_rank) == ("launcher", None, 1, 4, None)
    assert (t.rdzv_endpoint, t.rdzv_id, t.max_restarts, t.master) == ("host:2000", "me", 3, None)
    assert of({}, nnodes="1:2", rdzv_endpoint="host").rdzv_endpoint == "host:29500"
    assert of(KUBEFLOW | {"PET_NNODES": "2:4"}).rdzv_endpoint == "job-node-0-0.job:29500"
    # One process, but more may come.
    assert of({}, nnodes="1:2", rdzv_endpoint="host").role == "launcher"


def test_a_fixed_number_at_an_endpoint():
    """nnodes=2 with rdzv_endpoint needs no node rank; a master's address that is asked for outranks an endpoint of the
    environment.
    """
    t = of({}, nnodes=2, rdzv_endpoint="host:1")
    assert (t.world_size, t.rdzv_endpoint, t.node_rank, t.master) == (2, "host:1", None, None)
    t = of({"PET_RDZV_ENDPOINT": "host:1"}, nnodes=2, node_rank=1, master_addr="m")
    assert (t.master, t.rdzv_endpoint) == (("m", 29500), None)


@pytest.mark.parametrize("endpoint", ["host:1", "[::1]:1", "host"])
def test_a_numbered_node_at_an_endpoint(endpoint):
    """node_rank beside rdzv_endpoint is torchrun's static rendezvous: node 0 listens at the endpoint, rdzv_id names the run."""
    t = of({}, nnodes=2, node_rank=1, rdzv_endpoint=endpoint, rdzv_id="me")
    where = {"host:1": ("host", 1), "[::1]:1": ("::1", 1), "host": ("host", 29500)}[endpoint]
    assert (t.role, t.world_size, t.node_rank, t.master, t.rdzv_endpoint, t.rdzv_id) == ("launcher", 2, 1, where, None, "me")
    one = of({}, nnodes=1, node_rank=0, rdzv_endpoint=endpoint, rdzv_id="me")
    assert (one.role, one.world_size, one.node_rank, one.master, one.rdzv_id) == ("launcher", 1, 0, where, "me")


def test_rank_makes_a_worker():
    """RANK with its companions is a worker, whatever PET_* and SLURM_* say beside it."""
    t = of(TORCHRUN | KUBEFLOW | SRUN)
    assert (t.role, t.rank, t.world_size, t.local_rank, t.local_world_size, t.node_rank) == ("worker", 3, 4, 1, 2, 1)
    assert (t.master, t.max_nodes) == (("node0", 29500), 2)
    assert of({"RANK": "0", "WORLD_SIZE": "1"}).role == "worker"
    assert of(TORCHRUN, nproc_per_node=2, nnodes="2").role == "worker"
    # What PET_* asks for agrees with a world of one, or is outranked by a setting or by the launcher's own promise.
    alone = {"RANK": "0", "WORLD_SIZE": "1"}
    for environ, settings in (
        ({"PET_NNODES": "1", "PET_NPROC_PER_NODE": "gpu"}, {}),
        ({"PET_NNODES": "1:4"}, {}),
        ({"PET_NNODES": "4"}, {"nnodes": 1}),
        ({"PET_NNODES": "4", "FORGE_WORLD_SIZE": "1"}, {}),
    ):
        assert of(alone | environ, **settings).role == "worker"
    assert of(TORCHRUN, nproc_per_node="auto", nnodes="1:4").role == "worker"


def test_srun_with_a_task_a_node_makes_launchers():
    """One task on each node: SLURM's numbers, the first host of its list, and a port that all nodes derive alike."""
    t = of(SRUN, nproc_per_node=4)
    assert (t.role, t.world_size, t.node_rank, t.max_nodes) == ("launcher", 8, 1, 2)
    assert t.master == ("gpu07", of(SRUN | {"SLURM_NODEID": "0", "SLURM_PROCID": "0"}).master[1])
    assert 20000 <= t.master[1] < 30000
    assert t.origins["nnodes"] == "SLURM_STEP_NUM_NODES"
    assert of(SRUN, nproc_per_node=4, master_port=5).master == ("gpu07", 5)
    assert t.rdzv_id == "slurm-1234567-0", "by which two runs at one port are told apart"
    assert of(SRUN, nproc_per_node=4, rdzv_id="mine").rdzv_id == "mine"


def test_srun_with_several_tasks_a_node_makes_workers():
    """Several tasks on a node are the ranks themselves."""
    environ = SRUN | {
        "SLURM_STEP_NUM_TASKS": "7",
        "SLURM_PROCID": "6",
        "SLURM_LOCALID": "2",
        "SLURM_STEP_TASKS_PER_NODE": "4,3",
    }
    t = of(environ)
    assert (t.role, t.rank, t.world_size, t.local_rank, t.local_world_size, t.node_rank) == ("worker", 6, 7, 2, 3, 1)
    assert t.master[0] == "gpu07"
    assert t.rdzv_id == of(environ | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}).rdzv_id
    assert t.rdzv_id != of(environ | {"SLURM_STEP_ID": "1"}).rdzv_id
    alone = environ | {"SLURM_STEP_NUM_NODES": "1", "SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "7"}
    assert of(alone).master[0] == "127.0.0.1", "on one node nobody else can listen in"
    assert of(alone, master_addr="gpu07").master[0] == "gpu07"


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("gpu[07-12]", "gpu07"),
        ("gpu[3,5-7],cpu1", "gpu3"),
        ("a[1-2]b[004-9]", "a1b004"),
        ("rack-2-n[10-20]", "rack-2-n10"),
    ],
)
def test_first_host(nodes, first):
    """The first name of SLURM's bracketed lists."""
    assert of(SRUN | {"SLURM_STEP_NODELIST": nodes}).master[0] == first


@pytest.mark.parametrize(
    ("environ", "settings", "named"),
    [
        ({"RANK": "0"}, {}, "RANK=0 and not WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, {}, "WORLD_SIZE=2 and not RANK"),
        ({"LOCAL_RANK": "0"}, {}, "LOCAL_RANK=0 and not RANK"),
        ({"RANK": "1", "WORLD_SIZE": "1"}, {}, "RANK=1 of WORLD_SIZE=1"),
        ({"RANK": "zero", "WORLD_SIZE": "1"}, {}, "RANK is 'zero'"),
        ({"RANK": "-1", "WORLD_SIZE": "1"}, {}, "RANK is '-1'"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, {}, "not LOCAL_RANK nor MASTER_ADDR nor MASTER_PORT"),
        ({k: v for k, v in TORCHRUN.items() if k != "MASTER_PORT"}, {}, "not MASTER_PORT"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "8"}, {}, "LOCAL_WORLD_SIZE=8 with WORLD_SIZE=4"),
        (TORCHRUN | {"LOCAL_RANK": "2"}, {}, "LOCAL_RANK=2 of LOCAL_WORLD_SIZE=2"),
        (TORCHRUN | {"FORGE_WORLD_SIZE": "6"}, {}, "6 ranks were asked for and 4 came"),
        (TORCHRUN, {"nproc_per_node": 4}, "nproc_per_node=4 contradicts.*LOCAL_WORLD_SIZE=2"),
        (TORCHRUN, {"nnodes": 3}, "nnodes=3 contradicts.*WORLD_SIZE=4"),
        ({"PET_NNODES": "2"}, {}, "PET_NNODES=2 asks for 2 nodes.*master_addr and node_rank"),
        ({"PET_NNODES": "2", "PET_MASTER_ADDR": "h"}, {}, "nothing says node_rank"),
        ({}, {"nnodes": 2}, "nnodes=2 asks for 2 nodes.*master_addr and node_rank"),
        ({"PET_NNODES": "1:4"}, {}, "PET_NNODES=1:4.*rdzv_endpoint"),
        ({"PET_NNODES": "0"}, {}, "PET_NNODES must be"),
        ({"PET_NNODES": "4:1"}, {}, "PET_NNODES must be"),
        ({"PET_NNODES": "many"}, {}, "PET_NNODES must be.*'many'"),
        ({"PET_NPROC_PER_NODE": "0"}, {}, "PET_NPROC_PER_NODE must be"),
        ({"PET_NPROC_PER_NODE": "gpu"}, {}, "PET_NPROC_PER_NODE=gpu.*has none"),
        (KUBEFLOW | {"PET_NODE_RANK": "4"}, {}, "PET_NODE_RANK=4 is not one of the 4 nodes"),
        (KUBEFLOW | {"PET_MASTER_PORT": "http"}, {}, "PET_MASTER_PORT is 'http'"),
        ({"PET_NODE_RANK": "1"}, {}, "PET_NODE_RANK and not PET_NNODES"),
        ({"PET_MASTER_ADDR": "h"}, {}, "PET_MASTER_ADDR and not PET_NNODES"),
        ({"PET_NNODES": "1", "PET_NODE_RANK": "1"}, {}, "PET_NODE_RANK=1 contradicts PET_NNODES=1"),
        ({"PET_RDZV_BACKEND": "etcd", "PET_RDZV_ENDPOINT": "h:1"}, {}, "PET_RDZV_BACKEND=etcd"),
        ({}, {"node_rank": 1}, "node_rank has no effect on one node"),
        ({}, {"master_addr": "h"}, "master_addr has no effect"),
        ({}, {"master_port": 5}, "master_port has no effect on one node"),
        ({}, {"nproc_per_node": 2, "master_port": 5}, "master_port has no effect on one node"),
        (KUBEFLOW | {"PET_NNODES": "1", "PET_NODE_RANK": "0"}, {"master_port": 5}, "master_port has no effect on one node"),
        ({}, {"nnodes": 2, "rdzv_endpoint": "h:1", "master_port": 5}, "master_port has no effect with rdzv_endpoint"),
        ({}, {"nnodes": 2, "rdzv_endpoint": "h:65536"}, "rdzv_endpoint=h:65536 ends in no port"),
        (KUBEFLOW | {"PET_MASTER_PORT": "65536"}, {}, "PET_MASTER_PORT=65536, which is no port"),
        (KUBEFLOW | {"PET_MASTER_PORT": "0"}, {}, "PET_MASTER_PORT=0, which is no port"),
        (TORCHRUN | {"MASTER_PORT": "65536"}, {}, " MASTER_PORT=65536, which is no port"),
        ({"RANK": "0", "WORLD_SIZE": "1", "PET_NNODES": "2"}, {}, "WORLD_SIZE=1, one process in all, and PET_NNODES=2"),
        ({"RANK": "0", "WORLD_SIZE": "1", "PET_NNODES": "2:4"}, {"nproc_per_node": 1}, "PET_NNODES=2:4.*set nnodes=1"),
        ({"RANK": "0", "WORLD_SIZE": "1", "PET_NPROC_PER_NODE": "2"}, {}, "PET_NPROC_PER_NODE=2.*set nproc_per_node=1"),
        ({"PET_NPROC_PER_NODE": "1025"}, {}, "PET_NPROC_PER_NODE must be a number from 1 to 1024"),
        ({}, {"nproc_per_node": 2, "rdzv_id": "x"}, "rdzv_id has no effect"),
        ({}, {"nnodes": 2, "rdzv_endpoint": "h:1", "master_addr": "h"}, "two places to meet"),
        ({}, {"nnodes": 2, "rdzv_endpoint": "h:1", "node_rank": 2}, "node_rank=2 is not one of the 2 nodes of nnodes=2"),
        ({}, {"nnodes": 1, "rdzv_endpoint": "h:1", "node_rank": 1}, "node_rank=1 is not one of the 1 node of nnodes=1"),
        ({}, {"nnodes": "1:2", "rdzv_endpoint": "h:1", "node_rank": 0}, "node_rank has no effect in an elastic run"),
        ({}, {"nnodes": "1:2", "master_addr": "h", "node_rank": 0}, "node_rank has no effect in an elastic run"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, {}, "OMPI_COMM_WORLD_SIZE=2"),
        (MPI | {"MASTER_PORT": ""}, {}, "OMPI_COMM_WORLD_SIZE=4.*set MASTER_PORT for all"),
        (
            {k: v for k, v in MPI.items() if "LOCAL_SIZE" not in k},
            {},
            "Open MPI .* OMPI_COMM_WORLD_LOCAL_SIZE is not set",
        ),
        (MPI | {"OMPI_COMM_WORLD_RANK": "4"}, {}, "RANK=4 of WORLD_SIZE=4"),
        (MPI, {"nproc_per_node": 4}, "nproc_per_node=4 contradicts the launcher"),
        ({"ACCELERATE_USE_CPU": "True", "MASTER_PORT": "29500"}, {}, "accelerate launch was asked for several processes"),
        ({"SLURM_NNODES": "2", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, {}, "SLURM_NNODES=2, and no srun"),
        ({"SLURM_NNODES": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, {}, "SLURM_NTASKS=4, and no srun.*nproc_per_node"),
        ({"SLURM_PROCID": "4", "SLURM_NTASKS": "4"}, {}, "SLURM_PROCID=4, and SLURM counts 4 tasks"),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "1"}, {}, "SLURM_PROCID=1, and SLURM counts 1 tasks"),
        ({"SLURM_PROCID": "1"}, {}, "SLURM_PROCID=1, and neither SLURM_STEP_NUM_TASKS nor SLURM_NTASKS"),
        (SRUN | {"SLURM_PROCID": "2"}, {}, "SLURM_PROCID=2, and SLURM counts 2 tasks"),
        (SRUN | {"SLURM_NODEID": "2"}, {}, "SLURM_NODEID=2, and SLURM counts 2 nodes"),
        (SRUN | {"SLURM_LOCALID": "1"}, {}, "SLURM_LOCALID=1, and SLURM counts 1 tasks of its node"),
        ({k: v for k, v in SRUN.items() if "NODELIST" not in k}, {}, "neither SLURM_STEP_NODELIST nor SLURM_JOB_NODELIST"),
        ({k: v for k, v in SRUN.items() if k != "SLURM_NODEID"}, {}, "SLURM_NODEID is not set"),
        (SRUN | {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}, {"nproc_per_node": 1}, "contradicts srun"),
    ],
)
def test_half_and_contradicting_environments_are_refused(environ, settings, named):
    """Never a silent world of one: the message names the variable or setting that does not fit."""
    with pytest.raises(LaunchError, match=named):
        of(environ, **settings)


@pytest.mark.parametrize("kind", [("OMPI_COMM_WORLD", "SIZE"), ("MV2_COMM_WORLD", "SIZE"), ("PMI", "SIZE")])
def test_mpirun_starts_workers_where_they_can_meet(kind):
    """Rank and size are those of each MPI; a process that mpirun started alone is single."""
    if kind[0] == "PMI":
        environ = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", **MEETING}
    else:
        environ = {name.replace("OMPI_COMM_WORLD", kind[0]): value for name, value in MPI.items()}
    found = of(environ)
    assert (found.role, found.rank, found.world_size, found.local_rank, found.local_world_size) == ("worker", 3, 4, 1, 2)
    assert (found.node_rank, found.max_nodes, found.master) == (1, 2, ("node0", 29500))
    assert of({name: "1" if name.endswith("SIZE") else "0" for name in environ if name not in MEETING}).role == "single"
    assert of({"ACCELERATE_USE_CPU": "True", "MASTER_PORT": "29500"}, nproc_per_node=2).role == "launcher"


@given(
    st.integers(min_value=2, max_value=10**6),
    st.sampled_from(["WORLD_SIZE", "PET_NNODES", "OMPI_COMM_WORLD_SIZE", "SLURM_NNODES", "SLURM_NTASKS", "SLURM_PROCID"]),
)
def test_no_number_above_one_passes_alone(number, name):
    """Whatever the number, a variable that asks for more than one node or process is never ignored."""
    with pytest.raises(LaunchError, match=name):
        of({name: str(number)})


def test_the_real_environment_is_the_default(monkeypatch):
    """Without an argument, os.environ is read."""
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert topology(LaunchSettings()).rank == 3


@pytest.mark.slow
def test_it_needs_no_framework():
    """What a process is is known before anything heavy is imported."""
    code = "import sys, forge_dist as d; d.topology(d.LaunchSettings(nproc_per_node=2)); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "False"
