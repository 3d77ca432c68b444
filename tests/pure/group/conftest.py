from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from raycollect import backends
from tests.pure.group.tables import Plain, Table


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Table]]:
    made: list[Table] = []

    def make(kind: type[Plain] = Plain) -> Table:
        made.append(Table(kind))
        monkeypatch.setattr(backends, "load", lambda *_: made[-1].create)
        return made[-1]

    yield make
    for one in made:
        one.close()
