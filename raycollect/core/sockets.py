"""The sockets of the channel and of backend `tcp`: opening, options and descriptions."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import resource
import secrets
import socket
import struct
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from raycollect.core.signals import Allowed, Deferred
from raycollect.errors import ConnectionLostError

# Errors of a process or a machine that can't open another socket for now.
FULL = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
SPARE_DESCRIPTORS = 4  # left free for files that are opened briefly

# A dead host is detected after 5 + 3 * 2 s of silence, or when sent data was not acknowledged within the timeout of
# `tune`; a dead process is detected by the end of its connection.
_TCP_OPTIONS = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 3))

# The default of that timeout, for connections whose ends always read. (Linux counts a full receiver as silence, too.)
USER_TIMEOUT_S = 10.0

_PROBE_S = 2.0  # How long the kernel waits after a keepalive probe, as in `_TCP_OPTIONS`
# The most that counts of a silence before the first probe. Data is resent up to 7 s after an outage of 5 s.
_UNASKED_S = 1.0

_BACKLOG = 1024
_MOST_VIEWS = 256  # views per system call, whose limit is 1024

LOCAL_NBYTES = 2 << 20  # The send buffer of a connection within one machine

QUIET_S = 1.0  # A connection counts as cut after this time without an acknowledgement of sent data
# Of `struct tcp_info`: the state of the connection, the retransmits, the unanswered keepalive probes, and the ms since
# the last data and the last acknowledgement.
_TCP_INFO = struct.Struct("=BxBB48xII")
_ESTABLISHED = 1

# A forked child (a data loader's worker) would keep connections of its dead parent open, and hide its death from the
# peers. Only the process itself sees a fork, hence a table of the process.
_open_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_in_child() -> None:
    for sock in list(_open_sockets):
        with contextlib.suppress(OSError):
            sock.close()


os.register_at_fork(after_in_child=_close_in_child)


def tune(sock: socket.socket, user_timeout_s: float = USER_TIMEOUT_S) -> None:
    """Sets the options of every connection; raises OSError if it has ended.

    The peer may leave sent data unacknowledged, or unread, for `user_timeout_s`. A connection within one machine only
    ends with a process.
    """
    _open_sockets.add(sock)
    if is_local(sock):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LOCAL_NBYTES)
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (*_TCP_OPTIONS, (socket.TCP_USER_TIMEOUT, int(user_timeout_s * 1000))):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


def silent_s(sock: socket.socket, tries: int = 1) -> float:
    """The seconds of silence after at least `tries` retransmits and probes of the kernel; 0 if fewer, or unknown.

    The peer's kernel acknowledges, independently of its process.
    """
    again, probes, quiet_s = _unacknowledged(sock)
    return quiet_s if again + probes >= tries else 0.0


def _unacknowledged(sock: socket.socket) -> tuple[int, int, float]:
    # The retransmits and keepalive probes without an answer; the seconds of silence.
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    except OSError:  # closed
        return 0, 0, 0.0
    if len(info) < _TCP_INFO.size:
        return 0, 0, 0.0
    state, again, probes, data_ms, acknowledged_ms = _TCP_INFO.unpack(info)
    return (again, probes, min(data_ms, acknowledged_ms) / 1000) if state == _ESTABLISHED else (0, 0, 0.0)


def count_silence(sock: socket.socket) -> bool:
    """Subtracts the silence so far from the timeout of the next data, which else would get all of `USER_TIMEOUT_S`.

    (Linux sends no keepalive probes while data is in flight.) Silence before the first probe proves little, so little
    of it counts, and an outage of a few seconds can heal. Returns whether there was any silence: then the timeout is
    shorter until the next call.
    """
    again, probes, quiet_s = _unacknowledged(sock)
    if again:  # the kernel counts from the first transmission
        return True
    quiet_s = min(quiet_s, _PROBE_S * probes + _UNASKED_S) if probes else 0.0
    with contextlib.suppress(OSError):
        left_ms = int(max(USER_TIMEOUT_S - quiet_s, 1.0) * 1000)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, left_ms)
    return quiet_s > 0


def cut_links() -> tuple[str, ...]:
    """The links to other hosts without acknowledgements, as ``10.0.0.1 and 10.0.0.2``."""
    links = set[str]()
    for sock in _all_open():
        if silent_s(sock, tries=2) >= QUIET_S:
            with contextlib.suppress(OSError):
                ends = {str(sock.getsockname()[0]), str(sock.getpeername()[0])}
                links.update([" and ".join(sorted(ends))] if len(ends) > 1 else [])
    return tuple(sorted(links))


def _all_open() -> list[socket.socket]:
    while True:
        try:
            return list(_open_sockets)
        except RuntimeError:  # another thread has added a socket
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
    """Listens on a fresh abstract name for processes of this machine; None if that is not possible.

    Any user of the machine can connect, as to a port, but only in the same network namespace. `connect` takes the name,
    which begins with ``@``, as a host.
    """
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
    """Whether it is a Unix socket, and so a connection within one machine."""
    return sock.family == socket.AF_UNIX


def connect(host: str, port: int, timeout_s: float) -> socket.socket:
    """Opens a connection, in blocking mode, to a port or to a name of `listen_locally`; raises ConnectionLostError."""
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
        del failed  # its traceback holds this frame


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
    """Says why this process can't open `needed` files, or "". Some libraries end the process if they can't."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return ""
    try:
        free = limit - sum(int(fd.name) < limit for fd in Path("/proc/self/fd").iterdir()) + 1  # of `iterdir`
    except OSError as exc:
        if exc.errno not in FULL:  # this system has no such folder
            return ""
        free = 0
    if free >= needed + SPARE_DESCRIPTORS:
        return ""
    detail = f"{free} of its {limit} file descriptors are free, and {needed + SPARE_DESCRIPTORS} are needed"
    return f"{detail}: raise the limit before the process starts (ulimit -n), or close files and connections there"


def wake_pair() -> tuple[socket.socket, socket.socket]:
    """Creates the socket pair that wakes a selector: (watched end, written end)."""
    pair = socket.socketpair()
    for sock in pair:
        sock.setblocking(False)
        _open_sockets.add(sock)
    return pair


def peer_of(sock: socket.socket) -> str:
    """Describes the peer, as ``host:port``."""
    if is_local(sock):
        return "a process of this machine"
    try:
        host, port = sock.getpeername()[:2]
    except OSError:
        return "unknown peer"
    return f"{host}:{port}"


def close(socks: Iterable[socket.socket]) -> None:
    """Closes sockets in any state."""
    for sock in socks:
        with contextlib.suppress(OSError):
            sock.close()


def flat(view: memoryview) -> memoryview:
    """Views C-contiguous memory as bytes, without a copy; raises TypeError otherwise."""
    return view.cast("B") if view.nbytes else memoryview(bytearray())


def pass_on(views: Iterable[memoryview], move: Callable[[list[memoryview]], int]) -> None:
    """Sends or fills all of `views`, in order: `move` gets some of them, and returns the bytes that it moved."""
    left = deque(view for view in views if view.nbytes)
    while left:
        nbytes = move(list(islice(left, _MOST_VIEWS)))
        while left and nbytes >= left[0].nbytes:
            nbytes -= left.popleft().nbytes
        if nbytes:
            left[0] = left[0][nbytes:]
