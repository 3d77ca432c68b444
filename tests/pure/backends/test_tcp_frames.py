"""Frames of `tcp` when a launch ends early: what is thrown away, read to its end, finished, or refused."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from raycollect.backends.tcp import link as _tcp_link
from raycollect.backends.tcp.link import TcpMesh
from raycollect.backends.tcp.peer import ARRIVAL, DATA, FRAME_NBYTES, LEFT, FrameBatch
from raycollect.core.model import Launch
from raycollect.core.protocols import ARRIVAL_NBYTES
from raycollect.errors import CollectiveTimeoutError, GroupBrokenError, PlanAbortedError
from tests.pure.backends.tcp_teams import team

__all__ = ["team"]  # a fixture


def frame(seq: int, kind: int, step: int, body: bytes = b"", *, nbytes: int | None = None) -> bytes:
    return struct.pack("<QHHII", seq, kind, 0, step, len(body) if nbytes is None else nbytes) + body


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[TcpMesh, socket.socket]]:
    """Rank 0's end of a group of two, and the bare socket that is rank 1."""
    monkeypatch.setattr(_tcp_link, "FAREWELL_S", 0.0)
    monkeypatch.setattr(_tcp_link, "current_core", lambda: 0)  # as `frame` has it
    mine, theirs = socket.socketpair()
    mine.setblocking(False)
    theirs.settimeout(5)
    link = TcpMesh(0, "g", {1: mine})
    yield link, theirs
    link.close()
    theirs.close()


def launch_of(seq: int, timeout_s: float = 5.0) -> Launch:
    return Launch(seq=seq, ranks=(0, 1), timeout_s=timeout_s)


def test_frames_of_launches_that_were_left_are_thrown_away(line: tuple[TcpMesh, socket.socket]) -> None:
    link, other = line
    big = b"old" * 6_000
    for words in (
        frame(3, ARRIVAL, 1, b"old"),
        frame(4, ARRIVAL, 1, b"old") + frame(4, DATA, 2, big),
        frame(4, LEFT, 1) + frame(5, LEFT, 0),
        frame(7, ARRIVAL, 1, b"new"),
    ):
        other.sendall(words)
    assert link.agree(launch_of(7), b"mine") == [b"mine", b"new"]
    link.end(launch_of(7), True)
    assert other.recv(4096) == frame(7, ARRIVAL, 1, b"mine")


def test_a_frame_that_was_half_received_is_read_to_its_end(line: tuple[TcpMesh, socket.socket]) -> None:
    link, other = line
    whole = frame(1, DATA, 1, b"y" * 10_000)
    other.sendall(whole[:5000])
    array, batch = np.zeros(10_000, np.uint8), FrameBatch()
    link.begin(launch_of(1))
    link.receive(1, array, batch)
    with pytest.raises(CollectiveTimeoutError) as caught:
        link.wait(batch, launch_of(1), time.monotonic())
    assert caught.value.missing == (1,)
    link.end(launch_of(1), False)
    seen = array.copy()
    other.sendall(whole[5000:] + frame(2, ARRIVAL, 1, b"next"))
    assert link.agree(launch_of(2), b"") == [b"", b"next"]
    np.testing.assert_array_equal(array, seen)  # nobody writes it any more


def test_a_frame_that_was_half_sent_is_finished_from_a_copy(line: tuple[TcpMesh, socket.socket]) -> None:
    link, other = line
    array, batch = np.full(FRAME_NBYTES, 7, np.uint8), FrameBatch()
    link.begin(launch_of(1))
    link.send(1, array, batch)
    link.send(1, array, batch)  # not begun, and so forgotten
    with pytest.raises(CollectiveTimeoutError) as caught:
        link.wait(batch, launch_of(1), time.monotonic())
    assert caught.value.missing == (1,)
    link.end(launch_of(1), False)
    array[...] = 0
    with ThreadPoolExecutor(1) as threads:
        reading = threads.submit(lambda: b"".join(iter_bytes(other, len(frame(0, 0, 0)) * 3 + FRAME_NBYTES)))
        with pytest.raises(CollectiveTimeoutError):
            link.agree(launch_of(2, timeout_s=2.0), b"")
        stream = reading.result(5)
    assert stream == frame(1, DATA, 1, b"\7" * FRAME_NBYTES) + frame(1, LEFT, 0) + frame(2, ARRIVAL, 1)


def iter_bytes(sock: socket.socket, nbytes: int) -> Iterator[bytes]:
    while nbytes:
        data = sock.recv(min(nbytes, 65536))
        assert data
        nbytes -= len(data)
        yield data


def test_a_rank_that_nobody_reads_from_keeps_no_heap_of_frames(line: tuple[TcpMesh, socket.socket]) -> None:
    link, other = line
    for seq in range(1, 30):
        with pytest.raises(CollectiveTimeoutError):
            link.agree(launch_of(seq, timeout_s=0.0), b"a" * ARRIVAL_NBYTES)
        link.end(launch_of(seq), False)
    assert len(link._peers[1]._out) <= 2  # one that was begun, and the newest farewell
    other.sendall(frame(30, ARRIVAL, 1, b"back"))
    with ThreadPoolExecutor(1) as threads:
        agreed = threads.submit(link.agree, launch_of(30), b"here")
        stream = b""
        while not stream.endswith(frame(30, ARRIVAL, 1, b"here")):
            stream += other.recv(1 << 20)
        assert agreed.result(5) == [b"here", b"back"]
    assert frame(29, LEFT, 0) in stream


@pytest.mark.parametrize(("passed", "goes_on"), [(0, False), (1, True)])
def test_who_left_before_all_had_come_is_not_taken_for_one_who_was_refused(
    line: tuple[TcpMesh, socket.socket], passed: int, goes_on: bool
) -> None:
    link, other = line
    other.sendall(frame(1, ARRIVAL, 1, b"yes") + frame(1, LEFT, passed))
    if goes_on:
        assert link.agree(launch_of(1), b"") == [b"", b"yes"]
    else:
        with pytest.raises(PlanAbortedError, match="rank 1 has left launch 1") as caught:
            link.agree(launch_of(1), b"")
        assert caught.value.rank == 1


def test_whoever_is_in_a_later_launch_has_left_this_one(line: tuple[TcpMesh, socket.socket]) -> None:
    link, other = line
    other.sendall(frame(5, ARRIVAL, 1, b"later"))
    for seq in (3, 4):
        with pytest.raises(PlanAbortedError, match=f"rank 1 has left launch {seq}"):
            link.agree(launch_of(seq), b"")
        link.end(launch_of(seq), False)
    assert link.agree(launch_of(5), b"") == [b"", b"later"]


@pytest.mark.parametrize(
    "words",
    [
        frame(1, ARRIVAL, 1, nbytes=FRAME_NBYTES + 1),
        frame(0, DATA, 1, nbytes=(1 << 32) - 1),
        frame(1, 9, 1),
        frame(1, ARRIVAL, 2, b"x"),
        b"\xff" * 4096,
    ],
)
def test_what_is_no_frame_ends_the_connection_and_the_group(line: tuple[TcpMesh, socket.socket], words: bytes) -> None:
    link, other = line
    other.sendall(words)
    with pytest.raises(PlanAbortedError, match="the connection to rank 1 broke") as caught:
        link.agree(launch_of(1), b"")
    assert caught.value.rank == 1
    link.end(launch_of(1), False)
    with pytest.raises(GroupBrokenError, match="rank 1"):
        link.agree(launch_of(2), b"")
