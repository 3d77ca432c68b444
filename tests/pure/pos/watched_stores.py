"""What tests of the store share: threads, and a store whose waits are seen."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from raycollect.pos import Store
from tests.pure.watched import WatchedCondition


class Owner:
    """Something that owns memory."""


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def watched_store() -> tuple[Store, WatchedCondition]:
    store, watched = Store(), WatchedCondition()
    store._changed = store._lock = watched
    return store, watched
