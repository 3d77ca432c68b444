"""Members' calls where a rank is late, has left, or has died."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from raycollect.errors import (
    CollectiveTimeoutError,
    FaultError,
    GroupBrokenError,
    KernelError,
    ParticipantDiedError,
)
from raycollect.member import init
from raycollect.member import operations as col
from raycollect.member.runtime import this_runtime
from tests.pure.member.operation_bodies import backend, close, summed
from tests.pure.processes import outcome
from tests.support.waiting import wait_until

__all__ = ["backend"]  # fixtures


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
            return summed(name, rank, 4, timeout_s)
        except CollectiveTimeoutError:
            timeout_s *= 1.1


def test_lone_receive_times_out_and_later_meets_its_send(crew, backend):
    group = crew.group(3, backend)
    [error] = group.run(_receive, 0.3, ranks=[1])
    assert isinstance(error, CollectiveTimeoutError)
    assert error.missing == (2,), "by its number in the group"
    sending = group.start(2, _send)
    [got] = group.run(_receive, 20, ranks=[1])
    assert outcome(sending) is None
    assert (got == 5).all()


def _send(name, rank):
    col.send(np.full(4, 5.0), 1, name)


def _receive(name, rank, timeout_s):
    x = np.zeros(4)
    col.recv(x, 2, name, timeout_s=timeout_s)
    return x


def _sum_and_tell(name, rank, folder):
    """Makes a file once the call is under way."""
    client = this_runtime().process_groups.find(name).communicator("all").client

    def tell():
        assert wait_until(lambda: client.call is not None and client.call.place == "check")
        (folder / str(rank)).touch()

    threading.Thread(target=tell, daemon=True).start()
    return summed(name, rank)


@pytest.mark.parametrize(("victim", "backend"), [(0, "shm"), (2, "shm"), (2, "tcp"), (0, "gloo")])
def test_a_rank_that_dies_while_others_wait_is_named_at_once(crew, backend, victim, tmp_path):
    group = crew.group(3, backend)
    group.must(summed)
    survivors = [rank for rank in range(3) if rank != victim]
    waiting = [group.start(rank, _sum_and_tell, tmp_path) for rank in survivors]
    assert wait_until(lambda: all((tmp_path / str(rank)).exists() for rank in survivors))
    group.processes[victim].kill()
    killed_s = time.monotonic()
    errors = [outcome(one) for one in waiting]
    assert time.monotonic() - killed_s < 10  # not the 20 s of the group
    assert [type(one) for one in errors] == [ParticipantDiedError] * 2, errors
    assert [one.rank for one in errors] == [victim] * 2
    later = group.run(summed, ranks=survivors)
    assert [type(one) for one in later] == [GroupBrokenError] * 2
    assert "What to do" in str(later[0])


def test_a_rank_that_left_is_named_and_the_others_go_on_without_it(crew):
    group = crew.group(3)
    group.must(summed)
    for victim in (2, 0):
        group.must(close, ranks=[victim])
        errors = group.run(summed, ranks=[1])
        assert isinstance(errors[0], GroupBrokenError)
        assert f"rank {victim}" in str(errors[0]) or victim == 0
    group.must(close, ranks=[1])


def test_a_member_leaves_while_another_is_still_in_the_last_call(crew, backend):
    for _ in range(5):
        group = crew.group(3, backend)
        group.must(_sum_and_leave)
        crew.rest()


def _sum_and_leave(name, rank):
    x = summed(name, rank, 1 << 20)
    init.destroy_collective_group(name)
    assert (x == 6).all()


def _fails_in_its_kernel(name, rank, failing):
    """What each rank gets where the kernel of one fails, and by the call after that."""
    x, communicator = np.full(1 << 16, rank + 1.0), this_runtime().process_groups.find(name).communicator("all")
    backend, error = communicator.communicator, None

    def launch(*_):
        raise KernelError(detail="no memory")

    if rank == failing:
        backend.launch = launch
    try:
        col.allreduce(x, name)
    except FaultError as exc:
        error = exc
    if rank == failing:
        del backend.launch
    return error, summed(name, rank), communicator.communicator is backend


def test_a_kernel_that_fails_on_one_rank_leaves_a_group_that_works(crew, backend):
    """`shm` and `tcp` keep their connections."""
    group = crew.group(3, backend)
    group.must(summed)
    for failing in (0, 2, 1):
        results = group.must(_fails_in_its_kernel, failing)
        assert isinstance(results[failing][0], KernelError)
        assert all("no memory" in str(error) for error, _, _ in results), results
        assert all((total == 6).all() for _, total, _ in results)
        assert [kept for _, _, kept in results] == [backend != "gloo"] * 3
