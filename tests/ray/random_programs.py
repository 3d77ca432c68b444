"""Random programs of one or two threads, and what they do over Ray; `tests/ray/order_oracle.py` judges it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray
from hypothesis import strategies as st
from ray.exceptions import RayError

import raycollect as col
from raycollect.core.model import OpKind
from raycollect.driver.plan_tracker import PlanTracker
from raycollect.driver.plans import PlansUnderWay
from raycollect.errors import RaycollectError, RefusedError
from raycollect.member import plan_queue
from raycollect.member.participant import this_participant
from tests.pure.driver.order_model import FOLDS, KINDS
from tests.pure.sites import BUFFERS, first_values
from tests.ray.order_oracle import ACTORS, GROUPS, NEVER, Collective, Method, Submitted, Wait, fresh_value, judge

WAIT_S = 60.0
SLOW_S = 0.002
"""How long some methods take, behind which others can be cancelled before they begin."""

HOWS = ("plain", "counted", "raises", "listed", "slow", "ray_call", "no returns", "late argument", "argument fails")
MADE_HOWS = ("plain", "plain", "raises", "late argument", "argument fails")
UNCANCELLED = ("no returns", "late argument", "argument fails")
"""How calls are made that are not cancelled: there is no ref, or they go out late (see `Arguments`)."""


class Ordered(col.CollectiveParticipant):
    """A participant with some arrays, which notes its methods."""

    def __init__(self, number: int) -> None:
        plan_queue.ASK_S = 0.005  # what has to be asked for is asked often, now and then too early
        self.number = number
        self.values = first_values(number)
        self.noted: list[tuple[int, int]] = []

    def begin(self):
        for value, first in zip(self.values, first_values(self.number), strict=True):
            value[:] = first
        self.noted.clear()

    def get(self, at):
        return self.values[at]

    def _note(self, number):
        lease = this_participant()._lease
        self.noted.append((0 if lease is None else lease._sequencer.last, number))

    def _change(self, number, at, factor):
        self._note(number)
        self.values[at] *= factor
        self.values[at] += 1

    def change(self, number, at, factor, _argument=None):
        self._change(number, at, factor)

    def slow(self, number, at, factor):
        time.sleep(SLOW_S)
        self._change(number, at, factor)

    def counted(self, number, at, factor):
        self._change(number, at, factor)
        return number

    def listed(self, number, at, factor):
        self._change(number, at, factor)
        return [self.values[at].copy()]

    def raises(self, number, at, factor):
        self._change(number, at, factor)
        raise ValueError("as it has to")

    def make(self, number, value, _argument=None):
        self._note(number)
        return np.array(value)

    def make_none(self, number, value):
        self._note(number)
        raise ValueError("as it has to")

    def count(self, number):
        self._note(number)
        return number

    def fail(self, number):
        self._note(number)
        raise ValueError("as it has to")

    def forget(self):
        self.noted.clear()

    def die(self):
        os._exit(1)

    @col.by_value
    def read(self):
        return self.values, self.noted


@ray.remote(num_cpus=0)
class Bystander:
    """Whoever has an answer of it knows that what was called before has gone out."""

    def answer(self):
        return None


# ---------------------------------------------------------------------------------------------- programs


@st.composite
def _collectives(draw: Any) -> Collective:
    group = draw(st.sampled_from(list(GROUPS)))
    size = len(GROUPS[group])
    is_long = draw(st.booleans())
    buffers = [BUFFERS - 1 if is_long else draw(st.integers(0, BUFFERS - 2)) for _ in range(size)]
    root = draw(st.integers(0, size - 1))
    how = draw(st.sampled_from(MADE_HOWS))
    return Collective(
        group=group,
        kind=draw(st.sampled_from((*KINDS, None))),
        buffers=tuple(buffers),
        op=draw(st.sampled_from(list(FOLDS))),
        root=root,
        peer=(root + draw(st.integers(1, size - 1))) % size,
        fresh=draw(st.integers(0, size - 1)) if draw(st.integers(0, 2)) == 0 else -1,
        how=how,
        is_cancelled=how not in UNCANCELLED and draw(st.integers(0, 5)) == 0,
        is_async=draw(st.booleans()),
    )


@st.composite
def _methods(draw: Any) -> Method:
    how = draw(st.sampled_from(HOWS))
    return Method(
        actor=draw(st.integers(0, ACTORS - 1)),
        buffer=draw(st.integers(0, BUFFERS - 1)),
        factor=draw(st.integers(2, 5)),
        how=how,
        is_cancelled=how not in UNCANCELLED and draw(st.integers(0, 5)) == 0,
    )


def threads_of(count: int) -> Any:
    """Programs of so many threads."""
    actions = st.one_of(_methods(), _methods(), _collectives(), _collectives(), st.just(Wait()))
    return st.tuples(*[st.lists(actions, max_size=10 // count) for _ in range(count)])


# ---------------------------------------------------------------------------------------------- running


@dataclass
class Crew:
    """The actors, and refs to their arrays, of which this process declares the groups."""

    actors: list[Any]
    bystander: Any
    refs: list[list[Any]] = field(default_factory=list)

    def declare(self) -> None:
        """Declares the groups, and looks up the arrays."""
        for name, members in GROUPS.items():
            col.declare_collective_group([self.actors[one] for one in members], group_name=name)
        self.refs = [[actor.get.remote(at) for at in range(BUFFERS)] for actor in self.actors]

    def begin(self) -> None:
        """All arrays as at first."""
        ray.get([actor.begin.remote() for actor in self.actors])


@contextmanager
def seqs_noted() -> Iterator[threading.local]:
    """Notes the number of the plan that each thread sent last."""
    here, register = threading.local(), PlansUnderWay.register

    def noted(self: PlansUnderWay, tracker: PlanTracker) -> None:
        register(self, tracker)
        here.seq = tracker.seq

    PlansUnderWay.register = noted  # type: ignore[method-assign]
    try:
        yield here
    finally:
        PlansUnderWay.register = register  # type: ignore[method-assign]


class Arguments:
    """The late arguments of calls, by actor: until they are there, Ray keeps the calls behind them back, too.

    If one of those is cancelled, Ray 2.60 leaves a gap among the actor's calls, and begins none after it for 30 s. So
    calls are cancelled once they have gone out. The lock is held for a call with such an argument, and to cancel.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.late: list[list[Any]] = [[] for _ in range(ACTORS)]


class Player:
    """One thread of a program; `first` is the number of its first method."""

    def __init__(self, crew: Crew, here: threading.local, arguments: Arguments, first: int) -> None:
        self.submitted: list[Submitted] = []
        self._crew = crew
        self._here = here
        self._arguments = arguments
        self._number = first
        self._refs: list[Any] = []

    def play(self, actions: Sequence[Any]) -> None:
        """Does all of it, and waits for the end."""
        for action in actions:
            if isinstance(action, Method):
                self._call(action)
            elif isinstance(action, Collective):
                self._reduce(action)
            else:
                self.settle()
        self.settle()

    def settle(self) -> None:
        """Waits for all that was submitted."""
        for one in self.submitted:
            if one.work is not None:
                work, one.work = one.work, None
                with _refusals(one):
                    work.wait(WAIT_S)
        for ref in self._refs:
            with suppress(RayError):
                ray.get(ref, timeout=WAIT_S)
        self._refs.clear()

    def _next(self, actor: int, must: bool | None, action: Any = None) -> int:
        self._number += 1
        self.submitted.append(Submitted(actors=(actor,), number=self._number, must=must, action=action))
        return self._number

    @contextmanager
    def _argument(self, actor: int, how: str) -> Iterator[tuple[Any, ...]]:
        """What comes of a method of another actor; ends once the call is submitted that gets it."""
        if how not in ("late argument", NEVER):
            yield ()
            return
        other = (actor + 1) % ACTORS
        method = self._crew.actors[other].fail if how == NEVER else self._crew.actors[other].count
        with self._arguments.lock:
            made = method.remote(self._next(other, True))
            self._arguments.late[actor].append(made)
            yield (made,)

    def _call(self, action: Method) -> None:
        actor, how = self._crew.actors[action.actor], action.how
        with self._argument(action.actor, how) as argument:
            number = self._next(action.actor, None if action.is_cancelled else how != NEVER, action)
            given = number, action.buffer, action.factor, *argument
            if how == "ray_call":
                ref = actor.__ray_call__.remote(lambda self, *args: self._change(*args), *given)
            elif how == "no returns":
                ref = actor.change.options(num_returns=0).remote(*given)
            else:
                name = how if how in ("counted", "raises", "listed", "slow") else "change"
                ref = getattr(actor, name).remote(*given)
        self._keep(ref, action.actor, is_cancelled=action.is_cancelled)

    def _keep(self, ref: Any, actor: int, *, is_cancelled: bool) -> None:
        if is_cancelled:
            with self._arguments.lock:
                late = self._arguments.late[actor]
                if late:
                    ray.wait(late, num_returns=len(late), timeout=WAIT_S)
                ray.get(self._crew.bystander.answer.remote())
                ray.cancel(ref)
        if ref is not None:
            self._refs.append(ref)

    def _reduce(self, action: Collective) -> None:
        members, refs = GROUPS[action.group], []
        sent = Submitted(actors=members, action=action)
        for rank, (one, buffer) in enumerate(zip(members, action.buffers, strict=True)):
            if rank == action.fresh:
                with self._argument(one, action.how) as argument:
                    sent.made = self._next(one, None if action.is_cancelled else action.how != NEVER)
                    method = self._crew.actors[one].make_none if action.how == "raises" else self._crew.actors[one].make
                    sent.fresh = method.remote(sent.made, fresh_value(action), *argument)
                self._keep(sent.fresh, one, is_cancelled=action.is_cancelled)
            refs.append(sent.fresh if rank == action.fresh else self._crew.refs[one][buffer])
        self._here.seq = 0
        with _refusals(sent):
            found = _send(action, refs)
            if action.is_async:
                sent.work = found
                sent.result = found.refs
            else:
                sent.result = found
        sent.seq = self._here.seq
        if action.kind is OpKind.SEND:
            sent.actors = (members[action.root], members[action.peer])
        self.submitted.append(sent)


@contextmanager
def _refusals(sent: Submitted) -> Iterator[None]:
    try:
        yield
    except RefusedError:
        sent.is_refused = True


def _send(action: Collective, refs: list[Any]) -> Any:
    given: Any = {"async_op": action.is_async, "timeout_s": WAIT_S}
    if action.kind is None:
        return col.allgather_refs(None, refs, action.group, **given)
    if action.kind is OpKind.ALLREDUCE:
        return col.allreduce_refs(refs, action.group, op=action.op, **given)
    if action.kind is OpKind.REDUCE:
        return col.reduce_refs(refs, action.root, action.group, op=action.op, **given)
    if action.kind is OpKind.BROADCAST:
        return col.broadcast_refs(refs, action.root, action.group, **given)
    return col.send_ref(refs[action.root], refs[action.peer], action.group, **given)


def play(crew: Crew, program: Sequence[Sequence[Any]]) -> list[list[Submitted]]:
    """Runs a program, each of its threads in a thread of its own, and returns what each submitted."""
    with seqs_noted() as here:
        arguments = Arguments()
        players = [Player(crew, here, arguments, 1000 * (at + 1)) for at in range(len(program))]
        if len(program) == 1:
            players[0].play(program[0])
        else:
            with ThreadPoolExecutor(len(program)) as threads:
                for act in [threads.submit(one.play, actions) for one, actions in zip(players, program, strict=True)]:
                    act.result(4 * WAIT_S)
    return [one.submitted for one in players]


# ---------------------------------------------------------------------------------------------- checking


def read(crew: Crew) -> list[Any]:
    """What the actors hold and noted, behind all that this thread has called."""
    return ray.get([actor.read.remote() for actor in crew.actors], timeout=WAIT_S)


def check_restart(crew: Crew, before: Sequence[Any], victim: int, methods: Sequence[int], after: Sequence[Any]) -> None:
    """Runs a program, ends the process of an actor, declares the groups again, and runs another program.

    Ray begins the actor anew, and makes the calls again that had not ended, not always in their order. So methods that
    were called before the end may run again, in the new process, and those that were called after it must; each once. A
    collective that stands between them fails, and changes nothing.

    Args:
        crew: The actors, which Ray restarts, and whose methods it retries.
        before: The program before.
        victim: The actor that dies.
        methods: The factors of methods before its death, and of as many after it.
        after: The program afterwards.
    """
    crew.begin()
    world = judge(play(crew, [before]), read(crew))
    actor, values = crew.actors[victim], first_values(victim)
    begun = [actor.change.remote(number, 0, factor) for number, factor in enumerate(methods)]
    actor.die.options(max_task_retries=0).remote()
    with suppress(RaycollectError):  # it fails as it is sent, or later
        work = col.allreduce_refs([refs[1] for refs in crew.refs], "all", async_op=True, timeout_s=WAIT_S)
        work.wait(WAIT_S)
        raise AssertionError("a collective went well behind the death of a participant")
    ended = [actor.change.remote(len(methods) + number, 0, factor) for number, factor in enumerate(methods)]
    ray.get([*begun, *ended], timeout=WAIT_S)
    _, noted = ray.get(actor.read.remote(), timeout=WAIT_S)
    numbers = [number for _, number in noted]
    assert len(set(numbers)) == len(numbers), f"a method ran twice: {numbers}"
    assert set(numbers) <= set(range(2 * len(methods)))
    assert set(numbers) >= set(range(len(methods), 2 * len(methods))), numbers
    for number in numbers:
        values[0] *= methods[number % len(methods)]
        values[0] += 1
    world[victim] = values
    for name in GROUPS:
        col.destroy_collective_group(name)
    crew.declare()
    ray.get([one.forget.remote() for one in crew.actors])
    judge(play(crew, [after]), read(crew), world)


def check(crew: Crew, program: Sequence[Sequence[Any]]) -> None:
    """Runs a program, and compares."""
    crew.begin()
    submitted = play(crew, program)
    judge(submitted, read(crew))
