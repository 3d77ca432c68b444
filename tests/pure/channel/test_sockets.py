"""The channel over real sockets. Nothing sleeps: every wait is for an event, with a limit."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from raycollect.channel import ControlLink, DataClient, Server, endpoint, server
from raycollect.channel.messages import Abort, Arrive, Bye, Message, Publish
from raycollect.channel.stream import SocketStream, open_stream
from raycollect.core.model import Address
from raycollect.errors import AuthenticationError, ConnectionLostError
from tests.pure.channel.parties import HOST, LIMIT_S, SECRET, Party, Rig, echo, rig

__all__ = ["rig"]  # a fixture


def _raw(address: Address) -> socket.socket:
    return socket.create_connection((address.host, address.port), LIMIT_S)


# ---------------------------------------------------------------------------------------------- control


def test_what_was_received_before_the_hub_takes_over_is_delivered(rig: Rig) -> None:
    here = Party()
    opened = open_stream(rig.serve(Party()), "control", {}, LIMIT_S)
    rig.hub.adopt(SocketStream(opened.sock, opened.connection, [Bye()]), {}, here)
    assert here.messages.get(timeout=LIMIT_S) == Bye()


@pytest.mark.parametrize("closer", ["client", "server"])
def test_the_end_is_told_to_both_once(rig: Rig, closer: str) -> None:
    there, here = Party(), Party()
    mine = rig.connect(rig.serve(there), here)
    theirs = there.links.get(timeout=LIMIT_S)
    for _ in range(3):
        (mine if closer == "client" else theirs).close()
    reasons = [party.reasons.get(timeout=LIMIT_S) for party in (there, here)]
    assert {reason.detail for reason in reasons} == {"closed by this end", "the peer closed the connection"}
    for link in (mine, theirs):
        with pytest.raises(ConnectionLostError):
            link.send(Bye())
    rig.close()
    assert there.reasons.empty()
    assert here.reasons.empty()


def test_last_words_arrive_before_the_end_even_over_unread_input(rig: Rig) -> None:
    def refuse(link: ControlLink, message: Message) -> None:
        if message == Bye():
            link.send(Abort(seq=9, reason="refused"))
            link.close()

    here = Party()
    link = rig.connect(rig.serve(Party(refuse)), here)
    link.send(Bye())
    with pytest.raises(ConnectionLostError):
        while True:
            link.send(Publish(group_id="g", communicator="", epoch="", name="n", value=bytes(1000)))
    assert here.messages.get(timeout=LIMIT_S) == Abort(seq=9, reason="refused")
    assert isinstance(here.reasons.get(timeout=LIMIT_S), ConnectionLostError)


def test_a_forked_child_does_not_hide_its_parents_death(rig: Rig) -> None:
    there = Party()
    address = rig.serve(there)
    code = (
        "import os, sys, time, raycollect.channel as c, raycollect.core.model as m\n"
        "class H:\n  received = closed = print\n"
        f"hub = c.Hub(); hub.connect(m.Address(host={HOST!r}, port={address.port}, secret={SECRET!r}), {{}}, H(), 9)\n"
        "r, w = os.pipe()\n"
        "if (pid := os.fork()):\n  print(pid, flush=True); os.read(r, 1); os._exit(0)\n"
        "os.write(w, b'x'); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-W", "ignore", "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    orphan = int(parent.stdout.readline())
    try:
        assert isinstance(there.reasons.get(timeout=LIMIT_S), ConnectionLostError)
    finally:
        os.kill(orphan, 9)
        parent.stdout.close()
        parent.wait(LIMIT_S)


def test_many_threads_on_one_link(rig: Rig) -> None:
    there = Party()
    link = rig.connect(rig.serve(there), Party())
    sizes = [0, 10, 3000, 70_000]

    def send(rank: int) -> None:
        for seq in range(100):
            blob = bytes([rank]) * sizes[seq % 4]
            link.send(Arrive(group_id="g", seq=seq, round=0, ranks=list(range(8)), rank=rank, blob=blob))

    threads = [threading.Thread(target=send, args=(rank,)) for rank in range(8)]
    for thread in threads:
        thread.start()
    got: dict[int, list[int]] = {rank: [] for rank in range(8)}
    for _ in range(800):
        message = there.messages.get(timeout=LIMIT_S)
        assert isinstance(message, Arrive)
        assert message.blob == bytes([message.rank]) * sizes[message.seq % 4]
        got[message.rank].append(message.seq)
    for thread in threads:
        thread.join(LIMIT_S)
    assert all(seqs == list(range(100)) for seqs in got.values())


def test_a_peer_that_does_not_read_never_blocks_the_sender(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "MAX_QUEUED_NBYTES", 4 << 20)
    stuck = threading.Event()
    here = Party()
    link = rig.connect(rig.serve(Party(lambda link, message: (None, stuck.wait(LIMIT_S))[0])), here)
    try:
        with pytest.raises(ConnectionLostError, match="does not read"):
            for _ in range(1000):
                link.send(Publish(group_id="g", communicator="", epoch="", name="n", value=bytes(500_000)))
        assert "does not read" in here.reasons.get(timeout=LIMIT_S).detail
    finally:
        stuck.set()


def test_what_was_queued_arrives_when_the_peer_reads_again(rig: Rig) -> None:
    stuck = threading.Event()
    there = Party(lambda link, message: (None, stuck.wait(LIMIT_S))[0])
    link = rig.connect(rig.serve(there), Party())
    for seq in range(40):
        link.send(Publish(group_id="g", communicator="", epoch="", name=str(seq), value=bytes(500_000)))
    assert link._queue
    stuck.set()
    names = [there.messages.get(timeout=LIMIT_S).name for _ in range(40)]  # type: ignore[attr-defined]
    assert names == [str(seq) for seq in range(40)]


@pytest.mark.parametrize("method", ["opened", "closed"])
def test_a_failing_handler_loses_its_link_only(
    rig: Rig, method: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, here, other = Party(echo), Party(), Party()
    address = rig.serve(there)
    good = rig.connect(address, other)
    there.links.get(timeout=LIMIT_S)

    failed = threading.Event()

    def fail(*args: Any) -> None:
        failed.set()
        raise RuntimeError("broken handler")

    monkeypatch.setattr(there, method, fail)
    bad = rig.connect(address, here)
    if method == "closed":
        bad.close()
    here.reasons.get(timeout=LIMIT_S)
    assert failed.wait(LIMIT_S)
    monkeypatch.undo()
    good.send(Bye())
    assert other.messages.get(timeout=LIMIT_S) == Bye()
    if method != "closed":
        assert there.reasons.get(timeout=LIMIT_S).detail.startswith("this end failed")
    assert "broken handler" in caplog.text


# ---------------------------------------------------------------------------------------------- who may come in


def test_the_wrong_key_is_refused(rig: Rig) -> None:
    address = rig.serve(Party())
    wrong = Address(host=address.host, port=address.port, secret=b"wrong-key-0123456789")
    for attempt in (lambda: rig.connect(wrong, Party()), lambda: DataClient(wrong, LIMIT_S)):
        with pytest.raises(AuthenticationError):
            attempt()


def test_nobody_there(rig: Rig) -> None:
    address = rig.serve(Party())
    rig.servers[0].close()
    with pytest.raises(ConnectionLostError):
        rig.connect(address, Party())
    with pytest.raises(ConnectionLostError):
        DataClient(address, LIMIT_S)


def test_a_server_that_never_speaks_costs_the_time_limit_only(rig: Rig) -> None:
    with socket.create_server((HOST, 0)) as silent:
        address = Address(host=HOST, port=silent.getsockname()[1], secret=SECRET)
        began = time.monotonic()
        with pytest.raises(ConnectionLostError):
            rig.hub.connect(address, {}, Party(), 0.1)
        assert time.monotonic() - began < 2


def test_a_silent_client_delays_nobody_and_is_dropped(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HANDSHAKE_TIMEOUT_S", 0.3)
    address = rig.serve(Party(echo))
    with _raw(address) as silent:
        assert silent.recv(100)[4:8] == b"RCOL"
        monkeypatch.undo()  # who comes now has as long as ever
        here = Party()
        rig.connect(address, here).send(Bye())
        assert here.messages.get(timeout=LIMIT_S) == Bye()
        assert silent.recv(100) == b""


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::"])
def test_never_all_interfaces(host: str) -> None:
    with pytest.raises(ValueError, match="all interfaces"):
        Server(host, SECRET, Party())


# ---------------------------------------------------------------------------------------------- the end


def test_close_is_idempotent_and_final(rig: Rig) -> None:
    there, here = Party(), Party()
    address = rig.serve(there)
    link = rig.connect(address, here)
    there.links.get(timeout=LIMIT_S)
    for _ in range(2):
        rig.hub.close()
    assert here.reasons.get(timeout=LIMIT_S).detail == "this end was closed"
    with pytest.raises(ConnectionLostError):
        link.send(Bye())
    link.close()
    with pytest.raises(ConnectionLostError, match="hub is closed"):
        rig.connect(address, Party())
    for _ in range(2):
        rig.servers[0].close()
