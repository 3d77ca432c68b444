"""At which step a plan, or a run of a captured step, says that it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from raycollect.core.model import Kernel, Launch, OpKind, ReduceOp
from raycollect.observe import run_steps
from raycollect.observe.run_steps import steps
from tests.pure.fleet import WAIT_S, Fleet, MakeFleet
from tests.pure.local_world import LocalCommunicator, LocalWorld
from tests.pure.teams import Script, Team, full, pinned


class Asking(LocalCommunicator):
    """Asks where plans are at each consistency check and in each kernel."""

    def __init__(self, world: LocalWorld, rank: int) -> None:
        super().__init__(world, rank)
        self.seen: list[dict[int, str]] = []

    def agree(self, launch: Launch, *others: Any) -> Sequence[bytes]:
        self.seen.append(steps())
        return super().agree(launch, *others)

    def launch(self, launch: Launch, kernels: Sequence[Kernel]) -> None:
        self.seen.append(steps())
        super().launch(launch, kernels)


def within(number: int, run: Callable[[], Any]) -> Any:
    """Does something as the plan, or run, of this number."""
    step = run_steps.here()
    step.at, step.number = "", number
    try:
        return run()
    finally:
        step.number = 0


def a_plan(fleet: Fleet, run: Callable[[Callable[[], Any]], Any]) -> list[dict[int, str]]:
    """What rank 0 says of an allreduce, which it runs by `run`."""
    asking = fleet.communicators[0] = Asking(fleet.communicators[0]._world, 0)  # type: ignore[attr-defined]
    planned = fleet.plan(OpKind.ALLREDUCE, fleet.keep_all([np.ones(3), np.ones(3)]))
    other = fleet._threads.submit(fleet.run_one, planned, 1, 4)
    assert run(lambda: fleet.run_one(planned, 0, 4)).error is None
    assert other.result(WAIT_S).error is None
    return asking.seen


def test_a_plan_is_at_its_check_and_then_in_its_kernels(fleet: MakeFleet) -> None:
    running = a_plan(fleet(2), lambda run: within(41, run))
    assert running == [{41: "in the consistency check"}, {41: "in its kernels (allreduce)"}]


def test_a_run_tells_its_actions_and_bundles() -> None:
    """A batch of three collectives in two bundles, a method, and a collective that is done the short way at last."""
    team = Team(2, [Script(rank, [pinned(full(rank)), pinned(full(rank)), pinned(full(rank))]) for rank in range(2)])
    asking = team.communicators[0] = Asking(team.communicators[0]._world, 0)
    own, both = {0: 0, 1: 0}, {0: 1, 1: 1}
    team.batch(
        [
            (OpKind.ALLREDUCE, own, {}, {}),
            (OpKind.ALLREDUCE, both, {}, {"op": ReduceOp.MAX}),
            (OpKind.ALLREDUCE, {0: 2, 1: 2}, {}, {}),
        ]
    )
    running: list[dict[int, str]] = []
    for script, actor in zip(team.scripts, team.actors, strict=True):
        script.call("update")
        actor.methods["update"] = lambda: None
    team.actors[0].methods["update"] = lambda: running.append(steps())
    team.collective(OpKind.ALLREDUCE, own)
    runs = []
    for _ in range(4):
        seq, asking.seen = team._seq, []
        team.capture() if not team.replays else None
        team._seq += team.width
        other = team._threads.submit(team.run_one, 1, seq)
        within(seq, lambda seq=seq: team.run_one(0, seq))
        other.result(WAIT_S)
        runs.append((seq, asking.seen))
    team.close()
    for seq, seen in runs:
        batch, last = "calls 0, 1, 2 of the step, batch", "call 4 of the step, allreduce"
        expected = [
            f"{batch}, in the consistency check",
            f"{batch}, in bundle 1 of 2: allreduce of calls 0, 2",
            f"{batch}, in bundle 2 of 2: allreduce of call 1",
            f"{last}, in the consistency check",
            f"{last}, in its kernels",
        ]
        words = [progress[seq] for progress in seen if list(progress) == [seq]]
        assert len(words) == len(seen)
        words[-1] = words[-1].removesuffix(" (allreduce)")  # its name is told there where it is done the long way
        assert list(dict.fromkeys(words)) == expected
    assert running == [{seq: "call 3 of the step, method update"} for seq, _ in runs]


def test_a_run_that_waits_for_another_one_or_a_method_says_so() -> None:
    """What goes on meanwhile is told as nothing, or as it is now."""
    step = run_steps.here()

    def go_on(first: int, is_named: bool) -> str:
        step.at, step.number = "", 4
        return "elsewhere"

    step.at, step.number = "", 3
    assert steps() == {3: "begins"}
    step.at = "waits for the one before it"
    assert steps() == {3: "waits for the one before it"}
    step.at = go_on
    assert steps() == {}
    step.number = 0
    assert steps() == {}
