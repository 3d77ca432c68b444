"""Shuts down connections that a library has opened and does not expose."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Sequence
from pathlib import Path

# With any other type, Python would make the socket itself non-blocking where the program has a default timeout.
_AS_IT_IS = socket.SOCK_STREAM | socket.SOCK_NONBLOCK


def sever(published: Sequence[bytes]) -> None:
    """Shuts down the connections from and to the addresses on which a group's library listens; its calls then fail.

    `published`: the values that its ranks have published; those of gloo contain addresses as in `sockaddr`.
    """
    for link in Path("/proc/self/fd").iterdir():
        try:
            sock = socket.socket(type=_AS_IT_IS, fileno=int(link.name))
        except OSError:  # no socket, or closed meanwhile
            continue
        try:
            ends = [_packed(sock.family, end()) for end in (sock.getsockname, sock.getpeername)]
            if any(end and end in text for end in ends for text in published):
                sock.shutdown(socket.SHUT_RDWR)
        except OSError:  # not connected
            continue
        finally:
            with contextlib.suppress(OSError):
                sock.detach()  # it is the library's


def _packed(family: int, address: Sequence[object]) -> bytes:
    # Port and address as they lie in the system's `sockaddr`.
    if family not in (socket.AF_INET, socket.AF_INET6):
        return b""
    host, port, *more = address
    packed = socket.inet_pton(family, str(host).partition("%")[0])
    flow = struct.pack(">I", more[0]) if more else b""
    return struct.pack(">H", port) + flow + packed
