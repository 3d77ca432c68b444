"""All that travels, messages and other values: what was written is read, and nothing else is."""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import importlib
import random
import re
import types
import typing
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgpack
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import raycollect
from raycollect.channel import messages
from raycollect.channel.messages import MESSAGES, Done, Joined, Message
from raycollect.core.codec import MOST_NBYTES, Codec, Wire
from raycollect.core.model import TENSOR, GroupSpec, Structure, TensorInfo
from raycollect.core.operations import OPS
from raycollect.core.placement import Placement
from raycollect.engine.agreement import Side
from raycollect.errors import ProtocolError, RaycollectError

PACKAGE = Path(raycollect.__file__).parent
MODULES = [
    importlib.import_module(".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts))
    for path in sorted(PACKAGE.rglob("*.py"))
    if re.search(r"^\w+ = Codec\[", path.read_text(), re.MULTILINE)
]
"""The modules that have a codec."""


class Kind(NamedTuple):
    """One kind of values that travel."""

    hint: Any
    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]


KINDS = {
    codec._what: Kind(codec._hint, codec.encode, codec.decode)
    for m in MODULES
    for codec in vars(m).values()
    if type(codec) is Codec
}
KINDS |= {name: Kind(cls, messages.encode, messages.decode) for name, cls in MESSAGES.items()}

_TEXT, _BYTES = st.text(max_size=8), st.binary(max_size=30)
_PLAIN: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | _TEXT | _BYTES | st.floats(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_TEXT, inner, max_size=3),
    max_leaves=8,
)
_KNOWN: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(-(2**63), 2**63 - 1),
    str: _TEXT,
    bytes: _BYTES,
    bool: st.booleans(),
    float: st.floats(allow_nan=False),
    type(None): st.none(),
    Any: st.none() | _TEXT | st.booleans(),
    Structure: st.recursive(
        st.just(TENSOR),
        lambda inner: (
            st.lists(inner, min_size=1, max_size=3).map(lambda items: Structure("list", (), tuple(items)))
            | inner.map(lambda item: Structure("dict", ("a",), (item,)))
        ),
        max_leaves=4,
    ),
}
_FIELDS: dict[tuple[str, str], st.SearchStrategy[Any]] = {
    ("Spec", "op"): st.sampled_from(OPS),
    ("Spec", "caller"): st.just("call"),
    ("Share", "op"): st.sampled_from(OPS),
    ("GroupSpec", "world_size"): st.integers(1, 9),
    ("GroupSpec", "hosts"): st.just(()),
}
"""Fields that do not take every value of their type."""


@st.composite
def _sides(draw: st.DrawFn) -> Side:
    structure = draw(_KNOWN[Structure])
    infos = draw(st.lists(_of(TensorInfo), min_size=structure.count, max_size=structure.count))
    return Side(structure=structure, tensors=tuple(infos), loose=draw(st.booleans()))


def _placements() -> st.SearchStrategy[Placement]:
    return _of(typing.get_type_hints(Placement)["cuts"]).map(
        lambda cuts: Placement(shape=(4, 2), dtype="int8", mesh=(1,) * len(cuts), ranks=(0, 1), at=1, cuts=cuts)
    )


_MADE: dict[Any, Callable[[], st.SearchStrategy[Any]]] = {Side: _sides, Placement: _placements}


def _of(hint: Any) -> st.SearchStrategy[Any]:
    """Values of an annotation."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint in _KNOWN:
        return _KNOWN[hint]
    if hint in _MADE:
        return _MADE[hint]()
    if origin is Annotated:
        return _within(*args)
    if origin is list:
        return st.lists(_of(args[0]), max_size=2)
    if origin is tuple and args[1:] == (Ellipsis,):
        return st.lists(_of(args[0]), max_size=2).map(tuple)
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
    hints = typing.get_type_hints(hint, include_extras=True)
    if dataclasses.is_dataclass(hint):
        names = [field.name for field in dataclasses.fields(hint)]
    else:
        names = hint.__struct_fields__ if issubclass(hint, msgspec.Struct) else hint._fields
    return st.builds(
        hint,
        **{name: _FIELDS[key] if (key := (hint.__name__, name)) in _FIELDS else _of(hints[name]) for name in names},
    )


def _within(hint: type, bounds: msgspec.Meta) -> st.SearchStrategy[Any]:
    """Numbers in bounds, or text or bytes of a bounded length."""
    if hint is int:
        return st.integers(bounds.ge, (bounds.le or (bounds.lt or 2**40) - 1))
    make = {str: st.text, bytes: st.binary}[hint]
    return make(min_size=bounds.min_length or 0, max_size=min(bounds.max_length or 40, 40))


def test_the_list_is_whole() -> None:
    public = {
        name for name, member in vars(messages).items() if isinstance(member, type) and issubclass(member, Message)
    }
    assert set(MESSAGES) == public - {"Message"}
    assert len(KINDS) > len(MESSAGES) + 25


def _is_refused_or_read(kind: Kind, data: bytes) -> None:
    """Reads bytes that may be anything: a typed refusal, or a value that can be written again."""
    try:
        decoded = kind.decode(data)
    except RaycollectError:
        return
    again = kind.decode(kind.encode(decoded))
    assert again == decoded or repr(again) == repr(decoded)  # not a number


@pytest.mark.parametrize("name", KINDS)
def test_values_survive_and_all_mutations_of_their_bytes_are_refused_or_read(name: str) -> None:
    kind = KINDS[name]

    @settings(max_examples=8 if name in MESSAGES else 20)
    @given(_of(kind.hint), st.data())
    def survives(value: Any, data: st.DataObject) -> None:
        packed = kind.encode(value)
        decoded = kind.decode(packed)
        assert decoded == value
        assert type(decoded) is type(value)
        if name in ("program", "arrival", "tensors of a handle"):  # keys of caches
            assert hash(decoded) == hash(value), "values are hashable: tuples, not lists"
        for cut in range(len(packed)):
            with pytest.raises(RaycollectError):
                kind.decode(packed[:cut])
        with pytest.raises(ProtocolError):
            kind.decode(packed + b"\x00")
        for _ in range(4):
            changed = bytearray(packed)
            changed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
            _is_refused_or_read(kind, bytes(changed))
        head, body = (packed[:1], packed[1:]) if packed[0] < 0x20 else (b"", packed)  # a version goes before it
        plain = msgspec.msgpack.decode(body)
        _is_refused_or_read(kind, head + msgspec.msgpack.encode(_changed(plain, data)))

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


HOSTILE = (
    b"",
    b"\xc1",
    b"\xc1junk",
    b"\xdd\xff\xff\xff\xff",  # a list of 4 G items, none of them there
    b"\xdf\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\x91" * 5000,
    b"\x92" * 5000,
    b"\x81\x01" * 5000,
    msgpack.packb(msgpack.ExtType(5, b"x")),
    msgpack.packb(msgpack.Timestamp(1)),
    msgpack.packb({1: 2}),
    b"\xa1\xff",  # no UTF-8
)


@pytest.mark.parametrize("name", KINDS)
def test_anything_else_is_a_typed_refusal(name: str) -> None:
    kind = KINDS[name]

    @settings(max_examples=10 if name in MESSAGES else 40)
    @given(st.binary(max_size=200) | _PLAIN.map(msgpack.packb))
    def refuses(data: bytes) -> None:
        _is_refused_or_read(kind, data)

    refuses()
    for data in HOSTILE:
        with pytest.raises(ProtocolError):
            kind.decode(data)


# ---------------------------------------------------------------------------------------------- the codec itself


class _Colour(enum.Enum):
    RED = 1


class _Sample(Wire, frozen=True):
    number: Annotated[int, msgspec.Meta(ge=0, lt=3)]
    colour: _Colour
    some: float | None
    either: int | str


_SAMPLES = Codec[_Sample](_Sample, "sample")


@pytest.mark.parametrize(
    "fields",
    [
        *([bad, 1, 2.5, 7] for bad in (3, -1, True, 1.0, "1", None)),
        *([1, bad, 2.5, 7] for bad in (True, 2, {})),
        *([1, 1, "x", 7], [1, 1, None, b"x"], [1, 1, None, None]),
        *([], [1, 1, None], [1, 1, None, 0, 0], "abcd", {"number": 1, "colour": 1}),
    ],
)
def test_what_a_field_may_not_have_is_told(fields: Any) -> None:
    with pytest.raises(ProtocolError, match="malformed sample: "):
        _SAMPLES.decode(msgpack.packb(fields))
    assert _SAMPLES.decode(msgpack.packb([2, 1, 3, "x"])) == _Sample(2, _Colour.RED, 3.0, "x")


def _below(cls: type[Wire]) -> list[type[Wire]]:
    return [below for sub in cls.__subclasses__() for below in (sub, *_below(sub))]


@pytest.mark.parametrize("cls", [wire for wire in _below(Wire) if wire.__struct_fields__], ids=lambda cls: cls.__name__)
def test_an_array_that_lacks_items_is_refused(cls: type[Wire]) -> None:
    """Only items at the end may be missing of an array, and only those of fields with defaults."""
    assert msgspec.structs.fields(cls)[-1].required


def test_a_time_is_no_option_of_a_group() -> None:
    spec = GroupSpec(name="g", group_id="", backend="shm", world_size=1, options=(("a", (1, "x")),))
    packed = msgspec.msgpack.encode(spec)
    timestamp = msgpack.packb(msgpack.Timestamp(1))
    assert Codec[GroupSpec](GroupSpec, "spec").decode(packed) == spec
    with pytest.raises(ProtocolError, match="an option can't be a time"):
        Codec[GroupSpec](GroupSpec, "spec").decode(packed.replace(msgpack.packb("x"), timestamp))


def test_what_has_no_form_on_the_wire_is_a_typed_error() -> None:
    for value in (object(), 2**64, 1j):
        with pytest.raises(ProtocolError, match=r"a thing \(list\) that can't be written"):
            Codec[Any](Any, "thing").encode([value])


@pytest.mark.parametrize(
    "data",
    [b"\x91" * 5000, b"\x81\xa1x" * 5000, msgpack.packb([msgpack.ExtType(5, b"x")])],
    ids=("lists", "maps", "type"),
)
def test_where_anything_may_be_neither_depth_nor_types_of_others_are_read(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="malformed thing"):
        Codec[Any](Any, "thing").decode(data)


def test_numbers_and_text_of_subclasses_travel_as_those_of_their_base() -> None:
    decoded = Codec[Any](Any, "thing").decode(Codec[Any](Any, "thing").encode([np.float64(1.5), np.str_("a")]))
    assert decoded == [1.5, "a"]
    assert [*map(type, decoded)] == [float, str]


def test_what_is_long_is_compressed_and_bounded() -> None:
    codec = Codec[bytes](bytes, "thing", long_nbytes=100)
    packed = codec.encode(bytes(1 << 20))
    assert len(packed) < 10_000
    assert codec.decode(packed) == bytes(1 << 20)
    header = 5  # of so many bytes
    assert codec.decode(codec.encode(bytes(MOST_NBYTES - header))) == bytes(MOST_NBYTES - header)
    with pytest.raises(ProtocolError):
        codec.encode(bytes(MOST_NBYTES))
    bomb = b"\xc1" + zlib.compress(bytes(MOST_NBYTES + 1))
    with pytest.raises(ProtocolError):
        codec.decode(bomb)


def test_what_does_not_compress_is_sent_as_it_is() -> None:
    codec = Codec[bytes](bytes, "thing", long_nbytes=100)
    value = random.Random(1).randbytes(10_000)
    packed = codec.encode(value)
    assert len(packed) < len(value) + 5
    assert codec.decode(packed) == value


@pytest.mark.parametrize("version", [0, 2, 0xDC])
def test_another_version_is_refused_naming_both(version: int) -> None:
    codec = Codec[int](int, "thing", version=1)
    packed = codec.encode(7)
    assert codec.decode(packed) == 7
    with pytest.raises(ProtocolError, match=f"a thing of version {version}, this process reads 1"):
        codec.decode(bytes([version]) + packed[1:])


# ---------------------------------------------------------------------------------------------- messages


@pytest.mark.parametrize(
    "value",
    [
        *(["Nonsense"], [["Done"]], [None], [], 7, ["Bye", 1], ["Leave"], ["Leave", b"g"], {"type": "Bye"}),
        *(["Abort", "1", ""], ["Abort", True, ""], ["Abort", 1.0, ""], ["Abort", None, ""]),
        *(["Free", b"keys"], ["Free", [b"a", "b"]], ["Joined", 1, []], ["Joined", 1, {b"a": 1}]),
        *(["Fetched", b"", False, -1], ["Ticked", 1, "1", "", ""]),
    ],
)
def test_what_is_no_message_of_the_table_is_refused(value: Any) -> None:
    with pytest.raises(ProtocolError):
        messages.decode(msgpack.packb(value))


def test_a_lone_surrogate_does_not_keep_an_error_from_being_told() -> None:
    decoded = messages.decode(messages.encode(Done(seq=1, ranks=[0], error={"detail": "\udcff"}, story=["\ud800"])))
    assert decoded == Done(seq=1, ranks=[0], error={"detail": "\\udcff"}, story=["\\ud800"])


@pytest.mark.parametrize("value", [object(), 2**64, 1j])
def test_a_message_that_can_not_be_written_is_a_typed_error(value: Any) -> None:
    with pytest.raises(ProtocolError, match=r"message \(Joined\) that can't be written"):
        messages.encode(Joined(request=1, error={"x": value}))
