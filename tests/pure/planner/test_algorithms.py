"""The algorithms: each does what the operation means, costs what it says, and is taken where it is the cheapest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycollect.core.model import PIECES, OpKind, ReduceOp
from raycollect.planner import Link, Local, Role, Step, decode_program, encode_program, plan, plan_part
from raycollect.planner.algorithms import ALGORITHMS, STAND_INS, cost_of
from raycollect.planner.ir import Part
from raycollect.planner.template import NATIVE
from raycollect.planner.verify import verify
from tests.pure.counting import counted_part
from tests.pure.meaning import folded, meaning
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


class _Rank:
    """What a rank holds in memory: for each buffer an array, or a list of arrays."""

    def __init__(self, part: Part, rank: int, gives: Any, takes: Any) -> None:
        template = part.template(rank)
        world = len(part.ranks)
        takes_pieces = PIECES.get(part.request.kind, (False, False))[1]
        self.buffers: list[Any] = []
        for at, buffer in enumerate(template.buffers):
            if at == template.src:
                self.buffers.append(gives)
            elif at == template.dst and buffer.role is Role.OPERAND:
                self.buffers.append(takes)
            else:
                self.buffers.append([_made() for _ in range(world)] if takes_pieces else _made())
        self.steps = list(template.ways[-1])

    def at(self, buffer: int, piece: int) -> Any:
        held = self.buffers[buffer]
        return held[piece] if piece >= 0 else held


def _made() -> Any:
    return np.full(3, -7, np.float32)


def _play(part: Part, ranks: dict[int, _Rank]) -> None:
    """Runs the last way of a part in memory: a kernel runs when all of its ranks are at it."""
    while any(rank.steps for rank in ranks.values()):
        assert any(_moved(part, ranks, rank) for rank in ranks), "nobody can go on"


def _moved(part: Part, ranks: dict[int, _Rank], rank: int) -> bool:
    if not ranks[rank].steps:
        return False
    step = ranks[rank].steps[0]
    if step.kind is Local.COPY:
        np.copyto(ranks[rank].at(step.dst, step.dst_piece), ranks[rank].at(step.src, step.src_piece))
        ranks[rank].steps.pop(0)
        return True
    group = part.ranks
    if step.kind in (OpKind.SEND, OpKind.RECV):
        members = [rank, group[step.peer]]
    else:
        members = [group[at] for at in step.ranks] if step.ranks else list(group)
    steps = {one: ranks[one].steps[0] if ranks[one].steps else None for one in members}
    launch = (step.at, step.ranks)
    if any(other is None or (other.at, other.ranks) != launch for other in steps.values()):
        return False
    if step.kind in (OpKind.SEND, OpKind.RECV):
        other = steps[members[1]]
        if {step.kind, other.kind} != {OpKind.SEND, OpKind.RECV} or group[other.peer] != rank:
            return False
    elif any(other.kind is not step.kind for other in steps.values()):
        return False
    _kernel(ranks, steps, None if step.peer < 0 else group[step.peer])
    for one in members:
        ranks[one].steps.pop(0)
    return True


def _kernel(ranks: dict[int, _Rank], steps: dict[int, Step], root: int | None) -> None:
    kind = next(iter(steps.values())).kind
    if kind in (OpKind.ALLREDUCE, OpKind.REDUCE):
        total = folded(next(iter(steps.values())).op, [ranks[one].at(s.src, -1) for one, s in steps.items()])
    elif kind is OpKind.BROADCAST:
        total = ranks[root].at(steps[root].src, -1)
    else:
        (giver,) = [one for one, s in steps.items() if s.kind is OpKind.SEND]
        total = ranks[giver].at(steps[giver].src, steps[giver].src_piece)
    for one, step in steps.items():
        if step.dst >= 0:
            np.copyto(ranks[one].at(step.dst, step.dst_piece), total)


def _values(kind: OpKind, world: int, root: int, seed: int) -> list[Any]:
    random = np.random.default_rng(seed)

    def one() -> Any:
        return random.standard_normal(3).astype(np.float32)

    if kind in (OpKind.SCATTER, OpKind.ALLTOALL):
        return [[one() for _ in range(world)] for _ in range(world)]
    return [one() for _ in range(world)]


def _outputs(kind: OpKind, world: int, rank: int, gives: Any, in_place: bool) -> Any:
    """What a rank takes into: new memory, or that which `model.Kernel` allows of what it gives."""
    new = [np.zeros(3, np.float32) for _ in range(world)]
    if kind is OpKind.ALLTOALL:
        return gives if in_place else new
    if kind is OpKind.SCATTER:
        return gives[rank] if in_place else new[0]
    if kind in (OpKind.ALLGATHER, OpKind.GATHER):
        return [*new[:rank], gives, *new[rank + 1 :]] if in_place else new
    return new[0]


def _copied(value: Any) -> Any:
    return [one.copy() for one in value] if isinstance(value, list) else value.copy()


@given(
    places=_PLACES,
    bitwise=st.booleans(),
    made=st.sampled_from(MADE),
    root=st.integers(0, 10),
    in_place=st.booleans(),
    seed=st.integers(0, 99),
)
def test_memory_holds_what_the_operation_means(
    places: list[int], bitwise: bool, made: tuple[str, OpKind], root: int, in_place: bool, seed: int
) -> None:
    """Also where outputs are the memory of inputs; bit for bit where elements are folded in rank order."""
    (name, kind), world = made, len(places)
    root %= world
    of = membership(places, bitwise=bitwise)
    part = built(name, of, request(kind, of, root, inplace=in_place))
    if part is None:
        return
    gives = _values(kind, world, root, seed)
    expected = [_copied(one) if one is not None else None for one in meaning(kind, gives, root=root, op=ReduceOp.SUM)]
    kept = [_copied(one) for one in gives]
    ranks = {
        rank: _Rank(part, rank, gives[rank], _outputs(kind, world, rank, gives[rank], in_place)) for rank in part.ranks
    }
    _play(part, ranks)
    same = np.testing.assert_array_equal if bitwise else np.testing.assert_allclose
    for rank in part.ranks:
        template = part.template(rank)
        if template.result >= 0:
            for found, meant in _pairs(ranks[rank].buffers[template.result], expected[rank]):
                same(found, meant, **({} if bitwise else {"rtol": 1e-5, "atol": 1e-5}))
        if not in_place and template.src >= 0 and template.src != template.result:
            for found, meant in _pairs(ranks[rank].buffers[template.src], kept[rank]):
                np.testing.assert_array_equal(found, meant)


def _pairs(found: Any, meant: Any) -> Iterator[tuple[Any, Any]]:
    return zip(found, meant, strict=True) if isinstance(found, list) else iter([(found, meant)])


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


@pytest.mark.parametrize("kind", [OpKind.ALLREDUCE, OpKind.BROADCAST, OpKind.ALLGATHER])
def test_nothing_is_cheaper_than_a_backend_that_goes_host_by_host(kind: OpKind) -> None:
    for places in ("aabb", "aaaaaaaabbbbbbbb", "abcc"):
        of = membership(places, bitwise=False)
        assert names(plan_part(request(kind, of), of)) == ["native"]


def test_what_is_learned_at_the_check_or_made_of_others_has_one_way() -> None:
    of = membership("aaaaaaaabbbbbbbb")
    assert names(plan_part(request(OpKind.ALLGATHER, of, given=False), of)) == ["native"]
    lacking = membership("aaaaaaaabbbbbbbb", ops=tuple(op for op in ALL_OPS if op != "allreduce"))
    assert names(plan_part(request(OpKind.ALLREDUCE, lacking), lacking)) == ["native"]
    mute = membership("aaaaaaaabbbbbbbb", ops=tuple(op for op in ALL_OPS if op not in ("send", "recv")))
    assert "ring" not in names(plan_part(request(OpKind.ALLGATHER, mute), mute))


@pytest.mark.parametrize("kind", STAND_INS)
def test_a_backend_that_sends_and_receives_does_the_rest_on_any_hosts(kind: OpKind) -> None:
    for places in ("a", "ab", "aab", "abab", "aaabbbc"):
        of = membership(places, ops=("send", "recv"))
        for root in range(len(places)):
            for given_ in (True, False):
                part = plan_part(request(kind, of, root, given=given_), of)
                assert names(part) == [STAND_INS[kind].name]


def test_a_large_group_is_planned_without_rings() -> None:
    """Their steps grow with the square of the ranks."""
    of = membership([rank // 8 for rank in range(512)])
    part = plan_part(request(OpKind.ALLGATHER, of), of)
    assert names(part) == ["native"]
    part = plan_part(request(OpKind.ALLREDUCE, of), of)
    assert sum(len(way) for template in part.templates for way in template.ways) < 10 * 512
