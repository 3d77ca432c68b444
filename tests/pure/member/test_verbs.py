"""The members' verbs in plain processes: no Ray, a rendezvous in a directory, real shared memory and sockets."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from raycollect.core.model import ReduceOp
from raycollect.errors import (
    AliasError,
    CollectiveTimeoutError,
    GroupBrokenError,
    GroupExistsError,
    InvalidArgumentError,
    InvalidGroupError,
    MismatchError,
    NotATensorError,
    ParticipantDiedError,
    RefusedError,
    UnknownBackendError,
    UnknownGroupError,
    UnsupportedError,
)
from raycollect.group import watchdog
from raycollect.group.process_groups import ProcessGroups
from raycollect.member import init
from raycollect.member import verbs as col
from tests.pure import unsuited
from tests.pure.processes import join, outcome

BACKENDS = ("shm", "tcp", "gloo")


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


# ---------------------------------------------------------------------------------------------- bodies


def _sum(name, rank, n=4, timeout_s=None):
    x = np.full(n, rank + 1, np.float32)
    col.allreduce(x, name, timeout_s=timeout_s)
    return x


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


def _exchange(name, rank, nbytes):
    """Every rank sends to the next and receives from the one before, at once."""
    world = init.get_collective_group_size(name)
    mine, theirs = np.full(nbytes, rank, np.uint8), np.zeros(nbytes, np.uint8)
    before = (rank - 1) % world
    sent = col.send(mine, (rank + 1) % world, name, async_op=True)
    col.recv(theirs, before, name)
    sent.wait()
    assert (theirs == before).all()


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


def _close(name, rank):
    init.destroy_collective_group(name)


def _threads(name, rank):
    return sorted(t.name for t in threading.enumerate() if t.name.startswith("raycollect"))


# ---------------------------------------------------------------------------------------------- what it does


@pytest.mark.parametrize("world", [2, 3])
def test_every_verb(crew, backend, world):
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
    assert (group.must(_sum)[0] == 1).all()


def test_all_ranks_send_at_once(crew, backend):
    crew.group(3, backend).must(_exchange, 3 << 20)


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


# ---------------------------------------------------------------------------------------------- mismatches

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
    assert all((x == 3).all() for x in group.must(_sum))


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
    assert all((x == 3).all() for x in group.must(_sum))


def test_a_reduce_op_that_differs_is_refused(crew, backend):
    group = crew.group(2, backend)
    errors = group.run(_op_of_rank, ("sum", "max"))
    assert [type(one) for one in errors] == [MismatchError] * 2
    assert errors[0].violations[0].field == "reduce op"
    assert all((x == 3).all() for x in group.must(_sum))


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
    assert all((x == 3).all() for x in group.must(_sum))


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, of quantized, nested, half complex tensors
def test_unsuitable_tensors_are_refused_with_the_reason(crew):
    pytest.importorskip("torch")
    group = crew.group(2, "shm")
    for said in group.must(_unsuited):
        assert [name for name, text in said.items() if any(word not in text for word in unsuited.ALL[name].words)] == []
        assert "rank 1 " in said["sparse"]
    assert all((x == 3).all() for x in group.must(_sum))


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


# ---------------------------------------------------------------------------------------------- late, gone, dead


def test_an_absent_rank_is_named_on_all_and_meets_the_next_call(crew, backend):
    group = crew.group(3, backend)
    group.must(_sum)
    errors = group.run(_sum, 4, 2, ranks=[0, 1])
    assert [type(one) for one in errors] == [CollectiveTimeoutError] * 2
    assert [one.missing for one in errors] == [(2,), (2,)]
    assert "rank 2 (process " in str(errors[0])
    assert [[report.rank for report in one.reports] for one in errors] == [[2], [2]], "each has asked"
    late = group.start(2, _sum)
    found = group.run(_sum, ranks=[0, 1])
    assert all((x == 6).all() for x in (*found, outcome(late)))


def test_a_rank_that_comes_while_the_others_give_up_meets_them_in_the_end(crew, backend):
    group = crew.group(3, backend)
    for wait_s in (0.1, 0.2, 0.3):
        early = [group.start(rank, _until_it_works, wait_s) for rank in (0, 1)]
        late = group.start(2, _until_it_works, wait_s / 2)
        assert all((outcome(one) == 6).all() for one in (*early, late))


def _until_it_works(name, rank, timeout_s):
    """Tries again and again, each time for somewhat longer: a slow machine needs more than it begins with."""
    while True:
        try:
            return _sum(name, rank, 4, timeout_s)
        except CollectiveTimeoutError:
            timeout_s *= 1.1


@pytest.mark.parametrize(
    ("way", "backend"), [("call", "shm"), ("call", "tcp"), ("call", "gloo"), ("async", "tcp"), ("send", "gloo")]
)
def test_timeout_error_reports_the_missing_ranks(crew, backend, way):
    """Whether they have ever made a call of the group, or not."""
    group = crew.group(2, backend)
    for is_formed in (False, True):
        if is_formed:
            group.must(_sum)
        [error] = group.run(_fails_late, way, ranks=[0])
        assert isinstance(error, CollectiveTimeoutError), error
        assert error.missing == (1,)
        (report,) = error.reports
        assert (report.rank, report.answers, report.has_begun) == (1, True, False)
        assert report.actor.startswith("process ")
        assert any("processes.py" in line and "recv()" in line for line in report.stack), report.stack
        assert 0.3 <= report.awaited_s < 30
        assert str(report) in str(error)
        assert str(error).rstrip(".").endswith(error.cure)
    assert all((x == 3).all() for x in group.must(_sum))


def _fails_late(name, rank, way):
    x, before = np.zeros(4), watchdog.LATE_ANSWER_S
    watchdog.LATE_ANSWER_S = 20  # what is told is looked at here, not how fast
    try:
        if way == "send":
            col.send(x, 1, name, timeout_s=0.3)
        elif way == "async":
            col.allreduce(x, name, timeout_s=0.3, async_op=True).wait()
        else:
            col.allreduce(x, name, timeout_s=0.3)
    finally:
        watchdog.LATE_ANSWER_S = before


def test_lone_receive_times_out_and_later_meets_its_send(crew, backend):
    group = crew.group(2, backend)
    [error] = group.run(_receive, 0.3, ranks=[1])
    assert isinstance(error, CollectiveTimeoutError)
    assert error.missing == (0,)
    sending = group.start(0, _send)
    [got] = group.run(_receive, 20, ranks=[1])
    assert outcome(sending) is None
    assert (got == 5).all()


def _send(name, rank):
    col.send(np.full(4, 5.0), 1, name)


def _receive(name, rank, timeout_s):
    x = np.zeros(4)
    col.recv(x, 0, name, timeout_s=timeout_s)
    return x


def _sum_and_tell(name, rank, folder):
    """Makes a file once the call is under way."""
    hub = ProcessGroups.current().find(name).communicator("all").hub

    def tell():
        while hub.place != "door":
            time.sleep(0.001)  # polls for what another thread does
        (folder / str(rank)).touch()

    threading.Thread(target=tell, daemon=True).start()
    return _sum(name, rank)


@pytest.mark.parametrize(("victim", "backend"), [(0, "shm"), (2, "shm"), (2, "tcp"), (0, "gloo")])
def test_a_rank_that_dies_while_others_wait_is_named_at_once(crew, backend, victim, tmp_path):
    group = crew.group(3, backend)
    group.must(_sum)
    survivors = [rank for rank in range(3) if rank != victim]
    waiting = [group.start(rank, _sum_and_tell, tmp_path) for rank in survivors]
    while not all((tmp_path / str(rank)).exists() for rank in survivors):
        time.sleep(0.001)  # polls for what other processes do
    group.processes[victim].kill()
    killed_s = time.monotonic()
    errors = [outcome(one) for one in waiting]
    assert time.monotonic() - killed_s < 10  # not the 20 s of the group
    assert [type(one) for one in errors] == [ParticipantDiedError] * 2, errors
    assert [one.rank for one in errors] == [victim] * 2
    later = group.run(_sum, ranks=survivors)
    assert [type(one) for one in later] == [GroupBrokenError] * 2
    assert "What to do" in str(later[0])


def test_a_rank_that_dies_in_the_middle_of_things_is_named(crew, backend):
    group = crew.group(3, backend)
    group.must(_sum)
    working = [group.start(rank, _sum_for_ever, 1 << 20) for rank in range(3)]
    time.sleep(0.3)  # not to wait for anything: only that it be somewhere in the middle
    group.processes[1].kill()
    errors = [outcome(working[rank]) for rank in (0, 2)]
    assert all(isinstance(one, (ParticipantDiedError, GroupBrokenError)) for one in errors), errors
    assert all("rank 1" in str(one) for one in errors), errors


def _sum_for_ever(name, rank, n):
    while True:
        _sum(name, rank, n)


@pytest.mark.parametrize("victim", [0, 1], ids=["leader", "member"])
@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_completed_receive_succeeds_though_the_sender_has_died(crew, backend, victim):
    """The death is heard of while the call is at work; the next call tells it."""
    group = crew.group(2, backend)
    other = 1 - victim
    group.must(_broadcast, victim)  # so that all imports are there
    receiving = group.start(other, _broadcast_late, victim)
    group.start(victim, _broadcast_and_exit, victim)
    assert outcome(receiving) == victim + 1.0
    [later] = group.run(_sum, ranks=[other])
    assert isinstance(later, GroupBrokenError)
    assert f"rank {victim} (process " in str(later)


def _broadcast(name, rank, root):
    x = np.full(100_000, rank + 1.0, np.float32)
    col.broadcast(x, root, name)
    assert (x == x[0]).all()
    return float(x[0])


def _broadcast_and_exit(name, rank, root):
    _broadcast(name, rank, root)
    os._exit(0)


def _broadcast_late(name, rank, root):
    """Goes through the door, and on when it has heard that the root is gone."""
    process_groups = ProcessGroups.current()
    before = process_groups.instruments
    process_groups.instruments = replace(before, faults=_Late(init.get_group_handle(name), root))
    try:
        return _broadcast(name, rank, root)
    finally:
        process_groups.instruments = before


class _Late:
    def __init__(self, process_group, victim):
        self._process_group, self._victim = process_group, victim

    def at(self, point, seq, rank):
        deadline_s = time.monotonic() + 20
        while point == "after_door" and self._process_group.why_not((self._victim,)) is None:
            assert time.monotonic() < deadline_s
            time.sleep(0.001)  # polls for what the hub's thread hears


def test_a_rank_that_left_is_named_and_the_others_go_on_without_it(crew):
    group = crew.group(3)
    group.must(_sum)
    for victim in (2, 0):
        group.must(_close, ranks=[victim])
        errors = group.run(_sum, ranks=[1])
        assert isinstance(errors[0], GroupBrokenError)
        assert f"rank {victim}" in str(errors[0]) or victim == 0
    group.must(_close, ranks=[1])


def test_a_member_leaves_while_another_is_still_in_the_last_call(crew, backend):
    for _ in range(5):
        group = crew.group(3, backend)
        group.must(_sum_and_leave)
        crew.rest()


def _sum_and_leave(name, rank):
    x = _sum(name, rank, 1 << 20)
    init.destroy_collective_group(name)
    assert (x == 6).all()


def test_a_stopped_member_is_missing_and_goes_on_later(crew):
    group = crew.group(2, "shm")
    group.must(_sum)
    process = group.processes[1].process
    os.kill(process.pid, signal.SIGSTOP)
    try:
        [error] = group.run(_sum, 4, 0.5, ranks=[0])
    finally:
        os.kill(process.pid, signal.SIGCONT)
    assert isinstance(error, CollectiveTimeoutError)
    assert [(report.rank, report.answers) for report in error.reports] == [(1, False)]
    assert "gives no answer" in str(error)
    assert all((x == 3).all() for x in group.must(_sum))


# ---------------------------------------------------------------------------------------------- joining


def _be_ready():
    """Imports what the first call of a process needs: that takes longer than some limits."""
    import raycollect.member.verbs  # noqa: F401


def _join_all(crew, claims, name="g", timeout_ms=20_000):
    taken = crew.take(len(claims))
    for one in taken:
        one.call(_be_ready)
    joining = [
        one.start(join, world, rank, backend, name, timeout_ms, crew.rendezvous)
        for one, (world, rank, backend) in zip(taken, claims, strict=True)
    ]
    return taken, [one.exception(60) for one in joining]


@pytest.mark.parametrize(
    ("claims", "said"),
    [
        ([(2, 0, "auto"), (3, 1, "auto")], "world_size"),
        ([(3, 0, "auto"), (2, 1, "auto"), (3, 2, "auto")], "world_size"),
        ([(2, 0, "shm"), (2, 1, "gloo")], "backend"),
        ([(3, 0, "auto"), (3, 1, "auto"), (3, 1, "auto")], "twice"),
    ],
)
def test_disagreeing_members_raise_invalid_group_error(crew, claims, said):
    _, errors = _join_all(crew, claims)
    assert [type(one) for one in errors] == [InvalidGroupError] * len(claims), errors
    assert all(said in str(one) for one in errors)


def test_a_group_can_be_formed_after_it_could_not(crew):
    taken, errors = _join_all(crew, [(2, 0, "shm"), (2, 1, "gloo")])
    assert all(errors)
    joining = [one.start(join, 2, rank, "shm", "g", 20_000, crew.rendezvous) for rank, one in enumerate(taken)]
    assert [outcome(one) for one in joining] == [None, None]


def test_join_timeout_names_the_missing_members(crew):
    _, errors = _join_all(crew, [(3, 0, "auto"), (3, 2, "auto")], timeout_ms=3_000)
    assert [type(one) for one in errors] == [CollectiveTimeoutError] * 2, errors
    assert errors[0].missing == (1,)
    assert errors[1].missing == (1,)


def test_join_timeout_names_the_missing_leader(crew):
    _, [error] = _join_all(crew, [(2, 1, "auto")], timeout_ms=300)
    assert isinstance(error, CollectiveTimeoutError)
    assert error.missing == (0,)


def test_a_record_of_a_dead_leader_is_survived(crew):
    [victim] = crew.take(1)
    victim.start(join, 2, 0, "auto", "g", 20_000, crew.rendezvous)
    [other] = crew.take(1)
    assert outcome(other.start(_posted, crew.rendezvous)) is True
    victim.kill()
    following = other.start(join, 2, 1, "auto", "g", 20_000, crew.rendezvous)
    [leader] = crew.take(1)
    assert outcome(leader.start(join, 2, 0, "auto", "g", 20_000, crew.rendezvous)) is None
    assert outcome(following) is None


def _posted(rendezvous):
    from raycollect.group.bootstrap_store import store_at

    while store_at(rendezvous).read("g") is None:
        time.sleep(0.01)  # polls for what another process does
    return True


def test_second_leader_raises_group_exists_error(crew):
    first = crew.take(1)[0].start(join, 2, 0, "auto", "g", 20_000, crew.rendezvous)
    [other] = crew.take(1)
    assert outcome(other.start(_posted, crew.rendezvous)) is True
    assert isinstance(outcome(other.start(join, 2, 0, "auto", "g", 20_000, crew.rendezvous)), GroupExistsError)
    assert outcome(other.start(join, 2, 1, "auto", "g", 20_000, crew.rendezvous)) is None
    assert outcome(first) is None


def test_a_name_is_taken_once_and_free_after_its_end(crew):
    group = crew.group(2, name="g")
    again = group.processes[1].start(join, 2, 1, "auto", "g", 500, crew.rendezvous)
    assert isinstance(outcome(again), GroupExistsError)
    for _ in range(3):
        group.must(_close)
        joining = [one.start(join, 2, r, "auto", "g", 20_000, crew.rendezvous) for r, one in enumerate(group.processes)]
        assert [outcome(one) for one in joining] == [None, None]
        assert all((x == 3).all() for x in group.must(_sum))


def test_nothing_of_a_group_stays_behind(crew):
    group = crew.group(2)
    group.must(_exchange, 8)
    group.must(_sum)
    group.must(_close)
    left = group.run(_wait_for_end)
    assert left == [[], []], left


def _wait_for_end(name, rank):
    deadline_s = time.monotonic() + 10
    while time.monotonic() < deadline_s:
        names = [one for one in _threads(name, rank) if one != "raycollect-hub"]
        if not names:
            return []
        time.sleep(0.01)  # polls for threads that are on their way out
    return names


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((0, 0), "world_size is 0"),
        ((2, 2), "rank is 2"),
        ((2, -1), "rank is -1"),
        ((2, True), "two integers"),
        ((2, "1"), "two integers"),
        ((2, 0, "auto", ""), "group_name"),
        ((2, 0, "auto", "g", 0), "gloo_timeout"),
    ],
)
def test_defect_5_wrong_ranks_and_sizes_are_refused(arguments, said, tmp_path):
    with pytest.raises(InvalidGroupError, match=said):
        init.init_collective_group(*arguments, rendezvous=f"file://{tmp_path}")


def test_wrong_places_to_meet_are_refused(tmp_path):
    with pytest.raises(InvalidGroupError, match="neither a Ray actor nor a task"):
        init.init_collective_group(1, 0)
    with pytest.raises(InvalidGroupError, match="file://"):
        init.init_collective_group(1, 0, rendezvous="tcp://host:1")
    tmp_path.chmod(0o755)
    with pytest.raises(InvalidGroupError, match="chmod 700"):
        init.init_collective_group(1, 0, rendezvous=f"file://{tmp_path}")
    with pytest.raises(UnknownBackendError):
        init.init_collective_group(1, 0, "nonsense", rendezvous="file:///tmp/x")


def test_outside_of_a_group():
    assert not init.is_group_initialized("nobody")
    assert init.get_rank("nobody") == -1
    assert init.get_collective_group_size("nobody") == -1
    with pytest.raises(UnknownGroupError, match="init_collective_group"):
        col.allreduce(np.ones(1), "nobody")
    with pytest.raises(UnknownGroupError):
        init.destroy_group("nobody")
    for given, said in (("avg", "op='avg'"), (ReduceOp.MAX, "a ReduceOp is no .* op='max'"), ([1], "a list is no")):
        assert init.get_rank(given) == -1
        for use in (init.get_group_handle, init.destroy_group, lambda name: col.allreduce(np.ones(1), name)):
            with pytest.raises(UnknownGroupError, match=said):
                use(given)
    assert init.gloo_available()
    assert not init.is_backend_available("nonsense")


# ---------------------------------------------------------------------------------------------- defects of the peers


def _op_does_not_stick(name, rank):
    x = np.full(2, rank + 1.0)
    col.allreduce(x, name, ReduceOp.MAX)
    y = np.full(2, rank + 1.0)
    col.allreduce(y, name)
    return x[0], y[0]


def test_defect_1_an_op_does_not_become_the_default(crew):
    assert crew.group(2).must(_op_does_not_stick) == [(2.0, 3.0)] * 2


def test_defect_2_the_timeout_reaches_every_operation(crew):
    group = crew.group(2, "tcp", timeout_ms=1_500)
    began_s = time.monotonic()
    for body in (_sum, _receive_by_default):
        [error] = group.run(body, ranks=[1])
        assert isinstance(error, CollectiveTimeoutError)
        assert error.timeout_s == 1.5
    assert time.monotonic() - began_s < 20


def _receive_by_default(name, rank):
    col.recv(np.zeros(4), 0, name)


def _sum_of(name, rank):
    x = np.full(4, init.get_rank(name) + 1.0)
    col.allreduce(x, name)
    return x[0], init.get_rank(name)


def test_defect_3_a_second_group_of_a_process_has_its_own_ranks(crew):
    first = crew.group(3, "gloo", "first")
    _, b, c = first.processes
    second = [(c, 0), (b, 1)]
    joining = [one.start(join, 2, rank, "gloo", "second", 20_000, crew.rendezvous) for one, rank in second]
    assert [outcome(one) for one in joining] == [None, None]
    both = [one.start(_sum_of, "second", rank) for one, rank in second]
    found = [outcome(one) for one in both]
    assert found == [(3.0, 0), (3.0, 1)]
    assert first.must(_sum_of) == [(6.0, 0), (6.0, 1), (6.0, 2)]


def test_defect_4_a_send_stays_in_its_group(crew, backend):
    first = crew.group(2, backend, "first")
    a, b = first.processes
    joining = [one.start(join, 2, rank, backend, "second", 20_000, crew.rendezvous) for rank, one in ((0, b), (1, a))]
    assert [outcome(one) for one in joining] == [None, None]
    done = [a.start(_two_sends, 0), b.start(_two_sends, 1)]
    assert [outcome(one) for one in done] == [None, 5.0]


def _two_sends(rank):
    """Process 0 is rank 0 of the first group and rank 1 of the second."""
    if rank == 0:
        col.send(np.full(3, 5.0), 1, "first")
        return None
    x = np.zeros(3)
    col.recv(x, 0, "first")
    return x[0]


def test_defect_8_a_tensor_with_gaps_is_reduced_where_it_is(crew, backend):
    for whole in crew.group(2, backend).must(_strided):
        assert (whole[:, ::2] == 2).all()
        assert (whole[:, 1::2] == 1).all()


def _strided(name, rank):
    whole = np.ones((4, 6))
    col.allreduce(whole[:, ::2], name)
    return whole


def test_defect_9_group_lookup_does_not_block(crew):
    group = crew.group(2)
    assert group.must(_look_up_while_joining, crew.rendezvous) == [(0, 3.0), (1, 3.0)]


def _look_up_while_joining(name, rank, rendezvous):
    """One thread waits for a member that never comes; meanwhile another looks up a group and uses it."""
    caught = []

    def wait_in_vain():
        try:
            init.init_collective_group(2, 1, "auto", f"never-{rank}", 5_000, rendezvous=rendezvous)
        except CollectiveTimeoutError as exc:
            caught.append(exc)

    waiting = threading.Thread(target=wait_in_vain)
    waiting.start()
    x = np.full(2, rank + 1.0)
    col.allreduce(x, name)
    found = init.get_group_handle(name).rank
    assert waiting.is_alive()
    assert not init.is_group_initialized(f"never-{rank}")
    waiting.join()
    assert len(caught) == 1
    return found, x[0]


@pytest.mark.parametrize("op", ["avg", "band", "bor", "bxor"])
def test_defect_10_more_reduce_ops(crew, op):
    dtype = np.float64 if op == "avg" else np.int32
    expected = {"avg": 2.0, "band": 1, "bor": 3, "bxor": 2}[op]
    assert crew.group(2, "gloo").must(_reduced, op, dtype) == [expected] * 2


def _reduced(name, rank, op, dtype):
    x = np.full(3, (1, 3)[rank], dtype)
    col.allreduce(x, name, op)
    return x[0]


def test_defect_11_one_tensor_twice_in_a_list_is_refused(crew, backend):
    group = crew.group(2, backend)
    errors = group.run(_gather_into_one)
    assert [type(one) for one in errors] == [AliasError] * 2


def _gather_into_one(name, rank):
    col.allgather([np.zeros(3)] * 2, np.ones(3), name)
