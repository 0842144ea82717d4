"""What a launch value's text stands for: "2" or "1:4" nodes, "4", "auto", "gpu" or "cpu" processes; or a refusal by name."""

from forge_dist._errors import LaunchError
from forge_dist._settings import MOST_PROCESSES
from forge_dist.environment._environment import Origin


def nodes_of(value: object, origin: Origin) -> tuple[int, int]:
    """The fewest and the most nodes that "2" or "1:4" stands for."""
    parts = str(value).strip().split(":")
    if not isinstance(value, bool) and len(parts) in (1, 2) and all(part.isdecimal() for part in parts):
        least, most = int(parts[0]), int(parts[-1])
        if 1 <= least <= most:
            return least, most
    raise LaunchError(f'{origin.replace("argument", "nnodes")} must be a number of 1 or more, or "MIN:MAX"; got {value!r}')


def processes_of(value: object, origin: Origin, devices: int, cores: int) -> int:
    """How many processes of a node "4", "auto", "gpu" or "cpu" stands for here."""
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
