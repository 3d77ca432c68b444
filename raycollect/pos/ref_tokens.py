"""Token refs: how a participant learns that nobody holds a value any more (P5).

A participant does not own the refs that its methods return, so it can't ask Ray about them. It does own tokens that it
puts itself. Each `Handle` carries one, nested: Ray counts it with the value, through every borrower, discarded results
and dead owners included, and tells its owner when the last copy is gone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import ray

from raycollect.core import ray_internals, threads
from raycollect.core.model import Key


class RefTokenPool:
    """Tokens made off the hot path, by a thread of its own; `size` of them are kept ready.

    `on_gone` is called with a key when the last copy of its token is gone; on a thread of Ray's, must be quick.
    """

    def __init__(self, on_gone: Callable[[Key], None], *, size: int = 64) -> None:
        self._on_gone = on_gone
        self._size = size
        self._ready: list[tuple[Any, list[Key]]] = []
        self._changed = threading.Condition()
        self._filler: threading.Thread | None = None
        first = self._make()
        self.supported: bool = first is not None
        """False where this Ray can't tell when a ref is gone."""
        if first is not None:
            self._ready.append(first)

    def take(self, key: Key) -> Any:
        """A token that stands for `key`; None where this Ray can't tell when a ref is gone."""
        if not self.supported:
            return None
        with self._changed:
            token, cell = self._ready.pop() if self._ready else (None, [])
            if len(self._ready) < self._size // 2:
                self._start_filler()
                self._changed.notify()
        if token is None:
            made = self._make()
            token, cell = made if made is not None else (None, cell)
        cell.append(key)
        return token

    def _make(self) -> tuple[Any, list[Key]] | None:
        token = ray.put(b"")
        cell: list[Key] = []

        def gone() -> None:
            for key in cell:
                self._on_gone(key)

        return (token, cell) if ray_internals.on_last_ref(token, gone) else None

    def _start_filler(self) -> None:
        if self._filler is None:
            threads.survives(self._begin)  # without it each `take` makes its own token

    def _begin(self) -> None:
        self._filler = threads.start("raycollect-tokens", threads.repeat, self._fill)

    def _fill(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: len(self._ready) < self._size // 2)
        while self._add_one():
            pass
        return True

    def _add_one(self) -> bool:
        # In a call of its own, so that no local of the sleeping thread keeps a token alive.
        made = self._make()
        with self._changed:
            if made is not None:
                self._ready.append(made)
            return len(self._ready) < self._size
