"""Those who have no business at a participant's port: none gets in, none is in the way, and the log stays short."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from raycollect import channel
from raycollect.channel import DataClient, DataLink, Server, server
from raycollect.channel.messages import Bye, Fetch, Fetched
from raycollect.channel.protocol import MAX_HANDSHAKE_NBYTES, Connection, Opened, Reply
from raycollect.channel.refusals import EVERY_S, MAX_REASONS, Refusals
from raycollect.core import sockets
from raycollect.core.model import Address
from raycollect.core.timers import Timer
from tests.pure.channel.parties import HOST, LIMIT_S, SECRET, Party, Rig, echo, rig
from tests.pure.watched import warnings_in

__all__ = ["rig"]

OTHER_SECRET = b"t" * 32
MANY = 40
REFUSED = b"\0\0\0\x07refused"


class Counted(Party):
    """A participant that counts whom it serves."""

    def __init__(self) -> None:
        super().__init__(echo)
        self.served = 0

    def serve_data(self, link: DataLink) -> None:
        self.served += 1
        super().serve_data(link)


def call(address: Address) -> socket.socket:
    return socket.create_connection((address.host, address.port), LIMIT_S)


def hear_out(sock: socket.socket) -> bytes:
    """All that comes until the other hangs up."""
    said = b""
    with contextlib.suppress(ConnectionError):
        while data := sock.recv(4096):
            said += data
    return said


def proof(sock: socket.socket, secret: bytes, purpose: str) -> tuple[Connection, bytes]:
    """Answers a server's challenge, as one who has this secret."""
    end = Connection("client", secret, nonce=random.randbytes(16), purpose=purpose)
    end.start()
    while True:
        for event in end.receive(sock.recv(4096)):
            assert isinstance(event, Reply)
            return end, event.data


def overheard(address: Address, secret: bytes, purpose: str) -> bytes:
    """What a client with the key said in a handshake that went well."""
    with call(address) as sock:
        end, words = proof(sock, secret, purpose)
        sock.sendall(words)
        events = end.receive(sock.recv(4096))
        assert isinstance(events[0], Opened)
        return words


Stranger = Callable[[socket.socket, str, bytes, bytes], None]


def _wrong_key(sock: socket.socket, purpose: str, replay: bytes, other: bytes) -> None:
    sock.sendall(proof(sock, b"w" * 32, purpose)[1])


def _another_groups_key(sock: socket.socket, purpose: str, replay: bytes, other: bytes) -> None:
    sock.sendall(proof(sock, OTHER_SECRET, purpose)[1])


STRANGERS: dict[str, Stranger] = {
    "no key": lambda sock, purpose, replay, other: sock.sendall(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n"),
    "no words": lambda sock, purpose, replay, other: sock.shutdown(socket.SHUT_WR),
    "no proof": lambda sock, purpose, replay, other: sock.sendall(struct.pack(">I", 0)),
    "a short proof": lambda sock, purpose, replay, other: sock.sendall(struct.pack(">I", 48) + bytes(48)),
    "wrong key": _wrong_key,
    "another group's key": _another_groups_key,
    "a replay": lambda sock, purpose, replay, other: sock.sendall(replay),
    "a replay of another group": lambda sock, purpose, replay, other: sock.sendall(other),
    "oversized": lambda sock, purpose, replay, other: sock.sendall(struct.pack(">I", MAX_HANDSHAKE_NBYTES + 1)),
    "as large as can be": lambda sock, purpose, replay, other: sock.sendall(b"\xff" * 4),
    "a frame before the handshake": lambda sock, purpose, replay, other: sock.sendall(
        struct.pack(">I", 16) + bytes(16 + 16)
    ),
}


@pytest.mark.parametrize("who", STRANGERS)
@pytest.mark.parametrize("purpose", ["control", "data"])
def test_a_stranger_is_refused_and_the_log_says_so_once(
    rig: Rig, caplog: pytest.LogCaptureFixture, who: str, purpose: str
) -> None:
    there, here = Counted(), Party()
    address = rig.serve(there)
    friend = rig.connect(address, here)
    others = Server(HOST, OTHER_SECRET, Party())
    try:
        replay, other = overheard(address, SECRET, purpose), overheard(others.address, OTHER_SECRET, purpose)
    finally:
        others.close()
    before = 1 + (purpose == "control"), int(purpose == "data")  # the friend, and who was overheard
    for _ in range(MANY):
        with call(address) as sock:
            STRANGERS[who](sock, purpose, replay, other)
            said = hear_out(sock)
        assert said.removeprefix(said[:26] if said[4:8] == b"RCOL" else b"") in (b"", REFUSED)
        friend.send(Bye())
        assert here.messages.get(timeout=LIMIT_S) == Bye()
    client = DataClient(address, LIMIT_S)
    assert isinstance(client.request(Fetch(key=b"k")), Fetched)
    client.close()
    assert (there.links.qsize(), there.served) == (before[0], before[1] + 1)
    assert not [line for line in warnings_in(caplog) if "more" in line]
    rig.close()
    first, rest_of_them = warnings_in(caplog)
    assert first.startswith(f"refused a connection from {HOST}:")
    assert rest_of_them.startswith(f"refused {MANY - 1} more connections, the last from {HOST}:")
    for secret in (SECRET, OTHER_SECRET):
        assert secret.decode()[:4] not in "".join(warnings_in(caplog))


class Clock:
    """What is called later, at once."""

    def __init__(self) -> None:
        self.due: list[tuple[float, Callable[[], None]]] = []

    def call_later(self, delay_s: float, call: Callable[[], None]) -> Timer:
        self.due.append((delay_s, call))
        return Timer(call)

    def go_on(self) -> None:
        """A minute goes by."""
        (delay_s, call), self.due = *self.due, []  # never more than one
        assert delay_s == EVERY_S
        call()


def test_the_log_has_a_line_a_minute_while_it_goes_on_and_then_tells_the_first_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock()
    refusals = Refusals(clock.call_later)
    for minute, count in enumerate((5000, 300, 0, 1, 0, 2, 0)):
        for at in range(count):
            refusals.add(f"10.0.0.1:{at}", "the client does not hold the key")
        if clock.due:
            clock.go_on()
        assert len(clock.due) == (minute in (0, 1, 5))
    assert warnings_in(caplog) == [
        "refused a connection from 10.0.0.1:0: the client does not hold the key",
        "refused 4999 more connections, the last from 10.0.0.1:4999: the client does not hold the key (4999)",
        "refused 300 more connections, the last from 10.0.0.1:299: the client does not hold the key (300)",
        "refused a connection from 10.0.0.1:0: the client does not hold the key",
        "refused a connection from 10.0.0.1:0: the client does not hold the key",
        "refused 1 more connections, the last from 10.0.0.1:1: the client does not hold the key (1)",
    ]


def test_reasons_that_strangers_make_up_take_no_memory(caplog: pytest.LogCaptureFixture) -> None:
    refusals = Refusals(Clock().call_later)
    for at in range(10_000):
        refusals.add("10.0.0.1:1", f"a frame of {at} bytes")
    assert len(refusals._reasons) == MAX_REASONS + 1
    refusals.tell()
    assert f"other reasons ({10_000 - 1 - MAX_REASONS})" in warnings_in(caplog)[-1]
    assert len(warnings_in(caplog)[-1]) < 1000


# ---------------------------------------------------------------------------------------------- very many


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def held_by_the_channel() -> int:
    """The bytes that are held by what the channel's own code has made."""
    folder = Path(channel.__file__).parent
    snapshot = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, f"{folder}/*")])
    return sum(statistic.size for statistic in snapshot.statistics("filename"))


@pytest.fixture
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.usefixtures("traced")
def test_thousands_of_connections_cost_no_more_than_is_stated(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """2,000 that come and go, some in the middle of a word, then 1,000 that stay; a friend is served all the time."""
    monkeypatch.setattr(server, "_GRACE_S", 0.02)
    there, here = Party(echo), Party()
    address = rig.serve(there)
    friend = rig.connect(address, here)
    before, memory = descriptors(), held_by_the_channel()
    rng = random.Random(5)
    strangers: list[socket.socket] = []
    try:
        for at in range(3000):
            stranger = call(address)
            strangers.append(stranger)
            stranger.sendall(rng.randbytes(rng.choice((0, 3, 60))))
            if at < 2000:
                reset = struct.pack("ii", rng.randrange(2), 0)  # hangs up in good order, or not
                stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
                strangers.pop().close()
            if at % 100 == 99:
                friend.send(Bye())
                assert here.messages.get(timeout=LIMIT_S) == Bye()
                assert len(rig.servers[0]._half_open) <= server.MAX_HALF_OPEN
                assert descriptors() <= before + len(strangers) + server.MAX_HALF_OPEN + 1
                assert len(rig.servers[0]._loop._timers.all) <= 4
            if at % 1000 == 999:
                assert held_by_the_channel() - memory < 1 << 20
        late = Party()
        rig.connect(address, late).send(Bye())
        assert late.messages.get(timeout=LIMIT_S) == Bye()
    finally:
        sockets.close(strangers)
    assert there.links.qsize() == 2
    rig.close()
    assert len([line for line in warnings_in(caplog) if "refused" in line]) == 2


def test_one_that_finds_no_more_descriptors_is_told_of_once(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Starved(socket.socket):
        refused = 0

        def accept(self) -> Any:
            if Starved.refused:
                Starved.refused -= 1
                raise OSError(24, "Too many open files")
            return super().accept()

    listen = sockets.listen
    monkeypatch.setattr(sockets, "listen", lambda host: Starved(fileno=listen(host).detach()))
    monkeypatch.setattr(server, "_GRACE_S", 0.005)
    there, here = Party(echo), Party()
    address = rig.serve(there)
    friend = rig.connect(address, here)
    Starved.refused = 19
    late = Party()
    rig.connect(address, late).send(Bye())
    assert late.messages.get(timeout=LIMIT_S) == Bye()
    assert Starved.refused == 0
    friend.send(Bye())
    assert here.messages.get(timeout=LIMIT_S) == Bye()
    rig.close()
    assert len(warnings_in(caplog)) == 2
    assert "Too many open files" in warnings_in(caplog)[0]
