"""When a run of a captured step is answered: once, and early where nothing is left to do that anybody can see."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from raycollect.channel.messages import Message
from raycollect.core.model import OpKind
from raycollect.engine.value_codec import pack_values, unpack_values
from raycollect.errors import InternalError, KernelError, PlanAbortedError, RaycollectError
from raycollect.member.methods import Methods
from raycollect.pos import tensors
from tests.pure.closing import closing_all
from tests.pure.engine.repeated_loops import Loop, Odd
from tests.pure.member.step_bench import Bench, FakePost
from tests.pure.teams import WAIT_S, Gate, Script, Team, full, given, pinned
from tests.pure.watched import WatchedCondition

REPEATED_FROM = 2
"""The first run of a loop on the same tensor that is a repeated one."""

# ---------------------------------------------------------------------------------------------- a replay


class Told:
    """What each rank's run did, in order: `answer` as it was told early, `end` as it left a launch."""

    def __init__(self, team: Team, odd: list[Odd]) -> None:
        self._team, self._odd = team, odd

    def run(self) -> list[tuple[list[str], Any]]:
        """One run of all; by rank, what was noted, and the result or the error."""
        team, notes = self._team, [list[str]() for _ in range(self._team.world)]
        if not team.replays:
            team.capture()
        seq = team._seq
        team._seq += max(team.width, 1)

        def do(rank: int) -> Any:
            noted = notes[rank]
            self._odd[rank].hooks["end"] = lambda: noted.append("end")

            def landed() -> None:
                noted.append("answer")

            try:
                return team.replays[rank].run(seq, pack_values(()), aborted=team.aborts[rank], succeeded=landed)
            except RaycollectError as exc:
                return exc

        futures = [team._threads.submit(do, rank) for rank in range(team.world)]
        return list(zip(notes, [future.result(WAIT_S) for future in futures], strict=True))


MakeLoop = Callable[..., tuple[Loop, Told]]


@pytest.fixture
def loop() -> Iterator[MakeLoop]:
    def make(*args: Any, **arguments: Any) -> tuple[Loop, Told]:
        made = closed(*args, **arguments)
        return made, Told(made.team, made.odd)

    with closing_all(Loop) as closed:
        yield make


EARLY = ["answer", "end"], b""


@pytest.mark.parametrize("backend", ["local", "shm"])
@pytest.mark.parametrize("make", [np.ones, tensors.ones], ids=["plain", "shared"])
@pytest.mark.parametrize(("world", "size"), [(1, 3), (2, 5), (3, 70_001)])
def test_a_plan_is_answered_once_before_its_launch_is_left(
    loop: MakeLoop, backend: str, make: Any, world: int, size: int
) -> None:
    _, told = loop(backend, [make(size) for _ in range(world)])
    for _ in range(6):
        assert told.run() == [EARLY] * world


def after(team: Team) -> None:
    for script in team.scripts:
        script.call("make")


def gives_back(team: Team) -> None:
    for script in team.scripts:
        script.returns.append(script.call("make"))
        script.actions.insert(0, script.actions.pop())


def gathers(team: Team) -> None:
    team.collective(OpKind.ALLGATHER, dict.fromkeys(range(team.world), 0))


@pytest.mark.parametrize("add", [after, gives_back, gathers])
@pytest.mark.parametrize("world", [1, 3])
def test_early_answers_need_a_step_that_ends_with_a_plan_and_has_no_results(
    loop: MakeLoop, world: int, add: Callable[[Team], None]
) -> None:
    """A method, results, or outputs."""
    one, told = loop("local", [np.ones(3) for _ in range(world)])
    for actor in one.team.actors:
        actor.methods["make"] = lambda: full(2)
    add(one.team)
    for _ in range(5):
        for notes, result in told.run():
            assert "answer" not in notes
            assert not isinstance(result, Exception), result
            assert len(unpack_values(result)) == (add is gives_back)


@pytest.mark.parametrize("world", [1, 2])
def test_of_several_plans_the_last_one_answers(loop: MakeLoop, world: int) -> None:
    one, told = loop("shm", [np.ones(3) for _ in range(world)])
    for script in one.team.scripts:
        script.call("make")
    for actor in one.team.actors:
        actor.methods["make"] = lambda: None
    for _ in range(2):
        one.team.collective(OpKind.ALLREDUCE, dict.fromkeys(range(world), 0))
    found = [told.run() for _ in range(6)]
    assert found[-1] == [(["end", "end", "answer", "end"], b"")] * world
    assert all(notes.count("answer") <= 1 for run in found for notes, _ in run)


def _fail() -> None:
    raise KernelError(detail="injected")


# ---------------------------------------------------------------------------------------------- a captured step


class Counting(FakePost):
    """A doorbell that counts what it is answered, and may fail at it."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[int] = []
        self.error: Exception | None = None

    def answer(self, number: int, payload: bytes) -> bool:
        self.told.append(number)
        if self.error is not None:
            raise self.error
        return super().answer(number, payload)


class Step:
    """One participant with a step of one plan, or of one method, and its runs by one way."""

    def __init__(self, way: str, *, repeats: bool = True) -> None:
        self.post = Counting() if way == "bell" else None
        script, self.turn = Script(0, [pinned(full(1))]), Methods()
        self.team = Team(1, [script])
        self.communicator = Odd(self.team.communicators[0])
        if repeats:
            self.team.collective(OpKind.ALLREDUCE, {0: 0})
        else:
            script.call("note", given(1))
        self.bench = Bench(script, self.post, self.turn, lambda _: self.communicator, note=lambda value: None)
        self.runs = 0

    def start(self) -> int:
        """Begins the next run; gives its number."""
        self.runs += 1
        seq, bench = self.runs, self.bench
        if self.post is not None:
            self.post.ring(seq, seq - 1, b"")
        else:
            bench.run(seq, seq - 1)
        return seq

    def over(self) -> None:
        """Waits until all runs have ended; what comes after them goes on."""
        self.runs += 1
        assert self.bench.sequencer.start(self.runs, self.runs - 1) is None
        self.bench.sequencer.end(self.runs)
        with self.turn.lock:  # nobody has kept it
            pass

    def answered(self, seq: int) -> bool:
        """Whether a run is answered, after a wait for that."""
        if self.post is not None:
            with self.post.changed:
                return self.post.changed.wait_for(lambda: seq in self.post.answers, WAIT_S)  # type: ignore[union-attr]
        with self.bench.changed:
            return self.bench.changed.wait_for(lambda: seq in self.bench.ran, WAIT_S)

    @property
    def told(self) -> list[int]:
        """The runs that were answered, as often as they were; by the bell, runs are numbered as they were rung."""
        if self.post is not None:
            return self.post.told
        return [seq for seq in self.bench.order if seq in self.bench.ran]

    def close(self) -> None:
        self.bench.sequencer.close("the test is over")
        self.bench.captured.close("the test is over")
        assert self.bench.captured.join(WAIT_S), "its thread is well"
        self.team.close()


@pytest.fixture
def step() -> Iterator[Callable[..., Step]]:
    with closing_all(Step) as make:
        yield make


WAYS = ["bell", "channel"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("repeats", [False, True])
def test_every_run_is_answered_once_and_one_that_fails_is_not(
    step: Callable[..., Step], way: str, repeats: bool
) -> None:
    one = step(way, repeats=repeats)
    seqs = [one.start() for _ in range(8)]
    one.over()
    assert one.told == seqs
    assert not one.bench.failed
    if repeats:
        one.communicator.hooks["launch"] = _fail
        seq = one.start()
        one.bench.heard(seq)
        one.over()
        assert isinstance(one.bench.failed[seq], KernelError)
        assert one.told == seqs


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("aborted", [False, True])
def test_a_run_that_was_answered_early_ends_like_any_other(step: Callable[..., Step], way: str, aborted: bool) -> None:
    """An abort that comes between the answer and the end comes too late."""
    one, gate = step(way), Gate()
    for _ in range(REPEATED_FROM - 1):
        one.start()
    one.over()
    one.communicator.hooks["end"] = gate
    number, seq = (REPEATED_FROM if way == "bell" else one.runs + 1), one.start()
    assert one.answered(number)
    assert gate.came.wait(WAIT_S)
    assert one.turn.lock.locked()
    kept = WatchedCondition()
    one.bench.sequencer._lock = one.bench.sequencer._changed = kept  # type: ignore[assignment]
    following = threading.Thread(target=one.over)
    following.start()
    assert kept.someone_waits(), "the run has not ended"
    if aborted:
        one.bench.sequencer.abort(seq, "cancelled")
        one.bench.captured.runner.abort(seq)
    gate.go.set()
    following.join(WAIT_S)
    assert not following.is_alive()
    assert not one.turn.lock.locked()
    assert one.told.count(number) == 1
    assert not one.bench.failed
    one.communicator.hooks.clear()
    one.start()
    one.over()
    assert not one.bench.failed, "nothing is broken"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("repeats", [False, True])
def test_an_answer_that_fails_ends_the_run_and_no_thread(
    step: Callable[..., Step], way: str, repeats: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it was an early one or not; the controller hears of the failure, and of nothing else."""
    one = step(way, repeats=repeats)
    for _ in range(REPEATED_FROM):
        one.start()
    one.over()
    before = list(one.told)
    error = OSError(28, "No space left on device")

    def send(message: Message) -> None:
        raise error

    if one.post is not None:
        one.post.error = error
    else:
        monkeypatch.setattr(one.bench.captured, "_send", send)
    seq = one.start()
    one.bench.heard(seq)
    assert isinstance(one.bench.failed[seq], InternalError)
    assert "No space left" in str(one.bench.failed[seq])
    later = one.start()
    one.bench.heard(later)
    assert isinstance(one.bench.failed[later], PlanAbortedError), "a step that has failed is broken"
    one.over()
    assert one.told == before + ([len(before) + 1] if way == "bell" else [])
    assert one.bench.order.count(seq) == one.bench.order.count(later) == 1
