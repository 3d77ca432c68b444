"""The members' operations in plain processes: no Ray, a rendezvous in a directory, real shared memory and sockets."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from raycollect.core.model import ReduceOp
from raycollect.errors import (
    InvalidArgumentError,
    MismatchError,
    NotATensorError,
    RefusedError,
    UnsupportedError,
)
from raycollect.member import init
from raycollect.member import operations as col
from tests.pure import unsuited
from tests.pure.member.operation_bodies import backend, exchange, summed
from tests.pure.processes import outcome

__all__ = ["backend"]  # fixtures


def _everything(name, rank):
    world = init.get_collective_group_size(name)
    assert init.get_rank(name) == rank
    mine = np.full(3, rank + 1.0)
    total, ranks = world * (world + 1) / 2, range(world)

    x = mine.copy()
    col.allreduce(x, name)
    assert (x == total).all()
    x = mine.copy()
    col.reduce(x, 1, name, "max")
    assert (x == (world if rank == 1 else rank + 1)).all()
    x = mine.copy()
    col.broadcast(x, 1, name)
    assert (x == 2).all()
    out = [np.zeros(3) for _ in ranks]
    col.allgather(out, mine, name)
    assert all((out[r] == r + 1).all() for r in ranks)
    uneven = [np.zeros(r + 1) for r in ranks]
    col.allgather(uneven, np.full(rank + 1, float(rank)), name)
    assert all((uneven[r] == r).all() for r in ranks)
    whole = np.zeros((world, 3))
    col.allgather(whole, mine, name)
    assert (whole == np.arange(1, world + 1)[:, None]).all()
    given = [np.full(2, rank + 10.0 * r) for r in ranks]
    x = np.zeros(2)
    col.reducescatter(x, given, name)
    assert (x == sum(r + 10.0 * rank for r in ranks)).all()
    assert all((given[r] == rank + 10.0 * r).all() for r in ranks)
    out = [np.zeros(3) for _ in ranks] if rank == 0 else None
    col.gather(out, mine, 0, name)
    assert out is None or all((out[r] == r + 1).all() for r in ranks)
    x = np.zeros(2)
    col.scatter(x, [np.full(2, 7.0 * r) for r in ranks] if rank == 0 else None, 0, name)
    assert (x == 7 * rank).all()
    out = [np.zeros(1) for _ in ranks]
    col.alltoall(out, [np.full(1, 10.0 * rank + r) for r in ranks], name)
    assert all(out[r] == 10 * r + rank for r in ranks)
    number = np.array(rank + 1.0)  # without dimensions
    col.allreduce(number, name)
    assert number == total
    col.broadcast(number if rank else np.array(7.0), 0, name)
    assert number == (7 if rank else total)
    out = [np.zeros(()) for _ in ranks]
    col.allgather(out, np.array(rank + 1.0), name)
    assert out == [r + 1 for r in ranks]
    nested = {"a": mine.copy(), "b": [mine.astype(np.int64)]}
    col.allreduce(nested, name)
    assert (nested["a"] == total).all()
    assert (nested["b"][0] == total).all()
    col.barrier(name)
    return True


def _overlap(name, rank):
    """Many calls under way while the thread goes on; then a call that waits behind them."""
    arrays = [np.full(1000, rank + 1.0) for _ in range(20)]
    works = [col.allreduce(x, name, async_op=True) for x in arrays]
    last = np.full(5, 1.0)
    col.allreduce(last, name)
    assert all(work.done() for work in works)
    for work in works:
        work.wait()
    return [x[0] for x in arrays], last[0]


@pytest.mark.parametrize("world", [2, 3])
def test_every_operation(crew, backend, world):
    assert crew.group(world, backend).must(_everything) == [True] * world


def _by_its_place(name, rank):
    place = init.get_group_handle(name)
    x = np.full(2, rank + 1.0)
    col.allreduce(x, place, op="avg")
    col.broadcast(x, 0, group_name=place)
    return x[0], init.get_rank(place), init.is_group_initialized(place)


def test_a_place_in_a_group_stands_for_its_name(crew):
    assert crew.group(2).must(_by_its_place) == [(1.5, 0, True), (1.5, 1, True)]


def test_a_group_of_one(crew):
    group = crew.group(1)
    assert (group.must(summed)[0] == 1).all()


def test_all_ranks_send_at_once(crew, backend):
    crew.group(3, backend).must(exchange, 3 << 20)


def test_calls_run_beside_the_thread_that_made_them(crew, backend):
    for firsts, last in crew.group(2, backend).must(_overlap):
        assert firsts == [3.0] * 20
        assert last == 2.0


def _await(name, rank):
    import asyncio

    async def body():
        x = np.full(4, rank + 1.0)
        work = col.allreduce(x, name, async_op=True)
        await work
        return x[0], work.done()

    return asyncio.run(body())


def test_a_call_under_way_can_be_awaited(crew):
    assert crew.group(2).must(_await) == [(3.0, True)] * 2


def _await_in_vain(name, rank):
    """An await is cancelled while calls wait for the other rank; gives what the calls make of their tensors."""
    arrays = [np.full(3, rank + 1.0) for _ in range(3)]
    works = [col.allreduce(x, name, async_op=True) for x in arrays[:2]]

    async def body():
        tasks = [asyncio.ensure_future(_awaited(work)) for work in works]
        await asyncio.sleep(0)
        for one in tasks:
            one.cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    if rank == 0:
        assert [type(one) for one in asyncio.run(body())] == [asyncio.CancelledError] * 2
        col.send(np.zeros(1), 1, name)
    for work in works:
        work.wait()
    col.allreduce(arrays[2], name, async_op=True).wait()
    return [x[0] for x in arrays]


async def _awaited(work):
    await work


def test_an_await_that_is_cancelled_leaves_the_call_alone(crew):
    group = crew.group(2)
    first = group.start(0, _await_in_vain)
    group.must(_receive_one, ranks=[1])
    assert outcome(group.start(1, _await_in_vain)) == [3.0] * 3
    assert outcome(first) == [3.0] * 3


def _receive_one(name, rank):
    col.recv(np.zeros(1), 0, name)


def test_the_error_of_a_call_under_way_comes_with_its_wait(crew):
    group = crew.group(2)
    found = group.run(_wait_for_mismatch)
    assert [type(one) for one in found] == [MismatchError] * 2


def _wait_for_mismatch(name, rank):
    col.allreduce(np.zeros(2 + rank), name, async_op=True).wait()


MISMATCHES = {
    "shape": [("allreduce", np.ones(4)), ("allreduce", np.ones(5))],
    "broadcast shape": [("broadcast", np.ones(4), 0), ("broadcast", np.ones(8), 0)],
    "dtype": [("allreduce", np.ones(4, np.float32)), ("allreduce", np.ones(4, np.int32))],
    "root": [("broadcast", np.ones(4), 0), ("broadcast", np.ones(4), 1)],
    "op": [("allreduce", np.ones(4)), ("broadcast", np.ones(4), 0)],
    "receive": [("send", np.ones(4), 1), ("recv", np.ones(8), 0)],
    "tensor": [("allreduce", np.ones(4)), ("allreduce", "no tensor")],
    "list": [("allgather", [np.ones(4)] * 2, np.ones(4)), ("allgather", [np.ones(4)], np.ones(4))],
}


def _mismatch(name, rank, calls):
    call, *args = calls[rank]
    before = [np.copy(x) for x in args if isinstance(x, np.ndarray)]
    try:
        getattr(col, call)(*args, name)
    except RefusedError as exc:
        assert all((a == b).all() for a, b in zip((x for x in args if isinstance(x, np.ndarray)), before, strict=True))
        return exc
    return None


@pytest.mark.parametrize("case", sorted(MISMATCHES))
def test_a_mismatch_is_one_error_on_all_ranks(crew, backend, case):
    group = crew.group(2, backend)
    errors = group.run(_mismatch, MISMATCHES[case])
    assert all(isinstance(one, RefusedError) for one in errors), errors
    assert errors[0].violations == errors[1].violations
    assert 1 in {violation.rank for violation in errors[0].violations}
    assert "(process " in str(errors[0])
    assert all((x == 3).all() for x in group.must(summed))


RANK, PIECES = "expected a rank from 0 to 1", "whose first dimension 2 divides"


ARGUMENTS = {
    "a root that none is": (
        [("broadcast", np.ones(4), 2), ("broadcast", np.ones(4), 0)],
        {0},
        f"src_rank is 2, {RANK}",
    ),
    "a negative root": ([("reduce", np.ones(4), 0), ("reduce", np.ones(4), -1)], {1}, f"dst_rank is -1, {RANK}"),
    "such a root of all": ([("gather", None, np.ones(4), 5)] * 2, {0, 1}, f"dst_rank is 5, {RANK}"),
    "no number": (
        [("scatter", np.ones(2), None, "1"), ("scatter", np.ones(2), None, 0)],
        {0},
        f"src_rank is '1', {RANK}",
    ),
    "an array, in another's place": (
        [("scatter", np.ones(2), None, np.ones(2)), ("scatter", np.ones(2), None, 0)],
        {0},
        f"src_rank is array([1., 1.]), {RANK}",
    ),
    "no reduce op": (
        [("allreduce", np.ones(4), ReduceOp.SUM), ("allreduce", np.ones(4), "mean")],
        {1},
        "op is 'mean', expected one of SUM",
    ),
    "what can't be split": ([("alltoall", np.ones(4), np.ones(4)), ("alltoall", np.ones(4), np.ones(7))], {1}, PIECES),
    "nowhere": ([("alltoall", np.ones(7), np.ones(7))] * 2, {0, 1}, PIECES),
}


def _argument(name, rank, calls):
    call, *args = calls[rank]
    if call == "allreduce":
        col.allreduce(args[0], name, args[1])
    else:
        getattr(col, call)(*args, name)


@pytest.mark.parametrize("case", ARGUMENTS)
def test_invalid_argument_is_raised_on_all_ranks(crew, backend, case):
    """Nobody waits for the rank that can't begin, nor is told to be at odds with it."""
    calls, culprits, said = ARGUMENTS[case]
    group = crew.group(2, backend)
    for error in group.run(_argument, calls):
        assert type(error) is InvalidArgumentError, error
        assert said in str(error)
        assert {violation.rank for violation in error.violations} == culprits
    assert all((x == 3).all() for x in group.must(summed))


def _equal_root(name, rank):
    col.broadcast(np.ones(2), 1, name)
    col.broadcast(np.ones(2), 1.0, name)


def test_a_root_that_equals_that_of_the_last_call_is_looked_at_itself(crew):
    for error in crew.group(2).run(_equal_root):
        assert type(error) is InvalidArgumentError, error
        assert f"src_rank is 1.0, {RANK}" in str(error)


def test_a_reduce_op_that_differs_is_refused(crew, backend):
    group = crew.group(2, backend)
    errors = group.run(_op_of_rank, ("sum", "max"))
    assert [type(one) for one in errors] == [MismatchError] * 2
    assert errors[0].violations[0].field == "reduce op"
    assert all((x == 3).all() for x in group.must(summed))


def _op_of_rank(name, rank, ops):
    col.allreduce(np.ones(4), name, ops[rank])


@pytest.mark.parametrize("calls", [[("broadcast", np.ones(2), 7)] * 2, [("allreduce", np.ones(2))] * 2])
def test_meaningless_operation_is_refused_on_all_ranks(crew, backend, calls):
    group = crew.group(2, backend)
    if calls[0][0] == "allreduce":
        errors = group.run(_op_of_rank, ("nonsense", "sum"))
    else:
        errors = group.run(_mismatch, calls)
    assert all(isinstance(one, (UnsupportedError, RefusedError)) for one in errors), errors
    assert all((x == 3).all() for x in group.must(summed))


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, of quantized, nested, half complex tensors
def test_unsuitable_tensors_are_refused_with_the_reason(crew):
    pytest.importorskip("torch")
    group = crew.group(2, "shm")
    for said in group.must(_unsuited):
        assert [name for name, text in said.items() if any(word not in text for word in unsuited.ALL[name].words)] == []
        assert "rank 1 " in said["sparse"]
    assert all((x == 3).all() for x in group.must(summed))


def _unsuited(name, rank):
    """What each kind is told as, of rank 1, in place."""
    import torch

    said = {}
    for kind, one in unsuited.ALL.items():
        try:
            col.allreduce(one.make(torch) if rank else np.ones(2), name)
        except NotATensorError as exc:
            said[kind] = str(exc)
    return said


def test_a_number_is_refused_with_the_cure(crew):
    errors = crew.group(2, "shm").run(_mismatch, [("allreduce", np.ones(())), ("allreduce", np.float64(1))])
    assert [type(one) for one in errors] == [NotATensorError] * 2
    assert "a numpy.float64 (give numpy.array(x)" in str(errors[0])


def test_a_rank_without_its_tensors_tells_all(crew, backend):
    group = crew.group(2, backend)
    errors = group.run(_mismatch, [("scatter", np.ones(2), None, 0), ("scatter", np.ones(2), None, 0)])
    assert [type(one) for one in errors] == [NotATensorError] * 2
    assert [one.violations[0].rank for one in errors] == [0, 0]


def _prefixes(name, rank):
    x = np.array([rank + 1.0, 2.0])
    col.scan(x, name)
    y = np.array([rank + 1, 2])
    work = col.exscan(y, name, "product", async_op=True)
    work.wait()
    z = np.full((2, 2), float(-rank), np.float16)
    col.exscan(z, name, "max")
    return x.tolist(), y.tolist(), z.tolist()


def test_scan_and_exscan(crew, backend):
    assert crew.group(3, backend).must(_prefixes) == [
        ([1.0, 2.0], [1, 2], [[0.0, 0.0]] * 2),
        ([3.0, 4.0], [1, 2], [[0.0, 0.0]] * 2),
        ([6.0, 6.0], [2, 4], [[0.0, 0.0]] * 2),
    ]


WRONG_OPTIONS = {
    "timeout_s": ["5", [], {}, 0, -1.0, 1e10, 10**400, float("inf"), float("nan"), 1j, np.ones(2), np.float32(3)],
    "async_op": ["no", [], 2, 1.0, np.ones(2)],
}


def _wrong_options(name, rank, options):
    """What each wrong option of rank 0 raises, in calls that are right on rank 1."""
    peer = 1 - rank
    calls = [
        lambda **given: col.allreduce(np.ones(4), name, **given),
        lambda **given: col.barrier(name, **given),
        lambda **given: (col.recv if rank else col.send)(np.ones(4), peer, name, **given),
    ]
    found = []
    for option, values in options.items():
        for value in values:
            for call in calls:
                try:
                    call(**({} if rank else {option: value}))
                except InvalidArgumentError as exc:
                    found.append((option, *((one.rank, one.field) for one in exc.violations)))
    return found


def test_an_option_that_makes_no_sense_is_refused_by_its_name_on_all_ranks(crew):
    group = crew.group(2)
    told = [(name, (0, name)) for name, values in WRONG_OPTIONS.items() for _ in values for _ in range(3)]
    assert group.must(_wrong_options, WRONG_OPTIONS) == [told, told]
    assert all((x == 3).all() for x in group.must(summed))


def _numpy_options(name, rank):
    for options in ({"timeout_s": np.int64(30)}, {"async_op": np.int64(0)}, {"async_op": np.bool_(False)}):
        col.allreduce(np.ones(2), name, **options)
    work = col.allreduce(np.ones(2), name, async_op=np.uint8(1))
    work.wait(np.int32(30))
    work.wait(float("inf"))
    work.wait(-0.5)  # a time that is over: it looks


def test_options_may_be_numpys(crew):
    """What numpy computes, as from a table of settings."""
    crew.group(2).must(_numpy_options)
