"""The fake of cupy finds what a GPU would not forgive; only tests of code that runs on it show that it works."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from tests.fake_cupy import Fake, installed

SEEDS = range(12)
WAIT_S = 20.0
SUM, _, MAX = range(3)


@pytest.fixture
def fake():
    with installed(2) as made:
        yield made


@contextmanager
def refused(kind: Any, status: int) -> Iterator[None]:
    with pytest.raises(kind) as caught:
        yield
    assert caught.value.status == status


# ------------------------------------------------------------------------------------------ streams and events


def _handed_over(seed: int, **how: Any) -> bool:
    """Whether what one stream writes is what another one reads, which waits for it or doesn't."""
    with installed(seed=seed) as fake, fake.alone():
        cupy = fake.cupy
        first = cupy.cuda.Stream(non_blocking=how.get("first_non_blocking", True))
        second = cupy.cuda.Stream.null if how.get("null") else cupy.cuda.Stream(non_blocking=True)
        value, seen = cupy.zeros(5), cupy.zeros(5)
        cupy.cuda.runtime.deviceSynchronize()
        with first:
            for _ in range(3):
                value += 1
        if how.get("wait"):
            second.wait_event(first.record())
        with second:
            seen[...] = value
            found = seen.get()
        cupy.cuda.runtime.deviceSynchronize()
        assert value.get().tolist() == [3.0] * 5
        return bool((found == 3).all())


def test_streams_know_nothing_of_each_other_unless_they_wait():
    assert all(_handed_over(seed, wait=True) for seed in SEEDS)
    assert not all(_handed_over(seed) for seed in SEEDS)


def test_the_default_stream_waits_for_blocking_streams_only():
    assert all(_handed_over(seed, null=True, first_non_blocking=False) for seed in SEEDS)
    assert not all(_handed_over(seed, null=True) for seed in SEEDS)


def test_an_event_is_done_when_what_came_before_it_is(fake):
    cupy, runtime = fake.cupy, fake.cupy.cuda.runtime
    stream, event = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Event(disable_timing=True)
    assert event.done
    assert runtime.eventQuery(event.ptr) == 0
    fake.hold(stream)
    with stream:
        value = cupy.full(4, 7)
    event.record(stream)
    assert not event.done
    assert not stream.done
    assert runtime.eventQuery(event.ptr) == 600
    fake.release(stream)
    event.synchronize()
    assert event.done
    assert stream.done
    assert value.get(stream).tolist() == [7] * 4


# ------------------------------------------------------------------------------------------- memory and arrays


@pytest.mark.parametrize("seed", SEEDS)
def test_memory_that_another_stream_still_reads_must_not_be_freed(seed):
    with installed(seed=seed) as fake:
        cupy = fake.cupy
        value, seen = cupy.ones(1000), cupy.zeros(1000)
        stream = cupy.cuda.Stream(non_blocking=True)
        stream.wait_event(cupy.cuda.Stream.null.record())
        fake.hold(stream)
        with stream:
            seen[...] = value
        del value
        assert len(fake.violations) == 1
        assert "freed while work" in fake.violations[0]
        cupy.cuda.Stream.null.synchronize()
        fake.release(stream)
        stream.synchronize()
        assert "was freed" in fake.violations[1]
        fake.violations.clear()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("waits", ["event", "host", "default"])
def test_memory_may_be_freed_once_its_own_stream_comes_after_what_reads_it(seed, waits):
    with installed(seed=seed) as fake:
        cupy = fake.cupy
        value, seen = cupy.ones(1000), cupy.zeros(1000)
        cupy.cuda.runtime.deviceSynchronize()
        stream = cupy.cuda.Stream(non_blocking=waits != "default")
        with stream:
            seen[...] = value
        if waits == "event":
            cupy.cuda.Stream.null.wait_event(stream.record())
        elif waits == "host":
            stream.synchronize()
        del value
        assert seen.get(stream).sum() == 1000


@pytest.mark.parametrize("waits", [True, False])
def test_page_locked_memory_must_not_be_given_back_before_its_copies_have_ended(fake, waits):
    runtime, stream = fake.cupy.cuda.runtime, fake.cupy.cuda.Stream(non_blocking=True)
    pointer, value = fake.cupy.cuda.alloc_pinned_memory(1000), fake.cupy.ones(125)
    runtime.deviceSynchronize()
    memory = np.frombuffer(pointer, np.float64, 125)
    assert runtime.pointerGetAttributes(memory.ctypes.data).type == 1
    fake.hold(stream)
    runtime.memcpyAsync(memory.ctypes.data, value.data.ptr, 1000, runtime.memcpyDefault, stream.ptr)
    assert memory.sum() != 125
    if waits:
        fake.release(stream)
        stream.synchronize()
        assert memory.sum() == 125
    del memory, pointer
    assert len(fake.violations) == (not waits)
    fake.violations.clear()
    fake.release(stream)
    stream.synchronize()
    assert len(fake.violations) == (not waits)
    fake.violations.clear()


def test_violations_fail_the_test_that_makes_them():
    with pytest.raises(AssertionError, match="goes 1 bytes beyond"), installed() as fake:
        value, runtime = fake.cupy.zeros(8, np.uint8), fake.cupy.cuda.runtime
        runtime.memcpyAsync(value.data.ptr, fake.cupy.zeros(9, np.uint8).data.ptr, 9, runtime.memcpyDefault, 0)
    with pytest.raises(KeyError), installed() as fake:
        fake.violations.append("hides nothing")
        raise KeyError


def test_nothing_comes_to_the_host_by_itself(fake):
    cupy = fake.cupy
    value = cupy.ones(3)
    for wrong in (np.asarray, hash, lambda a: a + np.ones(3), lambda a: np.ones(3) * a):
        with pytest.raises(TypeError):
            wrong(value)
    with cupy.cuda.Device(1), pytest.raises(ValueError, match="current device"):
        value + 1
    with cupy.cuda.Device(1):
        copied = value.copy()
        assert (copied.device.id, copied.get().sum()) == (1, 3)
        assert value.get().tolist() == [1.0] * 3


# -------------------------------------------------------------------------------------------------------- NCCL


class Rank:
    """One rank: its communicator, and a stream of its own."""

    def __init__(self, fake: Fake, world: int, unique: tuple[int, ...], rank: int) -> None:
        self.fake, self.cupy, self.rank, self.device = fake, fake.cupy, rank, rank
        with self.cupy.cuda.Device(rank):
            self.comm = self.cupy.cuda.nccl.NcclCommunicator(world, unique, rank)
            self.stream = self.cupy.cuda.Stream(non_blocking=True)

    def put(self, values: Any) -> Any:
        """An array on its device, written on its stream."""
        with self.cupy.cuda.Device(self.device), self.stream:
            return self.cupy.asarray(values)

    def get(self, array: Any) -> Any:
        with self.cupy.cuda.Device(self.device):
            return array.get(self.stream)


class Ranks:
    """All of them, each in a thread."""

    def __init__(self, fake: Fake, world: int) -> None:
        self.threads = ThreadPoolExecutor(world)
        unique = fake.cupy.cuda.nccl.get_unique_id()
        made = [self.threads.submit(Rank, fake, world, unique, rank) for rank in range(world)]
        try:
            self.all: list[Rank] = [future.result(WAIT_S) for future in made]
        except BaseException:
            self.threads.shutdown()
            raise

    def run(self, body: Callable[[Rank], Any]) -> list[Any]:
        started = [self.threads.submit(body, rank) for rank in self.all]
        return [future.result(WAIT_S) for future in started]


@contextmanager
def ranks(world: int) -> Iterator[Ranks]:
    with installed(world) as fake:
        team = Ranks(fake, world)
        try:
            yield team
        finally:
            team.run(lambda rank: rank.comm.abort())
            team.threads.shutdown()


def error_of(rank: Rank) -> int:
    try:
        rank.comm.check_async_error()
    except rank.cupy.cuda.nccl.NcclError as exc:
        return int(exc.status)
    return 0


@pytest.mark.parametrize(
    "second",
    [
        lambda c, p, s: c.allReduce(p, p, 3, 8, SUM, s),
        lambda c, p, s: c.allReduce(p, p, 2, 7, SUM, s),
        lambda c, p, s: c.allReduce(p, p, 2, 8, MAX, s),
        lambda c, p, s: c.broadcast(p, p, 2, 8, 0, s),
    ],
)
def test_calls_that_do_not_match_are_an_error_of_all_ranks(second):
    def body(rank: Rank) -> Any:
        mine = rank.put(np.ones(4))
        if rank.rank == 1:
            second(rank.comm, mine.data.ptr, rank.stream.ptr)
        else:
            rank.comm.allReduce(mine.data.ptr, mine.data.ptr, 2, 8, SUM, rank.stream.ptr)
        return mine

    with ranks(2) as team:
        kept = team.run(body)
        fake = team.all[0].fake
        fake.drain()
        assert [error_of(rank) for rank in team.all] == [5, 5]
        assert "rank 0 calls allReduce of 2" in fake.violations[0] or "rank 1 calls" in fake.violations[0]
        assert len(fake.violations) == 1
        fake.violations.clear()
        assert [rank.stream.done for rank in team.all] == [False, False]
        assert len(kept) == 2


def test_an_abort_ends_what_one_rank_has_enqueued_and_its_stream_goes_on():
    def body(rank: Rank) -> Any:
        mine = rank.put(np.full(3, 1.0))
        for _ in range(2):
            rank.comm.allReduce(mine.data.ptr, mine.data.ptr, 3, 8, SUM, rank.stream.ptr)
        with rank.cupy.cuda.Device(rank.device), rank.stream:
            mine += 1
        return mine

    with ranks(3) as team:
        team.all[2].fake.hold(team.all[2].stream)
        arrays = team.run(body)
        fake = team.all[0].fake
        fake.drain()
        assert [rank.stream.done for rank in team.all] == [False] * 3
        team.all[0].comm.abort()
        assert team.all[0].get(arrays[0]).tolist() == [2.0] * 3
        fake.release(team.all[2].stream)
        fake.drain()
        assert [rank.stream.done for rank in team.all] == [True, False, False]
        for rank in team.all[1:]:
            rank.comm.abort()
            rank.stream.synchronize()
