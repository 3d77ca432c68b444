"""Orders in shared memory: they come whole and in order, or are left to the channel."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from raycollect.channel import OrderBell, OrderBellClient
from raycollect.channel.doorbell import IN_FLIGHT, INLINE_NBYTES
from raycollect.channel.messages import Order
from tests.support.values import replace

WAIT_S = 20.0


@pytest.fixture
def order_bell() -> Iterator[OrderBell]:
    made = OrderBell()
    yield made
    made.close()


def order(payload: bytes = b"a plan", **fields: object) -> Order:
    plain = Order(payload=payload, in_order=False, after=b"", rings=False)
    return replace(plain, **fields)  # type: ignore[arg-type]


def test_an_order_comes_as_it_was_sent(order_bell: OrderBell) -> None:
    client = OrderBellClient(order_bell.segment)
    for one in (
        order(),
        order(b""),
        order(in_order=True, after=b"t" * 24),
        order(in_order=True, after=b"t" * 24, rings=True),
        order(b"x" * INLINE_NBYTES),
    ):
        assert order_bell.send(one)
        assert client.take_order(WAIT_S) == one


def test_what_is_too_long_for_a_cell_is_left_to_the_channel(order_bell: OrderBell) -> None:
    client = OrderBellClient(order_bell.segment)
    assert not order_bell.send(order(b"x" * (INLINE_NBYTES + 1)))
    assert not order_bell.send(order(b"x" * INLINE_NBYTES, after=b"t"))
    assert order_bell.send(order(b"next"))
    assert client.take_order(WAIT_S) == order(b"next")


def test_what_finds_no_free_cell_is_left_to_the_channel(order_bell: OrderBell) -> None:
    client = OrderBellClient(order_bell.segment)
    for turn in range(3):
        sent = [order(b"%d" % (turn * IN_FLIGHT + number)) for number in range(IN_FLIGHT)]
        assert all(map(order_bell.send, sent))
        assert not order_bell.send(order(b"one too many"))
        assert [client.take_order(WAIT_S) for _ in sent] == sent
        assert client.take_order(0.0) is None


def test_whoever_waits_is_woken(order_bell: OrderBell) -> None:
    client, came = OrderBellClient(order_bell.segment), list[Order | None]()

    def take() -> None:
        came.append(client.take_order(WAIT_S))
        came.append(client.take_order(WAIT_S))

    taking = threading.Thread(target=take)
    taking.start()
    assert order_bell.send(order())
    while not came:
        taking.join(0.001)
    client.wake()
    taking.join(WAIT_S)
    assert came == [order(), None]
