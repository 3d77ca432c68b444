"""Values that travel with runs: they come out as they went in; what can't travel is named; bytes of nobody raise."""

from __future__ import annotations

import collections
import enum
import math
import random
import re
from typing import Any, NamedTuple

import ml_dtypes
import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raycollect.backends import arrays
from raycollect.engine.value_codec import pack_value, pack_values, unpack_value, unpack_values
from raycollect.errors import ProtocolError

MANY = settings(max_examples=200)


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal, with the types of all that is in them."""
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return same(list(one.items()), list(other.items()))
    if isinstance(one, float) and math.isnan(one):
        return math.isnan(other)
    return bool(one == other)


_LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers(allow_nan=False)
    | st.text()
    | st.binary(max_size=40)
    | st.integers(-(2**200), 2**200)
)
_VALUES = st.recursive(
    _LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=4)
    ),
    max_leaves=20,
)


@MANY
@given(_VALUES)
def test_plain_values_come_out_as_they_went_in(value: Any) -> None:
    assert same(unpack_value(pack_value(value)), value)
    packed = pack_values([value, value])
    assert same(unpack_values(packed), (value, value))
    assert pack_values((value, value)) == packed
    assert pack_values([]) == b"", "none take nothing"
    assert unpack_values(b"") == ()


DTYPES = [
    *(np.dtype(code) for code in "?bhilqBHILQefdgFDG"),
    *(np.dtype(f">{code}") for code in ("i4", "f8", "c16", "U3")),
    *(np.dtype(name) for name in ("S5", "U3", "M8[D]", "m8[us]")),
    *sorted(arrays.NARROW, key=str),
]
SHAPES = [(), (0,), (1,), (7,), (3, 0, 2), (2, 3, 5)]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name if d in arrays.NARROW else d.str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_arrays_keep_dtype_and_shape_and_get_memory_of_their_own(dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(len(shape))
    array = rng.integers(0, 2, shape).astype(np.int8).astype("S1" if dtype.kind == "S" else np.int8).astype(dtype)
    packed = pack_value(array)
    found = unpack_value(packed)
    assert (type(found), found.dtype, found.shape) == (np.ndarray, dtype, shape)
    assert found.tobytes() == array.tobytes()
    assert found.flags.writeable
    assert found.flags.c_contiguous
    assert not np.shares_memory(found, np.frombuffer(packed, np.uint8))


@pytest.mark.parametrize(
    "value",
    [
        np.float32(1.5),
        np.float64(-0.0),
        np.int8(-3),
        np.bool_(True),
        np.complex64(2j),
        np.str_("ab"),
        np.uint64(2**63),
        np.datetime64("2020-02-03"),
        ml_dtypes.bfloat16(1.5),
    ],
    ids=repr,
)
def test_scalars_keep_their_type(value: Any) -> None:
    found = unpack_value(pack_value(value))
    assert type(found) is type(value)
    assert found.dtype == value.dtype
    assert found.tobytes() == value.tobytes()


class Foreign:
    """A tensor of a library that nobody knows."""

    def __init__(self, array: Any) -> None:
        self.__array_interface__ = array.__array_interface__
        self._array = array


@pytest.mark.parametrize("dtype", ["int16", ">f4"])
def test_a_tensor_that_shows_its_memory_comes_out_as_an_array(dtype: str) -> None:
    array = np.arange(6, dtype=dtype).reshape(2, 3)
    found = unpack_value(pack_value([Foreign(array)]))[0]
    assert type(found) is np.ndarray
    np.testing.assert_array_equal(found, array)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "bool", "float8_e4m3fn"])
@pytest.mark.parametrize("shape", [(), (0, 2), (3,), (2, 5)])
def test_tensors_of_torch_stay_such(dtype: str, shape: tuple[int, ...]) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.arange(math.prod(shape)).reshape(shape).to(getattr(torch, dtype))
    found = unpack_value(pack_value((tensor.T if len(shape) == 2 else tensor,)))[0]
    assert type(found) is torch.Tensor
    assert found.dtype == tensor.dtype
    assert found.is_contiguous()
    assert torch.equal(found.float(), (tensor.T if len(shape) == 2 else tensor).float())
    found.zero_()
    parameter = unpack_value(pack_value(torch.nn.Parameter(torch.ones(3))))
    assert not parameter.requires_grad
    assert parameter.tolist() == [1, 1, 1]


def _endless() -> list[Any]:
    items: list[Any] = []
    items.append(items)
    return items


class Kind(dict):  # type: ignore[type-arg]
    """A dict of its own kind."""


class Colour(str, enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    LOW = 3


class Point(NamedTuple):
    x: int
    y: Any


class Long(int):
    pass


class Real(float):
    pass


class Many(list):  # type: ignore[type-arg]
    pass


DEFAULTS = collections.defaultdict(list, {1: [Point(1, (2,))]})

INHERITED = {
    "ordered dict": (collections.OrderedDict(b=1, a=2), {"b": 1, "a": 2}),
    "default dict": (DEFAULTS, {1: [(1, (2,))]}),
    "counter": (collections.Counter("aab"), {"a": 2, "b": 1}),
    "named tuple": (Point(1, Point(2, None)), (1, (2, None))),
    "enum of numbers": ([Level.LOW], [3]),
    "enum of texts": ({"c": Colour.RED}, {"c": "red"}),
    "flags": (re.IGNORECASE | re.MULTILINE, 10),
    "long": (
        (Long(2**64), Long(2**64 - 1), Long(-(2**63)), Long(-(2**63) - 1)),
        (2**64, 2**64 - 1, -(2**63), -(2**63) - 1),
    ),
    "float": (Real(0.1), 0.1),
    "list": (Many([Many(), 1]), [[], 1]),
    "shape": (np.zeros((2, 3)).shape, (2, 3)),
}


@pytest.mark.parametrize("name", INHERITED)
def test_what_inherits_comes_out_as_what_it_is_made_of(name: str) -> None:
    value, plain = INHERITED[name]
    assert same(unpack_value(pack_value(value)), plain)
    assert same(unpack_values(pack_values([value, value])), (plain, plain))


REFUSED = {
    "object": (object(), "object"),
    "set": ({1}, "set"),
    "a set in a kind of dict": ([Kind(a={1})], "set"),
    "array of objects": ({"a": np.array([None])}, "object"),
    "structured array": (np.zeros(2, "i4,f4"), "f0"),
    "masked array": (np.ma.array([1]), "MaskedArray"),
    "function": ((len,), "builtin_function"),
    "itself": (_endless(), "nested"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_travel_is_named(name: str) -> None:
    value, word = REFUSED[name]
    for pack in (pack_value, lambda one: pack_values((1, one))):
        with pytest.raises(TypeError) as caught:
            pack(value)
        assert word in str(caught.value)
        assert "ref" not in str(caught.value), "who packs it says what to do"


def test_tuples_too_deep_are_refused_on_either_side() -> None:
    value: Any = ()
    for _ in range(5000):
        value = (value,)
    with pytest.raises(TypeError, match="nested"):
        pack_value(value)
    for packed in (b"\x91" * 50_000, b"\x92\xd4\x01" * 20_000, b"\x92\xc7\x00\x01" * 20_000, b"\x81" * 50_000):
        with pytest.raises(ProtocolError):
            unpack_value(packed)


def _samples() -> list[bytes]:
    values = [(1, 2.5, "a"), [np.arange(5.0)], {"k": (np.float32(1), {3: b"x"})}, 2**90, ml_dtypes.bfloat16(1)]
    return [pack_value(value) for value in values] + [pack_value(Foreign(np.ones((2, 2))))]


@pytest.mark.parametrize("seed", range(8))
def test_bytes_of_nobody_raise_or_are_values(seed: int) -> None:
    """Cut, flipped and made up: never another exception, and nothing larger than what was there."""
    rng = random.Random(seed)
    outcomes = set()
    for _ in range(1500):
        data = bytearray(rng.choice(_samples()))
        way = rng.randrange(3)
        if way == 0:
            del data[rng.randrange(len(data)) :]
        elif way == 1:
            data[rng.randrange(len(data))] = rng.randrange(256)
        else:
            data = bytearray(rng.randbytes(rng.randrange(1, 60)))
        try:
            unpack_value(bytes(data))
        except ProtocolError:
            outcomes.add("refused")
        else:
            outcomes.add("read")
    assert outcomes == {"refused", "read"}


def _array_bytes(name: bytes, shape: tuple[int, ...], elements: bytes) -> bytes:
    extents = b"".join(extent.to_bytes(8, "little") for extent in shape)
    return bytes((len(name), len(shape))) + name + extents + elements


@pytest.mark.parametrize(
    "packed",
    [
        b"",
        msgpack.packb(1) + b"\x00",
        msgpack.packb(msgpack.ExtType(99, b"")),
        msgpack.packb(msgpack.ExtType(1, msgpack.packb(3))),
        msgpack.packb([1, msgpack.ExtType(1, b"x")]),
        msgpack.packb(msgpack.ExtType(3, b"")),
        msgpack.packb(msgpack.ExtType(3, _array_bytes(b"<f8", (1 << 60,), b"12345678"))),
        msgpack.packb(msgpack.ExtType(3, _array_bytes(b"<f8", (0, 1 << 62, 1 << 62), b""))),
        msgpack.packb(msgpack.ExtType(3, _array_bytes(b"<f8", (3,), b"1"))),
        msgpack.packb(msgpack.ExtType(3, _array_bytes(b"|O", (1,), b"12345678"))),
        msgpack.packb(msgpack.ExtType(3, _array_bytes(b"i4,f4", (1,), b"12345678"))),
        msgpack.packb(msgpack.ExtType(3, _array_bytes(b"<f8", (1,) * 100, b"12345678"))),
        msgpack.packb(msgpack.ExtType(4, _array_bytes(b"<f8", (1,), b"12345678"))),
        msgpack.packb(msgpack.ExtType(5, b"\x05numpy" + _array_bytes(b"<U2", (1,), b"12345678"))),
        msgpack.packb({1: 2}).replace(b"\x01", b"\x90"),
    ],
    ids=repr,
)
def test_malformed(packed: bytes) -> None:
    with pytest.raises(ProtocolError):
        unpack_value(packed)


def test_values_are_a_list() -> None:
    with pytest.raises(ProtocolError, match="where values were due"):
        unpack_values(pack_value({"a": 1}))
