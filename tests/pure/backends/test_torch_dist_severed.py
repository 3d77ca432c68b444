"""Connections of a library that are shut down from outside; all others stay as they are."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from raycollect.backends.torch_dist.severed import sever


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as client:
        other, _ = listener.accept()
        with other:
            yield client, other


def published(sock: socket.socket) -> bytes:
    """As gloo tells where a rank listens."""
    host, port = sock.getpeername()
    return b"..." + port.to_bytes(2, "big") + socket.inet_aton(host) + b"..."


def test_the_connections_of_the_addresses_end_and_no_others(pair: tuple[socket.socket, socket.socket]) -> None:
    client, other = pair
    sever([b"no address"])
    client.sendall(b"x")
    assert other.recv(1) == b"x"
    sever([published(client)])
    assert other.recv(1) == b""


def test_no_other_socket_is_changed(pair: tuple[socket.socket, socket.socket]) -> None:
    """Also where the program has a default timeout: with one, Python makes sockets that it opens non-blocking."""
    socket.setdefaulttimeout(10.0)
    try:
        sever([])
    finally:
        socket.setdefaulttimeout(None)
    assert all(os.get_blocking(sock.fileno()) for sock in pair)
