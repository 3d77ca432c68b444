"""The memory segment that the co-located members of a group share, and how they get it.

Rank 0 makes a memfd (it has no name, /dev/shm does not limit it, and the kernel frees it with the last process),
seals it against resizing (a shrinking file kills its readers by SIGBUS), reserves its pages (lack of memory fails here,
not as a later SIGBUS) and passes the descriptor over a Unix socket. The socket has an abstract name, which the kernel
frees with it, so nothing is left on disk if rank 0 is killed. Both ends must belong to the same user, and the peer must
know a random token.
"""

from __future__ import annotations

import array
import hmac
import mmap
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from raycollect.backends.joining import gathered, not_joined
from raycollect.core import shared_memory
from raycollect.core.codec import Codec
from raycollect.core.model import GroupSpec
from raycollect.core.protocols import Rendezvous
from raycollect.core.sockets import local_address
from raycollect.errors import BackendUnavailableError

JOIN_TIMEOUT_S = 45.0  # Less than the minute of a declaration, which can then report who was missing
HELLO_TIMEOUT_S = 2.0  # How long one client may be silent while others queue; other users are not served at all
_NAME = "shm.segment"
_TOKEN_NBYTES = 32
_HELLO = struct.Struct(f"<{_TOKEN_NBYTES}sI")
_PEER = struct.Struct("3i")  # process, user and group, as SO_PEERCRED has them
_RETRY_S = 0.02


@dataclass(frozen=True, slots=True)
class _Offer:
    """What rank 0 tells the others."""

    socket: str = ""
    token: bytes = b""  # what its socket wants to hear
    error: str = ""  # why there is no segment


_OFFERS = Codec[_Offer](_Offer, "offer of a segment")


def unavailable(spec: GroupSpec, detail: str) -> BackendUnavailableError:
    """Makes the error for members that can't use shared memory."""
    return BackendUnavailableError(group_name=spec.name, detail=f"backend 'shm': {detail}")


def client_segment(spec: GroupSpec, rank: int, rendezvous: Rendezvous, nbytes: int) -> mmap.mmap:
    """Maps rank 0's segment, on every other rank; raises BackendUnavailableError if there is none or no access."""
    offers, missing = gathered(_OFFERS, rendezvous, _NAME, (0,), time.monotonic() + JOIN_TIMEOUT_S)
    if missing:
        raise not_joined(spec, missing, JOIN_TIMEOUT_S)
    offer = offers[0]
    if offer.error:
        raise unavailable(spec, offer.error)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
            link.settimeout(JOIN_TIMEOUT_S)
            _connect(link, local_address(offer.socket))
            if not _is_of_this_user(link):
                raise PermissionError("the socket of rank 0 is another user's")
            link.sendall(_HELLO.pack(offer.token, rank))
            fd = _receive_fd(link)
        try:
            return _map(fd, nbytes)
        finally:
            os.close(fd)
    except OSError as exc:
        raise unavailable(spec, f"rank {rank} can't map the segment of rank 0: {exc}") from exc


def server_segment(
    spec: GroupSpec, rendezvous: Rendezvous, nbytes: int, prepare: Callable[[mmap.mmap], None]
) -> mmap.mmap:
    """Makes the segment on rank 0 and passes it to all other ranks; `prepare` sets it up before others map it.

    Raises:
        BackendUnavailableError: There is no memfd, memory or descriptor for it, or a member did not come for it.
    """
    with ExitStack() as left:
        name, listener = f"raycollect-{secrets.token_hex(16)}", None
        try:
            fd = _make(nbytes)
            left.callback(os.close, fd)
            segment = _map(fd, nbytes)
            prepare(segment)
            if spec.world_size > 1:
                listener = left.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                listener.bind(local_address(name))
                listener.listen(spec.world_size)
        except (OSError, AttributeError) as exc:
            text = f"rank 0 can't make {nbytes} bytes of shared memory: {exc}"
            if spec.world_size > 1:
                rendezvous.put(f"{_NAME}.0", _OFFERS.encode(_Offer(error=text)))
            raise unavailable(spec, text) from exc
        if listener is not None:
            token = secrets.token_bytes(_TOKEN_NBYTES)
            rendezvous.put(f"{_NAME}.0", _OFFERS.encode(_Offer(name, token)))
            _hand_out(spec, listener, token, fd)
        return segment


def _make(nbytes: int) -> int:
    fd = shared_memory.create("raycollect", nbytes)
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _map(fd: int, nbytes: int) -> mmap.mmap:
    # Before Python 3.13 an mmap keeps a descriptor of its own; the seals make that harmless.
    if not shared_memory.is_sealed(fd, nbytes):
        raise OSError("the segment is not sealed, or has another size: are the versions of raycollect equal?")
    return mmap.mmap(fd, nbytes)


def _hand_out(spec: GroupSpec, listener: socket.socket, token: bytes, fd: int) -> None:
    waiting = set(range(1, spec.world_size))
    until_s = time.monotonic() + JOIN_TIMEOUT_S
    while waiting:
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            raise unavailable(spec, f"ranks {sorted(waiting)} did not come for the segment in {JOIN_TIMEOUT_S:g} s")
        listener.settimeout(left_s)
        try:
            link, _ = listener.accept()
        except TimeoutError:
            continue
        except OSError as exc:  # such as for lack of descriptors
            raise unavailable(spec, f"rank 0 can't hand out its segment to ranks {sorted(waiting)}: {exc}") from exc
        with link:
            link.settimeout(HELLO_TIMEOUT_S)
            try:
                waiting.discard(_hand_to(link, token, fd))
            except OSError:
                continue  # a stranger, or a client that hung up; ranks still missing are named at the deadline


def _hand_to(link: socket.socket, token: bytes, fd: int) -> int:
    # Returns the rank of the client, or -1 if it was refused.
    if not _is_of_this_user(link):
        return -1
    hello = b""
    until_s = time.monotonic() + HELLO_TIMEOUT_S
    while len(hello) < _HELLO.size:
        more = link.recv(_HELLO.size - len(hello))
        if not more or time.monotonic() > until_s:
            return -1
        hello += more
    given, rank = _HELLO.unpack(hello)
    if not hmac.compare_digest(given, token):
        return -1
    link.sendmsg([b"s"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))])
    return int(rank)


def _is_of_this_user(link: socket.socket) -> bool:
    _, uid, _ = _PEER.unpack(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return bool(uid == os.geteuid())


def _connect(link: socket.socket, address: str) -> None:
    until_s = time.monotonic() + JOIN_TIMEOUT_S
    while True:
        try:
            link.connect(address)
            return
        except BlockingIOError:  # rank 0's queue is full for the moment
            if time.monotonic() > until_s:
                raise
            time.sleep(_RETRY_S)


def _receive_fd(link: socket.socket) -> int:
    fds = array.array("i")
    _, ancillary, _, _ = link.recvmsg(1, socket.CMSG_SPACE(fds.itemsize), socket.MSG_CMSG_CLOEXEC)
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    if len(fds) != 1:
        raise OSError("rank 0 gave no descriptor")
    return fds[0]
