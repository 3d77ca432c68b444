"""The module that docs/backends.md shows: it registers a backend that does what all backends do."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np
import pytest

import raycollect
from raycollect import backends
from raycollect.core.model import PREFIXES, Kernel, Launch, OpKind, ReduceOp
from raycollect.core.protocols import Communicator
from raycollect.errors import GroupBrokenError
from tests.pure.communicators import ThreadTeam

PAGE = Path(raycollect.__file__).parents[1] / "docs" / "backends.md"


def shown(name: str) -> str:
    """The file that the page shows under that name."""
    found = re.search(rf"`{re.escape(name)}`:\n\n```\w+\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert found, name
    return found[1]


@pytest.fixture(params=[1, 3])
def team(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadTeam]:
    monkeypatch.setattr(backends, "BACKENDS", dict(backends.BACKENDS))
    (tmp_path / "courier.py").write_text(shown("courier.py"), encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module("courier")
    made = ThreadTeam("courier", request.param)
    yield made
    made.close()
    sys.modules.pop("courier")


def body(communicator: Communicator, launch: Launch, kernels: dict[int, Kernel]) -> None:
    kernel = kernels[communicator.rank]
    communicator.stage(launch, kernel)
    assert list(communicator.agree(launch, bytes([communicator.rank]))) == [bytes([rank]) for rank in launch.ranks]
    communicator.launch(launch, kernel).wait(launch.timeout_s)
    assert communicator.end(launch, True) == ()


def run(team: ThreadTeam, kernels: dict[int, Kernel]) -> None:
    team.must(body, team.launch(tuple(kernels)), kernels, ranks=tuple(kernels))


def piece(giver: int, taker: int) -> np.ndarray:
    """What one rank has for another: a size and values of their own."""
    return np.arange(giver + 2 * taker) + 100 * giver


def test_its_line_is_found_by_its_name(team: ThreadTeam) -> None:
    found = backends.get("Courier")
    assert found.name == "courier"
    assert backends.is_available("courier")
    assert found.ops == frozenset(OpKind) - frozenset(PREFIXES)


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX])
def test_reductions(team: ThreadTeam, op: ReduceOp) -> None:
    ranks = team.everyone
    expected = {ReduceOp.SUM: np.sum, ReduceOp.AVG: np.mean, ReduceOp.MAX: np.max}[op]
    given = {rank: np.linspace(rank, 7, 6).astype(">f4")[::2] for rank in ranks}
    whole = expected([given[rank] for rank in ranks], axis=0)
    out = {rank: np.zeros((3, 1), np.float32) for rank in ranks}
    run(team, {r: Kernel(kind=OpKind.ALLREDUCE, src=given[r], dst=out[r], op=op) for r in ranks})
    for rank in ranks:
        np.testing.assert_allclose(out[rank][:, 0], whole, rtol=1e-6)
    root = ranks[-1]
    dst = {root: given[root]}
    run(team, {r: Kernel(kind=OpKind.REDUCE, src=given[r], dst=dst.get(r), op=op, peer=root) for r in ranks})
    np.testing.assert_allclose(given[root], whole, rtol=1e-6)

    pieces = {r: tuple(np.arange(2.0 + taker) * (r + 1) for taker in ranks) for r in ranks}
    scattered = {r: expected([pieces[giver][r] for giver in ranks], axis=0) for r in ranks}
    run(team, {r: Kernel(kind=OpKind.REDUCESCATTER, src=pieces[r], dst=pieces[r][r], op=op) for r in ranks})
    for rank in ranks:
        np.testing.assert_allclose(pieces[rank][rank], scattered[rank])


def test_movements_from_and_to_each_rank(team: ThreadTeam) -> None:
    ranks = team.everyone
    for root in ranks:
        values = {r: np.full(4, r) for r in ranks}
        run(
            team,
            {r: Kernel(kind=OpKind.BROADCAST, peer=root, **{"src" if r == root else "dst": values[r]}) for r in ranks},
        )
        assert all((values[r] == root).all() for r in ranks)

        taken = tuple(np.zeros_like(piece(giver, root)) for giver in ranks)
        run(
            team,
            {
                r: Kernel(kind=OpKind.GATHER, src=piece(r, root), dst=taken if r == root else None, peer=root)
                for r in ranks
            },
        )
        given = {r: np.zeros_like(piece(root, r)) for r in ranks}
        whole = tuple(piece(root, taker) for taker in ranks)
        run(
            team,
            {r: Kernel(kind=OpKind.SCATTER, src=whole if r == root else None, dst=given[r], peer=root) for r in ranks},
        )
        for rank in ranks:
            np.testing.assert_array_equal(taken[rank], piece(rank, root))
            np.testing.assert_array_equal(given[rank], piece(root, rank))


def test_movements_among_all(team: ThreadTeam) -> None:
    ranks = team.everyone
    gathered = {r: tuple(np.zeros_like(piece(giver, 1)) for giver in ranks) for r in ranks}
    run(team, {r: Kernel(kind=OpKind.ALLGATHER, src=piece(r, 1), dst=gathered[r]) for r in ranks})
    swapped = {r: tuple(np.zeros_like(piece(giver, r)) for giver in ranks) for r in ranks}
    given = {r: tuple(piece(r, taker) for taker in ranks) for r in ranks}
    run(team, {r: Kernel(kind=OpKind.ALLTOALL, src=given[r], dst=swapped[r]) for r in ranks})
    for rank, giver in product(ranks, ranks):
        np.testing.assert_array_equal(gathered[rank][giver], piece(giver, 1))
        np.testing.assert_array_equal(swapped[rank][giver], piece(giver, rank))
    run(team, {r: Kernel(kind=OpKind.BARRIER) for r in ranks})


def test_send_between_each_two(team: ThreadTeam) -> None:
    for giver, taker in product(team.everyone, team.everyone):
        if giver != taker:
            taken = np.zeros_like(piece(giver, taker))
            send = Kernel(kind=OpKind.SEND, src=piece(giver, taker), peer=taker)
            recv = Kernel(kind=OpKind.RECV, dst=taken, peer=giver)
            run(team, dict(sorted({giver: send, taker: recv}.items())))
            np.testing.assert_array_equal(taken, piece(giver, taker))


def test_a_closed_communicator_says_so(team: ThreadTeam) -> None:
    team.communicators[0].close()
    with pytest.raises(GroupBrokenError, match="closed"):
        team.communicators[0].agree(team.launch(), b"")
