"""The algorithms: each does what the operation means, costs what it says, and is taken where it is the cheapest."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycollect.backends.capabilities import BUILT_IN
from raycollect.core.model import OpKind, Pricing
from raycollect.planner import Link, Local, decode_program, encode_program, plan, plan_part
from raycollect.planner.algorithms import ALGORITHMS, cost_of
from raycollect.planner.ir import Part
from raycollect.planner.template import NATIVE
from raycollect.planner.verify import verify
from tests.pure.counting import counted_part
from tests.pure.memberships import ALL_OPS, MADE, built, membership, names, request
from tests.support.values import replace

_PLACES = st.lists(st.integers(0, 4), min_size=1, max_size=11)


# ---------------------------------------------------------------------------------------------- what they mean
@given(
    places=_PLACES,
    bitwise=st.booleans(),
    made=st.sampled_from(MADE),
    root=st.integers(0, 10),
    given_=st.booleans(),
    inplace=st.booleans(),
)
def test_whatever_is_possible_is_right(
    places: list[int], bitwise: bool, made: tuple[str, OpKind], root: int, given_: bool, inplace: bool
) -> None:
    name, kind = made
    of = membership(places, bitwise=bitwise)
    asked = request(kind, of, root % len(places), given=given_, inplace=inplace)
    verify(built(name, of, asked), bitwise=bitwise)
    whole = plan([replace(asked, group=of.spec)], [of])
    for position in range(len(places)):
        program = whole.program(position)
        assert decode_program(encode_program(program)) == program


# ---------------------------------------------------------------------------------------------- what they cost
@given(places=_PLACES, backend=st.sampled_from(["tcp", "gloo"]), bitwise=st.booleans(), root=st.integers(0, 10))
def test_the_bytes_that_they_say_are_those_of_their_steps(
    places: list[int], backend: str, bitwise: bool, root: int
) -> None:
    of = membership(places, backend=backend, bitwise=bitwise)
    for name, kind in MADE:
        asked = request(kind, of, root % len(places))
        part = built(name, of, asked)
        cost = cost_of(ALGORITHMS[name], part, of)
        counts = counted_part(part, 0, of.topology.hosts)
        assert (cost.inside, cost.between) == pytest.approx(counts), f"{name} for {kind}"
        assert cost.traffic(1 << 20) == tuple(round(one * (1 << 20)) for one in (cost.inside, cost.between))


def _launches(part: Part) -> int:
    (choice,) = part.choices
    used = {step.at for template in part.templates for step in template.steps if step.kind is not Local.COPY}
    assert used == set(range(choice.width)) or not used, "no launch is left out"
    return choice.width if used else 0


@pytest.mark.parametrize("world", range(1, 10))
def test_pairs_meet_side_by_side_in_as_few_launches_as_they_say(world: int) -> None:
    of = membership("a" * world)
    rounds = world - 1 + world % 2 if world > 1 else 0
    for kind, name, expected in (
        (OpKind.ALLTOALL, "pairwise", rounds),
        (OpKind.GATHER, "pairwise", world - 1),
        (OpKind.SCATTER, "pairwise", world - 1),
        (OpKind.BROADCAST, "tree", (world - 1).bit_length()),
        (OpKind.ALLGATHER, "ring", (3 if world % 2 else 2) * (world - 1)),
    ):
        for root in range(world):
            part = built(name, of, request(kind, of, root))
            verify(part)
            assert _launches(part) == expected
            for step in (step for template in part.templates for step in template.steps):
                assert len(step.ranks) == (2 if world > 2 and step.kind is not Local.COPY else 0)


# ---------------------------------------------------------------------------------------------- which is taken


def test_on_one_host_there_is_one_way() -> None:
    for places in ("a", "aa", "a" * 16):
        for kind in OpKind:
            if kind not in (OpKind.SEND, OpKind.RECV):
                of = membership(places, backend="tcp")
                part = plan_part(request(kind, of), of)
                assert names(part) == [NATIVE.name]


@given(
    hosts=st.integers(2, 6),
    ranks=st.integers(1, 6),
    backend=st.sampled_from(["tcp", "gloo"]),
    slow=st.sampled_from([1e7, 1e8, 1e9, 1e10]),
    latency_s=st.sampled_from([1e-6, 1e-4, 1e-2]),
    size=st.integers(0, 1 << 34),
)
def test_the_cheapest_is_taken_at_every_size(
    hosts: int, ranks: int, backend: str, slow: float, latency_s: float, size: int
) -> None:
    between = Link(latency_s=latency_s, bandwidth=slow)
    of = membership([host for host in range(hosts) for _ in range(ranks)], backend=backend, between=between)
    for kind in (OpKind.ALLREDUCE, OpKind.BROADCAST, OpKind.ALLGATHER, OpKind.REDUCESCATTER, OpKind.ALLTOALL):
        part = plan_part(request(kind, of), of)
        verify(part)
        assert part.choices[0].name == NATIVE.name
        assert part.choices[0].at_least == 0
        starts = [choice.at_least for choice in part.choices]
        assert starts == sorted(starts)
        assert all(len(template.ways) == len(starts) for template in part.templates)
        rows = [row for row in ALGORITHMS.values() if kind in row.kinds and len(part.ranks) <= row.at_most]
        taken = [choice for choice in part.choices if choice.at_least <= size][-1]
        best = min(cost_of(row, part, of).line.time_s(size) for row in rows)
        assert cost_of(ALGORITHMS[taken.name], part, of).line.time_s(size) == pytest.approx(best)


def test_what_is_learned_at_the_check_or_made_of_others_has_one_way() -> None:
    of = membership("aaaaaaaabbbbbbbb")
    assert names(plan_part(request(OpKind.ALLGATHER, of, given=False), of)) == ["native"]
    lacking = membership("aaaaaaaabbbbbbbb", ops=tuple(op for op in ALL_OPS if op != "allreduce"))
    assert names(plan_part(request(OpKind.ALLREDUCE, lacking), lacking)) == ["native"]
    mute = membership("aaaaaaaabbbbbbbb", ops=tuple(op for op in ALL_OPS if op not in ("send", "recv")))
    assert "ring" not in names(plan_part(request(OpKind.ALLGATHER, mute), mute))


def test_a_large_group_is_planned_without_rings() -> None:
    """Their steps grow with the square of the ranks."""
    of = membership([rank // 8 for rank in range(512)])
    part = plan_part(request(OpKind.ALLGATHER, of), of)
    assert names(part) == ["native"]
    part = plan_part(request(OpKind.ALLREDUCE, of), of)
    assert sum(len(way) for template in part.templates for way in template.ways) < 10 * 512


def test_a_foreign_backend_has_the_costs_that_it_names() -> None:
    with pytest.raises(ValueError, match="transport"):
        Pricing(transport="nobody")
    rings = membership([0, 0, 1, 2], backend="foreign")
    mesh = replace(rings, pricing=BUILT_IN["tcp"].pricing)
    for kind in (OpKind.ALLREDUCE, OpKind.BROADCAST, OpKind.ALLGATHER):
        part = plan_part(request(kind, rings), rings)
        native = ALGORITHMS[NATIVE.name]
        assert cost_of(native, part, mesh) == cost_of(native, part, membership([0, 0, 1, 2], backend="tcp"))
        assert cost_of(native, part, mesh) != cost_of(native, part, rings)
