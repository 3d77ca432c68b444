"""Boxes of tensors that another process reads."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from raycollect.backends import arrays
from raycollect.channel.messages import Copied, Read
from raycollect.core.model import Address, Key
from raycollect.core.shared_memory import memory_domain
from raycollect.errors import ProtocolError, TensorFreedError, TensorLostError, UnsupportedError, from_wire
from raycollect.pos import Store, fetch, tensors
from raycollect.pos.boxes import DELTAS, LENT, Borrowed, Box, mapped, take, take_deltas
from raycollect.pos.fetch import LENT_FROM_NBYTES, serve
from tests.pure.fleet import contain
from tests.pure.pos.wire import Wire
from tests.pure.watched import WAIT_S, WatchedCondition

KEY = Key(bytes(28))
ROWS = LENT_FROM_NBYTES // 32 + 8
WANTED = [Box(0, (1, 2), (ROWS - 2, 8), "float32"), Box(1, (3,), (2,), "float64")]


class Client(Wire):
    @property
    def blob_left(self) -> int:
        return len(self.blob)


def _read(values: list[Any], boxes: list[Box], domain: str, *, is_frozen: bool = False) -> tuple[Any, Borrowed, Client]:
    store, wire = Store(), Client(Read(key=KEY, boxes=[box[:3] for box in boxes], domain=domain))
    store.put(KEY, dataclasses.replace(contain(values), is_frozen=is_frozen))
    serve(wire, store)  # type: ignore[arg-type]
    (answer,) = wire.answers
    return answer, take(wire, answer.description, boxes, lambda: wire.tell(Copied())), wire  # type: ignore[arg-type]


@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("is_near", [False, True])
@pytest.mark.parametrize("make", [np.asarray, tensors.array], ids=["ordinary", "arena"])
def test_boxes_arrive_as_they_were(make: Any, is_near: bool, is_frozen: bool) -> None:
    whole, line = make(np.arange(ROWS * 12, dtype=np.float32).reshape(ROWS, 12)), make(np.arange(6.0))
    expected = np.array(whole[1:-1, 2:10])
    domain = memory_domain() if is_near else ""
    answer, borrowed, wire = _read([whole, line], WANTED, domain, is_frozen=is_frozen)
    np.testing.assert_array_equal(borrowed.arrays[0], expected)
    np.testing.assert_array_equal(borrowed.arrays[1], line[3:5])
    is_near = is_near and make is tensors.array
    assert (LENT.decode(answer.description) is not None) is is_near
    assert borrowed.is_lent is (is_near and is_frozen)
    whole[...] = 0
    assert np.array_equal(borrowed.arrays[0], expected) is not borrowed.is_lent
    assert (Copied() in wire.answers) is (is_near and not is_frozen)  # so that the holder may write again
    for _ in range(2):
        borrowed.close()
    assert wire.answers.count(Copied()) == is_near


def test_clients_that_ask_for_the_same_boxes_are_told_the_same() -> None:
    value, domain = tensors.array(np.zeros((ROWS, 12), np.float32)), memory_domain()
    whole, half = [[(0, (0, 0), (rows, 12))] for rows in (ROWS, ROWS - 4)]
    asked = [Read(key=KEY, boxes=some, domain=domain) for some in (whole, whole, half)]
    store, wire = Store(), Client(*(message for read in asked for message in (read, Copied())))
    store.put(KEY, dataclasses.replace(contain([value]), is_frozen=True))
    serve(wire, store)  # type: ignore[arg-type]
    first, again, other = (LENT.decode(answer.description) for answer in wire.answers)
    assert first == again
    assert first is not None
    assert other == first  # it begins at the same place
    store.free([KEY])
    store.put(other_key := Key(bytes(27) + b"2"), contain([value]))
    wire = Client(Read(key=other_key, boxes=whole, domain=domain))
    serve(wire, store)  # type: ignore[arg-type]
    assert LENT.decode(wire.answers[0].description) == (*first[:2], False)


def test_what_a_process_borrows_of_itself_is_read_until_it_is_given_back() -> None:
    store, value, other = Store(), np.arange(4.0), Key(bytes(27) + b"1")
    store.put(KEY, dataclasses.replace(contain([value]), is_frozen=True))
    store.put(other, contain([value]))
    address = Address(host="127.0.0.1", port=1, secret=b"boxes")
    fetch.register_local(address.secret, store)
    span, boxes = [arrays.byte_range(value)], [Box(0, (1,), (2,), "float64")]
    lent, copied = (fetch.borrow(address, key, boxes, actor="me") for key in (KEY, other))
    assert (lent.is_lent, copied.is_lent) == (True, False)
    store.free([KEY])
    assert store.is_read(span)
    value += 1
    assert (list(lent.arrays[0]), list(copied.arrays[0])) == ([2, 3], [1, 2])
    lent.close()
    assert not store.is_read(span)
    fetch.forget_local(address.secret)


@pytest.mark.parametrize(
    "boxes",
    [[(1, (0,), (1,))], [(0, (0,), (3,))], [(0, (-1,), (1,))], [(0, (0, 0), (1, 1))]],
)
def test_boxes_that_are_not_there_are_refused_at_once(boxes: list[Any]) -> None:
    store, wire = Store(), Client(Read(key=KEY, boxes=boxes))
    store.put(KEY, contain([np.zeros(2)]))
    serve(wire, store)  # type: ignore[arg-type]
    (answer,) = wire.answers
    error = from_wire(answer.error)
    assert isinstance(error, UnsupportedError)
    assert error.violations[0].ref == KEY.hex()


@pytest.mark.parametrize("rows", [[], [[0]], [[0, 8, 8]], [[-8, 8]], [[0, -8]], [[8, 8]], [["a", 8]], [5]])
def test_memory_beyond_what_is_lent_is_not_read(rows: list[Any]) -> None:
    with pytest.raises(ProtocolError, match="box out of range of the lent memory"):
        mapped(np.zeros(16, np.uint8), rows, [Box(0, (0,), (2,), "float64")])


def test_more_bytes_than_asked_for_are_refused() -> None:
    wire = Client()
    wire.blob = bytes(24)
    with pytest.raises(ProtocolError, match="the announced bytes"):
        take(wire, LENT.encode(None), [Box(0, (0,), (2,), "float64")], lambda: None)  # type: ignore[arg-type]


@pytest.mark.parametrize("counts", [(), (None, None), (5,), (1025,), (-1,)])
def test_deltas_that_do_not_fit_the_boxes_are_refused(counts: tuple[Any, ...]) -> None:
    wire = Client()
    wire.blob = bytes(5000)
    with pytest.raises(ProtocolError):
        take_deltas(wire, DELTAS.encode(counts), [np.zeros(1024, np.float32)])  # type: ignore[arg-type]


@pytest.mark.parametrize("since", [KEY, Key(bytes(27) + b"3")])
def test_deltas_from_tensors_that_are_not_there_are_refused(since: Key) -> None:
    store, wire = Store(), Client(Read(key=KEY, boxes=[(0, (0,), (4096,))], since=since))
    store.put(KEY, contain([np.zeros(4096)]))
    serve(wire, store)  # type: ignore[arg-type]
    (answer,) = wire.answers
    if since == KEY:
        assert DELTAS.decode(answer.description) == (0,)
    else:
        assert isinstance(from_wire(answer.error), TensorLostError)


def test_what_was_freed_while_a_reader_of_its_own_process_waited_is_not_read() -> None:
    """A publisher frees an old version, and writes the next one there."""
    store, value = Store(), np.zeros(4)
    store._changed = store._lock = watched = WatchedCondition()
    store.put(KEY, contain([value]))
    address = Address(host="127.0.0.1", port=1, secret=b"boxes")
    fetch.register_local(address.secret, store)
    with ThreadPoolExecutor(1) as threads:
        with store.writing([arrays.byte_range(value)]):
            boxes = [Box(0, (0,), (4,), "float64")]
            reader = threads.submit(fetch.borrow, address, KEY, boxes, actor="me")
            assert watched.someone_waits()
            store.free([KEY])
        with pytest.raises(TensorFreedError):
            reader.result(WAIT_S)
    del fetch._clients.local[address.secret]
