"""A configuration of a run → a TrainJob of Kubeflow Trainer V2."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import PurePosixPath
from typing import Any

import attrs
import yaml

from forge._errors import SettingsError
from forge.clusters._checks import check_image, count, processes
from forge.clusters._config import ForgeConfig
from forge.clusters._manifests import API, API_VERSION, RUNTIMES, WORKSPACE, dumped
from forge.clusters._words import literal
from forge.settings._data_sets import with_paths
from forge.settings._settings import flat_fields
from forge.verbs._registry import task_of

_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_RUNTIME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_LONGEST = 63
"""Characters that Kubernetes takes of the name of a job or a pod, which begins with the name of the TrainJob."""
_RESOURCE = re.compile(r"[a-z0-9.-]+/[A-Za-z0-9._-]+")
_SCHEMES = ("hf://", "s3://")
_FUNCTION = re.compile(r"([A-Za-z_][\w.]*):[A-Za-z_]\w*")
_HUB = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)


def train_job(
    config: ForgeConfig,
    *,
    nodes: int = 1,
    gpus: int = 0,
    nproc_per_node: int | None = None,
    name: str | None = None,
    model_uri: str | None = None,
    dataset_uri: str | None = None,
    runtime: str | None = None,
    image: str | None = None,
    gpu_resource: str = "nvidia.com/gpu",
    machine: str | None = None,
) -> dict[str, Any]:
    """Make the TrainJob of a run, as `kubectl apply` and Kubeflow's API take it.

    Settings become flags of the container's command. The recipe as it runs there is given to the preflight container too.

    Args:
        config: of the run.
        nodes: number of nodes.
        gpus: accelerators of each node.
        nproc_per_node: processes on each node; by default the recipe's, or one for each accelerator.
        name: of the job; by default forge-VERB.
        model_uri: where the model initializer gets the model; by default the Hub, where model_path names one there.
        dataset_uri: where the dataset initializer gets the rows; paths of the recipe are then relative to it.
        runtime: a ClusterTrainingRuntime; by default one of deploy/kubeflow, by size.
        image: of the trainer's container; by default the runtime's.
        gpu_resource: what the cluster calls an accelerator.
        machine: devices that preflight plans memory for, such as 32xH100-80GB; by default those that it sees, which are
            none in a runtime of several nodes.

    Raises:
        SettingsError: a setting that a pod cannot have, by name.

    """
    verb = config.verb
    job = f"forge-{verb}" if name is None else name
    count("nodes", nodes, 1)
    count("gpus", gpus, 0)
    shipped = runtime is None
    ends = [f"-node-0-{nodes - 1}-abcde", *(["-dataset-initializer-0-0-abcde"] if shipped else [])]
    most = _LONGEST - max(map(len, ends))
    if not _NAME.fullmatch(job) or len(job) > most:
        raise SettingsError(
            f"name must be at most {most} of a-z, 0-9 and -, beginning with a letter, not {job!r}: the names of its pods begin "
            f"with it, and have {_LONGEST} characters at most."
        )
    if runtime is not None and not _RUNTIME.fullmatch(runtime):
        raise SettingsError(f"runtime must be the name of a ClusterTrainingRuntime, of a-z, 0-9, - and ., not {runtime!r}.")
    if image is not None:
        check_image(image)
    if not _RESOURCE.fullmatch(gpu_resource):
        raise SettingsError(f"gpu_resource must be a resource of Kubernetes, such as nvidia.com/gpu, not {gpu_resource!r}.")
    if machine is not None:
        if not shipped:
            raise SettingsError(
                "machine is for the preflight of the shipped runtimes: leave it out with a runtime of your own."
            )
        _check_machine(machine)
    values = dict(config.to_settings())
    model_uri = _place_model(values, model_uri, shipped=shipped)
    _place_rows(values, dataset_uri, shipped=shipped)
    _place_output(values, job, shipped=shipped)
    _refuse_local(values, verb, shipped=shipped)
    checked = attrs.evolve(config, settings=values, peft_config=None, sharding_config=None).checked()
    procs = processes(checked, nodes, gpus, nproc_per_node)
    # The controller says it, and a flag would outrank it.
    values.pop("nproc_per_node", None)
    initializer = {key: {"storageUri": uri} for key, uri in (("dataset", dataset_uri), ("model", model_uri)) if uri is not None}
    trainer: dict[str, Any] = {
        "numNodes": nodes,
        # Always: the controller counts resources with "gpu" in their name, and otherwise takes one process for each CPU.
        "numProcPerNode": procs,
        "command": list(config.entrypoint),
        "args": [literal(word) for word in config.words(values)],
        **({"image": image} if image is not None else {}),
        **({"resourcesPerNode": {"limits": {gpu_resource: str(gpus)}}} if gpus else {}),
    }
    size = "nodes" if nodes > 1 or gpus > 1 else "gpu" if gpus else "cpu"
    return {
        "apiVersion": API_VERSION,
        "kind": "TrainJob",
        "metadata": {"name": job},
        "spec": {
            "runtimeRef": {
                "apiGroup": API,
                "kind": "ClusterTrainingRuntime",
                "name": RUNTIMES[size] if runtime is None else runtime,
            },
            **({"initializer": initializer} if initializer else {}),
            "trainer": trainer,
            **({"runtimePatches": [_preflight(values, verb, machine)]} if shipped else {}),
        },
    }


def as_yaml(job: Mapping[str, Any]) -> str:
    """Write a TrainJob as YAML, with a line on what made it."""
    return f"# Written by `forge kubeflow render`. Start it with kubectl apply -f FILE.\n{dumped(job)}"


def _preflight(values: Mapping[str, object], verb: str, machine: str | None) -> dict[str, Any]:
    """Return the patch that gives the preflight container of the runtime this job's recipe."""
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
    recipe = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=2**30)
    env = [{"name": "FORGE_VERB", "value": verb}, {"name": "FORGE_RECIPE", "value": literal(recipe)}]
    if machine is not None:
        env.append({"name": "FORGE_MACHINE", "value": machine})
    pod = {"spec": {"initContainers": [{"name": "preflight", "env": env}]}}
    job = {"name": "node", "template": {"spec": {"template": pod}}}
    return {"manager": "forge-llm.org/render", "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [job]}}}}


def _check_machine(machine: str) -> None:
    """Raise SettingsError where `--for` would not take these devices."""
    from forge.memory._target import Target

    try:
        Target.parse(machine)
    except SettingsError as error:
        raise SettingsError(f"machine={machine!r}: {str(error).partition(': ')[2]}") from None


def _uri(name: str, uri: str) -> str:
    """Return a URI that an initializer reads. Raises SettingsError for another one."""
    if not uri.startswith(_SCHEMES) or not uri.partition("://")[2]:
        raise SettingsError(f"{name} must be what Kubeflow's initializers read, {' or '.join(_SCHEMES)}..., not {uri!r}.")
    return uri


def _place_model(values: dict[str, object], uri: str | None, *, shipped: bool) -> str | None:
    """Put the model where the model initializer leaves it; return its URI."""
    path = values.get("model_path")
    if uri is None and isinstance(path, str) and shipped and _HUB.fullmatch(path) and not os.path.exists(path):
        uri = f"hf://{path}"
    if uri is not None:
        values["model_path"] = str(WORKSPACE / "model")
        return _uri("model_uri", uri)
    if path is None:
        raise SettingsError("model_path is required: give it in the recipe, or model_uri.")
    if shipped:
        raise SettingsError(
            f"model_path={path!r} is no name on the Hub, and a pod does not see this machine's directories: give model_uri, "
            "such as hf://org/model, or a runtime of your own in whose volume the model is."
        )
    return None


def _place_rows(values: dict[str, object], uri: str | None, *, shipped: bool) -> None:
    """Put the rows where the dataset initializer leaves them."""
    folder = WORKSPACE / "dataset"
    if uri is None:
        if shipped:
            raise SettingsError(
                "the rows are on this machine, which a pod does not see: give dataset_uri, such as hf://org/rows, or a runtime "
                "of your own in whose volume they are."
            )
        return
    _uri("dataset_uri", uri)

    def placed(name: str, path: str) -> str:
        if "://" in path:
            return path
        found = str(folder / path)
        if path.startswith("~") or (shipped and not _inside(found)):
            raise SettingsError(
                f"{name}={path!r} is outside of {WORKSPACE}, where the job's volume is: give a path in dataset_uri."
            )
        return found

    values.setdefault("data_path", str(folder))
    for name in ("data_path", "eval_data_path"):
        value = values.get(name)
        if isinstance(value, (str, Mapping, list, tuple)):
            values[name] = with_paths(value, partial(placed, name))


def _place_output(values: dict[str, object], job: str, *, shipped: bool) -> None:
    """Put the run directory on the shared volume."""
    given = str(values.get("ckpt_output_dir") or job)
    path = str(WORKSPACE / "output" / given)
    if given.startswith("~") or (shipped and not _inside(path)):
        raise SettingsError(
            f"ckpt_output_dir={given} is lost with the pod: give a directory below {WORKSPACE}, which is the job's volume."
        )
    values["ckpt_output_dir"] = path


def _inside(path: str) -> bool:
    """Return whether a path is below the volume."""
    return WORKSPACE in PurePosixPath(os.path.normpath(path)).parents


def _refuse_local(values: Mapping[str, object], verb: str, *, shipped: bool) -> None:
    """Raise SettingsError for a setting that names a file or a module of this machine."""
    known = {field.name for _, field in flat_fields(task_of(verb).settings)}
    for name in known & set(values):
        for text in _texts(values[name]):
            function = _FUNCTION.fullmatch(text)
            module = function and function[1].replace(".", "/")
            file = next((file for file in (f"{module}.py", f"{module}/__init__.py") if module and os.path.exists(file)), None)
            if file:
                raise SettingsError(
                    f"{name}={text!r} is in {file} of this machine: put it into the image, where PYTHONPATH finds it."
                )
            here = os.path.exists(os.path.expanduser(text)) and "://" not in text
            if here and name != "ckpt_output_dir" and not (os.path.isabs(text) and (_inside(text) or not shipped)):
                raise SettingsError(
                    f"{name}={text!r} is a file of this machine, which a pod does not see: put it into the data set or the "
                    f"image, and give its path there, below {WORKSPACE}."
                )


def _texts(value: object) -> Iterator[str]:
    """Yield the texts of a setting's value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from (key for key in value if isinstance(key, str))
    elif isinstance(value, (list, tuple)):
        yield from (each for each in value if isinstance(each, str))
