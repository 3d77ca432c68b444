"""Orders through shared memory, to a participant on the controller's host: a doorbell with one slot.

The thread that carries out orders sleeps there, so that no other thread has to read a connection for it. An order that
finds no free cell, or is too long for one, goes over the channel. It may overtake others then, or be overtaken: the
participant puts plans in order by their tickets.
"""

from __future__ import annotations

from raycollect.channel.doorbell import IN_FLIGHT, INLINE_NBYTES, Doorbell, DoorbellClient
from raycollect.channel.messages import Order
from raycollect.core.model import Segment

_IN_ORDER, _RINGS = 1, 2


class OrderBell(Doorbell):
    """The controller's end; for one thread at a time.

    Raises:
        OSError: As of `Doorbell`.
    """

    def __init__(self) -> None:
        super().__init__(1)

    def send(self, order: Order) -> bool:
        """Sends an order; False where it has to go over the channel."""
        number, payload = self._number + 1, order.after + order.payload
        (taken,) = self._answers
        last = taken.words[taken.cells[number % IN_FLIGHT]]  # taken from this cell; 0: none
        if len(payload) > INLINE_NBYTES or last != max(number - IN_FLIGHT, 0):
            return False
        self._number = number
        flags = _IN_ORDER * order.in_order | _RINGS * order.rings
        self.runs[0].write(number, flags, len(order.after), payload)
        self.ring(number)
        return True


class OrderBellClient(DoorbellClient):
    """A participant's end. One thread takes orders; any thread may call `wake`.

    Args:
        segment: The controller's `OrderBell.segment`.

    Raises:
        OSError: As of `DoorbellClient`.
        ValueError: It is no such memory.
    """

    def __init__(self, segment: Segment) -> None:
        super().__init__(segment, 0)

    def take_order(self, timeout_s: float) -> Order | None:
        """Waits for the next order; returns None where the time is over, or `wake` was called."""
        entry = self.take(timeout_s)
        if entry is None:
            return None
        number, flags, split, message, _ = entry
        self._answers.write(number, 0, 0, b"")  # nobody answers: the controller may write to the cell again
        payload = message or b""
        return Order(
            payload=payload[split:],
            in_order=bool(flags & _IN_ORDER),
            after=payload[:split],
            rings=bool(flags & _RINGS),
        )
