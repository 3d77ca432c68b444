"""The sockets under the channel and under backend `tcp`: how they are opened, tuned and described."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import resource
import secrets
import socket
import struct
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from raycollect.core.signals import Allowed, Deferred
from raycollect.errors import ConnectionLostError

# Errors of a process or a machine that can't open one more socket for now.
FULL = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
SPARE_DESCRIPTORS = 4  # stay free for files that are opened briefly

# A dead host is noticed after 5 + 3 * 2 s of silence, or when something sent was not acknowledged for so long as `tune`
# is told. What the platform lacks is left out; a dead process is noticed by the end of its connection in any case.
_TCP_OPTIONS = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3))

# The time for that on connections whose ends read all the time. (Linux counts a full receiver as silence, too.)
USER_TIMEOUT_S = 10.0

_PROBE_S = 2.0  # How long the kernel waits after a keepalive probe, as in `_TCP_OPTIONS`
# The most of a silence before the kernel asked that counts. Data is sent again up to 7 s after a cut that heals in 5 s.
_UNASKED_S = 1.0

_BACKLOG = 1024
_MOST_VIEWS = 256  # that one system call gets, which takes 1024

LOCAL_NBYTES = 2 << 20  # How much a connection within one machine takes before its other end reads

QUIET_S = 1.0  # After how long without any acknowledgement of what was sent a connection counts as cut
# Of `struct tcp_info`: the state of the connection, how often data was sent again in vain, keepalive probes without an
# answer, and how many ms ago data and an acknowledgement came last.
_TCP_INFO = struct.Struct("=BxBB48xII")
_ESTABLISHED = 1

# A forked child (a data loader's worker) would keep connections of its dead parent alive, and hide its death from the
# peers. Nothing but the process itself can know of a fork, hence a table of the process.
_open_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_in_child() -> None:
    for sock in list(_open_sockets):
        with contextlib.suppress(OSError):
            sock.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


def tune(sock: socket.socket, user_timeout_s: float = USER_TIMEOUT_S) -> None:
    """Sets the options that every connection has; OSError: it has ended.

    The other end may leave what was sent unacknowledged, or unread, for `user_timeout_s`. A connection within one
    machine only ends with a process.
    """
    _open_sockets.add(sock)
    if is_local(sock):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LOCAL_NBYTES)
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (*_TCP_OPTIONS, ("TCP_USER_TIMEOUT", int(user_timeout_s * 1000))):
        option = getattr(socket, name, None)
        if option is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


def silent_s(sock: socket.socket, tries: int = 1) -> float:
    """For how many seconds nothing has come although the kernel has asked so often; 0: it has not, or nobody knows.

    The other end's kernel acknowledges, whatever its process does.
    """
    again, probes, quiet_s = _asked(sock)
    return quiet_s if again + probes >= tries else 0.0


def _asked(sock: socket.socket) -> tuple[int, int, float]:
    # How often the kernel has sent data again, and keepalive probes, without an answer; for how long nothing came.
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    except (OSError, AttributeError):  # it is closed; or no Linux
        return 0, 0, 0.0
    if len(info) < _TCP_INFO.size:
        return 0, 0, 0.0
    state, again, probes, data_ms, acknowledged_ms = _TCP_INFO.unpack(info)
    return (again, probes, min(data_ms, acknowledged_ms) / 1000) if state == _ESTABLISHED else (0, 0, 0.0)


def count_silence(sock: socket.socket) -> bool:
    """Has the silence so far count against what is sent next: else that would begin `USER_TIMEOUT_S` anew.

    (Linux sends no keepalive probes while data is under way.) Where nothing was asked before, nothing was to be heard:
    of that time little counts, so that a cut of a few seconds can heal. Returns whether there was any: then the time is
    shorter until this is called again.
    """
    again, probes, quiet_s = _asked(sock)
    if again:  # the kernel counts from when the data was first sent
        return True
    quiet_s = min(quiet_s, _PROBE_S * probes + _UNASKED_S) if probes else 0.0
    option = getattr(socket, "TCP_USER_TIMEOUT", None)
    if option is not None:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, option, int(max(USER_TIMEOUT_S - quiet_s, 1.0) * 1000))
    return quiet_s > 0


def cut_links() -> tuple[str, ...]:
    """The links to other hosts over which this process gets no acknowledgement, as ``10.0.0.1 and 10.0.0.2``."""
    found = set[str]()
    for sock in _all_open():
        if silent_s(sock, tries=2) >= QUIET_S:
            with contextlib.suppress(OSError):
                ends = {str(sock.getsockname()[0]), str(sock.getpeername()[0])}
                found.update([" and ".join(sorted(ends))] if len(ends) > 1 else [])
    return tuple(sorted(found))


def _all_open() -> list[socket.socket]:
    while True:
        try:
            return list(_open_sockets)
        except RuntimeError:  # another thread has added one meanwhile
            continue


def listen(host: str) -> socket.socket:
    """Listens on a free port of one address.

    Raises:
        ValueError: The host means all interfaces.
        OSError: The host is no address of this machine.
    """
    family, kind, number, _, address = socket.getaddrinfo(host or "0.0.0.0", 0, type=socket.SOCK_STREAM)[0]
    if ipaddress.ip_address(str(address[0]).split("%")[0]).is_unspecified:
        raise ValueError(f"raycollect never listens on all interfaces, as {host!r} asks")
    sock = socket.socket(family, kind, number)
    try:
        sock.bind(address)
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    _open_sockets.add(sock)
    return sock


def listen_locally() -> tuple[socket.socket, str] | None:
    """Listens on a fresh name for processes of this machine, without a file; None where that is not possible.

    Any user of the machine can connect, as to a port; not from another network namespace. `connect` takes the name,
    which begins with ``@``, as a host.
    """
    if not sys.platform.startswith("linux"):
        return None
    name = f"@raycollect-{secrets.token_hex(16)}"
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError:  # no descriptor is free
        return None
    try:
        sock.bind(name.replace("@", "\0"))
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except OSError:
        sock.close()
        return None
    _open_sockets.add(sock)
    return sock, name


def is_local(sock: socket.socket) -> bool:
    """Whether it is a connection within one machine that does not go through the network's code."""
    return sock.family == getattr(socket, "AF_UNIX", None)


def connect(host: str, port: int, timeout_s: float) -> socket.socket:
    """Opens a tuned connection, in blocking mode, to a port or to a name of `listen_locally`; ConnectionLostError."""
    peer = f"{host}:{port}"
    if timeout_s <= 0:
        raise ConnectionLostError(detail="no time was left to connect", peer=peer)
    failed: OSError | None = None
    try:
        if host.startswith("@"):
            return _connected(socket.AF_UNIX, socket.SOCK_STREAM, 0, host.replace("@", "\0"), timeout_s)
        for family, kind, number, _, place in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            try:
                return _connected(family, kind, number, place, timeout_s)
            except OSError as exc:
                failed = exc
    except OSError as exc:
        failed = exc
    try:
        raise ConnectionLostError(detail=f"can't connect: {failed}", peer=peer) from failed
    finally:
        del failed  # whose traceback holds this frame


def _connected(family: int, kind: int, number: int, place: Any, timeout_s: float) -> socket.socket:
    with Deferred():  # so that a signal leaves no socket open
        sock = socket.socket(family, kind, number)
        try:
            sock.settimeout(timeout_s)
            with Allowed():
                sock.connect(place)
            tune(sock)
        except BaseException:
            sock.close()
            raise
        return sock


def shortage(needed: int) -> str:
    """Why this process can't open so many files, or "". A library that is refused one may end the process."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return ""
    try:
        free = limit - sum(int(one.name) < limit for one in Path("/proc/self/fd").iterdir()) + 1  # the one to look
    except OSError as exc:
        if exc.errno not in FULL:  # there is no such folder here
            return ""
        free = 0
    if free >= needed + SPARE_DESCRIPTORS:
        return ""
    told = f"{free} of its {limit} file descriptors are free, and {needed + SPARE_DESCRIPTORS} are needed"
    return f"{told}: raise the limit before the process starts (ulimit -n), or close files and connections there"


def wake_pair() -> tuple[socket.socket, socket.socket]:
    """Makes the pipe that wakes a selector: (end that is watched, end that is written)."""
    pair = socket.socketpair()
    for sock in pair:
        sock.setblocking(False)
        _open_sockets.add(sock)
    return pair


def peer_of(sock: socket.socket) -> str:
    """Describes the other end, as ``host:port``."""
    if is_local(sock):
        return "a process of this machine"
    try:
        host, port = sock.getpeername()[:2]
    except OSError:
        return "unknown peer"
    return f"{host}:{port}"


def close(socks: Iterable[socket.socket]) -> None:
    """Closes sockets, whatever state they are in."""
    for sock in socks:
        with contextlib.suppress(OSError):
            sock.close()


def flat(view: memoryview) -> memoryview:
    """Views C-contiguous memory as bytes, without a copy; raises TypeError otherwise."""
    return view.cast("B") if view.nbytes else memoryview(bytearray())


def pass_on(views: Iterable[memoryview], move: Callable[[list[memoryview]], int]) -> None:
    """Sends or fills all of `views`, in order: `move` gets some of them, and returns its count of bytes."""
    left = deque(view for view in views if view.nbytes)
    while left:
        nbytes = move(list(islice(left, _MOST_VIEWS)))
        while left and nbytes >= left[0].nbytes:
            nbytes -= left.popleft().nbytes
        if nbytes:
            left[0] = left[0][nbytes:]
