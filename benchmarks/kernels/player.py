"""One rank of one contender, as its worker sees it."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from benchmarks.kernels.operands import Array, Operands
from raycollect.core.model import Launch
from raycollect.errors import CollectiveTimeoutError

TIMEOUT_S = 60.0
_POLL_S = 0.002


@dataclass(frozen=True, slots=True)
class Place:
    """Where a player is.

    Attributes:
        rank: Its rank.
        ranks: How many there are.
        directory: A directory that the ranks of its team share.
    """

    rank: int
    ranks: int
    directory: Path


class Player(Protocol):
    """One rank of one contender. Made with a `Place`; raises `Skipped`, or ImportError, where it can't play."""

    def empty(self, size: int) -> Array:
        """Makes an array of so many float32, in the kind of memory that the contender works on."""
        ...

    def bind(self, operands: Operands) -> Callable[[], Any]:
        """Gives a function that does `operands.op` once, and returns when this rank's part is done."""
        ...

    def close(self) -> None:
        """Gives everything back."""
        ...


def ordinary(size: int) -> Array:
    """An array of so many float32 in ordinary memory."""
    return np.empty(size, np.float32)


class FileRendezvous:
    """A `raycollect.core.protocols.Rendezvous` in a directory; used while joining only."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def put(self, name: str, value: bytes) -> None:
        """Publishes a value."""
        unfinished = self._directory / f"{name}.{os.getpid()}"
        unfinished.write_bytes(value)
        unfinished.rename(self._directory / f"value.{name}")

    def get(self, name: str, timeout_s: float = TIMEOUT_S) -> bytes:
        """Waits for a value."""
        until_s = time.monotonic() + timeout_s
        while time.monotonic() < until_s:
            try:
                return (self._directory / f"value.{name}").read_bytes()
            except FileNotFoundError:
                time.sleep(_POLL_S)
        raise CollectiveTimeoutError(detail=f"nobody published {name}", timeout_s=timeout_s)


class UnixStar:
    """A `raycollect.core.protocols.Exchange` over Unix sockets, rank 0 in the middle.

    Stands for the star over TCP that relays arrivals for backends without a consistency check of their own; it is
    faster than that.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self._address = str(place.directory / "star")
        self._peers: list[socket.socket] = []
        if place.rank == 0:
            self._listener = self._socket()
            self._listener.bind(self._address)
            self._listener.listen(place.ranks)

    def __call__(self, launch: Launch, arrival: bytes) -> Sequence[bytes]:
        """Gives one's arrival and gets everybody's."""
        if not self._peers:
            self._connect()
        if self._place.rank:
            self._peers[0].send(arrival)
            return _unpack(self._peers[0].recv(1 << 16))
        arrivals = [arrival, *(peer.recv(1 << 16) for peer in self._peers)]
        packed = b"".join(struct.pack("<I", len(one)) + one for one in arrivals)
        for peer in self._peers:
            peer.send(packed)
        return arrivals

    def abort(self, seq: int) -> None:
        """Nothing: a benchmark is not aborted."""

    def _connect(self) -> None:
        if self._place.rank:
            self._peers = [self._socket()]
            self._peers[0].connect(self._address)
            self._peers[0].send(struct.pack("<I", self._place.rank))
            return
        came = [self._listener.accept()[0] for _ in range(self._place.ranks - 1)]
        for peer in came:
            peer.settimeout(TIMEOUT_S)
        self._peers = sorted(came, key=lambda peer: int(struct.unpack("<I", peer.recv(4))[0]))

    @staticmethod
    def _socket() -> socket.socket:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        made.settimeout(TIMEOUT_S)
        return made


def _unpack(packed: bytes) -> list[bytes]:
    arrivals, at = [], 0
    while at < len(packed):
        (nbytes,) = struct.unpack_from("<I", packed, at)
        arrivals.append(packed[at + 4 : at + 4 + nbytes])
        at += 4 + nbytes
    return arrivals
