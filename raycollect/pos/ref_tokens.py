"""Token refs: they notify a participant when the last reference to a value is released (P5).

A participant does not own the refs that its methods return, so Ray does not report their end. It does own tokens that
it puts itself. Each `Handle` carries a token, nested: Ray counts it with the value, through every borrower, discarded
results and dead owners included, and notifies its owner when the last copy is released.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import ray

from raycollect.core import threads
from raycollect.core.model import Key
from raycollect.ray_bridge import ray_refs


class RefTokenPool:
    """Tokens created off the hot path, in a helper thread; `size` of them are kept ready.

    `on_gone` is called with a key when the last copy of its token is released; on a thread of Ray, so it must be quick.
    """

    def __init__(self, on_gone: Callable[[Key], None], *, size: int = 64) -> None:
        self._on_gone = on_gone
        self._size = size
        self._ready: list[tuple[Any, list[Key]]] = []
        self._is_filling = False
        self._lock = threading.Lock()
        first = self._make()
        self.supported: bool = first is not None
        """False if this Ray can't report the release of a ref."""
        if first is not None:
            self._ready.append(first)

    def take(self, key: Key) -> Any:
        """A token for `key`; None if this Ray can't report the release of a ref."""
        if not self.supported:
            return None
        with self._lock:
            token, cell = self._ready.pop() if self._ready else (None, [])
            fills = len(self._ready) < self._size // 2 and not self._is_filling
            self._is_filling = self._is_filling or fills
        if fills and not threads.survives(threads.call_in_helper, threads.survives, self._fill):
            self._is_filling = False  # each `take` creates its own token meanwhile
        if token is None:
            entry = self._make()
            token, cell = entry if entry is not None else (None, cell)
        cell.append(key)
        return token

    def _make(self) -> tuple[Any, list[Key]] | None:
        token = ray.put(b"")
        cell: list[Key] = []

        def gone() -> None:
            for key in cell:
                self._on_gone(key)

        return (token, cell) if ray_refs.on_last_ref(token, gone) else None

    def _fill(self) -> None:
        try:
            while self._add_one():
                pass
        finally:
            self._is_filling = False

    def _add_one(self) -> bool:
        # In its own call, so that no local variable keeps a token alive while the next one is created.
        entry = self._make()
        with self._lock:
            if entry is not None:
                self._ready.append(entry)
            return len(self._ready) < self._size
