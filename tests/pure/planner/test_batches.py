"""Batches on participants in threads, over one or several groups: against numpy in program order, and when they fail.

Hypothesis draws groups that overlap, calls that depend on each other or not, keys that share memory though nobody can
see it, and operands that earlier calls of the batch make.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raycollect.backends import arrays
from raycollect.core.model import Key, OpKind, ReduceOp, task_key
from raycollect.engine.batch_agreement import decode_arrivals, encode_arrivals
from raycollect.errors import (
    AllocationError,
    CollectiveTimeoutError,
    GroupBrokenError,
    InvalidArgumentError,
    KernelError,
    MismatchError,
    NotATensorError,
    PlanAbortedError,
    ProtocolError,
    ReadOnlyError,
    RefusedError,
    TensorDirtyError,
    TensorFreedError,
)
from raycollect.planner import Inner, Made, Part, Request, Roster, Topology, plan, plan_part
from raycollect.planner.algorithms import ALGORITHMS, build
from raycollect.planner.schedule import schedule
from raycollect.planner.template import NATIVE
from tests.pure.communicators import ThreadTeam
from tests.pure.fleet import WAIT_S, Convoy, FailAt, HoldAt, launched
from tests.pure.meaning import gives_of, meaning

CALM = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # the machine may be busy

SIZE = 6
GROUPS: dict[str, list[list[int]]] = {
    "one": [[0, 1, 2]],
    "alone": [[0]],
    "the same in another order": [[0, 1, 2], [2, 0, 1]],
    "inside": [[0, 1, 2, 3], [1, 3], [2, 0]],
    "overlapping": [[0, 1, 2], [1, 2, 3], [3, 0]],
    "apart": [[0, 1], [2, 3]],
}
KINDS = (OpKind.ALLREDUCE, OpKind.REDUCE, OpKind.BROADCAST, OpKind.SEND, OpKind.ALLGATHER, OpKind.BARRIER)


@contextmanager
def _convoy(groups: Sequence[Sequence[int]]) -> Iterator[Convoy]:
    made = Convoy(groups)
    try:
        yield made
    finally:
        made.close()


@dataclass(slots=True)
class Memory:
    """The buffers of one participant, and what its keys see of them."""

    buffers: list[Any]
    views: list[tuple[int, slice]]
    keys: list[Any] = field(default_factory=list)

    def view(self, at: int) -> Any:
        buffer, part = self.views[at]
        return self.buffers[buffer][part]


@dataclass(slots=True)
class Call:
    """A request, and for each rank what stands for what it gives and takes: the place of a key, or a `Made`."""

    kind: OpKind
    group: int
    root: int = -1
    peer: int = -1
    inplace: bool = True
    gives: dict[int, Any] = field(default_factory=dict)
    takes: dict[int, Any] = field(default_factory=dict)


def _memory(draw: st.DrawFn, seed: int) -> Memory:
    """Some buffers; some keys see the same one, or parts of it that overlap, or that do not."""
    rng = np.random.default_rng(seed)
    views = [(0, slice(0, SIZE)), (1, slice(0, SIZE)), (2, slice(0, SIZE)), (2, slice(SIZE, 2 * SIZE))]
    hidden = [(0, slice(0, SIZE)), (1, slice(2, SIZE + 2)), (2, slice(SIZE - 1, 2 * SIZE - 1)), (3, slice(0, None, 2))]
    views += draw(st.lists(st.sampled_from(hidden), max_size=3))
    return Memory([rng.integers(0, 9, 2 * SIZE) for _ in range(4)], views)


@st.composite
def _batches(draw: st.DrawFn) -> tuple[list[list[int]], list[Memory], list[Call]]:
    groups = GROUPS[draw(st.sampled_from(sorted(GROUPS)))]
    count = 1 + max(one for group in groups for one in group)
    seed = draw(st.integers(0, 99))
    memories = [_memory(draw, seed + one) for one in range(count)]
    # Few kinds: then calls of one form stand on both sides of others, and could be put together.
    kinds = draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=3, unique=True))
    inplace = draw(st.booleans())
    calls: list[Call] = []
    made: list[list[Made]] = [[] for _ in range(count)]  # participant -> outputs of the common shape
    for number in range(draw(st.integers(1, 9))):
        at = draw(st.integers(0, len(groups) - 1))
        group = groups[at]

        def operand(rank: int, *, written: bool, group: list[int] = group) -> Any:
            one = group[rank]
            keys = list(range(len(memories[one].views)))
            return draw(st.sampled_from(keys + made[one][-2:]))

        kind = draw(st.sampled_from(kinds))
        if len(group) == 1 and kind is OpKind.SEND:
            kind = OpKind.ALLREDUCE
        call = Call(kind, at)
        ranks = range(len(group))
        if kind in (OpKind.REDUCE, OpKind.BROADCAST, OpKind.SEND):
            call.root = draw(st.sampled_from(ranks))
        if kind is OpKind.SEND:
            call.peer = draw(st.sampled_from([rank for rank in ranks if rank != call.root]))
        if kind in (OpKind.ALLREDUCE, OpKind.REDUCE):
            call.inplace = inplace or draw(st.booleans())
        givers = {OpKind.BROADCAST: [call.root], OpKind.SEND: [call.root], OpKind.BARRIER: []}.get(kind, list(ranks))
        call.gives = {rank: operand(rank, written=False) for rank in givers}
        if kind is OpKind.BROADCAST:
            call.takes = {rank: operand(rank, written=True) for rank in ranks if rank != call.root}
        if kind is OpKind.SEND and draw(st.booleans()):
            call.takes = {call.peer: operand(call.peer, written=True)}
        calls.append(call)
        for rank in _makers(call, len(group)):
            if kind is not OpKind.ALLGATHER:
                made[group[rank]].append(Made(number))
    return groups, memories, calls


def _makers(call: Call, world: int) -> list[int]:
    """The ranks that get an output."""
    if call.kind is OpKind.SEND:
        return [] if call.takes else [call.peer]
    if call.kind is OpKind.ALLGATHER or (call.kind is OpKind.ALLREDUCE and not call.inplace):
        return list(range(world))
    return [call.root] if call.kind is OpKind.REDUCE and not call.inplace else []


def _meant(groups: list[list[int]], memories: list[Memory], calls: list[Call]) -> list[dict[int, Any]]:
    """Runs the calls one after the other on the memory; gives the outputs of each, by participant."""
    outputs: list[dict[int, Any]] = []
    for call in calls:
        group = groups[call.group]

        def seen(rank: int, source: Any, group: list[int] = group) -> Any:
            one = group[rank]
            return outputs[source.request][one] if isinstance(source, Made) else memories[one].view(source)

        given = {rank: seen(rank, source).copy() for rank, source in call.gives.items()}
        made: dict[int, Any] = {}
        if call.kind in (OpKind.ALLREDUCE, OpKind.REDUCE):
            total = sum(given.values())
            for rank in range(len(group)) if call.kind is OpKind.ALLREDUCE else (call.root,):
                if call.inplace:
                    seen(rank, call.gives[rank])[...] = total
                else:
                    made[group[rank]] = total.copy()
        elif call.kind is OpKind.ALLGATHER:
            made = {one: [given[rank].copy() for rank in range(len(group))] for one in group}
        elif call.kind in (OpKind.BROADCAST, OpKind.SEND):
            for rank, source in call.takes.items():
                seen(rank, source)[...] = given[call.root]
            if call.kind is OpKind.SEND and not call.takes:
                made[group[call.peer]] = given[call.root].copy()
        outputs.append(made)
    return outputs


def _requests(convoy: Convoy, groups: list[list[int]], memories: list[Memory], calls: list[Call]) -> list[Request]:
    for one, memory in enumerate(memories):
        memory.keys = [convoy.keep(one, memory.view(at)) for at in range(len(memory.views))]
    requests = []
    for call in calls:
        group = groups[call.group]

        def source(rank: int, side: dict[int, Any], group: list[int] = group) -> Any:
            found = side.get(rank)
            return found if found is None or isinstance(found, Made) else memories[group[rank]].keys[found]

        ranks = sorted({call.root, call.peer}) if call.kind is OpKind.SEND else range(len(group))
        requests.append(
            Request(
                kind=call.kind,
                group=convoy.rosters[call.group].spec,
                operands=tuple((rank, source(rank, call.gives), source(rank, call.takes)) for rank in ranks),
                op=ReduceOp.SUM if call.kind in (OpKind.ALLREDUCE, OpKind.REDUCE) else None,
                root=call.root,
                peer=call.peer,
                inplace=call.inplace,
                timeout_s=WAIT_S,
            )
        )
    return requests


def _copy(memory: Memory) -> Memory:
    return Memory([buffer.copy() for buffer in memory.buffers], memory.views)


@settings(CALM, max_examples=150)
@given(batch=_batches(), staging=st.sampled_from([0, 64, 32 << 20]))
def test_a_batch_does_what_its_calls_do_one_after_the_other(batch: Any, staging: int) -> None:
    groups, memories, calls = batch
    copies = [_copy(memory) for memory in memories]
    meant = _meant(groups, copies, calls)
    with _convoy(groups) as convoy:
        requests = _requests(convoy, groups, memories, calls)
        planned = plan(requests, [convoy.rosters[call.group] for call in calls], staging=staging)
        outcomes = {one: future.result(WAIT_S) for one, future in convoy.start(planned).items()}
        for outcome in outcomes.values():
            assert outcome.error is None, outcome.error
        for position, name in enumerate(planned.participants):
            one = int(name.removeprefix("actor-"))
            made = [container.value for container in outcomes[one].outputs]
            expected = [meant[number][one] for number in planned.outputs(position)]
            assert len(made) == len(expected)
            for got, wanted in zip(made, expected, strict=True):
                np.testing.assert_array_equal(np.stack(got) if isinstance(got, list) else got, np.array(wanted))
    for memory, wanted in zip(memories, copies, strict=True):
        for got, right in zip(memory.buffers, wanted.buffers, strict=True):
            np.testing.assert_array_equal(got, right)


WRONG: dict[str, tuple[Callable[[Convoy, int, Memory, int], Any], type[RefusedError]]] = {
    "freed": (lambda convoy, one, memory, at: convoy.stores[one].free([memory.keys[at]]), TensorFreedError),
    "dirty": (
        lambda convoy, one, memory, at: convoy.stores[one].mark_dirty(
            [arrays.byte_range(memory.view(at))], [arrays.owner(memory.view(at))]
        ),
        TensorDirtyError,
    ),
    "another size": (
        lambda convoy, one, memory, at: _replace(convoy, one, memory, at, np.zeros(SIZE + 1, "int64")),
        MismatchError,
    ),
    "another dtype": (
        lambda convoy, one, memory, at: _replace(convoy, one, memory, at, np.zeros(SIZE, "float64")),
        MismatchError,
    ),
}


def _replace(convoy: Convoy, one: int, memory: Memory, at: int, value: Any) -> None:
    memory.keys[at] = convoy.keep(one, value)


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("name", ["one", "inside", "overlapping", "the same in another order"])
@pytest.mark.parametrize("call", range(3))
def test_one_thing_wrong_in_one_call_is_refused_everywhere_and_touches_nothing(
    name: str, wrong: str, call: int
) -> None:
    groups = GROUPS[name]
    rng = np.random.default_rng(call)
    count = 1 + max(one for group in groups for one in group)
    memories = [
        Memory([rng.integers(0, 9, SIZE) for _ in range(3)], [(at, slice(0, SIZE)) for at in range(3)])
        for _ in range(count)
    ]
    calls = []
    for number in range(3):
        group = number % len(groups)
        calls.append(Call(OpKind.ALLREDUCE, group, gives=dict.fromkeys(range(len(groups[group])), number)))
    spoil, error_type = WRONG[wrong]
    with _convoy(groups) as convoy:
        _requests(convoy, groups, memories, [])
        for memory, one in zip(memories, range(count), strict=True):
            memory.keys = [convoy.keep(one, memory.view(at)) for at in range(3)]
        group = groups[calls[call].group]
        spoil(convoy, group[1], memories[group[1]], call)
        before = [_copy(memory) for memory in memories]
        requests = _with_keys(convoy, groups, memories, calls)
        outcomes = convoy.run(requests, [convoy.rosters[one.group] for one in calls])
        for outcome in outcomes.values():
            assert type(outcome.error) is error_type, outcome.error
            assert outcome.error.op == "batch"
            assert {violation.call for violation in outcome.error.violations} == {call}
            assert {violation.rank for violation in outcome.error.violations} == {1}
            assert outcome.outputs == ()
    for memory, was in zip(memories, before, strict=True):
        for got, right in zip(memory.buffers, was.buffers, strict=True):
            np.testing.assert_array_equal(got, right)


def _with_keys(convoy: Convoy, groups: list[list[int]], memories: list[Memory], calls: list[Call]) -> list[Request]:
    """The requests of allreduces, over the keys that are there."""
    return [
        Request(
            kind=OpKind.ALLREDUCE,
            group=convoy.rosters[call.group].spec,
            operands=tuple(
                (rank, memories[one].keys[call.gives[rank]], None) for rank, one in enumerate(groups[call.group])
            ),
            op=ReduceOp.SUM,
            timeout_s=WAIT_S,
        )
        for call in calls
    ]


def _allreduces(convoy: Convoy, values: Sequence[Sequence[Any]], group: int = 0) -> list[Request]:
    """For each list of values, by rank, an allreduce of them."""
    roster = convoy.rosters[group]
    members = [int(name.removeprefix("actor-")) for name in roster.members]
    return [
        Request(
            kind=OpKind.ALLREDUCE,
            group=roster.spec,
            operands=tuple((rank, convoy.keep(members[rank], value), None) for rank, value in enumerate(of_call)),
            op=ReduceOp.SUM,
            timeout_s=WAIT_S,
        )
        for of_call in values
    ]


def test_all_that_is_wrong_in_all_calls_is_in_one_error() -> None:
    with _convoy([[0, 1]]) as convoy:
        requests = _allreduces(convoy, [[np.ones(2), np.ones(3)], [np.ones(2), np.ones(2)], [np.ones(1), np.ones(4)]])
        outcomes = convoy.run(requests, convoy.rosters * 3)
        errors = [outcome.error for outcome in outcomes.values()]
    assert str(errors[0]) == str(errors[1])
    assert isinstance(errors[0], MismatchError)
    assert [violation.call for violation in errors[0].violations] == [0, 2]


def test_a_read_only_operand_and_a_staging_that_holds_no_element_are_refused() -> None:
    with _convoy([[0, 1]]) as convoy:
        values = [[np.ones(2), np.ones(2)] for _ in range(2)]
        values[1][0].flags.writeable = False
        outcomes = convoy.run(_allreduces(convoy, values), convoy.rosters * 2)
        assert {type(outcome.error) for outcome in outcomes.values()} == {ReadOnlyError}
        values = [[np.ones(2), np.ones(2)], [np.ones(2, "int16"), np.ones(2, "int16")]]
        outcomes = convoy.run(_allreduces(convoy, values), convoy.rosters * 2, staging=4)
        for outcome in outcomes.values():
            assert isinstance(outcome.error, InvalidArgumentError)
            found = [(violation.call, violation.rank, violation.field) for violation in outcome.error.violations]
            assert found == [(0, 0, "staging_nbytes"), (0, 1, "staging_nbytes")]
        outcomes = convoy.run(_allreduces(convoy, values), convoy.rosters * 2, staging=8)
        assert all(outcome.error is None for outcome in outcomes.values())


def test_no_memory_for_staging_on_one_is_a_refusal_on_all() -> None:
    def none(info: Any) -> Any:
        raise MemoryError("not a byte")

    with _convoy([[0, 1]]) as convoy:
        values = [[np.ones(2), np.ones(2)] for _ in range(3)]
        requests = _allreduces(convoy, values)
        hold = threading.Barrier(2)

        def on_one(info: Any) -> Any:
            if hold.wait(WAIT_S):
                return none(info)
            return arrays.empty(info)

        convoy.allocate = on_one
        outcomes = convoy.run(requests, convoy.rosters * 3)
        for outcome in outcomes.values():
            assert isinstance(outcome.error, AllocationError)
            assert ": staging is too large for the memory that is left (" in str(outcome.error)
            assert len(outcome.error.violations) == 1
        np.testing.assert_array_equal(values, np.ones((3, 2, 2)))
        convoy.allocate = arrays.empty
        assert all(one.error is None for one in convoy.run(requests, convoy.rosters * 3).values())


def test_staging_that_can_not_be_had_between_two_rounds_is_told_in_the_last_one() -> None:
    """The sum is brought in the first round, what a send makes in the second."""
    failing = threading.Lock()

    def allocate(info: Any) -> Any:
        if info.dtype == "uint8" and failing.acquire(blocking=False):
            raise MemoryError("not a byte")
        return arrays.empty(info)

    with _convoy([[0, 1]]) as convoy:
        convoy.allocate = allocate
        values = [[np.ones(2), np.ones(2)] for _ in range(3)]
        requests = _allreduces(convoy, values)
        sent = Request(
            kind=OpKind.SEND,
            group=convoy.rosters[0].spec,
            operands=((0, convoy.keep(0, np.ones(3)), None), (1, None, None)),
            root=0,
            peer=1,
            timeout_s=WAIT_S,
        )
        requests.append(sent)
        outcomes = convoy.run(requests, convoy.rosters * 4)
        assert {type(outcome.error) for outcome in outcomes.values()} == {AllocationError}
        np.testing.assert_array_equal(values, np.ones((3, 2, 2)))
        outcomes = convoy.run(requests, convoy.rosters * 4)
        assert all(outcome.error is None for outcome in outcomes.values())
        np.testing.assert_array_equal(values, np.full((3, 2, 2), 2.0))


# ---------------------------------------------------------------------------------------------- several launches


HOSTS = (2, 1, 3)


@contextmanager
def _hosts(*, bitwise: bool = True) -> Iterator[tuple[Convoy, Roster]]:
    """Six participants on three hosts, with the groups of the hosts and that of their leaders."""
    ends = list(accumulate(HOSTS, initial=0))
    ranks = [tuple(range(lo, hi)) for lo, hi in pairwise(ends)]
    leaders = tuple(of[0] for of in ranks)
    with _convoy([range(ends[-1]), leaders, *ranks]) as convoy:
        outer, lead, *hosts = convoy.rosters
        places = [host for host, count in enumerate(HOSTS) for _ in range(count)]
        roster = replace(
            outer,
            topology=Topology.of(places),
            hosts=tuple(Inner(spec=one.spec, ranks=of) for one, of in zip(hosts, ranks, strict=True)),
            leaders=Inner(spec=lead.spec, ranks=leaders),
            bitwise=bitwise,
        )
        yield convoy, roster


def _with_choice(request: Request, roster: Roster, name: str, at_least: int) -> Part:
    """The part of a request with one algorithm beside the native one."""
    native = replace(plan_part(request), choices=(NATIVE,))
    other = build(native, roster, ALGORITHMS[name])
    templates = tuple(replace(native.template(rank), others=(other.template(rank).steps,)) for rank in native.ranks)
    choices = (NATIVE, replace(other.choices[0], at_least=at_least))
    parts = tuple(range(len(templates)))
    return replace(native, templates=templates, parts=parts, choices=choices, levels=other.levels)


@pytest.mark.parametrize("bitwise", [True, False])
@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize(("dtype", "size", "levels"), [("int64", 3, 0), ("int64", 4, 1), ("float16", 90, 0)])
def test_an_algorithm_is_taken_by_the_bytes_of_a_bundle_and_not_for_narrow_floats(
    dtype: str, size: int, levels: int, inplace: bool, bitwise: bool
) -> None:
    """Two calls of 4 x 8 bytes reach the 64 from which on the hosts are gone through."""
    with _hosts(bitwise=bitwise) as (convoy, roster):
        rng = np.random.default_rng(size)
        values = [[rng.integers(0, 9, size).astype(dtype) for _ in range(6)] for _ in range(2)]
        expected = [sum(of_call) for of_call in values]
        requests = [replace(one, inplace=inplace) for one in _allreduces(convoy, values)]
        part = _with_choice(requests[0], roster, "hierarchical", 64)
        planned = schedule(requests, [part] * 2, [roster] * 2, 32 << 20)
        kernels = _heard(convoy, 5)
        outcomes = {one: future.result(WAIT_S) for one, future in convoy.start(planned).items()}
        for at, right in enumerate(expected):
            for one in range(6):
                assert outcomes[one].error is None, outcomes[one].error
                got = values[at][one] if inplace else outcomes[one].outputs[at].value
                np.testing.assert_array_equal(got, right)
        kinds = [kernel.kind for kernel in kernels]
        assert kinds == ([OpKind.REDUCE, OpKind.BROADCAST] if levels else [OpKind.ALLREDUCE])


@pytest.mark.parametrize("kind", [OpKind.BROADCAST, OpKind.ALLGATHER, OpKind.ALLTOALL, OpKind.GATHER, OpKind.SCATTER])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_what_stands_in_runs_in_launches_of_pairs(kind: OpKind, world: int) -> None:
    """Over `tcp`, where pairs of one launch don't see each other; each call is repeated on other tensors."""
    team = ThreadTeam("tcp", world)
    convoy = Convoy([range(world)], lambda world_size: team.communicators)
    try:
        spec = replace(convoy.rosters[0].spec, ops=("send", "recv"))
        roster = replace(convoy.rosters[0], spec=spec)
        root = 0 if kind in (OpKind.BROADCAST, OpKind.GATHER, OpKind.SCATTER) else -1
        requests, meant, takes = [], [], []
        for call in range(3):
            gives = gives_of(kind, world, lambda n, call=call: np.arange(n) + call, lambda a, b: 2 + a + 3 * b, root)
            meant.append(meaning(kind, gives, root=root))
            lands = {rank: np.zeros_like(gives[0]) for rank in range(1, world)} if kind is OpKind.BROADCAST else {}
            takes.append(lands)
            operands = tuple(
                (
                    rank,
                    None if gives[rank] is None else convoy.keep(rank, gives[rank]),
                    convoy.keep(rank, lands[rank]) if rank in lands else None,
                )
                for rank in range(world)
            )
            requests.append(Request(kind=kind, group=spec, operands=operands, root=root, timeout_s=WAIT_S))
        planned = plan(requests, [roster] * 3)
        assert planned.width > 1 or world == 2
        outcomes = {one: future.result(WAIT_S) for one, future in convoy.start(planned).items()}
        for rank in range(world):
            assert outcomes[rank].error is None, outcomes[rank].error
            made = [container.value for container in outcomes[rank].outputs]
            got = [of[rank] for of in takes if rank in of] or made
            wanted = [of[rank] for of in meant] if got else []
            for one, right in zip(got, wanted, strict=True):
                for piece, whole in zip(*((x if isinstance(x, list) else [x]) for x in (one, right)), strict=True):
                    np.testing.assert_array_equal(piece, whole)
    finally:
        convoy.close()
        team.close()


# ---------------------------------------------------------------------------------------------- dirt


def test_a_dirty_tensor_may_be_read_after_a_call_of_the_batch_has_written_it_whole() -> None:
    with _convoy([[0, 1]]) as convoy:
        values = [np.arange(4.0), np.zeros(4)]
        keys = [convoy.keep(one, value) for one, value in enumerate(values)]
        spec = convoy.rosters[0].spec
        convoy.stores[1].mark_dirty([arrays.byte_range(values[1])], [arrays.owner(values[1])])
        over = Request(
            kind=OpKind.BROADCAST,
            group=spec,
            operands=((0, keys[0], None), (1, None, keys[1])),
            root=0,
            timeout_s=WAIT_S,
        )
        use = Request(
            kind=OpKind.ALLREDUCE,
            group=spec,
            operands=((0, keys[0], None), (1, keys[1], None)),
            op=ReduceOp.SUM,
            timeout_s=WAIT_S,
        )
        for outcome in convoy.run([use, over], convoy.rosters * 2).values():
            assert isinstance(outcome.error, TensorDirtyError)
        for outcome in convoy.run([over, use], convoy.rosters * 2).values():
            assert outcome.error is None
        np.testing.assert_array_equal(values, [[0, 2, 4, 6]] * 2)
        assert convoy.stores[1].statistics().dirty == 0


# ---------------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize("nth", range(1, 5))
@pytest.mark.parametrize("point", ["before_kernel", "after_kernel"])
def test_a_fault_in_the_middle_leaves_exactly_what_was_being_written_dirty(point: str, nth: int) -> None:
    """Two bundles of two calls each, over tensors of their own: as many kernels, as nothing is packed."""
    with _convoy([[0, 1, 2]]) as convoy:
        values = [np.ones((4, 3)) for _ in range(3)]
        keys = [[convoy.keep(one, row) for row in value] for one, value in enumerate(values)]
        sums = _calls(convoy, OpKind.ALLREDUCE, [[of[row] for of in keys] for row in (0, 2)])
        copies = _calls(convoy, OpKind.BROADCAST, [[of[row] for of in keys] for row in (1, 3)])
        requests, rows = [sums[0], copies[0], sums[1], copies[1]], [(0, 2), (1, 3)]
        planned = plan(requests, convoy.rosters * 4, staging=0)
        assert [together.requests for together in planned.order] == rows
        convoy.faults = fault = FailAt(point=point, rank=1, nth=nth)
        outcomes = {one: future.result(WAIT_S) for one, future in convoy.start(planned).items()}
        assert fault.consumed == 1
        hit = (nth - 1) // 2
        error = outcomes[1].error
        assert isinstance(error, KernelError)
        assert (error.op, error.rank, error.group_name) == (["allreduce", "broadcast"][hit], 1, "id-0")
        for one in range(3):
            dirty = tuple(row for row in range(4) if convoy.stores[one].is_dirty([arrays.byte_range(values[one][row])]))
            if one == 1:
                assert dirty == rows[hit]
            else:  # it may be a bundle ahead or behind, and the root of a broadcast writes nothing
                assert dirty in ((), *rows)
        if hit:
            np.testing.assert_array_equal(values[1][[0, 2]], np.full((2, 3), 3.0))
        else:
            np.testing.assert_array_equal(values[1][[1, 3]], np.ones((2, 3)))


def _calls(convoy: Convoy, kind: OpKind, keys: Sequence[Sequence[Key]]) -> list[Request]:
    """For each list of keys, by rank, a collective of them in place; from rank 0, where it has a root."""
    op, root = (ReduceOp.SUM, -1) if kind is OpKind.ALLREDUCE else (None, 0)
    return [
        Request(
            kind=kind,
            group=convoy.rosters[0].spec,
            operands=tuple(
                (rank, None, key) if rank and root == 0 else (rank, key, None) for rank, key in enumerate(of)
            ),
            op=op,
            root=root,
            timeout_s=WAIT_S,
        )
        for of in keys
    ]


def test_a_fault_in_a_fused_kernel_makes_all_of_its_tensors_dirty() -> None:
    with _convoy([[0, 1]]) as convoy:
        values = [[np.ones(3), np.ones(3)] for _ in range(4)]
        convoy.faults = fault = FailAt(point="after_kernel", rank=0)
        outcomes = convoy.run(_allreduces(convoy, values), convoy.rosters * 4)
        assert fault.consumed == 1
        assert isinstance(outcomes[0].error, KernelError)
        for of_call in values:
            assert convoy.stores[0].is_dirty([arrays.byte_range(of_call[0])])
        convoy.faults = FailAt(point="start", rank=9)
        again = [[np.full(3, 2.0), np.full(3, 3.0)] for _ in range(4)]
        assert all(one.error is None for one in convoy.run(_allreduces(convoy, again), convoy.rosters * 4).values())
        np.testing.assert_array_equal(again, np.full((4, 2, 3), 5.0))


@pytest.mark.parametrize("point", ["start", "before_door", "after_door"])
def test_a_fault_outside_of_the_kernels_leaves_nothing_dirty(point: str) -> None:
    with _convoy([[0, 1], [1, 2]]) as convoy:
        values = [[np.ones(2), np.ones(2)], [np.ones(2), np.ones(2)]]
        requests = _allreduces(convoy, values[:1], 0) + _allreduces(convoy, values[1:], 1)
        convoy.faults = fault = FailAt(point=point, rank=1)
        outcomes = convoy.run(requests, convoy.rosters)
        assert fault.consumed == 1
        assert isinstance(outcomes[1].error, KernelError)
        assert convoy.stores[1].statistics().dirty == 0


# ---------------------------------------------------------------------------------------------- aborts


def test_an_abort_between_two_launches_is_not_lost() -> None:
    """Who is aborted after a kernel, and before the next launch, begins none."""
    with _convoy([[0, 1], [1, 2]]) as convoy:
        values = [[np.ones(2), np.ones(2)], [np.ones(2), np.ones(2)]]
        requests = _allreduces(convoy, values[:1], 0) + _allreduces(convoy, values[1:], 1)
        convoy.faults = hold = HoldAt(point="after_kernel", rank=1)
        futures = convoy.start(plan(requests, convoy.rosters))
        assert hold.came.wait(WAIT_S)
        assert futures[0].result(WAIT_S).error is None, "it had no other launch"
        convoy.executions[1].abort()
        hold.go.set()
        error = futures[1].result(WAIT_S).error
        assert isinstance(error, PlanAbortedError)
        assert isinstance(futures[2].result(WAIT_S).error, PlanAbortedError), "who waits for it is aborted as well"
        np.testing.assert_array_equal(values[0], [[2, 2], [2, 2]])
        np.testing.assert_array_equal(values[1], [[1, 1], [1, 1]])
        assert [store.statistics().dirty for store in convoy.stores] == [0, 0, 0]


def test_an_abort_before_the_run_lets_it_begin_nothing() -> None:
    with _convoy([[0, 1]]) as convoy:
        values = [[np.ones(2), np.ones(2)]] * 2
        convoy.faults = hold = HoldAt(point="start", rank=0)
        futures = convoy.start(plan(_allreduces(convoy, values), convoy.rosters * 2))
        assert hold.came.wait(WAIT_S)
        convoy.executions[0].abort()
        hold.go.set()
        for future in futures.values():
            assert isinstance(future.result(WAIT_S).error, PlanAbortedError)
        np.testing.assert_array_equal(values, np.ones((2, 2, 2)))


def test_a_group_that_is_not_there_is_an_outcome() -> None:
    with _convoy([[0, 1], [1, 2]]) as convoy:
        requests = _allreduces(convoy, [[np.ones(2), np.ones(2)]], 0) + _allreduces(
            convoy, [[np.ones(2), np.ones(2)]], 1
        )
        gone = GroupBrokenError(group_name="group-1", detail="gone")

        class Missing(dict):  # type: ignore[type-arg]
            def __missing__(self, name: str) -> Any:
                raise gone

        convoy.communicators[2] = Missing()
        outcomes = convoy.run(requests, convoy.rosters)
        assert outcomes[2].error is gone
        assert isinstance(outcomes[1].error, (PlanAbortedError, CollectiveTimeoutError))


# ---------------------------------------------------------------------------------------------- fusion and memory


def _heard(convoy: Convoy, one: int) -> list[Any]:
    """What kernels a participant launches, from now on."""
    kernels: list[Any] = []
    for name, communicator in convoy.communicators[one].items():
        convoy.communicators[one][name] = launched(communicator, kernels.append)
    return kernels


@pytest.mark.parametrize("count", [2, 7, 50])
def test_independent_calls_of_one_form_are_one_kernel(count: int) -> None:
    with _convoy([[0, 1]]) as convoy:
        values = [[np.full(5, 1.0 + call), np.full(5, 2.0 * call)] for call in range(count)]
        expected = [sum(of_call) for of_call in values]
        kernels = _heard(convoy, 0)
        outcomes = convoy.run(_allreduces(convoy, values), convoy.rosters * count)
        assert all(outcome.error is None for outcome in outcomes.values())
        assert [kernel.src.size for kernel in kernels] == [5 * count]
        for of_call, right in zip(values, expected, strict=True):
            np.testing.assert_array_equal(of_call, [right] * 2)


def test_hidden_aliases_on_one_participant_end_the_fusion_on_all() -> None:
    with _convoy([[0, 1]]) as convoy:
        shared, mine = np.ones(4), [np.ones(4), np.ones(4)]
        kernels = _heard(convoy, 0)
        values = [[mine[0], shared], [mine[1], shared]]
        outcomes = convoy.run(_allreduces(convoy, values), convoy.rosters * 2)
        assert all(outcome.error is None for outcome in outcomes.values())
        assert len(kernels) == 2
        np.testing.assert_array_equal(mine, [[2] * 4, [3] * 4])
        np.testing.assert_array_equal(shared, [3] * 4)


def test_a_batch_in_a_loop_is_remembered_until_an_operand_is_gone_or_changed() -> None:
    with _convoy([[0, 1]]) as convoy:
        values = [[np.ones(3), np.ones(3)] for _ in range(3)]
        requests = _allreduces(convoy, values)
        kernels = _heard(convoy, 0)
        planned = plan(requests, convoy.rosters * 3)
        for turn in range(3):
            assert all(f.result(WAIT_S).error is None for f in convoy.start(planned).values())
            np.testing.assert_array_equal(values, np.full((3, 2, 3), 2.0 ** (turn + 1)))
        assert len({id(kernel) for kernel in kernels}) == 1, "the same kernel each time"
        values[1][0].shape = (3, 1)
        for future in convoy.start(planned).values():
            assert isinstance(future.result(WAIT_S).error, MismatchError)
        values[1][0].shape = (3,)
        assert all(f.result(WAIT_S).error is None for f in convoy.start(planned).values())
        key: Key = requests[2].operands[0][1]  # type: ignore[assignment]
        convoy.stores[0].free([key])
        for future in convoy.start(planned).values():
            assert isinstance(future.result(WAIT_S).error, TensorFreedError)


def test_the_first_operand_does_not_keep_the_memory_of_the_others() -> None:
    import gc
    import weakref

    with _convoy([[0, 1]]) as convoy:
        values = [[np.ones(3), np.ones(3)] for _ in range(3)]
        requests = _allreduces(convoy, values)
        assert all(one.error is None for one in convoy.run(requests, convoy.rosters * 3).values())
        convoy.executions = {}
        alive = weakref.ref(values[2][0])
        convoy.stores[0].free([requests[2].operands[0][1]])  # type: ignore[list-item]
        values.clear()
        gc.collect()
        assert alive() is None


def test_other_programs_that_take_the_place_of_a_remembered_one_do_no_harm() -> None:
    """Each operand remembers but a few programs, and forgets all of them at once."""
    with _convoy([[0, 1]]) as convoy:
        shared = [convoy.keep(one, np.zeros(2)) for one in range(2)]
        spec, expected = convoy.rosters[0].spec, 0.0
        batches = []
        for _ in range(12):
            mine = [[np.ones(2), np.ones(2)]]
            (first,) = _allreduces(convoy, mine)
            operands = tuple((rank, shared[rank], None) for rank in range(2))
            second = Request(
                kind=OpKind.ALLREDUCE, group=spec, operands=operands, op=ReduceOp.SUM, timeout_s=20.0 + len(batches)
            )
            batches.append((plan([first, second], convoy.rosters * 2), mine))
        for turn in range(3):
            for planned, mine in batches:
                assert all(f.result(WAIT_S).error is None for f in convoy.start(planned).values())
                np.testing.assert_array_equal(mine, np.full((1, 2, 2), 2.0 ** (turn + 1)))
        for one, key in enumerate(shared):
            np.testing.assert_array_equal(convoy.stores[one].look(key).value, [expected] * 2)  # type: ignore[union-attr]


def test_a_tensor_whose_storage_was_given_back_is_refused_though_the_batch_ran_before() -> None:
    torch = pytest.importorskip("torch")
    with _convoy([[0, 1]]) as convoy:
        values = [[torch.ones(3), torch.ones(3)] for _ in range(2)]
        requests = _allreduces(convoy, values)
        assert all(one.error is None for one in convoy.run(requests, convoy.rosters * 2).values())
        values[1][0].untyped_storage().resize_(0)
        for outcome in convoy.run(requests, convoy.rosters * 2).values():
            assert isinstance(outcome.error, NotATensorError)
            assert {(violation.call, violation.rank) for violation in outcome.error.violations} == {(1, 0)}


def test_staging_that_a_failure_left_behind_is_not_used_again() -> None:
    with _convoy([[0, 1]]) as convoy:
        sizes: list[int] = []

        def allocate(info: Any) -> Any:
            sizes.append(info.nbytes)
            return arrays.empty(info)

        convoy.allocate = allocate
        values = [[np.ones(3), np.ones(3)] for _ in range(4)]
        requests = _allreduces(convoy, values)
        for _ in range(3):
            assert all(one.error is None for one in convoy.run(requests, convoy.rosters * 4).values())
            assert len(sizes) == 2, "one each, and remembered"
        convoy.faults = FailAt(point="before_door", rank=0)
        assert isinstance(convoy.run(requests, convoy.rosters * 4)[0].error, KernelError)
        convoy.faults = FailAt(point="start", rank=9)
        assert all(one.error is None for one in convoy.run(requests, convoy.rosters * 4).values())
        assert len(sizes) == 2, "no kernel has worked in it"
        convoy.faults = FailAt(point="after_kernel", rank=0)
        assert isinstance(convoy.run(requests, convoy.rosters * 4)[0].error, KernelError)
        convoy.faults = FailAt(point="start", rank=9)
        fresh = [[np.ones(3), np.ones(3)] for _ in range(4)]
        assert all(one.error is None for one in convoy.run(_allreduces(convoy, fresh), convoy.rosters * 4).values())
        assert len(sizes) > 2


def test_an_abort_ends_the_wait_for_a_method() -> None:
    with _convoy([[0, 1]]) as convoy:
        requests = _allreduces(convoy, [[np.ones(2), np.ones(2)]] * 2)
        absent = task_key(bytes(23) + b"x", 1)
        operands = ((0, absent, None), requests[1].operands[1])
        requests[1] = replace(requests[1], operands=operands)
        waits = threading.Event()
        planned = plan(requests, convoy.rosters * 2)
        convoy.waiting = lambda key: waits.set()
        futures = convoy.start(planned)
        assert waits.wait(WAIT_S)
        convoy.executions[0].abort()
        for future in futures.values():
            assert isinstance(future.result(WAIT_S).error, PlanAbortedError)


def test_who_ended_is_told_by_places_only_where_all_ran_in_the_doors_launch() -> None:
    with _convoy([[0, 1], [1, 2]]) as convoy:
        for communicators in convoy.communicators:
            for name, inner in list(communicators.items()):
                communicators[name] = _Ending(inner)  # type: ignore[assignment]
        one = convoy.run(_allreduces(convoy, [[np.ones(1), np.ones(1)]] * 2, 1), [convoy.rosters[1]] * 2)
        assert {at: outcome.ended for at, outcome in one.items()} == {1: (0, 1), 2: (0, 1)}
        both = _allreduces(convoy, [[np.ones(1), np.ones(1)]], 0) + _allreduces(convoy, [[np.ones(1), np.ones(1)]], 1)
        for outcome in convoy.run(both, convoy.rosters).values():
            assert outcome.ended == ()


class _Ending:
    """A communicator that knows of all ranks that they have ended."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def end(self, launch: Any, ok: bool) -> tuple[int, ...]:
        self._inner.end(launch, ok)
        return launch.ranks if ok else ()


# ---------------------------------------------------------------------------------------------- arrivals


@CALM
@given(
    arrivals=st.dictionaries(st.integers(0, 300), st.sampled_from([b"", b"a", b"b" * 5000, bytes(70)])),
    conflict=st.booleans(),
)
def test_arrivals_of_a_batch_are_read_as_they_were_written(arrivals: dict[int, bytes], conflict: bool) -> None:
    assert decode_arrivals(encode_arrivals(arrivals, conflict=conflict)) == (conflict, arrivals)


def test_two_hundred_equal_arrivals_are_small() -> None:
    assert len(encode_arrivals(dict.fromkeys(range(200), bytes(100)), conflict=False)) < 1000


@pytest.mark.parametrize("data", [b"", b"\x90", b"\xc1abc", encode_arrivals({1: b"x"}, conflict=True)[:-1]])
def test_what_are_no_arrivals_is_a_protocol_error(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_arrivals(data)
