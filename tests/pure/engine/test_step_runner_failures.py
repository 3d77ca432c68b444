"""Runs of captured steps that fail on one participant, and their agreements."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest

from raycollect.core.model import OpKind
from raycollect.engine.step_actions import DETAIL_LENGTH
from raycollect.engine.step_program import Collective
from raycollect.errors import (
    CaptureError,
    MethodError,
    PlanAbortedError,
    ProtocolError,
)
from raycollect.planner import decode_program, encode_program
from raycollect.planner.program import Domain
from tests.pure.engine.step_programs import MakeTeam, every, team
from tests.pure.fleet import Star
from tests.pure.local_world import LocalWorld
from tests.pure.teams import WAIT_S, Script, full, given, pinned
from tests.support.values import replace

__all__ = ["team"]  # fixtures


class _OddError(ValueError):
    def __str__(self) -> str:
        raise KeyError("no message")


def _name(value: object) -> str:
    return type(value).__name__


def _raise(exc: BaseException) -> Any:
    raise exc


@pytest.mark.parametrize("exc", [ValueError("bad " * 1000), SystemExit(3), _OddError(), KeyboardInterrupt()], ids=_name)
def test_what_a_method_raises_ends_the_run(team: MakeTeam, exc: BaseException) -> None:
    script = Script(0)
    script.call("fine")
    script.call("broken", given(1))
    script.call("never")
    one = team(1, [script])
    one.actors[0].methods = {"fine": int, "broken": lambda _: _raise(exc), "never": int}
    (error,) = one.fail()
    assert isinstance(error, MethodError)
    assert (error.op, error.call, error.raised) == ("broken", 1, type(exc).__name__)
    assert len(error.detail) <= DETAIL_LENGTH
    assert "in _raise" in error.trace
    assert "raycollect/engine/step_runner.py" not in error.trace
    assert [name for name, _, _ in one.actors[0].calls] == ["fine", "broken"]
    assert error.__context__ is None
    assert error.__cause__ is None


def test_the_frames_of_a_method_that_raised_are_gone(team: MakeTeam) -> None:
    kept: list[Any] = []

    def broken() -> None:
        large = full(1)
        kept.append(weakref.ref(large))
        raise ValueError("bad")

    script = Script(0)
    script.call("broken")
    one = team(1, [script])
    one.actors[0].methods = {"broken": broken}
    (error,) = one.fail()
    assert isinstance(error, MethodError)
    gc.collect()
    assert kept[0]() is None


def test_a_result_that_cannot_be_given_back_is_the_fault_of_its_method(team: MakeTeam) -> None:
    script = Script(0, [object()])
    script.returns += [script.call("fine"), script.call("odd")]
    one = team(1, [script])
    one.actors[0].methods = {"fine": int, "odd": object}
    (error,) = one.fail()
    assert isinstance(error, MethodError)
    assert (error.op, error.call) == ("odd", 1)
    assert not error.raised
    assert "call 1 of the step, odd" in str(error)
    assert "returned a value of type object" in str(error)
    assert "ordinary method" in str(error)
    script.returns[:] = [0]
    one.capture()
    (error,) = one.fail()
    assert isinstance(error, CaptureError)


def test_a_step_that_was_stopped_begins_no_action_any_more(team: MakeTeam) -> None:
    one = team(1)
    one.scripts[0].call("after")
    one.actors[0].methods = {"after": int}
    one.capture()[0].stop()
    _, futures = one.start()
    assert isinstance(futures[0].exception(WAIT_S), PlanAbortedError)
    assert not one.actors[0].calls


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_check_that_the_controller_keeps_is_asked_for_by_its_launch(team: MakeTeam, world: int) -> None:
    tensors = [full(rank + 1) for rank in range(world)]
    one = team(world, [Script(rank, [pinned(tensors[rank])]) for rank in range(world)])
    one.collective(OpKind.ALLREDUCE, every([0] * world))
    first = one.width
    one.collective(OpKind.ALLREDUCE, every([0] * world))
    for rank, script in enumerate(one.scripts):
        action = script.actions[1]
        assert isinstance(action, Collective)
        check = Domain.of("", rank, tuple(range(world)))
        script.actions[1] = replace(
            action, program=encode_program(replace(decode_program(action.program), agreement=check))
        )
    star = LocalWorld(world, "star")
    stars = [Star(star, rank) for rank in range(world)]
    asked: list[tuple[int, int]] = []

    def exchange(rank: int, program: Any, seq: int) -> Any:
        asked.append((rank, seq))
        return stars[rank]

    one.exchanges = exchange
    seq, futures = one.start()
    assert [future.result(WAIT_S) for future in futures] == [()] * world
    assert sorted(asked) == [(rank, seq + first) for rank in range(world)]
    assert [one.seqs for one in stars] == [[seq + first]] * world
    for tensor in tensors:
        np.testing.assert_array_equal(tensor, full(world * world * (world + 1) / 2))


def test_an_abort_just_before_a_plan_begins_is_seen(team: MakeTeam) -> None:
    one = team(2, [Script(rank, [pinned(full(1))]) for rank in range(2)])
    one.collective(OpKind.ALLREDUCE, every([0, 0]))
    action = one.scripts[0].actions[0]
    assert isinstance(action, Collective)
    check = Domain.of("", 0, (0, 1))
    program = encode_program(replace(decode_program(action.program), agreement=check))
    one.scripts[0].actions[0] = replace(action, program=program)
    star = Star(LocalWorld(2, "star"), 0)
    replay = one.capture()[0]

    def exchange(program: Any, seq: int) -> Any:
        replay.abort()
        return star

    with pytest.raises(PlanAbortedError):
        replay.run(1, b"", aborted={}, exchange=exchange)
    assert star.seqs == [], "the other never comes there"


def test_a_program_has_as_many_operands_as_keys(team: MakeTeam) -> None:
    one = team(1, [Script(0, [pinned(full(1))])])
    one.collective(OpKind.ALLREDUCE, {0: 0})
    action = one.scripts[0].actions[0]
    assert isinstance(action, Collective)
    one.scripts[0].actions[0] = replace(action, inputs=())
    with pytest.raises(ProtocolError, match="0 operands for a program of 1"):
        one.capture()
