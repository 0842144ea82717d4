"""A launch setting's value and where it came from: an argument, an environment variable, or the default."""

from collections.abc import Mapping
from typing import TypeAlias

import attrs

from forge_dist._errors import LaunchError
from forge_dist._settings import PORTS, LaunchSettings

Origin: TypeAlias = str

# torchrun reads PET_<FLAG> for each of its flags; Kubeflow sets the first five.
_VARIABLES = {
    "nnodes": "PET_NNODES",
    "nproc_per_node": "PET_NPROC_PER_NODE",
    "node_rank": "PET_NODE_RANK",
    "master_addr": "PET_MASTER_ADDR",
    "master_port": "PET_MASTER_PORT",
    "rdzv_endpoint": "PET_RDZV_ENDPOINT",
    "rdzv_id": "PET_RDZV_ID",
    "max_restarts": "PET_MAX_RESTARTS",
}


def number_of(environ: Mapping[str, str], name: str) -> int | None:
    """The whole number of 0 or more that a variable holds; None where it is unset or empty. Raises LaunchError for other text."""
    text = environ.get(name, "").strip()
    if not text:
        return None
    if not text.isdecimal():
        raise LaunchError(f"the environment variable {name} is {text!r}, which is no whole number of 0 or more")
    return int(text)


def port_of(environ: Mapping[str, str], name: str) -> int | None:
    """The port that a variable holds; None where it is unset or empty. Raises LaunchError for what is no port."""
    port = number_of(environ, name)
    if port is not None and port not in PORTS:
        raise LaunchError(f"the environment says {name}={port}, which is no port: ports are {PORTS[0]} to {PORTS[-1]}")
    return port


_READERS = {"node_rank": number_of, "master_port": port_of, "max_restarts": number_of}


@attrs.frozen
class Found:
    """Settings before variables before what a scheduler says."""

    settings: LaunchSettings
    environ: Mapping[str, str]
    defaults: Mapping[str, tuple[object, Origin]] = attrs.field(factory=dict)

    def value(self, name: str, default: object = None) -> tuple[object, Origin]:
        """The value of one setting and its origin. Raises LaunchError for a variable that should be a number."""
        chosen = getattr(self.settings, name)
        if chosen is not None:
            return chosen, "argument"
        variable = _VARIABLES[name]
        text = self.environ.get(variable, "").strip()
        if text:
            read = _READERS.get(name)
            return text if read is None else read(self.environ, variable), variable
        return self.defaults.get(name, (default, "default"))

    def origin(self, name: str) -> Origin:
        """Where the setting's value comes from."""
        return self.value(name)[1]

    def with_defaults(self, defaults: Mapping[str, tuple[object, Origin]]) -> "Found":
        """The same with values for what neither settings nor variables say."""
        return attrs.evolve(self, defaults=defaults)
