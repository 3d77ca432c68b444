"""The launches of a program: opened in order, each ended once, with patience for what comes before, and an abort."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from raycollect.core.model import GroupSpec, Launch, OpKind, ReduceOp
from raycollect.core.protocols import Communicator
from raycollect.engine.launch_sequence import LaunchSequence
from raycollect.errors import GroupBrokenError
from raycollect.planner import Membership, Request, plan
from tests.support.values import replace

TIMEOUT_S = 3.0


class Noted:
    """A communicator that notes what it is asked."""

    def __init__(self) -> None:
        self.story: list[tuple[Any, ...]] = []

    def agree(self, launch: Launch, arrival: bytes, *others: Any) -> Sequence[bytes]:
        self.story.append(("agree", launch.seq, launch.timeout_s, arrival))
        return [arrival] * len(launch.ranks)

    def end(self, launch: Launch, ok: bool, owed: Any = ()) -> tuple[int, ...]:
        self.story.append(("end", launch.seq, ok))
        return launch.ranks if ok else ()

    def abort(self, seq: int) -> None:
        self.story.append(("abort", seq))


def _program(groups: int, position: int = 0) -> Any:
    """Allreduces on several groups of two, all of which have participant 0; the others are different ones."""
    requests, memberships = [], []
    for at in range(groups):
        spec = GroupSpec(name=f"g{at}", group_id=f"g{at}", backend="local", world_size=2)
        memberships.append(replace(Membership.alone(spec), participants=("hub", f"other {at}")))
        operands = ((0, f"a{at}", None), (1, f"b{at}", None))
        requests.append(
            Request(kind=OpKind.ALLREDUCE, group=spec, operands=operands, op=ReduceOp.SUM, timeout_s=TIMEOUT_S)
        )
    return plan(requests, memberships).program(position)


def _launches(program: Any, aborted: list[str], exchange: Any = None) -> tuple[LaunchSequence, dict[str, Noted]]:
    communicators: dict[str, Noted] = {}

    def find(group_id: str) -> Communicator:
        return communicators.setdefault(group_id, Noted())  # type: ignore[return-value]

    unused: Any = None
    made = LaunchSequence(
        program,
        find,
        exchange,
        seq=50,
        aborted=lambda: aborted[0] if aborted else None,
        instruments=unused,
        spans=unused,
    )
    return made, communicators


def test_who_waits_for_a_later_launch_leaves_time_for_all_that_comes_before() -> None:
    program = _program(3)
    launches, communicators = _launches(program, [], exchange=_Star())
    launches.begin()
    launches.meet(b"")
    _, launch = launches.at(3, "g2", (0, 1))
    assert launch.timeout_s == TIMEOUT_S, "for the kernels themselves"
    assert communicators["g2"].story == [("agree", 53, TIMEOUT_S * (1 + 3 + 3), b"")]


def test_an_abort_reaches_a_commit_after_several_launches() -> None:
    class Waiting(_Star):
        aborted: Sequence[int] = ()

        def __call__(self, launch: Launch, arrival: bytes) -> Sequence[bytes]:
            launches.abort()
            assert self.aborted == [launch.seq]
            return super().__call__(launch, arrival)

        def abort(self, seq: int) -> None:
            self.aborted = [seq]

    launches, communicators = _launches(_program(1), [], exchange=Waiting())
    launches.begin()
    launches.at(2, "g0", (0, 1))
    launches.commit()
    launches.abort()
    assert communicators["g0"].story[-1] == ("abort", 52), "of the launch that is open"


def test_a_check_that_nobody_keeps_is_said_at_once() -> None:
    launches, _ = _launches(_program(2), [])
    with pytest.raises(GroupBrokenError):
        launches.begin()


class _Star:
    def __call__(self, launch: Launch, arrival: bytes) -> Sequence[bytes]:
        return [arrival] * len(launch.ranks)

    def abort(self, seq: int) -> None:
        raise AssertionError("nobody aborts here")
