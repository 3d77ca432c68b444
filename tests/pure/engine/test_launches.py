"""The launches of a program: opened in order, each ended once, with patience for what comes before, and an abort."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from raycollect.core.model import GroupSpec, Kernel, Launch, OpKind, ReduceOp
from raycollect.core.protocols import Communicator, Faults
from raycollect.engine.instruments import Instruments
from raycollect.engine.run import Run
from raycollect.errors import GroupBrokenError, KernelError
from raycollect.observe import Recorder
from raycollect.planner import Membership, Request, plan
from raycollect.pos import Store
from tests.pure.fleet import FailAt, contain
from tests.support.values import replace

TIMEOUT_S = 3.0


class Noted:
    """A communicator that notes what it is asked."""

    def __init__(self) -> None:
        self.story: list[tuple[Any, ...]] = []
        self.owed: list[Any] = []  # the dtypes of the kernels that were agreed on and have not run

    def agree(self, launch: Launch, arrival: bytes, *others: Any) -> Sequence[bytes]:
        self.story.append(("agree", launch.seq, launch.timeout_s, arrival))
        return [arrival] * len(launch.ranks)

    def launch(self, launch: Launch, kernels: Sequence[Kernel]) -> None:
        self.story.append(("launch", launch.seq, launch.timeout_s))

    def end(self, launch: Launch, ok: bool, owed: Any = ()) -> tuple[int, ...]:
        self.story.append(("end", launch.seq, ok))
        self.owed = [kernel.src.dtype for kernel in owed]
        return launch.ranks if ok else ()

    def abort(self, seq: int) -> None:
        self.story.append(("abort", seq))


def _program(groups: int, **arguments: Any) -> Any:
    """Allreduces on several groups of two, all of which have participant 0; the others are different ones."""
    requests, memberships = [], []
    for at in range(groups):
        spec = GroupSpec(name=f"g{at}", group_id=f"g{at}", backend="local", world_size=2)
        memberships.append(replace(Membership.alone(spec), participants=("hub", f"other {at}")))
        operands = ((0, f"a{at}", None), (1, f"b{at}", None))
        given = {"op": ReduceOp.SUM, "timeout_s": TIMEOUT_S, **arguments}
        requests.append(Request(kind=OpKind.ALLREDUCE, group=spec, operands=operands, **given))
    return plan(requests, memberships).program(0)


def _run(
    program: Any, exchange: Any = None, value: Any = None, faults: Faults | None = None
) -> tuple[Run, dict[str, Noted]]:
    communicators: dict[str, Noted] = {}

    def find(group_id: str) -> Communicator:
        return communicators.setdefault(group_id, Noted())  # type: ignore[return-value]

    instruments = Instruments(store=Store(), recorder=Recorder(time.monotonic), clock=time.monotonic, faults=faults)
    operands = [contain(np.ones(1) if value is None else value) for _ in range(program.keys)]
    keys = [b""] * program.keys
    return Run(program, 50, find, instruments, operands=operands, keys=keys, exchange=exchange), communicators


def test_who_waits_for_a_later_launch_leaves_time_for_all_that_comes_before() -> None:
    run, communicators = _run(_program(3), exchange=_Star())
    assert run.run().error is None
    for at in range(3):
        launch = 51 + at
        assert communicators[f"g{at}"].story == [
            ("agree", launch, TIMEOUT_S * (1 + 1 + at + 3), b""),
            ("launch", launch, TIMEOUT_S),  # for the kernels themselves
            ("end", launch, True),
        ]


def test_an_abort_reaches_a_commit_and_what_comes_after_it() -> None:
    class Waiting(_Star):
        aborted: Sequence[int] = ()

        def __call__(self, launch: Launch, arrival: bytes) -> Sequence[bytes]:
            run.abort()
            assert self.aborted == [launch.seq]
            return super().__call__(launch, arrival)

        def abort(self, seq: int) -> None:
            self.aborted = [seq]

    run, communicators = _run(_program(1, snapshot=True), exchange=Waiting())
    assert run.run().error is None
    story = communicators["g0"].story
    assert [what for what, *_ in story] == ["agree", "launch", "abort", "end"]
    assert story[2] == ("abort", 50), "of the launch that is open"
    before = list(story)
    run.abort()
    assert story == before, "nothing is open any more"


@pytest.mark.parametrize(
    ("point", "nth", "owed"),
    [("before_kernel", 1, ["f8", "i8"]), ("after_kernel", 1, ["i8"]), ("after_kernel", 2, []), ("before_check", 1, [])],
)
def test_who_fails_owes_the_kernels_that_all_expect_of_it(point: str, nth: int, owed: list[str]) -> None:
    value = [np.ones(1), np.ones(1, np.int64)]  # of two dtypes: one kernel each, in one launch
    run, communicators = _run(_program(1), value=value, faults=FailAt(point=point, rank=0, nth=nth))
    assert isinstance(run.run().error, KernelError)
    assert communicators["g0"].owed == owed


def test_a_check_that_nobody_keeps_is_said_at_once() -> None:
    run, _ = _run(_program(2))
    assert isinstance(run.run().error, GroupBrokenError)


class _Star:
    def __call__(self, launch: Launch, arrival: bytes) -> Sequence[bytes]:
        return [arrival] * len(launch.ranks)

    def abort(self, seq: int) -> None:
        raise AssertionError("nobody aborts here")
