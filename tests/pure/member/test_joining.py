"""How members form a group, and why they can't; and the defects of Ray's operations that must not come back."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from raycollect.core.model import ReduceOp
from raycollect.errors import (
    CollectiveTimeoutError,
    GroupExistsError,
    InvalidGroupError,
    UnknownBackendError,
    UnknownGroupError,
)
from raycollect.member import init
from raycollect.member import operations as col
from tests.pure.member.operation_bodies import backend, close, exchange, summed
from tests.pure.processes import join, outcome
from tests.support.waiting import wait_until

__all__ = ["backend"]  # fixtures


def _threads(name, rank):
    return sorted(t.name for t in threading.enumerate() if t.name.startswith("raycollect"))


def _be_ready():
    """Imports what the first call of a process needs: that takes longer than some limits."""
    import raycollect.member.operations  # noqa: F401


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


def test_join_timeout_names_the_missing_members(crew):
    _, errors = _join_all(crew, [(3, 0, "auto"), (3, 2, "auto")], timeout_ms=1_000)
    assert [type(one) for one in errors] == [CollectiveTimeoutError] * 2, errors
    assert errors[0].missing == (1,)
    assert errors[1].missing == (1,)


def test_a_name_is_taken_once_and_free_after_its_end(crew):
    group = crew.group(2, name="g")
    again = group.processes[1].start(join, 2, 1, "auto", "g", 500, crew.rendezvous)
    assert isinstance(outcome(again), GroupExistsError)
    for _ in range(3):
        group.must(close)
        joining = [one.start(join, 2, r, "auto", "g", 20_000, crew.rendezvous) for r, one in enumerate(group.processes)]
        assert [outcome(one) for one in joining] == [None, None]
        assert all((x == 3).all() for x in group.must(summed))


def test_nothing_of_a_group_stays_behind(crew):
    group = crew.group(2)
    group.must(exchange, 8)
    group.must(summed)
    group.must(close)
    left = group.run(_wait_for_end)
    assert left == [[], []], left


def _wait_for_end(name, rank):
    """The threads that are left once those of the group had time to end; two are the process's own."""

    def left():
        return [one for one in _threads(name, rank) if one not in ("raycollect-hub", "raycollect-timer")]

    wait_until(lambda: not left())
    return left()


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
        init.init_collective_group(1, 0, "nonsense", rendezvous=f"file://{tmp_path / 'x'}")


def test_outside_of_a_group():
    assert not init.is_group_initialized("nobody")
    assert init.get_rank("nobody") == -1
    assert init.get_collective_group_size("nobody") == -1
    with pytest.raises(UnknownGroupError, match="init_collective_group"):
        col.allreduce(np.ones(1), "nobody")
    with pytest.raises(UnknownGroupError):
        init.destroy_group("nobody")
    for given, said in (
        ("avg", "op='avg'"),
        (ReduceOp.MAX, "a ReduceOp is not the .* op='max'"),
        ([1], "a list is not"),
    ):
        assert init.get_rank(given) == -1
        for use in (init.get_group_handle, init.destroy_group, lambda name: col.allreduce(np.ones(1), name)):
            with pytest.raises(UnknownGroupError, match=said):
                use(given)
    assert init.gloo_available()
    assert not init.is_backend_available("nonsense")


def test_defect_2_the_timeout_reaches_every_operation(crew):
    group = crew.group(2, "tcp", timeout_ms=500)
    began_s = time.monotonic()
    for body in (summed, _receive_by_default):
        [error] = group.run(body, ranks=[1])
        assert isinstance(error, CollectiveTimeoutError)
        assert error.timeout_s == 0.5
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


def test_defect_9_group_lookup_does_not_block(crew):
    group = crew.group(2)
    assert group.must(_look_up_while_joining, crew.rendezvous) == [(0, 3.0), (1, 3.0)]


def _look_up_while_joining(name, rank, rendezvous):
    """One thread waits for a member that never comes; meanwhile another looks up a group and uses it."""
    caught = []

    def wait_in_vain():
        try:
            init.init_collective_group(2, 1, "auto", f"never-{rank}", 3_000, rendezvous=rendezvous)
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
