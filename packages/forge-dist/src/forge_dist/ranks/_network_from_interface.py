"""The meeting place's address → the network interface that reaches it, for gloo.

Gloo listens on whatever this machine's own name resolves to, and without a word on 127.0.0.1 where it resolves to nothing. In containers and
on machines with several networks that is often not the network that the nodes share.
"""

import os
import socket
import struct
import sys
from contextlib import closing

_VARIABLE = "GLOO_SOCKET_IFNAME"
# linux/sockios.h: the address of a network interface.
_SIOCGIFADDR = 0x8915


def choose_interface(host: str, port: int) -> None:
    """Point gloo at the interface over which `host` is reached, unless GLOO_SOCKET_IFNAME says otherwise or it cannot be told."""
    if _VARIABLE in os.environ or not sys.platform.startswith("linux"):
        return
    name = interface_to(host, port)
    if name:
        os.environ[_VARIABLE] = name


def interface_to(host: str, port: int) -> str:
    """Name of the interface whose IPv4 address this machine uses towards `host`; "" for the loopback and where none is found."""
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


def _address_of(probe: socket.socket, name: str) -> str:
    from fcntl import ioctl

    try:
        answer = ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
    except OSError:
        return ""
    return socket.inet_ntoa(answer[20:24])
