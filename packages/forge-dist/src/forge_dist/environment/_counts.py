"""Launch values for nodes ("2", "1:4") and processes per node ("4", "auto", "gpu", "cpu")."""

from forge_dist._errors import LaunchError
from forge_dist._settings import MOST_PROCESSES
from forge_dist.environment._environment import Origin


def parse_nodes(value: object, origin: Origin) -> tuple[int, int]:
    """Return the minimum and maximum number of nodes that "2" or "1:4" stands for.

    Raises:
        LaunchError: it is neither; the message names `origin`.
    """
    parts = str(value).strip().split(":")
    if not isinstance(value, bool) and len(parts) in (1, 2) and all(part.isdecimal() for part in parts):
        least, most = int(parts[0]), int(parts[-1])
        if 1 <= least <= most:
            return least, most
    raise LaunchError(f'{origin.replace("argument", "nnodes")} must be a number of 1 or more, or "MIN:MAX"; got {value!r}')


def parse_processes(value: object, origin: Origin, devices: int, cores: int) -> int:
    """Return the number of processes per node that "4", "auto", "gpu" or "cpu" stands for here.

    Raises:
        LaunchError: it is none of these, or the machine has no accelerator for "gpu"; the message names `origin`.
    """
    name, text = origin.replace("argument", "nproc_per_node"), str(value).strip()
    if text == "gpu" and devices == 0:
        raise LaunchError(f"{name}=gpu asks for one process for each accelerator, and this machine has none")
    if text in ("auto", "gpu"):
        # torch spreads one process over all cores; one process a core would only divide them.
        return max(devices, 1)
    if text == "cpu":
        return cores
    if not isinstance(value, bool) and text.isdecimal() and 1 <= int(text) <= MOST_PROCESSES:
        return int(text)
    raise LaunchError(f"{name} must be a number from 1 to {MOST_PROCESSES}, auto, gpu or cpu; got {value!r}")
