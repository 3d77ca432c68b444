"""One connection of a `tcp` group: queued frames, and posted receives.

A frame is ``launch:8 | kind:2 | core:2 | step:4 | nbytes:4`` and the bytes. `step` counts the agreements and kernels of
a launch. Frames of one pair arrive in the order of the posted receives, so they need no other tags.

=========================  =====================================================================================
an incoming frame is of
=========================  =====================================================================================
an earlier launch          this rank has left it: the bytes are dropped
this launch, LEFT          the peer has left it before its end
this launch, HERE          the peer responds, in a kernel of another library; see `TcpMesh.silent`
this launch, AHEAD         sent before the agreement: dropped if another agreement comes next, or if its size differs
                           from the expected size, so that the launch is refused; else as DATA
this launch, ARRIVAL       fills the next posted receive; stays in the socket without one, or if that is for data
this launch, DATA          fills the next posted receive; stays in the socket without one
a later launch             the peer has left this one; stays in the socket until this rank begins that launch
=========================  =====================================================================================

So memory holds only data of posted receives, and a rank that leaves early keeps its position in the stream: it drops
incoming data, and finishes a half-sent frame later, from a copy.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections import deque
from dataclasses import dataclass

from raycollect.core import sockets

ARRIVAL, DATA, LEFT, HERE, AHEAD = 1, 2, 3, 4, 5

FRAME_NBYTES = 1 << 20  # The longest frame of any kind
_HEADER = struct.Struct("<QHHII")
_BUFFER_NBYTES = 4096
_ALL = 1 << 32
_SCRATCH = memoryview(bytearray(64 * 1024))  # Receives dropped bytes; never read


class FrameBatch:
    """Frames that complete together."""

    __slots__ = ("left",)

    def __init__(self) -> None:
        self.left: int = 0  # frames not yet sent or received


@dataclass(slots=True, eq=False)
class PostedReceive:
    """The destination of a frame."""

    step: int
    into: memoryview | None  # None: the sender chooses the length, and it is set to the received bytes
    batch: FrameBatch


@dataclass(slots=True, eq=False)
class _Outgoing:
    """A frame that is not yet completely sent."""

    seq: int
    head: bytes | memoryview
    body: memoryview
    batch: FrameBatch | None
    left: int  # how many of its bytes are still to be sent

    @property
    def is_begun(self) -> bool:
        return len(self.head) < _HEADER.size

    def advance(self, nbytes: int) -> None:
        """Drops the bytes that were sent."""
        in_head = min(nbytes, len(self.head))
        self.head, self.body, self.left = self.head[in_head:], self.body[nbytes - in_head :], self.left - nbytes


class PeerConnection:
    """The connection to one rank. One thread at a time uses it; nothing here waits."""

    def __init__(self, rank: int, sock: socket.socket) -> None:
        self.rank = rank
        self.sock = sock
        self.lost: str = ""  # why the connection has ended, or ""
        self.has_left: bool = False  # the peer has left this launch
        self.is_here: bool = False  # the peer has sent HERE in this launch
        self.is_blocked: bool = False  # the socket's send buffer is full
        self.is_held: bool = False  # the next frame has to wait, so the socket is not read
        self.mask: int = 0  # the registered poll events
        self.core: int = 0  # the peer's last known core on this machine, as `current_core`; 0 if unknown
        self._is_near = _is_near(sock)
        self.passed: int = _ALL  # the last agreement of this launch that the peer passed before it left
        self._core = 0  # the core of this rank when it began the launch
        self._seq = self._floor = 0  # the launch; frames of launches below the floor are dropped
        self._out: deque[_Outgoing] = deque()
        self._posted: deque[PostedReceive] = deque()
        self._buffer = memoryview(bytearray(_BUFFER_NBYTES))
        self._lo = self._hi = 0  # the unprocessed bytes of the buffer
        self._frame: tuple[int, int, int, int, int] | None = None  # a header whose body was not read yet
        self._into: memoryview | None = None  # the destination of the current frame; None: dropped
        self._need = 0  # the missing bytes of the current frame

    def owes(self, step: int) -> bool:
        """Whether this rank still waits for frames of steps up to this one."""
        return bool(self._posted) and self._posted[0].step <= step

    @property
    def is_owing(self) -> bool:
        """Whether frames of this launch are not sent yet."""
        return bool(self._out) and self._out[-1].seq == self._seq

    @property
    def is_flushed(self) -> bool:
        """Whether all frames are sent."""
        return not self._out or bool(self.lost)

    def enter(self, seq: int, core: int) -> None:
        """Begins a launch, on that core; its frames are processed when their receives are posted."""
        if self._floor <= self._seq:
            self.leave()
        self._seq, self._floor, self._core = seq, seq, core
        self.has_left, self.is_here, self.passed = False, False, _ALL

    def leave(self) -> None:
        """Ends the launch: drops frames that were not begun, and keeps a half-sent one to finish it."""
        self._floor = self._seq + 1
        self._posted.clear()
        self._into = None
        if self._hi and not self.is_held:  # an error has interrupted `_look`
            self._look()
        if self._out:
            self._out = deque(frame for frame in self._out if frame.is_begun or frame.batch is None)
            for half in self._out:
                if half.batch is not None:
                    half.body, half.batch = memoryview(bytes(half.body)), None

    def forget(self) -> None:
        """Cancels the posted receives of this launch."""
        self._posted.clear()
        self._into = None

    def part(self, passed: int) -> None:
        """Tells the peer, after `leave`, that this rank left the launch early, and its last passed agreement."""
        if self._out and not self._out[-1].is_begun:
            self._out.pop()  # LEFT of an earlier launch, which any later frame implies
        self.send(LEFT, passed, memoryview(b""), None)

    def send(self, kind: int, step: int, body: memoryview, batch: FrameBatch | None) -> None:
        """Queues a frame, and sends as much as the socket takes; `body` must not change until it is sent."""
        self.queue(kind, step, body, batch)
        if not self.is_blocked:
            self.push()

    def queue(self, kind: int, step: int, body: memoryview, batch: FrameBatch | None) -> None:
        """Queues a frame, to be sent with the next one; `body` must not change until it is sent."""
        seq, nbytes = self._seq, body.nbytes
        head = _HEADER.pack(seq, kind, self._core, step, nbytes)
        self._out.append(_Outgoing(seq, head, body, batch, _HEADER.size + nbytes))
        if batch is not None:
            batch.left += 1

    def push(self) -> None:
        """Sends as much as the socket takes."""
        out = self._out
        try:
            while out and not self.lost:
                frames, parts = [out[0]], [out[0].head, out[0].body]
                if len(out) > 1:  # an arrival, and data ahead of the kernel
                    frames.append(out[1])
                    parts += out[1].head, out[1].body
                sent = self.sock.sendmsg(parts, (), socket.MSG_NOSIGNAL)
                for frame in frames:
                    if sent < frame.left:
                        frame.advance(sent)
                        self.is_blocked = True
                        return
                    sent -= frame.left
                    out.popleft()
                    if frame.batch is not None:
                        frame.batch.left -= 1
            self.is_blocked = False
        except BlockingIOError:
            self.is_blocked = True
        except OSError as exc:
            self.lose(str(exc))

    def expect(self, receive: PostedReceive) -> bool:
        """Posts the receive of the next frame; returns whether a waiting frame was processed."""
        receive.batch.left += 1
        self._posted.append(receive)
        was_held = self.is_held
        if was_held:
            self._look()
        return was_held

    def pull(self) -> None:
        """Reads frames, up to one without a posted receive."""
        try:
            while not self.is_held and not self.lost:
                if not self._need:
                    into = self._buffer[self._hi :]
                else:
                    into = _SCRATCH[: self._need] if self._into is None else self._into
                nbytes = self.sock.recv_into(into)
                if nbytes == 0:
                    self.lose("the other end has closed it")
                    return
                if not self._need:
                    self._hi += nbytes
                else:
                    self._fill(nbytes)
                self._look()
                if nbytes < into.nbytes:
                    return  # the socket is empty
        except BlockingIOError:
            return
        except OSError as exc:
            self.lose(str(exc))

    def _fill(self, nbytes: int) -> None:
        self._need -= nbytes
        if self._into is not None:
            self._into = self._into[nbytes:]
            if not self._need:
                self._into = None
                self._posted.popleft().batch.left -= 1

    def _look(self) -> None:
        # Handles the frames in the buffer, up to one that has to wait.
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
                self._frame = frame = _HEADER.unpack_from(self._buffer, self._lo)
                self._lo += _HEADER.size
                self._begin(*frame)
            else:
                if there:  # an incomplete header
                    self._buffer[:there] = bytes(self._buffer[self._lo : self._hi])
                self._lo, self._hi = 0, there
                return

    def _begin(self, seq: int, kind: int, core: int, step: int, nbytes: int) -> None:
        # Chooses the destination of a frame; see the table above.
        self.core = core if self._is_near else 0
        if not ARRIVAL <= kind <= AHEAD or nbytes > FRAME_NBYTES:
            self.lose(f"received an invalid frame: kind {kind}, {nbytes} bytes")
        elif seq < self._floor:
            self._frame, self._into, self._need = None, None, nbytes
        elif seq > self._seq:
            self.has_left = self.is_held = True
        elif kind == LEFT:
            self.has_left, self.passed, self._frame = True, step, None
        elif kind == HERE:
            self.is_here, self._frame = True, None
        elif not self._posted:
            self.is_held = True
        else:
            self._put(self._posted[0], kind, step, nbytes)

    def _put(self, receive: PostedReceive, kind: int, step: int, nbytes: int) -> None:
        into = receive.into
        if kind == ARRIVAL and into is not None:  # posted for data ahead of a kernel, but another agreement follows
            self.is_held = True
            return
        if kind == AHEAD and step == receive.step and (into is None or nbytes != into.nbytes):
            into = None  # another agreement follows, or all ranks refuse this launch
        elif into is None:
            into = receive.into = memoryview(bytearray(nbytes))
        if step != receive.step or (into is not None and nbytes != into.nbytes):
            expected = f"step {receive.step} with {0 if into is None else into.nbytes} bytes"
            self.lose(f"received a frame of step {step} with {nbytes} bytes, expected {expected}")
            return
        self._frame, self._into, self._need = None, into, nbytes
        if not nbytes and into is not None:
            self._fill(0)

    def lose(self, reason: str) -> None:
        """Ends the connection, unless it has already ended."""
        if not self.lost:
            self.lost = reason
            with contextlib.suppress(OSError):  # notifies the peer, which else might wait
                self.sock.shutdown(socket.SHUT_RDWR)


def _is_near(sock: socket.socket) -> bool:
    if sockets.is_local(sock):
        return True
    try:
        return bool(sock.getpeername()[:1] == sock.getsockname()[:1])
    except OSError:  # already disconnected
        return False
