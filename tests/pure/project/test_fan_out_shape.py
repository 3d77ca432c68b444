"""The tree of participants: everybody is reached, once, over few hops, and no sender sends much."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import repeat

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.fan_out_shape import CONTROLLER, DEGREE, MOST_DIRECT, PLACE_NBYTES, Fanout, Sent, build
from raycollect.core.model import KEY_NBYTES, OpKind
from raycollect.planner import STAGING_NBYTES, Ticket, encode_order, encode_program, plan
from tests.pure.memberships import membership, request

CALM = settings(deadline=None)  # the machine's load is none of these tests' business

_HOSTS = st.lists(st.integers(0, 12), max_size=120)
_DEGREES = st.integers(1, 5)

UNEVEN = [*repeat(0, 500), *repeat(1, 300), *repeat(2, 201), *range(3, 26)]
SHAPES = {  # hosts of 1,024 ranks, the controller's host, depth, messages of the controller
    "64 hosts of 16": ([at // 16 for at in range(1024)], 0, 3, 16 + 16),
    "64 hosts of 16, interleaved": ([at % 64 for at in range(1024)], 0, 3, 16 + 16),
    "1 host, the controller's": ([0] * 1024, 0, 1, 1024),
    "1 host, another": ([0] * 1024, 1, 4, 1),
    "1,024 hosts of 1": (list(range(1024)), -1, 3, 16),
    "uneven": (UNEVEN, 0, 4, 500 + 16),
}


def children(tree: Fanout) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for at, parent in enumerate(tree.parents):
        found.setdefault(parent, []).append(at)
    return found


def reached(tree: Fanout, lost: frozenset[int] = frozenset(), also: Sequence[int] = ()) -> Counter[int]:
    """How often each participant gets its program: by the tree, whose lost ones pass nothing on, and directly."""
    below = children(tree)
    got, todo = Counter(also), list(below.get(CONTROLLER, ()))
    while todo:
        at = todo.pop()
        if at not in lost:
            got[at] += 1
            todo += below.get(at, ())
    return got


@CALM
@given(_HOSTS, _DEGREES, st.integers(0, 40))
def test_each_participant_is_reached_once(hosts: list[int], degree: int, most_direct: int) -> None:
    tree = build(hosts, 0, most_direct=most_direct, degree=degree)
    assert reached(tree) == Counter(range(len(hosts)))


@CALM
@given(_HOSTS, _DEGREES)
def test_only_relays_get_something_from_another_host(hosts: list[int], degree: int) -> None:
    tree = build(hosts, 0, most_direct=0, degree=degree)
    crossing = [
        hosts[at] for at, parent in enumerate(tree.parents) if hosts[at] != (0 if parent < 0 else hosts[parent])
    ]
    assert sorted(crossing) == sorted({*hosts} - {0})
    here = [at for at, host in enumerate(hosts) if host == 0]
    assert all(tree.parents[at] == CONTROLLER for at in here)


@CALM
@given(_HOSTS, _DEGREES)
def test_nobody_sends_to_many_and_the_tree_is_flat(hosts: list[int], degree: int) -> None:
    tree = build(hosts, 0, most_direct=0, degree=degree)
    here = hosts.count(0)
    for sender, below in children(tree).items():
        assert len(below) <= (degree + here if sender == CONTROLLER else 2 * degree)
    assert (
        tree.depth
        <= bound(len({*hosts} - {0}), degree) + bound(max(Counter(hosts).values(), default=1) - 1, degree) + 1
    )


def bound(nodes: int, degree: int) -> int:
    """The levels below the root that a complete tree needs for as many nodes."""
    levels = 0
    width = 1
    while nodes > 0:
        width *= degree
        nodes -= width
        levels += 1
    return levels


@CALM
@given(_HOSTS, _DEGREES, st.data())
def test_whoever_is_lost_all_others_are_reached_once(hosts: list[int], degree: int, data: st.DataObject) -> None:
    tree = build(hosts, 0, most_direct=0, degree=degree)
    lost = data.draw(st.frozensets(st.sampled_from(range(len(hosts))))) if hosts else frozenset()
    assert reached(tree, lost, tree.cut_off(lost)) == Counter({*range(len(hosts))} - lost)


@pytest.mark.parametrize("world", [1, MOST_DIRECT, MOST_DIRECT + 1])
def test_few_hear_from_the_controller_themselves(world: int) -> None:
    tree = build([at % 4 for at in range(world)], 0)
    assert (tree.depth == 1) == (world <= MOST_DIRECT)


def test_a_tree_has_a_degree() -> None:
    with pytest.raises(ValueError, match="degree 0"):
        build([0], 0, degree=0)


@CALM
@given(_HOSTS, _DEGREES, st.data())
def test_each_message_has_equal_programs_once(hosts: list[int], degree: int, data: st.DataObject) -> None:
    programs = [data.draw(st.sampled_from([b"p" * 10, b"q" * 10, b"r" * 700])) for _ in hosts]
    tree = build(hosts, 0, most_direct=0, degree=degree)
    expected: dict[int, Sent] = {}
    for at, parent in enumerate(tree.parents):
        inside = [one for one in range(len(hosts)) if one == at or at in tree.above(one)]
        nbytes = sum(map(len, {programs[one] for one in inside})) + len(inside) * 3
        before = expected.get(parent, Sent(0, 0))
        places = PLACE_NBYTES * len(inside) if len(inside) > 1 else 0
        expected[parent] = Sent(before.messages + 1, before.nbytes + nbytes + places)
    assert tree.sent(programs, [3] * len(hosts)) == expected


@pytest.mark.parametrize("name", SHAPES)
def test_1024_ranks(name: str) -> None:
    hosts, controller_host, depth, messages = SHAPES[name]
    assert len(hosts) == 1024
    of = membership(hosts)
    made = plan([request(OpKind.ALLREDUCE, of)], [of], staging=STAGING_NBYTES)
    programs = [encode_program(made.program(at)) for at in range(1024)]
    own = [len(encode_order(Ticket(1, 0), [], b"")) + KEY_NBYTES * len(made.sources(at)) for at in range(1024)]
    tree = build(hosts, controller_host)
    sent = tree.sent(programs, own)
    direct = sum(map(len, programs)) + sum(own)

    assert tree.depth == depth
    assert sent[CONTROLLER].messages == messages
    assert sum(one.messages for one in sent.values()) == 1024  # each hears once
    assert all(one.messages <= 2 * DEGREE for at, one in sent.items() if at != CONTROLLER)
    # A program of an allreduce names its rank, so no two are equal: a message for several saves none of their bytes
    assert len(set(programs)) == 1024
    below = children(tree)
    alone = sum(at not in below for at in below[CONTROLLER])
    assert sent[CONTROLLER].nbytes == direct + PLACE_NBYTES * (1024 - alone)
