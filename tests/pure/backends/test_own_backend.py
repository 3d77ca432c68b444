"""The module that docs/backends.md shows: it registers a backend that does what all backends do."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import raycollect
from raycollect import backends
from raycollect.core.model import OpKind, Pricing, ReduceOp
from raycollect.core.operations import PARTIAL_FOLDS
from raycollect.errors import GroupBrokenError
from raycollect.planner import Cluster, predict
from tests.pure.communicators import ThreadTeam
from tests.pure.conformance import KINDS, check_cases, every_case
from tests.support.values import replace

PAGE = Path(raycollect.__file__).parents[1] / "docs" / "backends.md"


OPS = (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX)


def shown(name: str) -> str:
    """The file that the page shows under that name."""
    match = re.search(rf"`{re.escape(name)}`:\n\n```\w+\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert match, name
    return match[1]


@pytest.fixture(params=[1, 3])
def team(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadTeam]:
    monkeypatch.setattr(backends, "BACKENDS", dict(backends.BACKENDS))
    (tmp_path / "courier.py").write_text(shown("courier.py"), encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module("courier")
    started = ThreadTeam("courier", request.param)
    yield started
    started.close()
    sys.modules.pop("courier")


def test_its_line_is_found_by_its_name(team: ThreadTeam) -> None:
    line = backends.get("Courier")
    assert line.name == "courier"
    assert backends.is_available("courier")
    assert line.ops == frozenset(OpKind) - frozenset(PARTIAL_FOLDS)


@pytest.mark.parametrize("layout", ["plain", "every other", "big-endian", "read-only"])
def test_every_kernel_from_and_to_each_rank(team: ThreadTeam, layout: str) -> None:
    cases = every_case("float32", team.world_size, (0, 7), KINDS)
    check_cases(team, [replace(case, layout=layout) for case in cases if case.op in (None, *OPS)])


@pytest.mark.parametrize("kind", [OpKind.ALLREDUCE, OpKind.BROADCAST, OpKind.ALLGATHER])
def test_it_is_priced_by_how_it_says_that_data_moves(team: ThreadTeam, kind: OpKind) -> None:
    line = backends.get("courier")
    by_rings, mesh = (
        predict(kind, 1 << 20, Cluster(hosts=4, ranks_per_host=1, backend=replace(line, pricing=pricing)))
        for pricing in (line.pricing, Pricing(transport="mesh"))
    )
    assert mesh == predict(kind, 1 << 20, Cluster(hosts=4, ranks_per_host=1, backend=backends.get("tcp")))
    assert mesh != by_rings


def test_a_closed_communicator_says_so(team: ThreadTeam) -> None:
    team.communicators[0].close()
    with pytest.raises(GroupBrokenError, match="closed"):
        team.communicators[0].agree(team.launch(), b"")
