"""What a participant makes of a program that came."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest

from raycollect import runtime
from raycollect.channel.protocol import MAX_FRAME_NBYTES
from raycollect.errors import MismatchError, Violation, refusal, to_wire
from raycollect.executor import Outcome
from raycollect.ledger import Ledger
from raycollect.planner import Ticket, encode_order, encode_program
from raycollect.runtime import Runtime
from raycollect.watch import Watch
from tests.pure.test_flight_batches import asked, flying, group, key


class Run:
    """An `Execution` that runs nothing."""

    made: Sequence[dict[str, Any]] = ()

    def __init__(self, program: Any, *args: Any, **given: Any) -> None:
        Run.made = [*Run.made, given]

    def run(self) -> Outcome:
        return Outcome()


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> Callable[[Sequence[bool]], Any]:
    """Runs a program of a member of several groups, each of which says whether its methods come in order.

    Gives what the program does where an operand is not there: None, or how it tells that it waits.
    """
    monkeypatch.setattr(runtime, "Execution", Run)

    def run(ordered: Sequence[bool]) -> Any:
        groups = [group(f"group {at}", (5, 6 + at)) for at in range(len(ordered))]
        flight = flying(*((one, asked(one, (2 * at, 2 * at + 1))) for at, one in enumerate(groups)))
        program = flight.plan.program(flight.plan.positions[f"{5:032x}"])
        assert len({share.group_id for share in program.shares}) == len(ordered)
        ledger, here = Ledger(), Runtime.__new__(Runtime)
        here._groups = {
            one.spec.group_id: SimpleNamespace(ledger=ledger, ordered=says)  # type: ignore[misc]
            for one, says in zip(groups, ordered, strict=True)
        }
        here._begun, here._running, here._lease, here._watch = 0, {}, None, Watch()
        here.instruments = SimpleNamespace()  # type: ignore[assignment]
        keys = [key(at) for at in range(program.keys)]
        Run.made = ()
        assert here.run_program(encode_order(Ticket(1, 0), keys, encode_program(program)), None) is None
        (given,) = Run.made
        return given["waiting"]

    return run


@pytest.mark.parametrize("ordered", [one for n in (1, 2, 3, 5) for one in itertools.product((True, False), repeat=n)])
def test_methods_come_in_order_where_all_groups_of_a_program_say_so(
    waiting: Callable[[Sequence[bool]], Any], ordered: tuple[bool, ...]
) -> None:
    assert (waiting(ordered) is None) == all(ordered)


@pytest.mark.parametrize("count", [1, runtime.MOST_VIOLATIONS, runtime.MOST_VIOLATIONS + 1, 20_000])
def test_a_refusal_is_told_with_as_many_reasons_as_a_message_holds(count: int) -> None:
    reasons = tuple(
        Violation(kind="mismatch", rank=1, field="shape", found="x" * 400, expected="y" * 400, call=at)
        for at in range(count)
    )
    told = runtime._shortened(refusal("batch", "", reasons))
    assert isinstance(told, MismatchError)
    assert told.violations == reasons[: runtime.MOST_VIOLATIONS]
    assert len(msgpack.packb(to_wire(told))) < MAX_FRAME_NBYTES
