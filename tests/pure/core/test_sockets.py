"""What sockets tell of a silent network. `tests/hosts` cuts real links."""

from __future__ import annotations

import errno
import socket
import struct

import pytest

from raycollect.core import sockets
from raycollect.errors import CollectiveTimeoutError, from_wire, to_wire


class Silent:
    """A socket whose kernel says that it waits for an acknowledgement, for so many seconds."""

    def __init__(self, *, probes: int = 0, again: int = 0, silent_s: float = 0.0, state: int = 1) -> None:
        ms = int(silent_s * 1000)
        self.info = struct.pack("=4B48xII", state, 0, again, probes, ms + 5, ms)
        self.options: dict[int, int] = {}

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        assert (level, option) == (socket.IPPROTO_TCP, socket.TCP_INFO)
        return self.info[:size]

    def setsockopt(self, level: int, option: int, value: int) -> None:
        self.options[option] = value

    def getsockname(self):
        return "10.0.0.2", 1

    def getpeername(self):
        return "10.0.0.1", 2


def test_a_connection_is_silent_only_while_it_waits_for_an_acknowledgement():
    assert sockets.silent_s(Silent(silent_s=50)) == 0, "nothing is under way"
    assert sockets.silent_s(Silent(silent_s=3, probes=1)) == 3
    assert sockets.silent_s(Silent(silent_s=4, again=2)) == 4
    assert sockets.silent_s(Silent(silent_s=4, again=2, state=7)) == 0, "it is closed"


def test_the_kernel_tells_it_of_a_real_connection():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sock:
        sockets.tune(sock)
        assert sockets.silent_s(sock) == 0
        assert sockets.count_silence(sock) is False
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == sockets.USER_TIMEOUT_S * 1000
        assert sockets.cut_links() == ()
    assert sockets.silent_s(sock) == 0


def test_a_connection_is_tuned_as_it_is_opened_and_one_within_the_machine_needs_no_network():
    with sockets.listen("127.0.0.1") as server, sockets.listen("127.0.0.1") as other:
        assert server.getsockname() != other.getsockname(), "each has a free port"
        with sockets.connect(*server.getsockname(), 5.0) as sock:
            names = ("TCP_NODELAY", "TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
            options = [sock.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in names]
            assert options == [1, 5, 2, 3, 10_000]
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert sockets.peer_of(sock) == f"127.0.0.1:{server.getsockname()[1]}"
    server, name = sockets.listen_locally()
    with server, socket.socket(socket.AF_UNIX) as plain, sockets.connect(name, 0, 5.0) as sock:
        options = socket.SOL_SOCKET, socket.SO_SNDBUF
        assert sock.getsockopt(*options) > plain.getsockopt(*options)
        assert sockets.peer_of(sock) == "a process of this machine"
    for host in ("", "0.0.0.0", "::"):
        with pytest.raises(ValueError, match="never listens on all interfaces"):
            sockets.listen(host)


@pytest.mark.parametrize(
    ("silent_s", "probes", "left_ms"),
    [
        (0.0, {}, 10_000),
        (50.0, {}, 10_000),
        (7.0, {"probes": 2}, 5_000),
        (11.0, {"probes": 3}, 3_000),
    ],
)
def test_a_question_does_not_begin_the_time_of_a_silent_host_anew(silent_s, probes, left_ms):
    sock = Silent(silent_s=silent_s, **probes)
    assert sockets.count_silence(sock) is bool(probes)
    assert sock.options == {socket.TCP_USER_TIMEOUT: left_ms}


def test_the_time_of_what_is_under_way_is_not_counted_twice():
    """The kernel counts from when it was first sent."""
    sock = Silent(silent_s=4.0, again=4)
    assert sockets.count_silence(sock)
    assert sock.options == {}


def test_links_without_acknowledgements_are_named_once(monkeypatch):
    once = Silent(silent_s=9, probes=1)  # it may be that the answer is on its way
    silent = [Silent(silent_s=3, probes=2), Silent(silent_s=9, again=4), once]
    monkeypatch.setattr(sockets, "_open_sockets", silent)
    assert sockets.cut_links() == ("10.0.0.1 and 10.0.0.2",)
    monkeypatch.setattr(sockets, "_open_sockets", silent[2:])
    assert sockets.cut_links() == ()


def test_the_error_of_a_cut_link_names_it_and_blames_no_rank():
    error = CollectiveTimeoutError(op="allreduce", missing=(2,), timeout_s=8, cut=("10.0.0.1 and 10.0.0.2",))
    error.detail = error.describe_missing(["rank 2"], [])
    for copy in (error, from_wire(to_wire(error))):
        assert "Nothing was acknowledged between 10.0.0.1 and 10.0.0.2" in str(copy)
        assert "may be healthy" in str(copy)
        assert "raise timeout_s" not in str(copy)
    assert "raise timeout_s" in str(CollectiveTimeoutError(missing=(2,)))


def test_who_has_no_descriptor_for_a_name_does_without(monkeypatch):
    def full(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socket, "socket", full)
    assert sockets.listen_locally() is None
