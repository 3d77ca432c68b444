"""Aborts of programs that are run again: each ends what it is meant for, as it ends a first run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from raycollect.errors import PlanAbortedError
from tests.pure.engine.repeated_loops import MakeLoop, loop, same
from tests.pure.fleet import FailAt

__all__ = ["loop"]  # a fixture


class AbortAt(FailAt):
    """Aborts at one point of one rank, and goes on."""

    def __init__(self, abort: Any, **where: Any) -> None:
        super().__init__(**where)
        self._abort = abort

    def at(self, point: str, seq: int, rank: int) -> None:
        if (point, rank) == self._where and not self.consumed:
            self.consumed += 1
            self._abort()


@pytest.mark.parametrize(
    ("when", "backend"),
    [
        *(
            (when, "shm")
            for when in ("before", "looking up", "start", "in the consistency check", "in the kernel", "after")
        ),
        *((when, "local") for when in ("start", "in the consistency check", "in the kernel")),
    ],
)
def test_an_abort_ends_the_run_whenever_it_comes(loop: MakeLoop, when: str, backend: str) -> None:
    def scenario(loop: MakeLoop) -> Any:
        one = loop(backend, [np.ones(140_001) for _ in range(2)])
        team = one.team
        one.must(2)
        seq = team._seq

        def abort() -> None:
            for replay in team.replays:
                replay.abort(seq)

        if when == "before":
            team.aborts[0][seq] = team.aborts[1][seq] = "no more"
        elif when == "looking up":
            one.ends.looked_up = abort
        elif when == "start":
            team.faults.now = AbortAt(abort, point="start", rank=0)
        elif when != "after":
            for name in ("again", "agree") if when == "in the consistency check" else ("launch",):
                one.odd[0].hooks[name] = one.odd[1].hooks[name] = abort
        errors = [type(error) for error in one.run()]
        one.odd[0].hooks, one.odd[1].hooks, one.ends.looked_up = {}, {}, None
        abort()
        dirty = one.dirty
        one.clean()
        one.must(2)
        return errors, max(dirty)  # who comes late is ended before its kernel

    errors, dirty = same(loop, scenario)
    assert errors == ([type(None)] if when == "after" else [PlanAbortedError]) * 2
    assert dirty == int(when == "in the kernel")


def test_an_abort_reaches_a_run_in_which_another_rank_brings_something_else(loop: MakeLoop) -> None:
    """The rank has met others that brought something else, and prepares its operands once more."""
    one = loop("shm", [np.ones(3), np.ones(3)])
    one.must()
    one.values[0].resize(7, refcheck=False)
    one.team.faults.now = AbortAt(one.team.replays[1].abort, point="before_check", rank=1)
    assert [type(error) for error in one.run()] == [PlanAbortedError] * 2
    one.values[0].resize(3, refcheck=False)
    one.must()
