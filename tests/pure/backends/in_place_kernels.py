"""Kernels that work in place among three ranks, of which a test can hold one up."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from raycollect.backends.shm import in_place
from raycollect.core.model import Kernel, Launch, OpKind, ReduceOp
from raycollect.core.protocols import Communicator
from raycollect.errors import PlanAbortedError
from tests.pure.communicators import ThreadTeam
from tests.pure.conformance import KINDS, REDUCTIONS, Case, run_launch
from tests.pure.watched import WAIT_S


@pytest.fixture
def trio() -> Iterator[ThreadTeam]:
    started = ThreadTeam("shm", 3)
    yield started
    started.close()


def one_of_each(size: int = 200_001) -> list[Case]:
    """A case per kernel, with a root in the middle."""
    return [
        Case(
            kind=kind,
            dtype="float32",
            size=size,
            op=ReduceOp.SUM if kind in REDUCTIONS else None,
            root=1,
            peer=2 if kind is OpKind.SEND else -1,
            layout="shared",
        )
        for kind in KINDS
    ]


class Stop:
    """Holds one rank up in the middle of its part of a kernel."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, part: Callable[..., bool]) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        original = getattr(in_place.InPlaceRun, name)

        def held_up(work: Any, *args: Any) -> Any:
            if part(work) and not self.reached.is_set():
                self.reached.set()
                assert self.go_on.wait(WAIT_S)
            return original(work, *args)

        monkeypatch.setattr(in_place.InPlaceRun, name, held_up)

    def abort_others(self, team: ThreadTeam, launch: Launch, futures: list[Any]) -> None:
        """Aborts ranks 0 and 1, once rank 2 is held up."""
        assert self.reached.wait(WAIT_S)
        for rank in (0, 1):
            team.communicators[rank].abort(launch.seq)
            assert_aborted(futures[rank])


def assert_aborted(future: Any) -> None:
    """The rank was aborted. Lets go of the error's frames, which hold arrays, as the executor does."""
    error = future.result(WAIT_S)
    assert isinstance(error, PlanAbortedError)
    error.with_traceback(None)


def body_allreduce(communicator: Communicator, launch: Launch, arrays: list[Any]) -> None:
    array = arrays[communicator.rank]
    run_launch(communicator, launch, Kernel(kind=OpKind.ALLREDUCE, src=array, dst=array, op=ReduceOp.SUM))
