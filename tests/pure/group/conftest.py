from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from raycollect import backends
from tests.pure.closing import closing_all
from tests.pure.group.tables import Plain, Table


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Table]]:
    def make(*kind: type[Plain]) -> Table:
        table: Table = closed(*kind)
        monkeypatch.setattr(backends, "load", lambda *_: table.create)
        return table

    with closing_all(Table) as closed:
        yield make
