"""What the driver's operations refuse by their arguments: one typed error in every way, and nothing is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import ray

import raycollect as col
from raycollect import errors
from tests.contract.actors import Member, Told
from tests.contract.cases import Case
from tests.contract.conftest import Crews
from tests.contract.mismatches import ODD
from tests.contract.ways import Crew, Operands, works


@ray.remote
class Plain:
    """An actor without the mixin."""

    def ones(self) -> Any:
        return np.ones(7, np.float32)


@ray.remote
def task() -> Any:
    return np.ones(7, np.float32)


@ray.remote
def failing() -> Any:
    raise KeyError("no such thing")


@dataclass(frozen=True, kw_only=True)
class Given:
    """What the calls of the table are made with.

    Attributes:
        crew: A group of three.
        refs: A tensor of each.
        lists: A tensor list of each.
        stranger: A participant outside the group.
        plain: An actor that is no participant.
    """

    crew: Crew
    refs: list[Any]
    lists: list[Any]
    stranger: Any
    plain: Any

    @property
    def group(self) -> str:
        return self.crew.declared

    def but(self, ref: Any, rank: int = ODD) -> list[Any]:
        """The refs, with another in the place of one."""
        return [*self.refs[:rank], ref, *self.refs[rank + 1 :]]

    def made(self, value: Any) -> list[Any]:
        """The refs, with that of a value that a method of rank `ODD` returns."""
        return self.but(self.crew.actors[ODD].echo.remote(value))


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """One call that is refused.

    Attributes:
        call: Gives the call, ready to be made.
        error: The class of the error.
        rank: The rank of its violations; None where there is more than one.
        kinds: The kinds of its violations, where they tell more than the class.
        field: The field of its first violation.
        plans: Whether a plan is refused, too, whose ranks do not look at their tensors.
    """

    call: Callable[[Given], Callable[[], Any]]
    error: type[errors.RaycollectError]
    rank: int | None = ODD
    kinds: tuple[str, ...] = ()
    field: str = ""
    plans: bool = True


def _refs(refs: Callable[[Given], Any], error: type[errors.RaycollectError], **others: Any) -> Refusal:
    """An allreduce of other refs."""
    return Refusal(call=lambda given: partial(col.allreduce_refs, refs(given), given.group), error=error, **others)


def _options(error: type[errors.RaycollectError] = errors.InvalidArgumentError, **options: Any) -> Refusal:
    """An allreduce with an option that makes no sense."""
    (name,) = options
    return Refusal(
        call=lambda given: partial(col.allreduce_refs, given.refs, given.group, **options),
        error=error,
        rank=-1,
        field=name,
    )


def _root(field: str, call: Callable[[Given], Callable[[], Any]]) -> Refusal:
    return Refusal(call=call, error=errors.InvalidArgumentError, rank=-1, field=field)


FOREIGN, MISSING = errors.ForeignRefError, errors.MissingMemberError

REFUSALS = {
    "a ref of ray.put": _refs(lambda g: g.but(ray.put(np.ones(7, np.float32))), FOREIGN),
    "a ref of a task": _refs(lambda g: g.but(task.remote()), FOREIGN),
    "an array": _refs(lambda g: g.but(np.ones(7, np.float32)), FOREIGN),
    "an actor": _refs(lambda g: g.but(g.crew.actors[ODD]), FOREIGN),
    "a method that was not called": _refs(lambda g: g.but(g.crew.actors[ODD].ones), FOREIGN),
    "a generator": _refs(lambda g: g.but(g.crew.actors[ODD].stream.remote()), FOREIGN),
    "an actor that is no participant": _refs(
        lambda g: g.but(g.plain.ones.remote()), errors.NotAParticipantError, rank=-1
    ),
    "an actor outside the group": _refs(lambda g: g.but(g.stranger.ones.remote()), errors.NotAMemberError, rank=None),
    "two refs of an actor": _refs(lambda g: [*g.refs, g.refs[ODD]], errors.DuplicateActorError, field="ref"),
    "no ref of a rank": _refs(lambda g: [g.refs[0], g.refs[2]], MISSING),
    "no refs": _refs(lambda g: [], MISSING, rank=-1),
    "None": _refs(lambda g: None, MISSING, rank=-1),
    "all that is wrong": _refs(
        lambda g: [g.stranger.ones.remote(), *g.refs, g.refs[2]],
        errors.RefusedError,
        rank=None,
        kinds=("not_member", "duplicate"),
    ),
    "a number": _refs(lambda g: g.made(42), errors.NotATensorError),
    "a dict with None": _refs(lambda g: g.made({"weight": np.ones(3), "bias": None}), errors.NotATensorError),
    "a value without dimensions": _refs(lambda g: g.made(np.array(2.5)), errors.NotATensorError),
    "a value of a by_value method": _refs(lambda g: g.but(g.crew.actors[ODD].copied.remote()), errors.NotATensorError),
    "an argument of Ray, which is read-only": _refs(
        lambda g: g.made(np.ones(7, np.float32)), errors.ReadOnlyError, plans=False
    ),
    "a method that raised": _refs(lambda g: g.but(g.crew.actors[ODD].fail.remote()), errors.ProducerFailedError),
    "a method whose argument failed": _refs(
        lambda g: g.but(g.crew.actors[ODD].echo.remote(failing.remote())), errors.ProducerFailedError
    ),
    **{
        f"{op} of {dtype}": Refusal(
            call=lambda g, op=op, dtype=dtype: partial(
                col.allreduce_refs, [one.ones.remote(dtype) for one in g.crew.actors], g.group, op
            ),
            error=errors.UnsupportedError,
            rank=None,
        )
        for op, dtype in (("avg", "int32"), ("max", "complex64"), ("bxor", "float32"))
    },
    "an unknown group": Refusal(
        call=lambda g: partial(col.allreduce_refs, g.refs, "nope"), error=errors.UnknownGroupError, rank=None
    ),
    "a reduce op as group": Refusal(
        call=lambda g: partial(col.allreduce_refs, g.refs, col.ReduceOp.MAX), error=errors.UnknownGroupError, rank=None
    ),
    "an unknown reduce op": _options(op="average"),
    "no time": _options(timeout_s=0),
    "a time below zero": _options(timeout_s=-1),
    "a time that is text": _options(timeout_s="5"),
    "a flag that is none": _options(inplace="no"),
    "the root of a broadcast": _root("src_rank", lambda g: partial(col.broadcast_refs, g.refs, 7, g.group)),
    "the root of a reduce": _root("dst_rank", lambda g: partial(col.reduce_refs, g.refs, -1, g.group)),
    "the root of a gather": _root("dst_rank", lambda g: partial(col.gather_refs, None, g.refs, 3, g.group)),
    "the root of a scatter": _root("src_rank", lambda g: partial(col.scatter_refs, g.refs, g.lists[0], 3, g.group)),
    "a root that is text": _root("dst_rank", lambda g: partial(col.reduce_refs, g.refs, "first", g.group)),
    "a send to itself": Refusal(
        call=lambda g: partial(col.send_ref, g.refs[ODD], g.crew.actors[ODD].ones.remote(), g.group),
        error=errors.DuplicateActorError,
    ),
    "a send to an actor outside the group": Refusal(
        call=lambda g: partial(col.send_ref, g.refs[0], g.stranger, g.group), error=errors.NotAMemberError, rank=None
    ),
    "a list on another rank than the root": Refusal(
        call=lambda g: partial(col.gather_refs, g.lists[ODD], g.refs, 0, g.group),
        error=errors.MismatchError,
        field="output",
    ),
    "a list on another rank than the source": Refusal(
        call=lambda g: partial(col.scatter_refs, g.refs, g.lists[ODD], 0, g.group),
        error=errors.MismatchError,
        field="input",
    ),
    "no list of a rank": Refusal(
        call=lambda g: partial(col.allgather_refs, [g.lists[0], g.lists[2]], g.refs, g.group), error=MISSING
    ),
    "what is wrong in both lists": Refusal(
        call=lambda g: partial(col.allgather_refs, [*g.lists[:2], g.stranger.ones.remote()], g.but(g.refs[0]), g.group),
        error=errors.RefusedError,
        rank=None,
        kinds=("not_member", "duplicate"),
    ),
}


@pytest.fixture(scope="module")
def given(crews: Crews) -> Iterator[Given]:
    crew = crews("shm", "refs")
    stranger, plain = ray.remote(num_cpus=0)(Member).remote(0), Plain.options(num_cpus=0).remote()
    crew.all("begin", [Case(operation="allgather")])
    operands = Operands.of(crew, 0)
    yield Given(crew=crew, refs=operands.tensors, lists=operands.lists, stranger=stranger, plain=plain)
    for one in (stranger, plain):
        ray.kill(one)


def what_is_wrong(case: Refusal, told: Told, numbers: set[int]) -> str:
    """Says what is not as it must be with an error."""
    if told.error is not case.error:
        return f"raised {told}, not {case.error.__name__}"
    violations = told.fields.get("violations", ())
    if {violation.call for violation in violations} - numbers:
        return f"names other calls than {numbers}: {violations}"
    if case.rank is not None and {violation.rank for violation in violations} != {case.rank}:
        return f"blames {violations}"
    if case.kinds and {violation.kind for violation in violations} != set(case.kinds):
        return f"finds {violations}, not {case.kinds}"
    return "" if not case.field or violations[0].field == case.field else f"names {violations}, not {case.field}"


def make(way: str, given: Given, call: Callable[[], Any]) -> None:
    """Makes a call; in a block, after a valid one."""
    if way == "refs":
        call()
    elif way == "plan":
        col.plan(call)
    elif way == "batch":
        with col.batch():
            col.allreduce_refs(given.refs, given.group)
            call()
    else:
        with col.capture() as step:
            col.allreduce_refs(given.refs, given.group)
            call()
        step.run()


NUMBERS = {"refs": {-1}, "plan": {-1}, "batch": {1}, "captured": {-1, 1}}
"""Way -> the number of the refused call; -1 where there is one call, or where the installation of a step refuses."""


@pytest.mark.parametrize("way", NUMBERS)
def test_a_call_is_refused_by_its_arguments(given: Given, way: str) -> None:
    found = {}
    for name, case in REFUSALS.items():
        if way == "plan" and not case.plans:
            continue
        told, call = Told(None), case.call(given)
        try:
            make(way, given, call)
        except Exception as exc:
            told = Told(exc)
        text = what_is_wrong(case, told, NUMBERS[way])
        wrong = [one for one in given.crew.all("untouched") if one]
        if text or wrong:
            found[name] = (text, wrong)
    assert found == {}
    assert works(given.crew)


def test_a_tensor_that_was_freed_is_refused_and_the_others_are_not(given: Given) -> None:
    refs = [one.ones.remote() for one in given.crew.actors]
    col.free(refs[ODD])
    with pytest.raises(errors.TensorFreedError) as caught:
        col.allreduce_refs(refs, given.group)
    assert [(one.rank, one.ref) for one in caught.value.violations] == [(ODD, refs[ODD].hex())]
    np.testing.assert_array_equal(col.get(refs[0]), np.ones(3))
    assert works(given.crew)
