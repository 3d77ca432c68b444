"""The values here whose tokens came from their callers, who tell when nobody holds them any more (P5)."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from raycollect.core.model import Key
from raycollect.errors import ProtocolError
from raycollect.pos import Store

__all__ = ["TokenLenders"]


class TokenLenders:
    """Who has lent tokens, by the names in their connections' greetings. Any thread may call it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._keys: dict[bytes, set[Key]] = {}
        self._lock = threading.Lock()

    def open(self, owner: bytes) -> None:
        """Somebody is connected who may lend tokens."""
        with self._lock:
            self._keys[owner] = set()

    def note(self, owner: bytes, key: Key) -> bool:
        """A value is kept whose token was lent; False where its owner is not connected, and will not tell its end."""
        with self._lock:
            keys = self._keys.get(owner)
            if keys is not None:
                keys.add(key)
            return keys is not None

    def unused(self, owner: bytes, keys: Sequence[bytes]) -> None:
        """Nobody holds these values any more; ProtocolError: it lends nothing here."""
        with self._lock:
            known = self._keys.get(owner)
            if known is None:
                raise ProtocolError(detail="Unused from a controller that lends no tokens")
            gone = [Key(key) for key in keys if key in known]
            known.difference_update(gone)
        self._store.free(gone)

    def close(self, owner: bytes) -> None:
        """An owner is gone, and with it, as Ray has it, all results of its calls."""
        with self._lock:
            gone = self._keys.pop(owner, set())
        self._store.free(list(gone))
