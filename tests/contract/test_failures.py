"""A rank that is late, raises or dies, and a group that is gone: one typed error in every way, and the others go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

import raycollect as col
from raycollect import errors
from tests.contract.actors import Told
from tests.contract.cases import WORLD, Call, Part
from tests.contract.conftest import BACKENDS, Crews, end, join, started, table
from tests.contract.mismatches import ODD
from tests.contract.ways import BY_DRIVER, BY_MEMBERS, WAYS, Crew, Operands, operate, works
from tests.support.waiting import wait_until

OTHERS = [rank for rank in range(WORLD) if rank != ODD]

LATE_S = 4.0
"""How long ranks wait for one that is late."""

Tensors = Callable[[], list[Any]]


def told(function: Callable[[], Any]) -> Told:
    """What a call of the driver raises."""
    try:
        function()
    except Exception as exc:
        return Told(exc)
    return Told(None)


def ones(crew: Crew) -> list[Any]:
    return [one.ones.remote() for one in crew.actors]


def prepared(way: str, crew: Crew, tensors: Tensors, timeout_s: float | None = None) -> Callable[[], Any]:
    """An allreduce by the driver of what methods return, ready to be made."""

    def call(limit_s: float | None = None) -> None:
        operate(Call(operation="allreduce"), Operands(tensors(), [None] * WORLD), crew, limit_s)

    def batched() -> None:
        with col.batch(timeout_s=timeout_s):
            call()

    if way == "captured":
        with col.capture() as step:
            call()
        return lambda: step.run(timeout_s=timeout_s)
    return {"refs": lambda: call(timeout_s), "batch": batched, "step": col.step(call, timeout_s=timeout_s)}[way]


def of_members(way: str, crew: Crew, timeout_s: float = 20.0, ranks: Any = range(WORLD)) -> list[Told]:
    """What members are told that call a barrier."""
    return crew.all("call", crew.group(way), Part(operation="barrier"), timeout_s, ranks=ranks)


def works_on(way: str, crew: Crew) -> bool:
    """Whether the next collective of the same group works."""
    if way in BY_MEMBERS:
        return all(one.error is None for one in of_members(way, crew))
    return works(crew)


# Those of torch are marked `full`, as three processes that import it take seconds.


@pytest.fixture
def fresh(request: pytest.FixtureRequest, cluster: None, tmp_path: Path) -> Iterator[Crew]:
    """A crew for one test, ready for a way."""
    way, backend = request.param
    crew = started(backend)
    join(crew, way, tmp_path)
    yield crew
    end(crew)


# ---------------------------------------------------------------------------------------------- late


def with_a_late_rank(way: str, crew: Crew, limit_s: float, end: Path) -> list[Told]:
    """What those are told who wait for a rank that does not come."""
    if way in BY_MEMBERS:
        return of_members(way, crew, limit_s, OTHERS)
    assert works(crew)  # whoever still loads a library is late, too
    refs = ones(crew)
    ray.get(refs)
    make = prepared(way, crew, lambda: refs, limit_s)
    if way == "step":
        make()
    busy = crew.actors[ODD].stay.remote(str(end))
    found = [told(make)]
    end.touch()
    ray.get(busy)
    return found


@pytest.mark.parametrize(("way", "backend"), table(WAYS, BACKENDS))
def test_a_late_rank_is_named_to_those_who_waited(crews: Crews, way: str, backend: str, tmp_path: Path) -> None:
    crew = crews(backend, way)
    found = with_a_late_rank(way, crew, LATE_S, tmp_path / "end")
    # On a loaded machine others are late, too, or do not answer in time who is.
    if any(one.fields.get("missing", (ODD,)) != (ODD,) for one in found):
        found = with_a_late_rank(way, crew, 5 * LATE_S, tmp_path / "second end")
    for one in found:
        assert one.error is errors.CollectiveTimeoutError, one
        assert one.fields["missing"] == (ODD,)
    assert works_on(way, crew)


# ---------------------------------------------------------------------------------------------- raising


@pytest.mark.parametrize(("way", "backend"), table(BY_DRIVER, BACKENDS))
def test_a_method_that_raises_is_named(crews: Crews, way: str, backend: str) -> None:
    crew = crews(backend, way)

    def tensors() -> list[Any]:
        return [
            crew.actors[rank].fail.remote() if rank == ODD else crew.actors[rank].ones.remote() for rank in range(WORLD)
        ]

    one = told(lambda: prepared(way, crew, tensors)())
    if way in ("captured", "step"):
        assert one.error is errors.MethodError, one
        assert (one.fields["rank"], one.fields["op"], one.fields["raised"]) == (ODD, "fail", "ValueError")
    else:
        assert one.error is errors.ProducerFailedError, one
        assert [violation.rank for violation in one.fields["violations"]] == [ODD]
        assert one.cause is not None
        assert issubclass(one.cause, ValueError)
    assert works_on(way, crew)


# ---------------------------------------------------------------------------------------------- destroyed


@pytest.mark.parametrize(
    ("way", "fresh"),
    [pytest.param(way, (way, "shm"), id=way, marks=[pytest.mark.full] * (way == "torch")) for way in WAYS],
    indirect=["fresh"],
)
def test_a_destroyed_group_is_refused(way: str, fresh: Crew) -> None:
    if way in BY_MEMBERS:
        if way == "member":
            col.destroy_collective_group(fresh.declared)
        else:
            fresh.all("leave_torch") if way == "torch" else fresh.all("leave", fresh.own)
        found = of_members(way, fresh)
    else:
        refs = ones(fresh)
        make = prepared(way, fresh, lambda: refs)
        make()
        col.destroy_collective_group(fresh.declared)
        found = [told(make)]
    expected: tuple[type[Exception], ...] = (errors.UnknownGroupError,)
    if way == "torch":
        expected = (ValueError,)  # torch's own
    elif way == "member":  # some may hear of it in the call
        expected = (errors.UnknownGroupError, errors.GroupBrokenError)
    for one in found:
        assert one.error in expected, one


# ---------------------------------------------------------------------------------------------- dead


@pytest.mark.parametrize(
    ("way", "fresh"),
    [
        pytest.param(
            way, (way, backend), id=f"{way}-{backend}", marks=[pytest.mark.full] * (backend != "shm" or way == "torch")
        )
        for way in WAYS
        for backend in BACKENDS
    ],
    indirect=["fresh"],
)
def test_a_rank_that_dies_is_named_and_the_others_live(way: str, fresh: Crew) -> None:
    pids = fresh.all("pid", ranks=OTHERS)
    if way in BY_MEMBERS:
        dying = fresh.actors[ODD].die.remote()
        found = of_members(way, fresh, ranks=OTHERS)
        with pytest.raises(ray.exceptions.RayActorError):
            ray.get(dying)
    else:

        def tensors() -> list[Any]:
            return [
                fresh.actors[rank].die.remote() if rank == ODD else fresh.actors[rank].ones.remote()
                for rank in range(WORLD)
            ]

        found = [told(lambda: prepared(way, fresh, tensors)())]
    for one in found:
        assert one.error in (errors.ParticipantDiedError, errors.GroupBrokenError), one
        assert one.error is errors.GroupBrokenError or one.fields["rank"] == ODD
    assert fresh.all("pid", ranks=OTHERS) == pids
    refs = [fresh.actors[rank].ones.remote() for rank in OTHERS]
    col.allreduce_refs(refs)
    assert [one.tolist() for one in col.get(refs)] == [[2.0] * 3] * 2
    if way != "own" and way != "torch":
        assert wait_until(lambda: told(lambda: col.barrier(fresh.declared)).error is errors.GroupBrokenError)
