"""The codec of frozen values, over all that travels by it: what was written is read, and nothing else is."""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import types
import typing
from collections.abc import Callable
from typing import Annotated, Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raycollect.backends.gloo import communicator as gloo
from raycollect.backends.nccl import group as nccl_group
from raycollect.backends.nccl import ipc_memory
from raycollect.backends.shm import directory as shm_directory
from raycollect.backends.shm import segment as shm_segment
from raycollect.backends.tcp import join as tcp_join
from raycollect.captured import install
from raycollect.core import call_tokens, codec
from raycollect.core.codec import Codec
from raycollect.core.model import TENSOR, Structure, TensorInfo
from raycollect.core.placement import Placement
from raycollect.engine import agreement, batch_agreement, step_program
from raycollect.engine.agreement import Side, Spec
from raycollect.errors import ProtocolError, RaycollectError
from raycollect.group import bootstrap, bootstrap_store, cluster_registry
from raycollect.observe import trace
from raycollect.planner import layout, wire
from raycollect.planner.layout import ITEMSIZES, Layout, Region, Regions
from raycollect.planner.program import Domain
from raycollect.planner.reshard import halves
from raycollect.pos import handle
from raycollect.weights import directory

MODULES = (
    agreement,
    batch_agreement,
    bootstrap,
    bootstrap_store,
    call_tokens,
    cluster_registry,
    directory,
    gloo,
    handle,
    install,
    ipc_memory,
    nccl_group,
    layout,
    halves,
    shm_directory,
    shm_segment,
    step_program,
    tcp_join,
    trace,
    wire,
)
CODECS = {one._what: one for m in MODULES for one in vars(m).values() if type(one) is Codec}

_LEAVES = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=9) | st.binary(max_size=30)
_PLAIN: st.SearchStrategy[Any] = st.recursive(
    _LEAVES | st.floats(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
_SCALARS: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(-(2**63), 2**63 - 1),
    str: st.text(max_size=8),
    bytes: st.binary(max_size=8),
    bool: st.booleans(),
    float: st.floats(allow_nan=False),
    type(None): st.none(),
}
_INDEX = st.integers(0, 4)
_STRUCTURES: st.SearchStrategy[Structure] = st.recursive(
    st.just(TENSOR),
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3).map(lambda items: Structure("list", (), tuple(items)))
        | st.lists(inner, min_size=1, max_size=1).map(lambda items: Structure("dict", ("a",), tuple(items)))
    ),
    max_leaves=4,
)


@st.composite
def _regions(draw: st.DrawFn) -> Regions:
    count = draw(st.integers(1, 3))
    return Regions(count, 1, tuple(Region(rank=r, box=((r, r + 1), (0, 2)), at=(0, 0)) for r in range(count)))


@st.composite
def _sides(draw: st.DrawFn) -> Side:
    structure = draw(_STRUCTURES)
    infos = draw(st.lists(_of(TensorInfo), min_size=structure.count, max_size=structure.count))
    return Side(structure=structure, tensors=tuple(infos), loose=draw(st.booleans()))


def _of(hint: Any) -> st.SearchStrategy[Any]:
    """Values of an annotation."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint in _SCALARS:
        return _SCALARS[hint]
    if hint in _CHECKED:
        return _CHECKED[hint]()
    if origin is Annotated:
        among = args[1] if isinstance(args[1], (tuple, range)) and not isinstance(args[1], codec.Form) else None
        return _of(args[0]) if among is None else st.sampled_from(among)
    if origin is tuple and args[1:] == (Ellipsis,):
        least = int(args[0] is Domain)  # a share has one, or is refused
        return st.lists(_of(args[0]), min_size=least, max_size=2).map(tuple)
    if origin is tuple:
        return st.tuples(*map(_of, args))
    if origin in (dict, collections.abc.Mapping):
        return st.dictionaries(_of(args[0]), _of(args[1]), max_size=2)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*map(_of, args))
    if hasattr(hint, "__supertype__"):
        return _of(hint.__supertype__)
    if issubclass(hint, enum.Enum):
        return st.sampled_from(hint)
    return st.builds(hint, **{name: _of(one) for name, one in codec._annotations(hint).items()})


def _placements() -> st.SearchStrategy[Placement]:
    cuts = _of(typing.get_type_hints(Placement)["cuts"])
    return cuts.map(
        lambda some: Placement(shape=(4, 2), dtype="int8", mesh=(1,) * len(some), ranks=(0, 1), at=1, cuts=some)
    )


_CHECKED: dict[Any, Callable[[], st.SearchStrategy[Any]]] = {
    Side: _sides,
    Spec: lambda: st.builds(Spec, op=st.just("reduce"), gives=_sides() | st.none(), root=_INDEX),
    Structure: lambda: _STRUCTURES,
    Placement: _placements,
    Layout: lambda: st.builds(
        Layout,
        shape=st.just((3, 2)),
        dtype=st.sampled_from(sorted(ITEMSIZES)),
        regions=_regions(),
        key=st.text(max_size=3),
        converts=st.booleans(),
        said=st.text(max_size=3),
    ),
}
"""The classes that do not take every value of their fields."""


def _values(one: Codec[Any]) -> st.SearchStrategy[Any]:
    return _of(one._hint)


def test_the_list_is_whole() -> None:
    assert sorted(CODECS) == [
        "address of a rank",
        "answer to an offer",
        "arrival",
        "arrivals",
        "capture",
        "captured step",
        "half of a reshard",
        "holder of tensors",
        "layout",
        "layouts",
        "listing",
        "listing of GPU memory",
        "member's word",
        "name of a library",
        "offer of a segment",
        "place of a GPU",
        "program",
        "record of a group",
        "record of a holder",
        "record of a version",
        "record of rank 0",
        "spans",
        "tensors of a handle",
        "token",
    ]


def _refuses_or_reads(one: Codec[Any], data: bytes, value: Any) -> None:
    """Reads bytes that may be anything: a typed refusal, or a value that can be written again."""
    try:
        found = one.decode(data)
    except RaycollectError:
        return
    assert type(found) is type(value)
    again = one.decode(one.encode(found))
    assert again == found or repr(again) == repr(found)  # not a number


@pytest.mark.parametrize("name", CODECS)
def test_values_survive_and_all_mutations_of_their_bytes_are_refused_or_read(name: str) -> None:
    one = CODECS[name]

    @settings(max_examples=25)
    @given(_values(one), st.data())
    def survives(value: Any, data: st.DataObject) -> None:
        packed = one.encode(value)
        found = one.decode(packed)
        assert found == value
        assert type(found) is type(value)
        if name not in ("layouts", "record of a version", "spans"):  # they have dicts
            assert hash(found) == hash(value), "values are hashable: tuples, not lists"
        for cut in range(len(packed)):
            with pytest.raises(RaycollectError):
                one.decode(packed[:cut])
        with pytest.raises(ProtocolError):
            one.decode(packed + b"\x00")
        for _ in range(4):
            changed = bytearray(packed)
            changed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
            _refuses_or_reads(one, bytes(changed), value)
        plain = msgpack.unpackb(packed)
        _refuses_or_reads(one, msgpack.packb(_changed(plain, data)), value)

    survives()


def _changed(plain: Any, data: st.DataObject) -> Any:
    """The same with one item, at any depth, of another value, or left out, or there twice."""
    if not isinstance(plain, list) or not plain or data.draw(st.integers(0, 3)) == 0:
        return data.draw(_PLAIN)
    at = data.draw(st.integers(0, len(plain) - 1))
    how = data.draw(st.integers(0, 5))
    if how == 0:
        return plain[:at] + plain[at + 1 :]
    return [*plain[:at], *([plain[at]] if how == 1 else []), _changed(plain[at], data), *plain[at + 1 :]]


@pytest.mark.parametrize("name", CODECS)
def test_anything_else_is_a_typed_refusal(name: str) -> None:
    one = CODECS[name]

    @settings(max_examples=60)
    @given(st.binary(max_size=200) | _PLAIN.map(msgpack.packb))
    def refuses(data: bytes) -> None:
        try:
            packed = one.encode(one.decode(data))  # by chance it may be a short value, such as two numbers
        except RaycollectError:
            return
        assert one.encode(one.decode(packed)) == packed

    refuses()
    for data in (b"", b"\xc1", b"\xc1junk", b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\x91" * 5000, b"\x80"):
        with pytest.raises(ProtocolError):
            one.decode(data)


class _Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass(frozen=True)
class _Sample:
    number: Annotated[int, range(3)]
    colour: _Colour
    some: float | None = None
    either: int | str = 0


_SAMPLES = Codec[_Sample](_Sample, "sample")


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ([3, 1, None, 0], "'3' is not possible"),
        ([-1, 1, None, 0], "'-1' is not possible"),
        ([True, 1, None, 0], "bool, expected int"),
        ([1, True, None, 0], "'True' is no _Colour"),
        ([1, 2, None, 0], "'2' is no _Colour"),
        ([1, {}, None, 0], "unhashable"),
        ([1, 1, "x", 0], "str, expected float"),
        ([1, 1, None, b"x"], "bytes, expected int or str"),
        ([1, 1, None], "not enough values"),
        ([1, 1, None, 0, 0], "too many values"),
        ("abcd", "str, expected list"),
    ],
)
def test_what_a_field_may_not_have_is_told(fields: Any, why: str) -> None:
    with pytest.raises(ProtocolError, match=f"malformed sample: {why}"):
        _SAMPLES.decode(msgpack.packb(fields))
    assert _SAMPLES.decode(msgpack.packb([2, 1, 3, "x"])) == _Sample(2, _Colour.RED, 3.0, "x")


def test_what_has_no_form_on_the_wire_is_found_at_first_use() -> None:
    with pytest.raises(TypeError, match="no wire form"):
        Codec[Any](set[int], "set").decode(b"\x90")


def test_what_values_have_in_common_is_written_once() -> None:
    """Found by identity: to compare what is large would take longer than to write it."""
    written: list[int] = []
    form = codec.Form(write=lambda one: (written.append(one), one)[1], read=lambda one: one)
    hint = tuple[int, Annotated[tuple[Annotated[int, form], ...], codec.ONCE]]
    one, common = Codec[Any](hint, "value"), (7, 8)
    packed = one.encode_all({"a": (1, common), "b": (2, common), "c": (3, tuple(range(7, 9)))})
    assert written == [7, 8] * 2
    assert [one.decode(data) for data in packed.values()] == [(number, common) for number in (1, 2, 3)]
    assert one.encode((1, common)) == packed["a"]
    assert written == [7, 8] * 3, "nothing is kept between calls"
