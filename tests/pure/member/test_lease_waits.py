"""What a lease waits for: an abort ends each wait for a method, and the channel's thread waits for nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from raycollect import backends
from raycollect.channel.messages import Abort, Done, Gone, Joined, Leave, Order
from raycollect.engine.execution import Outcome
from raycollect.engine.instruments import Instruments
from raycollect.errors import PlanAbortedError, from_wire
from raycollect.group.coordinator import ALL
from raycollect.member import lease
from raycollect.member.lease import Lease
from raycollect.observe import Recorder
from raycollect.planner import Ticket
from raycollect.pos import Store
from tests.pure.member.leases import WAIT_S, Heard, join, plan, premises
from tests.support.waiting import wait_until

__all__ = ["premises"]  # a fixture


@pytest.fixture
def leased(premises: Any) -> tuple[Lease, Heard]:
    premises.instruments = Instruments(store=Store(), recorder=Recorder(time.monotonic), clock=time.monotonic)
    heard = Heard()
    return Lease("me", "a test", cast(Any, heard), premises), heard


# ---------------------------------------------------------------------------------------------- behind a method


def _order(seq: int) -> Order:
    return Order(payload=plan(Ticket(seq, seq - 1)), in_order=True, after=b"", rings=False)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the plans that ran."""
    found: list[int] = []

    class Run:
        def __init__(self, program: Any, *_: Any, seq: int, **__: Any) -> None:
            self.program, self.seq = program, seq

        def run(self) -> Outcome:
            found.append(self.seq)
            return Outcome()

    monkeypatch.setattr(lease, "Execution", Run)
    return found


def test_plans_behind_the_method_of_another_process_are_aborted_while_it_runs(
    premises: Any, leased: tuple[Lease, Heard], ran: list[int]
) -> None:
    """Nothing says when the method ends. The next plan takes its turn, and runs after the method."""
    here, heard = leased
    with premises.method_lock:
        for seq in (1, 2, 3):
            here.received(_order(seq))
        for seq in (1, 2):
            here.received(Abort(seq=seq, reason="it took too long"))
            done = heard.next(Done)
            assert done.seq == seq
            assert isinstance(error := from_wire(done.error), PlanAbortedError)
            assert error.detail == "it took too long"
        assert ran == []
    assert heard.next(Done) == Done(seq=3, ranks=[], error=None, story=[])
    assert ran == [3]
    assert not premises.method_lock.locked()
    here.end("the test is over")


def test_the_end_of_a_lease_ends_the_plan_that_waits_for_a_method(
    premises: Any, leased: tuple[Lease, Heard], ran: list[int]
) -> None:
    here, heard = leased
    before = set(threading.enumerate())
    with premises.method_lock:
        here.received(_order(1))
        (thread,) = set(threading.enumerate()) - before
        assert wait_until(lambda: here._sequencer.running() == (1,))
        here.end("the controller is gone")
        done = heard.next(Done)
        assert isinstance(from_wire(done.error), PlanAbortedError)
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert ran == []


# ---------------------------------------------------------------------------------------------- backends that wait


def _end(here: Lease) -> None:
    here.end("the controller is gone")


def _leave(here: Lease) -> None:
    here.received(Leave(group_id="id of g"))


def _dies(here: Lease) -> None:
    here.received(Gone(group_id="id of g", rank=1, died=True, detail="its connection has ended"))


@pytest.mark.parametrize("communicator", ["of plans", "of calls"])
@pytest.mark.parametrize("ends", [_end, _leave, _dies])
def test_a_backend_that_takes_its_time_to_close_does_not_hold_up_the_channel(
    monkeypatch: pytest.MonkeyPatch, leased: tuple[Lease, Heard], ends: Callable[[Lease], None], communicator: str
) -> None:
    closing, may_close, closed = threading.Event(), threading.Event(), threading.Event()

    def close() -> None:
        closing.set()
        assert may_close.wait(WAIT_S)
        closed.set()

    slow = SimpleNamespace(close=close, rank=0, world_size=2, lost=lambda rank: None, abort=lambda seq: None)
    quick = SimpleNamespace(close=lambda: None, lost=lambda rank: None, abort=lambda seq: None)
    made = slow if communicator == "of plans" else quick
    monkeypatch.setattr(backends, "load", lambda *_: lambda *_, **__: made)
    here, heard = leased
    here.received(join())
    assert heard.next(Joined).error is None
    if made is quick:
        here._groups.by_id["id of g"].communicator(ALL)._communicator = cast(Any, slow)
    ends(here)
    assert closing.wait(WAIT_S)
    assert not closed.is_set()
    may_close.set()
    assert closed.wait(WAIT_S)
    here.end("the test is over")
