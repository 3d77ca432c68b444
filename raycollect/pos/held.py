"""Reading the tensors of a key while nobody writes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from raycollect.backends import arrays
from raycollect.core.model import Key
from raycollect.errors import ConnectionLostError, PlanAbortedError
from raycollect.pos import Container, Store


@contextmanager
def reading(
    find: Callable[[Store, Key], Container],
    store: Store,
    key: Key,
    has_left: Callable[[], bool] = lambda: False,
    limit_s: float = math.inf,
) -> Iterator[Container]:
    """Holds off plans that write the tensors of a key; entering waits for those that do, as long as the key is held.

    Args:
        find: Looks up the key, and raises where it is not held.
        store: The store.
        key: The key, which may be freed or come to stand for other tensors meanwhile.
        has_left: Whether whoever asked for the tensors does not wait any more.
        limit_s: How long to wait, in seconds.

    Raises:
        ConnectionLostError: `has_left` says so.
        CollectiveTimeoutError: The limit is over.
        RefusedError: As `find`.
    """
    while True:
        container = find(store, key)

        def ended(container: Container = container) -> str | None:
            return "" if store.look(key) is not container or has_left() else None

        ranges = [arrays.byte_range(arrays.memory(tensor)) for tensor in container.tensors]
        try:
            claim = store.reading(ranges, ended, limit_s)
            claim.__enter__()
        except PlanAbortedError:
            if has_left():
                raise ConnectionLostError(detail="the client has ended the connection") from None
            continue
        try:
            # Once more: the plan that was waited for may have failed, or the key may have been freed to be written.
            if find(store, key) is container:
                yield container
                return
        finally:
            claim.__exit__()
