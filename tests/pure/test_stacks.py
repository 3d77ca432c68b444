"""What a process says that it is doing."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raycollect import stacks
from raycollect.backends.local import LocalCommunicator, LocalWorld
from raycollect.contracts import Completion
from raycollect.model import Kernel, Launch, OpKind, ReduceOp
from raycollect.planner.program import Ticket
from raycollect.stacks import Doing, is_on_the_way, what_runs, where_plans_are

from .captured import Script, Team, full, pinned
from .fleet import WAIT_S, Fleet, MakeFleet


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    made = threading.Event()
    yield made
    made.set()


def test_the_main_thread_is_told_from_the_users_outermost_call_on() -> None:
    """Asked by a thread of its own, as in a participant."""
    found: list[Doing] = []

    def inner(depth: int) -> None:
        if depth:
            inner(depth - 1)
            return
        asking = threading.Thread(target=lambda: found.append(what_runs()))
        asking.start()
        asking.join(WAIT_S)

    inner(3)
    (doing,) = found
    assert len(doing.stack) == stacks.LINES, "the test's runner is deep enough"
    mine = [line for line in doing.stack if __file__ in line]
    assert [line.partition(": ")[0].rpartition(" ")[2].rpartition(".")[2] for line in mine] == [
        "test_the_main_thread_is_told_from_the_users_outermost_call_on",
        *["inner"] * 4,
    ]
    assert mine[-1].endswith(("asking.start()", "asking.join(WAIT_S)"))
    assert all(len(line) <= stacks.LINE_LENGTH for line in doing.stack)


def framed(files: list[str]) -> Doing:
    """What would be told of a thread whose frames lie in these files, the outermost first; each calls the next."""
    names: dict[str, Any] = {"ask": lambda: found.append(stacks._told(sys._getframe(1)))}
    found: list[Doing] = []
    calls = ["ask", *(f"call{at}" for at in range(len(files)))]
    for at, file in enumerate(reversed(files)):
        exec(compile(f"def {calls[at + 1]}(): {calls[at]}()", file, "exec"), names)
    thread = threading.Thread(target=names[calls[-1]])
    thread.start()
    thread.join(WAIT_S)
    return found[0]


RAY = "/site/ray/_private/workers/default_worker.py"
THREAD = "/usr/lib/python3.11/threading.py"
LOOP = "/usr/lib/python3.11/asyncio/base_events.py"
SELECTORS = "/usr/lib/python3.11/selectors.py"
SOCKET = "/usr/lib/python3.11/socket.py"
OURS = str(Path(stacks.__file__).with_name("participant.py"))
USERS = "/home/me/train.py"


@pytest.mark.parametrize(
    ("files", "what", "lines"),
    [
        ([RAY], "", 0),
        ([RAY, RAY], "", 0),
        ([RAY, OURS, USERS], USERS, 1),
        ([RAY, OURS, USERS, OURS], USERS, 2),
        ([RAY, OURS, USERS, "/site/torch/nn.py", RAY], USERS, 3),
        ([RAY, OURS, OURS], "", 2),
        ([RAY, "/site/ray/util/tracing/helper.py", OURS], "", 1),
        ([RAY, OURS, *[USERS] * 40], USERS, stacks.LINES),
        ([THREAD, OURS, SELECTORS], "", 2),
        ([THREAD, OURS, SOCKET], "", 2),
        ([RAY, LOOP, SELECTORS], "", 0),
        ([RAY, OURS, USERS, LOOP, SELECTORS], USERS, 3),
        ([THREAD, LOOP, USERS, SELECTORS], USERS, 2),
    ],
)
def test_what_is_the_users_begins_after_the_way_there(files: list[str], what: str, lines: int) -> None:
    doing = framed(files)
    assert (f"({what}:1)" in doing.what) if what else doing.what == ""
    assert len(doing.stack) == lines
    assert not any(line.startswith(RAY) for line in doing.stack[:1])
    assert not any(line.rstrip().endswith(":") for line in doing.stack), "what has no source ends with its name"


def test_where_the_main_thread_does_nothing_of_the_users_another_one_is_told(
    monkeypatch: pytest.MonkeyPatch, gate: threading.Event
) -> None:
    began = threading.Event()

    def method() -> None:
        began.set()
        gate.wait(WAIT_S)

    thread = threading.Thread(target=method)
    thread.start()
    assert began.wait(WAIT_S)
    frames = sys._current_frames()
    idle = threading.Event()
    names: dict[str, Any] = {"wait": idle.wait}
    exec(compile("def loop(): wait()", RAY, "exec"), names)
    looping = threading.Thread(target=names["loop"])
    looping.start()
    frames = {looping.ident: sys._current_frames()[looping.ident], thread.ident: frames[thread.ident]}
    monkeypatch.setattr(threading, "main_thread", lambda: looping)
    monkeypatch.setattr(sys, "_current_frames", lambda: frames)
    doing = what_runs()
    assert doing.what.startswith("test_where_the_main_thread_does_nothing") or doing.what.startswith("method")
    del frames[thread.ident]
    assert what_runs().what == ""
    monkeypatch.undo()
    idle.set()
    gate.set()
    for one in (thread, looping):
        one.join(WAIT_S)


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        (stacks.__file__, True),
        ("/usr/lib/python3.11/concurrent/futures/thread.py", True),
        ("/usr/lib/python3.11/asyncio/events.py", True),
        ("/site-packages/ray/util/tracing/tracing_helper.py", True),
        ("/venv-of-the-driver/site-packages/raycollect/participant.py", True),
        ("/home/me/train.py", False),
        (__file__, False),
    ],
)
def test_what_lies_on_the_way(file: str, expected: bool) -> None:
    assert is_on_the_way(file) is expected


# ---------------------------------------------------------------------------------------------- where plans are


class Asking(LocalCommunicator):
    """Asks where plans are at each door and in each kernel."""

    def __init__(self, world: LocalWorld, rank: int) -> None:
        super().__init__(world, rank)
        self.told: list[dict[int, str]] = []

    def agree(self, launch: Launch, arrival: bytes) -> Sequence[bytes]:
        self.told.append(where_plans_are())
        return super().agree(launch, arrival)

    def launch(self, launch: Launch, kernel: Kernel) -> Completion:
        self.told.append(where_plans_are())
        return super().launch(launch, kernel)


def within(file: str, name: str, run: Callable[[], Any], **held: Any) -> Any:
    """Runs something inside of a function of raycollect that holds these values."""
    names: dict[str, Any] = {}
    code = f"def {name}({', '.join([*held, 'run'])}): return run()"
    exec(compile(code, str(Path(stacks.__file__).with_name(file)), "exec"), names)
    return names[name](**held, run=run)


def a_plan(fleet: Fleet, run: Callable[[Callable[[], Any]], Any]) -> list[dict[int, str]]:
    """What rank 0 says of an allreduce, which it runs by `run`."""
    asking = fleet.communicators[0] = Asking(fleet.communicators[0]._world, 0)  # type: ignore[attr-defined]
    planned = fleet.plan(OpKind.ALLREDUCE, fleet.keep_all([np.ones(3), np.ones(3)]))
    other = fleet._threads.submit(fleet.run_one, planned, 1, 4)
    assert run(lambda: fleet.run_one(planned, 0, 4)).error is None
    assert other.result(WAIT_S).error is None
    return asking.told


def test_a_plan_is_at_its_door_and_then_in_its_kernels(fleet: MakeFleet) -> None:
    ticket = Ticket(seq=41, predecessor=0)
    told = a_plan(fleet(2), lambda run: within("lease.py", "run_program", run, ticket=ticket))
    assert told == [{41: "at the door"}, {41: "in its kernels (allreduce)"}]


def test_an_imperative_call_is_no_plan(fleet: MakeFleet) -> None:
    assert a_plan(fleet(2), lambda run: within("lane.py", "_run", run)) == [{}, {}]


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
    told: list[dict[int, str]] = []
    for script, actor in zip(team.scripts, team.actors, strict=True):
        script.call("update")
        actor.methods["update"] = lambda: None
    team.actors[0].methods["update"] = lambda: told.append(where_plans_are())
    team.collective(OpKind.ALLREDUCE, own)
    runs = []
    for _ in range(4):
        seq, asking.told = team._seq, []
        team.capture() if not team.replays else None
        team._seq += team.width
        other = team._threads.submit(team.run_one, 1, seq)
        within("captures.py", "_do", lambda seq=seq: team.run_one(0, seq), seq=seq)
        other.result(WAIT_S)
        runs.append((seq, asking.told))
    team.close()
    for seq, found in runs:
        batch, last = "calls 0, 1, 2 of the step, batch", "call 4 of the step, allreduce"
        expected = [
            f"{batch}, at the door",
            f"{batch}, in bundle 1 of 2: allreduce of calls 0, 2",
            f"{batch}, in bundle 2 of 2: allreduce of call 1",
            f"{last}, at the door",
            f"{last}, in its kernels",
        ]
        words = [one[seq] for one in found if list(one) == [seq]]
        assert len(words) == len(found)
        words[-1] = words[-1].removesuffix(" (allreduce)")  # its name is told there where it is done the long way
        assert list(dict.fromkeys(words)) == expected
    assert told == [{seq: "call 3 of the step, method update"} for seq, _ in runs]


def test_what_goes_on_meanwhile_is_told_of_as_nothing() -> None:
    class Over:
        """An action of a step that was closed."""

        class _replay:
            routine: Any = None
            _actions: tuple[Any, ...] = ()

    found: list[dict[int, str]] = []

    def act() -> None:
        held = {"self": Over(), "run": lambda: found.append(where_plans_are())}
        within("replay.py", "do", held["run"], self=held["self"])

    within("captures.py", "_do", act, seq=3)
    assert found == [{}]


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([3], "call 3"), ([2, 1], "calls 1, 2"), (list(range(9)), "calls 0, 1, 2, 3, 4, 5 and 3 more")],
)
def test_many_calls_are_counted(numbers: list[int], text: str) -> None:
    assert stacks._calls(numbers) == text
