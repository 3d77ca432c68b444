"""The driver as a rank of a group that it drives: its own arrays stand where other ranks have refs."""

from __future__ import annotations

import numpy as np
import pytest
import ray

import raycollect as col
from raycollect import errors
from tests.support.actors import Gate, Worker, block
from tests.support.checks import refused
from tests.support.waiting import wait_until

WORLD = 3


class Trio:
    """Two actors and the driver in the group ``"default"``, the driver at one of the ranks."""

    def __init__(self, actors, at, backend="shm", **options):
        self.at = at
        self.workers = actors(Worker, WORLD - 1)
        self.members = self.place(self.workers, col.this_process())
        self.group = col.create_collective_group(self.members, backend=backend, **options)

    def place(self, others, mine):
        """A list by rank."""
        found = list(others)
        found.insert(self.at, mine)
        return found

    def operands(self, values):
        """What a call takes for such values by rank, kept in the actors, and the driver's own."""
        others = [value for rank, value in enumerate(values) if rank != self.at]
        refs = [
            worker.make.remote(lambda self, value: copied(value), value)
            for worker, value in zip(self.workers, others, strict=True)
        ]
        return self.place(refs, copied(values[self.at]))


def copied(value):
    """Arrays that can be written: those that Ray passes can't."""
    return [one.copy() for one in value] if isinstance(value, list) else value.copy()


def values_of(results):
    """What refs stand for, and arrays as they are."""
    return [col.get(one) if isinstance(one, ray.ObjectRef) else one for one in results]


def check(results, expected):
    for found, wanted in zip(values_of(results), expected, strict=True):
        for one, other in zip(*((found, wanted) if isinstance(wanted, list) else ([found], [wanted])), strict=True):
            np.testing.assert_array_equal(one, other, strict=True)


@pytest.fixture(params=[(0, "shm"), (1, "shm"), (2, "shm"), (1, "tcp")], ids=lambda one: f"{one[1]}-{one[0]}")
def trio(request, actors):
    return Trio(actors, *request.param)


@pytest.mark.parametrize(
    ("at", "backend"),
    [
        pytest.param(at, backend, marks=[pytest.mark.full] * ((at, backend) not in ((0, "shm"), (2, "tcp"))))
        for at in range(WORLD)
        for backend in ("shm", "tcp", "gloo", "torch:gloo")
    ],
)
def test_all_operations_with_the_driver_at_each_place(actors, backend, at):
    trio = Trio(actors, at, backend)
    ranks = range(WORLD)
    for seed, size in enumerate((0, 1, 1001)):
        rng = np.random.default_rng(seed)
        rows = [rng.integers(-9, 9, size).astype(np.float64) for _ in ranks]
        lists = [[rng.integers(-9, 9, size + 3 * taker) for taker in ranks] for _ in ranks]  # giver, then taker
        total, zero = sum(rows), [np.zeros_like(row) for row in rows]

        given = trio.operands(rows)
        results = col.allreduce_refs(given)
        assert results[at] is given[at]
        check(results, [total] * WORLD)
        check(col.allreduce_refs(trio.operands(rows), op="max", inplace=False), [np.max(rows, 0)] * WORLD)
        check(col.scan_refs(trio.operands(rows)), np.cumsum(rows, 0))
        for root in ranks:
            check([col.reduce_refs(trio.operands(rows), root)], [total])
            check(col.broadcast_refs(trio.operands(rows), root), [rows[root]] * WORLD)
            pieces = trio.operands(lists)[root]
            outs = trio.operands([np.zeros_like(one) for one in lists[root]])
            check(col.scatter_refs(outs, pieces, root), lists[root])
            check(col.scatter_refs(None, pieces, root), lists[root])
            check([col.gather_refs(None, trio.operands(rows), root)], [rows])
            out = trio.operands([[row.copy() for row in zero]] * WORLD)[root]
            check([col.gather_refs(out, trio.operands(rows), root)], [rows])
        check(col.allgather_refs(None, trio.operands(rows)), [rows] * WORLD)
        given = trio.operands([zero] * WORLD)
        check(col.allgather_refs(given, trio.operands(rows)), [rows] * WORLD)
        check([given[at]], [rows])
        crossed = [[lists[giver][taker] for giver in ranks] for taker in ranks]
        check(col.alltoall_refs(None, trio.operands(lists)), crossed)
        sums = [sum(one) for one in crossed]
        check(col.reducescatter_refs(None, trio.operands(lists)), sums)
        check(col.reducescatter_refs(trio.operands([0 * one for one in sums]), trio.operands(lists)), sums)
        for giver, taker in ((at, (at + 1) % WORLD), ((at + 1) % WORLD, at)):
            source, target = trio.operands(rows)[giver], trio.operands(zero)[taker]
            check([col.send_ref(source, target)], [rows[giver]])
            check([col.send_ref(source, trio.members[taker])], [rows[giver]])
    col.barrier()


def test_sources_layouts_batches_and_plans(trio):
    rows = [np.arange(7.0) + 10 * rank for rank in range(WORLD)]
    given = trio.operands(rows)
    check(col.broadcast_refs(given, trio.at, source=rows[1] + 1), [rows[1] + 1] * WORLD)
    check(col.broadcast_refs(given, (trio.at + 1) % WORLD, source=ray.put(rows[2])), [rows[2]] * WORLD)
    check(col.scatter_refs(given, rows, (trio.at + 1) % WORLD), rows)
    cut = col.layout([WORLD, 7], mesh={"rank": WORLD}, spec=("rank",), dtype="float64")
    whole = col.layout([WORLD, 7], mesh={"one": 1}, dtype="float64")
    targets = trio.operands([np.zeros((1, 7))] * WORLD)
    check(col.reshard_refs([np.stack(rows)], targets, src=whole, dst=cut), [row[None] for row in rows])
    puts, pieces = [ray.put(row[None]) for row in rows], [row[None] for row in rows]
    check(col.reshard_refs(puts, trio.members, src=cut, dst=cut), pieces)
    assert f"{WORLD} participants" in str(col.plan(col.allreduce_refs, given)).replace("ranks", "participants")
    check(given, rows)  # nothing was touched
    with col.batch() as both:
        col.allreduce_refs(given)
        made = col.allgather_refs(None, given)
        col.gather_refs(None, [one[0] if isinstance(one, list) else one for one in given], trio.at)
    assert len(made) == WORLD
    check(both.refs[0], [sum(rows)] * WORLD)
    check(both.refs[1], [[sum(rows)] * WORLD] * WORLD)
    check([both.refs[2]], [[sum(rows)] * WORLD])


def test_it_goes_on_beside_the_caller_and_in_the_order_of_its_calls(actors):
    trio, gate = Trio(actors, 1), Gate.options(max_concurrency=2).remote()
    given = trio.operands([np.full(4, 1.0)] * WORLD)
    busy = block(trio.workers[0], gate)
    works = [col.allreduce_refs(given, async_op=True) for _ in range(20)]
    last = col.allgather_refs(None, given, async_op=True)
    assert not works[0].done()
    ray.get(gate.open.remote())
    assert wait_until(works[-1].done), "without a call that waits"
    assert wait_until(last.done)
    check(given, [np.full(4, 3.0**20)] * WORLD)
    assert "wait" in repr(last.refs[1])
    check(last.wait(), [[np.full(4, 3.0**20)] * WORLD] * WORLD)
    assert type(last.refs[1]) is list
    ray.get(busy)


def test_what_can_not_be_is_refused_and_nothing_is_touched(actors):
    trio = Trio(actors, 0)
    ones = [np.ones(5)] * WORLD
    given = trio.operands(ones)
    fixed = np.ones(5)
    fixed.flags.writeable = False
    with refused(errors.ReadOnlyError, "rank 0", "the driver"):
        col.allreduce_refs([fixed, *given[1:]])
    with refused(errors.MismatchError, "rank 0"):
        col.allreduce_refs([np.ones(6), *given[1:]])
    shared = np.ones(9)
    with refused(errors.RefusedError, "rank 0"):
        col.allgather_refs([[shared[:5], shared[2:7], shared[4:]], *trio.workers], given)
    with refused(errors.RefusedError, "list"):
        col.allreduce_refs([[1.0, 2.0], *given[1:]])
    with refused(errors.RefusedError, "second ref of the same actor", "the driver"):
        col.allreduce_refs([np.ones(5), np.ones(5), given[1]])
    with refused(errors.RefusedError, "captured step", "batch()"), col.capture():
        col.allreduce_refs(given)
    with refused(errors.RefusedError, "captured step"), col.capture(), col.batch():
        col.barrier()
    with refused(errors.InvalidGroupError, "more than once"):
        col.create_collective_group([col.this_process(), col.this_process()], group_name="twice")
    check(given, ones)
    with pytest.raises(TypeError, match="can't be sent"):
        ray.put(col.this_process())
    trio.group.destroy()
    with refused(errors.RefusedError, "an ObjectRef that a method of a participant returned"):
        col.allreduce_refs(given)


def test_death_timeout_and_retry(actors):
    trio, gate = Trio(actors, 0, timeout_s=1), Gate.options(max_concurrency=2).remote()
    given = trio.operands([np.full(3, rank + 1.0) for rank in range(WORLD)])
    busy = block(trio.workers[1], gate)
    with pytest.raises(errors.CollectiveTimeoutError) as caught:
        col.allreduce_refs(given)
    assert caught.value.missing == (2,)
    work = col.allreduce_refs(given, async_op=True, timeout_s=60)
    assert work.cancel()
    with pytest.raises(errors.PlanAbortedError):
        work.wait(30)
    ray.get(trio.workers[0].read.remote())  # behind the plan, which it has given up by then
    ray.get(gate.open.remote())
    ray.get(busy)
    check(work.retry().wait(30), [np.full(3, 6.0)] * WORLD)

    gate = Gate.options(max_concurrency=2).remote()
    block(trio.workers[1], gate)
    work = col.allreduce_refs(given, async_op=True, timeout_s=60)
    ray.kill(trio.workers[1])
    with pytest.raises(errors.ParticipantDiedError) as died:
        work.wait(30)
    assert died.value.rank == 2
    trio.group.rebuild()
    assert trio.group.world_size == 2
    check(col.allreduce_refs([np.ones(3), given[1]], op="max"), [np.full(3, 6.0)] * 2)
    new = actors(Worker, 1)
    trio.group.add(new)
    trio.group.remove(col.this_process())
    assert [trio.group.get_rank(one) for one in (col.this_process(), *new)] == [-1, 1]
    trio.group.add(col.this_process())
    assert trio.group.get_rank(col.this_process()) == 2
    col.barrier()


def test_status_statistics_members_calls_timeline_and_lifetime(actors):
    trio = Trio(actors, 1)
    given = trio.operands([np.ones(3)] * WORLD)
    assert col.get_rank() == 1
    assert "the driver" in repr(trio.group)
    assert "the driver" in str(trio.group.status().members[1])
    before = trio.group.statistics().members[1].store
    for _ in range(20):
        col.allreduce_refs(given)
    assert wait_until(lambda: trio.group.statistics().members[1].store.freed >= before.freed + 20)
    assert trio.group.statistics().members[1].store.held <= before.held
    given = trio.operands([np.ones(3)] * WORLD)
    theirs = [one.call.remote(lambda self: col.allreduce(np.ones(2)) or 1) for one in trio.workers]
    mine = np.ones(2)
    col.allreduce(mine)
    np.testing.assert_array_equal(mine, np.full(2, 3.0))
    ray.get(theirs)
    with col.timeline() as recorded:
        col.allreduce_refs(given)
    assert not recorded.missing
    names = [one.name for one in recorded.trace.processes]
    assert "driver" in names
    assert "the driver" not in names, "it is recorded once"
    col.destroy_collective_group()
    assert col.get_rank() == -1
    assert col.this_process() is trio.members[1]
    np.testing.assert_array_equal(given[1], np.full(3, 3.0))


def test_an_actor_that_drives_is_a_rank_too(actors):
    trainer, *workers = actors(Worker, 3)

    def drive(self, workers):
        group = col.create_collective_group([col.this_process(), *workers], group_name="theirs")
        refs = [worker.get_buffer.remote() for worker in workers]
        mine = np.full(10, 5, np.float32)
        for _ in range(2):
            col.allreduce_refs([mine, *refs], "theirs")
        name = repr(group)
        group.destroy()
        return mine, name

    mine, name = ray.get(trainer.call.remote(drive, workers))
    np.testing.assert_array_equal(mine, np.full(10, 21, np.float32))
    assert "the driver Buffers(" in name
