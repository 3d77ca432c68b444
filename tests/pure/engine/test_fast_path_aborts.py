"""Aborts of programs that are run again: each ends what it is meant for, as it ends an `Execution`."""

from __future__ import annotations

import threading
from concurrent.futures import TimeoutError as NotYet
from typing import Any

import numpy as np
import pytest

from raycollect.engine.execution import Execution
from raycollect.engine.fast_path import FastPath
from raycollect.errors import PlanAbortedError
from tests.pure.engine.repeated_loops import MakeLoop, loop, repeats, same
from tests.pure.teams import Gate
from tests.pure.watched import WAIT_S

__all__ = ["loop", "repeats"]  # fixtures


@pytest.mark.parametrize(
    ("when", "backend"),
    [
        *(
            (when, "shm")
            for when in ("before", "looking up", "entering", "in the consistency check", "in the kernel", "after")
        ),
        *((when, "local") for when in ("entering", "in the consistency check", "in the kernel")),
    ],
)
def test_an_abort_ends_the_run_whenever_it_comes(
    loop: MakeLoop, repeats: list[int], monkeypatch: pytest.MonkeyPatch, when: str, backend: str
) -> None:
    def scenario() -> Any:
        one = loop(backend, [np.ones(140_001) for _ in range(2)])
        team = one.team
        one.must(2)
        seq = team._seq

        def abort() -> None:
            for replay in team.replays:
                replay.abort(seq)

        with monkeypatch.context() as patch:
            if when == "before":
                team.aborts[0][seq] = team.aborts[1][seq] = "no more"
            elif when == "looking up":
                one.ends.looked_up = abort
            elif when == "entering":
                for cls in (FastPath, Execution):
                    run = cls.run
                    patch.setattr(cls, "run", lambda self, run=run: (abort(), run(self))[1])
            elif when != "after":
                for name in ("agree",) if when == "in the consistency check" else ("launch",):
                    one.odd[0].hooks[name] = one.odd[1].hooks[name] = abort
            errors = [type(error) for error in one.run()]
        one.odd[0].hooks, one.odd[1].hooks, one.ends.looked_up = {}, {}, None
        abort()
        dirty = one.dirty
        one.clean()
        one.must(2)
        return errors, max(dirty)  # who comes late is ended before its kernel

    errors, dirty = same(monkeypatch, scenario)
    assert errors == ([type(None)] if when == "after" else [PlanAbortedError]) * 2
    assert dirty == int(when == "in the kernel")
    assert repeats


def test_an_abort_that_is_slow_does_not_reach_the_next_run(loop: MakeLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    one, gate = loop("local", [np.ones(3)]), Gate()
    one.hold(0)
    one.gates[0].go.set()
    one.must()
    one.gates[0].came.clear()
    hold, abort = Gate(), FastPath.abort
    one.odd[0].hooks["launch"] = hold
    monkeypatch.setattr(FastPath, "abort", lambda self: (gate(), abort(self)))
    _, (running,) = one.team.start()
    assert hold.came.wait(WAIT_S)
    aborting = threading.Thread(target=one.team.replays[0].abort)
    aborting.start()
    assert gate.came.wait(WAIT_S)
    hold.go.set()
    with pytest.raises(NotYet):  # its kernel is done: it waits until the abort is over
        running.exception(0.1)
    gate.go.set()
    aborting.join(WAIT_S)
    assert running.exception(WAIT_S) is None
    one.odd[0].hooks = {}
    monkeypatch.setattr(FastPath, "abort", abort)
    one.must()


def test_an_abort_before_what_is_done_in_full_has_begun(loop: MakeLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fast path has met a rank that brought something else. The execution that takes over hears of the abort."""
    one = loop("shm", [np.ones(3), np.ones(3)])
    one.must()
    full = FastPath._in_full

    def aborted(self: FastPath, *args: Any) -> Execution:
        execution = full(self, *args)
        one.team.replays[1].abort()
        return execution

    monkeypatch.setattr(FastPath, "_in_full", aborted)
    begun: list[str | None] = []
    run = Execution.run
    monkeypatch.setattr(Execution, "run", lambda self: (begun.append(self._launches.aborted()), run(self))[1])
    one.values[0].resize(7, refcheck=False)
    assert all(error is not None for error in one.run())
    assert sorted(map(str, begun)) == ["None", "the run was aborted"]
    one.values[0].resize(3, refcheck=False)
    one.must()
