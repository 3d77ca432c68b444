from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from raycollect import backends
from tests.pure.closing import closing_all
from tests.pure.group.tables import Plain, Table


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Table]]:
    def make(*kind: type[Plain]) -> Table:
        made: Table = closed(*kind)
        monkeypatch.setattr(backends, "load", lambda *_: made.create)
        return made

    with closing_all(Table) as closed:
        yield make
