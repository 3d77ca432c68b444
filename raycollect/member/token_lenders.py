"""Values whose tokens belong to their callers, which report the end of the last reference (P5)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from raycollect.core import threads
from raycollect.core.model import Key
from raycollect.pos import Absence, Store

LOOK_S = 1.0
"""How often an owner whose connection has ended is checked for liveness, in seconds."""


class TokenLenders:
    """The owners of lent tokens, by the names in the hellos of their connections. Any thread may call it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._keys: dict[bytes, set[Key]] = {}
        self._connected: set[bytes] = set()
        self._lock = threading.Lock()

    def open(self, owner: bytes) -> None:
        """Registers a connected owner, which may lend tokens."""
        with self._lock:
            self._keys[owner] = set()
            self._connected.add(owner)

    def is_connected(self, owner: bytes) -> bool:
        """Whether an owner's connection is open."""
        return owner in self._connected

    def note(self, owner: bytes, key: Key) -> bool:
        """Registers a value with a lent token; False if the owner is not connected, and so can't report its end."""
        with self._lock:
            is_connected = owner in self._connected
            if is_connected:
                self._keys[owner].add(key)
            return is_connected

    def unused(self, owner: bytes, keys: Sequence[bytes]) -> int:
        """Frees those of the values that have tokens of this owner; returns their number.

        Other values have tokens of their own, as their methods ended after the connection.
        """
        with self._lock:
            lent = self._keys.get(owner, set())
            gone = [Key(key) for key in keys if key in lent]
            lent.difference_update(gone)
        return self._store.free(gone)

    def close(self, owner: bytes, is_alive: Callable[[], bool]) -> None:
        """Handles the end of a connection: its values are freed after the death of the owner, as Ray does with results.

        Until then the owner frees values itself, by a data connection.
        """
        with self._lock:
            self._connected.discard(owner)
            if not self._keys.get(owner):
                self._keys.pop(owner, None)
                return
        threads.call_in_helper(threads.repeat, partial(self._look, owner, is_alive))

    def _look(self, owner: bytes, is_alive: Callable[[], bool]) -> bool:
        lives = is_alive()
        with self._lock:
            held = [key for key in self._keys[owner] if not isinstance(self._store.look(key), Absence)]
            if lives and held:
                self._keys[owner] = set(held)
            else:
                del self._keys[owner]
        if lives and held:
            time.sleep(LOOK_S)
            return True
        self._store.free(held)
        return False
