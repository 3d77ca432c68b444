"""Kernels of many chunks: the same results, and no more memory than the backend claims (P8)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from raycollect import backends
from raycollect.backends import meshed
from raycollect.backends.shm import direct, in_place, staged
from raycollect.backends.tcp import run
from raycollect.core.model import OpKind
from tests.pure.communicators import ProcessTeam, ThreadTeam, Workers
from tests.pure.conformance import ALL_KINDS, body_peak, check_cases, every_case, is_absent
from tests.support.values import replace

SLICED_FROM, WHOLE_UP_TO = "SLICED_FROM_NBYTES", "WHOLE_UP_TO_NBYTES"
MOST = 1 << 30
WAYS: dict[str, tuple[str, str, dict[tuple[Any, str], Any]]] = {
    "shm": ("shm", "plain", {(staged, SLICED_FROM): ((3, 128),)}),
    "shm, sliced": (
        "shm",
        "every other",
        {(staged, SLICED_FROM): ((2, 0),), (staged, "SLICED_WIDE_FROM_NBYTES"): ((2, 0),)},
    ),
    "shm, in place": (
        "shm",
        "shared",
        {(direct, "DIRECT_FROM_NBYTES"): 1, (in_place, "FOLD_NBYTES"): 256, (in_place, "COPY_NBYTES"): 512},
    ),
    "tcp, whole": ("tcp", "plain", {(run, WHOLE_UP_TO): ((MOST, 1 << 62),)}),
    "tcp, sliced": ("tcp", "plain", {(run, WHOLE_UP_TO): ((MOST, -1),)}),
}
"""A way to run kernels: its backend, the layout of the arrays, and what makes them go that way."""


@pytest.mark.parametrize("nbytes", [256, pytest.param(4096, marks=pytest.mark.full)])
@pytest.mark.parametrize("is_staged", [False, True], ids=["", "staged"])
@pytest.mark.parametrize("world", [1, 2, 3, pytest.param(5, marks=pytest.mark.full)])
@pytest.mark.parametrize("way", WAYS)
def test_every_kernel_in_many_chunks(
    monkeypatch: pytest.MonkeyPatch, way: str, world: int, is_staged: bool, nbytes: int
) -> None:
    """More chunks than slots, pieces that end in different ones, slots that are cut to a cache line."""
    backend, layout, changes = WAYS[way]
    monkeypatch.setattr({"shm": staged, "tcp": run}[backend], "CHUNK_NBYTES", nbytes)
    for (module, name), value in changes.items():
        monkeypatch.setattr(module, name, value)
    team = ThreadTeam(backend, world)
    for dtype in ("int16", "complex128") if is_staged else ("float64", "bfloat16"):
        cases = every_case(dtype, world, (7, 600))
        check_cases(team, [replace(case, layout=layout) for case in cases], staged=is_staged)
    team.close()


LARGE = {
    "shm": 8 * staged.CHUNK_NBYTES,
    "tcp": 12 * run.CHUNK_NBYTES,
    "gloo": meshed.MESH_UP_TO_NBYTES[0][1] + (1 << 10),  # else the mesh has them
}
"""How many bytes the arrays have."""

SMALL_NBYTES = 64 << 10
"""What a kernel takes beside its chunks."""


@pytest.fixture(scope="module", params=LARGE)
def processes(request: pytest.FixtureRequest, workers: Workers) -> Iterator[ProcessTeam]:
    if absent := is_absent(request.param):
        pytest.skip(absent)
    started = ProcessTeam(request.param, 3, workers(3))
    yield started
    started.close()


OFTEN = OpKind.ALLREDUCE, OpKind.REDUCESCATTER, OpKind.ALLGATHER, OpKind.ALLTOALL
"""Each takes memory in a way of its own; the others are parts of these."""


@pytest.mark.parametrize("has_gaps", [False, True], ids=["", "gaps"])
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[pytest.mark.full] * (kind not in OFTEN))
        for kind in ALL_KINDS
        if kind is not OpKind.SEND
    ],
)
def test_a_kernel_takes_what_its_backend_claims_however_large_its_arrays(
    processes: ProcessTeam, kind: OpKind, has_gaps: bool
) -> None:
    backend = processes.backend
    peaks = processes.must(body_peak, processes.launch(timeout_s=60), kind, LARGE[backend], has_gaps)
    assert max(peaks) <= backends.get(backend).chunk_nbytes + SMALL_NBYTES
