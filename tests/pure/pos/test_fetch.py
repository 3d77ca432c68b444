"""Fetching: what a holder describes and sends is what the other end builds; nothing else is believed."""

from __future__ import annotations

import random
import threading
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce
from typing import Any

import ml_dtypes
import msgpack
import numpy as np
import pytest

from raycollect.backends import arrays
from raycollect.channel import Server
from raycollect.channel.messages import Copied, Failed, Fetch, Fetched
from raycollect.core.codec import MOST_NBYTES
from raycollect.core.model import TENSOR, Address, BufferRef, Key, Segment, TensorInfo, task_key
from raycollect.core.shared_memory import memory_domain
from raycollect.errors import (
    ProtocolError,
    RefusedError,
    TensorDirtyError,
    UnsupportedError,
    from_wire,
)
from raycollect.pos import Store, description, tensors
from raycollect.pos import fetch as fetching
from raycollect.pos.boxes import OutOfReach
from raycollect.pos.container import DEEPEST
from raycollect.pos.fetch import _read_value, lending_s, serve
from raycollect.pos.held import find
from tests.pure.channel.parties import HOST, LIMIT_S, SECRET, Party
from tests.pure.fleet import contain
from tests.pure.pos.wire import Wire
from tests.pure.watched import WAIT_S, WatchedCondition

KEY = task_key(bytes(24), 1)
ANY = Fetch(key=KEY, domain=memory_domain(), reads_processes=True)
"""The request of a client that reads all memory of its machine."""


def _fetched(value: Any, **near: Any) -> Any:
    """What another process gets of a value; of its own machine, where it names that."""
    store, wire = Store(), Wire(Fetch(key=KEY, **near))
    store.put(KEY, contain(value))
    serve(wire, store)  # type: ignore[arg-type]
    answer, *_ = wire.answers
    return _read_value(wire, answer, time.monotonic(), Fetch(key=KEY, **near))  # type: ignore[arg-type]


NEAR = {"domain": memory_domain()}
DIRECT = {"reads_processes": True, **NEAR}


@pytest.mark.parametrize("client", [{}, NEAR, DIRECT], ids=["sent", "lent in the arena", "lent anywhere"])
@pytest.mark.parametrize(
    "value",
    [
        np.arange(6.0).reshape(2, 3).T,
        np.array(7, "int16"),
        np.zeros((0, 4), "float32"),
        np.arange(5, dtype=">i4")[::-2],
        np.ones(3, ml_dtypes.bfloat16),
        np.ones(3, ml_dtypes.float8_e4m3fn),
        [np.ones(1, bool), np.ones(3, "complex128"), np.ones(1, "int8"), np.arange(2.0)],
        {"layers": [(np.ones(3), np.zeros((2, 2), "int32"))], 7: np.ones(1, "float16")},
        [np.zeros(0), np.arange(3.0), np.arange(4.0)[2:2], np.array(1.0), np.arange(5)[5:], np.arange(2)],
        reduce(lambda inner, _: [inner], range(DEEPEST), np.arange(3)),
        {random.Random(seed).randbytes(60).hex(): np.array(float(seed)) for seed in range(12_000)},
    ],
    ids=[
        *("transposed", "scalar", "empty", "big-endian", "bfloat16", "float8", "unaligned", "nested", "several empty"),
        *("deepest", "too long to be described in a message"),
    ],
)
def test_a_value_arrives_as_it_was(monkeypatch: pytest.MonkeyPatch, value: Any, client: dict[str, Any]) -> None:
    monkeypatch.setattr(fetching, "LENT_FROM_NBYTES", 0)
    container = contain(_fetched(value, **client))
    assert container.structure == contain(value).structure
    for got, sent in zip(container.tensors, contain(value).tensors, strict=True):
        assert (got.shape, got.dtype) == (sent.shape, sent.dtype.newbyteorder("="))
        np.testing.assert_array_equal(got, sent)
        assert got.flags.aligned


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool"])
def test_a_torch_tensor_arrives_as_one(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    value = torch.arange(4).to(getattr(torch, dtype))[::2]
    fetched = _fetched([value, np.ones(2)])
    assert torch.equal(fetched[0], value)
    assert type(fetched[1]) is np.ndarray


class Sink(Wire):
    """A data connection that keeps nothing of what is sent."""

    def send(self, message: Any, blobs: Any = ()) -> None:
        self.answers.append(message)


def test_a_value_that_is_sent_is_copied_once() -> None:
    store, wire, value = Store(), Sink(Fetch(key=KEY)), np.ones(1 << 20)
    store.put(KEY, contain(value))
    tracemalloc.start()
    try:
        serve(wire, store)  # type: ignore[arg-type]
        _, peak_nbytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert value.nbytes <= peak_nbytes < 1.5 * value.nbytes


@contextmanager
def served_while_a_plan_writes() -> Iterator[tuple[Wire, Store, np.ndarray]]:
    """A fetch that waits for a plan, which the body is; afterwards the fetch has been answered."""
    store, value = Store(), np.zeros(4)
    store._changed = store._lock = watched = WatchedCondition()
    store.put(KEY, contain(value))
    wire = Wire(Fetch(key=KEY))
    with store.writing([arrays.byte_range(value)]):
        thread = threading.Thread(target=serve, args=(wire, store))
        thread.start()
        assert watched.someone_waits()
        yield wire, store, value
    thread.join(WAIT_S)


def test_a_fetch_waits_for_the_plan_that_writes_it() -> None:
    with served_while_a_plan_writes() as (wire, _, value):
        value[:] = 1
    assert wire.blob == np.ones(4).tobytes()


def test_a_fetch_that_waited_for_a_plan_which_failed_is_refused() -> None:
    with served_while_a_plan_writes() as (wire, store, value):
        store.mark_dirty([arrays.byte_range(value)], [value])
    (answer,) = wire.answers
    assert isinstance(answer, Failed)
    assert isinstance(from_wire(answer.error), TensorDirtyError)


def test_a_half_written_or_missing_value_is_refused_on_the_wire() -> None:
    store, value = Store(), np.zeros(4)
    store.put(KEY, contain([np.ones(1), value]))
    store.mark_dirty([arrays.byte_range(value[1:2])], [value])
    other = Key(bytes(28))
    wire = Wire(Fetch(key=KEY), Fetch(key=other))
    serve(wire, store)  # type: ignore[arg-type]
    kinds = []
    for answer in wire.answers:
        assert isinstance(answer, Failed)
        error = from_wire(answer.error)
        assert isinstance(error, RefusedError)
        kinds += [violation.kind for violation in error.violations]
    assert kinds == ["dirty", "lost"]
    with pytest.raises(RefusedError):
        find(store, KEY)


F64 = [[1], "float64", "cpu", "numpy", 8]
"""A tensor in a description."""

ALONE: list[Any] = ["tensor", [], []]
"""Its structure."""

LENT = [1, 2, b"", 12]
"""A segment."""


def _in(kind: str, *items: Any, names: Any = ()) -> list[Any]:
    return [kind, names, items]


def _nested(depth: int) -> list[Any]:
    return ALONE if not depth else _in("list", _nested(depth - 1))


def _float(**changes: Any) -> list[Any]:
    """What lies alone, with something wrong in it."""
    names = ("shape", "dtype", "device", "library", "itemsize")
    return [None, ALONE, [[changes.get(name, value) for name, value in zip(names, F64, strict=True)]], [None]]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        None,
        [],
        [LENT, ALONE, [F64]],
        [LENT[:2], ALONE, [F64], [None]],
        [LENT, ALONE, 3, [None]],
        *([None, ALONE, infos, refs] for infos, refs in (([], []), ([F64, F64], [None, None]), ([F64], []))),
        [None, ALONE, [F64[:4]], [None]],
        *(
            [None, structure, [F64], [None]]
            for structure in (
                _in("list", ALONE, ALONE),
                _in("list"),
                _in("set", ALONE),
                _in("dict", ALONE),
                _in("list", ALONE, names=["a"]),
                _in("dict", ALONE, names=[1.5]),
                _in("tensor", ALONE),
                _nested(40),
            )
        ),
        b"\x94\xc0" + b"\x93\xa4list\x90\x91" * 5000,
        *(_float(shape=shape) for shape in (["1"], [-1, -1])),
        *(_float(dtype=dtype) for dtype in ("float65", "object", ["float64"])),
        _float(itemsize=4),
        *([LENT, ALONE, [F64], [offset]] for offset in ("0", 8, -8)),
        [None, ALONE, [F64], [0]],
    ],
    ids=lambda data: repr(data)[:60],
)
def test_a_description_that_makes_no_sense_is_a_protocol_error(data: Any) -> None:
    with pytest.raises(ProtocolError):
        description.decode(data if isinstance(data, bytes) else msgpack.packb(data))


def test_bytes_that_are_not_those_of_the_description_are_a_protocol_error() -> None:
    wire = Wire()
    wire.blob = bytes(8)
    packed = msgpack.packb(_float(shape=[2]))
    with pytest.raises(ProtocolError):
        _read_value(wire, Fetched(description=packed, blob_nbytes=8), time.monotonic(), ANY)  # type: ignore[arg-type]


def test_a_description_of_one_tensor_is_read() -> None:
    """All of the above have something wrong in them."""
    info = TensorInfo(shape=(1,), dtype="float64", itemsize=8)
    sent, lent = (
        description.decode(msgpack.packb([where, ALONE, [F64], [at]])) for where, at in ((None, None), (LENT, 4))
    )
    assert sent == description.Description(TENSOR, (info,), [None])
    assert lent == description.Description(TENSOR, (info,), [BufferRef(Segment(*LENT), 4, 8)])


# ------------------------------------------------------------------------------------------ over a connection


@pytest.fixture
def holder() -> Iterator[tuple[Address, Store]]:
    """The address of a process that holds tensors, and its store."""
    store, party = Store(), Party()
    party.serve_data = lambda link: serve(link, store)  # type: ignore[method-assign]
    server = Server(HOST, SECRET, party)
    yield server.address, store
    fetching.close_idle()
    server.close()


@pytest.mark.parametrize("domain", ["", memory_domain()], ids=["sent", "lent"])
def test_a_value_whose_description_is_longer_than_a_frame_arrives(
    monkeypatch: pytest.MonkeyPatch, holder: tuple[Address, Store], domain: str
) -> None:
    monkeypatch.setattr(fetching, "memory_domain", lambda: domain)
    address, store = holder
    arena = tensors.full((4,), 7.0)
    value = {f"model.layers.{at}.{'x' * 200}": np.full((1, at % 7), at, "int32") for at in range(5_000)}
    store.put(KEY, contain({**value, "arena": arena}))
    for _ in range(2):  # the connection goes on
        fetched = fetching.fetch(address, KEY, actor="W", timeout_s=LIMIT_S)
        assert list(fetched) == [*value, "arena"]
        assert all(map(np.array_equal, fetched.values(), (*value.values(), arena)))


def test_a_value_of_too_many_tensors_is_refused_at_once(holder: tuple[Address, Store]) -> None:
    address, store = holder
    store.put(KEY, contain([np.ones(1)] * (fetching.MOST_TENSORS + 1)))
    with pytest.raises(UnsupportedError) as caught:
        fetching.fetch(address, KEY, actor="W", timeout_s=LIMIT_S)
    assert caught.value.violations[0].ref == KEY.hex()


def test_a_value_whose_description_is_too_long_is_refused_by_its_holder(holder: tuple[Address, Store]) -> None:
    address, store = holder
    store.put(KEY, contain({"x" * MOST_NBYTES: np.ones(1)}))
    for _ in range(2):  # the connection goes on
        with pytest.raises(UnsupportedError) as caught:
            fetching.fetch(address, KEY, actor="W", timeout_s=LIMIT_S)
        assert caught.value.violations[0].ref == KEY.hex()


def test_any_number_of_keys_is_freed(holder: tuple[Address, Store]) -> None:
    address, store = holder
    keys = [task_key(at.to_bytes(24, "big"), 1) for at in range(40_000)]
    store.put(keys[-1], contain(np.ones(1)))
    assert fetching.free(address, keys, actor="W") == 1
    assert store.statistics().held == 0


# ------------------------------------------------------------------------------------------ reading where it lies


def lent(value: Any, reads_processes: bool = False) -> tuple[Wire, Store]:
    """What the holder answers to a client of its own machine, which then reads nothing."""
    store, wire = Store(), Wire(Fetch(key=KEY, domain=memory_domain(), reads_processes=reads_processes))
    store.put(KEY, contain(value))
    serve(wire, store)  # type: ignore[arg-type]
    return wire, store


def test_what_lies_in_the_arena_is_not_sent_but_read_where_it_is() -> None:
    value = tensors.full(100_001, 7, "float32")
    wire, _ = lent([value, np.ones(30_000)])
    (answer,) = wire.answers
    assert answer.blob_nbytes == 0
    value[:] = 8  # nobody was asked again: it is the holder's memory that is read, and a copy of the other
    first, second = _read_value(wire, answer, time.monotonic(), ANY)  # type: ignore[arg-type]
    np.testing.assert_array_equal(first, np.full(100_001, 8, "float32"))
    np.testing.assert_array_equal(second, np.ones(30_000))
    assert wire.answers == [answer, Copied()]
    first[:] = 9
    assert value[0] == 8


def test_any_tensor_is_read_where_it_is_by_a_client_that_reads_processes() -> None:
    value = np.full(100_001, 7, "float32")
    wire, _ = lent([value, np.ones((300, 100)).T], reads_processes=True)
    (answer,) = wire.answers
    assert answer.blob_nbytes == 0
    value[:] = 8  # no copy was made
    first, second = _read_value(wire, answer, time.monotonic(), ANY)  # type: ignore[arg-type]
    np.testing.assert_array_equal(first, np.full(100_001, 8, "float32"))
    np.testing.assert_array_equal(second, np.ones((100, 300)))
    assert wire.answers == [answer, Copied()]


@pytest.mark.parametrize(
    ("make", "reads_processes"), [(tensors.zeros, False), (np.zeros, True)], ids=["in the arena", "anywhere"]
)
def test_a_plan_waits_until_what_it_writes_was_read(make: Any, reads_processes: bool) -> None:
    value = make(100_000)
    spans = [arrays.byte_range(value)]
    store = Store()
    store.put(KEY, contain(value))
    store._changed = store._lock = watched = WatchedCondition()
    written = threading.Event()

    def write() -> None:
        with store.writing(spans):
            written.set()

    class Slow(Wire):
        def receive(self, timeout_s: float | None = None) -> Any:
            if timeout_s is None:
                return super().receive()
            assert timeout_s == lending_s(value.nbytes)
            writer.start()
            assert watched.someone_waits()
            assert not written.is_set()
            return Copied()

    writer = threading.Thread(target=write)
    request = Fetch(key=KEY, domain=memory_domain(), reads_processes=reads_processes)
    serve(Slow(request), store)  # type: ignore[arg-type]
    assert written.wait(WAIT_S)
    writer.join(WAIT_S)


def test_a_client_that_was_lent_something_says_that_it_has_copied_it_and_nothing_else() -> None:
    class Strange(Wire):
        def receive(self, timeout_s: float | None = None) -> Any:
            return super().receive() if timeout_s is None else Fetch(key=KEY)

    store, wire = Store(), Strange(Fetch(key=KEY, domain=memory_domain()))
    store.put(KEY, contain(tensors.zeros(100_000)))
    with pytest.raises(ProtocolError, match="unexpected message Fetch, expected Copied"):
        serve(wire, store)  # type: ignore[arg-type]


def test_what_was_read_too_late_is_not_believed() -> None:
    wire, _ = lent(tensors.zeros(100_000))
    with pytest.raises(OutOfReach):
        _read_value(wire, wire.answers[0], time.monotonic() - lending_s(800_000) - 1, ANY)  # type: ignore[arg-type]
    assert wire.answers[1:] == []


@pytest.mark.parametrize("reads_processes", [False, True], ids=["of an arena", "of a process"])
def test_memory_that_is_not_there_any_more_is_out_of_reach(reads_processes: bool) -> None:
    wire, _ = lent((np if reads_processes else tensors).zeros(100_000), reads_processes)
    answer = wire.answers[0]
    (pid, fd, _, nbytes), *rest = msgpack.unpackb(answer.description)
    gone = msgpack.packb([[pid, fd, bytes(32), nbytes], *rest])
    with pytest.raises(OutOfReach):
        _read_value(wire, Fetched(description=gone), time.monotonic(), ANY)  # type: ignore[arg-type]


@pytest.mark.parametrize("client", [{}, NEAR], ids=["far", "near"])
def test_memory_that_was_not_asked_for_is_not_read(client: dict[str, Any]) -> None:
    wire, _ = lent(np.zeros(100_000), reads_processes=True)
    with pytest.raises(ProtocolError):
        _read_value(wire, wire.answers[0], time.monotonic(), Fetch(key=KEY, **client))  # type: ignore[arg-type]
    assert wire.answers[1:] == []
