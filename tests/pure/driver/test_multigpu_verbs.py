"""Collectives of lists with a tensor of each GPU: whole programs of the planner, on a fake of cupy, against numpy."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from raycollect.backends import across, arrays
from raycollect.core.model import GroupSpec, Key, OpKind, ReduceOp
from raycollect.driver.dry_run import _Foreseen
from raycollect.engine import device_staging
from raycollect.engine.execution import Outcome
from raycollect.errors import (
    AliasError,
    AllocationError,
    CollectiveTimeoutError,
    FaultError,
    InternalError,
    InvalidArgumentError,
    KernelError,
    MismatchError,
    MissingMemberError,
    RefusedError,
    TensorDirtyError,
    UnsupportedError,
)
from raycollect.planner import (
    CROSSINGS,
    GpuLists,
    Local,
    Made,
    Part,
    Plan,
    Request,
    Role,
    Roster,
    brought,
    decode_program,
    encode_program,
    plan,
    plan_part,
)
from raycollect.planner.explain import explain
from raycollect.planner.listed import listed
from raycollect.planner.verify import verify
from tests.fake_cupy import Fake, installed
from tests.pure import rosters
from tests.pure.fleet import Convoy, FailAt, contain
from tests.pure.mixed import WORLD, Mixed, host, same
from tests.pure.teams import Team

GPUS = 4
SEEDS = [0, 1, 2]
LAYOUTS = {"home first": [0, 1, 2], "home last": [3, 1, 0], "home absent": [3], "two": [2, 3], "all": [1, 3, 0, 2]}
every_layout = pytest.mark.parametrize("devices", LAYOUTS.values(), ids=LAYOUTS.keys())
every_seed = pytest.mark.parametrize("gpus", SEEDS, indirect=True)
LISTS = GpuLists()


class Gpus(Mixed):
    """Ranks in threads, with as many of the fake's GPUs as their lists say; rank r's group works on GPU r."""

    def __init__(self, fake: Fake) -> None:
        super().__init__(fake, "nccl")
        self.fake = fake

    def lists(self, devices: Sequence[int], shape: Any = (5,), dtype: Any = "float32", **how: Any) -> list[list[Any]]:
        """For each rank a tensor on each of some GPUs."""
        return [
            [self.put(values(rank, at, shape, dtype), one, **how) for at, one in enumerate(devices)]
            for rank in range(WORLD)
        ]

    def run(self, kind: OpKind, src: Sequence[Any], dst: Sequence[Any] | None = None, **more: Any) -> list[Outcome]:
        """Runs a collective of lists, as it comes off the wire."""
        keys = [None if side is None else self.fleet.keep_all(side) for side in (src, dst)]
        return self.fleet.run(kind, *keys, **({"lists": LISTS} | more))  # type: ignore[arg-type]

    def must(self, kind: OpKind, src: Sequence[Any], dst: Sequence[Any] | None = None, **more: Any) -> list[Any]:
        """The same; gives what was made, by rank, or raises the first error."""
        outcomes = self.run(kind, src, dst, **more)
        for outcome in outcomes:
            if outcome.error is not None:
                raise outcome.error
        return [outcome.outputs[0].value if outcome.outputs else None for outcome in outcomes]


@pytest.fixture
def gpus(request: pytest.FixtureRequest) -> Iterator[Gpus]:
    device_staging._idle.clear()
    with installed(GPUS, seed=getattr(request, "param", 0)) as fake:
        made = Gpus(fake)
        yield made
        made.close()
        fake.drain()
        assert not fake.violations
    device_staging._idle.clear()


def values(rank: int, at: int, shape: Any, dtype: Any = "float32") -> Any:
    """Whole numbers that tell whose they are; sums of them are exact."""
    return (np.arange(np.prod(shape, dtype=int)).reshape(shape) % 5 + 1 + 2 * rank + 3 * at).astype(dtype)


def everyone(count: int, shape: Any = (5,), dtype: Any = "float32") -> Any:
    """What all GPUs of all ranks give, [ranks times GPUs, *shape]."""
    return np.stack([values(rank, at, shape, dtype) for rank in range(WORLD) for at in range(count)])


def refused(outcomes: Sequence[Outcome], error: type[RefusedError]) -> str:
    """All ranks were refused with one kind of error; its words."""
    found = [outcome.error for outcome in outcomes]
    assert [type(one) for one in found] == [error] * len(found), found
    return str(found[0])


# ---------------------------------------------------------------------------------------------- what it does

OPS: list[tuple[Any, str, ReduceOp, Callable[..., Any]]] = [
    ((5,), "float32", ReduceOp.SUM, np.sum),
    ((1001,), "float64", ReduceOp.SUM, np.sum),
    ((3, 1), "float32", ReduceOp.MAX, np.max),
    ((), "int64", ReduceOp.PRODUCT, np.prod),
    ((7,), "int16", ReduceOp.MIN, np.min),
    ((4,), "float64", ReduceOp.AVG, np.mean),
    ((0,), "float32", ReduceOp.SUM, np.sum),
    ((6,), "uint8", ReduceOp.BXOR, np.bitwise_xor.reduce),
]


@every_seed
@every_layout
def test_allreduce(gpus: Gpus, devices: list[int]) -> None:
    for shape, dtype, op, rule in OPS:
        lists = gpus.lists(devices, shape, dtype)
        assert gpus.must(OpKind.ALLREDUCE, lists, op=op) == [None] * WORLD
        expected = rule(everyone(len(devices), shape, dtype), axis=0)
        for one in itertools.chain(*lists):
            np.testing.assert_allclose(host(one), expected, rtol=1e-12)
    assert gpus.fleet.dirty == [0] * WORLD


def test_an_average_of_float16_does_not_leave_its_range(gpus: Gpus) -> None:
    """As NCCL's, which divides before it adds: the sum of a rank's GPUs would be infinite."""
    lists = [[gpus.put(np.full(7, 20000 + rank, "f2"), one) for one in (2, 0, 3, 1)] for rank in range(WORLD)]
    gpus.must(OpKind.ALLREDUCE, lists, op=ReduceOp.AVG)
    for one in itertools.chain(*lists):
        np.testing.assert_allclose(host(one), np.full(7, 20000), rtol=2e-3)


@pytest.mark.parametrize(("op", "rule"), [(ReduceOp.MIN, np.nanmin), (ReduceOp.MAX, np.nanmax)])
def test_a_nan_hides_no_number(gpus: Gpus, op: ReduceOp, rule: Callable[..., Any]) -> None:
    """NCCL gives the number; so must what comes before it, on whichever GPU the NaN is."""
    given = [[np.array([9, 1, 5], "f4"), np.array([2, 8, 5], "f4")] for _ in range(WORLD)]
    given[0] = [np.array([np.nan, 0, np.nan], "f4"), np.array([77, np.nan, -3], "f4")]
    lists = [[gpus.put(one, at) for at, one in enumerate(row)] for row in given]
    gpus.must(OpKind.ALLREDUCE, lists, op=op)
    same(lists, [[rule(np.stack([*itertools.chain(*given)]), axis=0)] * 2] * WORLD)


@every_seed
@every_layout
def test_allreduce_into_new_lists(gpus: Gpus, devices: list[int]) -> None:
    lists = gpus.lists(devices, (2, 9))
    before = [host(row) for row in lists]
    made = gpus.must(OpKind.ALLREDUCE, lists, inplace=False)
    total = everyone(len(devices), (2, 9)).sum(axis=0)
    same(lists, before)
    same(made, [[total] * len(devices)] * WORLD)
    assert [[one.device.id for one in row] for row in made] == [devices] * WORLD


@every_seed
@every_layout
def test_reduce(gpus: Gpus, devices: list[int]) -> None:
    for root, chosen in [(0, len(devices) - 1), (2, 0)]:
        lists = gpus.lists(devices, (13,), gaps=True)
        expected = [host(row) for row in lists]
        expected[root][chosen] = everyone(len(devices), (13,)).sum(axis=0)
        gpus.must(OpKind.REDUCE, lists, root=root, lists=GpuLists(dst_tensor=chosen))
        same(lists, expected)


@every_seed
@every_layout
def test_broadcast(gpus: Gpus, devices: list[int]) -> None:
    for root, chosen in itertools.product((0, 2), range(len(devices))):
        lists = gpus.lists(devices, (2, 7), gaps=root == 2)
        gpus.must(OpKind.BROADCAST, lists, root=root, lists=GpuLists(src_tensor=chosen))
        same(lists, [[values(root, chosen, (2, 7))] * len(devices)] * WORLD)


@every_seed
@every_layout
@pytest.mark.parametrize("is_made", [False, True], ids=["given", "made"])
def test_allgather(gpus: Gpus, devices: list[int], is_made: bool) -> None:
    given = gpus.lists(devices, (3, 5), gaps=True)
    count = WORLD * len(devices)
    room = [[[gpus.put(np.zeros((3, 5), "f4"), one) for _ in range(count)] for one in devices] for _ in given]
    made = gpus.must(OpKind.ALLGATHER, given, None if is_made else room)
    whole = list(everyone(len(devices), (3, 5)))
    for row in made if is_made else room:
        same(row, [whole] * len(devices))
        assert [{one.device.id for one in tensors} for tensors in row] == [{one} for one in devices]
    same(given, [whole[at : at + len(devices)] for at in range(0, count, len(devices))])


@every_seed
@every_layout
@pytest.mark.parametrize("is_made", [False, True], ids=["given", "made"])
def test_reducescatter(gpus: Gpus, devices: list[int], is_made: bool) -> None:
    count = len(devices)
    items = [
        [[values(r, g, (11,)) * (p + 1) for p in range(WORLD * count)] for g in range(count)] for r in range(WORLD)
    ]
    rules: list[tuple[ReduceOp, Callable[..., Any]]] = [(ReduceOp.SUM, np.sum), (ReduceOp.AVG, np.mean)]
    for op, rule in rules:
        given = [[gpus.put(one, d) for one, d in zip(rows, devices, strict=True)] for rows in items]
        room = [[gpus.put(np.zeros(11, "f4"), one) for one in devices] for _ in range(WORLD)]
        made = gpus.must(OpKind.REDUCESCATTER, given, None if is_made else room, op=op)
        expected = rule(everyone(count, (11,)), axis=0)
        for rank, row in enumerate(made if is_made else room):
            for at, one in enumerate(row):
                np.testing.assert_allclose(host(one), expected * (rank * count + at + 1), rtol=1e-6)
                assert one.device.id == devices[at]
        same(given, items)


@every_seed
@pytest.mark.parametrize(("source", "target"), [(0, 0), (0, 3), (3, 1), (1, 2)])
def test_send_goes_from_one_gpu_to_another(gpus: Gpus, source: int, target: int) -> None:
    devices = [1, 3, 0, 2]
    lists = gpus.lists(devices, (9,))
    expected = [host(row) for row in lists]
    expected[0][devices.index(target)] = values(2, devices.index(source), (9,))
    gpus.must(OpKind.SEND, lists, root=2, peer=0, lists=GpuLists(src_tensor=source, dst_tensor=target))
    same(lists, expected)


def test_a_send_takes_single_tensors_as_well(gpus: Gpus) -> None:
    tensors = [gpus.put(values(rank, 0, (9,)), 3 - rank) for rank in range(WORLD)]
    gpus.must(OpKind.SEND, tensors, root=0, peer=2, lists=GpuLists(src_tensor=3, dst_tensor=1))
    same(tensors[2], values(0, 0, (9,)))
    where = GpuLists(src_tensor=3, dst_tensor=2)
    assert "of which there is a tensor: 1" in refused(
        gpus.run(OpKind.SEND, tensors, root=0, peer=2, lists=where), InvalidArgumentError
    )


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, "bool", "complex64", "float16"])
def test_other_types_can_be_moved(gpus: Gpus, dtype: Any) -> None:
    lists = gpus.lists([2, 0], (6,), dtype)
    gpus.must(OpKind.BROADCAST, lists, root=1, lists=GpuLists(src_tensor=1))
    same(lists, [[values(1, 1, (6,), dtype)] * 2] * WORLD)


@every_seed
def test_a_program_runs_again_and_again_on_the_same_lists(gpus: Gpus) -> None:
    lists = gpus.lists([2, 0], (6,))
    keys = gpus.fleet.keep_all(lists)
    expected = everyone(2, (6,)).sum(axis=0)
    for _ in range(4):
        gpus.fleet.must(OpKind.ALLREDUCE, keys, lists=LISTS)
        same(lists, [[expected] * 2] * WORLD)
        expected = expected * 2 * WORLD


# ---------------------------------------------------------------------------------------------- batches


@pytest.fixture
def convoy(gpus: Gpus) -> Iterator[Convoy]:
    """The same ranks, for programs of whole batches."""
    made = Convoy([range(WORLD)], lambda _: gpus.fleet.communicators)
    (roster,) = made.rosters
    made.rosters = [replace(roster, spec=replace(roster.spec, backend="nccl", memory="cuda"), bitwise=False)]
    yield made
    made.close()


def asked(roster: Roster, kind: OpKind, sources: Sequence[Any], **more: Any) -> Request:
    operands = tuple((rank, one, None) for rank, one in enumerate(sources))
    return Request(kind=kind, group=roster.spec, operands=operands, timeout_s=20.0, **({"lists": LISTS} | more))


@every_seed
def test_a_batch_of_lists_and_of_plain_tensors(gpus: Gpus, convoy: Convoy) -> None:
    (there,) = convoy.rosters
    first, second = gpus.lists([2, 0, 3], (5,)), gpus.lists([1, 0, 2], (5,))
    plain = [gpus.put(np.arange(4.0) + rank, rank) for rank in range(WORLD)]
    keys = [[convoy.keep(rank, side[rank]) for rank in range(WORLD)] for side in (first, second, plain)]
    requests = [
        asked(there, OpKind.ALLREDUCE, keys[0], op=ReduceOp.SUM),
        asked(there, OpKind.ALLREDUCE, keys[2], op=ReduceOp.MAX, lists=None),
        asked(there, OpKind.ALLREDUCE, keys[1], op=ReduceOp.SUM),
        asked(there, OpKind.ALLGATHER, keys[0]),  # of what the first one gives
        asked(there, OpKind.REDUCESCATTER, [Made(3)] * WORLD, op=ReduceOp.SUM),
    ]
    outcomes = convoy.run(requests, [there] * len(requests))
    for outcome in outcomes.values():
        assert outcome.error is None, outcome.error
    total = everyone(3).sum(axis=0)
    same(first, [[total] * 3] * WORLD)
    same(second, [[total] * 3] * WORLD)
    same(plain, [np.arange(4.0) + WORLD - 1] * WORLD)
    for outcome in outcomes.values():
        gathered, scattered = (one.value for one in outcome.outputs)
        same(gathered, [[total] * 9] * 3)
        same(scattered, [total * 9] * 3)


@every_seed
def test_a_captured_step_of_lists(gpus: Gpus) -> None:
    """The lists are the methods' own, written anew in each run; what is gathered of them is made in each."""
    devices = [3, 0]
    step = Team(WORLD)
    step.close()
    step.communicators = gpus.fleet.communicators  # type: ignore[assignment]
    step.spec = replace(step.spec, backend="nccl", memory="cuda")
    step._threads = gpus.fleet._threads
    seen: list[Any] = []
    for rank, script in enumerate(step.scripts):
        step.actors[rank].methods = {
            "make": lambda factor, rank=rank: [
                gpus.put(values(rank, at, (5,)) * np.float32(factor), one) for at, one in enumerate(devices)
            ],
            "take": lambda lists: seen.append(host(lists)),
        }
        script.argument()
    made = {rank: script.call("make", script.arguments[0]) for rank, script in enumerate(step.scripts)}
    step.collective(OpKind.ALLREDUCE, made, lists=LISTS)
    gathered = step.collective(OpKind.ALLGATHER, made, lists=LISTS)
    for script, slots in zip(step.scripts, gathered, strict=True):
        script.call("take", slots[0])
    for factor in (1.0, 2.0, 3.0, 4.0):
        step.run(factor)
        total = everyone(2).sum(axis=0) * np.float32(factor)
        same(seen, [[[total] * 2 * WORLD] * 2] * WORLD)
        seen.clear()


# ---------------------------------------------------------------------------------------------- what is refused


def test_all_ranks_have_as_many(gpus: Gpus) -> None:
    for kind in (OpKind.ALLREDUCE, OpKind.BROADCAST, OpKind.REDUCE, OpKind.ALLGATHER):
        lists = gpus.lists([0, 1])
        lists[1].append(gpus.put(values(1, 2, (5,)), 2))
        before = [host(row) for row in lists]
        root: dict[str, Any] = {"root": 0} if kind in (OpKind.BROADCAST, OpKind.REDUCE) else {}
        message = refused(gpus.run(kind, lists, **root), MismatchError)
        assert "rank 1" in message
        if kind is not OpKind.ALLGATHER:
            assert "3 GPUs" in message
        same(lists, before)
    gpus.must(OpKind.ALLREDUCE, gpus.lists([0, 1]))  # the group works on


BAD: dict[str, tuple[Callable[[Gpus, list[Any]], Any], type[RefusedError]]] = {
    "two on one GPU": (lambda gpus, mine: [mine[0], gpus.put(np.ones(5, "f4"), 0)], InvalidArgumentError),
    "no list": (lambda gpus, mine: mine[0], InvalidArgumentError),
    "a dict": (lambda gpus, mine: {"a": mine[0], "b": mine[1]}, InvalidArgumentError),
    "a list of lists": (lambda gpus, mine: [[one] for one in mine], InvalidArgumentError),
    "on the host": (lambda gpus, mine: [np.ones(5, "f4"), np.ones(5, "f4")], UnsupportedError),
    "one on the host": (lambda gpus, mine: [mine[0], np.ones(5, "f4")], UnsupportedError),
    "two shapes": (lambda gpus, mine: [mine[0], mine[1][:3]], MismatchError),
    "two dtypes": (lambda gpus, mine: [mine[0], gpus.put(np.ones(5, "i4"), 1)], MismatchError),
    "other shapes than the others'": (lambda gpus, mine: [one[:3] for one in mine], MismatchError),
    "other dtypes than the others'": (lambda gpus, mine: [gpus.put(np.ones(5), at) for at in range(2)], MismatchError),
    "self-overlapping": (lambda gpus, mine: [mine[0], repeated(gpus, 1)], AliasError),
}


def repeated(gpus: Gpus, device: int) -> Any:
    with gpus.cupy.cuda.Device(device):
        one = gpus.cupy.full(1, 1, np.float32)
        return gpus.cupy.ndarray((5,), one.dtype, memptr=one.data, strides=(0,))


@pytest.mark.parametrize(("change", "error"), BAD.values(), ids=BAD.keys())
def test_violation_on_one_rank_is_raised_on_all(
    gpus: Gpus, change: Callable[[Gpus, list[Any]], Any], error: type[RefusedError]
) -> None:
    lists = gpus.lists([0, 1])
    before = [host(row) for row in lists]
    given = [change(gpus, row) if rank == 1 else row for rank, row in enumerate(lists)]
    keys = gpus.fleet.keep_all(given)
    message = refused(gpus.fleet.run(OpKind.ALLREDUCE, keys, lists=LISTS), error)
    assert "rank 1" in message
    assert keys[1].hex()[:8] in message or error is MismatchError  # the door's own words name no ref
    same(lists, before)
    assert gpus.fleet.dirty == [0] * WORLD
    gpus.must(OpKind.ALLREDUCE, lists)


def test_lists_of_lists_have_to_fit(gpus: Gpus) -> None:
    given = gpus.lists([0, 1])

    def room() -> list[list[Any]]:
        return [[gpus.put(np.zeros(5, "f4"), at) for _ in range(2 * WORLD)] for at in range(2)]

    changes: list[tuple[Callable[[list[Any]], Any], type[RefusedError]]] = [
        (lambda taken: taken[:1], InvalidArgumentError),
        (lambda taken: [taken[0], taken[1][:3]], InvalidArgumentError),
        (lambda taken: [taken[1], taken[0]], InvalidArgumentError),
        (lambda taken: [taken[0], taken[0]], InvalidArgumentError),
        (lambda taken: taken[0], InvalidArgumentError),
        (lambda taken: [taken[0], [*taken[1][:5], taken[1][0]]], AliasError),
        (lambda taken: [[*taken[0][:5], taken[0][5][:2]], taken[1]], MismatchError),
        (lambda taken: [[*taken[0][:5], np.zeros(5, "f4")], taken[1]], UnsupportedError),
    ]
    for change, error in changes:
        taken: list[Any] = [room() for _ in range(WORLD)]
        taken[2] = change(taken[2])
        assert "rank 2" in refused(gpus.run(OpKind.ALLGATHER, given, taken), error)
        same(taken[0], [[np.zeros(5)] * 2 * WORLD] * 2)
    taken = [room() for _ in range(WORLD)]
    taken[1][1][3] = given[1][1]
    assert "overlapping" in refused(gpus.run(OpKind.ALLGATHER, given, taken), AliasError)
    scattered = gpus.lists([1, 0])
    refused(gpus.run(OpKind.REDUCESCATTER, [room() for _ in range(WORLD)], scattered), InvalidArgumentError)
    gpus.must(OpKind.ALLGATHER, given, [room() for _ in range(WORLD)])


@pytest.mark.parametrize(
    ("dtype", "op"),
    [
        ("int32", ReduceOp.AVG),
        ("float32", ReduceOp.BAND),
        ("complex64", ReduceOp.MAX),
        (ml_dtypes.bfloat16, ReduceOp.SUM),
    ],
)
def test_a_reduction_without_a_meaning_is_refused(gpus: Gpus, dtype: Any, op: ReduceOp) -> None:
    lists = gpus.lists([0, 2], (3,), dtype)
    message = refused(gpus.run(OpKind.ALLREDUCE, lists, op=op), UnsupportedError)
    assert op.name in message
    assert message.count(op.name + " of") == WORLD  # once for each rank
    same(lists, [[values(rank, at, (3,), dtype) for at in range(2)] for rank in range(WORLD)])


@pytest.mark.parametrize(("kind", "index"), [(OpKind.REDUCE, "dst_tensor"), (OpKind.BROADCAST, "src_tensor")])
def test_indexes_have_to_be_there(gpus: Gpus, kind: OpKind, index: str) -> None:
    lists = gpus.lists([0, 1])
    where = GpuLists(**{index: 2})
    assert "one of 0 to 1" in refused(gpus.run(kind, lists, root=1, lists=where), InvalidArgumentError)
    gpus.must(kind, lists, root=1, lists=GpuLists(**{index: 1}))


def test_allocation_failure_is_raised_on_all_ranks(gpus: Gpus) -> None:
    lists = gpus.lists([0, 1], (1 << 12,))
    before = [host(row) for row in lists]
    fake = gpus.fake
    fake.limit(fake.allocated(2) + 1000, 2)
    outcomes = gpus.run(OpKind.ALLREDUCE, lists)
    fake.limit(1 << 40, 2)
    assert "on GPU 2" in refused(outcomes, AllocationError)
    same(lists, before)
    gpus.must(OpKind.ALLREDUCE, lists)


# ---------------------------------------------------------------------------------------------- what fails midway


def kept(convoy: Convoy, kind: OpKind, lists: Sequence[Any], **more: Any) -> Request:
    """A request of lists that the participants hold; rank 1 is the root, if there is one."""
    keys = [convoy.keep(rank, row) for rank, row in enumerate(lists)]
    found = asked(convoy.rosters[0], kind, keys, root=-1 if kind is OpKind.ALLREDUCE else 1, **more)
    if kind is not OpKind.BROADCAST:
        return replace(found, op=ReduceOp.SUM)
    operands = tuple((rank, key, None) if rank == 1 else (rank, None, key) for rank, key in enumerate(keys))
    return replace(found, operands=operands)


@pytest.mark.parametrize("kind", [OpKind.ALLREDUCE, OpKind.BROADCAST, OpKind.REDUCE])
@pytest.mark.parametrize("point", ["after_door", "before_kernel"])
def test_failure_before_the_write_leaves_the_lists_unchanged(
    gpus: Gpus, convoy: Convoy, kind: OpKind, point: str
) -> None:
    lists = gpus.lists([2, 0])
    before = [host(row) for row in lists]
    convoy.faults = fault = FailAt(point=point, rank=2)
    outcomes = convoy.run([kept(convoy, kind, lists)], convoy.rosters)
    assert fault.consumed == 1
    assert isinstance(outcomes[2].error, KernelError)
    assert all(outcome.error is not None for outcome in outcomes.values())
    same(lists, before)
    assert [store.statistics().dirty for store in convoy.stores] == [0] * WORLD


@every_seed
@pytest.mark.parametrize("kind", [OpKind.ALLREDUCE, OpKind.REDUCE])
def test_all_ranks_have_their_results_or_keep_what_they_had(gpus: Gpus, convoy: Convoy, kind: OpKind) -> None:
    lists = gpus.lists([2, 0])
    expected = [host(row) for row in lists]
    total = everyone(2).sum(axis=0)
    request = kept(convoy, kind, lists, snapshot=True)
    for outcome in convoy.run([request], convoy.rosters).values():
        assert outcome.error is None, outcome.error
    if kind is OpKind.ALLREDUCE:
        expected = [[total] * 2] * WORLD
    else:
        expected[1][0] = total
    same(lists, expected)
    convoy.faults = fault = FailAt(point="before_commit", rank=2)
    outcomes = convoy.run([request], convoy.rosters)
    assert fault.consumed == 1
    assert all(outcome.error is not None for outcome in outcomes.values())
    same(lists, expected)
    assert [store.statistics().dirty for store in convoy.stores] == [0] * WORLD


def test_a_gpu_that_does_not_get_there_ends_the_call_in_time(gpus: Gpus) -> None:
    """What rank 1 gives is never written: it hears of its deadline before it enters a kernel, and keeps its list."""
    fake, cuda = gpus.fake, gpus.cupy.cuda
    lists = gpus.lists([0, 1])
    late = gpus.lists([2, 3])[1]
    before = [host(lists[0]), host(late), host(lists[2])]
    with cuda.Device(3):
        fake.hold(cuda.Stream.null)
        late[1] += 0
    outcomes = gpus.run(OpKind.ALLREDUCE, [lists[0], late, lists[2]], timeout_s=0.3)
    errors = [outcome.error for outcome in outcomes]
    assert all(isinstance(one, FaultError) for one in errors), errors
    assert isinstance(errors[1], CollectiveTimeoutError)
    assert "a device has not done" in str(errors[1])
    with cuda.Device(3):
        fake.release(cuda.Stream.null)
    same([lists[0], late, lists[2]], before)
    assert gpus.fleet.dirty == [0] * WORLD


def test_failure_during_the_write_leaves_lists_dirty(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the tensors that the call writes, on the rank that fails."""
    spread = across.spread

    def broken(sources: Any, targets: Any) -> None:
        if targets[0].device == "cuda:3":
            raise RuntimeError("no way to GPU 3")
        spread(sources, targets)

    lists = [*gpus.lists([0, 1])[:2], gpus.lists([3, 1])[2]]
    keys = gpus.fleet.keep_all(lists)
    with monkeypatch.context() as changed:
        changed.setattr(across, "spread", broken)
        outcomes = gpus.fleet.run(OpKind.BROADCAST, keys, root=0, lists=GpuLists(src_tensor=1))
    assert [type(outcome.error) for outcome in outcomes] == [type(None), type(None), KernelError]
    assert "no way to GPU 3" in str(outcomes[2].error)
    assert gpus.fleet.dirty == [0, 0, 2]
    assert "half-written" in refused(gpus.fleet.run(OpKind.ALLREDUCE, keys, lists=LISTS), TensorDirtyError)
    gpus.fleet.must(OpKind.BROADCAST, keys, root=0, lists=GpuLists(src_tensor=1))  # writes them whole
    assert gpus.fleet.dirty == [0, 0, 0]
    same(lists, [[values(0, 1, (5,))] * 2] * WORLD)


@pytest.mark.parametrize("name", ["fold", "spread"])
def test_an_error_keeps_no_memory(gpus: Gpus, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Neither the stand-ins nor the lists, by the frames of what has caused it."""

    def broken(*_: Any) -> None:
        raise RuntimeError("no way")

    keys = gpus.fleet.keep_all(gpus.lists([2, 0], (1000,)))
    gpus.fleet.must(OpKind.ALLREDUCE, keys, lists=LISTS)
    before = [gpus.fake.allocated(device) for device in range(GPUS)]
    with monkeypatch.context() as changed:
        changed.setattr(across, name, broken)
        outcomes = gpus.fleet.run(OpKind.ALLREDUCE, keys, lists=LISTS)
    gc.collect()
    gpus.fake.drain()
    assert [type(outcome.error) for outcome in outcomes] == [KernelError] * WORLD
    assert [str(outcome.error.__cause__) for outcome in outcomes if outcome.error] == ["no way"] * WORLD
    assert [gpus.fake.allocated(device) for device in range(GPUS)] == before


@every_seed
def test_a_gpu_that_runs_full_midway_leaves_no_copy_behind(gpus: Gpus) -> None:
    """Tensors with gaps need memory as they are brought; what is under way then ends before its target is freed."""
    fake, size = gpus.fake, 1 << 10
    lists = [
        [[gpus.put(np.ones(size, "f4"), one, gaps=True) for _ in range(2 * WORLD)] for one in (rank, 3)]
        for rank in range(WORLD)
    ]
    room = [[gpus.put(np.zeros(size, "f4"), one) for one in (rank, 3)] for rank in range(WORLD)]
    fake.limit(fake.allocated(3) + size * 4 * 3 // 2, 3)
    with gpus.cupy.cuda.Device(3):
        fake.hold(gpus.cupy.cuda.Stream.null)
    outcomes = gpus.run(OpKind.REDUCESCATTER, lists, room, op=ReduceOp.SUM)
    gc.collect()
    fake.limit(1 << 40, 3)
    with gpus.cupy.cuda.Device(3):
        fake.release(gpus.cupy.cuda.Stream.null)
    assert all(outcome.error is not None for outcome in outcomes)
    same(lists, [[[np.ones(size)] * 2 * WORLD] * 2] * WORLD)


def test_only_the_tensor_that_is_named_becomes_half_written(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(sources: Any, targets: Any) -> None:
        raise RuntimeError("no way")

    lists = gpus.lists([0, 1])
    keys = gpus.fleet.keep_all(lists)
    with monkeypatch.context() as changed:
        changed.setattr(across, "spread", broken)
        outcomes = gpus.fleet.run(OpKind.REDUCE, keys, root=1, lists=GpuLists(dst_tensor=1))
    assert isinstance(outcomes[1].error, KernelError)
    assert gpus.fleet.dirty == [0, 1, 0]
    gpus.fleet.must(OpKind.SEND, keys, root=1, peer=2, lists=GpuLists(src_tensor=0, dst_tensor=0))  # the other one
    refused(
        gpus.fleet.run(OpKind.SEND, keys, root=1, peer=2, lists=GpuLists(src_tensor=1, dst_tensor=0)), TensorDirtyError
    )


# ---------------------------------------------------------------------------------------------- what is planned

KINDS = (
    OpKind.ALLREDUCE,
    OpKind.REDUCE,
    OpKind.BROADCAST,
    OpKind.ALLGATHER,
    OpKind.REDUCESCATTER,
    OpKind.SEND,
)


def request_of(kind: OpKind, world: int = 3, *, is_made: bool = False, **more: Any) -> Request:
    """A request of lists, with what each rank can bring."""
    spec = GroupSpec(name="gpus", group_id="id", backend="nccl", world_size=world, memory="cuda")
    reduces = kind in (OpKind.ALLREDUCE, OpKind.REDUCE, OpKind.REDUCESCATTER)
    found = Request(
        kind=kind,
        group=spec,
        operands=(),
        op=ReduceOp.SUM if reduces else None,
        root=1 if kind in (OpKind.REDUCE, OpKind.BROADCAST, OpKind.SEND) else -1,
        peer=0 if kind is OpKind.SEND else -1,
        **({"lists": GpuLists(src_tensor=1, dst_tensor=2)} | more),
    )
    operands = [(r, src and ("in", r), None if is_made else dst and ("out", r)) for r, src, dst in brought(found, "x")]
    return replace(found, operands=tuple(operands))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_made", [False, True], ids=["given", "made"])
def test_programs_travel(kind: OpKind, is_made: bool) -> None:
    is_made = is_made and kind in (OpKind.ALLGATHER, OpKind.REDUCESCATTER)
    planned = plan([request_of(kind, is_made=is_made)])
    for position in range(len(planned.participants)):
        program = planned.program(position)
        assert decode_program(encode_program(program)) == program
        template = program.shares[0].template
        assert template.is_listed
        assert program.rounds == 1  # the shapes of all that is made follow from what the rank has
        for step in template.steps:  # kernels touch nothing that a user has
            touched = {index for index in (step.src, step.dst) if index >= 0}
            if isinstance(step.kind, OpKind):
                assert {template.buffers[index].role for index in touched} == {Role.HOME}


def _mutants(part: Part) -> Iterator[tuple[str, Part]]:
    for rank in part.ranks:
        steps = part.template(rank).steps
        for at, step in enumerate(steps):
            if step.kind in OpKind:
                continue
            yield f"no {step.kind} on {rank}", _with(part, rank, steps[:at] + steps[at + 1 :])
            wrong = replace(step, src_piece=step.src_piece + 1)
            yield f"another src of {step.kind} on {rank}", _with(part, rank, (*steps[:at], wrong, *steps[at + 1 :]))
            wrong = replace(step, dst_piece=step.dst_piece + 1)
            yield f"another dst of {step.kind} on {rank}", _with(part, rank, (*steps[:at], wrong, *steps[at + 1 :]))
            if step.kind is not Local.SPREAD:
                other = Local.BRING if step.kind is Local.FOLD else Local.FOLD
                wrong = replace(step, kind=other, op=part.request.op)
                yield f"{other} on {rank}", _with(part, rank, (*steps[:at], wrong, *steps[at + 1 :]))
            if step.op is not None:
                wrong = replace(step, op=ReduceOp.MAX)
                yield f"another op on {rank}", _with(part, rank, (*steps[:at], wrong, *steps[at + 1 :]))


def _with(part: Part, rank: int, steps: tuple[Any, ...]) -> Part:
    parts = list(part.parts)
    parts[part.places[rank]] = len(part.templates)
    template = replace(part.template(rank), steps=steps)
    return replace(part, templates=(*part.templates, template), parts=tuple(parts))


@pytest.mark.parametrize("kind", KINDS)
def test_every_broken_step_is_caught(kind: OpKind) -> None:
    part = plan_part(request_of(kind))
    verify(part, bitwise=False)
    mutants = list(_mutants(part))
    assert len(mutants) >= 6
    for name, mutant in mutants:
        with pytest.raises(InternalError):
            verify(mutant, bitwise=False)
            raise AssertionError(name)


def test_kernels_on_the_lists_themselves_are_caught() -> None:
    part = plan_part(request_of(OpKind.ALLREDUCE))
    (template,) = part.templates
    kernel = replace(template.steps[1], src=0, dst=0)
    for steps in ((kernel,), (template.steps[0], kernel, template.steps[2])):
        with pytest.raises(InternalError, match="on a list"):
            verify(replace(part, templates=(replace(template, steps=steps),)), bitwise=False)
    plain = plan_part(request_of(OpKind.ALLREDUCE, lists=None))
    (other,) = plain.templates
    with pytest.raises(InternalError, match="fold"):
        step = replace(other.steps[0], kind=Local.FOLD)
        verify(replace(plain, templates=(replace(other, steps=(step, *other.steps)),)), bitwise=False)


@pytest.mark.parametrize(("name", "kind"), [one for one in rosters.MADE if one[1] in KINDS])
def test_lists_go_by_other_algorithms_too(name: str, kind: OpKind) -> None:
    """None of them is cheaper on NCCL so far."""
    there = rosters.roster("aabbc", bitwise=False, backend="nccl")
    plain = rosters.request(kind, there)
    one = replace(plain, lists=LISTS)
    made = rosters.built(name, there, plain)
    assert made is not None
    part = listed(made, one)
    verify(part, bitwise=False)
    for rank in part.ranks:
        template = part.template(rank)
        kernels = [step for step in template.steps if step.kind not in CROSSINGS]
        assert [step.kind for step in kernels] == [step.kind for step in made.template(rank).steps]
        gives = kind is not OpKind.BROADCAST or rank == one.root
        first = [Local.FOLD if kind is OpKind.ALLREDUCE else Local.BRING] if gives else []
        assert [step.kind for step in template.steps if step not in kernels] == [*first, Local.SPREAD]


@pytest.mark.parametrize("kind", KINDS)
def test_another_backend_is_refused_before_anything_is_sent(kind: OpKind) -> None:
    one = request_of(kind)
    for backend in ("shm", "tcp", "gloo", "local", "torch:nccl"):
        with pytest.raises(UnsupportedError, match="nccl"):
            plan([replace(one, group=replace(one.group, backend=backend))])


def test_invalid_requests_are_refused_before_sending() -> None:
    for kind in (OpKind.GATHER, OpKind.ALLTOALL, OpKind.BARRIER):
        with pytest.raises(UnsupportedError, match="lists"):
            plan([replace(request_of(kind), root=0 if kind is OpKind.GATHER else -1)])
    for kind, index in [(OpKind.REDUCE, "dst_tensor"), (OpKind.BROADCAST, "src_tensor"), (OpKind.SEND, "src_tensor")]:
        with pytest.raises(InvalidArgumentError, match="0 or more"):
            plan([request_of(kind, lists=GpuLists(**{index: -1}))])
        with pytest.raises(InvalidArgumentError, match=index if kind is not OpKind.SEND else "gpu index"):
            plan([request_of(kind, lists=GpuLists(**{index: 1 << 70}))])
    with pytest.raises(InvalidArgumentError, match="there already"):
        plan([request_of(OpKind.SEND, is_made=True)])
    with pytest.raises(InvalidArgumentError, match="one tensor of a list"):
        plan([request_of(OpKind.REDUCE, inplace=False)])
    with pytest.raises(MissingMemberError):
        one = request_of(OpKind.ALLREDUCE)
        plan([replace(one, operands=one.operands[:2])])


def test_a_plan_can_be_explained(gpus: Gpus) -> None:
    held = [contain(row) for row in gpus.lists([2, 0, 3], (1000,))]
    infos = _infos(held[0].tensors)
    planned = plan([request_of(OpKind.ALLREDUCE), request_of(OpKind.ALLGATHER, is_made=True)])
    explained = explain(planned, dict.fromkeys(planned.uses(), infos))
    text = explained.explain()
    assert "allreduce_multigpu sum" in text
    assert "fold sum over the GPUs of the rank" in text
    assert "copy to the GPUs of the rank" in text
    first, second = explained.rows
    assert (first.tensors, first.nbytes) == (1, 4000)  # between ranks goes what one GPU each would send
    assert (first.scratch_nbytes, first.made_nbytes) == (8000, 0)
    assert (second.tensors, second.nbytes) == (3, 12000)
    assert (second.scratch_nbytes, second.made_nbytes) == (12 * 4000, 27 * 4000)
    for kind, words in [
        (OpKind.BROADCAST, ("tensor at place 1 to the group's GPU", "copy to the other GPUs")),
        (OpKind.REDUCE, ("copy to the tensor at place 2",)),
        (OpKind.SEND, ("the tensor on GPU 1", "copy to the tensor on GPU 2")),
        (OpKind.REDUCESCATTER, ("fold sum",)),
    ]:
        one = plan([request_of(kind)])
        many = infos if kind is not OpKind.REDUCESCATTER else tuple(info for info in infos for _ in range(9))
        text = explain(one, dict.fromkeys(one.uses(), many)).explain()
        assert f"{kind.value}_multigpu" in text
        assert all(word in text for word in words), text


def _infos(tensors: Sequence[Any]) -> Any:
    return tuple(map(arrays.describe, tensors))


def test_mismatches_are_predicted_from_handles(gpus: Gpus) -> None:
    def judged(planned: Plan, lists: dict[Any, Any]) -> None:
        held = {source: contain(one) for source, one in lists.items()}
        handles: Any = {
            source: SimpleNamespace(structure=one.structure, infos=_infos(one.tensors)) for source, one in held.items()
        }
        _Foreseen(planned, handles).judge()

    rows = gpus.lists([0, 1])
    planned = plan([replace(request_of(OpKind.ALLREDUCE), operands=tuple((r, r, None) for r in range(WORLD)))])
    judged(planned, dict(enumerate(rows)))
    for change, error in BAD.values():
        if error is not AliasError:  # memory is not looked at
            with pytest.raises(error):
                judged(planned, {0: rows[0], 1: change(gpus, rows[1]), 2: rows[2]})
    chain = plan(
        [
            replace(request_of(OpKind.ALLGATHER), operands=tuple((r, r, None) for r in range(WORLD))),
            replace(request_of(OpKind.REDUCESCATTER), operands=tuple((r, Made(0), None) for r in range(WORLD))),
            replace(request_of(OpKind.ALLREDUCE), inplace=False, operands=tuple((r, r, None) for r in range(WORLD))),
            replace(request_of(OpKind.BROADCAST), operands=((0, None, 0), (1, Made(2), None), (2, None, 2))),
        ]
    )
    judged(chain, dict(enumerate(rows)))
    with pytest.raises(MismatchError):
        judged(chain, {0: rows[0], 1: rows[1], 2: [*rows[2], gpus.put(np.ones(5, "f4"), 2)]})


def test_keys_are_those_of_the_lists(gpus: Gpus) -> None:
    keys: list[Key] = gpus.fleet.keep_all(gpus.lists([0, 1]))
    planned = gpus.fleet.plan(OpKind.ALLREDUCE, keys, lists=LISTS)
    assert [planned.sources(at) for at in range(WORLD)] == [(key,) for key in keys]
    assert planned.uses() == dict.fromkeys(keys, True)
