"""Several threads of a rank on one group: what is called at once is refused on all ranks, what is handed over works."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from raycollect.errors import ConcurrentCallError
from raycollect.group.call_queue import Callers
from raycollect.member import init
from raycollect.member import operations as col
from tests.support.waiting import wait_until

WAIT_S = 30.0
BACKENDS = ("shm", "tcp", "gloo")


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


# ---------------------------------------------------------------------------------------------- the threads


def test_a_second_thread_begins_a_conflict_that_lasts_until_all_have_ended():
    callers = Callers(3)
    me = threading.get_ident()
    callers.enter("allreduce")
    with ThreadPoolExecutor(1, thread_name_prefix="other") as pool:
        assert pool.submit(callers.enter, "barrier").result(WAIT_S) is True
        other = pool.submit(threading.get_ident).result(WAIT_S)
    found = callers.conflict
    assert (found.kind, found.rank) == ("concurrent", 3)
    assert "'other_0', which calls barrier while a call of 'MainThread'" in str(found)
    assert callers.enter("broadcast") is False
    callers.leave(me)
    callers.leave(me)
    assert callers.conflict is found
    assert callers.enter("reduce") is False, "it goes on, as another thread's has not ended"
    callers.leave(other)
    assert callers.conflict is found
    callers.leave(me)
    assert callers.conflict is None


# ---------------------------------------------------------------------------------------------- in groups


def _communicator(name, ranks="all"):
    return init.get_group_handle(name).communicator(ranks)


def _is_at_check(name):
    return lambda: (call := _communicator(name).client.call) and call.place.startswith("check")


def _summed(name, value, **options):
    """What a call gives: its sum, or what it raises; a tensor of a refused call is as it was."""
    x = np.full(3, float(value))
    try:
        work = col.allreduce(x, name, **options)
        if work is not None:
            work.wait()
    except ConcurrentCallError as exc:
        assert (x == value).all(), "it was touched"
        return str(exc)
    return x[0]


def _in_thread(name, thread, function, *args, **options):
    """Runs a function in a thread of that name; gives its future."""
    pool = ThreadPoolExecutor(1, initializer=lambda: setattr(threading.current_thread(), "name", thread))
    future = pool.submit(function, name, *args, **options)
    pool.shutdown(wait=False)
    return future


def _is_told(said):
    return "thread is 'second', which calls allreduce while a call of 'first' has not ended" in said


def _two_at_once(name, rank):
    """On rank 0 a second thread comes while the first one's call is in the check, where rank 2 is missing."""
    col.barrier(name)
    if rank == 0:
        first = _in_thread(name, "first", _summed, 1)
        assert wait_until(_is_at_check(name))
        second = _in_thread(name, "second", _summed, 2)
        assert wait_until(lambda: _communicator(name)._objecting is not None)
        _tell(name)
        return [one.result(WAIT_S) for one in (first, second)]
    if rank == 2:
        _hear(name)
    return [_summed(name, 10), _summed(name, 20)]


def _tell(name):
    """Rank 0 says so to rank 2."""
    col.send(np.zeros(1), 2, name)


def _hear(name):
    col.recv(np.zeros(1), 0, name)


def _sum(name, rank):
    return _summed(name, rank + 1)


def test_calls_of_two_threads_at_once_are_refused_on_all_ranks(crew, backend):
    group = crew.group(3, backend)
    results = group.must(_two_at_once)
    assert all(_is_told(said) for rank in results for said in rank), results
    assert group.must(_sum) == [6.0] * 3


def _second_past_the_check(name, rank, barrier=None):
    """On rank 0 a second thread comes while the first one's call is in its kernel."""
    col.barrier(name)
    if rank:
        return [_summed(name, 10), _summed(name, 20)]
    communicator = _communicator(name).communicator
    begun, go_on, launch = threading.Event(), threading.Event(), communicator.launch

    def held(*args):
        begun.set()
        assert go_on.wait(WAIT_S)
        return launch(*args)

    communicator.launch = held
    first = _in_thread(name, "first", _summed, 1)
    assert begun.wait(WAIT_S)
    second = _in_thread(name, "second", _summed, 2)
    assert wait_until(lambda: _communicator(name)._callers.conflict is not None)
    del communicator.launch
    go_on.set()
    return [first.result(WAIT_S), second.result(WAIT_S)]


@pytest.mark.parametrize("backend", ["tcp", "gloo"])
def test_a_call_that_has_passed_the_check_goes_on(crew, backend):
    group = crew.group(2, backend)
    for first, second in group.must(_second_past_the_check):
        assert first == 11
        assert _is_told(second)
    assert group.must(_sum) == [3.0] * 2


def _handed_over(name, rank):
    """Each call in another thread than the one before, and not in the same ones on all ranks."""
    found = []
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        for turn in range(20):
            pool = (one, other)[(turn if rank else turn // 2) % 2]
            found.append(pool.submit(_summed, name, turn, async_op=turn % 3 == 0).result(WAIT_S))
            found.append(_summed(name, turn))
    return found


def test_a_thread_may_follow_another(crew, backend):
    group = crew.group(2, backend)
    expected = [2.0 * turn for turn in range(20) for _ in range(2)]
    assert group.must(_handed_over) == [expected] * 2
