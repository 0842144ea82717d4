"""Address → the store of a run, listening there alone where the run has one node."""

import contextlib
import errno
import resource
import socket
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import TCPStore

_TIMEOUT = timedelta(minutes=5)
_CONNECTIONS_A_RANK = 2
_SPARE_FILES = 256


def host_store(host: str, port: int, *, alone: bool, ranks: int, timeout: timedelta = _TIMEOUT) -> "TCPStore":
    """Host the store of a run.

    Args:
        host: name or address at which the others find it.
        port: 0 picks a free one.
        alone: whether all ranks are on this machine; then it listens on that address alone, which nobody else reaches if it is
            the loopback's. The nodes of several may know this one by an address that is none of its own.
        ranks: number of ranks that will connect.
        timeout: of calls on it.

    Raises:
        OSError, RuntimeError: it cannot listen there.
    """
    from torch.distributed import TCPStore

    _allow_files(ranks * _CONNECTIONS_A_RANK + _SPARE_FILES)
    listening = _listening(host, port) if alone else None
    if listening is None:
        return TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=timeout)
    # The store closes it.
    port = listening.getsockname()[1]
    return TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listening.detach())


def _listening(host: str, port: int) -> socket.socket | None:
    """Return a socket that listens on a name's address; None where that is not this machine's."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError:
        return None
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except OSError as error:
        made.close()
        if error.errno == errno.EADDRNOTAVAIL:
            return None
        raise
    made.listen(socket.SOMAXCONN)
    return made


def _allow_files(number: int) -> None:
    """Raise the limit of open files: each connection is one, and systems begin with 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < number:
        wanted = number if hard == resource.RLIM_INFINITY else min(number, hard)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
