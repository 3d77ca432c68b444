"""Messages: every type survives the wire, and nothing but the table's types does."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raycollect.channel import messages, packing
from raycollect.channel.messages import MESSAGES, Done, Fetched, Joined, Message, Ticked, codec, decode, encode
from raycollect.errors import ProtocolError

_INTS = st.integers(-(2**63), 2**64 - 1)
_TEXT = st.text(max_size=20)
_PLAIN = st.dictionaries(_TEXT, st.none() | st.booleans() | _INTS | _TEXT | st.binary() | st.lists(_INTS), max_size=4)
_BY_HINT: dict[Any, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    int: _INTS,
    str: _TEXT,
    bytes: st.binary(max_size=50),
    float: st.floats(allow_nan=False),
    dict[str, Any]: _PLAIN,
    dict[str, Any] | None: st.none() | _PLAIN,
    list[str]: st.lists(_TEXT, max_size=4),
    list[int]: st.lists(_INTS, max_size=4),
    list[Any]: st.lists(_PLAIN, max_size=3),
    list[bytes]: st.lists(st.binary(max_size=20), max_size=4),
    tuple[int, ...]: st.lists(_INTS, max_size=4).map(tuple),
    tuple[tuple[float, ...], ...]: st.lists(st.tuples(st.floats(allow_nan=False)), max_size=3).map(tuple),
    list[dict[str, Any]]: st.lists(_PLAIN, max_size=3),
}


def _any_message(cls: type) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(cls)
    values = {f.name: _BY_HINT[hints[f.name]] for f in dataclasses.fields(cls)}
    if "blob_nbytes" in values:
        values["blob_nbytes"] = st.integers(0, 2**60)
    return st.builds(cls, **values)


@pytest.mark.parametrize("name", sorted(MESSAGES))
def test_every_type_survives_the_wire(name: str) -> None:
    @settings(max_examples=40)
    @given(_any_message(MESSAGES[name]))
    def survives(message: Any) -> None:
        assert decode(encode(message)) == message
        assert type(decode(encode(message))) is MESSAGES[name]

    survives()


def test_the_table_holds_every_public_message() -> None:
    public = {name for name, one in vars(messages).items() if isinstance(one, type) and issubclass(one, Message)}
    assert set(MESSAGES) == public - {"Message"}


@pytest.mark.parametrize("name", sorted(MESSAGES))
def test_messages_are_frozen_and_slotted(name: str) -> None:
    cls = MESSAGES[name]
    assert not hasattr(object.__new__(cls), "__dict__")
    with pytest.raises((dataclasses.FrozenInstanceError, AttributeError, TypeError)):
        object.__new__(cls).other = 1  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "value",
    [
        {"t": "Nonsense"},
        {"t": ["Done"]},
        {"t": None},
        {},
        [],
        7,
        {"t": "Bye", "more": 1},
        {"t": "Leave"},
        {"t": "Leave", "group": "g"},
        {"t": "Leave", "group_id": b"g"},
        {"t": "Abort", "seq": "1", "reason": ""},
        {"t": "Abort", "seq": True, "reason": ""},
        {"t": "Abort", "seq": 1.0, "reason": ""},
        {"t": "Abort", "seq": None, "reason": ""},
        {"t": "Free", "keys": b"keys"},
        {"t": "Free", "keys": [b"a", "b"]},
        {"t": "Joined", "request": 1, "error": []},
        {"t": "Joined", "request": 1, "error": {b"a": 1}},
        {"t": "Fetched", "found": b"", "more": False, "blob_nbytes": -1},
        {"t": "Ticked", "request": 1, "at_s": "1", "clock": "", "refusal": ""},
    ],
)
def test_what_is_not_in_the_table_is_refused(value: Any) -> None:
    with pytest.raises(ProtocolError):
        decode(msgpack.packb(value))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\xdd\xff\xff\xff\xff",  # a list of 4 G items, none of them there
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x91" * 5000,
        msgpack.packb(msgpack.ExtType(5, b"x")),
        msgpack.packb({"t": "Bye", "x": msgpack.Timestamp(1)}),
        msgpack.packb({1: 2}),
        msgpack.packb({"t": "Bye"}) + b"\x00",
        b"\xa1\xff",
    ],
)
def test_malformed_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(data)


@given(st.binary(max_size=200))
def test_random_bytes_never_raise_anything_else(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(data)


def test_an_int_is_welcome_where_a_float_is_meant() -> None:
    message = decode(msgpack.packb({"t": "Ticked", "request": 1, "at_s": 3, "clock": "", "refusal": ""}))
    assert isinstance(message, Ticked)
    assert type(message.at_s) is float


def test_a_lone_surrogate_does_not_keep_an_error_from_being_told() -> None:
    told = decode(encode(Done(seq=1, ranks=[0], error={"detail": "\udcff"}, story=["\ud800"])))
    assert told == Done(seq=1, ranks=[0], error={"detail": "\\udcff"}, story=["\\ud800"])


@pytest.mark.parametrize("value", [object(), 2**64, {1, 2}])
def test_what_msgpack_can_not_carry_is_a_typed_error(value: Any) -> None:
    with pytest.raises(ProtocolError):
        encode(Joined(request=1, error={"x": value}))


def test_a_field_type_without_a_wire_form_is_found_at_import() -> None:
    with pytest.raises(TypeError, match="no wire form"):
        codec.reader(set[int])


def test_tuples_come_back_as_tuples() -> None:
    assert codec.reader(tuple[int, ...])(packing.unpack(packing.pack((1, 2)))) == (1, 2)


def test_a_negative_blob_is_invalid_from_birth() -> None:
    with pytest.raises(ValueError):
        Fetched(found=b"", blob_nbytes=-1)
