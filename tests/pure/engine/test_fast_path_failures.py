"""Failures of programs that are run again: all ranks hear what they hear of an `Execution`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from raycollect.backends import arrays
from raycollect.errors import (
    CollectiveTimeoutError,
    GroupBrokenError,
    KernelError,
    PlanAbortedError,
    TensorDirtyError,
    UnsupportedError,
    Violation,
    refusal,
)
from raycollect.pos import store
from tests.pure.engine.repeated_loops import MakeLoop, loop, same, told
from tests.pure.watched import WAIT_S, WatchedCondition

__all__ = ["loop"]  # a fixture


def test_a_kernel_that_is_refused_now_is_told_to_all(loop: MakeLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    violation = Violation(kind="unsupported", rank=-1, field="operand", found="this", expected="that")

    def refuse() -> None:
        raise refusal("", "", (violation,))

    def scenario(backend: str) -> Any:
        one = loop(backend, [np.ones(5) for _ in range(3)])
        one.must()
        one.odd[1].hooks = {"stage": refuse, "again": refuse}
        errors = one.run()
        assert all(type(error) is UnsupportedError for error in errors)
        assert one.dirty == [0, 0, 0]
        one.odd[1].hooks = {}
        one.must()
        return [told(error) for error in errors]

    for backend in ("local", "shm"):
        same(monkeypatch, lambda backend=backend: scenario(backend))


@pytest.mark.parametrize(("size", "backend"), [(5, "local"), (5, "shm"), (200_001, "shm")])
@pytest.mark.parametrize("error", [KernelError(detail="injected"), MemoryError("no more")], ids=["kernel", "memory"])
def test_a_kernel_that_fails_leaves_dirt(
    loop: MakeLoop, monkeypatch: pytest.MonkeyPatch, error: Exception, backend: str, size: int
) -> None:
    def fail() -> None:
        raise type(error)(*error.args) if isinstance(error, MemoryError) else KernelError(detail="injected")

    def scenario() -> Any:
        one = loop(backend, [np.ones(size) for _ in range(2)])
        one.must()
        one.odd[1].hooks = {"launch": fail}
        errors = one.run()
        assert isinstance(errors[1], KernelError)
        assert (errors[1].op, errors[1].rank) == ("allreduce", 1)
        one.odd[1].hooks, dirty = {}, one.dirty
        assert dirty == [int(one is not None) for one in errors]
        assert all(isinstance(found, TensorDirtyError) for found in one.run())
        one.clean()
        one.must()
        return [told(found) for found in errors], dirty

    same(monkeypatch, scenario)


def test_a_group_that_is_gone_ends_the_run_on_all_ranks(loop: MakeLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank's communicator is closed, or can't be found any more. It says so, and the others hear that it left."""

    def gone() -> None:
        raise GroupBrokenError(group_name="team", detail="no more")

    def scenario(closed: bool) -> Any:
        one = loop("shm", [np.ones(5) for _ in range(2)])
        one.must()
        if closed:
            one.odd[0].close()
        else:
            one.odd[0].hooks = {"again": gone, "stage": gone, "agree": gone}
        errors = one.run()
        one.ends.looked_up = gone
        for replay in one.team.replays:
            replay.abort()  # which looks nothing up
        return [told(error) for error in errors], [told(error) for error in one.run()]

    for closed in (False, True):
        first, second = same(monkeypatch, lambda closed=closed: scenario(closed))
        assert [error[0] for error in first] == [GroupBrokenError, PlanAbortedError]
        assert [error[0] for error in second] == [GroupBrokenError] * 2


@pytest.mark.parametrize("how", ["an abort", "the ledger", "the limit", "the reader"])
def test_a_wait_for_a_reader_can_be_ended(loop: MakeLoop, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    def scenario() -> Any:
        one = loop("shm", [np.ones(5)], timeout_s=0.2 if how == "the limit" else WAIT_S)
        one.must()
        tidy, kept = one.team.stores[0], WatchedCondition()
        tidy._changed = tidy._lock = kept  # type: ignore[assignment]
        monkeypatch.setattr(store, "_LOOK_S", 0.05 if how == "the limit" else WAIT_S)
        with tidy.reading([arrays.byte_range(one.values[0])]):
            seq, (running,) = one.team.start()
            assert kept.someone_waits()
            if how == "an abort":
                one.team.replays[0].abort(seq)
            elif how == "the ledger":
                one.team.aborts[0][seq] = "no more"
                tidy.wake()
            error = running.exception(WAIT_S) if how != "the reader" else None
        error = error or running.exception(WAIT_S)
        assert one.dirty == [0], "it had not begun to write"
        one.must()
        return told(error)

    error = same(monkeypatch, scenario)
    ends = {"the limit": CollectiveTimeoutError, "the reader": None}
    assert (error and error[0]) is ends.get(how, PlanAbortedError)


@pytest.mark.parametrize("backend", ["local", "shm"])
def test_who_does_not_come_to_the_check_is_named(loop: MakeLoop, monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    def scenario() -> Any:
        one = loop(backend, [np.ones(5) for _ in range(3)], timeout_s=2.0)
        one.hold(2)
        one.gates[2].go.set()
        one.must()
        one.gates[2].came.clear()
        one.gates[2].go.clear()
        _, futures = one.team.start()
        errors = [future.exception(WAIT_S) for future in futures[:2]]
        one.gates[2].go.set()
        late = futures[2].exception(WAIT_S)
        assert one.dirty == [0, 0, 0]
        one.must()
        named = [error.missing for error in errors if isinstance(error, CollectiveTimeoutError)]
        assert named
        assert isinstance(late, PlanAbortedError)
        return set(named)

    # Whoever gives up first is not there any more for the other, who is told so, or gives up too.
    assert same(monkeypatch, scenario) == {(2,)}
