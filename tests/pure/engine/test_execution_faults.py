"""The executor when things go wrong after the consistency check, and the story it tells."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from raycollect.backends import arrays
from raycollect.core.model import Kernel, Key, Launch, OpKind
from raycollect.engine.agreement import Arrival, Spec, encode_arrival, encode_single
from raycollect.engine.instruments import POINTS
from raycollect.errors import (
    FaultError,
    InternalError,
    KernelError,
    PlanAbortedError,
    StoreFullError,
    TensorDirtyError,
)
from raycollect.observe import Recorder
from raycollect.observe.recorder import Event
from raycollect.planner import Request, plan
from raycollect.pos import Container
from tests.pure.fleet import WAIT_S, FailAt, Fleet, MakeFleet, Ticks, numbers
from tests.pure.local_world import LocalCommunicator, LocalWorld

IN_EVERY_PLAN = tuple(point for point in POINTS if not point.endswith("_commit"))
"""The points that plans come to which do not commit; of those that do, see `test_commit`."""

# ---------------------------------------------------------------------------------------------- faults


def _fail_in_kernel(one: Fleet, values: list[Any], keys: list[Key], point: str = "before_kernel") -> None:
    one.faults = fault = FailAt(point=point, rank=1)
    outcomes = one.run(OpKind.ALLREDUCE, keys)
    assert fault.consumed == 1
    assert isinstance(outcomes[1].error, KernelError)
    one.faults = None


def test_a_broadcast_that_overwrites_a_dirty_tensor_whole_cleans_it(fleet: MakeFleet) -> None:
    one = fleet(3)
    values = numbers(0, 3)
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


def test_a_write_of_every_other_element_does_not_clean_the_rest(fleet: MakeFleet) -> None:
    one = fleet(2)
    values = numbers(0, 2)
    keys = one.keep_all(values)
    _fail_in_kernel(one, values, keys)
    one.must(OpKind.SEND, {0: one.keep(0, np.zeros(3)), 1: one.keep(1, values[1][::2])}, root=0, peer=1)
    assert one.stores[1].is_dirty([arrays.byte_range(values[1][1::2])]), "elements 1 and 3 are still half-written"


def test_an_operand_that_is_only_read_is_not_dirty_after_a_failure(fleet: MakeFleet) -> None:
    one = fleet(2)
    values = numbers(0, 2)
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


class Counted:
    """A communicator of one rank that writes down how it is used."""

    rank, world_size = 0, 1

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._inner = LocalCommunicator(LocalWorld(1), 0)

    def agree(self, launch: Launch, *others: Any) -> Sequence[bytes]:
        self.calls.append("agree")
        return self._inner.agree(launch, *others)

    def launch(self, launch: Launch, kernels: Sequence[Kernel]) -> None:
        self.calls.append("launch")
        self._inner.launch(launch, kernels)

    def end(self, launch: Launch, ok: bool, owed: Sequence[Kernel] = ()) -> tuple[int, ...]:
        self.calls.append(f"end {ok}")
        return self._inner.end(launch, ok, owed)

    def abort(self, seq: int) -> None:
        raise AssertionError("not the executor's business")

    def close(self) -> None:
        raise AssertionError("not the executor's business")


@pytest.mark.parametrize("error", [KernelError(detail="ours"), MemoryError("none"), ZeroDivisionError("foreign")])
@pytest.mark.parametrize("point", [None, *IN_EVERY_PLAN])
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


@pytest.mark.parametrize(
    ("error", "rank"),
    [
        (KernelError(detail="ours"), 1),
        (KernelError(detail="theirs", rank=0), 0),
        (PlanAbortedError(detail="theirs"), -1),
    ],
)
def test_only_a_kernel_that_failed_here_names_this_rank(error: FaultError, rank: int, fleet: MakeFleet) -> None:
    one = fleet(2)
    one.faults = FailAt(point="before_kernel", rank=1, error=lambda: error)
    found = one.run(OpKind.ALLREDUCE, one.keep_all(numbers(0, 2)))[1].error
    assert isinstance(found, type(error))
    assert (found.op, found.group_name, found.rank) == ("allreduce", one.spec.group_id, rank)


def test_a_peer_that_says_nothing_about_its_tensor_is_our_bug(fleet: MakeFleet) -> None:
    """The destination learns from an arrival without tensors and without violations: no rank should send one."""
    one = fleet(2)
    silent = encode_single(encode_arrival(Arrival(spec=Spec(op="send", root=0))))
    launch = Launch(seq=1, ranks=(0, 1), timeout_s=WAIT_S)
    with ThreadPoolExecutor(1) as threads:
        peer = threads.submit(one.communicators[0].agree, launch, silent)
        operands = ((0, one.new_key(), None), (1, None, None))
        planned = plan([Request(kind=OpKind.SEND, group=one.spec, operands=operands, root=0, peer=1)])
        outcome = one.run_one(planned, 1, 1)
        peer.result(WAIT_S)
    assert isinstance(outcome.error, InternalError)


# ---------------------------------------------------------------------------------------------- what is garbled


class Garbling(LocalCommunicator):
    """Flips bits of one byte of what it brings to the check."""

    at, mask, length = 0, 0xFF, 0

    def agree(self, launch: Launch, arrival: bytes, *others: Any) -> Sequence[bytes]:
        garbled = bytearray(arrival)
        self.length = len(garbled)
        garbled[self.at % self.length] ^= self.mask
        return super().agree(launch, bytes(garbled), *others)


@pytest.mark.parametrize("mask", [0x01, 0x10, 0xFF])
def test_an_arrival_with_any_byte_garbled_is_refused_by_all_or_means_the_same(mask: int, fleet: MakeFleet) -> None:
    """Nobody runs a kernel of which another has another idea, and all hear the same."""
    one = fleet(2)
    garbling = Garbling(one.communicators[0]._world, 1)  # type: ignore[attr-defined]
    one.communicators[1] = garbling
    garbling.mask, at = mask, 0
    refused = 0
    while at == 0 or at < garbling.length:
        values = [np.full(3, rank + 1.0) for rank in range(2)]
        garbling.at = at
        outcomes = one.run(OpKind.ALLREDUCE, one.keep_all(values))
        kinds = {type(outcome.error) for outcome in outcomes}
        assert len(kinds) == 1, f"byte {at}: {kinds}"
        refused += outcomes[0].error is not None
        expected = [1.0, 2.0] if outcomes[0].error is not None else [3.0, 3.0]
        for value, number in zip(values, expected, strict=True):
            np.testing.assert_array_equal(value, number)
        assert one.dirty == [0, 0]
        at += 1
    assert refused > garbling.length / 2


# ---------------------------------------------------------------------------------------------- the story


def test_a_recorder_keeps_the_last_events_only() -> None:
    recorder = Recorder(Ticks(), limit=5)
    for number in range(1, 1001):
        recorder.add("event", number, "x")
    assert recorder.story() == tuple(Event(float(n), "event", n, "x") for n in range(996, 1001))
    assert recorder.tail()[-2:] == ["999.000000 plan 999 event x", "1000.000000 plan 1000 event x"]
    assert len(recorder.tail()) == 5


def test_an_event_of_no_plan_shows_no_plan() -> None:
    recorder = Recorder(Ticks())
    recorder.add("joined")
    assert recorder.tail() == ["1.000000 joined"]


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
        one.faults = None if point is None else FailAt(point=point, rank=rank)
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


def test_outputs_are_kept_before_others_can_report_that_their_rank_has_ended(
    fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank that ends last reports for all: whoever hears of it may ask for the outputs."""
    one, seen = fleet(2), list[str]()
    receiver = one.communicators[1]
    end = receiver.end
    monkeypatch.setattr(receiver, "end", lambda *args: seen.append("ended") or end(*args))
    one.takes[1] = lambda outputs: seen.append(f"kept {len(outputs)}")
    one.must(OpKind.SEND, {0: one.keep(0, np.ones(3))}, {1: None}, root=0, peer=1)
    assert seen == ["kept 1", "ended"]


def test_outputs_that_cannot_be_kept_fail_the_program(fleet: MakeFleet) -> None:
    one = fleet(2)

    def full(outputs: Sequence[Container]) -> None:
        raise StoreFullError(limit=1)

    one.takes[1] = full
    _, outcome = one.run(OpKind.SEND, {0: one.keep(0, np.ones(3))}, {1: None}, root=0, peer=1)
    assert isinstance(outcome.error, StoreFullError)
    assert not outcome.outputs
    one.works_on()
