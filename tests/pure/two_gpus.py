"""The fake of cupy with two GPUs: another thread, and calls that it refuses."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.fake_cupy import Fake, installed

SEEDS = range(12)
WAIT_S = 20.0


@pytest.fixture
def fake():
    with installed(2) as made:
        yield made


def elsewhere(function: Any) -> Any:
    """What a function gives in another thread."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join(WAIT_S)
    return found[0]


@contextmanager
def refused(fake: Fake, status: int) -> Iterator[None]:
    with pytest.raises(fake.cupy.cuda.runtime.CUDARuntimeError) as caught:
        yield
    assert caught.value.status == status
