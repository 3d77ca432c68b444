"""Kernels that work in place: which do, what they give, and how ranks come to see each other's arrays."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from raycollect.backends.shm.staged import StagedKernels
from raycollect.core.model import BufferRef, Kernel, OpKind, ReduceOp, Segment
from raycollect.core.protocols import Communicator, SegmentSource
from raycollect.errors import CollectiveTimeoutError, KernelError, PlanAbortedError
from raycollect.pos import tensors
from raycollect.pos.segments import Segments
from tests.pure.backends.in_place_kernels import body_allreduce, one_of_each, trio
from tests.pure.communicators import ThreadTeam
from tests.pure.conformance import Case, check_cases, run_launch
from tests.pure.watched import WAIT_S
from tests.support.values import replace

__all__ = ["trio"]  # a fixture


def by_name(case: Case) -> str:
    return case.kind.value


@pytest.mark.parametrize("case", one_of_each(), ids=by_name)
def test_nothing_is_staged(monkeypatch: pytest.MonkeyPatch, trio: ThreadTeam, case: Case) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a kernel was staged")

    monkeypatch.setattr(StagedKernels, "run", refuse)
    check_cases(trio, [case])
    monkeypatch.setattr(
        StagedKernels, "stage", lambda self, launch, kernel: self._outgoing(launch, kernel) and refuse()
    )
    check_cases(trio, [case], staged=True)


@pytest.mark.parametrize(
    "kind", [OpKind.ALLREDUCE, OpKind.REDUCE, OpKind.GATHER, OpKind.SEND], ids=lambda kind: kind.value
)
def test_nobody_writes_into_an_array_before_its_owner_runs_the_kernel(kind: OpKind) -> None:
    """Past the consistency check, the owner may still wait for those who read the array."""
    team = ThreadTeam("shm", 2)
    size = 20_001
    taken = [tensors.full(size, -1.0) for _ in range(2)]
    given = (np if kind is OpKind.SEND else tensors).full(size, 1.0)
    kernels = {
        OpKind.ALLREDUCE: [Kernel(kind=kind, src=array, dst=array, op=ReduceOp.SUM) for array in (taken[0], given)],
        OpKind.REDUCE: [
            Kernel(kind=kind, src=array, dst=array if array is not given else None, op=ReduceOp.SUM, peer=0)
            for array in (taken[0], given)
        ],
        OpKind.GATHER: [
            Kernel(kind=kind, src=taken[0].copy(), dst=tuple(taken), peer=0, most=size),
            Kernel(kind=kind, src=given, peer=0, most=size),
        ],
        OpKind.SEND: [Kernel(kind=OpKind.RECV, dst=taken[0], peer=1), Kernel(kind=kind, src=given, peer=0)],
    }[kind]
    first = team.launch()
    team.must(lambda communicator: run_launch(communicator, first, kernels[communicator.rank]))  # maps the arrays
    assert (taken[kind is OpKind.GATHER] != -1).all()
    for array, value in ((given, 5), (taken[0], -1), (taken[1], -1)):
        array[:] = value
    launch, given_up = team.launch(timeout_s=1), threading.Event()

    def body(communicator: Communicator) -> None:
        kernel = kernels[communicator.rank]
        communicator.agree(launch, b"", kernel)
        try:
            if communicator.rank == 0:
                assert given_up.wait(WAIT_S)
                return
            with pytest.raises(CollectiveTimeoutError):
                communicator.launch(launch, (kernel,))
        finally:
            given_up.set()
            communicator.end(launch, False)

    team.must(body)
    team.close()
    for array in taken:
        assert (array == -1).all()


# ---------------------------------------------------------------------------------------------- mapping


class Blind(SegmentSource):
    """A process whose memory others can see, and which can't see theirs."""

    def __init__(self) -> None:
        self.attempts = 0

    def locate(self, address: int, nbytes: int) -> BufferRef | None:
        return Segments.current().locate(address, nbytes)

    def open(self, segment: Segment) -> Any:
        self.attempts += 1
        raise OSError(13, "Permission denied")


@pytest.mark.parametrize("staged", [False, True])
def test_where_one_rank_can_not_map_all_stage_and_it_is_not_asked_again(staged: bool) -> None:
    blind = Blind()
    team = ThreadTeam("shm", 3, lambda rank: blind if rank == 2 else Segments.current())
    for _ in range(2):
        check_cases(team, [case for case in one_of_each() if case.kind is not OpKind.SEND], staged=staged)
    assert blind.attempts == 1
    team.close()


def test_ranks_that_see_each_other_work_in_place_beside_one_that_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    team = ThreadTeam("shm", 3, lambda rank: Blind() if rank == 0 else Segments.current())
    monkeypatch.setattr(StagedKernels, "run", None)
    (send,) = (case for case in one_of_each() if case.kind is OpKind.SEND)
    check_cases(team, [send, send])
    team.close()


# ---------------------------------------------------------------------------------------------- listings


def test_a_listing_beyond_its_segment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Liar(Blind):
        def locate(self, address: int, nbytes: int) -> BufferRef | None:
            ref = super().locate(address, nbytes)
            return ref and replace(ref, offset=ref.segment.nbytes - 8)

        def open(self, segment: Segment) -> Any:
            return Segments.current().open(segment)

    team = ThreadTeam("shm", 2, lambda rank: Liar() if rank else Segments.current())
    arrays = [tensors.zeros(100_000) for _ in team.everyone]
    results = team.run(body_allreduce, team.launch(), arrays)
    assert all(isinstance(result, (KernelError, PlanAbortedError)) or "beyond" in str(result) for result in results)
    assert any("beyond the end" in str(result) for result in results)
    team.close()
