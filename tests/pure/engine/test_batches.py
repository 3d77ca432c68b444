"""Batches on participants in threads, over one or several groups: against numpy in program order.

Hypothesis draws groups that overlap, calls that depend on each other or not, keys that share memory though nobody can
see it, and operands that earlier calls of the batch make.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from raycollect.backends import arrays
from raycollect.core.model import OpKind, ReduceOp
from raycollect.errors import (
    AllocationError,
    InvalidArgumentError,
    MismatchError,
    ReadOnlyError,
)
from raycollect.planner import Made, Request, plan
from tests.pure.engine.convoys import allreduces, convoy_of
from tests.pure.fleet import WAIT_S, Convoy
from tests.support.values import replace

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
                group=convoy.memberships[call.group].spec,
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


@settings(max_examples=150)
@given(batch=_batches(), staging=st.sampled_from([0, 64, 32 << 20]))
def test_a_batch_does_what_its_calls_do_one_after_the_other(batch: Any, staging: int) -> None:
    groups, memories, calls = batch
    copies = [_copy(memory) for memory in memories]
    meant = _meant(groups, copies, calls)
    with convoy_of(groups) as convoy:
        requests = _requests(convoy, groups, memories, calls)
        planned = plan(requests, [convoy.memberships[call.group] for call in calls], staging=staging)
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


def test_all_that_is_wrong_in_all_calls_is_in_one_error() -> None:
    with convoy_of([[0, 1]]) as convoy:
        requests = allreduces(convoy, [[np.ones(2), np.ones(3)], [np.ones(2), np.ones(2)], [np.ones(1), np.ones(4)]])
        outcomes = convoy.run(requests, convoy.memberships * 3)
        errors = [outcome.error for outcome in outcomes.values()]
    assert str(errors[0]) == str(errors[1])
    assert isinstance(errors[0], MismatchError)
    assert [violation.call for violation in errors[0].violations] == [0, 2]


def test_a_read_only_operand_and_a_staging_that_holds_no_element_are_refused() -> None:
    with convoy_of([[0, 1]]) as convoy:
        values = [[np.ones(2), np.ones(2)] for _ in range(2)]
        values[1][0].flags.writeable = False
        outcomes = convoy.run(allreduces(convoy, values), convoy.memberships * 2)
        assert {type(outcome.error) for outcome in outcomes.values()} == {ReadOnlyError}
        values = [[np.ones(2), np.ones(2)], [np.ones(2, "int16"), np.ones(2, "int16")]]
        outcomes = convoy.run(allreduces(convoy, values), convoy.memberships * 2, staging=4)
        for outcome in outcomes.values():
            assert isinstance(outcome.error, InvalidArgumentError)
            found = [(violation.call, violation.rank, violation.field) for violation in outcome.error.violations]
            assert found == [(0, 0, "staging_nbytes"), (0, 1, "staging_nbytes")]
        outcomes = convoy.run(allreduces(convoy, values), convoy.memberships * 2, staging=8)
        assert all(outcome.error is None for outcome in outcomes.values())


def test_what_a_send_has_made_can_be_sent_on() -> None:
    """Only the end of one round tells what the next send gives."""
    with convoy_of([[0, 1]]) as convoy:
        spec, value = convoy.memberships[0].spec, np.arange(3.0)
        there = Request(
            kind=OpKind.SEND,
            group=spec,
            operands=((0, convoy.keep(0, value), None), (1, None, None)),
            root=0,
            peer=1,
            timeout_s=WAIT_S,
        )
        back = replace(there, operands=((0, None, None), (1, Made(0), None)), root=1, peer=0)
        again = replace(there, operands=((0, Made(1), None), (1, None, None)))
        outcomes = convoy.run([there, back, again], convoy.memberships * 3)
        assert [outcomes[one].error for one in (0, 1)] == [None] * 2
        for output in (*outcomes[0].outputs, *outcomes[1].outputs):
            np.testing.assert_array_equal(output.value, value)
        assert [len(outcomes[one].outputs) for one in (0, 1)] == [1, 2]


def test_staging_that_can_not_be_had_between_two_rounds_is_told_in_the_last_one() -> None:
    """The sum is brought in the first round, what a send makes in the second."""
    failing = threading.Lock()

    def allocate(info: Any) -> Any:
        if info.dtype == "uint8" and failing.acquire(blocking=False):
            raise MemoryError("not a byte")
        return arrays.empty(info)

    with convoy_of([[0, 1]]) as convoy:
        convoy.allocate = allocate
        values = [[np.ones(2), np.ones(2)] for _ in range(3)]
        requests = allreduces(convoy, values)
        sent = Request(
            kind=OpKind.SEND,
            group=convoy.memberships[0].spec,
            operands=((0, convoy.keep(0, np.ones(3)), None), (1, None, None)),
            root=0,
            peer=1,
            timeout_s=WAIT_S,
        )
        requests.append(sent)
        outcomes = convoy.run(requests, convoy.memberships * 4)
        assert {type(outcome.error) for outcome in outcomes.values()} == {AllocationError}
        np.testing.assert_array_equal(values, np.ones((3, 2, 2)))
        outcomes = convoy.run(requests, convoy.memberships * 4)
        assert all(outcome.error is None for outcome in outcomes.values())
        np.testing.assert_array_equal(values, np.full((3, 2, 2), 2.0))
