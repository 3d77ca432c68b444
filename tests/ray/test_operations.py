"""The operations that move pieces, over the backends: outputs given or made, uneven sizes, both kinds of groups."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest
import ray

import raycollect as col
from raycollect import errors
from tests.ray.refusing import refused
from tests.ray.workers import Gate, Worker, block

WORLD = 3
SIZES = (4, 0, 7)
"""How many elements each rank brings, or gets."""


def part(giver, taker=0, size=5):
    """What one rank gives another; no two are alike."""
    return np.arange(size, dtype=np.int64) + 100 * giver + 1000 * taker


def make(actors, function):
    """Keeps `function(rank)` in each actor."""
    return [actor.make.remote(lambda self, value: value, function(rank)) for rank, actor in enumerate(actors)]


def zeros(actors, function):
    """Keeps writable zeros in each actor, in the shapes of `function(rank)`, an array or a list of arrays."""

    def blank(self, like):
        return [np.zeros_like(one) for one in like] if isinstance(like, list) else np.zeros_like(like)

    return [actor.make.remote(blank, function(rank)) for rank, actor in enumerate(actors)]


def assert_same(found, expected):
    assert type(found) is type(expected)
    for one, other in zip(found, expected, strict=True) if isinstance(expected, list) else [(found, expected)]:
        np.testing.assert_array_equal(one, other, strict=True)


def check(outs, expected, given=None):
    """The refs hold what they should, by rank; given outputs are what came back."""
    assert len(outs) == WORLD
    if given is not None:
        assert outs == given
    for found, wanted in zip(col.get(outs), expected, strict=True):
        assert_same(found, wanted)


MORE = [pytest.param(backend, marks=pytest.mark.full) for backend in ("tcp", "gloo")]
on_shm = pytest.mark.parametrize("trio", ["shm", *MORE], indirect=True)
"""For what no kernel takes part in, or moves only; tests/pure/backends/test_conformance.py has it on all backends."""


@pytest.fixture(params=["shm", MORE[0], "gloo"])
def trio(request, actors):
    """Three actors in a declared group that must work when the test is over."""
    workers = actors(Worker, WORLD)
    col.declare_collective_group(workers, backend=request.param)
    yield workers
    outs = col.allgather_refs(None, make(workers, part))
    check(outs, [[part(rank) for rank in range(WORLD)]] * WORLD)


# ---------------------------------------------------------------------------------------------- each operation


def test_reduce_changes_only_the_root(trio):
    for root in range(WORLD):
        refs = zeros(trio, part)
        for rank, ref in enumerate(refs):
            ray.get(trio[rank].call.remote(lambda self, to, value: np.copyto(to, value), ref, part(rank)))
        made = col.reduce_refs(refs, root, op="max", inplace=False)
        np.testing.assert_array_equal(col.get(made), part(2))
        assert ray.get(made).actor_id == trio[root]._actor_id.hex()
        assert col.reduce_refs(refs, root) == refs[root]
        for rank, found in enumerate(col.get(refs)):
            np.testing.assert_array_equal(found, sum(map(part, range(WORLD))) if rank == root else part(rank))


@on_shm
def test_allgather(trio):
    expected = [part(rank, 0, SIZES[rank]) for rank in range(WORLD)]
    refs = make(trio, lambda rank: expected[rank])
    check(col.allgather_refs(None, refs), [expected] * WORLD)
    lists = zeros(trio, lambda rank: expected)
    check(col.allgather_refs(lists, refs), [expected] * WORLD, lists)
    whole = zeros(trio, lambda rank: np.zeros((WORLD, 5), np.int64))
    outs = col.allgather_refs(whole[::-1], make(trio, part))  # the actor counts, not the place in the list
    check(outs, [np.stack([part(rank) for rank in range(WORLD)])] * WORLD, whole)


@on_shm
def test_gather(trio):
    expected = [part(rank, 0, SIZES[rank]) for rank in range(WORLD)]
    refs = make(trio, lambda rank: expected[rank])
    for root in range(WORLD):
        made = col.gather_refs(None, refs, root)
        assert ray.get(made).actor_id == trio[root]._actor_id.hex()
        assert_same(col.get(made), expected)
        given = zeros(trio, lambda rank: expected)[root]
        assert col.gather_refs(given, refs, dst_rank=root) == given
        assert_same(col.get(given), expected)


@on_shm
def test_scatter(trio):
    expected = [part(0, rank, SIZES[rank]) for rank in range(WORLD)]
    for root in range(WORLD):
        source = make(trio, lambda rank: expected)[root]
        check(col.scatter_refs(None, source, root), expected)
        refs = zeros(trio, lambda rank: expected[rank])
        check(col.scatter_refs(refs, source, src_rank=root), expected, refs)
    contiguous = trio[1].make.remote(lambda self: np.arange(12.0).reshape(6, 2))
    check(col.scatter_refs(None, contiguous, 1), np.split(np.arange(12.0).reshape(6, 2), WORLD))
    check(col.scatter_refs([trio[2], *refs[:2]], source, WORLD - 1), expected)


def test_reducescatter(trio):
    def pieces(rank):
        return [part(rank, taker, SIZES[taker]) for taker in range(WORLD)]

    expected = [sum(part(rank, taker, SIZES[taker]) for rank in range(WORLD)) for taker in range(WORLD)]
    lists = make(trio, pieces)
    check(col.reducescatter_refs(None, lists), expected)
    refs = zeros(trio, lambda rank: expected[rank])
    check(col.reducescatter_refs(refs, lists), expected, refs)
    check(col.reducescatter_refs(None, lists, op="min"), pieces(0))
    whole = make(trio, lambda rank: np.full(6, rank + 1.0))
    check(col.reducescatter_refs(None, whole), [np.full(2, 6.0)] * WORLD)


def test_scan_and_exscan(trio):
    each = [part(rank, 0) for rank in range(WORLD)]
    sums = [sum(each[: rank + 1]) for rank in range(WORLD)]
    refs = make(trio, lambda rank: each[rank])
    check(col.scan_refs(refs, inplace=False), sums)
    check(col.exscan_refs(refs, inplace=False), [each[0], *sums[:-1]])
    mine = [actor.make.remote(lambda self, value: value.copy(), each[rank]) for rank, actor in enumerate(trio)]
    check(col.scan_refs(mine), sums, mine)


@on_shm
def test_alltoall(trio):
    def sizes(giver, taker):
        return (giver + 2 * taker) % 4

    def gives(rank):
        return [part(rank, taker, sizes(rank, taker)) for taker in range(WORLD)]

    def takes(rank):
        return [part(giver, rank, sizes(giver, rank)) for giver in range(WORLD)]

    refs = make(trio, gives)
    check(col.alltoall_refs(None, refs), [takes(rank) for rank in range(WORLD)])
    lists = zeros(trio, takes)
    check(col.alltoall_refs(lists, refs), [takes(rank) for rank in range(WORLD)], lists)

    def square(self, rank):
        return np.array([[10.0 * rank + taker] for taker in range(3)])

    same = [actor.make.remote(square, rank) for rank, actor in enumerate(trio)]
    expected = [np.array([[10.0 * giver + rank] for giver in range(WORLD)]) for rank in range(WORLD)]
    check(col.alltoall_refs(same, same), expected, same)  # in place


@on_shm
def test_pieces_that_are_dicts(trio):
    def state(rank, size=3):
        return {"w": np.full((2, size), rank, np.float32), "b": np.full(rank + 1, rank, np.int64)}

    found = col.get(col.allgather_refs(None, make(trio, state))[2])
    for rank, one in enumerate(found):
        assert list(one) == ["w", "b"]
        np.testing.assert_array_equal(one["w"], state(rank)["w"], strict=True)
        np.testing.assert_array_equal(one["b"], state(rank)["b"], strict=True)


@on_shm
def test_async_and_chained(trio):
    refs = make(trio, part)
    gathered = col.gather_refs(None, refs, 1, async_op=True)
    scattered = col.scatter_refs(None, gathered.refs, 1, async_op=True)
    summed = col.reduce_refs(scattered.refs, 2, inplace=False, async_op=True)
    assert summed.wait() == summed.refs
    np.testing.assert_array_equal(col.get(summed.refs), sum(map(part, range(WORLD))))
    assert gathered.done()
    assert scattered.done()
    assert col.barrier(async_op=True).wait() is None


# ---------------------------------------------------------------------------------------------- derived groups


def test_derived_groups_take_their_ranks_from_the_tensors(actors):
    a, b = actors(Worker, 2)
    refs = make([a, b], part)
    pair = [part(0), part(1)]
    assert_same(col.get(col.allgather_refs(None, refs)[1]), pair)
    assert_same(col.get(col.gather_refs(None, refs[::-1], 0)), pair[::-1])
    source = b.make.remote(lambda self, value: value, pair)
    outs = col.scatter_refs([b, a], source)
    assert [ray.get(out).actor_id for out in outs] == [b._actor_id.hex(), a._actor_id.hex()]
    assert_same(col.get(outs), pair)
    lists = make([a, b], lambda rank: [part(rank, 0), part(rank, 1)])
    assert_same(col.get(col.reducescatter_refs(None, lists)), [part(0) + part(1), part(0, 1) + part(1, 1)])
    assert_same(col.get(col.alltoall_refs(None, lists[::-1])[0]), [part(1, 0), part(0, 0)])
    with refused(errors.MissingMemberError, "tensor_refs", "a declared group", actors=[a, b]):
        col.scatter_refs(None, source)


# ---------------------------------------------------------------------------------------------- refusals


@on_shm
def test_a_list_on_the_wrong_actor_is_named(trio):
    refs = make(trio, part)
    lists = zeros(trio, lambda rank: [part(0)] * WORLD)
    with refused(errors.MismatchError, "output is kept by rank 2", "rank 0", lists[2].hex(), "Buffers(", actors=trio):
        col.gather_refs(lists[2], refs, 0)
    with refused(errors.MismatchError, "input is kept by rank 2", "rank 1", actors=trio):
        col.scatter_refs(refs, lists[2], 1)


@on_shm
def test_both_lists_are_read_before_anything_is_refused(trio, actors):
    (stranger,) = actors(Worker, 1)
    refs, lists = make(trio, part), zeros(trio, lambda rank: [part(0)] * WORLD)
    with refused(errors.RefusedError, actors=trio) as caught:
        col.allgather_refs([*lists[:2], stranger.get_buffer.remote()], [refs[0], refs[0], refs[2]])
    assert {(one.kind, one.field) for one in caught.value.violations} == {
        ("not_member", "actor of tensor_list_refs"),
        ("duplicate", "ref of tensor_refs"),
    }
    with refused(errors.MissingMemberError, "rank 1", "tensor_list_refs", actors=trio):
        col.allgather_refs([lists[0], lists[2]], refs)
    with refused(errors.MissingMemberError, "rank 2", actors=trio):
        col.alltoall_refs(None, lists[:2])
    with refused(errors.MissingMemberError, "list of refs (tensor_list_refs)", actors=trio):
        col.reducescatter_refs(None, None)
    with refused(errors.ForeignRefError, "an actor handle", actors=trio):
        col.gather_refs(trio[0], refs)
    with refused(errors.ForeignRefError, "rank 0", "an actor handle", actors=trio):
        col.reduce_refs([trio[0], *refs[1:]])


@on_shm
def test_roots_out_of_range(trio):
    refs = make(trio, part)
    source = make(trio, lambda rank: [part(0)] * WORLD)[0]
    for call, name in (
        (lambda: col.reduce_refs(refs, 3), "dst_rank"),
        (lambda: col.broadcast_refs(refs, -1), "src_rank"),
        (lambda: col.gather_refs(None, refs, 7), "dst_rank"),
        (lambda: col.scatter_refs(refs, source, 3), "src_rank"),
    ):
        with refused(errors.InvalidArgumentError, name, "0 to 2", actors=trio):
            call()
    with refused(errors.InvalidArgumentError, "dst_rank is 'first', expected a rank from 0 to 2", actors=trio):
        col.reduce_refs(refs, "first")
    blank = zeros(trio, part)
    assert col.broadcast_refs(blank, np.int64(0)) == blank
    for timeout_s in (0, -1, float("inf"), "60"):
        with refused(errors.InvalidArgumentError, "timeout_s", actors=trio):
            col.gather_refs(None, refs, timeout_s=timeout_s)


def test_an_error_that_was_raised_is_not_logged_as_unhandled_too(actors, monkeypatch):
    """The refs of outputs hold it as well, and Ray logs errors that nobody asked for: the last call shows that."""
    workers = actors(Worker, 2)
    logged, unhandled = [], threading.Event()

    def note(message, *args, **options):
        logged.append(message)
        unhandled.set()

    monkeypatch.setattr(ray._private.worker.logger, "error", note)
    (gate,) = actors(Gate, 1, max_concurrency=8)
    col.allgather_refs(None, make(workers, part))  # while both can join a group
    busy = block(workers[1], gate)
    work = col.gather_refs(None, make(workers, part), async_op=True)
    assert work.cancel(), "as Ctrl-C does"
    del work
    ray.get([gate.open.remote(), busy])
    with pytest.raises(
        errors.InvalidArgumentError, match=r"int64\[5\] on cpu, expected .* whose first dimension 2 divides"
    ):
        col.alltoall_refs(None, make(workers, part))
    col.allgather_refs(None, make(workers, part))  # the refused one has landed on all ranks
    gc.collect()  # its traceback holds its refs
    work = col.reducescatter_refs(None, make(workers, part), async_op=True)
    resolved = threading.Event()
    work._tracker.when_resolved(resolved.set)
    assert resolved.wait(60)
    del work
    assert unhandled.wait(60)
    assert all("reducescatter" in message for message in logged), logged
