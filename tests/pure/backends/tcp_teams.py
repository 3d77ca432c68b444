"""What tests of `tcp` share: groups of ranks in threads, and a wait for what another thread does."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from raycollect.backends.tcp import communicator as tcp
from raycollect.core.model import GroupSpec
from raycollect.core.protocols import Joining
from tests.pure.communicators import MemoryExchange, MemoryRendezvous, MemoryStar, ThreadTeam

NO_EXCHANGE = MemoryExchange(MemoryStar(), 0)


def spec_of(world_size: int) -> GroupSpec:
    return GroupSpec(name="g", group_id="1", backend="tcp", world_size=world_size)


@pytest.fixture
def team() -> Iterator[ThreadTeam]:
    started = ThreadTeam("tcp", 3)
    yield started
    started.close()


def join_all(rendezvous: MemoryRendezvous, world: int, *hosts: str) -> list[tcp.TcpCommunicator]:
    """Joins a group whose ranks are on these hosts in turn."""
    at = hosts or ("127.0.0.1",)

    def join(rank: int) -> tcp.TcpCommunicator:
        return tcp.create(Joining(spec_of(world), rank, rendezvous, NO_EXCHANGE, host=at[rank % len(at)]))

    with ThreadPoolExecutor(world) as threads:
        return list(threads.map(join, range(world)))
