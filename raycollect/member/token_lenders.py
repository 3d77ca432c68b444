"""The values here whose tokens came from their callers, who tell when nobody holds them any more (P5)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from raycollect.core import threads
from raycollect.core.model import Key
from raycollect.errors import ProtocolError
from raycollect.pos import Absence, Store

LOOK_S = 1.0
"""How often it is asked whether an owner lives whose connection has ended."""


class TokenLenders:
    """Who has lent tokens, by the names in their connections' greetings. Any thread may call it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._keys: dict[bytes, set[Key]] = {}
        self._connected: set[bytes] = set()
        self._lock = threading.Lock()

    def open(self, owner: bytes) -> None:
        """Somebody is connected who may lend tokens."""
        with self._lock:
            self._keys[owner] = set()
            self._connected.add(owner)

    def note(self, owner: bytes, key: Key) -> bool:
        """A value is kept whose token was lent; False where its owner is not connected, and may not tell its end."""
        with self._lock:
            is_connected = owner in self._connected
            if is_connected:
                self._keys[owner].add(key)
            return is_connected

    def unused(self, owner: bytes, keys: Sequence[bytes]) -> None:
        """Nobody holds these values any more; ProtocolError: it lends nothing here."""
        with self._lock:
            if owner not in self._connected:
                raise ProtocolError(detail="Unused from a controller that lends no tokens")
            known = self._keys[owner]
            gone = [Key(key) for key in keys if key in known]
            known.difference_update(gone)
        self._store.free(gone)

    def close(self, owner: bytes, is_alive: Callable[[], bool]) -> None:
        """A connection has ended: its values are freed when the owner is gone, as all results of its calls are for Ray.

        Until then it frees values itself, by a data connection.
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
            kept = [key for key in self._keys[owner] if not isinstance(self._store.look(key), Absence)]
            if lives and kept:
                self._keys[owner] = set(kept)
            else:
                del self._keys[owner]
        if lives and kept:
            time.sleep(LOOK_S)
            return True
        self._store.free(kept)
        return False
