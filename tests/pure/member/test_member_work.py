"""What becomes of a member's call for which nobody waits."""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import suppress
from types import SimpleNamespace

import pytest

from raycollect.errors import KernelError, PlanAbortedError
from raycollect.member.work import MemberWork


def _ended(error, *, is_dropped_first, waits=False):
    future = Future()
    work = MemberWork(SimpleNamespace(name="g"), "allreduce", future)
    if is_dropped_first:
        del work
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
    if waits:
        with suppress(KernelError):
            work.wait()


@pytest.mark.parametrize("is_dropped_first", [True, False])
def test_a_failure_that_nobody_waits_for_is_logged(is_dropped_first, caplog):
    _ended(KernelError(detail="it broke"), is_dropped_first=is_dropped_first)
    (line,) = [one.getMessage() for one in caplog.records]
    assert "allreduce on group 'g' failed, and nobody waited for it" in line
    assert "it broke" in line


@pytest.mark.parametrize("is_dropped_first", [True, False])
def test_what_ended_well_or_was_given_up_is_not_logged(is_dropped_first, caplog):
    for error in (None, PlanAbortedError(detail="the group was destroyed")):
        _ended(error, is_dropped_first=is_dropped_first)
    assert caplog.records == []


def test_a_failure_that_was_raised_is_not_logged(caplog):
    _ended(KernelError(detail="it broke"), is_dropped_first=False, waits=True)
    assert caplog.records == []
