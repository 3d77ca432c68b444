"""The schedule: one order for all, proven by another route, and kept by participants that only know their programs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from raycollect.core.model import OpKind
from raycollect.planner import (
    Bundle,
    Link,
    Local,
    Made,
    Plan,
    Program,
    Request,
    Share,
    Source,
    decode_program,
    encode_program,
    plan,
)
from raycollect.planner.ir import Together
from tests.pure.batches import KINDS, random_plan, sums
from tests.pure.memberships import membership, request
from tests.support.values import replace

_SEEDS = st.integers(0, 1 << 32)


# ---------------------------------------------------------------------------------------------- participants


@dataclass(frozen=True)
class _Launch:
    """A launch as one participant sees it."""

    number: int
    group_id: str
    members: tuple[str, ...]


def _names(whole: Plan) -> dict[str, tuple[str, ...]]:
    """Group id -> its members."""
    return {of.spec.group_id: of.participants for of in whole.memberships}


def _launches(program: Program, share: Share, base: int, way: int, names: dict[str, tuple[str, ...]]) -> list[_Launch]:
    """What a participant begins for tasks of one share, by one of its ways; nothing where the check's launch does."""
    found = []
    for step in share.template.ways[way]:
        if step.kind is Local.COPY:
            continue
        domain = share.domain
        if base + step.at == 0:
            assert domain.group_id == program.agreement.group_id, "the consistency check's communicator runs it"
            assert (step.ranks or domain.ranks) == program.agreement.ranks, "exactly who is in the consistency check"
            continue
        members = tuple(names[domain.group_id][rank] for rank in step.ranks or domain.ranks)
        found.append(_Launch(base + step.at, domain.group_id, members))
    return found


def _itinerary(whole: Plan, position: int, seed: int, *, alone: bool) -> tuple[list[_Launch], list[int]]:
    """(the launches that a participant begins, the requests that it runs), in its order."""
    program, names = whole.program(position), _names(whole)
    bundles = program.bundles
    if alone:
        bundles = tuple(Bundle(tasks=(at,), base=(task.alone,)) for at, task in enumerate(program.tasks))
    launches: list[_Launch] = []
    ran = []
    for bundle in bundles:
        tasks = [program.tasks[at] for at in bundle.tasks]
        assert len({task.share for task in tasks}) == 1
        share = program.shares[tasks[0].share]
        way = random.Random(f"{seed} {tasks[0].request}").randrange(len(share.choices))  # the same for all
        base = bundle.base[0] if alone else bundle.base[way]
        for launch in _launches(program, share, base, way, names):
            if not launches or launches[-1] != launch:  # else what runs in it goes on
                launches.append(launch)
        ran += [task.request for task in tasks]
    return launches, ran


def _meet(launches: dict[str, list[_Launch]]) -> None:
    """Lets all participants go through their launches, each of which needs all of its members."""
    ahead = {person: list(mine) for person, mine in launches.items()}
    while any(ahead.values()):
        moved = False
        for mine in list(ahead.values()):
            if mine and all(ahead[member][:1] == [mine[0]] for member in mine[0].members):
                for member in mine[0].members:
                    if ahead[member] is not mine:
                        ahead[member].pop(0)
                mine.pop(0)
                moved = True
        assert moved, f"nobody can go on: {[mine[:1] for mine in ahead.values()]}"


@given(seed=_SEEDS, alone=st.booleans())
def test_participants_that_only_know_their_programs_meet_in_every_launch(seed: int, alone: bool) -> None:
    whole = random_plan(seed)
    found = {}
    for position, person in enumerate(whole.participants):
        launches, _ = _itinerary(whole, position, seed, alone=alone)
        numbers = [launch.number for launch in launches]
        assert numbers == sorted(set(numbers)), "in ascending order, and each once"
        assert all(0 < number < whole.width for number in numbers)
        assert all(person in launch.members for launch in launches)
        found[person] = launches
    _meet(found)


@given(seed=_SEEDS, alone=st.booleans())
def test_every_participant_sees_the_values_that_program_order_says(seed: int, alone: bool) -> None:
    whole = random_plan(seed)
    for position, person in enumerate(whole.participants):
        _, ran = _itinerary(whole, position, seed, alone=alone)
        mine = [number for number, _ in whole.involved[position]]
        assert sorted(ran) == mine
        assert _seen(whole, person, ran) == _seen(whole, person, mine)


def _seen(whole: Plan, person: str, order: Sequence[int]) -> dict[int, list[Any]]:
    """For each request, what a participant finds in its operands, if it runs them in some order."""
    held: dict[Source, Any] = {}
    found = {}
    for number in order:
        asked, part, of = whole.requests[number], whole.parts[number], whole.memberships[number]
        rank = of.rank_of(person)
        _, src, dst = asked.operands[part.places[rank]]
        given = [one for one in (src, dst) if one is not None]
        found[number] = [held.get(one, one) for one in given]
        for one, written in zip((src, dst), part.writes[part.parts[part.places[rank]]], strict=True):
            if one is not None and written:
                held[one] = ("written by", number)
        held[Made(number)] = ("made by", number)
    for one, where in held.items():
        found.setdefault(-1, []).append((str(one), where))
    found[-1] = sorted(found.get(-1, []), key=str)
    return found


@given(_SEEDS)
def test_programs_of_batches_survive_the_wire_and_are_the_same_again(seed: int) -> None:
    whole, again = random_plan(seed), random_plan(seed)
    for position in range(len(whole.participants)):
        program = whole.program(position)
        assert decode_program(encode_program(program)) == program
        assert program == again.program(position)
        assert program.keys == len(whole.sources(position))
        assert program.makes == bool(whole.outputs(position))
        for task in program.tasks:
            for one in task.inputs:
                assert -len(program.tasks) <= one < program.keys


@given(_SEEDS)
def test_everyone_knows_who_brings_what_to_the_check(seed: int) -> None:
    whole = random_plan(seed)
    for position in range(len(whole.participants)):
        program = whole.program(position)
        everyone = program.everyone or [(program.agreement.ranks, tuple(range(len(program.agreement.ranks))))] * len(
            whole.requests
        )
        for (ranks, places), part, of in zip(everyone, whole.parts, whole.memberships, strict=True):
            assert len(ranks) == len(places)
            if program.everyone:
                assert ranks == part.ranks
            assert [whole.participants[place] for place in places] == [of.participants[rank] for rank in part.ranks]


# ---------------------------------------------------------------------------------------------- what it does


def test_what_is_alike_and_independent_runs_together() -> None:
    of = membership("aaaa")
    whole = plan(sums(of, 20), [of] * 20)
    assert whole.order == (Together(requests=tuple(range(20)), base=(0,)),)
    assert (whole.width, whole.alone) == (1, (0,) * 20)
    program = whole.program(3)
    assert program.name == "batch"
    assert len(program.shares) == 1
    assert program.keys == 20


def test_what_uses_a_result_runs_after_it() -> None:
    of = membership("aaa")
    first, second = sums(of, 2)
    whole = plan([first, second, first, second], [of] * 4)
    assert [together.requests for together in whole.order] == [(0, 1), (2, 3)]
    made = replace(first, inplace=False)
    after = replace(first, operands=tuple((rank, Made(0), None) for rank in range(3)))
    whole = plan([made, after], [of] * 2)
    assert [together.requests for together in whole.order] == [(0,), (1,)]
    assert [task.inputs for task in whole.program(1).tasks] == [(0,), (-1,)]


def test_readers_of_one_value_run_together_and_writers_after_them() -> None:
    of = membership("aaa")
    write = sums(of, 1)[0]
    read = replace(write, inplace=False)
    whole = plan([read, read, write, read], [of] * 4)
    assert [together.requests for together in whole.order] == [(0, 1), (2,), (3,)]


def test_groups_that_share_participants_have_launches_of_their_own() -> None:
    left = membership("aa", group_id="left", members=("x", "y"))
    right = membership("aa", group_id="right", members=("y", "z"))
    whole = plan([*sums(left, 1), *sums(right, 1)], [left, right])
    assert whole.participants == ("x", "y", "z")
    assert whole.agreement is None
    assert [together.base for together in whole.order] == [(1,), (2,)]
    assert [len(whole.program(position).tasks) for position in range(3)] == [1, 2, 1]
    assert whole.program(1).agreement.group_id == ""
    around = membership("aaa", group_id="around", members=("z", "x", "y"))
    asked = [replace(one, operands=tuple((rank, f"{rank}!", None) for rank in range(3))) for one in sums(around, 1)]
    whole = plan([*asked, *sums(left, 1)], [around, left])
    assert whole.participants == ("z", "x", "y")
    assert whole.agreement is around
    assert [together.base for together in whole.order] == [(0,), (1,)]


def test_shapes_that_are_learned_are_known_before_they_are_used() -> None:
    of = membership("aaa")
    learn = request(OpKind.ALLGATHER, of, given=False)
    spread = Request(kind=OpKind.ALLTOALL, group=of.spec, operands=tuple((rank, Made(0), None) for rank in range(3)))
    again = replace(spread, operands=tuple((rank, Made(1), None) for rank in range(3)))
    whole = plan([learn, spread, again], [of] * 3)
    assert whole.first_rounds == (0, 1, 2)
    assert whole.rounds == 4
    assert [task.round for task in whole.program(0).tasks] == [0, 1, 2]


def test_alternatives_have_launches_of_their_own_and_the_native_way_the_checks() -> None:
    slow = Link(latency_s=1e-3, bandwidth=1e9)
    of = membership("aab", backend="gloo", bitwise=False, inside=slow, between=slow)
    asked = request(OpKind.BROADCAST, of)
    operands = [
        tuple((rank, src and (call, src), dst and (call, dst)) for rank, src, dst in asked.operands)
        for call in range(3)
    ]
    whole = plan([replace(asked, operands=one) for one in operands], [of] * 3)
    (together,) = whole.order
    assert [choice.name for choice in whole.parts[0].choices] == ["native", "tree", "native"]
    assert together.base == (0, 1, 0)
    assert whole.width == 1 + 4 * whole.parts[0].width
    assert whole.alone == tuple(1 + (1 + at) * whole.parts[0].width for at in range(3))


def test_kinds_of_the_random_batches_are_all_there() -> None:
    """The tests above would prove little, were the batches all alike."""
    plans = [random_plan(seed) for seed in range(200)]
    assert {asked.kind for whole in plans for asked in whole.requests} == set(KINDS)
    assert any(whole.agreement is None for whole in plans)
    assert any(len(part.choices) > 1 for whole in plans for part in whole.parts)
    assert any(part.choices[0].width > 1 for whole in plans for part in whole.parts)
    assert any(len(together.requests) > 1 for whole in plans for together in whole.order)
    assert any(
        isinstance(one, Made)
        for whole in plans
        for asked in whole.requests
        for _, *both in asked.operands
        for one in both
    )
    assert {whole.rounds for whole in plans} >= {1, 2, 3}
