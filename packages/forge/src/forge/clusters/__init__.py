"""A recipe → what a cluster runs: an sbatch file for Slurm, a TrainJob for Kubeflow.

Files here import `verbs`, `settings`, `tasks` and the package's own top-level modules; not `run` or `cli`. Nothing here loads
torch or talks to a cluster.
"""

from forge.clusters._config import ForgeConfig
from forge.clusters._kep import AdapterConfig, FsdpConfig, LoraConfig, PrefixConfig, QLoraConfig, ZeroConfig
from forge.clusters._runtimes import runtimes
from forge.clusters._slurm import sbatch
from forge.clusters._trainjob import train_job

__all__ = [
    "AdapterConfig",
    "ForgeConfig",
    "FsdpConfig",
    "LoraConfig",
    "PrefixConfig",
    "QLoraConfig",
    "ZeroConfig",
    "runtimes",
    "sbatch",
    "train_job",
]
