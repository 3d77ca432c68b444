"""Failures of programs that are run again: all ranks hear what they hear in a first run."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from raycollect.backends import arrays
from raycollect.errors import (
    GroupBrokenError,
    KernelError,
    PlanAbortedError,
    UnsupportedError,
    Violation,
    refusal,
)
from tests.pure.engine.repeated_loops import MakeLoop, fields_of, loop, same
from tests.pure.fleet import FailAt
from tests.pure.watched import WAIT_S, WatchedCondition

__all__ = ["loop"]  # a fixture


def test_a_kernel_that_is_refused_now_is_told_to_all(loop: MakeLoop) -> None:
    violation = Violation(kind="unsupported", rank=-1, field="operand", found="this", expected="that")

    def refuse() -> None:
        raise refusal("", "", (violation,))

    def scenario(loop: MakeLoop, backend: str) -> Any:
        one = loop(backend, [np.ones(5) for _ in range(3)])
        one.must()
        one.odd[1].hooks = {"kernel": refuse}
        errors = one.run()
        assert all(type(error) is UnsupportedError for error in errors)
        assert one.dirty == [0, 0, 0]
        one.odd[1].hooks = {}
        one.must()
        return [fields_of(error) for error in errors]

    for backend in ("local", "shm"):
        same(loop, partial(scenario, backend=backend))


def test_a_group_that_is_gone_ends_the_run_on_all_ranks(loop: MakeLoop) -> None:
    """A rank's communicator is closed, or can't be found any more. It says so, and the others hear that it left."""

    def gone() -> None:
        raise GroupBrokenError(group_name="team", detail="no more")

    def scenario(loop: MakeLoop, closed: bool) -> Any:
        one = loop("shm", [np.ones(5) for _ in range(2)])
        one.must()
        if closed:
            one.odd[0].close()
        else:
            one.odd[0].hooks = {"agree": gone}
        errors = one.run()
        one.ends.looked_up = gone
        for replay in one.team.replays:
            replay.abort()  # which looks nothing up
        return [fields_of(error) for error in errors], [fields_of(error) for error in one.run()]

    for closed in (False, True):
        first, second = same(loop, partial(scenario, closed=closed))
        assert [error[0] for error in first] == [GroupBrokenError, PlanAbortedError]
        assert [error[0] for error in second] == [GroupBrokenError] * 2


# ---------------------------------------------------------------------------------------------- what a backend hears


class Told:
    """What a rank's backend hears at the end of its launches: (kernels that it did not run, whether it went well)."""

    def __init__(self, odd: Any) -> None:
        self.ends: list[tuple[int, bool]] = []
        end = odd.end

        def ended(launch: Any, ok: bool, owed: Any) -> Any:
            self.ends.append((len(owed), ok))
            return end(launch, ok, owed)

        odd.end = ended


@pytest.mark.parametrize("point", ["start", "before_check", "after_check", "before_kernel", "after_kernel", "end"])
@pytest.mark.parametrize("backend", ["local", "shm", "tcp"])
def test_a_fault_does_the_same_in_first_and_repeated_runs(loop: MakeLoop, point: str, backend: str) -> None:
    """The backend hears once how the launch ended, and of a kernel for which others may wait."""

    def scenario(loop: MakeLoop) -> Any:
        one = loop(backend, [np.ones(5) for _ in range(2)])
        one.must()
        heard = Told(one.odd[1])
        one.team.faults.now = fault = FailAt(point=point, rank=1)
        errors = one.run()
        assert fault.consumed == 1
        assert isinstance(errors[1], KernelError)
        assert one.dirty[1] == (point in ("before_kernel", "after_kernel"))
        one.clean()
        one.must(2)
        return fields_of(errors[1]), heard.ends, one.dirty

    _, ends, _ = same(loop, scenario)
    assert ends[0] == (int(point in ("after_check", "before_kernel")), False)
    assert ends[1:] == [(0, True)] * 2


@pytest.mark.parametrize("backend", ["local", "shm", "tcp"])
def test_a_run_that_is_aborted_after_the_agreement_tells_the_backend(loop: MakeLoop, backend: str) -> None:
    """The others are in a kernel in which this rank will not join them, and may not be able to look for an abort."""

    def scenario(loop: MakeLoop) -> Any:
        one = loop(backend, [np.ones(5) for _ in range(2)])
        one.must()
        heard, tidy = Told(one.odd[0]), one.team.stores[0]
        tidy._changed = tidy._lock = kept = WatchedCondition()  # type: ignore[assignment]
        with tidy.reading([arrays.byte_range(one.values[0])]):
            seq, (running, other) = one.team.start()
            assert kept.someone_waits()
            one.team.replays[0].abort(seq)
            error = running.exception(WAIT_S)
        one.team.replays[1].abort(seq)
        other.exception(WAIT_S)
        assert isinstance(error, PlanAbortedError)
        one.clean()
        one.must(2)
        return fields_of(error), heard.ends

    _, ends = same(loop, scenario)
    assert ends == [(1, False), (0, True), (0, True)]
