"""One rank's connections to all others, driven by the waiting thread; they have no thread of their own.

A waiting thread sends and receives on all connections until its frames are sent and received. An abort from any thread
wakes it by a socket pair. The GIL is free in every socket call.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections.abc import Callable, Collection, Sequence

from raycollect.backends.arrays import Array
from raycollect.backends.kernels import aborted, absent, check_arrival
from raycollect.backends.tcp.peer import (
    AHEAD,
    ARRIVAL,
    DATA,
    HERE,
    FrameBatch,
    PeerConnection,
    PostedReceive,
)
from raycollect.core import sockets
from raycollect.core.cpu_affinity import YIELD_S, Seeker, current_core
from raycollect.core.model import Launch
from raycollect.errors import CollectiveTimeoutError, GroupBrokenError, InternalError, PlanAbortedError

FAREWELL_S = 0.05  # How long a rank that leaves a launch tries to notify peers whose socket is full
# How long to keep the connection to a rank whose process has ended: its last data may still be in transit. The
# connection ends by itself, except if the host has died.
LOST_S = 1.0
_EMPTY = memoryview(b"")
_SLICE_S = 60.0
_WAKES = 4096


class TcpMesh:
    """One rank's end of all connections of a group.

    One thread at a time enters, waits and leaves; any thread calls `abort` and `stop`.
    """

    def __init__(self, rank: int, group_name: str, socks: dict[int, socket.socket]) -> None:
        self.rank = rank
        self._group_name = group_name
        self._seq = self._step = 0  # the launch and its step
        self._agreement = self._passed = 0  # the steps of its last agreement, and of the last one that it passed
        self._aborted: set[int] = set()
        self._stopped = False
        self._ending: dict[int, float] = {}  # rank whose process has ended -> when to end the connection
        self._seeker = Seeker()
        self._gone: dict[int, str] = {}  # ranks that have left this launch, or are lost -> why
        self._peers = {other: PeerConnection(other, sock) for other, sock in socks.items()}
        self._by_fd = {peer.sock.fileno(): peer for peer in self._peers.values()}
        self._poller = select.poll()
        # The polled end and the written end; empty in a group of one.
        self._wake: tuple[socket.socket, ...] = sockets.wake_pair() if socks else ()
        for sock in self._wake[:1]:
            self._poller.register(sock, select.POLLIN)
        for peer in self._peers.values():
            self._watch(peer)

    def agree(self, launch: Launch, arrival: bytes, ahead: Callable[[], object] | None = None) -> Sequence[bytes]:
        """Sends this rank's arrival to `launch.ranks` and waits for theirs; see `Communicator.agree`.

        `ahead` calls `send` and `receive` with `ahead`: these frames travel with the arrivals.
        """
        check_arrival(arrival, self._group_name, self.rank)
        self.begin(launch)
        again, step = self._agreement, self._step
        self._agreement = step
        until_s, batch, body = time.monotonic() + launch.timeout_s, FrameBatch(), memoryview(arrival)
        receives: dict[int, PostedReceive] = {}
        for other in launch.ranks:
            if other != self.rank:
                peer, receive = self._peers[other], PostedReceive(step, None, batch)
                if again:
                    peer.forget()  # receives of the previous agreement
                receives[other] = receive
                peer.queue(ARRIVAL, step, body, batch)
                peer.expect(receive)
        if ahead is not None:
            ahead()
        for other in receives:
            peer = self._peers[other]
            if not peer.is_blocked:
                peer.push()
            self._watch(peer)
        self.wait(batch, launch, until_s, receives)
        self._passed = step
        return [bytes(receives[other].into or b"") if other != self.rank else arrival for other in launch.ranks]

    def begin(self, launch: Launch) -> None:
        """Begins the next step of a launch, an agreement or a kernel.

        Raises:
            GroupBrokenError: A connection that the launch needs has ended.
        """
        if launch.seq != self._seq:
            self._enter(launch.seq)
            for other in launch.ranks:
                if other != self.rank and self._peers[other].lost:
                    detail = f"the connection to rank {other} has ended: {self._peers[other].lost}"
                    raise GroupBrokenError(group_name=self._group_name, detail=detail)
        self._step += 1
        self._check(launch)

    def end(self, launch: Launch, ok: bool) -> None:
        """Leaves a launch; notifies its ranks if this rank has not run all of it. Never raises."""
        if launch.seq < self._seq:
            return
        if launch.seq > self._seq:  # it did not reach the agreement
            self._enter(launch.seq)
        for seq in tuple(self._aborted):  # in place: another thread may add to it
            if seq <= launch.seq:
                self._aborted.discard(seq)
        recipients = [] if ok else [self._peers[other] for other in launch.ranks if other != self.rank]
        for peer in self._peers.values():
            peer.leave()
        for peer in recipients:
            peer.part(self._passed)
            self._watch(peer)
        until_s = time.monotonic() + FAREWELL_S
        while not all(peer.is_flushed for peer in recipients) and (left_s := until_s - time.monotonic()) > 0:
            self._serve(self._poller.poll(left_s * 1000))

    def _enter(self, seq: int) -> None:
        if seq < self._seq:
            raise InternalError(detail=f"launch {seq} after {self._seq}")
        self._seq, self._step, self._agreement, self._passed, self._gone = seq, 0, 0, 0, {}
        core = current_core()
        for peer in self._peers.values():
            peer.enter(seq, core)
            if peer.lost:
                self._watch(peer)

    def silent(self, launch: Launch, timeout_s: float) -> tuple[int, ...]:
        """Finds ranks that do not respond, after a kernel of another library has failed.

        All ranks call it, at different times, after the agreement of `launch`. Any message shows that a rank is alive:
        HERE, LEFT, or a frame of a later step.
        """
        if launch.seq != self._seq:
            return ()
        until_s = time.monotonic() + timeout_s
        quiet = {other: self._peers[other] for other in launch.ranks if other != self.rank}
        for peer in quiet.values():
            peer.send(HERE, 0, _EMPTY, None)
            peer.pull()
            self._watch(peer)
        while True:
            quiet = {rank: peer for rank, peer in quiet.items() if not (peer.is_here or peer.has_left or peer.is_held)}
            left_s = until_s - time.monotonic()
            if left_s <= 0 or all(peer.lost for peer in quiet.values()):
                return tuple(quiet)
            self._serve(self._poller.poll(left_s * 1000 + 1))

    def send(self, rank: int, array: Array, batch: FrameBatch, *, ahead: bool = False) -> None:
        """Sends a rank the bytes of a flat array, which must not change until `batch` is complete.

        `ahead`: these are the first bytes of the kernel after this agreement; receivers drop them without such a
        kernel.
        """
        if ahead:
            self._peers[rank].queue(AHEAD, self._step + 1, array.view("u1").data, batch)
        elif array.size:
            self._post(rank, array.view("u1").data, batch)

    def receive(self, rank: int, array: Array, batch: FrameBatch, *, ahead: bool = False) -> None:
        """Receives the bytes of a flat array from a rank; `ahead`: the bytes that the rank sends ahead."""
        if array.size:
            peer = self._peers[rank]
            if peer.expect(PostedReceive(self._step + ahead, array.view("u1").data, batch)):
                self._watch(peer)

    def greet(self, ranks: Sequence[int], batch: FrameBatch) -> None:
        """Exchanges empty frames with ranks."""
        for rank in ranks:
            self._post(rank, _EMPTY, batch)
            self._peers[rank].expect(PostedReceive(self._step, _EMPTY, batch))
            self._watch(self._peers[rank])

    def _post(self, rank: int, body: memoryview, batch: FrameBatch) -> None:
        if rank in self._gone:
            raise PlanAbortedError(group_name=self._group_name, rank=rank, detail=self._gone[rank])
        peer = self._peers[rank]
        peer.send(DATA, self._step, body, batch)
        if peer.is_blocked or peer.lost:
            self._watch(peer)

    def wait(self, batch: FrameBatch, launch: Launch, until_s: float, must_pass: Collection[int] = ()) -> None:
        """Sends and receives until a batch is complete; `must_pass` names ranks that must all pass the last agreement.

        Raises:
            CollectiveTimeoutError: Names the ranks that it waited for.
            PlanAbortedError: The launch was aborted here, or an awaited rank has left it or is lost.
        """
        asleep_s = 0.0
        while True:  # at least once, so that a rank whose sends never block notices aborts, too
            ready = self._poller.poll(0)
            if ready:
                self._serve(ready)
                asleep_s = 0.0
            if self._gone or self._aborted or self._stopped:
                self._check(launch, must_pass)
            if not batch.left:
                return
            now_s = time.monotonic()
            if now_s >= until_s:
                raise self._timed_out(launch)
            if ready or (self._ending and self._end_late(now_s)):
                continue
            if not asleep_s:
                asleep_s = now_s + YIELD_S
                peers = self._peers.values()
                if now_s >= self._seeker.settled_s:
                    awaited = [peer.core for peer in peers if peer.owes(self._step)]
                    self._seeker.seek(awaited, [peer.core for peer in peers], now_s)
            if now_s < asleep_s:
                os.sched_yield()
            else:
                wake_s = min((until_s, now_s + _SLICE_S, *tuple(self._ending.values())))
                self._serve(self._poller.poll((wake_s - now_s) * 1000 + 1))

    def _end_late(self, now_s: float) -> bool:
        late = [rank for rank, until_s in tuple(self._ending.items()) if until_s <= now_s]
        for rank in late:
            del self._ending[rank]
            self._peers[rank].lose("its process has ended")
            self._watch(self._peers[rank])
        return bool(late)

    def _serve(self, ready: Sequence[tuple[int, int]]) -> None:
        for fd, events in ready:
            peer = self._by_fd.get(fd)
            if peer is None:
                with contextlib.suppress(OSError):
                    self._wake[0].recv(_WAKES)
                continue
            if events & select.POLLOUT:
                peer.push()
            if events & ~select.POLLOUT:
                peer.pull()
            self._watch(peer)

    def _watch(self, peer: PeerConnection) -> None:
        # Updates the poll mask of a connection, and records whether its rank has left or is lost.
        if peer.lost:
            self._gone[peer.rank] = f"the connection to rank {peer.rank} broke: {peer.lost}"
        elif peer.has_left:
            self._gone[peer.rank] = f"rank {peer.rank} has left launch {self._seq}"
        wants = 0 if peer.is_held else select.POLLIN
        if peer.is_blocked:
            wants |= select.POLLOUT
        if peer.lost:
            wants = 0
        if wants != peer.mask:
            if wants:
                self._poller.register(peer.sock, wants)  # or changes the mask
            else:
                self._poller.unregister(peer.sock)
            peer.mask = wants

    def _check(self, launch: Launch, must_pass: Collection[int] = ()) -> None:
        if self._stopped:
            raise GroupBrokenError(group_name=self._group_name, detail="the communicator was closed")
        if launch.seq in self._aborted:
            raise aborted(self._group_name, launch, self.rank)
        for rank, why in self._gone.items():
            peer = self._peers[rank]
            if peer.owes(self._step) or peer.is_owing or (rank in must_pass and peer.passed < self._agreement):
                raise PlanAbortedError(group_name=self._group_name, rank=rank, detail=why)

    def _timed_out(self, launch: Launch) -> CollectiveTimeoutError:
        # Names the ranks whose data is missing, or else those that do not receive.
        owed = tuple(rank for rank, peer in self._peers.items() if peer.owes(self._step))
        missing = owed or tuple(rank for rank, peer in self._peers.items() if peer.is_owing)
        return absent(self._group_name, launch, missing)

    def abort(self, seq: int) -> None:
        """Makes all waits of that launch raise, now and later."""
        self._aborted.add(seq)
        self._ring()

    def lose(self, rank: int) -> None:
        """Makes waits for a rank whose process has ended raise, after its last data has arrived; see `LOST_S`."""
        self._ending[rank] = time.monotonic() + LOST_S
        self._ring()

    def stop(self) -> None:
        """Makes all waits raise, now and later."""
        self._stopped = True
        self._ring()

    def _ring(self) -> None:
        for sock in self._wake[1:]:
            with contextlib.suppress(OSError):  # full, which wakes, too; or closed, without a waiting thread
                sock.send(b"!")

    def close(self) -> None:
        """Closes all connections; no thread may be inside."""
        sockets.close((*self._wake, *(peer.sock for peer in self._peers.values())))
