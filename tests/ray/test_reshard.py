"""`reshard_refs` over actors: sides apart and shared, targets given and made, in batches and captured steps."""

from __future__ import annotations

import numpy as np
import pytest
import ray

import raycollect as col
from raycollect import errors
from tests.pure.resharding import empty_of, held_by, whole_tensors
from tests.support.actors import Worker

SRC = {
    "norm": col.layout([6], mesh={"tp": 2}),
    "up": col.layout([6, 8], mesh={"tp": 2}, spec=("tp",)),
    **col.fused_layouts("qkv", {name: col.layout([4, 6], mesh={"tp": 2}, spec=("tp",)) for name in "qkv"}),
}
DST = {
    "norm": col.layout([6], mesh={"dp": 3}),
    "up": col.layout([6, 8], mesh={"tp": 3}, spec=(None, "tp")),
    **{name: col.layout([4, 6], mesh={"tp": 3}, spec=(None, "tp")) for name in "qkv"},
}


def keep(actors, values):
    """Keeps a value of each rank in its actor, writable."""

    def copied(self, value):
        return {name: np.array(one) for name, one in value.items()}

    return [actor.make.remote(copied, values[rank]) for rank, actor in enumerate(actors)]


def check(refs, expected):
    for rank, found in enumerate(col.get(refs)):
        assert set(found) == set(expected[rank])
        for name, array in expected[rank].items():
            np.testing.assert_array_equal(found[name], array, err_msg=f"{name} on rank {rank}")


@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_a_declared_group_moves_in_place(actors, backend):
    workers = actors(Worker, 4)  # the second source is the first target
    col.declare_collective_group(workers, backend=backend)
    whole = whole_tensors(SRC, 1)
    given, taken = keep(workers[:2], held_by(SRC, whole)), keep(workers[1:], empty_of(DST))
    assert col.reshard_refs(given, taken, src=SRC, dst=DST) == taken
    check(taken, held_by(DST, whole))
    check(given, held_by(SRC, whole))
    again = whole_tensors(SRC, 2)
    fresh = keep(workers[:2], held_by(SRC, again))
    with col.batch() as batch:
        col.reshard_refs(fresh, taken, src=SRC, dst=DST)
        col.barrier()
    assert batch.refs[0] == taken
    check(taken, held_by(DST, again))


def test_a_derived_group_makes_the_targets(actors):
    workers = actors(Worker, 5)
    whole = whole_tensors(SRC, 3)
    given = keep(workers[:2], held_by(SRC, whole))
    work = col.reshard_refs(given, workers[2:], src=SRC, dst=DST, async_op=True)
    check(work.wait(), held_by(DST, whole))


def test_a_single_tensor_of_torch(actors):
    torch = pytest.importorskip("torch")
    workers = actors(Worker, 2)
    rows, columns = (
        col.layout([4, 6], mesh={"tp": 2}, spec=spec, dtype=torch.bfloat16) for spec in (("tp",), (None, "tp"))
    )
    given = [
        w.make.remote(lambda self, r: torch.arange(12).reshape(2, 6).bfloat16() + 12 * r, r)
        for r, w in enumerate(workers)
    ]
    made = col.get(col.reshard_refs(given, workers, src=rows, dst=columns))
    whole = torch.arange(24).reshape(4, 6).bfloat16()
    for rank, tensor in enumerate(made):
        assert torch.equal(tensor, whole[:, 3 * rank : 3 * rank + 3])


def test_a_captured_step_moves_in_each_run(actors):
    workers = actors(Worker, 2)
    col.declare_collective_group(workers, backend="shm")
    src, dst = (col.layout([4, 2], mesh={"tp": 2}, spec=spec) for spec in (("tp",), (None, "tp")))
    ray.get([worker.set_buffer.remote(np.zeros((2, 2), np.float32)) for worker in workers])
    given = [worker.get_buffer.remote() for worker in workers]
    taken = [worker.make.remote(lambda self: np.zeros((4, 1), np.float32)) for worker in workers]

    def fill(self, value):
        self.buffer[...] = value

    with col.capture() as step:
        col.reshard_refs(given, taken, src=src, dst=dst)
    for run in range(5):
        ray.get([worker.call.remote(fill, 10 * run + rank) for rank, worker in enumerate(workers)])
        step.run()
        for array in col.get(taken):
            np.testing.assert_array_equal(array[:, 0], [10 * run, 10 * run, 10 * run + 1, 10 * run + 1])
    assert "reshard" in str(step.explain())


def test_targets_stay_as_they_are_or_all_are_written_or_none(actors):
    workers = actors(Worker, 5)
    whole = whole_tensors(SRC, 5)
    given, taken = keep(workers[:2], held_by(SRC, whole)), keep(workers[2:], empty_of(DST))
    nbytes = sum(array.nbytes for array in empty_of(DST)[0].values())
    assert col.plan(col.reshard_refs, given, taken, src=SRC, dst=DST, inplace=False).memory.outputs == nbytes
    made = col.reshard_refs(given, taken, src=SRC, dst=DST, inplace=False)
    check(made, held_by(DST, whole))
    check(taken, empty_of(DST))
    work = col.reshard_refs(given, taken, src=SRC, dst=DST, snapshot=True, async_op=True)
    assert work.wait() == taken
    check(taken, held_by(DST, whole))
    with col.batch() as batch:
        fresh = col.reshard_refs(given, taken, src=SRC, dst=DST, inplace=False)
        with pytest.raises(errors.InvalidArgumentError, match="make the call by itself"):
            col.reshard_refs(given, taken, src=SRC, dst=DST, snapshot=True)
        col.reshard_refs(given, fresh, src=SRC, dst=DST)
    check(batch.refs[0], held_by(DST, whole))


def test_what_a_reshard_makes_is_an_operand_of_later_calls(actors):
    workers = actors(Worker, 4)
    src, dst = (col.layout([4, 6], mesh={"tp": 2}, spec=spec) for spec in (("tp",), (None, "tp")))
    whole = np.arange(24, dtype=np.float32).reshape(4, 6)
    given = [
        worker.make.remote(lambda self, part: part, whole[2 * at : 2 * at + 2]) for at, worker in enumerate(workers[:2])
    ]

    def calls():
        made = col.reshard_refs(given, workers[2:], src=src, dst=dst)
        return col.allreduce_refs(made)

    assert [row.op for row in col.plan(calls).rows] == ["reshard", "allreduce sum"]
    with col.batch() as batch:
        calls()
    for array in col.get(batch.refs[1]):
        np.testing.assert_array_equal(array, whole[:, :3] + whole[:, 3:])


LAYERS = {f"{layer}.{name}": SRC["up"] for layer in range(2) for name in ("up", "down")}
BY_PATTERN = {"*.up": DST["up"], "*": col.layout([6, 8], mesh={"dp": 3})}


def test_layouts_go_by_patterns(actors):
    workers = actors(Worker, 5)
    spelt = {name: BY_PATTERN["*.up" if name.endswith("up") else "*"] for name in LAYERS}
    given = keep(workers[:2], held_by(LAYERS, whole_tensors(LAYERS, 4)))
    expected = held_by(spelt, whole_tensors(LAYERS, 4))
    check(col.reshard_refs(given, workers[2:], src=LAYERS, dst=BY_PATTERN), expected)
    made = col.reshard_refs(given, workers[2:], src={"?.*": SRC["up"]}, dst=BY_PATTERN)  # the refs say the names
    check(made, expected)
    check(col.reshard_refs(given, made, src={"*": SRC["up"]}, dst=spelt), expected)
    assert col.plan(col.reshard_refs, given, made, src={"*": SRC["up"]}, dst=BY_PATTERN).rows[0].op == "reshard"


def test_names_that_are_not_known_yet_have_to_be_spelt(actors):
    workers = actors(Worker, 5)
    given = keep(workers[:2], held_by(LAYERS, whole_tensors(LAYERS, 4)))
    with col.batch() as batch:
        first = col.reshard_refs(given, workers[2:4], src=LAYERS, dst={"*": SRC["up"]})
        with pytest.raises(errors.LayoutError, match="not known before the call"):
            col.reshard_refs(first, workers[4:], src={"*": SRC["up"]}, dst={"*": SRC["up"]})
        dst = dict.fromkeys(LAYERS, col.layout([6, 8], mesh={"dp": 1}))
        col.reshard_refs(first, workers[4:], src={"*": SRC["up"]}, dst=dst)
    check(batch.refs[1], {0: whole_tensors(LAYERS, 4)})
