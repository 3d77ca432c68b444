"""The members' operations in plain processes: no Ray, a rendezvous in a directory, real shared memory and sockets."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from raycollect.errors import (
    InvalidArgumentError,
    MismatchError,
    NotATensorError,
)
from raycollect.member import init
from raycollect.member import operations as col
from tests.pure import unsuited
from tests.pure.member.operation_bodies import backend, exchange, summed
from tests.pure.processes import outcome

__all__ = ["backend"]  # fixtures


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


def _equal_root(name, rank):
    col.broadcast(np.ones(2), 1, name)
    col.broadcast(np.ones(2), 1.0, name)


def test_a_root_that_equals_that_of_the_last_call_is_looked_at_itself(crew):
    for error in crew.group(2).run(_equal_root):
        assert type(error) is InvalidArgumentError, error
        assert {(one.rank, one.field) for one in error.violations} == {(0, "src_rank"), (1, "src_rank")}


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
