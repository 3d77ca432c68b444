"""The executor: programs of one plan on ranks in threads, over the backend `local`; what goes wrong, and what then."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from raycollect.backends import arrays
from raycollect.backends.local import LocalCommunicator, LocalWorld
from raycollect.door import Arrival, Spec, encode_arrival
from raycollect.errors import (
    AliasError,
    AllocationError,
    CollectiveTimeoutError,
    InternalError,
    KernelError,
    MismatchError,
    NotATensorError,
    PlanAbortedError,
    ProducerFailedError,
    ReadOnlyError,
    RefusedError,
    TensorDirtyError,
    TensorFreedError,
    TensorLostError,
    UnsupportedError,
)
from raycollect.executor import POINTS, Execution, Instruments, Outcome
from raycollect.model import Faults, GroupSpec, Kernel, Key, Launch, NoFaults, OpKind, ReduceOp, task_key
from raycollect.observe import Event, Recorder
from raycollect.planner import Request, decode_program, encode_program, plan
from raycollect.pos import Container, Store

WAIT_S = 20.0
_numbers = itertools.count(1)


class FailAt:
    """Raises once, at one point of one rank; `consumed` tells that it did."""

    def __init__(self, *, point: str, rank: int, error: Callable[[], BaseException] | None = None) -> None:
        assert point in POINTS
        self.consumed = 0
        self._where = (point, rank)
        self._error = error or (lambda: KernelError(detail="injected"))

    def at(self, point: str, seq: int, rank: int) -> None:
        if (point, rank) == self._where and not self.consumed:
            self.consumed += 1
            raise self._error()


class HoldAt:
    """Holds one rank at a point until it is let go."""

    def __init__(self, *, point: str, rank: int) -> None:
        assert point in POINTS
        self._where = (point, rank)
        self.came = threading.Event()
        self.go = threading.Event()

    def at(self, point: str, seq: int, rank: int) -> None:
        if (point, rank) == self._where:
            self.came.set()
            assert self.go.wait(WAIT_S)


class Ticks:
    """A clock that goes on by one each time it is read."""

    def __init__(self) -> None:
        self._count = itertools.count(1)

    def __call__(self) -> float:
        return float(next(self._count))


class Fleet:
    """Ranks in threads, each with a store, a recorder and a communicator of its own."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.spec = GroupSpec(name="fleet", group_id="0123", backend="local", world_size=world)
        shared = LocalWorld(world, "fleet")
        self.communicators = [LocalCommunicator(shared, rank) for rank in range(world)]
        self.stores = [Store() for _ in range(world)]
        self.recorders = [Recorder(Ticks()) for _ in range(world)]
        self.aborts: list[dict[int, str]] = [{} for _ in range(world)]
        self.waiting: list[Callable[[Key], None] | None] = [None] * world
        self.faults: Faults = NoFaults()
        self.seq = 0
        self._threads = ThreadPoolExecutor(world)

    def close(self) -> None:
        for communicator in self.communicators:
            communicator.close()
        self._threads.shutdown()

    # ---------------------------------------------------------------------------------------- operands

    def new_key(self) -> Key:
        return task_key(next(_numbers).to_bytes(24, "little"), 1)

    def keep(self, rank: int, value: Any) -> Key:
        container = Container.of(value, arrays.is_tensor)
        assert container is not None
        key = self.new_key()
        self.stores[rank].put(key, container)
        return key

    def keep_all(self, values: Sequence[Any]) -> list[Key]:
        return [self.keep(rank, value) for rank, value in enumerate(values)]

    # ---------------------------------------------------------------------------------------- running

    def start(self, kind: OpKind, keys: Any, **arguments: Any) -> list[Future[Outcome]]:
        """Plans a request and starts its programs, as they come off the wire."""
        operands = tuple(sorted(keys.items()) if isinstance(keys, dict) else enumerate(keys))
        if kind is OpKind.ALLREDUCE:
            arguments.setdefault("op", ReduceOp.SUM)
        arguments.setdefault("timeout_s", WAIT_S)
        planned = plan(Request(kind=kind, group=self.spec, operands=operands, **arguments))
        self.seq += 1
        return [self._threads.submit(self._run, planned, rank, self.seq) for rank in planned.ranks]

    def _run(self, planned: Any, rank: int, seq: int) -> Outcome:
        execution = Execution(
            decode_program(encode_program(planned.program(rank))),
            self.communicators[rank],
            Instruments(store=self.stores[rank], recorder=self.recorders[rank], clock=Ticks(), faults=self.faults),
            seq=seq,
            aborted=lambda: self.aborts[rank].get(seq),
            waiting=self.waiting[rank],
        )
        return execution.run()

    def run(self, kind: OpKind, keys: Any, **arguments: Any) -> list[Outcome]:
        return [future.result(WAIT_S) for future in self.start(kind, keys, **arguments)]

    def must(self, kind: OpKind, keys: Any, **arguments: Any) -> list[Outcome]:
        outcomes = self.run(kind, keys, **arguments)
        for outcome in outcomes:
            if outcome.error is not None:
                raise outcome.error
        return outcomes

    def story(self, rank: int, seq: int | None = None) -> list[str]:
        return [event.what for event in self.recorders[rank].story(self.seq if seq is None else seq)]

    def works_on(self) -> None:
        """The next collective of the group succeeds."""
        values = [np.full(3, rank + 1.0) for rank in range(self.world)]
        self.faults = NoFaults()
        self.must(OpKind.ALLREDUCE, self.keep_all(values))
        for value in values:
            np.testing.assert_array_equal(value, np.full(3, self.world * (self.world + 1) / 2))


@pytest.fixture
def fleet() -> Iterator[Callable[[int], Fleet]]:
    made: list[Fleet] = []

    def make(world: int) -> Fleet:
        made.append(Fleet(world))
        return made[-1]

    yield make
    for one in made:
        one.close()


MakeFleet = Callable[[int], Fleet]


def _random(seed: int, world: int, shape: Any = (5,), dtype: str = "float64") -> list[Any]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 50, shape).astype(dtype) for _ in range(world)]


# ---------------------------------------------------------------------------------------------- what is meant


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_allreduce_in_place_writes_the_sum_into_every_operand(world: int, seed: int, fleet: MakeFleet) -> None:
    one = fleet(world)
    values = _random(seed, world, (2, 3))
    expected = sum(values)
    outcomes = one.must(OpKind.ALLREDUCE, one.keep_all(values))
    for value, outcome in zip(values, outcomes, strict=True):
        np.testing.assert_array_equal(value, expected)
        assert outcome.outputs == ()


@pytest.mark.parametrize("op", ReduceOp)
def test_allreduce_not_in_place_leaves_the_operands_and_gives_outputs(op: ReduceOp, fleet: MakeFleet) -> None:
    one = fleet(3)
    values = _random(7, 3)
    before = [value.copy() for value in values]
    outcomes = one.must(OpKind.ALLREDUCE, one.keep_all(values), inplace=False, op=op)
    folded = {
        ReduceOp.SUM: np.add.reduce,
        ReduceOp.PRODUCT: np.multiply.reduce,
        ReduceOp.MIN: np.minimum.reduce,
        ReduceOp.MAX: np.maximum.reduce,
        ReduceOp.AVG: lambda parts: np.add.reduce(parts) / 3,
    }[op](before)
    for value, was, outcome in zip(values, before, outcomes, strict=True):
        np.testing.assert_array_equal(value, was)
        (made,) = outcome.outputs
        np.testing.assert_array_equal(made.value, folded)
        assert not np.shares_memory(made.value, value)


@pytest.mark.parametrize("root", range(3))
def test_broadcast_writes_the_roots_operand_into_the_others(root: int, fleet: MakeFleet) -> None:
    one = fleet(3)
    values = _random(root, 3)
    expected = values[root].copy()
    one.must(OpKind.BROADCAST, one.keep_all(values), root=root)
    for value in values:
        np.testing.assert_array_equal(value, expected)


def test_the_root_of_a_broadcast_may_be_read_only(fleet: MakeFleet) -> None:
    one = fleet(3)
    values = _random(1, 3)
    values[1].flags.writeable = False
    one.must(OpKind.BROADCAST, one.keep_all(values), root=1)
    np.testing.assert_array_equal(values[0], values[1])


@pytest.mark.parametrize(("root", "peer"), list(itertools.permutations(range(3), 2)))
def test_send_writes_into_the_ref_that_was_given(root: int, peer: int, fleet: MakeFleet) -> None:
    one = fleet(3)
    values = _random(root, 3)
    expected = values[root].copy()
    third = 3 - root - peer
    bystander = values[third].copy()
    keys = one.keep_all(values)
    one.must(OpKind.SEND, {root: keys[root], peer: keys[peer]}, root=root, peer=peer)
    np.testing.assert_array_equal(values[peer], expected)
    np.testing.assert_array_equal(values[root], expected)
    np.testing.assert_array_equal(values[third], bystander)


@pytest.mark.parametrize(
    "value",
    [
        np.arange(6.0).reshape(2, 3),
        np.array(7, "int16"),
        np.zeros((0, 4), "float32"),
        np.arange(6).reshape(2, 3).T,
        [np.arange(3), np.ones((2, 2), "complex64")],
        (np.arange(3),),
        {"w": np.arange(4.0), "b": np.ones(1, bool), 3: np.zeros(2)},
    ],
    ids=["matrix", "scalar", "empty", "transposed", "list", "tuple", "dict"],
)
def test_send_to_nowhere_makes_an_output_as_the_source_has_it(value: Any, fleet: MakeFleet) -> None:
    one = fleet(2)
    outcomes = one.must(OpKind.SEND, {0: one.keep(0, value), 1: None}, root=0, peer=1)
    assert outcomes[0].outputs == ()
    (made,) = outcomes[1].outputs
    source = Container.of(value, arrays.is_tensor)
    assert source is not None
    assert made.structure == source.structure
    assert type(made.value) is type(value)
    for got, sent in zip(made.tensors, source.tensors, strict=True):
        np.testing.assert_array_equal(got, sent)
        assert (got.dtype, got.shape) == (sent.dtype, sent.shape)
        assert not np.shares_memory(got, sent)


def test_a_barrier_lets_nobody_through_before_all_have_come(fleet: MakeFleet) -> None:
    one = fleet(3)
    one.faults = hold = HoldAt(point="before_door", rank=2)
    futures = one.start(OpKind.BARRIER, dict.fromkeys(range(3)))
    assert hold.came.wait(WAIT_S)
    assert not any(future.done() for future in futures)
    hold.go.set()
    assert [future.result(WAIT_S) for future in futures] == [Outcome()] * 3


@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize("kind", ["list", "tuple", "dict"])
def test_containers_are_reduced_tensor_by_tensor(kind: str, inplace: bool, fleet: MakeFleet) -> None:
    one = fleet(3)
    parts = [(np.full(3, rank + 1.0), np.full((2, 2), rank, "int32"), np.array(2.0**rank)) for rank in range(3)]
    values: list[Any] = [
        {"list": list, "tuple": tuple, "dict": lambda p: dict(zip("abc", p, strict=True))}[kind](part) for part in parts
    ]
    outcomes = one.must(OpKind.ALLREDUCE, one.keep_all(values), inplace=inplace)
    for part, outcome in zip(parts, outcomes, strict=True):
        tensors = part if inplace else outcome.outputs[0].tensors
        np.testing.assert_array_equal(tensors[0], np.full(3, 6.0))
        np.testing.assert_array_equal(tensors[1], np.full((2, 2), 3))
        np.testing.assert_array_equal(tensors[2], 7.0)
        if not inplace:
            assert type(outcome.outputs[0].value) is type(values[0])


def test_views_and_other_layouts_are_reduced_where_they_are(fleet: MakeFleet) -> None:
    one = fleet(2)
    base = np.arange(12.0).reshape(3, 4)
    one.must(OpKind.ALLREDUCE, [one.keep(0, base[:, 1]), one.keep(1, np.ones(3))])
    np.testing.assert_array_equal(base[:, 1], [2.0, 6.0, 10.0])
    np.testing.assert_array_equal(base[:, 0], [0.0, 4.0, 8.0])
    np.testing.assert_array_equal(base[:, 2:], np.arange(12.0).reshape(3, 4)[:, 2:])


@pytest.mark.parametrize("seed", range(5))
def test_a_loop_over_the_same_and_other_operands_stays_right(seed: int, fleet: MakeFleet) -> None:
    """What a program remembers about its operand must not outlive a change of it."""
    rng, one = random.Random(seed), fleet(3)
    values = _random(seed, 3, (4,))
    expected = [value.copy() for value in values]
    keys = one.keep_all(values)
    for _ in range(25):
        root, op = rng.randrange(3), rng.choice([ReduceOp.SUM, ReduceOp.MAX, ReduceOp.AVG])
        if rng.random() < 0.4:
            one.must(OpKind.BROADCAST, keys, root=root)
            expected = [expected[root].copy() for _ in range(3)]
        else:
            one.must(OpKind.ALLREDUCE, keys, op=op)
            folded = np.maximum.reduce(expected) if op is ReduceOp.MAX else np.add.reduce(expected)
            expected = [folded / (3 if op is ReduceOp.AVG else 1) for _ in range(3)]
        changed = rng.randrange(3)
        values[changed] += 1
        expected[changed] += 1
        for value, right in zip(values, expected, strict=True):
            np.testing.assert_array_equal(value, right)


# ---------------------------------------------------------------------------------------------- refused

Sabotage = Callable[[Fleet, int, Any], Key]
"""(fleet, odd rank, its value) -> the key to use instead."""


def _absent(one: Fleet, rank: int, value: Any) -> Key:
    return one.new_key()


def _failed(one: Fleet, rank: int, value: Any) -> Key:
    key = one.new_key()
    one.stores[rank].fail(key[:24], "ValueError: no luck")
    return key


def _by_value(one: Fleet, rank: int, value: Any) -> Key:
    key = one.new_key()
    one.stores[rank].pass_by(key[:24], "int")
    return key


def _freed(one: Fleet, rank: int, value: Any) -> Key:
    key = one.keep(rank, value)
    one.stores[rank].free([key])
    return key


def _dirty(one: Fleet, rank: int, value: Any) -> Key:
    one.stores[rank].mark_dirty([arrays.byte_range(value)], [value])
    return one.keep(rank, value)


def _read_only(one: Fleet, rank: int, value: Any) -> Key:
    view = value[:]
    view.flags.writeable = False
    return one.keep(rank, view)


def _other_shape(one: Fleet, rank: int, value: Any) -> Key:
    return one.keep(rank, np.zeros(7))


def _other_dtype(one: Fleet, rank: int, value: Any) -> Key:
    return one.keep(rank, value.astype("float32"))


def _other_structure(one: Fleet, rank: int, value: Any) -> Key:
    return one.keep(rank, [value])


def _strides_of_a_broadcast(one: Fleet, rank: int, value: Any) -> Key:
    view = np.lib.stride_tricks.as_strided(value, (5,), (0,))
    return one.keep(rank, view)


REFUSED: dict[str, tuple[Sabotage, type[RefusedError], str]] = {
    "absent": (_absent, TensorLostError, "never ran here"),
    "failed": (_failed, ProducerFailedError, "ValueError: no luck"),
    "by value": (_by_value, NotATensorError, "int"),
    "freed": (_freed, TensorFreedError, "freed"),
    "dirty": (_dirty, TensorDirtyError, "half-written"),
    "read-only": (_read_only, ReadOnlyError, "read-only"),
    "another shape": (_other_shape, MismatchError, "[7]"),
    "another dtype": (_other_dtype, MismatchError, "float32"),
    "another structure": (_other_structure, MismatchError, "list"),
    "overlapping itself": (_strides_of_a_broadcast, AliasError, "overlapping itself"),
}


@pytest.mark.parametrize("odd", range(3))
@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_touches_nothing_on_any_rank_and_the_next_program_runs(name: str, odd: int, fleet: MakeFleet) -> None:
    sabotage, cls, text = REFUSED[name]
    one = fleet(3)
    values = _random(odd, 3)
    before = [value.copy() for value in values]
    keys = [sabotage(one, rank, v) if rank == odd else one.keep(rank, v) for rank, v in enumerate(values)]
    outcomes = one.run(OpKind.ALLREDUCE, keys)
    for outcome in outcomes:
        assert type(outcome.error) is cls
        assert {v.rank for v in outcome.error.violations} == {odd}
        assert text in str(outcome.error)
        assert keys[odd].hex() in str(outcome.error) or cls is MismatchError
        assert outcome.outputs == ()
    assert len({str(outcome.error) for outcome in outcomes}) == 1, "all ranks come to the same verdict"
    for value, was in zip(values, before, strict=True):
        np.testing.assert_array_equal(value, was)
    assert [one.stores[rank].statistics().dirty for rank in range(3)] == [
        int(name == "dirty" and rank == odd) for rank in range(3)
    ]
    one.works_on()


@pytest.mark.parametrize(
    "make",
    [
        lambda a: [a, a],
        lambda a: [a[:3], a[2:5]],
        lambda a: {"x": a[2:5], "y": a[:3]},
        lambda a: (a[:3], a[2::-1]),
    ],
    ids=["the same tensor twice", "overlapping views", "a dict of views", "a view backwards"],
)
def test_operands_that_overlap_are_refused(make: Callable[[Any], Any], fleet: MakeFleet) -> None:
    one = fleet(2)
    memory = np.arange(5.0)
    value = make(memory)
    apart = Container.of(value, arrays.is_tensor)
    assert apart is not None
    other = Container.build(apart.structure, [t.copy() for t in apart.tensors])
    copies = [t.copy() for t in other.tensors]
    for outcome in one.run(OpKind.ALLREDUCE, [one.keep(0, other.value), one.keep(1, value)]):
        assert type(outcome.error) is AliasError
        assert {v.rank for v in outcome.error.violations} == {1}
    np.testing.assert_array_equal(memory, np.arange(5.0))
    for tensor, copy in zip(other.tensors, copies, strict=True):
        np.testing.assert_array_equal(tensor, copy)
    one.works_on()


def test_operands_that_are_only_read_may_overlap(fleet: MakeFleet) -> None:
    one = fleet(2)
    memory = np.arange(5.0)
    keys = [one.keep(rank, [memory, memory[:]]) for rank in range(2)]
    outcomes = one.must(OpKind.ALLREDUCE, keys, inplace=False)
    for outcome in outcomes:
        np.testing.assert_array_equal(outcome.outputs[0].tensors[1], 2 * np.arange(5.0))
    np.testing.assert_array_equal(memory, np.arange(5.0))


def test_neighbours_in_one_memory_do_not_overlap(fleet: MakeFleet) -> None:
    one = fleet(2)
    memory = np.arange(6.0)
    one.must(OpKind.ALLREDUCE, [one.keep(0, [memory[::2], memory[1::2]]), one.keep(1, [np.ones(3), np.zeros(3)])])
    np.testing.assert_array_equal(memory, [1, 1, 3, 3, 5, 5])


@pytest.mark.parametrize(
    ("dtype", "op"), [("int32", ReduceOp.AVG), ("bool", ReduceOp.AVG), ("complex64", ReduceOp.MAX)]
)
def test_an_op_without_meaning_for_the_dtype_is_refused_on_every_rank(
    dtype: str, op: ReduceOp, fleet: MakeFleet
) -> None:
    one = fleet(2)
    values = _random(3, 2, dtype=dtype)
    before = [value.copy() for value in values]
    for outcome in one.run(OpKind.ALLREDUCE, one.keep_all(values), op=op):
        assert type(outcome.error) is UnsupportedError
        assert [v.rank for v in outcome.error.violations] == [0, 1]
        assert dtype in str(outcome.error)
    for value, was in zip(values, before, strict=True):
        np.testing.assert_array_equal(value, was)
    one.works_on()


def test_all_reasons_of_all_ranks_come_at_once(fleet: MakeFleet) -> None:
    one = fleet(4)
    values = _random(0, 4)
    keys = one.keep_all(values)
    keys[0] = _freed(one, 0, values[0])
    keys[2] = _read_only(one, 2, values[2])
    keys[3] = _other_shape(one, 3, values[3])
    for outcome in one.run(OpKind.ALLREDUCE, keys):
        assert type(outcome.error) is RefusedError
        assert [(v.kind, v.rank) for v in outcome.error.violations] == [
            ("freed", 0),
            ("read_only", 2),
            ("mismatch", 3),
        ]
    one.works_on()


def test_an_output_that_cannot_be_made_is_refused_on_all(fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(info: Any) -> Any:
        raise MemoryError("no memory for these tests")

    one = fleet(2)
    values = _random(0, 2)
    keys = one.keep_all(values)
    with monkeypatch.context() as patch:
        patch.setattr(arrays, "empty_like", no_memory)
        for outcome in one.run(OpKind.ALLREDUCE, keys, inplace=False):
            assert type(outcome.error) is AllocationError
            assert "40 bytes" in str(outcome.error)
        for outcome in one.run(OpKind.SEND, {0: keys[0], 1: None}, root=0, peer=1):
            assert type(outcome.error) is AllocationError
            assert {v.rank for v in outcome.error.violations} == {1}, "only the destination had to make one"
    one.works_on()


def test_the_source_of_a_send_to_nowhere_may_be_refused(fleet: MakeFleet) -> None:
    one = fleet(2)
    for outcome in one.run(OpKind.SEND, {0: one.new_key(), 1: None}, root=0, peer=1):
        assert type(outcome.error) is TensorLostError
        assert [v.rank for v in outcome.error.violations] == [0]
    one.works_on()


def test_an_operand_that_became_read_only_is_refused_the_next_time(fleet: MakeFleet) -> None:
    one = fleet(2)
    values = _random(0, 2)
    keys = one.keep_all(values)
    one.must(OpKind.ALLREDUCE, keys)
    values[1].flags.writeable = False
    before = values[0].copy()
    for outcome in one.run(OpKind.ALLREDUCE, keys):
        assert type(outcome.error) is ReadOnlyError
        assert [v.rank for v in outcome.error.violations] == [1]
    np.testing.assert_array_equal(values[0], before)


def test_an_operand_that_became_dirty_is_refused_the_next_time(fleet: MakeFleet) -> None:
    one = fleet(2)
    values = _random(0, 2)
    keys = one.keep_all(values)
    one.must(OpKind.ALLREDUCE, keys)
    one.stores[0].mark_dirty([arrays.byte_range(values[0])], [values[0]])
    for outcome in one.run(OpKind.ALLREDUCE, keys):
        assert type(outcome.error) is TensorDirtyError


# ---------------------------------------------------------------------------------------------- waiting


def test_a_producer_that_comes_later_is_waited_for(fleet: MakeFleet) -> None:
    one = fleet(2)
    asked: list[Key] = []
    told = threading.Event()
    one.waiting[1] = lambda key: (asked.append(key), told.set())  # type: ignore[func-returns-value, assignment]
    late = one.new_key()
    futures = one.start(OpKind.ALLREDUCE, [one.keep(0, first := np.ones(3)), late])
    assert told.wait(WAIT_S)
    assert asked == [late]
    assert not futures[1].done()
    container = Container.of(second := np.full(3, 2.0), arrays.is_tensor)
    assert container is not None
    one.stores[1].put(late, container)
    assert [future.result(WAIT_S).error for future in futures] == [None, None]
    np.testing.assert_array_equal(first, np.full(3, 3.0))
    np.testing.assert_array_equal(second, np.full(3, 3.0))
    assert one.story(1) == ["start", "waiting", "door", "agreed", "done"]


@pytest.mark.parametrize(
    ("event", "cls"),
    [
        (lambda store, key: store.fail(key[:24], "ValueError: late"), ProducerFailedError),
        (lambda store, key: store.pass_by(key[:24], "int"), NotATensorError),
        (lambda store, key: store.free([key]), TensorFreedError),
    ],
)
def test_a_producer_that_fails_later_is_a_refusal_on_all(event: Any, cls: Any, fleet: MakeFleet) -> None:
    one = fleet(2)
    told = threading.Event()
    one.waiting[1] = lambda key: told.set()
    late = one.new_key()
    futures = one.start(OpKind.ALLREDUCE, [one.keep(0, value := np.ones(3)), late])
    assert told.wait(WAIT_S)
    event(one.stores[1], late)
    for future in futures:
        assert type(future.result(WAIT_S).error) is cls
    np.testing.assert_array_equal(value, np.ones(3))
    one.works_on()


def test_an_abort_ends_the_wait_for_a_producer(fleet: MakeFleet) -> None:
    one = fleet(2)
    told = threading.Event()
    one.waiting[1] = lambda key: told.set()
    value = np.ones(3)
    futures = one.start(OpKind.ALLREDUCE, [one.keep(0, value), one.new_key()])
    assert told.wait(WAIT_S)
    one.aborts[1][one.seq] = "cancelled by its caller"
    one.stores[1].wake()
    errors = [future.result(WAIT_S).error for future in futures]
    assert all(isinstance(error, PlanAbortedError) for error in errors)
    assert "cancelled by its caller" in str(errors[1])
    assert "rank 1 has left" in str(errors[0]), "the others do not wait for it"
    np.testing.assert_array_equal(value, np.ones(3))
    assert one.stores[0].statistics().dirty == 0
    one.works_on()


def test_an_abort_ends_the_wait_at_the_door(fleet: MakeFleet) -> None:
    one = fleet(3)
    one.faults = hold = HoldAt(point="before_door", rank=2)
    values = _random(0, 3)
    before = [value.copy() for value in values]
    futures = one.start(OpKind.ALLREDUCE, one.keep_all(values))
    assert hold.came.wait(WAIT_S)
    for rank in range(3):
        one.communicators[rank].abort(one.seq)
    errors = [futures[rank].result(WAIT_S).error for rank in (0, 1)]
    hold.go.set()
    errors.append(futures[2].result(WAIT_S).error)
    assert all(isinstance(error, PlanAbortedError) for error in errors)
    for value, was in zip(values, before, strict=True):
        np.testing.assert_array_equal(value, was)
    assert [store.statistics().dirty for store in one.stores] == [0, 0, 0]
    one.works_on()


def test_who_does_not_come_to_the_door_is_named_when_time_is_up(fleet: MakeFleet) -> None:
    one = fleet(3)
    one.faults = hold = HoldAt(point="before_door", rank=1)
    futures = one.start(OpKind.ALLREDUCE, one.keep_all(_random(0, 3)), timeout_s=0.05)
    first = {rank: futures[rank].result(WAIT_S).error for rank in (0, 2)}
    timeouts = [error for error in first.values() if isinstance(error, CollectiveTimeoutError)]
    assert timeouts
    assert all(1 in error.missing and error.timeout_s == 0.05 for error in timeouts)
    hold.go.set()
    assert isinstance(futures[1].result(WAIT_S).error, PlanAbortedError), "the others have gone home"
    one.works_on()


# ---------------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize("rank", range(3))
@pytest.mark.parametrize("point", ["start", "before_door"])
def test_a_failure_before_the_door_touches_nothing_and_nobody_hangs(point: str, rank: int, fleet: MakeFleet) -> None:
    one = fleet(3)
    one.faults = fault = FailAt(point=point, rank=rank)
    values = _random(rank, 3)
    before = [value.copy() for value in values]
    outcomes = one.run(OpKind.ALLREDUCE, one.keep_all(values))
    assert fault.consumed == 1
    for at, outcome in enumerate(outcomes):
        assert isinstance(outcome.error, KernelError if at == rank else PlanAbortedError)
        assert outcome.error.op == "allreduce"
        assert at == rank or "has left" in str(outcome.error)
    for value, was in zip(values, before, strict=True):
        np.testing.assert_array_equal(value, was)
    assert [store.statistics().dirty for store in one.stores] == [0, 0, 0]
    one.works_on()


def _fail_in_kernel(one: Fleet, values: list[Any], keys: list[Key], point: str = "before_kernel") -> None:
    one.faults = fault = FailAt(point=point, rank=1)
    outcomes = one.run(OpKind.ALLREDUCE, keys)
    assert fault.consumed == 1
    assert isinstance(outcomes[1].error, KernelError)
    one.faults = NoFaults()


def test_a_failure_in_the_kernel_leaves_the_tensors_dirty_and_the_others_are_told(fleet: MakeFleet) -> None:
    one = fleet(3)
    values = _random(0, 3)
    keys = one.keep_all(values)
    one.faults = fault = FailAt(point="before_kernel", rank=1)
    outcomes = one.run(OpKind.ALLREDUCE, keys)
    assert fault.consumed == 1
    assert isinstance(outcomes[1].error, KernelError)
    for rank in (0, 2):
        assert isinstance(outcomes[rank].error, PlanAbortedError)
    for rank in range(3):
        assert one.stores[rank].statistics().dirty == 1
        assert one.stores[rank].is_dirty([arrays.byte_range(values[rank])])
    one.works_on()


def test_using_a_dirty_tensor_is_refused_on_all_naming_who_has_it(fleet: MakeFleet) -> None:
    one = fleet(3)
    values = _random(0, 3)
    keys = one.keep_all(values)
    _fail_in_kernel(one, values, keys)
    for outcome in one.run(OpKind.ALLREDUCE, keys):
        assert type(outcome.error) is TensorDirtyError
        assert {v.rank for v in outcome.error.violations} == {0, 1, 2}
    fresh = one.keep_all(_random(1, 3))
    for outcome in one.run(OpKind.ALLREDUCE, [fresh[0], keys[1], fresh[2]]):
        assert type(outcome.error) is TensorDirtyError
        assert {v.rank for v in outcome.error.violations} == {1}
    one.works_on()


def test_dirt_belongs_to_the_memory_not_to_the_key(fleet: MakeFleet) -> None:
    one = fleet(2)
    values = _random(0, 2, (6,))
    _fail_in_kernel(one, values, one.keep_all([value[2:4] for value in values]))
    for view, dirty in ((slice(0, 2), False), (slice(0, 3), True), (slice(3, 6), True), (slice(4, 6), False)):
        outcomes = one.run(OpKind.ALLREDUCE, one.keep_all([value[view] for value in values]), inplace=False)
        assert all((type(outcome.error) is TensorDirtyError) == dirty for outcome in outcomes)
        assert dirty or all(outcome.error is None for outcome in outcomes)


def test_a_broadcast_that_overwrites_a_dirty_tensor_whole_cleans_it(fleet: MakeFleet) -> None:
    one = fleet(3)
    values = _random(0, 3)
    keys = one.keep_all(values)
    _fail_in_kernel(one, values, keys)
    for outcome in one.run(OpKind.BROADCAST, keys, root=1):
        assert type(outcome.error) is TensorDirtyError
        assert {v.rank for v in outcome.error.violations} == {1}, "only what is read has to be whole"
    intact = np.arange(5.0)
    one.must(OpKind.BROADCAST, [keys[0], one.keep(1, intact), keys[2]], root=1)
    for rank in (0, 2):
        np.testing.assert_array_equal(values[rank], intact)
        assert one.stores[rank].statistics().dirty == 0
    assert one.stores[1].statistics().dirty == 1
    one.must(OpKind.BROADCAST, keys, root=0)
    one.must(OpKind.ALLREDUCE, keys)
    np.testing.assert_array_equal(values[1], 3 * intact)


def test_a_receive_that_overwrites_a_dirty_tensor_whole_cleans_it(fleet: MakeFleet) -> None:
    one = fleet(2)
    values = _random(0, 2)
    keys = one.keep_all(values)
    _fail_in_kernel(one, values, keys)
    one.must(OpKind.SEND, {0: one.keep(0, np.arange(5.0)), 1: keys[1]}, root=0, peer=1)
    assert one.stores[1].statistics().dirty == 0


def test_mark_written_cleans_a_dirty_tensor(fleet: MakeFleet) -> None:
    one = fleet(2)
    values = _random(0, 2)
    keys = one.keep_all(values)
    _fail_in_kernel(one, values, keys)
    for rank, value in enumerate(values):
        value[:] = rank
        one.stores[rank].mark_written([arrays.byte_range(value)])
    one.must(OpKind.ALLREDUCE, keys)
    for value in values:
        np.testing.assert_array_equal(value, np.ones(5))


def test_a_write_of_every_other_element_does_not_clean_the_rest(fleet: MakeFleet) -> None:
    one = fleet(2)
    values = _random(0, 2)
    keys = one.keep_all(values)
    _fail_in_kernel(one, values, keys)
    one.must(OpKind.SEND, {0: one.keep(0, np.zeros(3)), 1: one.keep(1, values[1][::2])}, root=0, peer=1)
    assert one.stores[1].is_dirty([arrays.byte_range(values[1][1::2])]), "elements 1 and 3 are still half-written"


def test_an_operand_that_is_only_read_is_not_dirty_after_a_failure(fleet: MakeFleet) -> None:
    one = fleet(2)
    values = _random(0, 2)
    before = [value.copy() for value in values]
    keys = one.keep_all(values)
    one.faults = fault = FailAt(point="before_kernel", rank=1)
    outcomes = one.run(OpKind.ALLREDUCE, keys, inplace=False)
    assert fault.consumed == 1
    assert all(outcome.error is not None and outcome.outputs == () for outcome in outcomes)
    for rank, value in enumerate(values):
        assert not one.stores[rank].is_dirty([arrays.byte_range(value)])
        np.testing.assert_array_equal(value, before[rank])
    one.must(OpKind.ALLREDUCE, keys)


def test_dirt_is_forgotten_with_the_tensor(fleet: MakeFleet) -> None:
    one = fleet(2)
    values = _random(0, 2)
    keys = one.keep_all(values)
    _fail_in_kernel(one, values, keys)
    for rank in range(2):
        one.stores[rank].free([keys[rank]])
    del values
    assert [store.statistics().dirty for store in one.stores] == [0, 0]


def test_a_failure_after_the_door_but_before_the_kernels_dirties_only_the_others(fleet: MakeFleet) -> None:
    one = fleet(3)
    values = _random(0, 3)
    before = values[1].copy()
    one.faults = fault = FailAt(point="after_door", rank=1)
    outcomes = one.run(OpKind.ALLREDUCE, one.keep_all(values))
    assert fault.consumed == 1
    assert all(outcome.error is not None for outcome in outcomes)
    assert [store.statistics().dirty for store in one.stores] == [1, 0, 1]
    np.testing.assert_array_equal(values[1], before)
    one.works_on()


def test_a_failure_after_the_last_kernel_is_lopsided_and_leaves_nothing_dirty(fleet: MakeFleet) -> None:
    one = fleet(3)
    values = _random(0, 3)
    expected = sum(values)
    one.faults = fault = FailAt(point="end", rank=2)
    outcomes = one.run(OpKind.ALLREDUCE, one.keep_all(values))
    assert fault.consumed == 1
    assert [outcome.error is None for outcome in outcomes] == [True, True, False]
    for value in values:
        np.testing.assert_array_equal(value, expected)
    assert [store.statistics().dirty for store in one.stores] == [0, 0, 0]
    one.works_on()


def test_running_out_of_memory_in_a_kernel_is_a_kernel_error(fleet: MakeFleet) -> None:
    one = fleet(1)
    one.faults = fault = FailAt(point="before_kernel", rank=0, error=lambda: MemoryError("gone"))
    (outcome,) = one.run(OpKind.ALLREDUCE, one.keep_all(_random(0, 1)))
    assert fault.consumed == 1
    assert isinstance(outcome.error, KernelError)
    assert "out of memory: gone" in str(outcome.error)


class Counted:
    """A communicator of one rank that writes down how it is used."""

    rank, world_size = 0, 1

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._inner = LocalCommunicator(LocalWorld(1), 0)

    def stage(self, launch: Launch, kernel: Kernel) -> None:
        self.calls.append("stage")

    def agree(self, launch: Launch, arrival: bytes) -> Sequence[bytes]:
        self.calls.append("agree")
        return self._inner.agree(launch, arrival)

    def launch(self, launch: Launch, kernel: Kernel) -> Any:
        self.calls.append("launch")
        return self._inner.launch(launch, kernel)

    def end(self, launch: Launch, ok: bool) -> tuple[int, ...]:
        self.calls.append(f"end {ok}")
        return self._inner.end(launch, ok)

    def abort(self, seq: int) -> None:
        raise AssertionError("not the executor's business")

    def close(self) -> None:
        raise AssertionError("not the executor's business")


@pytest.mark.parametrize("error", [KernelError(detail="ours"), MemoryError("none"), ZeroDivisionError("foreign")])
@pytest.mark.parametrize("point", [None, *POINTS])
def test_a_launch_is_always_closed_once(point: str | None, error: BaseException, fleet: MakeFleet) -> None:
    one, counted = fleet(1), Counted()
    one.communicators[0] = counted  # type: ignore[call-overload]
    if point is not None:
        one.faults = FailAt(point=point, rank=0, error=lambda: error)
    (future,) = one.start(OpKind.ALLREDUCE, one.keep_all([np.ones(2)]))
    if point is not None and isinstance(error, ZeroDivisionError):
        assert future.exception(WAIT_S) is error, "a bug of ours goes to the runtime, which reports it as such"
    else:
        assert (future.result(WAIT_S).error is None) == (point is None)
    assert counted.calls[-1] == f"end {point is None}"
    assert sum(call.startswith("end") for call in counted.calls) == 1
    one.communicators[0] = counted._inner


def test_a_communicator_is_asked_to_agree_before_it_is_asked_to_launch(fleet: MakeFleet) -> None:
    one, counted = fleet(1), Counted()
    one.communicators[0] = counted  # type: ignore[call-overload]
    one.must(OpKind.ALLREDUCE, [one.keep(0, [np.ones(2), np.ones(3)])])
    assert [call for call in counted.calls if call != "stage"] == ["agree", "launch", "launch", "end True"]
    assert "stage" not in counted.calls[1:]
    one.communicators[0] = counted._inner


def test_a_peer_that_says_nothing_about_its_tensor_is_our_bug(fleet: MakeFleet) -> None:
    """The destination learns from an arrival without tensors and without violations: no rank should send one."""
    one = fleet(2)
    silent = encode_arrival(Arrival(spec=Spec(op="send", root=0, structure="tensor")))
    launch = Launch(seq=1, ranks=(0, 1), timeout_s=WAIT_S)
    with ThreadPoolExecutor(1) as threads:
        peer = threads.submit(one.communicators[0].agree, launch, silent)
        planned = plan(
            Request(kind=OpKind.SEND, group=one.spec, operands=((0, one.new_key()), (1, None)), root=0, peer=1)
        )
        outcome = one._run(planned, 1, 1)
        peer.result(WAIT_S)
    assert isinstance(outcome.error, InternalError)


# ---------------------------------------------------------------------------------------------- the story


def test_the_story_is_told_in_order_with_times_of_the_injected_clock(fleet: MakeFleet) -> None:
    one = fleet(2)
    keys = one.keep_all(_random(0, 2))
    one.must(OpKind.ALLREDUCE, keys)
    one.must(OpKind.SEND, {0: keys[0], 1: None}, root=0, peer=1)
    for rank in range(2):
        assert one.story(rank, 1) == ["start", "door", "agreed", "done"]
        assert one.story(rank, 2) == ["start", "door", "door", "agreed", "done"], "two rounds"
        events = one.recorders[rank].story()
        assert [event.at_s for event in events] == [float(at + 1) for at in range(len(events))]
        assert events[0].detail == "allreduce"


def test_the_story_of_a_failure_names_it(fleet: MakeFleet) -> None:
    one = fleet(2)
    one.run(OpKind.ALLREDUCE, [one.keep(0, np.ones(2)), one.new_key()])
    for rank in range(2):
        assert one.story(rank) == ["start", "door", "failed"]
        assert one.recorders[rank].story()[-1].detail == "TensorLostError"
    one.faults = FailAt(point="before_kernel", rank=0)
    one.run(OpKind.ALLREDUCE, one.keep_all(_random(0, 2)))
    assert one.story(0) == ["start", "door", "agreed", "failed"]
    assert one.recorders[0].story()[-1].detail == "KernelError"
    assert one.recorders[1].story()[-1].detail == "PlanAbortedError"


def test_faults_are_asked_at_every_point_in_order(fleet: MakeFleet) -> None:
    class Asked:
        def __init__(self) -> None:
            self.points: list[tuple[str, int, int]] = []

        def at(self, point: str, seq: int, rank: int) -> None:
            self.points.append((point, seq, rank))

    one = fleet(1)
    one.faults = asked = Asked()
    one.must(OpKind.ALLREDUCE, [one.keep(0, [np.ones(2), np.ones(3)])])
    kernels = ["before_kernel", "after_kernel"] * 2
    points = ["start", "before_door", "after_door", *kernels, "end"]
    assert asked.points == [(point, 1, 0) for point in points]
    assert set(points) == set(POINTS)


def test_a_recorder_keeps_the_last_events_only() -> None:
    recorder = Recorder(Ticks(), limit=5)
    for number in range(1, 1001):
        recorder.add("event", number, "x")
    assert recorder.story() == tuple(Event(float(n), "event", n, "x") for n in range(996, 1001))
    assert recorder.story(998) == (Event(998.0, "event", 998, "x"),)
    assert recorder.story(1) == ()
    assert recorder.tail(2) == ("999.000000 plan 999 event x", "1000.000000 plan 1000 event x")
    assert len(recorder.tail()) == 5


def test_an_event_of_no_plan_shows_no_plan() -> None:
    recorder = Recorder(Ticks())
    recorder.add("joined")
    assert recorder.tail() == ("1.000000 joined",)


# ---------------------------------------------------------------------------------------------- any story


@pytest.mark.parametrize("seed", range(12))
def test_any_sequence_of_faults_and_refusals_ends_on_all_ranks_and_never_silently(seed: int, fleet: MakeFleet) -> None:
    """After each plan a tensor is as it was, holds the result, or counts as dirty."""
    rng, world = random.Random(seed), 2 + seed % 3
    one = fleet(world)
    for turn in range(12):
        values = [np.full(4, rank + 1.0 + turn) for rank in range(world)]
        before, keys = [value.copy() for value in values], one.keep_all(values)
        point, rank = rng.choice([None, *POINTS]), rng.randrange(world)
        one.faults = NoFaults() if point is None else FailAt(point=point, rank=rank)
        if rng.random() < 0.25:
            keys[rng.randrange(world)] = one.new_key()
        kind = rng.choice([OpKind.ALLREDUCE, OpKind.BROADCAST])
        arguments = {"root": rank} if kind is OpKind.BROADCAST else {}
        outcomes = one.run(kind, keys, **arguments)
        result = before[rank] if kind is OpKind.BROADCAST else sum(before)
        for at, outcome in enumerate(outcomes):
            dirty = one.stores[at].is_dirty([arrays.byte_range(values[at])])
            if outcome.error is None:
                assert not dirty
                np.testing.assert_array_equal(values[at], result)
            elif not dirty:
                same = np.array_equal(values[at], before[at])
                assert same or np.array_equal(values[at], result)
        one.works_on()
