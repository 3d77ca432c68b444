"""Runs of captured steps on one participant: what is in the slots, and what is remembered from run to run."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from raycollect.core.model import OpKind, ReduceOp
from raycollect.engine.step_runner import MOST_KEPT
from raycollect.engine.value_codec import pack_values
from raycollect.errors import (
    CaptureError,
    MismatchError,
    NotATensorError,
    ProtocolError,
)
from tests.pure.engine.step_programs import MakeTeam, every, team
from tests.pure.teams import CAPTURE, Script, Team, full, given, pinned
from tests.support.values import replace

__all__ = ["team"]  # fixtures


def test_constants_arguments_and_values_reach_methods(team: MakeTeam) -> None:
    array, shared = np.arange(3.0), object()
    script = Script(0, [pinned(array), shared])
    argument = script.argument()
    first = script.call("first", 0, 1, given(3), key=argument, other=given((1, "a")))
    script.call("second", first, given([1]), given(np.ones(2)))
    script.returns += [first, argument]
    one = team(1, [script])
    one.actors[0].methods = {"first": lambda *args, **kwargs: 42, "second": lambda *args: None}
    for value in (0.5, [None, 7], (1, {2: "x"})):
        assert one.run(value) == [(42, value)]
        (_, args, kwargs), (_, others, _) = one.actors[0].calls[-2:]
        assert args[0] is array, "the tensor itself"
        assert args[1] is shared, "what was resolved when the step was captured"
        assert args[2] == 3
        assert kwargs == {"key": value, "other": (1, "a")}
        assert others[:2] == (42, [1])
        np.testing.assert_array_equal(others[2], np.ones(2))


def test_a_method_that_changes_a_constant_gets_it_anew_in_the_next_run(team: MakeTeam) -> None:
    script = Script(0)

    def spoil(items: list[int], array: Any, table: dict[str, int]) -> float:
        items.append(4)
        array += 1
        table["b"] = 2
        return float(len(items) + array.sum() + len(table))

    script.returns.append(script.call("spoil", given([1]), given(np.zeros(3)), table=given({"a": 1})))
    one = team(1, [script])
    one.actors[0].methods = {"spoil": spoil}
    assert [one.run() for _ in range(3)] == [[(7.0,)]] * 3


@pytest.mark.parametrize("world", [1, 2, 3])
def test_outputs_of_collectives_are_made_anew_and_given_to_methods_and_collectives(team: MakeTeam, world: int) -> None:
    tensors = [full(rank + 1) for rank in range(world)]
    one = team(world, [Script(rank, [pinned(tensors[rank])]) for rank in range(world)])
    gathered = one.collective(OpKind.ALLGATHER, every([0] * world))
    summed = one.collective(OpKind.ALLREDUCE, every([slots[0] for slots in gathered]))
    assert summed == [[]] * world, "in place"
    seen: list[list[Any]] = [[] for _ in range(world)]
    for rank, script in enumerate(one.scripts):
        one.actors[rank].methods = {"take": seen[rank].append}
        script.call("take", gathered[rank][0])
        script.returns.append(gathered[rank][0])
    for _ in range(3):
        results = one.run()
        for (rows,) in results:
            assert [row[0] for row in rows] == [world * (rank + 1.0) for rank in range(world)]
    for values in seen:
        assert len({id(row) for rows in values for row in rows}) == 3 * world, "each run's own"


def test_kept_values_are_those_of_their_run_and_are_given_once(team: MakeTeam) -> None:
    script = Script(0)
    made = [script.call("make"), script.call("make")]
    one = team(1, [script])
    values = iter([full(number) for number in range(6)])
    one.actors[0].methods = {"make": lambda: next(values)}
    script.kept += made
    (runner,) = one.capture()
    told: list[None] = []
    for seq in (1, 2, 3):
        assert runner.run(seq, b"", aborted={}, succeeded=lambda: told.append(None)) == b""
    assert not told, "who is told that a run has ended finds what it has kept"
    for seq in (2, 1, 3):
        assert [value[0] for value in runner.take_kept(seq)] == [2 * seq - 2, 2 * seq - 1]
        with pytest.raises(CaptureError):
            runner.take_kept(seq)


def test_values_that_nobody_takes_are_kept_for_some_runs(team: MakeTeam) -> None:
    script = Script(0)
    script.kept.append(script.call("make"))
    one = team(1, [script])
    made: list[weakref.ref[Any]] = []

    def make() -> Any:
        value = full(0)
        made.append(weakref.ref(value))
        return value

    one.actors[0].methods = {"make": make}
    (runner,) = one.capture()
    for seq in range(1, 2 * MOST_KEPT):
        runner.run(seq, b"", aborted={})
    assert sum(one() is not None for one in made) == MOST_KEPT
    assert runner.take_kept(2 * MOST_KEPT - 1).tolist() == full(0).tolist()
    with pytest.raises(CaptureError):
        runner.take_kept(1)


@pytest.mark.parametrize("arguments", [(), (1, 2), (1, 2, 3)])
def test_the_arguments_are_counted(team: MakeTeam, arguments: tuple[int, ...]) -> None:
    script = Script(0)
    script.argument()
    one = team(1, [script])
    with pytest.raises(ProtocolError, match=f"{len(arguments)} arguments for a captured step that takes 1"):
        one.capture()[0].run(1, pack_values(arguments), aborted={})


def test_the_values_of_refs_are_counted(team: MakeTeam) -> None:
    script = Script(0, [1, 2])
    one = team(1, [script])
    script.values.pop()
    script.keys.append(script.keys[0])
    step_program = replace(script.step_program, refs=2)
    with pytest.raises(ProtocolError, match="1 values for a step program of 2 refs"):
        type(one.capture()[0])(step_program, [1], one.actors[0].invoke, one.replays[0].instruments, lambda _: None)  # type: ignore[arg-type,return-value]


def test_keys_tell_the_run(team: MakeTeam) -> None:
    """What is wrong with a method's result is told under another key in each run, a ref's under its own."""
    script = Script(0, [pinned(full(1))])
    slot = script.call("make")
    one = team(1, [script])
    one.actors[0].methods = {"make": lambda: "no tensor"}
    one.collective(OpKind.ALLREDUCE, {0: slot})
    refs = []
    for _ in range(2):
        (error,) = one.fail()
        assert isinstance(error, NotATensorError)
        refs.append(error.violations[0].ref)
    step = script.keys[slot][-4:]
    assert refs == [(CAPTURE + run.to_bytes(8, "little") + step).hex() for run in (1, 2)]


@pytest.mark.parametrize("world", [2, 3])
def test_what_is_wrong_says_in_which_call_of_the_capture(team: MakeTeam, world: int) -> None:
    """The second plan, itself of two calls, whose second is wrong: call 2 of all."""
    tensors = [[full(1), full(2), full(3, (4 + rank,))] for rank in range(world)]
    one = team(world, [Script(rank, [pinned(t) for t in tensors[rank]]) for rank in range(world)])
    for script in one.scripts:
        script.call("note")
    for actor in one.actors:
        actor.methods = {"note": lambda: None}
    one.collective(OpKind.ALLREDUCE, every([0] * world))
    for script in one.scripts:
        script.call("note")
    one.batch([(OpKind.ALLREDUCE, every([at] * world), {}, {}) for at in (1, 2)])
    for error in one.fail():
        assert isinstance(error, MismatchError)
        assert {violation.call for violation in error.violations} == {2}
        assert error.__traceback__ is None or error.op
    single = team(world, [Script(rank, [pinned(tensors[rank][2])]) for rank in range(world)])
    single.collective(OpKind.ALLREDUCE, every([0] * world))
    for error in single.fail():
        assert isinstance(error, MismatchError)
        assert {violation.call for violation in error.violations} == {-1}, "there is but one"


def _summing(team: MakeTeam, make: Callable[[], Any]) -> Team:
    script = Script(0)
    slot = script.call("make")
    one = team(1, [script])
    one.actors[0].methods = {"make": make, "take": lambda value: None}
    one.collective(OpKind.ALLREDUCE, {0: slot})
    script.call("take", slot)
    return one


KEPT: dict[str, Callable[[Any, Any], Callable[[], Any]]] = {
    "tensor": lambda a, b: lambda: a,
    "list": lambda a, b: (lambda same: lambda: same)([a, b]),
    "a new list of the same": lambda a, b: lambda: [a, b],
    "a new dict of the same": lambda a, b: lambda: {"a": a, "b": [b]},
}


@pytest.mark.parametrize("name", KEPT)
def test_the_same_tensors_are_recognised(team: MakeTeam, name: str) -> None:
    made: list[Any] = []
    make = KEPT[name](full(1), full(2))
    one = _summing(team, lambda: made.append(make()) or made[-1])
    for _ in range(5):
        one.run()
    layout = name == "tensor"  # which is known of a single tensor after its first run
    assert one.repeated(0) == [False, layout, True, True, True]
    taken = [args[0] for method, args, _ in one.actors[0].calls if method == "take"]
    assert all(one is other for one, other in zip(taken, made, strict=True)), "what it returned in this very run"


OTHERS: dict[str, Callable[[int], Any]] = {
    "new tensors": lambda run: full(run),
    "another structure": lambda run: [_A, _B] if run % 2 else {"a": _A, "b": _B},
    "another order": lambda run: [_A, _B] if run % 2 else [_B, _A],
    "views": lambda run: _A[:3],
}


_A, _B = full(1), full(2)


@pytest.mark.parametrize("name", OTHERS)
def test_others_are_known_by_the_layout_of_one_tensor_alone(team: MakeTeam, name: str) -> None:
    runs = iter(range(10))
    one = _summing(team, lambda: OTHERS[name](next(runs)))
    for _ in range(6):
        one.run()
    assert one.repeated(0) == [False, *[name in ("new tensors", "views")] * 5]


def test_a_list_that_was_changed_is_taken_apart_anew(team: MakeTeam) -> None:
    items, other = [full(1)], full(1, (3,))
    one = _summing(team, lambda: items)
    one.collective(OpKind.ALLREDUCE, {0: one.scripts[0].actions[0].slot}, op=ReduceOp.PRODUCT)  # type: ignore[union-attr]
    for _ in range(3):
        one.run()
    assert one.repeated(0)[-2:] == [True, True]
    items.append(other)
    one.run()
    assert one.repeated(0)[-2:] == [False, False]
    assert len(one.replays[0].look()[0] or ()) == 2


def test_what_is_new_in_each_run_goes_before_the_next_is_made(team: MakeTeam) -> None:
    """Of results, and of outputs: a run needs no memory twice."""
    alive: list[weakref.ref[Any]] = []
    held: list[int] = []

    def make() -> Any:
        one.actors[0].calls.clear()
        gc.collect()
        held.append(sum(ref() is not None for ref in alive))
        array = full(len(alive))
        alive.append(weakref.ref(array))
        return array

    one = _summing(team, make)
    for _ in range(5):
        one.run()
    assert held == [0] * 5
    replay = one.replays[0]
    assert alive[-1]() is not None, "the last run's, for whoever asks how it looks"
    (infos, nothing) = replay.look()
    assert infos is not None
    assert nothing is None
    assert [(info.shape, info.dtype) for info in infos] == [((5,), "float64")]
    one.actors[0].calls.clear()
    replay.close()
    gc.collect()
    assert alive[-1]() is None


def test_looking_needs_no_run(team: MakeTeam) -> None:
    one = team(1, [Script(0, [pinned([full(1), full(2, (2, 3))]), "by value"])])
    one.scripts[0].call("make")
    infos, *others = one.capture()[0].look()
    assert others == [None, None]
    assert [info.shape for info in infos or ()] == [(5,), (2, 3)]
