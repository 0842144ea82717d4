"""Wait for a TCP port, and choose the network interface that gloo listens on."""

import os
import socket
import struct
import sys
import time
from contextlib import closing, suppress
from pathlib import Path

_RETRY_SECONDS = 0.5
# One attempt: a firewall that drops packets answers nothing, and a signal must be handled in between.
_ATTEMPT_SECONDS = 5.0

_INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
# linux/sockios.h: the address of a network interface.
_SIOCGIFADDR = 0x8915
# An address of documentation (RFC 5737), to which the route leads that leads everywhere.
_ELSEWHERE = ("192.0.2.1", 9)


def unreachable(host: str, port: int, seconds: float) -> str:
    """Wait until HOST:PORT accepts a connection; return "" then, else the last error.

    torch's own store retries too, but it prints a C++ stack at every attempt, cannot be interrupted, and reports every failure
    as a timeout.
    """
    end = time.monotonic() + seconds
    while True:
        try:
            with closing(
                socket.create_connection((host, port), timeout=max(0.1, min(_ATTEMPT_SECONDS, end - time.monotonic())))
            ):
                return ""
        except socket.gaierror as error:
            last = f"the name {host} does not resolve here: {error.strerror}"
        except TimeoutError:
            last = "nothing answers"
        except OSError as error:
            last = error.strerror or str(error)
        if time.monotonic() + _RETRY_SECONDS >= end:
            return last
        time.sleep(_RETRY_SECONDS)


def machine_here() -> str:
    """Return what tells this machine from every other one, also from one of the same name.

    Its name, the boot of its kernel, its network (containers of one host have their own) and its address there: copies of one
    virtual machine have all but the last alike.
    """
    found = [socket.gethostname()]
    for read in (
        lambda: Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip(),
        lambda: os.readlink("/proc/self/ns/net"),
        lambda: address_towards(*_ELSEWHERE) or "",
    ):
        with suppress(OSError, ValueError):
            found.append(read())
    return " ".join(found)


def choose_interface(host: str, port: int) -> None:
    """Set GLOO_SOCKET_IFNAME to the interface that reaches `host`, unless it is set.

    Gloo listens on whatever this machine's own name resolves to, and silently on 127.0.0.1 where it resolves to nothing. In
    containers and on machines with several networks that is often not the network that the nodes share.
    """
    if _INTERFACE_VARIABLE in os.environ or not sys.platform.startswith("linux"):
        return
    name = interface_to(host, port)
    if name:
        os.environ[_INTERFACE_VARIABLE] = name


def interface_to(host: str, port: int) -> str:
    """Return the interface that reaches `host` over IPv4; "" for the loopback or none."""
    try:
        with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
            # Sends nothing: it only asks the routing table.
            probe.connect((host, port))
            address: str = probe.getsockname()[0]
            if address.startswith("127."):
                return ""
            return next((name for _, name in socket.if_nameindex() if _address_of(probe, name) == address), "")
    except OSError:
        return ""


def address_towards(host: str, port: int) -> str | None:
    """Return this machine's address on the network that reaches `host`; None if unknown."""
    with suppress(OSError):
        for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
            with closing(socket.socket(family, socket.SOCK_DGRAM)) as probe:
                # Sends nothing: it only asks the routing table.
                probe.connect(address)
                return str(probe.getsockname()[0])
    return None


def _address_of(probe: socket.socket, name: str) -> str:
    from fcntl import ioctl

    try:
        answer = ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
    except OSError:
        return ""
    return socket.inet_ntoa(answer[20:24])
