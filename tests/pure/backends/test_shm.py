"""Shared memory: the bits in chunks, what a closed communicator gives back, and who may join."""

from __future__ import annotations

import gc
import mmap
import os
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from raycollect.backends.shm import communicator as shm
from raycollect.backends.shm import segment
from raycollect.backends.shm import staged as _staged
from raycollect.core.model import GroupSpec, Kernel, Launch, OpKind, ReduceOp
from raycollect.core.protocols import Communicator, Joining
from raycollect.errors import BackendUnavailableError, UnsupportedError
from tests.pure.communicators import (
    MemoryExchange,
    MemoryRendezvous,
    MemoryStar,
    ProcessTeam,
    ThreadTeam,
    Workers,
)
from tests.pure.conformance import Case, body_arrive, check_allreduce, check_cases, every_case, run_launch
from tests.support.values import replace

NO_EXCHANGE = MemoryExchange(MemoryStar(), 0)


def spec_of(world_size: int) -> GroupSpec:
    return GroupSpec(name="g", group_id="1", backend="shm", world_size=world_size)


@pytest.fixture(scope="module")
def processes(workers: Workers) -> Iterator[ProcessTeam]:
    """Three ranks that all tests of this file share."""
    team = ProcessTeam("shm", 3, workers(3))
    yield team
    team.close()


def body_memory(communicator: Communicator, launch: Launch, kind: OpKind, size: int) -> int:
    """Gives the bytes that a kernel on non-contiguous arrays takes beyond them, at its peak."""
    world = communicator.world_size
    whole, other = (np.ones((2 * size * world), np.float32)[::2] for _ in range(2))
    strided = np.ones(2 * size, np.float32)[::2]
    src = tuple(np.split(whole, world)) if kind in (OpKind.ALLTOALL, OpKind.REDUCESCATTER) else strided
    dst = tuple(np.split(other, world)) if kind in (OpKind.ALLTOALL, OpKind.ALLGATHER) else np.empty_like(strided)
    tracemalloc.start()
    try:
        kernel = Kernel(kind=kind, src=src, dst=dst, op=ReduceOp.SUM, peer=0, most=size)
        run_launch(communicator, launch, kernel)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "kind",
    [
        OpKind.ALLREDUCE,
        OpKind.ALLTOALL,
        pytest.param(OpKind.REDUCESCATTER, marks=pytest.mark.full),
        pytest.param(OpKind.ALLGATHER, marks=pytest.mark.full),
    ],
)
def test_a_kernel_takes_a_few_chunks_however_large_its_arrays(processes: ProcessTeam, kind: OpKind) -> None:
    for peak in processes.must(body_memory, processes.launch(), kind, 2_000_000):
        assert peak < 4 * _staged.CHUNK_NBYTES


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


@pytest.mark.parametrize("kind", [OpKind.ALLREDUCE, OpKind.REDUCE])
@pytest.mark.parametrize("table", [(), ((2, 0),)])
def test_both_algorithms_give_the_same_bits(monkeypatch: pytest.MonkeyPatch, table: tuple, kind: OpKind) -> None:
    monkeypatch.setattr(_staged, "SLICED_FROM_NBYTES", table)
    monkeypatch.setattr(_staged, "SLICED_WIDE_FROM_NBYTES", table)
    for world, dtype in ((2, "float32"), (3, "bfloat16"), (5, "float32"), (2, "float8_e5m2")):
        team = ThreadTeam("shm", world)
        cases = [
            Case(kind=kind, op=ReduceOp.AVG, dtype=dtype, size=size, layout="every other", inplace=inplace, root=1)
            for size in (1, 2, 7, 600_001)
            for inplace in (False, True)
        ]
        check_cases(team, cases)
        team.close()


@pytest.mark.parametrize("nbytes", [256, pytest.param(4096, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    ("staged", "dtype"),
    [
        pytest.param(staged, dtype, marks=[pytest.mark.full] * (at % 2 == staged))  # each dtype in one of both ways
        for staged in (False, True)
        for at, dtype in enumerate(("int16", "float64", "complex128", "bfloat16"))
    ],
)
def test_every_kernel_in_many_chunks(monkeypatch: pytest.MonkeyPatch, nbytes: int, staged: bool, dtype: str) -> None:
    """Small slots: more chunks than slots, pieces that end in different ones, slots that are cut to a cache line."""
    monkeypatch.setattr(_staged, "CHUNK_NBYTES", nbytes)
    monkeypatch.setattr(_staged, "SLICED_FROM_NBYTES", ((3, nbytes // 2),))
    for world in (1, 2, 3):
        team = ThreadTeam("shm", world)
        check_cases(team, list(every_case(dtype, world, (7, 1024))), staged=staged)
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


def test_an_arrival_that_is_too_long_is_refused() -> None:
    team = ThreadTeam("shm", 1)
    with pytest.raises(UnsupportedError, match="description takes"):
        run_launch(team.communicators[0], team.launch(), arrival=b"x" * (1 << 20))
    team.must(body_arrive, team.launch())
    team.close()
