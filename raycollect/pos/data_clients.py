"""The data connections of this process as a client: reused while idle, and retried while a holder is unreachable."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from raycollect.channel import DataClient
from raycollect.channel.messages import Copied, Failed
from raycollect.core import sockets
from raycollect.core.model import Address
from raycollect.errors import ChannelError, ConnectionLostError, RaycollectError, copy_error, from_wire
from raycollect.pos import Store
from raycollect.pos.boxes import Borrowed

MAX_IDLE = 32
"""The most idle data connections of a process; the least recently used is closed first."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0
"""The pause before an unreachable holder is retried; it doubles each time."""

FULL_S = 3.0
"""How long to retry while this process can't open another connection."""

ReadAnswer = Callable[[DataClient, Any, float, Any], Any]
"""Reads an answer, given the client, the answer, the time of the request, and the request."""


class DataClients:
    """Idle data connections of this process, and the stores that live in it."""

    def __init__(self) -> None:
        # Without a lock: a finalizer may fetch, too, during another call of its thread
        self._idle: list[tuple[tuple[str, int], DataClient]] = []
        self.local: dict[bytes, Store] = {}

    def request(self, address: Address, message: Any, until_s: float, read: ReadAnswer) -> Any:
        """Sends a request, and retries while the holder is unreachable but alive; `read` reads the answer."""
        pause_s, full_until_s = FIRST_PAUSE_S, min(until_s, time.monotonic() + FULL_S)
        while True:
            left_s = max(until_s - time.monotonic(), FIRST_PAUSE_S)  # after a long sleep one more try finds the cause
            try:
                client = self._take((address.host, address.port)) or DataClient(address, left_s)
                return self._ask(address, client, message, left_s, read)
            except ConnectionLostError as exc:
                if is_gone(exc) or time.monotonic() + pause_s >= (full_until_s if is_full(exc) else until_s):
                    raise
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _ask(self, address: Address, client: DataClient, message: Any, timeout_s: float, read: ReadAnswer) -> Any:
        asked_s = time.monotonic()
        try:
            answer: Any = client.request(message, timeout_s)
            result = from_wire(answer.error) if isinstance(answer, Failed) else read(client, answer, asked_s, message)
        except BaseException:
            client.close()
            raise
        if not isinstance(result, Borrowed) or not result.is_lent:
            self._give((address.host, address.port), client)
        if isinstance(result, RaycollectError):
            raise copy_error(result)
        return result

    def give_back(self, address: Address, client: DataClient) -> None:
        """Tells a holder that its memory is no longer read, and keeps the connection."""
        try:
            client.tell(Copied())
        except ChannelError:  # the holder has ended
            client.close()
        else:
            self._give((address.host, address.port), client)

    def _take(self, place: tuple[str, int]) -> DataClient | None:
        for entry in tuple(self._idle):
            if entry[0] == place:
                with suppress(ValueError):  # another thread has taken it
                    self._idle.remove(entry)
                    return entry[1]
        return None

    def _give(self, place: tuple[str, int], client: DataClient) -> None:
        self._idle.append((place, client))
        self.shrink(MAX_IDLE)

    def shrink(self, most: int) -> None:
        """Closes idle connections until at most `most` are left."""
        with suppress(IndexError):
            while len(self._idle) > most:
                self._idle.pop(0)[1].close()


def is_gone(error: ConnectionLostError) -> bool:
    """Whether the holder's port is closed: its process has ended."""
    return isinstance(error.__cause__, ConnectionRefusedError)


def is_full(error: ConnectionLostError) -> bool:
    """Whether this process can't open another connection."""
    return isinstance(error.__cause__, OSError) and error.__cause__.errno in sockets.FULL
