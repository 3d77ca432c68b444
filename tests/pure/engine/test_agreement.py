"""The consistency check: what ranks must agree on, who is named when they don't, and who may come when."""

from __future__ import annotations

import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycollect.core.codec import MOST_NBYTES
from raycollect.core.model import TENSOR, OpKind, Structure, TensorInfo
from raycollect.engine.agreement import Arrival, Side, Spec, decide, decode_arrival, encode_arrival, judge
from raycollect.errors import REFUSALS, ProtocolError, Violation
from tests.support.values import replace

INFO = TensorInfo(shape=(2, 3), dtype="float32", itemsize=4)


def _one(*infos: TensorInfo, loose: bool = False) -> Side:
    """One tensor."""
    return Side(structure=TENSOR, tensors=infos or (INFO,), loose=loose)


def _list(*infos: TensorInfo, kind: str = "list", names: tuple[str | int, ...] = (), loose: bool = False) -> Side:
    """A list, tuple or dict of tensors."""
    return Side(structure=Structure(kind, names, (TENSOR,) * len(infos)), tensors=infos, loose=loose)


SPEC = Spec(op="allreduce", reduce_op="SUM", root=-1, gives=_one())
LIST = replace(SPEC, gives=_list(INFO, INFO))


def _dict(*names: str | int) -> Spec:
    """An allreduce of a dict of two tensors."""
    return replace(SPEC, gives=_list(INFO, INFO, kind="dict", names=names))


DICT = _dict("a", "b")


def _with(**changes: Any) -> Spec:
    """An allreduce of another tensor."""
    return replace(SPEC, gives=_one(replace(INFO, **changes)))


def _decide(*specs: Spec) -> tuple[Violation, ...]:
    return decide(range(len(specs)), [Arrival(spec=spec) for spec in specs])


def _named(violations: tuple[Violation, ...]) -> list[tuple[int, str, str, str]]:
    return [(v.rank, v.field, v.found, v.expected) for v in violations]


# ---------------------------------------------------------------------------------------------- verdict


def test_the_library_of_a_tensor_need_not_be_the_same() -> None:
    assert _decide(SPEC, _with(library="torch"), SPEC) == ()


ODD: dict[str, tuple[Spec, Spec, list[tuple[str, str, str]]]] = {
    "op": (SPEC, replace(SPEC, op="broadcast"), [("op", "broadcast", "allreduce")]),
    "a send among barriers": (
        Spec(op="barrier"),
        Spec(op="send", root=0),
        [("op", "send", "barrier"), ("root", "0", "none")],
    ),
    "reduce op": (SPEC, replace(SPEC, reduce_op="MAX"), [("reduce op", "MAX", "SUM")]),
    "root": (replace(SPEC, root=0), replace(SPEC, root=2), [("root", "2", "0")]),
    "call": (SPEC, replace(SPEC, caller="call"), [("call", "an imperative call", "a plan")]),
    "shape": (SPEC, _with(shape=(3, 2)), [("shape", "[3, 2]", "[2, 3]")]),
    "no dimensions": (SPEC, _with(shape=()), [("shape", "[]", "[2, 3]")]),
    "dtype": (SPEC, _with(dtype="int32"), [("dtype", "int32", "float32")]),
    "device": (
        replace(SPEC, one_device=True),
        replace(_with(device="cuda:1"), one_device=True),
        [("device", "cuda", "cpu")],
    ),
    "structure": (
        LIST,
        replace(SPEC, gives=_list(INFO, INFO, kind="tuple")),
        [("structure", "tuple[2]", "list[2]")],
    ),
    "names of a dict": (DICT, _dict("a", "c"), [("structure", "dict['a', 'c']", "dict['a', 'b']")]),
    "names of a dict in another order": (DICT, _dict("b", "a"), [("structure", "dict['b', 'a']", "dict['a', 'b']")]),
    "a name that is a number": (DICT, _dict("a", 1), [("structure", "dict['a', 1]", "dict['a', 'b']")]),
    "two of the fields of one rank": (
        SPEC,
        _with(dtype="int8", shape=(9,)),
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


@pytest.mark.parametrize("count", [2, 100, 1000])
def test_a_difference_deep_in_a_long_list_is_seen_and_shown(count: int) -> None:
    """Texts are shortened for people; the comparison isn't."""
    common = replace(SPEC, gives=_list(*[INFO] * count))
    for at in {0, count // 2, count - 1}:
        tensors = [INFO] * count
        tensors[at] = replace(INFO, shape=(77,))
        (violation,) = _decide(common, replace(common, gives=_list(*tensors)), common)
        assert (violation.rank, violation.field) == (1, "shape")
        assert "77" in violation.found
        assert "77" not in violation.expected
        assert len(violation.found) < 600
        assert len(violation.expected) < 600


def test_most_ranks_are_right() -> None:
    wide = _with(shape=(9,))
    assert [v.rank for v in _decide(wide, SPEC, SPEC, wide, SPEC)] == [0, 3]
    assert [v.rank for v in _decide(wide, SPEC, wide, wide, SPEC)] == [1, 4]


def test_where_no_most_exist_the_lowest_rank_is_right() -> None:
    wide = _with(shape=(9,))
    assert _named(_decide(SPEC, wide)) == [(1, "shape", "[9]", "[2, 3]")]
    assert _named(_decide(wide, SPEC)) == [(1, "shape", "[2, 3]", "[9]")]
    assert [v.rank for v in _decide(wide, SPEC, SPEC, wide)] == [1, 2]


def test_each_field_has_its_own_majority() -> None:
    violations = _decide(replace(SPEC, reduce_op="MIN"), replace(SPEC, root=4), SPEC)
    assert _named(violations) == [(0, "reduce op", "MIN", "SUM"), (1, "root", "4", "none")]


FREED = Violation(kind="freed", rank=1, field="operand", found="freed")
DIRTY = Violation(kind="dirty", rank=2, field="operand", found="half-written")


def test_what_ranks_found_themselves_comes_first() -> None:
    wide = _with(shape=(9,))
    absent = replace(SPEC, gives=None)
    arrivals = [
        Arrival(spec=SPEC),
        Arrival(spec=absent, violations=(FREED,)),
        Arrival(spec=SPEC, violations=(DIRTY,)),
        Arrival(spec=wide),
    ]
    violations = decide((0, 1, 2, 3), arrivals)
    assert violations[:2] == (FREED, DIRTY)
    assert _named(violations[2:]) == [(3, "shape", "[9]", "[2, 3]")]


def test_ranks_are_named_by_rank_not_by_position() -> None:
    arrivals = [Arrival(spec=SPEC), Arrival(spec=SPEC), Arrival(spec=replace(SPEC, root=1))]
    assert [v.rank for v in decide((2, 5, 9), arrivals)] == [9]


def test_an_arrival_too_few_is_no_verdict() -> None:
    with pytest.raises(ValueError, match="shorter"):
        decide((0, 1, 2), [Arrival(spec=SPEC)] * 2)


# ---------------------------------------------------------------------------------------------- bytes

_TEXT = st.text(max_size=10)
_INFOS = st.builds(
    TensorInfo,
    shape=st.lists(st.integers(0, 2**40), max_size=4).map(tuple),
    dtype=st.text(min_size=1, max_size=10),
    itemsize=st.integers(1, 32),
    device=st.sampled_from(["cpu", "cuda:0"]),
    library=st.sampled_from(["numpy", "torch"]),
)
_STRUCTURES: st.SearchStrategy[Structure] = st.recursive(
    st.just(TENSOR),
    lambda inner: (
        st.builds(Structure, st.sampled_from(["list", "tuple"]), st.just(()), st.lists(inner, max_size=3).map(tuple))
        | st.dictionaries(_TEXT | st.integers(-9, 9), inner, max_size=3).map(
            lambda items: Structure("dict", tuple(items), tuple(items.values()))
        )
    ),
    max_leaves=5,
)


@st.composite
def _sides(draw: st.DrawFn) -> Side:
    structure = draw(_STRUCTURES)
    infos = draw(st.lists(_INFOS, min_size=structure.count, max_size=structure.count))
    return Side(structure=structure, tensors=tuple(infos), loose=draw(st.booleans()))


_SPECS = st.builds(
    Spec,
    op=st.sampled_from([kind.value for kind in OpKind]),
    caller=st.sampled_from(["plan", "call"]),
    reduce_op=_TEXT.filter(lambda text: text != "none"),  # so the verdict shows a call that has none
    root=st.integers(-1, 100),
    gives=st.none() | _sides(),
    takes=st.none() | _sides(),
    one_device=st.booleans(),
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


@given(st.lists(_ARRIVALS, min_size=1, max_size=4))
def test_whatever_arrives_is_judged_or_a_protocol_error(arrivals: list[Arrival]) -> None:
    """Sides of operations in pieces may have no piece for a rank."""
    try:
        verdict = judge(tuple(range(len(arrivals))), tuple(map(encode_arrival, arrivals)))
    except ProtocolError:
        return
    assert verdict.specs == tuple(arrival.spec for arrival in arrivals)
    assert bool(verdict.violations) >= any(arrival.violations for arrival in arrivals)


def _model(count: int) -> Arrival:
    """What a rank says of a model's tensors."""
    names = tuple(f"layers.{i}.attention.query.weight" for i in range(count))
    infos = [TensorInfo(shape=(i % 97, 4096), dtype="float32", itemsize=4) for i in range(count)]
    return Arrival(spec=Spec(op="allreduce", reduce_op="SUM", gives=_list(*infos, kind="dict", names=names)))


@pytest.mark.parametrize("count", [1, 50, 5000])
def test_thousands_of_tensors_fit_where_ranks_meet(count: int) -> None:
    arrival = _model(count)
    blob = encode_arrival(arrival)
    assert len(blob) < 32 * 1024
    assert decode_arrival(blob) == arrival


def test_changing_descriptions_of_many_tensors_are_not_kept() -> None:
    """A verdict is the same object as long as it is cached."""
    first, *others = [(encode_arrival(_model(4000 + change)),) for change in range(20)]
    verdict = judge((0,), first)
    assert judge((0,), first) is verdict
    for blobs in others:
        judge((0,), blobs)
    assert judge((0,), first) is not verdict


def test_what_unpacks_to_too_much_is_a_protocol_error() -> None:
    bomb = b"\xc1" + zlib.compress(bytes(MOST_NBYTES + 1))
    assert len(bomb) < 100_000
    for blob in (bomb, b"\xc1", b"\xc1junk", b"\xc1" + zlib.compress(b"junk"), encode_arrival(_model(500))[:-9]):
        with pytest.raises(ProtocolError):
            decode_arrival(blob)
