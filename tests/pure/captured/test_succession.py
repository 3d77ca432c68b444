"""Recorded steps whose groups have other members than when they were recorded."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from raycollect.captured import step as step_module
from raycollect.captured.calls import StepRequests
from raycollect.captured.step import Capture
from raycollect.captured.succession import Succession
from raycollect.core import ray_internals
from raycollect.core.model import OpKind, ReduceOp
from raycollect.driver.dispatch import RequestKey
from raycollect.driver.requests import Ref
from raycollect.engine.step_program import captured_key
from raycollect.planner import Reshard
from tests.pure.driver.test_plan_tracker_batches import group
from tests.pure.driver.tracked_plans import key_of

BEFORE, AFTER = bytes(16), bytes([1] * 16)
OLD = group("g", (5, 6, 7))


def actor(number: int) -> Any:
    return SimpleNamespace(_actor_id=SimpleNamespace(hex=lambda: f"{number:032x}"))


def recorded(kind: OpKind, ranks: tuple[int, ...], *, root: int = -1, refs: bool = False, **more: Any) -> StepRequests:
    """A method call on each of these ranks' actors, and a collective of what they give; or of refs."""
    made = StepRequests(BEFORE)
    operands = []
    for at, rank in enumerate(ranks):
        number = (5, 6, 7)[rank]
        given: Any = key_of(at) if refs else made.call(actor(number), f"{number:032x}", "give", (), ())
        made.refs[given] = given
        operands.append((rank, at, None))
    peer = ranks[-1] if kind is OpKind.SEND else -1
    op = ReduceOp.SUM if kind is OpKind.ALLREDUCE else None
    asked = RequestKey(OLD, kind, tuple(operands), op, root, peer, True, 60.0, **more)
    made.promise(f"{5:032x}")
    made.add(asked, None)
    made.end_plan()
    made.seal()
    return made


def whole() -> StepRequests:
    return recorded(OpKind.ALLREDUCE, (0, 1, 2))


def succession(numbers: tuple[int, ...], **heirs: int) -> Succession:
    found = {f"{int(old[1:]):032x}": f"{new:032x}" for old, new in heirs.items()}
    return Succession(now={OLD: group("g", numbers)}, heirs=found)


@pytest.mark.parametrize(
    ("step", "change", "lost"),
    [
        (whole(), succession((5, 6, 7)), []),
        (whole(), succession((5, 8, 7), _6=8), []),
        (whole(), succession((5, 7, 8)), ["rank 1", "operand of rank 2", "Worker(6), which"]),
        (whole(), succession((5, 6)), ["rank 2 of group 'g', Worker(7)", "give"]),
        (whole(), succession((5, 6, 7, 8)), ["an operand of rank 3 of group 'g', Worker(8)"]),
        (recorded(OpKind.ALLREDUCE, (0, 1, 2), refs=True), succession((5, 8, 7), _6=8), [f"ref {key_of(1).hex()}"]),
        (recorded(OpKind.SEND, (0, 2), root=0), succession((9, 7, 5)), []),
        (recorded(OpKind.SEND, (0, 2), root=0), succession((5, 6)), ["rank 2", "Worker(7)"]),
        (recorded(OpKind.BARRIER, ()), succession((8, 9)), []),
    ],
)  # fmt: skip
def test_what_a_step_loses(step: StepRequests, change: Succession, lost: list[str]) -> None:
    found = change.lost(step)
    assert len(found) == len(lost), found
    for line, text in zip(found, lost, strict=True):
        assert text in line


def test_an_argument_that_is_a_ref_of_the_dead_actor_is_lost() -> None:
    made = StepRequests(BEFORE)
    ref = Ref(key_of(1), None, f"{6:032x}", "argument 0")
    made.call(actor(6), f"{6:032x}", "take", (ref,), ())
    assert succession((5, 8, 7), _6=8).lost(made) == ("call 0 (take): argument 0, a ref of an actor that died",)


def test_a_replaced_actor_is_exchanged_and_ranks_that_moved_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_internals, "actor_handle", lambda actor_id: actor(int(actor_id, 16)))
    step = recorded(OpKind.SEND, (0, 2), root=0)
    change = succession((9, 8, 5), _7=8)
    assert change.lost(step) == ()
    change.apply(step, AFTER)
    (asked,) = step.asked
    assert (asked.root, asked.peer, asked.operands) == (2, 1, ((1, 1, None), (2, 0, None)))
    assert asked.group.participants == (f"{9:032x}", f"{8:032x}", f"{5:032x}")
    assert [call.actor._actor_id.hex() for call in step.calls] == [call.made.actor_id for call in step.calls]
    assert [call.made.actor_id for call in step.calls] == [f"{5:032x}", f"{8:032x}"]
    assert [call.made.key for call in step.calls] == [captured_key(AFTER, at) for at in range(2)]
    assert asked.group is change.now[OLD]
    again = Succession(now={change.now[OLD]: group("g", (8, 5))}, heirs={})
    again.apply(step, BEFORE)
    assert (step.asked[0].root, step.asked[0].peer) == (1, 0)


def test_reshards_and_barriers_are_of_the_ranks_of_now() -> None:
    step = recorded(OpKind.ALLTOALL, (1, 2), reshard=Reshard((), (), (1,), (2, 1)))
    succession((7, 5, 6)).apply(step, AFTER)
    moved = step.asked[0].reshard
    assert moved is not None
    assert (moved.src_ranks, moved.dst_ranks, step.asked[0].operands) == ((2,), (0, 2), ((0, 1, None), (2, 0, None)))
    step = recorded(OpKind.BARRIER, ())
    succession((7, 5, 6, 8)).apply(step, AFTER)
    assert [rank for rank, _, _ in step.asked[0].operands] == [0, 1, 2, 3]


def test_a_step_that_is_closed_while_another_thread_plans_it_anew_stays_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = (SimpleNamespace(runs=Mock(failure=None, is_closed=True), names=()) for _ in range(2))
    step = Capture()
    step._block, step._state, step._installed, step._runs = Mock(), "", before, before.runs  # type: ignore[assignment]
    closing = threading.Thread(target=step.close)

    def install(self: Capture, *rest: object) -> None:
        closing.start()
        closing.join(0.2)  # it has to wait
        self._installed, self._runs = after, after.runs  # type: ignore[assignment]

    monkeypatch.setattr(step_module, "follow", lambda block, controller: b"another id")
    monkeypatch.setattr(Capture, "_install", install)
    step._follow(before)  # type: ignore[arg-type]
    closing.join(20)
    assert after.runs.close.called
    assert step._stages == ()
