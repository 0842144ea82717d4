"""Launch settings with the origin of each value: argument, environment variable, default."""

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


def read_int(environ: Mapping[str, str], name: str) -> int | None:
    """Read a variable as a whole number of 0 or more; None where it is unset or empty.

    Raises:
        LaunchError: it holds other text.
    """
    text = environ.get(name, "").strip()
    if not text:
        return None
    if not text.isdecimal():
        raise LaunchError(f"the environment variable {name} is {text!r}, which is no whole number of 0 or more")
    return int(text)


def read_port(environ: Mapping[str, str], name: str) -> int | None:
    """Read a variable as a port; None where it is unset or empty.

    Raises:
        LaunchError: it is no port.
    """
    port = read_int(environ, name)
    if port is not None and port not in PORTS:
        raise LaunchError(f"the environment says {name}={port}, which is no port: ports are {PORTS[0]} to {PORTS[-1]}")
    return port


_READERS = {"node_rank": read_int, "master_port": read_port, "max_restarts": read_int}


@attrs.frozen
class LaunchValues:
    """Launch settings, completed by environment variables, then by a scheduler's values."""

    settings: LaunchSettings
    """Explicit settings; they outrank the others."""
    environ: Mapping[str, str]
    """Environment variables."""
    defaults: Mapping[str, tuple[object, Origin]] = attrs.field(factory=dict)
    """A scheduler's values: setting → value and origin."""

    def value(self, name: str, default: object = None) -> tuple[object, Origin]:
        """Return the value of a setting and its origin.

        Raises:
            LaunchError: a variable should be a number and is none.
        """
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
        """Return the origin of a setting's value."""
        return self.value(name)[1]

    def with_defaults(self, defaults: Mapping[str, tuple[object, Origin]]) -> "LaunchValues":
        """Return a copy with values for what neither settings nor variables set."""
        return attrs.evolve(self, defaults=defaults)
