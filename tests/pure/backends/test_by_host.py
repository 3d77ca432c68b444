"""Backend `tcp` between hosts with several ranks each: what comes out, in which order it is folded, what crosses links.

Ranks are threads of one process, and hosts are what their group says.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from raycollect import backends
from raycollect.backends.tcp import by_host
from raycollect.backends.tcp import communicator as tcp
from raycollect.backends.tcp import run as _tcp_run
from raycollect.backends.tcp.link import TcpMesh
from raycollect.core.model import RANK_ORDER, GroupSpec, OpKind, ReduceOp
from raycollect.core.protocols import Joining
from raycollect.errors import InvalidGroupError
from raycollect.planner import Topology
from raycollect.planner.cost import HostLayout, priced
from tests.pure import conformance
from tests.pure.communicators import MemoryExchange, MemoryRendezvous, MemoryStar, ThreadTeam
from tests.pure.conformance import (
    CASE_RULES,
    FOLDING,
    KINDS,
    SPREADS,
    Case,
    check_cases,
    left_fold,
    operand,
)
from tests.pure.covering import pairwise

PLACES = {
    "3 x 2": (0, 0, 1, 1, 2, 2),
    "2 x 3": (0, 0, 0, 1, 1, 1),
    "in turn": (0, 1, 0, 1),
    "uneven": (0, 1, 1, 1, 2),
    "one apart": (0, 0, 0, 0, 1),
    "four": (0, 1, 2, 3, 0, 1),
}
CHUNK_NBYTES = 32 << 10


class HostsTeam(ThreadTeam):
    """Ranks in threads, on hosts by their numbers."""

    def __init__(self, hosts: tuple[int, ...], *options: tuple[str, Any], backend: str = "tcp") -> None:
        self.in_rank_order = backend != "tcp" or RANK_ORDER in options
        super().__init__(backend, len(hosts), hosts=hosts, options=options)

    def _create(self, rank: int) -> tcp.TcpCommunicator:
        return tcp.connect(
            Joining(self.spec, rank, self.rendezvous, MemoryExchange(self.server, rank)),
            in_rank_order=self.in_rank_order,
        )


@pytest.fixture
def team_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., HostsTeam]]:
    """Makes teams with small chunks, so that small arrays take several."""
    teams: list[HostsTeam] = []

    def make(place: str, *options: tuple[str, Any], backend: str = "tcp") -> HostsTeam:
        for module in (_tcp_run, by_host):
            monkeypatch.setattr(module, "CHUNK_NBYTES", CHUNK_NBYTES)
        hosts = PLACES[place]
        teams.append(HostsTeam(hosts, *options, backend=backend))
        if not teams[-1].in_rank_order:
            monkeypatch.setattr(conformance, "_folded", lambda *case: folded(hosts, *case))
        return teams[-1]

    yield make
    for team in teams:
        team.close()


def folded(hosts: tuple[int, ...], op: ReduceOp, dtype: str, size: int, world: int, seed: int) -> np.ndarray:
    """The left fold over hosts of the left folds inside each; of short floats, that of all ranks."""
    parts = [operand(rank, dtype, size, seed) for rank in range(world)]
    if np.dtype(dtype).itemsize < 4 and dtype in ("float16", *conformance.NARROW):
        return left_fold(op, parts)
    total = ReduceOp.SUM if op is ReduceOp.AVG else op
    by_host = [
        left_fold(total, [part for part, at in zip(parts, hosts, strict=True) if at == host])
        for host in dict.fromkeys(hosts)
    ]
    whole = left_fold(total, by_host)
    if op is ReduceOp.AVG:
        whole = (whole.view(whole.real.dtype) / world).view(whole.dtype)
    return whole


PARAMETERS = {
    "kind": KINDS,
    "dtype": ("uint8", "int64", "float16", "float32", "float64", "complex64", "bfloat16"),
    "op": (None, *ReduceOp),
    "size": (0, 1, 7, 1024, 2500, 40_001),
    "root": range(6),
    "layout": ("plain", "read-only", "every other", "big-endian", "column"),
    "spread": SPREADS,
    "inplace": (False, True),
}
SELECTED = pairwise(PARAMETERS, {two: rule for two, rule in CASE_RULES.items() if "world" not in two})


@pytest.mark.parametrize(
    ("place", "staged"),
    [
        pytest.param(place, staged, marks=[pytest.mark.full] * ((at + staged) % 2))
        for at, place in enumerate(PLACES)
        for staged in (False, True)
    ],
)
def test_every_kernel_is_right_and_folds_host_by_host(team_of, place, staged):
    team = team_of(place)
    world = team.world_size
    cases = [Case(**selected, peer=(selected["root"] + 1) % world) for selected in SELECTED if selected["root"] < world]
    check_cases(team, cases, staged=staged)


@pytest.mark.parametrize("place", ["3 x 2", "uneven"])
def test_rank_order_is_kept_on_request(team_of, place):
    team = team_of(place, RANK_ORDER)
    cases = [
        Case(kind=kind, dtype="float32", size=size, op=ReduceOp.SUM, inplace=inplace)
        for kind in FOLDING
        for size in (7, 40_001)
        for inplace in (False, True)
    ]
    check_cases(team, cases)


def test_beside_a_library_only_what_is_not_folded_goes_by_host(team_of):
    """As `meshed` says: reductions are in rank order there."""
    team = team_of("3 x 2", backend="gloo")
    assert team.in_rank_order
    check_cases(team, [Case(kind=kind, dtype="float32", size=40_001, op=ReduceOp.SUM) for kind in FOLDING])


MINIMUM = {
    OpKind.ALLREDUCE: lambda hosts, ranks: 2 * (hosts - 1) / hosts,
    OpKind.REDUCE: lambda hosts, ranks: 1,
    OpKind.REDUCESCATTER: lambda hosts, ranks: (hosts - 1) / hosts,
    OpKind.ALLGATHER: lambda hosts, ranks: (hosts - 1) / hosts,  # of all pieces together
    OpKind.BROADCAST: lambda hosts, ranks: 1,
    OpKind.ALLTOALL: lambda hosts, ranks: ranks * (hosts - 1) / hosts,
}
"""The bytes that the busiest host has to send, by those of the whole."""


@pytest.mark.parametrize(
    ("backend", "kind"),
    [*(("tcp", kind) for kind in MINIMUM), ("gloo", OpKind.ALLGATHER), ("gloo", OpKind.BROADCAST)],
)
@pytest.mark.parametrize(("place", "hosts", "ranks"), [("3 x 2", 3, 2), ("2 x 3", 2, 3), ("in turn", 2, 2)])
def test_a_host_sends_the_minimum(team_of, monkeypatch, backend, kind, place, hosts, ranks):
    team, places = team_of(place, backend=backend), PLACES[place]
    sent, inside, lock = Counter[int](), 0, threading.Lock()
    send = TcpMesh.send

    def counted(link, rank, array, batch):
        nonlocal inside
        with lock:
            if places[rank] != places[link.rank]:
                sent[places[link.rank]] += array.nbytes
            else:
                inside += array.nbytes
        send(link, rank, array, batch)

    monkeypatch.setattr(TcpMesh, "send", counted)
    size = 60_000
    op = ReduceOp.SUM if kind in FOLDING else None
    check_cases(team, [Case(kind=kind, dtype="float32", size=size, op=op)])
    assert max(sent.values()) <= 1.001 * MINIMUM[kind](hosts, ranks) * 4 * size
    given = size * 4 // (team.world_size if kind is OpKind.ALLGATHER else 1)
    predicted = priced(kind, backends.get(backend).pricing, HostLayout.of(Topology.of(places))).traffic(given)
    assert sum(sent.values()) == pytest.approx(predicted[1], rel=0.001), "as the planner tells"
    assert inside == pytest.approx(predicted[0], rel=0.2 if kind is OpKind.REDUCE else 0.001)


@pytest.mark.parametrize("value", [True, "yes", None])
def test_another_order_is_refused(value):
    spec = GroupSpec(name="g", group_id="1", backend="tcp", world_size=2, options=(("deterministic", value),))
    with pytest.raises(InvalidGroupError, match=r"'deterministic' is .* not 'rank_order'"):
        tcp.create(Joining(spec, 0, MemoryRendezvous(), MemoryExchange(MemoryStar(), 0)))


@pytest.mark.parametrize("world", [1, 2])
def test_an_option_that_tcp_lacks_is_refused_before_anybody_is_waited_for(world):
    spec = GroupSpec(name="g", group_id="1", backend="tcp", world_size=world, options=(("timeout", 3),))
    with pytest.raises(InvalidGroupError, match="there is no option 'timeout'; there is 'deterministic'"):
        tcp.create(Joining(spec, 0, MemoryRendezvous(), MemoryExchange(MemoryStar(), 0)))
