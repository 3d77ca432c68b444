"""Arrays that others may still write, or read, when a kernel in place ends early."""

from __future__ import annotations

import gc
import mmap
import subprocess
import threading
import weakref
from typing import Any

import numpy as np
import pytest

from raycollect.backends.shm import in_place
from raycollect.backends.shm.meeting import Meeting, control_nbytes, prepare
from raycollect.core.model import OpKind, ReduceOp
from raycollect.core.protocols import Communicator
from raycollect.errors import PlanAbortedError
from raycollect.pos import tensors
from tests.pure.backends.in_place_kernels import Stop, assert_aborted, body_allreduce, one_of_each, trio
from tests.pure.communicators import ThreadTeam
from tests.pure.conformance import check_cases, run_case
from tests.pure.watched import WAIT_S

__all__ = ["trio"]  # a fixture


def test_an_array_is_kept_until_nobody_can_write_it_any_more(monkeypatch: pytest.MonkeyPatch, trio: ThreadTeam) -> None:
    """The other ranks give up on one that is held up in mid-kernel. When it goes on, it must hit nothing new."""
    arrays: list[Any] = [tensors.zeros(100_000) for _ in trio.everyone]
    root = weakref.ref(arrays[0].base)
    stop = Stop(monkeypatch, "_reduce", lambda work: work._rank == 2)
    launch = trio.launch()
    futures = [trio.start(rank, body_allreduce, launch, arrays) for rank in trio.everyone]
    stop.abort_others(trio, launch, futures)
    arrays[0] = None
    gc.collect()
    assert root() is not None
    stop.go_on.set()
    assert_aborted(futures[2])  # it sees that the others have left
    arrays[0] = np.zeros(100_000)
    trio.must(body_allreduce, trio.launch(), arrays)
    gc.collect()
    assert root() is None


@pytest.mark.parametrize("kind", [OpKind.BROADCAST, OpKind.SCATTER, OpKind.ALLGATHER, OpKind.ALLTOALL])
def test_what_was_read_of_a_rank_that_has_left_is_not_believed(
    monkeypatch: pytest.MonkeyPatch, trio: ThreadTeam, kind: OpKind
) -> None:
    """The arrays of a rank that has left are its own again, and may hold anything."""
    (case,) = (case for case in one_of_each() if case.kind is kind)
    stop = Stop(monkeypatch, "_copy", lambda work: work._rank == 2)
    launch = trio.launch()

    def body(communicator: Communicator) -> Any:
        return run_case(communicator, launch, case, True, False)

    futures = [trio.start(rank, body) for rank in trio.everyone]
    assert stop.reached.wait(WAIT_S)
    trio.communicators[1].abort(launch.seq)
    assert_aborted(futures[1])
    stop.go_on.set()
    if isinstance(futures[0].result(WAIT_S), BaseException):  # a root may have given all it has, and left
        assert_aborted(futures[0])
    assert_aborted(futures[2])
    check_cases(trio, [case])


def test_an_abort_is_seen_between_two_blocks(monkeypatch: pytest.MonkeyPatch, trio: ThreadTeam) -> None:
    arrays = [tensors.zeros(1_000_000) for _ in trio.everyone]
    folded = []
    original = in_place.fold

    def slow(op: ReduceOp, parts: Any, out: Any) -> None:
        if threading.get_ident() == held[0]:
            trio.communicators[1].abort(launch.seq)
            folded.append(out.size)
        original(op, parts, out)

    monkeypatch.setattr(in_place, "fold", slow)
    held, launch = [0], trio.launch()

    def body(communicator: Communicator) -> None:
        if communicator.rank == 1:
            held[0] = threading.get_ident()
        body_allreduce(communicator, launch, arrays)

    results = trio.run(body)
    assert isinstance(results[1], PlanAbortedError)
    assert 0 < len(folded) < in_place.FOLDS_PER_LOOK


def test_what_was_lent_to_a_process_that_is_dead_comes_back() -> None:
    memory = memoryview(mmap.mmap(-1, control_nbytes(2)))
    prepare(memory, 2)
    first, _ = (Meeting(memory, rank, 2, "team") for rank in (0, 1))
    dead = subprocess.Popen(["true"])
    dead.wait()
    owed = {1: 1 << 62}
    assert first.owing(owed)
    first._words[8 + 2] = dead.pid
    assert not first.owing(owed)
