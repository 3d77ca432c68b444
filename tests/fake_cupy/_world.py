"""What NCCL knows in one fake: its version, the ids that were given out, and how the ranks of an id come together."""

from __future__ import annotations

import os
import random
import threading
from collections import Counter

from ._clique import Call, Clique, Seat
from ._errors import NcclError
from ._machine import Machine
from ._queues import Queue
from ._state import current

_SHARING_FROM = 23000
_MOST_ON_ONE = 2

SYSTEM_ERROR, INTERNAL_ERROR, INVALID_USAGE = 2, 3, 5


class Group(threading.local):
    """The calls that a thread has made since `groupStart`."""

    def __init__(self) -> None:
        self.depth = 0
        self.error = 0
        self.calls: list[tuple[Queue, Call]] = []


class World:
    """What NCCL knows in one fake: its version, and the ids that were given out."""

    def __init__(self, machine: Machine, version: int, seed: int, *, has_bytes: bool = True) -> None:
        self.machine = machine
        self.version = version
        self.has_bytes = has_bytes
        self.group = Group()
        self.cliques: dict[bytes, Clique | None] = {}
        self.random = random.Random(~seed)
        self._may_share: bool | None = None

    @property
    def may_share(self) -> bool:
        """Whether ranks may share a GPU: read with the first communicator of several ranks, and never again."""
        if self._may_share is None:
            self._may_share = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
        return self._may_share


_worlds: list[World] = []


def install(world: World | None) -> None:
    """Says whose communicators are made; None: nobody's any more."""
    _worlds[:] = [] if world is None else [world]


def world() -> World:
    """Gives the one of the fake that is installed."""
    current()
    return _worlds[-1]


def clique_of(world: World, unique: bytes, ndev: int) -> Clique:
    if unique not in world.cliques:
        raise NcclError(SYSTEM_ERROR)
    found = world.cliques[unique]
    if found is None:
        found = world.cliques[unique] = Clique(world.machine, ndev)
    if found.status is None and found.size != ndev:
        conclude(found, INTERNAL_ERROR)
    return found


def sit(world: World, unique: bytes, seat: Seat) -> Seat:
    clique = seat.clique
    if clique.status is not None:
        raise NcclError(clique.status or SYSTEM_ERROR)  # the id has been used
    if seat.rank in clique.seats:
        conclude(clique, INTERNAL_ERROR)
        raise NcclError(INTERNAL_ERROR)
    clique.seats[seat.rank] = seat
    if clique.size > 1:
        _ = world.may_share
    if len(clique.seats) == clique.size:
        conclude(clique, judge(world, clique))
    return seat


def judge(world: World, clique: Clique) -> int:
    devices = [seat.device for seat in clique.seats.values()]
    may_share = world.may_share and world.version >= _SHARING_FROM
    most = max(Counter(devices).values())
    if most > _MOST_ON_ONE and may_share:
        clique.machine.violate(f"NCCL: {most} ranks on one GPU, of which the real one says that they may hang")
    return INVALID_USAGE if most > 1 and not may_share else 0


def conclude(clique: Clique, status: int) -> None:
    clique.status = status
    clique.machine.wake()


def leave(machine: Machine, seat: Seat) -> None:
    """What follows when a communicator is forgotten: the real one is destroyed, and waits for what it has enqueued."""
    if seat.open:
        machine.violate(f"NCCL: rank {seat.rank} forgot its communicator while its work was under way")
    seat.ended = True
    seat.clique.withdraw(machine, seat)
