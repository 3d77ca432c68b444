"""The option `checksum` of tcp: what is changed on its way is an error on the rank that it comes to, and no result."""

from __future__ import annotations

import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from raycollect.backends.tcp import communicator as tcp
from raycollect.backends.tcp import link as _tcp_link
from raycollect.backends.tcp import run as _tcp_run
from raycollect.backends.tcp.checksums import SUMMED, SummedPeer
from raycollect.backends.tcp.link import Batch, Link
from raycollect.backends.tcp.peer import ARRIVAL, DATA, Peer
from raycollect.core.model import GroupSpec, Kernel, Launch, OpKind, ReduceOp
from raycollect.core.protocols import Communicator
from raycollect.errors import (
    CollectiveTimeoutError,
    GroupBrokenError,
    InvalidGroupError,
    KernelError,
    PlanAbortedError,
)
from tests.pure.closing import closing_all
from tests.pure.communicators import MemoryExchange, MemoryRendezvous, MemoryStar, ThreadTeam
from tests.pure.conformance import FOLDING, Case, check_allreduce, check_cases, every_case, run_case, run_launch

HEADER = struct.Struct("<QHHIII")
ON = (("checksum", True),)
WITH_DATA = tuple(kind for kind in OpKind if kind not in (OpKind.RECV, OpKind.BARRIER))  # SEND has RECV at its end
WHOLE = (*FOLDING, OpKind.BROADCAST)  # what is sent whole where it is small, and else in slices


class Trigger:
    """Changes one byte of all that comes in frames of a kind, over all connections of a group.

    Attributes:
        seen: How many bytes of such frames have come.
        sent: How many bytes at all were sent.
        hit: The ranks that the changed byte came to and from.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.arm(-1)

    def arm(self, at: int, kind: int = DATA, mask: int = 1) -> None:
        """Chooses the byte by its place among those that come from now on; none: -1."""
        self.seen = self.sent = 0
        self.hit: tuple[int, int] | None = None
        self._at, self._kind, self._mask = at, kind, mask

    def count(self, nbytes: int) -> None:
        """So many bytes were sent."""
        with self._lock:
            self.sent += nbytes

    def pass_on(self, kind: int, body: memoryview, ranks: tuple[int, int]) -> None:
        """A part of a frame comes by."""
        if kind & ~SUMMED != self._kind:
            return
        with self._lock:
            place = self._at - self.seen
            self.seen += body.nbytes
        if 0 <= place < body.nbytes:
            body[place] ^= self._mask
            self.hit = ranks


class Wire:
    """A socket all of whose incoming frames pass a trigger."""

    def __init__(self, sock: socket.socket, trigger: Trigger, ranks: tuple[int, int]) -> None:
        self._sock, self._trigger, self._ranks = sock, trigger, ranks
        self._head, self._left, self._kind = bytearray(), 0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)

    def sendmsg(self, *what: Any) -> int:
        nbytes = self._sock.sendmsg(*what)
        self._trigger.count(nbytes)
        return nbytes

    def recv_into(self, into: memoryview) -> int:
        nbytes = self._sock.recv_into(into)
        there = into[:nbytes]
        while there:
            if self._left:
                nbytes_here = min(self._left, there.nbytes)
                self._trigger.pass_on(self._kind, there[:nbytes_here], self._ranks)
                self._left -= nbytes_here
            else:
                nbytes_here = min(HEADER.size - len(self._head), there.nbytes)
                self._head += there[:nbytes_here]
                if len(self._head) == HEADER.size:
                    _, self._kind, _, _, self._left, _ = HEADER.unpack(self._head)
                    self._head.clear()
            there = there[nbytes_here:]
        return nbytes


class WiredTeam(ThreadTeam):
    """A tcp group whose connections all pass one trigger."""

    def __init__(self, world_size: int, options: tuple[tuple[str, Any], ...] = ON) -> None:
        self.options = options
        super().__init__("tcp", world_size)
        self.trigger = Trigger()
        for communicator in self.communicators:
            for rank, peer in communicator._link._peers.items():
                peer.sock = Wire(peer.sock, self.trigger, (communicator.rank, rank))

    def _create(self, rank: int) -> Communicator:
        self.spec = replace(self.spec, options=self.options)
        return super()._create(rank)


@pytest.fixture
def form() -> Iterator[Callable[..., WiredTeam]]:
    with closing_all(WiredTeam) as make:
        yield make


def case_of(kind: OpKind, size: int, rng: random.Random) -> Case:
    """A case in which each bit of each byte counts."""
    op = rng.choice((ReduceOp.SUM, ReduceOp.BXOR)) if kind in FOLDING else None
    dtype, root = rng.choice(("int64", "uint16", "uint8")), rng.randrange(2)
    inplace = kind is not OpKind.SEND and rng.random() < 0.5
    return Case(kind=kind, dtype=dtype, size=size, op=op, root=root, peer=1 - root, inplace=inplace)


def run_once(team: WiredTeam, case: Case) -> dict[int, Any]:
    """Rank -> what is wrong with its result ("" for nothing), or what it raised."""
    ranks = tuple(sorted((case.root, case.peer))) if case.kind is OpKind.SEND else team.everyone
    launch = team.launch(ranks)
    found = team.run(lambda communicator: run_case(communicator, launch, case, True, False), ranks=ranks)
    return {rank: one if isinstance(one, BaseException) else one[0] for rank, one in zip(ranks, found, strict=True)}


def change_one(team: WiredTeam, case: Case, rng: random.Random) -> dict[int, Any]:
    """Runs a case as it is, to see how many bytes it moves, and once more with one of them changed."""
    meeting = team.launch()
    team.must(lambda communicator: run_launch(communicator, meeting))  # what was left of the last launch is read by now
    team.trigger.arm(-1)
    assert set(run_once(team, case).values()) == {""}
    assert team.trigger.seen > 0
    team.trigger.arm(rng.randrange(team.trigger.seen), mask=1 << rng.randrange(8))
    found = run_once(team, case)
    assert team.trigger.hit is not None
    return found


def check_seen(team: WiredTeam, found: dict[int, Any]) -> None:
    """The rank that the byte came to says so, and from whom; nobody waits for it, and nobody has a wrong result."""
    here, sender = team.trigger.hit or (-1, -1)
    error = found.pop(here)
    assert isinstance(error, KernelError)
    assert (error.group_name, error.rank) == ("team", here)
    assert f"from rank {sender} were damaged" in str(error)
    assert "The group works on" in str(error)
    assert all(other == "" or isinstance(other, PlanAbortedError) for other in found.values()), found


@pytest.mark.parametrize("kind", WITH_DATA)
@pytest.mark.parametrize("size", [7, pytest.param(1024, marks=pytest.mark.full), 300_001])
def test_a_changed_byte_is_seen_where_it_comes_and_the_group_works_on(
    form: Callable[..., WiredTeam], kind: OpKind, size: int
) -> None:
    for world in (2, 3):
        team = form(world)
        for seed in range(4):
            rng = random.Random(f"{kind} {size} {world} {seed}")
            check_seen(team, change_one(team, case_of(kind, size, rng), rng))
        check_allreduce(team, ReduceOp.SUM, "int64", 1024, "plain", True)


@pytest.mark.parametrize(
    ("kind", "whole_up_to"),
    [
        pytest.param(kind, whole_up_to, marks=[pytest.mark.full] * (kind not in WHOLE and (at + turn) % 2))
        for at, kind in enumerate(WITH_DATA)
        for turn, whole_up_to in enumerate((-1, 1 << 62))
    ],
)
def test_a_changed_byte_is_seen_in_any_of_many_chunks(
    monkeypatch: pytest.MonkeyPatch, form: Callable[..., WiredTeam], kind: OpKind, whole_up_to: int
) -> None:
    monkeypatch.setattr(_tcp_run, "CHUNK_NBYTES", 256)
    monkeypatch.setattr(_tcp_run, "WHOLE_UP_TO_NBYTES", ((1 << 30, whole_up_to),))
    for world in (2, 4):
        team = form(world)
        for seed in range(4):
            rng = random.Random(f"{kind} {whole_up_to} {world} {seed}")
            check_seen(team, change_one(team, case_of(kind, rng.randrange(500, 2000), rng), rng))
        check_allreduce(team, ReduceOp.SUM, "int64", 1024, "plain", True)


@pytest.mark.parametrize("kind", WITH_DATA)
@pytest.mark.parametrize("size", [7, 300_001])
def test_without_the_option_the_same_change_is_in_the_result(
    form: Callable[..., WiredTeam], kind: OpKind, size: int
) -> None:
    team = form(3, ())
    for seed in range(4):
        rng = random.Random(f"{kind} {size} {seed}")
        found = change_one(team, case_of(kind, size, rng), rng)
        assert all(isinstance(one, str) for one in found.values()), found
        assert any(found.values())


def test_what_is_not_changed_is_what_it_was(form: Callable[..., WiredTeam]) -> None:
    for world in (1, 2, 3):
        check_cases(form(world), list(every_case("float32", world, (0, 7, 1024))))


def test_a_changed_arrival_starts_no_kernel_there(form: Callable[..., WiredTeam]) -> None:
    for seed in range(5):
        team = form(3)  # another one each time: arrivals at a launch that has failed may still be on their way
        team.trigger.arm(random.Random(seed).randrange(60), ARRIVAL)
        launch = team.launch()

        def body(communicator: Communicator, launch: Launch = launch) -> list[bytes]:
            return run_launch(communicator, launch, arrival=b"what I do ")

        found = dict(enumerate(team.run(body)))
        here, sender = team.trigger.hit or (-1, -1)
        assert isinstance(found[here], KernelError)
        assert f"from rank {sender}" in str(found[here])
        others = [one for one in found.values() if not isinstance(one, (KernelError, PlanAbortedError))]
        assert all(one == [b"what I do "] * 3 for one in others)
        check_allreduce(team, ReduceOp.SUM, "int64", 1024, "plain", True)


def test_checksums_make_no_frame_longer_and_none_are_made_unasked(form: Callable[..., WiredTeam]) -> None:
    sent = []
    for options, kind in (((), Peer), ((("checksum", False),), Peer), (ON, SummedPeer)):
        team = form(3, options)
        for communicator in team.communicators:
            assert {type(peer) for peer in communicator._link._peers.values()} == {kind}
        check_cases(team, list(every_case("int16", 3, (1024,))))
        sent.append(team.trigger.sent)
    assert len(set(sent)) == 1


# ------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((("checksum", 1),), "option 'checksum' is 1, neither True nor False"),
        ((("checksum", "yes"),), "option 'checksum' is 'yes'"),
        ((("checksum", None),), "option 'checksum' is None"),
        ((("cheksum", True),), "there is no option 'cheksum'; there are 'checksum' and"),
        ((*ON, ("timeout", 3)), "there is no option 'timeout'"),
    ],
)
@pytest.mark.parametrize("world", [1, 2])
def test_other_options_are_refused_before_anybody_is_waited_for(options: Any, words: str, world: int) -> None:
    spec = GroupSpec(name="g", group_id="1", backend="tcp", world_size=world, options=options)
    with pytest.raises(InvalidGroupError, match=words):
        tcp.create(spec, 0, MemoryRendezvous(), MemoryExchange(MemoryStar(), 0))


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_members_that_differ_in_it_hear_so(odd: int) -> None:
    rendezvous = MemoryRendezvous()

    def live(rank: int) -> list[BaseException]:
        options = ON if rank == odd else ()
        spec = GroupSpec(name="g", group_id="1", backend="tcp", world_size=3, options=options)
        made = tcp.create(spec, rank, rendezvous, MemoryExchange(MemoryStar(), 0))
        found: list[BaseException] = []
        for seq in (1, 2):
            try:
                run_launch(made, Launch(seq=seq, ranks=(0, 1, 2), timeout_s=10), arrival=b"me")
            except (PlanAbortedError, GroupBrokenError) as exc:
                found.append(exc)
        made.close()
        return found

    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(live, range(3)))
    assert all(len(errors) == 2 for errors in found)
    assert isinstance(found[odd][1], GroupBrokenError)
    assert "the members' options differ" in f"{found[odd][0]} {found[odd][1]}"


# ------------------------------------------------------------------------------- frames


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Link, Peer]]:
    """Rank 0's end of a group of two with checksums, and the bare other end of its connection."""
    monkeypatch.setattr(_tcp_link, "FAREWELL_S", 0.0)
    mine, theirs = socket.socketpair()
    mine.setblocking(False)
    theirs.settimeout(5)
    link = Link(0, "g", {1: mine}, partial(SummedPeer, "g", 0))
    yield link, SummedPeer("g", 1, 0, theirs)
    link.close()
    theirs.close()


def launch_of(seq: int) -> Launch:
    return Launch(seq=seq, ranks=(0, 1), timeout_s=5.0)


def send(peer: Peer, seq: int, kind: int, body: bytes) -> None:
    peer.enter(seq, 0)
    peer.send(kind, 1, memoryview(body), Batch())


def test_what_is_left_of_a_frame_that_nobody_waits_for_is_not_judged(line: tuple[Link, Peer]) -> None:
    """Its first half was read, changed; the second is thrown away, and the next frame is right."""
    link, other = line
    whole = HEADER.pack(1, DATA | SUMMED, 0, 1, 10_000, 12345) + b"y" * 10_000
    other.sock.sendall(whole[:5000])
    array, batch = np.zeros(10_000, np.uint8), Batch()
    link.begin(launch_of(1))
    link.receive(1, array, batch)
    with pytest.raises(CollectiveTimeoutError):
        link.wait(batch, launch_of(1), time.monotonic())
    link.end(launch_of(1), False)
    other.sock.sendall(whole[5000:])
    send(other, 2, ARRIVAL, b"next")
    assert link.agree(launch_of(2), b"") == [b"", b"next"]


@pytest.mark.parametrize("pieces", [1, 2, 7, 333])
@pytest.mark.parametrize("nbytes", [1, 100, 4072, 5000])
def test_a_sum_is_of_the_bytes_however_they_come(line: tuple[Link, Peer], pieces: int, nbytes: int) -> None:
    link, other = line
    body = random.Random(nbytes).randbytes(nbytes)
    for seq, said, is_right in ((1, body, True), (2, bytes([body[0] ^ 1]) + body[1:], False), (3, body, True)):
        mine, theirs = socket.socketpair()
        with mine, theirs:
            send(SummedPeer("g", 1, 0, mine), seq, DATA, body)
            stream = theirs.recv(HEADER.size) + said
        step = -(-len(stream) // pieces)
        array, batch = np.zeros(nbytes, np.uint8), Batch()
        link.begin(launch_of(seq))
        link.receive(1, array, batch)
        error = None
        for lo in range(0, len(stream), step):
            other.sock.sendall(stream[lo : lo + step])
            try:
                link._serve(link._poller.poll(5000))
            except KernelError as exc:
                error = exc
        assert batch.left == 0
        assert array.tobytes() == said
        assert (error is None) is is_right
        link.end(launch_of(seq), is_right)


def test_a_changed_byte_ends_no_connection_on_which_the_farewell_has_to_wait(
    line: tuple[Link, Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More comes meanwhile: it is read behind the damaged frame, which filled the buffer."""
    monkeypatch.setattr(_tcp_link, "FAREWELL_S", 0.05)
    link, other = line
    array, batch = np.zeros(10_000, np.uint8), Batch()
    link.begin(launch_of(1))
    link.send(1, np.zeros(8 << 20, np.uint8), batch)  # more than the connection takes
    link.receive(1, array, batch)
    other.sock.sendall(HEADER.pack(1, DATA | SUMMED, 0, 1, 10_000, 12345) + b"y" * 10_000)
    with pytest.raises(KernelError):
        link.wait(batch, launch_of(1), time.monotonic() + 5)
    send(other, 1, DATA, b"of the same launch")
    link.end(launch_of(1), False)
    assert not link._peers[1].lost


def test_a_rank_that_saw_a_changed_byte_keeps_nobody_in_the_kernel(form: Callable[..., WiredTeam]) -> None:
    """The others hear at once, long before the launch's time is over."""
    team = form(3)
    array = [np.ones(2_000_000) for _ in team.everyone]
    launch = team.launch(timeout_s=60)
    team.trigger.arm(1000)
    began_s = time.monotonic()

    def body(communicator: Communicator) -> None:
        mine = array[communicator.rank]
        run_launch(communicator, launch, Kernel(kind=OpKind.ALLREDUCE, src=mine, dst=mine, op=ReduceOp.SUM))

    found = team.run(body)
    assert sorted(type(one).__name__ for one in found) == ["KernelError", "PlanAbortedError", "PlanAbortedError"]
    assert time.monotonic() - began_s < 20
