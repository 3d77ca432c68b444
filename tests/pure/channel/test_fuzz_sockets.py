"""What a hostile end of a socket can do to the channel, at random: it ends its own connection, and costs little."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator

import pytest

from raycollect.channel import DataClient
from raycollect.channel.messages import Fetch, Message
from raycollect.channel.protocol import Connection, Reply, State
from raycollect.core.model import Address
from raycollect.errors import ChannelError
from tests.pure.channel.hostile_wire import changed, chunks, message
from tests.pure.channel.parties import HOST, LIMIT_S, SECRET, Party, Rig, rig

__all__ = ["rig"]  # a fixture


def _say(sock: socket.socket, pieces: Iterator[bytes]) -> None:
    """Sends what the other end takes, then waits until it closes."""
    try:
        for piece in pieces:
            sock.sendall(piece)
        sock.shutdown(socket.SHUT_WR)
    except OSError:
        pass
    sock.settimeout(LIMIT_S)
    try:
        while sock.recv(65536):
            pass
    except ConnectionError:
        pass


def _greet(sock: socket.socket, end: Connection) -> bytes:
    """Waits for the peer's next handshake frame; gives what has to be answered."""
    while True:
        for event in end.receive(sock.recv(4096) or b""):
            if isinstance(event, Reply):
                return event.data
        if end.state is State.OPEN:
            return b""


class Impostor:
    """A server that shakes hands until one stage, says something else there, and ends."""

    def __init__(self, rng: random.Random, stage: int) -> None:
        self.sent: list[Message] = []
        self._rng = rng
        self._stage = stage
        self._listener = socket.create_server((HOST, 0))
        self.address = Address(host=HOST, port=self._listener.getsockname()[1], secret=SECRET)
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def close(self) -> None:
        self._thread.join(LIMIT_S)
        self._listener.close()

    def _serve(self) -> None:
        rng = self._rng
        sock, _ = self._listener.accept()
        with sock:
            sock.settimeout(LIMIT_S)
            end = Connection("server", SECRET, nonce=rng.randbytes(16))
            units = [end.start()]
            if self._stage:
                sock.sendall(units[0])
                units = [_greet(sock, end)]
            if self._stage > 1:
                sock.sendall(units[0])
                self.sent = [message(rng) for _ in range(5)]
                units = [end.send(one) for one in self.sent]
            _say(sock, chunks(rng, b"".join([*changed(rng, units, [b"", units[0]]), rng.randbytes(100)])))


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("seed", range(8))
def test_a_hostile_server_gives_the_hub_a_typed_error(rig: Rig, stage: int, seed: int) -> None:
    rng = random.Random(100 * stage + seed)
    impostor, here = Impostor(rng, stage), Party()
    try:
        rig.hub.connect(impostor.address, {}, here, LIMIT_S)
    except ChannelError:
        assert stage < 2 or here.messages.empty()
    else:
        assert isinstance(here.reasons.get(timeout=LIMIT_S), ChannelError)
        got = [here.messages.get_nowait() for _ in range(here.messages.qsize())]
        assert got == impostor.sent[: len(got)]
        assert here.reasons.empty()
    impostor.close()


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_a_hostile_server_gives_a_data_client_a_typed_error(stage: int, seed: int) -> None:
    impostor = Impostor(random.Random(1000 * stage + seed), stage)
    with pytest.raises(ChannelError):
        client = DataClient(impostor.address, LIMIT_S)
        try:
            for _ in range(20):
                client.request(Fetch(key=b""))
        finally:
            client.close()
    impostor.close()
