"""The tensors of a key, or an error with the reason; and reading them while no plan writes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from raycollect.backends import arrays
from raycollect.core.model import Key
from raycollect.errors import ConnectionLostError, PlanAbortedError, RaycollectError, Violation, refusal
from raycollect.pos import Absence, Container, Range, State, Store

_MOST_TOLD = 10_000
"""The longest reason in an answer, in characters: a method's exception can be of any length."""


def find(store: Store, key: Key) -> Container:
    """The container of a key; raises TensorLostError, TensorFreedError or TensorDirtyError without a value."""
    container = store.current(key)
    if isinstance(container, Absence):
        if container.state is State.FREED:
            raise refused("freed", "freed", key)
        if container.state is State.REPLACED:
            raise refused("replaced", container.detail, key)
        raise refused("lost", f"not there ({f'{container.state.value} {container.detail}'.rstrip()})", key)
    try:
        ranges = _ranges(container)
    except TypeError as exc:
        raise refused("not_tensor", str(exc), key) from exc
    if store.is_dirty(ranges):
        raise refused("dirty", "half-written by a failed collective", key)
    return container


def _ranges(container: Container) -> list[Range]:
    if not container.is_frozen:
        return [arrays.byte_range(arrays.memory(tensor)) for tensor in container.tensors]
    ranges: list[Range] | None = container.memo.get(_ranges)
    if ranges is None:
        ranges = container.memo[_ranges] = [arrays.byte_range(tensor) for tensor in container.tensors]
    return ranges


def refused(kind: str, actual: str, key: bytes) -> RaycollectError:
    """Makes the error for an unavailable tensor."""
    violation = Violation(kind=kind, rank=-1, field="tensor", found=actual[:_MOST_TOLD], ref=key.hex())
    return refusal("get", "", (violation,))


@contextmanager
def reading(
    store: Store,
    key: Key,
    has_left: Callable[[], bool] = lambda: False,
    limit_s: float = math.inf,
) -> Iterator[Container]:
    """Blocks plans that write the tensors of a key; entering waits for running ones, as long as the key is held.

    Args:
        store: The store.
        key: The key; it may be freed or replaced meanwhile.
        has_left: Returns whether the client has disconnected.
        limit_s: How long to wait, in seconds.

    Raises:
        ConnectionLostError: `has_left` returned True.
        CollectiveTimeoutError: Timed out after `limit_s`.
        RefusedError: See `find`.
    """
    while True:
        container = find(store, key)

        def ended(container: Container = container) -> str | None:
            return "" if store.look(key) is not container or has_left() else None

        try:
            claim = store.reading(_ranges(container), ended, limit_s)
            claim.__enter__()
        except PlanAbortedError:
            if has_left():
                raise ConnectionLostError(detail="the client has ended the connection") from None
            continue
        try:
            # Checked again, as the plan may have failed, or the key may have been freed.
            if find(store, key) is container:
                yield container
                return
        finally:
            claim.__exit__()
