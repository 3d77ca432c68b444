"""One connection of a `tcp` group: frames out of a queue, frames into the places that wait for them.

A frame is ``launch:8 | kind:2 | core:2 | step:4 | nbytes:4 | checksum:4`` and the bytes. `step` counts the agreements
and kernels of a launch; the checksum is 0 but in `_tcp_summed`. Frames of one pair come in the order in which the
receiver waits for them, so that no more has to be said.

=========================  =====================================================================================
a frame that comes is of
=========================  =====================================================================================
an earlier launch          this rank has left it: the bytes are thrown away
this launch, LEFT          the other has left it, and not run all of it
this launch, other         goes to the place that waits for it; stays in the socket until there is one
a later launch             the other has left this one; stays in the socket until this rank gets there
=========================  =====================================================================================

So nothing is ever in memory but what somebody waits for, and whoever leaves in the middle loses no place in the stream:
what comes for it is thrown away, and a frame that it has half sent is finished later, from a copy.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
from collections import deque
from dataclasses import dataclass

from raycollect.cores import current_core

__all__ = ["ARRIVAL", "DATA", "FRAME_NBYTES", "LEFT", "Batch", "Peer", "Place"]

ARRIVAL, DATA, LEFT = 1, 2, 3

FRAME_NBYTES = 1 << 20
"""The longest frame, whatever its kind."""

_HEADER = struct.Struct("<QHHIII")
_BUFFER_NBYTES = 4096
_ALL = 1 << 32
_SCRATCH = memoryview(bytearray(64 * 1024))
"""Where bytes go that nobody wants; nothing is ever read from it."""


class Batch:
    """Frames that somebody waits for together.

    Attributes:
        left: How many of them are not yet sent, or have not yet come.
    """

    __slots__ = ("left",)

    def __init__(self) -> None:
        self.left: int = 0


@dataclass(slots=True, eq=False)
class Place:
    """Where a frame is to go.

    Attributes:
        step: The step that it has to be of.
        into: The bytes to fill; None where the sender says how many there are, and this is then what came.
        batch: Whose it is.
    """

    step: int
    into: memoryview | None
    batch: Batch


@dataclass(slots=True, eq=False)
class _Outgoing:
    """A frame that is not wholly sent."""

    seq: int
    head: bytes | memoryview
    body: memoryview
    batch: Batch | None

    @property
    def is_begun(self) -> bool:
        return len(self.head) < _HEADER.size

    def advance(self, nbytes: int) -> None:
        """So many bytes of it were sent."""
        in_head = min(nbytes, len(self.head))
        self.head, self.body = self.head[in_head:], self.body[nbytes - in_head :]


class Peer:
    """The connection to one rank. One thread at a time uses it; nothing here waits.

    Attributes:
        rank: The other's rank.
        sock: The socket.
        lost: Why the connection has ended; "" while it is there.
        has_left: Whether the other has left this launch.
        passed: The last agreement of this launch that the other had got through when it left.
        is_blocked: Whether the socket takes no more for now.
        is_held: Whether what comes next has to wait, so that nothing is read.
        mask: What the socket is watched for.
        core: The core of this machine that the other was last seen on, as `current_core`; 0 where it is not known.
    """

    def __init__(self, rank: int, sock: socket.socket) -> None:
        self.rank = rank
        self.sock = sock
        self.lost = ""
        self.has_left = self.is_blocked = self.is_held = False
        self.mask = self.core = 0
        self._is_near = _is_near(sock)
        self.passed = _ALL
        self._seq = self._floor = 0  # the launch; frames of those below the floor are thrown away
        self._out: deque[_Outgoing] = deque()
        self._places: deque[Place] = deque()
        self._buffer = memoryview(bytearray(_BUFFER_NBYTES))
        self._lo = self._hi = 0  # what of the buffer was read from the socket, and not yet looked at
        self._frame: tuple[int, int, int, int, int, int] | None = None  # of which no byte was read yet
        self._into: memoryview | None = None  # where the bytes of the frame that is being read go; None: nowhere
        self._need = 0  # how many of its bytes are still to come

    @property
    def wants(self) -> int:
        """What to watch the socket for."""
        if self.lost:
            return 0
        return (0 if self.is_held else select.POLLIN) | (select.POLLOUT if self.is_blocked else 0)

    @property
    def is_owed(self) -> bool:
        """Whether something of this launch has yet to come."""
        return bool(self._places)

    @property
    def is_owing(self) -> bool:
        """Whether something of this launch has yet to be sent."""
        return bool(self._out) and self._out[-1].seq == self._seq

    @property
    def is_flushed(self) -> bool:
        """Whether nothing at all has yet to be sent."""
        return not self._out or bool(self.lost)

    # ------------------------------------------------------------------------------------------ launches

    def enter(self, seq: int) -> None:
        """Begins a launch."""
        self._seq = self._floor = seq
        self.has_left, self.passed = False, _ALL
        self._look()

    def leave(self) -> None:
        """Ends the launch: what was not begun is forgotten, what was half sent is kept to be finished."""
        self._floor = self._seq + 1
        self._places.clear()
        self._into = None
        if self._out:
            self._out = deque(frame for frame in self._out if frame.is_begun or frame.batch is None)
            for half in self._out:
                if half.batch is not None:
                    half.body, half.batch = memoryview(bytes(half.body)), None
        if self.is_held:
            self._look()

    def part(self, passed: int) -> None:
        """Tells the other, after `leave`, that this rank has not run all of the launch, and what it got through."""
        if self._out and not self._out[-1].is_begun:
            self._out.pop()  # the same of an earlier launch: any later frame says it too
        self.send(LEFT, passed, memoryview(b""), None)

    # ------------------------------------------------------------------------------------------ outward

    def send(self, kind: int, step: int, body: memoryview, batch: Batch | None, crc: int = 0) -> None:
        """Queues a frame, and sends what the socket takes; `body` must not change until it has gone."""
        head = _HEADER.pack(self._seq, kind, current_core(), step, body.nbytes, crc)
        self._out.append(_Outgoing(self._seq, head, body, batch))
        if batch is not None:
            batch.left += 1
        if not self.is_blocked:
            self.push()

    def push(self) -> None:
        """Sends what the socket takes."""
        out = self._out
        try:
            while out and not self.lost:
                frame = out[0]
                frame.advance(self.sock.sendmsg((frame.head, frame.body), (), socket.MSG_NOSIGNAL))
                if frame.head or frame.body:
                    self.is_blocked = True
                    return
                out.popleft()
                if frame.batch is not None:
                    frame.batch.left -= 1
            self.is_blocked = False
        except BlockingIOError:
            self.is_blocked = True
        except OSError as exc:
            self._lose(str(exc))

    # ------------------------------------------------------------------------------------------ inward

    def expect(self, place: Place) -> None:
        """Waits for a frame."""
        place.batch.left += 1
        self._places.append(place)
        if self.is_held:
            self._look()

    def pull(self) -> None:
        """Reads what has come, as far as somebody waits for it."""
        try:
            while not self.is_held and not self.lost:
                if not self._need:
                    into = self._buffer[self._hi :]
                else:
                    into = _SCRATCH[: self._need] if self._into is None else self._into
                nbytes = self.sock.recv_into(into)
                if nbytes == 0:
                    self._lose("the other end has closed it")
                    return
                if not self._need:
                    self._hi += nbytes
                else:
                    self._fill(nbytes)
                self._look()
                if nbytes < into.nbytes:
                    return  # there is no more for now
        except BlockingIOError:
            return
        except OSError as exc:
            self._lose(str(exc))

    def _fill(self, nbytes: int) -> None:
        """So many bytes of the frame that is being read are where they belong."""
        self._need -= nbytes
        if self._into is not None:
            self._into = self._into[nbytes:]
            if not self._need:
                self._into = None
                self._places.popleft().batch.left -= 1

    def _look(self) -> None:
        """Deals with what is in the buffer, frame by frame, up to one that has to wait."""
        self.is_held = False
        while not self.is_held and not self.lost:
            there = self._hi - self._lo
            if self._need:
                nbytes = min(self._need, there)
                if not nbytes:
                    return
                if self._into is not None:
                    self._into[:nbytes] = self._buffer[self._lo : self._lo + nbytes]
                self._lo += nbytes
                self._fill(nbytes)
            elif self._frame is not None:
                self._begin(*self._frame)
            elif there >= _HEADER.size:
                self._frame = _HEADER.unpack_from(self._buffer, self._lo)
                self._lo += _HEADER.size
            else:
                if there:  # the beginning of a header
                    self._buffer[:there] = bytes(self._buffer[self._lo : self._hi])
                self._lo, self._hi = 0, there
                return

    def _begin(self, seq: int, kind: int, core: int, step: int, nbytes: int, crc: int) -> None:
        """Decides where the bytes of a frame go; see the table above."""
        self.core = core if self._is_near else 0
        if kind not in (ARRIVAL, DATA, LEFT) or nbytes > FRAME_NBYTES or crc:
            self._lose(f"what came is no frame of this protocol: kind {kind}, {nbytes} bytes")
        elif seq < self._floor:
            self._frame, self._into, self._need = None, None, nbytes
        elif seq > self._seq:
            self.has_left = self.is_held = True
        elif kind == LEFT:
            self.has_left, self.passed, self._frame = True, step, None
        elif not self._places:
            self.is_held = True
        else:
            self._put(self._places[0], step, nbytes)

    def _put(self, place: Place, step: int, nbytes: int) -> None:
        """Makes a place for a frame of this launch."""
        if place.into is None:
            place.into = memoryview(bytearray(nbytes))
        if step != place.step or nbytes != place.into.nbytes:
            known = f"step {place.step} with {place.into.nbytes} bytes"
            self._lose(f"a frame of step {step} with {nbytes} bytes came where {known} was expected")
            return
        self._frame, self._into, self._need = None, place.into, nbytes
        if not nbytes:
            self._into = None
            self._places.popleft().batch.left -= 1

    def _lose(self, reason: str) -> None:
        if not self.lost:
            self.lost = reason
            with contextlib.suppress(OSError):  # so that the other end hears it, and does not wait
                self.sock.shutdown(socket.SHUT_RDWR)


def _is_near(sock: socket.socket) -> bool:
    """Whether the other end is on this machine, as far as addresses tell."""
    try:
        return bool(sock.getpeername()[:1] == sock.getsockname()[:1])
    except OSError:  # it has ended already
        return False
