"""An image → ClusterTrainingRuntimes of Kubeflow Trainer V2, by size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forge._errors import PreemptedError, SettingsError
from forge._new_file import write_new_file
from forge.clusters._checks import check_image
from forge.clusters._config import ForgeConfig
from forge.clusters._manifests import API, API_VERSION, RUNTIMES, VOLUME, WORKSPACE, dumped

_IMAGE = "registry.example.com/forge"
_INITIALIZERS = "ghcr.io/kubeflow/trainer"
_USER = 1000
"""Number of the image's user and group, who own the volume."""
_GRACE_SECONDS = 300
_RETRIES = 10
# Nothing is checked where a TrainJob gives no recipe: `forge kubeflow render` does.
_PREFLIGHT = """\
if [ -z "$FORGE_RECIPE" ]; then echo "no FORGE_RECIPE: nothing is checked"; exit 0; fi
printf '%s' "$FORGE_RECIPE" > /tmp/recipe.yaml || exit 1
exec forge "$FORGE_VERB" /tmp/recipe.yaml --dry-run --cluster ${FORGE_MACHINE:+--for "$FORGE_MACHINE"}
"""
_HEAD = """\
# Runtimes of forge for Kubeflow Trainer V2 (2.3 or newer), by size, written by `forge kubeflow runtimes`.
#
# - The initializers fill /workspace/model and /workspace/dataset on a volume that outlives the job; /workspace/output on it
#   has the run directories. A driver that knows no fsGroup must make /workspace writable for the group 1000.
# - `preflight` checks settings, rows, memory, disk, the shared volume and the way to the other nodes before any of them
#   trains. Its recipe comes with the TrainJob.
# - PET_* says to both containers which node they are: forge starts the processes of its node itself.
# - A pod that is deleted has 5 minutes to save its state and ends with 75; the pod in its place resumes. That, and what
#   Kubernetes takes away, counts as no failure. 2 is bad input, which no retry mends: the job fails at once.
"""


def runtimes(image: str = _IMAGE, *, output: str | Path | None = None) -> str:
    """Write the runtimes of forge for Kubeflow Trainer V2, by size, as YAML for `kubectl apply`.

    One node without accelerators, one with one, and any number of nodes; a TrainJob says how many nodes and accelerators.

    Args:
        image: Image of forge that the cluster can fetch, built from deploy/Dockerfile.
        output: The file to write, which must not exist; by default it is printed.

    """
    check_image(image)
    documents = [dumped(_runtime(size, image)) for size in RUNTIMES]
    text = _HEAD + "---\n".join(documents)
    return text.rstrip("\n") if output is None else f"{write_new_file(output, text)}: install them with kubectl apply -f"


def _runtime(size: str, image: str) -> dict[str, Any]:
    access = "ReadWriteMany" if size == "nodes" else "ReadWriteOnce"
    claim = {
        "metadata": {"name": VOLUME},
        "spec": {"accessModes": [access], "resources": {"requests": {"storage": "20Gi" if size == "cpu" else "200Gi"}}},
    }
    steps = [
        ("dataset-initializer", f"{_INITIALIZERS}/dataset-initializer"),
        ("model-initializer", f"{_INITIALIZERS}/model-initializer"),
    ]
    spec = {
        "mlPolicy": {
            "numNodes": 1,
            "torch": {"envInjection": {"targets": [{"jobName": "node", "containerNames": ["preflight"]}]}},
        },
        "template": {
            "spec": {
                "volumeClaimPolicies": [{"retentionPolicy": {"whenDeleted": "Retain"}, "templates": [claim]}],
                "replicatedJobs": [
                    *(_job(name, name, {"containers": [_container(name, image)]}) for name, image in steps),
                    {
                        **_job("node", "trainer", _node_pod(size, image), backoffLimit=_RETRIES, podFailurePolicy=_failures()),
                        "dependsOn": [{"name": name, "status": "Complete"} for name, _ in steps],
                    },
                ],
            }
        },
    }
    return {
        "apiVersion": API_VERSION,
        "kind": "ClusterTrainingRuntime",
        "metadata": {"name": RUNTIMES[size], "labels": {f"{API}/framework": ForgeConfig.framework}},
        "spec": spec,
    }


def _job(name: str, step: str, pod: dict[str, Any], **spec: Any) -> dict[str, Any]:
    """Return a replicated job of one step of a TrainJob."""
    labels = {f"{API}/trainjob-ancestor-step": step}
    return {"name": name, "template": {"metadata": {"labels": labels}, "spec": {**spec, "template": {"spec": pod}}}}


def _container(name: str, image: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "image": image, **more, "volumeMounts": [{"name": VOLUME, "mountPath": str(WORKSPACE)}]}


def _node_pod(size: str, image: str) -> dict[str, Any]:
    """Return the pod of a node: preflight, then forge."""
    node = _container("node", image, command=["forge", "--help"])
    preflight = _container("preflight", image, command=["sh", "-c", _PREFLIGHT])
    if size == "gpu":
        # A pod takes the larger of both, not their sum.
        node["resources"] = preflight["resources"] = {"limits": {"nvidia.com/gpu": "1"}}
    # Ranks of one node talk through it, and a container has 64 MB.
    node["volumeMounts"].append({"name": "shared-memory", "mountPath": "/dev/shm"})  # noqa: S108 - of the container
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": _GRACE_SECONDS,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "fsGroup": _USER,
            "fsGroupChangePolicy": "OnRootMismatch",
        },
        "initContainers": [preflight],
        "containers": [node],
        "volumes": [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}],
    }


def _failures() -> dict[str, Any]:
    """Return what becomes of a pod that ended, by its exit status."""
    bad_input = [
        {"action": "FailJob", "onExitCodes": {"containerName": name, "operator": "In", "values": [SettingsError.exit_status]}}
        for name in ("preflight", "node")
    ]
    stopped = {"containerName": "node", "operator": "In", "values": [PreemptedError.exit_status]}
    disrupted = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    return {"rules": [*bad_input, {"action": "Ignore", "onExitCodes": stopped}, disrupted]}
