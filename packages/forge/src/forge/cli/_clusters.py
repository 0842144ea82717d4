"""`forge slurm` and `forge kubeflow`: files that clusters run."""

from __future__ import annotations

from pathlib import Path

import cyclopts

from forge._new_file import write_new_file
from forge.cli._options import command_of
from forge.clusters._config import ForgeConfig
from forge.clusters._runtimes import runtimes
from forge.clusters._slurm import sbatch
from forge.clusters._trainjob import as_yaml, train_job


def kubeflow(
    recipe: str | Path,
    *,
    nodes: int = 1,
    gpus: int = 0,
    nproc_per_node: int | None = None,
    verb: str | None = None,
    name: str | None = None,
    model_uri: str | None = None,
    dataset_uri: str | None = None,
    runtime: str | None = None,
    image: str | None = None,
    gpu_resource: str = "nvidia.com/gpu",
    machine: str | None = None,
    output: str | Path | None = None,
) -> str:
    """Write the TrainJob that runs a recipe under Kubeflow Trainer V2.

    Its settings become flags, so that nothing of this machine is needed but what the two URIs name.

    Args:
        recipe: A YAML file of settings.
        nodes: Nodes.
        gpus: Accelerators of each node.
        nproc_per_node: Processes on each node; by default the recipe's, or one for each accelerator.
        verb: Training verb; by default the recipe's line `verb:`, or sft.
        name: Name of the job; by default forge-VERB.
        model_uri: Where Kubeflow's initializer gets the model, such as hf://org/model; by default the recipe's own.
        dataset_uri: Where it gets the rows, such as hf://org/rows; the recipe's data_path is then a path within.
        runtime: A ClusterTrainingRuntime of your own; by default forge-cpu, forge-gpu or forge-multi-node, by size.
        image: Image of the trainer's container; by default the runtime's.
        gpu_resource: What the cluster calls an accelerator.
        machine: Devices that preflight plans memory for, such as 32xH100-80GB; by default those that it sees.
        output: The file to write, which must not exist; by default it is printed.

    """
    job = train_job(
        ForgeConfig.of_recipe(recipe, verb),
        nodes=nodes,
        gpus=gpus,
        nproc_per_node=nproc_per_node,
        name=name,
        model_uri=model_uri,
        dataset_uri=dataset_uri,
        runtime=runtime,
        image=image,
        gpu_resource=gpu_resource,
        machine=machine,
    )
    text = as_yaml(job)
    return text.rstrip("\n") if output is None else f"{write_new_file(output, text)}: start it with kubectl apply -f"


def slurm_app() -> cyclopts.App:
    """Build `forge slurm`."""
    app = cyclopts.App(name="slurm", help="Write the file that Slurm runs a recipe with.", help_format="plaintext")
    example = "forge slurm render recipe.yaml --nodes 4 --gpus 8 --time 24:00:00 --output job.sh"
    app.command(command_of(sbatch, example), name="render")
    return app


def kubeflow_app() -> cyclopts.App:
    """Build `forge kubeflow`."""
    app = cyclopts.App(
        name="kubeflow", help="Write what Kubeflow runs a recipe with: a TrainJob, and its runtimes.", help_format="plaintext"
    )
    example = "forge kubeflow render recipe.yaml --nodes 4 --gpus 8 --dataset-uri hf://org/rows --output job.yaml"
    app.command(command_of(kubeflow, example), name="render")
    app.command(command_of(runtimes, "forge kubeflow runtimes registry/forge:1"), name="runtimes")
    return app
