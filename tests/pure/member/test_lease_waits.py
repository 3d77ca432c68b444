"""What a lease waits for: an abort ends each wait for a method, and the channel's thread waits for nothing."""

from __future__ import annotations

from typing import Any

import pytest

from raycollect.channel.messages import Abort, Done, Order
from raycollect.engine.run import Outcome
from raycollect.errors import PlanAbortedError, from_wire
from raycollect.member import lease
from raycollect.member.participant import Participant
from raycollect.planner import Ticket
from tests.pure.member.leases import leased, plan, premises

__all__ = ["premises"]  # a fixture


# ---------------------------------------------------------------------------------------------- behind a method


def _order(seq: int) -> Order:
    return Order(payload=plan(Ticket(seq, seq - 1)), in_order=True, after=b"", rings=False)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the plans that ran."""
    found: list[int] = []

    class Run:
        def __init__(self, program: Any, seq: int, *_: Any, **__: Any) -> None:
            self.program, self.seq = program, seq

        def run(self) -> Outcome:
            found.append(self.seq)
            return Outcome()

    monkeypatch.setattr(lease, "Run", Run)
    return found


def test_plans_behind_the_method_of_another_process_are_aborted_while_it_runs(
    premises: Participant, ran: list[int]
) -> None:
    """Nothing says when the method ends. The next plan takes its turn, and runs after the method."""
    here, heard = leased(premises)
    with premises.methods.lock:
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
    assert not premises.methods.lock.locked()
    here.end("the test is over")
