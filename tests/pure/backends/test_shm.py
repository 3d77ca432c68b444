"""Shared memory: what a closed communicator gives back, and who may join."""

from __future__ import annotations

import gc
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from raycollect.backends.shm import communicator as shm
from raycollect.backends.shm import segment
from raycollect.core.model import GroupSpec, Launch, ReduceOp
from raycollect.core.protocols import Communicator, Joining
from raycollect.errors import BackendUnavailableError
from tests.pure.communicators import (
    MemoryExchange,
    MemoryRendezvous,
    MemoryStar,
    ThreadTeam,
)
from tests.pure.conformance import check_allreduce, sum_of
from tests.support.values import replace

NO_EXCHANGE = MemoryExchange(MemoryStar(), 0)


def spec_of(world_size: int) -> GroupSpec:
    return GroupSpec(name="g", group_id="1", backend="shm", world_size=world_size)


def test_a_closed_communicator_gives_its_memory_back() -> None:
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:raycollect")

    gc.collect()
    before, descriptors = mapped(), len(list(Path("/proc/self/fd").iterdir()))
    team = ThreadTeam("shm", 2)
    check_allreduce(team, ReduceOp.SUM, "int64", 1000, "plain", True)
    assert mapped() > before
    team.close()
    gc.collect()
    assert mapped() == before
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors


def body_after_nothing(communicator: Communicator, launch: Launch) -> float:
    """An empty kernel that was staged, whose elements only one rank can fold in place; then another kernel."""
    nothing, array = np.zeros(0, [">f4", "<f4"][communicator.rank]), np.full(8, 1.0 + communicator.rank)
    kernels, ok = [sum_of(nothing), sum_of(array)], False
    try:
        communicator.agree(launch, b"", kernels[0])
        for kernel in kernels:
            communicator.launch(launch, (kernel,))
        ok = True
    finally:
        communicator.end(launch, ok)
    return float(array[0])


def test_after_an_empty_kernel_all_ranks_use_the_same_slots() -> None:
    team = ThreadTeam("shm", 2)
    for _ in range(2):
        assert team.must(body_after_nothing, team.launch()) == [3.0, 3.0]
    team.close()


class Misleading(MemoryRendezvous):
    """A rendezvous that changes where rank 0's memory is said to be."""

    def __init__(self, **wrong: object) -> None:
        super().__init__()
        self._wrong = wrong

    def put(self, name: str, value: bytes) -> None:
        if name == "shm.segment.0":
            offer = segment._OFFERS.decode(value)
            assert offer.segment is not None
            value = segment._OFFERS.encode(replace(offer, segment=replace(offer.segment, **self._wrong)))
        super().put(name, value)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"token": b"x" * 32}, "the memory of another process"),
        ({"fd": 0}, "no longer memory of the name"),
        ({"fd": 1 << 20}, "No such file"),
        ({"nbytes": 4096}, "are the versions of raycollect equal"),
    ],
)
def test_a_member_that_can_not_map_the_memory_says_so_to_rank_0(wrong: dict[str, object], why: str) -> None:
    rendezvous = Misleading(**wrong)
    with ThreadPoolExecutor(2) as threads:
        tries = [threads.submit(shm.create, Joining(spec_of(2), rank, rendezvous, NO_EXCHANGE)) for rank in (0, 1)]
        for attempt in tries:
            with pytest.raises(BackendUnavailableError, match=f"rank 1 can't map the segment of rank 0: .*{why}"):
                attempt.result(20)


@pytest.mark.parametrize("broken", ["memfd_create", "posix_fallocate", "mmap"])
def test_without_shared_memory_all_members_learn_why(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    """There may also be no room for it in the process."""

    def fail(*args: object) -> int:
        raise OSError(28, "No space left on device")

    if broken == "memfd_create":
        monkeypatch.delattr(os, broken)
    else:
        monkeypatch.setattr({"posix_fallocate": os, "mmap": mmap}[broken], broken, fail)
    rendezvous = MemoryRendezvous()
    for rank in (0, 1):
        with pytest.raises(BackendUnavailableError, match="shared memory"):
            shm.create(Joining(spec_of(2), rank, rendezvous, NO_EXCHANGE))
