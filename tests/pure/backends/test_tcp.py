"""What is tcp's own: who may join, what the frames do when a launch ends early, memory, and peers that die."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from raycollect.backends.tcp import communicator as tcp
from raycollect.backends.tcp import join as _tcp_join
from raycollect.backends.tcp import link as _tcp_link
from raycollect.backends.tcp import peer as _tcp_peer
from raycollect.backends.tcp import run as _tcp_run
from raycollect.backends.tcp.link import Link
from raycollect.backends.tcp.peer import ARRIVAL, DATA, FRAME_NBYTES, LEFT, Batch
from raycollect.core import sockets
from raycollect.core.model import GroupSpec, Kernel, Launch, OpKind, ReduceOp
from raycollect.core.protocols import Communicator
from raycollect.errors import (
    BackendUnavailableError,
    CollectiveTimeoutError,
    GroupBrokenError,
    PlanAbortedError,
    UnsupportedError,
)
from tests.pure.backends.test_conformance import body_arrive
from tests.pure.backends.test_gloo import body_peak
from tests.pure.communicators import MemoryExchange, MemoryRendezvous, MemoryStar, ProcessTeam, ThreadTeam, Worker
from tests.pure.conformance import DTYPES, bits, check_allreduce, check_cases, every_case, left_fold, run_launch

NO_EXCHANGE = MemoryExchange(MemoryStar(), 0)
WHOLE, SLICED = ((1 << 30, 1 << 62),), ((1 << 30, -1),)


def spec_of(world_size: int) -> GroupSpec:
    return GroupSpec(name="g", group_id="1", backend="tcp", world_size=world_size)


@pytest.fixture
def team() -> Iterator[ThreadTeam]:
    made = ThreadTeam("tcp", 3)
    yield made
    made.close()


def _three_processes() -> Iterator[ProcessTeam]:
    workers = [Worker() for _ in range(3)]
    made = ProcessTeam("tcp", 3, workers)
    yield made
    made.close()
    for worker in workers:
        worker.close()


processes = pytest.fixture(scope="module")(_three_processes)
"""Three ranks that all tests of this file share."""

mortals = pytest.fixture(_three_processes)
"""Three ranks of one test, of which one may be killed."""


def until(condition: Callable[[], bool]) -> None:
    """Waits for what another thread does."""
    limit_s, pause = time.monotonic() + 10, threading.Event()
    while not condition():
        assert time.monotonic() < limit_s
        pause.wait(0.001)


# ------------------------------------------------------------------------------- bits, chunks, memory


@pytest.mark.parametrize("nbytes", [256, pytest.param(4096, marks=pytest.mark.full)])
@pytest.mark.parametrize("table", [WHOLE, SLICED])
def test_every_kernel_in_many_chunks(monkeypatch: pytest.MonkeyPatch, nbytes: int, table: tuple) -> None:
    """Both ways, and pieces that end in different chunks."""
    monkeypatch.setattr(_tcp_run, "CHUNK_NBYTES", nbytes)
    monkeypatch.setattr(_tcp_run, "WHOLE_UP_TO_NBYTES", table)
    for world in (1, 2, 3, 4):
        team = ThreadTeam("tcp", world)
        for dtype in ("int16", "complex128"):
            check_cases(team, list(every_case(dtype, world, (7, 500))))
        team.close()


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT])
@pytest.mark.parametrize("table", [WHOLE, SLICED])
def test_zeros_infinities_and_nans_have_the_bits_of_the_left_fold(
    monkeypatch: pytest.MonkeyPatch, op: ReduceOp, table: tuple
) -> None:
    monkeypatch.setattr(_tcp_run, "WHOLE_UP_TO_NBYTES", table)
    rng = np.random.default_rng(4)
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0], np.float32)
    parts = [rng.choice(special, 600_001) for _ in range(4)]
    results = [part.copy() for part in parts]
    team = ThreadTeam("tcp", 4)
    launch = team.launch()

    def body(communicator: Communicator) -> None:
        array = results[communicator.rank]
        run_launch(communicator, launch, Kernel(kind=OpKind.ALLREDUCE, src=array, dst=array, op=op))

    team.must(body)
    team.close()
    expected = left_fold(op, parts)
    number = ~np.isnan(expected)
    for result in results:
        np.testing.assert_array_equal(result, expected)
        assert bits(result[number]) == bits(expected[number])
        assert bits(result) == bits(results[0])


def test_every_kernel_between_processes(processes: ProcessTeam) -> None:
    for dtype in DTYPES[::8]:  # which every two values meet in is for the conformance suite
        check_cases(processes, list(every_case(dtype, 3, (7, 200_001))))


def body_peak_with_gaps(communicator: Communicator, launch: Launch, nbytes: int) -> int:
    """The memory that an allreduce of what is not contiguous takes beside it."""
    array = np.ones(nbytes, np.int16)[::2]
    tracemalloc.start()
    try:
        communicator.launch(launch, Kernel(kind=OpKind.ALLREDUCE, src=array, dst=array, op=ReduceOp.SUM))
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


FOLDED_AND_MOVED = OpKind.ALLREDUCE, OpKind.REDUCESCATTER, OpKind.ALLGATHER, OpKind.ALLTOALL
"""Each takes memory in a way of its own; the others are parts of these."""


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[pytest.mark.full] * (kind not in FOLDED_AND_MOVED))
        for kind in OpKind
        if kind not in (OpKind.SEND, OpKind.RECV, OpKind.BARRIER)
    ],
)
def test_extra_memory_is_bounded_by_chunks(processes: ProcessTeam, kind: OpKind) -> None:
    nbytes = 12 * _tcp_run.CHUNK_NBYTES
    assert max(processes.must(body_peak, processes.launch(timeout_s=60), kind, nbytes)) < 4 * _tcp_run.CHUNK_NBYTES
    if kind is OpKind.ALLREDUCE:
        assert (
            max(processes.must(body_peak_with_gaps, processes.launch(timeout_s=60), nbytes))
            < 6.5 * _tcp_run.CHUNK_NBYTES
        )


# ------------------------------------------------------------------------------- joining


def join_all(rendezvous: MemoryRendezvous, world: int, *hosts: str) -> list[tcp.TcpCommunicator]:
    """Joins a group whose ranks are on these hosts in turn."""
    at = hosts or ("127.0.0.1",)

    def join(rank: int) -> tcp.TcpCommunicator:
        return tcp.create(spec_of(world), rank, rendezvous, NO_EXCHANGE, host=at[rank % len(at)])

    with ThreadPoolExecutor(world) as threads:
        return list(threads.map(join, range(world)))


class Visited(MemoryRendezvous):
    """A rendezvous that strangers read too: each says something to whoever listens, before a member can."""

    def __init__(self, *said: bytes) -> None:
        super().__init__()
        self.strangers: list[socket.socket] = []
        self._said = said

    def put(self, name: str, value: bytes) -> None:
        if name.startswith("tcp.at."):
            for words in self._said:
                stranger = socket.create_connection(json.loads(value)[:2])
                stranger.sendall(words)
                self.strangers.append(stranger)
        super().put(name, value)


def hello(rank: int, peer: int) -> bytes:
    return _tcp_join._HELLO.pack(b"rcT2", rank, peer, b"n" * 32)


STRANGERS = {
    "silent": b"",
    "half a hello": hello(2, 0)[:-1],
    "garbage": b"GET / HTTP/1.1\r\nHost: here\r\nAccept: everything\r\n\r\n",
    "not a member": hello(7, 0) + b"x" * 32,
    "without the key": hello(2, 0) + b"x" * 32,
    "for another rank": hello(2, 5) + b"x" * 32,
}


@pytest.mark.parametrize("who", STRANGERS)
def test_strangers_neither_join_nor_hold_up_the_members(who: str) -> None:
    rendezvous = Visited(*(STRANGERS[who],) * 3)
    made = join_all(rendezvous, 3)
    assert len(rendezvous.strangers) == 9
    launch = Launch(seq=1, ranks=(0, 1, 2), timeout_s=10)
    with ThreadPoolExecutor(3) as threads:
        for arrivals in threads.map(lambda one: run_launch(one, launch, arrival=bytes([one.rank])), made):
            assert arrivals == [b"\0", b"\1", b"\2"]
    for stranger in rendezvous.strangers:  # dropped, at the latest when all have come
        stranger.settimeout(5)
        try:
            while stranger.recv(4096):
                pass
        except ConnectionResetError:
            pass
        stranger.close()
    for communicator in made:
        communicator.close()


def test_more_strangers_than_are_listened_to_only_delay_a_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_tcp_join, "MAX_STRANGERS", 1)
    monkeypatch.setattr(_tcp_join, "HELLO_TIMEOUT_S", 0.1)
    rendezvous = Visited(*(b"",) * 8)
    for communicator in join_all(rendezvous, 2):
        communicator.close()
    for stranger in rendezvous.strangers:
        stranger.close()


def test_a_listener_without_the_key_is_no_member(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody who has taken a member's place in the rendezvous, and answers whatever is asked."""
    monkeypatch.setattr(tcp, "JOIN_TIMEOUT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            try:
                while True:
                    caller, _ = server.accept()
                    with caller:
                        caller.recv(4096)
                        caller.sendall(b"x" * 64)
                        assert caller.recv(4096) == b""  # nothing more is said to it
            except OSError:
                return  # the test is over

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        rendezvous = MemoryRendezvous()
        rendezvous.put("tcp.at.0", json.dumps(["127.0.0.1", server.getsockname()[1]]).encode())
        rendezvous.put("tcp.key", b"k" * 32)
        with pytest.raises(CollectiveTimeoutError) as caught:
            tcp.create(spec_of(2), 1, rendezvous, NO_EXCHANGE)
        assert caught.value.missing == (0,)
        server.shutdown(socket.SHUT_RDWR)
        thread.join(5)
        assert not thread.is_alive()


@pytest.mark.parametrize("present", [0, 1, 2])
def test_members_that_never_come_are_named(monkeypatch: pytest.MonkeyPatch, present: int) -> None:
    monkeypatch.setattr(tcp, "JOIN_TIMEOUT_S", 0.2)
    with pytest.raises(CollectiveTimeoutError) as caught:
        tcp.create(spec_of(3), present, MemoryRendezvous(), NO_EXCHANGE)
    assert caught.value.op == "join"
    assert set(caught.value.missing) <= {0, 1, 2} - {present}
    assert caught.value.missing == tuple(range(present)) or present == 0
    assert caught.value.missing


def test_it_listens_on_its_host_alone_and_only_while_it_joins() -> None:
    rendezvous = MemoryRendezvous()
    tried: list[str] = []

    class Watched(MemoryRendezvous):
        def put(self, name: str, value: bytes) -> None:
            if name == "tcp.at.0":
                host, port, _ = json.loads(value)
                with pytest.raises(ConnectionRefusedError):
                    socket.create_connection(("127.0.0.1", port))
                socket.create_connection((host, port)).close()
                tried.append(host)
            super().put(name, value)

    rendezvous = Watched()
    made = join_all(rendezvous, 2, "127.0.0.2")
    assert tried == ["127.0.0.2"]
    for rank in (0, 1):
        host, port, _ = json.loads(rendezvous.get(f"tcp.at.{rank}", 0))
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, port))
    for communicator in made:
        communicator.close()


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "203.0.113.7"])
def test_a_host_that_is_not_this_one_is_refused(host: str) -> None:
    with pytest.raises(BackendUnavailableError, match="can't listen"):
        tcp.create(spec_of(2), 0, MemoryRendezvous(), NO_EXCHANGE, host=host)


def test_the_connections_find_out_about_dead_hosts() -> None:
    made = join_all(MemoryRendezvous(), 2, "127.0.0.1", "127.0.0.2")
    for communicator in made:
        for peer in communicator._link._peers.values():
            assert peer.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert peer.sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert peer.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 120_000
            assert not peer.sock.getblocking()
        communicator.close()


def test_ranks_of_one_host_are_connected_within_it_and_others_by_the_network() -> None:
    made = join_all(MemoryRendezvous(), 4, "127.0.0.1", "127.0.0.2")
    for one in made:
        assert {rank for rank, peer in one._link._peers.items() if sockets.is_local(peer.sock)} == {(one.rank + 2) % 4}
    launch = Launch(seq=1, ranks=(0, 1, 2, 3), timeout_s=10)
    with ThreadPoolExecutor(4) as threads:
        for arrivals in threads.map(lambda one: run_launch(one, launch, arrival=bytes([one.rank])), made):
            assert arrivals == [b"\0", b"\1", b"\2", b"\3"]
    for communicator in made:
        communicator.close()


@pytest.mark.parametrize("there", [False, True])
def test_where_no_name_of_this_machine_can_be_used_the_network_is(monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    """There is none, or it is that of another network namespace."""
    listen = sockets.listen_locally

    def elsewhere() -> tuple[socket.socket, str] | None:
        made = listen() if there else None
        return None if made is None else (made[0], f"{made[1]} of another namespace")

    monkeypatch.setattr(sockets, "listen_locally", elsewhere)
    made = join_all(MemoryRendezvous(), 3)
    assert not any(sockets.is_local(peer.sock) for one in made for peer in one._link._peers.values())
    for communicator in made:
        communicator.close()


def test_a_closed_communicator_gives_everything_back() -> None:
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = descriptors()
    made = ThreadTeam("tcp", 3)
    assert descriptors() == before + 3 * (2 + 2)  # two connections each, and the pair that wakes
    made.close()
    assert descriptors() == before
    for communicator in made.communicators:
        communicator.abort(1)  # nobody is there any more
        communicator.close()


def test_one_rank_needs_no_socket() -> None:
    made = tcp.create(spec_of(1), 0, MemoryRendezvous(), NO_EXCHANGE, host="no such host")
    array = np.ones(3)
    launch = Launch(seq=1, ranks=(0,), timeout_s=1)
    kernel = Kernel(kind=OpKind.ALLREDUCE, src=array, dst=array, op=ReduceOp.SUM)
    assert run_launch(made, launch, kernel, Kernel(kind=OpKind.BARRIER), arrival=b"me") == [b"me"]
    made.close()
    with pytest.raises(GroupBrokenError):
        made.agree(launch, b"")


# ------------------------------------------------------------------------------- frames


def frame(seq: int, kind: int, step: int, body: bytes = b"", *, nbytes: int | None = None) -> bytes:
    return struct.pack("<QHHIQ", seq, kind, 0, step, len(body) if nbytes is None else nbytes) + body


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Link, socket.socket]]:
    """Rank 0's end of a group of two, and the bare socket that is rank 1."""
    monkeypatch.setattr(_tcp_link, "FAREWELL_S", 0.0)
    monkeypatch.setattr(_tcp_peer, "current_core", lambda: 0)  # as `frame` has it
    mine, theirs = socket.socketpair()
    mine.setblocking(False)
    theirs.settimeout(5)
    link = Link(0, "g", {1: mine})
    yield link, theirs
    link.close()
    theirs.close()


def launch_of(seq: int, timeout_s: float = 5.0) -> Launch:
    return Launch(seq=seq, ranks=(0, 1), timeout_s=timeout_s)


def test_frames_of_launches_that_were_left_are_thrown_away(line: tuple[Link, socket.socket]) -> None:
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


def test_a_frame_that_was_half_received_is_read_to_its_end(line: tuple[Link, socket.socket]) -> None:
    link, other = line
    whole = frame(1, DATA, 1, b"y" * 10_000)
    other.sendall(whole[:5000])
    array, batch = np.zeros(10_000, np.uint8), Batch()
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


def test_a_frame_that_was_half_sent_is_finished_from_a_copy(line: tuple[Link, socket.socket]) -> None:
    link, other = line
    array, batch = np.full(FRAME_NBYTES, 7, np.uint8), Batch()
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


def test_a_rank_that_nobody_reads_from_keeps_no_heap_of_frames(line: tuple[Link, socket.socket]) -> None:
    link, other = line
    for seq in range(1, 30):
        with pytest.raises(CollectiveTimeoutError):
            link.agree(launch_of(seq, timeout_s=0.0), b"a" * 100_000)
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
    line: tuple[Link, socket.socket], passed: int, goes_on: bool
) -> None:
    link, other = line
    other.sendall(frame(1, ARRIVAL, 1, b"yes") + frame(1, LEFT, passed))
    if goes_on:
        assert link.agree(launch_of(1), b"") == [b"", b"yes"]
    else:
        with pytest.raises(PlanAbortedError, match="rank 1 has left launch 1") as caught:
            link.agree(launch_of(1), b"")
        assert caught.value.rank == 1


def test_whoever_is_in_a_later_launch_has_left_this_one(line: tuple[Link, socket.socket]) -> None:
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
        frame(0, DATA, 1, nbytes=1 << 63),
        frame(1, 9, 1),
        frame(1, ARRIVAL, 2, b"x"),
        b"\xff" * 4096,
    ],
)
def test_what_is_no_frame_ends_the_connection_and_the_group(line: tuple[Link, socket.socket], words: bytes) -> None:
    link, other = line
    other.sendall(words)
    with pytest.raises(PlanAbortedError, match="the connection to rank 1 broke") as caught:
        link.agree(launch_of(1), b"")
    assert caught.value.rank == 1
    link.end(launch_of(1), False)
    with pytest.raises(GroupBrokenError, match="rank 1"):
        link.agree(launch_of(2), b"")


def test_an_arrival_that_is_too_long_is_refused_and_the_others_go_on(team: ThreadTeam) -> None:
    launch = team.launch()

    def body(communicator: Communicator) -> list[bytes]:
        return run_launch(communicator, launch, arrival=b"x" * ((FRAME_NBYTES + 1) * (communicator.rank == 1)))

    results = team.run(body)
    assert isinstance(results[1], UnsupportedError)
    assert all(isinstance(results[rank], PlanAbortedError) and results[rank].rank != rank for rank in (0, 2))
    check_allreduce(team, ReduceOp.SUM, "int64", 1024, "plain", True)


# ------------------------------------------------------------------------------- in mid-kernel


def one_side(kind: OpKind, peer: int, nbytes: int) -> Kernel:
    array = np.zeros(nbytes, np.uint8)
    return Kernel(kind=kind, src=array, dst=array, peer=peer)


@pytest.mark.parametrize("kind", [OpKind.SEND, OpKind.RECV])
@pytest.mark.parametrize("aborted", [True, False])
def test_the_group_works_on_after_an_end_in_mid_kernel(team: ThreadTeam, kind: OpKind, aborted: bool) -> None:
    """Rank 0 leaves a kernel that rank 1 has not begun; a send is then in the middle of a frame."""
    launch = Launch(seq=team.launch().seq, ranks=(0, 1), timeout_s=60 if aborted else 0.5)
    waiting = team.start(0, run_launch, launch, one_side(kind, 1, 64 << 20))
    team.communicators[1].agree(launch, b"")
    link = team.communicators[0]._link
    until(lambda: link._peers[1].is_blocked or link._peers[1].is_owed or waiting.done())
    if aborted:
        team.communicators[0].abort(launch.seq)
    failed = waiting.result(10)
    assert isinstance(failed, PlanAbortedError if aborted else CollectiveTimeoutError)
    assert aborted or failed.missing == (1,)
    opposite = one_side(OpKind.RECV if kind is OpKind.SEND else OpKind.SEND, 0, 64 << 20)
    together = team.launch()

    def go_on(communicator: Communicator) -> None:
        """Rank 1 comes late, and hears at once or when rank 0 goes on that it has left; then all meet."""
        if communicator.rank == 1:
            late = replace(launch, timeout_s=20)
            with pytest.raises(PlanAbortedError, match="rank 0 has left"):
                communicator.launch(late, opposite)
            communicator.end(late, False)
        array = np.full(300_001, communicator.rank)
        run_launch(communicator, together, Kernel(kind=OpKind.ALLREDUCE, src=array, dst=array, op=ReduceOp.SUM))
        assert (array == 3).all()

    team.must(go_on)


_IN_KERNEL = 2  # the step after the agreement


def test_both_ends_may_leave_in_the_middle_of_frames(team: ThreadTeam) -> None:
    launch = team.launch(timeout_s=30)
    arrays = [np.full(8_000_000, rank, np.int64) for rank in team.everyone]

    def body(communicator: Communicator) -> None:
        array = arrays[communicator.rank]
        run_launch(communicator, launch, Kernel(kind=OpKind.ALLREDUCE, src=array, dst=array, op=ReduceOp.SUM))

    running = [team.start(rank, body) for rank in team.everyone]
    links = [communicator._link for communicator in team.communicators]
    until(lambda: all(link._step == _IN_KERNEL for link in links))
    for communicator in team.communicators:
        communicator.abort(launch.seq)
    assert all(isinstance(one.result(10), PlanAbortedError) for one in running)
    for _ in range(3):
        check_allreduce(team, ReduceOp.SUM, "int64", 300_001, "plain", True)


def body_kernel(communicator: Communicator, launch: Launch, kind: OpKind) -> None:
    """A kernel without the door, as if the peer had died behind it."""
    array = np.ones(1000, np.float32)
    side = tuple(array.copy() for _ in launch.ranks) if kind is OpKind.ALLTOALL else array
    communicator.launch(launch, Kernel(kind=kind, src=side, dst=side, op=ReduceOp.SUM, peer=1, most=1000))


@pytest.mark.parametrize(
    "kind",
    [
        OpKind.ALLREDUCE,  # it sends and receives at once, as an all-to-all does
        OpKind.RECV,  # it only receives, as this rank does in a broadcast from rank 1
        *(pytest.param(kind, marks=pytest.mark.full) for kind in (OpKind.ALLTOALL, OpKind.BROADCAST)),
    ],
)
def test_a_peer_that_dies_in_mid_kernel_is_named_and_breaks_the_group(mortals: ProcessTeam, kind: OpKind) -> None:
    check_allreduce(mortals, ReduceOp.SUM, "int64", 1024, "plain", True)
    mortals.workers[1].process.kill()
    mortals.workers[1].process.join()
    failed = mortals.run(body_kernel, mortals.launch(), kind, ranks=(0,))[0]
    assert isinstance(failed, PlanAbortedError)
    assert (failed.group_name, failed.rank) == ("team", 1)
    assert "the connection to rank 1 broke" in str(failed)
    broken = mortals.run(body_arrive, mortals.launch(), ranks=(0,))[0]
    assert isinstance(broken, GroupBrokenError)
    assert len(mortals.must(body_arrive, mortals.launch(ranks=(0, 2)), ranks=(0, 2))) == 2  # the others go on


def test_a_send_to_a_peer_that_dies_ends(mortals: ProcessTeam) -> None:
    launch = Launch(seq=mortals.launch().seq, ranks=(0, 1), timeout_s=60)
    sending = mortals.start(0, body_send, launch)
    until(lambda: sending.running())
    mortals.workers[1].process.kill()
    failed = sending.result(20)
    assert isinstance(failed, PlanAbortedError)
    assert failed.rank == 1


def body_send(communicator: Communicator, launch: Launch) -> None:
    communicator.launch(launch, one_side(OpKind.SEND, 1, 256 << 20))
