"""The door: what ranks must agree on, who is named when they don't, and who may come when."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import msgpack
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from raycollect.door import (
    _NEXT,
    Arrival,
    Door,
    DoorState,
    Spec,
    decide,
    decode_arrival,
    encode_arrival,
)
from raycollect.errors import REFUSALS, InternalError, ProtocolError, Violation
from raycollect.model import TensorInfo

CALM = settings(deadline=None)  # the machine's load is none of these tests' business

INFO = TensorInfo(shape=(2, 3), dtype="float32", itemsize=4)
SPEC = Spec(op="allreduce", reduce_op="SUM", root=-1, structure="tensor", tensors=(INFO,))
DICT = replace(SPEC, structure="dict", names=("a", "b"), tensors=(INFO, INFO))


def _decide(*specs: Spec) -> tuple[Violation, ...]:
    return decide(range(len(specs)), [Arrival(spec=spec) for spec in specs])


def _named(violations: tuple[Violation, ...]) -> list[tuple[int, str, str, str]]:
    return [(v.rank, v.field, v.found, v.expected) for v in violations]


# ---------------------------------------------------------------------------------------------- verdict


@pytest.mark.parametrize("world", range(1, 9))
@pytest.mark.parametrize("spec", [SPEC, DICT, replace(SPEC, tensors=None, structure="")])
def test_equal_arrivals_open_the_door(world: int, spec: Spec) -> None:
    assert _decide(*[spec] * world) == ()


ODD: dict[str, tuple[Spec, Spec, list[tuple[str, str, str]]]] = {
    "op": (SPEC, replace(SPEC, op="broadcast"), [("op", "broadcast", "allreduce")]),
    "reduce op": (SPEC, replace(SPEC, reduce_op="MAX"), [("reduce op", "MAX", "SUM")]),
    "root": (replace(SPEC, root=0), replace(SPEC, root=2), [("root", "2", "0")]),
    "shape": (SPEC, replace(SPEC, tensors=(replace(INFO, shape=(3, 2)),)), [("shape", "[3, 2]", "[2, 3]")]),
    "no dimensions": (SPEC, replace(SPEC, tensors=(replace(INFO, shape=()),)), [("shape", "[]", "[2, 3]")]),
    "dtype": (
        SPEC,
        replace(SPEC, tensors=(replace(INFO, dtype="int32"),)),
        [("dtype", "int32", "float32")],
    ),
    "device": (SPEC, replace(SPEC, tensors=(replace(INFO, device="cuda:1"),)), [("device", "cuda", "cpu")]),
    "structure": (
        replace(SPEC, structure="list"),
        replace(SPEC, structure="tuple"),
        [("structure", "tuple", "list")],
    ),
    "two of the fields of one rank": (
        SPEC,
        replace(SPEC, tensors=(replace(INFO, dtype="int8", shape=(9,)),)),
        [("dtype", "int8", "float32"), ("shape", "[9]", "[2, 3]")],
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_the_odd_rank_alone_is_named_with_what_it_has_and_what_was_expected(name: str) -> None:
    common, odd, expected = ODD[name]
    for world in (3, 4, 8):
        for rank in range(world):
            specs = [odd if r == rank else common for r in range(world)]
            violations = _decide(*specs)
            assert _named(violations) == [(rank, *fields) for fields in expected]
            assert {v.kind for v in violations} == {"mismatch"}


def test_names_of_a_dict_are_compared_in_order() -> None:
    for names in (("a", "c"), ("b", "a")):
        (violation,) = _decide(DICT, replace(DICT, names=names), DICT)
        assert (violation.rank, violation.field) == (1, "names")
        for name in names:
            assert name in violation.found


def test_a_name_is_not_its_number() -> None:
    one = replace(DICT, names=("1",), tensors=(INFO,))
    (violation,) = _decide(one, replace(one, names=(1,)), one)
    assert (violation.rank, violation.field) == (1, "names")
    assert violation.found != violation.expected


def test_another_count_of_tensors_is_named() -> None:
    lists = replace(SPEC, structure="list", tensors=(INFO, INFO))
    violations = _decide(lists, lists, replace(lists, tensors=(INFO,)))
    assert (2, "tensor count", "1", "2") in _named(violations)
    assert {v.rank for v in violations} == {2}


def test_a_tensor_among_lists_is_named() -> None:
    lists = replace(SPEC, structure="list")
    assert (0, "structure", "tensor", "list") in _named(_decide(SPEC, lists, lists))


@pytest.mark.parametrize("count", [2, 100, 1000])
def test_a_difference_deep_in_a_long_list_is_seen_and_shown(count: int) -> None:
    """Texts are shortened for people; the comparison isn't."""
    common = replace(SPEC, structure="list", tensors=(INFO,) * count)
    for at in {0, count // 2, count - 1}:
        tensors = [INFO] * count
        tensors[at] = replace(INFO, shape=(77,))
        (violation,) = _decide(common, replace(common, tensors=tuple(tensors)), common)
        assert (violation.rank, violation.field) == (1, "shape")
        assert "77" in violation.found
        assert "77" not in violation.expected
        assert len(violation.found) < 600
        assert len(violation.expected) < 600


def test_most_ranks_are_right() -> None:
    wide = replace(SPEC, tensors=(replace(INFO, shape=(9,)),))
    assert [v.rank for v in _decide(wide, SPEC, SPEC, wide, SPEC)] == [0, 3]
    assert [v.rank for v in _decide(wide, SPEC, wide, wide, SPEC)] == [1, 4]


def test_where_no_most_exist_the_lowest_rank_is_right() -> None:
    wide = replace(SPEC, tensors=(replace(INFO, shape=(9,)),))
    assert _named(_decide(SPEC, wide)) == [(1, "shape", "[9]", "[2, 3]")]
    assert _named(_decide(wide, SPEC)) == [(1, "shape", "[2, 3]", "[9]")]
    assert [v.rank for v in _decide(wide, SPEC, SPEC, wide)] == [1, 2]


def test_each_field_has_its_own_majority() -> None:
    violations = _decide(replace(SPEC, reduce_op="MIN"), replace(SPEC, root=4), SPEC)
    assert _named(violations) == [(0, "reduce op", "MIN", "SUM"), (1, "root", "4", "-1")]


def test_a_rank_that_takes_what_comes_agrees_with_all() -> None:
    learner = Spec(op="allreduce", reduce_op="SUM")
    assert _decide(DICT, learner) == ()
    assert _decide(learner, DICT, DICT) == ()
    violations = _decide(learner, replace(DICT, op="send"))
    assert [v.field for v in violations] == ["op"], "but on the operation it has to agree"


FREED = Violation(kind="freed", rank=1, field="operand", found="freed")
DIRTY = Violation(kind="dirty", rank=2, field="operand", found="half-written")


def test_what_ranks_found_themselves_comes_first() -> None:
    wide = replace(SPEC, tensors=(replace(INFO, shape=(9,)),))
    absent = replace(SPEC, structure="", tensors=None)
    arrivals = [
        Arrival(spec=SPEC),
        Arrival(spec=absent, violations=(FREED,)),
        Arrival(spec=SPEC, violations=(DIRTY,)),
        Arrival(spec=wide),
    ]
    violations = decide((0, 1, 2, 3), arrivals)
    assert violations[:2] == (FREED, DIRTY)
    assert _named(violations[2:]) == [(3, "shape", "[9]", "[2, 3]")]


def test_a_rank_without_operand_is_not_compared() -> None:
    """It could not say what it has: calling that a mismatch would hide what is wrong."""
    for op, root in (("allreduce", -1), ("", -1), ("broadcast", 3)):
        absent = Arrival(spec=Spec(op=op, root=root), violations=(FREED,))
        assert decide((0, 1, 2), [Arrival(spec=SPEC), absent, Arrival(spec=SPEC)]) == (FREED,)


def test_a_rank_without_operand_has_no_vote() -> None:
    absent = Arrival(spec=Spec(op="other"), violations=(FREED,))
    arrivals = [Arrival(spec=SPEC), absent, absent, absent, Arrival(spec=replace(SPEC, op="broadcast"))]
    assert [v.rank for v in decide(range(5), arrivals) if v.field == "op"] == [4]


def test_ranks_are_named_by_rank_not_by_position() -> None:
    arrivals = [Arrival(spec=SPEC), Arrival(spec=SPEC), Arrival(spec=replace(SPEC, root=1))]
    assert [v.rank for v in decide((2, 5, 9), arrivals)] == [9]


def test_an_arrival_too_few_is_no_verdict() -> None:
    with pytest.raises(ValueError, match="shorter"):
        decide((0, 1, 2), [Arrival(spec=SPEC)] * 2)


@pytest.mark.parametrize("seed", range(20))
def test_exactly_those_who_differ_from_the_majority_are_named(seed: int) -> None:
    rng = random.Random(seed)
    world = rng.randint(3, 9)
    odd = set(rng.sample(range(world), (world - 1) // 2))
    changed = replace(SPEC, tensors=(replace(INFO, shape=(seed + 4,)),))
    violations = _decide(*[changed if rank in odd else SPEC for rank in range(world)])
    assert {v.rank for v in violations} == odd


# ---------------------------------------------------------------------------------------------- bytes

_TEXT = st.text(max_size=10)
_INFOS = st.builds(
    TensorInfo,
    shape=st.lists(st.integers(0, 2**40), max_size=4).map(tuple),
    dtype=st.text(min_size=1, max_size=10),
    itemsize=st.integers(1, 32),
    device=st.sampled_from(["cpu", "cuda:0"]),
)
_SPECS = st.builds(
    Spec,
    op=_TEXT,
    reduce_op=_TEXT,
    root=st.integers(-1, 100),
    structure=_TEXT,
    names=st.lists(_TEXT | st.integers(-9, 9), max_size=4).map(tuple),
    tensors=st.none() | st.lists(_INFOS, max_size=4).map(tuple),
)
_VIOLATIONS = st.builds(
    Violation,
    kind=st.sampled_from(sorted(REFUSALS)),
    rank=st.integers(-1, 100),
    field=_TEXT,
    found=_TEXT,
    expected=_TEXT,
    actor=_TEXT,
    ref=_TEXT,
)
_ARRIVALS = st.builds(Arrival, spec=_SPECS, violations=st.lists(_VIOLATIONS, max_size=3).map(tuple))


@CALM
@given(_ARRIVALS)
def test_an_arrival_survives_the_wire(arrival: Arrival) -> None:
    assert decode_arrival(encode_arrival(arrival)) == arrival


@CALM
@given(st.lists(_ARRIVALS, min_size=1, max_size=5))
def test_the_verdict_refuses_if_and_only_if_there_is_a_reason(arrivals: list[Arrival]) -> None:
    violations = decide(range(len(arrivals)), arrivals)
    own = [v for arrival in arrivals for v in arrival.violations]
    assert list(violations[: len(own)]) == own
    assert all(v.kind == "mismatch" and v.found != v.expected for v in violations[len(own) :])
    able = {a.spec for a in arrivals if not (a.violations and a.spec.tensors is None)}
    if len(able) == 1:
        assert violations == tuple(own)
    if len({(spec.op, spec.reduce_op, spec.root) for spec in able}) > 1:
        assert len(violations) > len(own)
    with_tensors = {spec.tensors and tuple((t.shape, t.dtype) for t in spec.tensors) for spec in able} - {None}
    if len(with_tensors) > 1:
        assert len(violations) > len(own)


@CALM
@given(st.binary(max_size=200))
@example(b"\x80")
@example(b"\x90")
@example(b"\xc0")
def test_junk_is_a_protocol_error(junk: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_arrival(junk)


_LEAVES = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | _TEXT | st.binary(max_size=9)
_PLAIN: st.SearchStrategy[Any] = st.recursive(
    _LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_TEXT, inner, max_size=3)
)
_VALUES = msgpack.unpackb(encode_arrival(Arrival(spec=DICT, violations=(FREED,))))


@CALM
@given(at=st.integers(0, 6), value=_PLAIN)
def test_a_field_of_any_other_value_gives_an_arrival_or_a_protocol_error(at: int, value: Any) -> None:
    values = [*_VALUES[:at], value, *_VALUES[at + 1 :]]
    try:
        assert isinstance(decode_arrival(msgpack.packb(values)), Arrival)
    except ProtocolError:
        pass


def test_an_arrival_cut_short_is_a_protocol_error() -> None:
    data = encode_arrival(Arrival(spec=DICT, violations=(FREED,)))
    for cut in range(len(data)):
        with pytest.raises(ProtocolError):
            decode_arrival(data[:cut])


# ---------------------------------------------------------------------------------------------- gathering


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("world", range(1, 9))
def test_the_last_rank_completes_the_door_in_any_order(world: int, seed: int) -> None:
    ranks = sorted(random.Random(seed).sample(range(20), world))
    order = random.Random(seed + 1).sample(ranks, world)
    door = Door(ranks)
    for at, rank in enumerate(order):
        assert door.missing == tuple(r for r in ranks if r not in order[:at])
        state = door.arrive(rank, bytes([rank]))
        assert state is door.state
        assert state is (DoorState.COMPLETE if at == world - 1 else DoorState.OPEN)
    assert door.missing == ()
    assert door.blobs == tuple(bytes([rank]) for rank in ranks), "in the order of the ranks, not of their coming"


def test_blobs_of_a_door_that_is_not_complete_are_our_bug() -> None:
    door = Door((0, 1))
    door.arrive(1, b"")
    with pytest.raises(InternalError, match=r"open, ranks \(0,\) are missing"):
        _ = door.blobs
    door.abort()
    with pytest.raises(InternalError, match="aborted"):
        _ = door.blobs


def test_coming_twice_is_a_protocol_error_and_changes_nothing() -> None:
    door = Door((0, 1))
    door.arrive(0, b"first")
    with pytest.raises(ProtocolError, match="rank 0 came to the door twice"):
        door.arrive(0, b"second")
    assert door.arrive(1, b"other") is DoorState.COMPLETE
    assert door.blobs == (b"first", b"other")
    with pytest.raises(ProtocolError, match="twice"):
        door.arrive(1, b"again")


@pytest.mark.parametrize("rank", [-1, 1, 3, 99])
def test_a_stranger_is_a_protocol_error(rank: int) -> None:
    door = Door((0, 2))
    with pytest.raises(ProtocolError, match=rf"rank {rank} has no part"):
        door.arrive(rank, b"")
    assert door.missing == (0, 2)


def test_an_aborted_door_never_completes() -> None:
    door = Door((0, 1, 2))
    door.arrive(0, b"")
    assert door.abort() is DoorState.ABORTED
    assert door.arrive(1, b"") is DoorState.ABORTED
    assert door.arrive(2, b"") is DoorState.ABORTED
    assert door.abort() is DoorState.ABORTED
    assert door.missing == ()


def test_a_complete_door_is_not_aborted() -> None:
    door = Door((0,))
    door.arrive(0, b"x")
    assert door.abort() is DoorState.COMPLETE
    assert door.blobs == (b"x",)


def test_every_move_of_the_table_and_no_other_is_legal() -> None:
    for state in DoorState:
        for event in ("arrive", "last", "abort"):
            door = Door((0,))
            door.state = state
            if (state, event) in _NEXT:
                assert door._move(event) is _NEXT[state, event]
            else:
                with pytest.raises(ProtocolError, match=state.value):
                    door._move(event)
                assert door.state is state
    assert {key for key in _NEXT if key[0] is DoorState.COMPLETE} == {(DoorState.COMPLETE, "abort")}
