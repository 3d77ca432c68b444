"""What becomes of a call when another rank leaves, dies or fails: ranks in threads, and messages held back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from raycollect import backends
from raycollect.backends.exchanged import Exchanged
from raycollect.channel.messages import Depart, Drop, Gone, Meet, Message, Met, Withdraw
from raycollect.core import timers
from raycollect.core.model import GroupSpec, Launch
from raycollect.engine.execution import Outcome
from raycollect.errors import (
    CollectiveTimeoutError,
    ConnectionLostError,
    GroupBrokenError,
    InternalError,
    KernelError,
    ParticipantDiedError,
    PlanAbortedError,
    RaycollectError,
)
from raycollect.group import communicator_init, member_communicator
from raycollect.group.coordinator import Coordinator
from raycollect.group.hub_client import HubClient
from raycollect.group.process_group import ProcessGroup
from tests.pure.watched import WAIT_S
from tests.waiting import wait_until

WORLD = 3


class Plain(Exchanged):
    """A communicator that has its consistency checks at the hub; it notes what it is told."""

    def __init__(self, spec: GroupSpec, rank: int, exchange: Any) -> None:
        super().__init__(spec, rank, exchange)
        self.told: list[Any] = []
        self.on_close: Callable[[], None] = lambda: None

    def abort(self, seq: int) -> None:
        self.told.append(("abort", seq))
        super().abort(seq)

    def close(self) -> None:
        self.told.append("close")
        self.on_close()


class Seeing(Plain):
    """One that sees by itself how far others came."""

    def lost(self, rank: int) -> None:
        self.told.append(("lost", rank))


class Table:
    """The seats of a group, and its hub; what the hub says to a rank can be held back."""

    def __init__(self, kind: type[Plain] = Plain) -> None:
        self.coordinator = Coordinator("id", WORLD, "g")
        self.made: dict[int, Plain] = {}
        self.closed = [threading.Event() for _ in range(WORLD)]
        self.before_made: Callable[[int], None] = lambda rank: None
        self.heard: Callable[[int, Message], None] = lambda rank, message: None
        self.holds: Callable[[int, Message], bool] = lambda rank, message: False
        self.held: list[tuple[int, Message]] = []
        self.threads = ThreadPoolExecutor(WORLD + 2)
        self._kind = kind
        self._lock = threading.RLock()
        spec = GroupSpec(name="g", group_id="id", backend="shm", world_size=WORLD, timeout_s=WAIT_S)
        self.process_groups = [
            ProcessGroup(
                spec, rank, self._sender(rank), members=[f"W{at}" for at in range(WORLD)], leave=self._leaver(rank)
            )
            for rank in range(WORLD)
        ]

    def create(self, spec: GroupSpec, rank: int, rendezvous: Any, exchange: Any, **_: Any) -> Plain:
        self.before_made(rank)
        self.made[rank] = self._kind(spec, rank, exchange)
        self.made[rank].on_close = self.closed[rank].set
        return self.made[rank]

    def deliver(self, orders: list[tuple[int, Message]]) -> None:
        with self._lock:
            for rank, message in orders:
                if (self.held and self.held[0][0] == rank) or self.holds(rank, message):
                    self.held.append((rank, message))
                else:
                    self.process_groups[rank].received(message)

    def release(self) -> None:
        """Lets a rank hear what was held back."""
        with self._lock:
            held, self.held, self.holds = self.held, [], lambda rank, message: False
            for rank, message in held:
                self.process_groups[rank].received(message)

    def kill(self, rank: int) -> None:
        """The hub hears that a process has ended."""
        with self._lock:
            self.deliver(self.coordinator.lost(rank, "closed by the peer"))

    def start(self, what: Callable[..., Any], *args: Any) -> Future[Any]:
        return self.threads.submit(what, *args)

    def form(self) -> None:
        for one in [self.start(process_group.form) for process_group in self.process_groups]:
            one.result(WAIT_S)

    def close(self) -> None:
        for process_group in self.process_groups:
            process_group.close()
        self.threads.shutdown()

    def _sender(self, rank: int) -> Callable[[Message], None]:
        def send(message: Message) -> None:
            with self._lock:
                self.deliver(self.coordinator.receive(rank, message))
            self.heard(rank, message)

        return send

    def _leaver(self, rank: int) -> Callable[[], None]:
        return lambda: self._sender(rank)(Depart(group_id="id"))


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Table]]:
    made: list[Table] = []

    def make(kind: type[Plain] = Plain) -> Table:
        made.append(Table(kind))
        monkeypatch.setattr(backends, "load", lambda *_: made[-1].create)
        return made[-1]

    yield make
    for one in made:
        one.close()


def _error_of(future: Future[Any]) -> RaycollectError:
    error = future.exception(WAIT_S)
    assert isinstance(error, RaycollectError), error
    return error


# ---------------------------------------------------------------------------------------------- forming


def _is_made(message: Message) -> bool:
    return isinstance(message, Meet) and message.place.startswith("made")


@pytest.mark.parametrize("slow", [0, 1, 2])
def test_join_completes_for_all_or_none_and_a_later_leave_fails_no_join(table: Callable[..., Table], slow: int) -> None:
    """A rank that is still being told, or still makes its end, gets the group: another's leaving comes after that."""
    here = table()
    done = {rank: threading.Event() for rank in range(WORLD) if rank != slow}

    def heard(rank: int, message: Message) -> None:  # it waits for the slow one, or has left already
        if rank != slow and (_is_made(message) or isinstance(message, Depart)):
            done[rank].set()

    def before_made(rank: int) -> None:
        if rank == slow:
            assert all(one.wait(WAIT_S) for one in done.values())

    def join_and_leave(process_group: ProcessGroup) -> None:
        process_group.form()
        process_group.close()

    here.heard, here.before_made = heard, before_made
    for one in [here.start(join_and_leave, process_group) for process_group in here.process_groups]:
        one.result(WAIT_S)


@pytest.mark.parametrize("how", ["leaves", "dies", "orphaned"])
def test_messages_after_the_join_belong_to_later_calls(table: Callable[..., Table], how: str) -> None:
    here = table()
    here.holds = lambda rank, message: rank == 2 and isinstance(message, Met) and not message.blobs[0]
    joining = [here.start(process_group.form) for process_group in here.process_groups]
    for rank in (0, 1):
        joining[rank].result(WAIT_S)
    if how == "leaves":
        here.process_groups[1].close()
    elif how == "dies":
        here.kill(1)
    assert not joining[2].done()
    with here._lock:
        if how != "orphaned":
            assert [type(message) for _, message in here.held][-1] is Gone
        here.release()
        if how == "orphaned":
            here.process_groups[2].orphaned(ParticipantDiedError(rank=0, detail="its process has ended"))
    joining[2].result(WAIT_S)
    assert isinstance(_error_of(here.start(here.process_groups[2].form)), GroupBrokenError)


@pytest.mark.parametrize("how", ["leaves", "dies", "orphaned"])
def test_departure_during_the_join_ends_it_for_all(table: Callable[..., Table], how: str) -> None:
    here = table()
    waits = {rank: threading.Event() for rank in (0, 1)}
    here.heard = lambda rank, message: waits[rank].set() if _is_made(message) else None
    go = threading.Event()
    here.before_made = lambda rank: None if rank != 2 else assert_set(go)
    joining = [here.start(process_group.form) for process_group in here.process_groups]
    assert all(one.wait(WAIT_S) for one in waits.values())
    if how == "leaves":
        here.process_groups[0].close()
    elif how == "dies":
        here.kill(0)
    else:
        for process_group in here.process_groups[1:]:
            process_group.orphaned(ParticipantDiedError(rank=0, detail="its process has ended"))
    expected = GroupBrokenError if how == "leaves" else ParticipantDiedError
    assert [type(_error_of(joining[rank])) for rank in (1, 2)] == [expected] * 2
    assert here.made[1].told[-1] == "close"
    go.set()
    assert here.closed[2].wait(WAIT_S), "what is made too late is closed"


def test_failure_right_after_the_join_reaches_slow_ranks(table: Callable[..., Table]) -> None:
    """The word that all are ready, and that of the failure, come at once: nobody waits for its next call."""
    here = table()
    here.holds = lambda rank, message: rank == 2 and isinstance(message, Met) and not message.blobs[0]
    broken = here.start(
        here.process_groups[0].communicator("all").run,
        "allreduce",
        lambda *_: Outcome(error=KernelError(rank=0, detail="no memory")),
        WAIT_S,
    )
    others = [here.start(Call(process_group)) for process_group in here.process_groups[1:]]
    assert isinstance(_error_of(broken), KernelError)
    assert isinstance(_error_of(others[0]), KernelError)
    here.release()
    assert isinstance(_error_of(others[1]), KernelError)


@pytest.mark.parametrize("alone", [True, False])
def test_a_rank_that_is_interrupted_as_it_waits_for_the_others_is_not_met(
    table: Callable[..., Table], alone: bool
) -> None:
    """Ctrl-C in a notebook: the others wait for its next call, also where they had come at that moment."""
    here = table()
    changed = here.process_groups[0].communicator("all").hub.changed
    real, there = changed.wait_for, threading.Semaphore(0)

    def interrupted(*_: Any) -> bool:
        changed.wait_for = real  # type: ignore[method-assign]
        raise KeyboardInterrupt

    here.heard = lambda rank, message: there.release() if isinstance(message, Meet) and rank else None
    changed.wait_for = interrupted  # type: ignore[method-assign]
    first, *others = (process_group.form for process_group in here.process_groups)
    if alone:
        assert isinstance(here.start(first).exception(WAIT_S), KeyboardInterrupt)
    running = [here.start(one) for one in others]
    for _ in running:
        assert there.acquire(timeout=WAIT_S)
    if not alone:
        assert isinstance(here.start(first).exception(WAIT_S), KeyboardInterrupt)
    assert [one.exception(WAIT_S) for one in (here.start(first), *running)] == [None] * WORLD


def test_a_signal_stays_one_where_the_hub_is_gone(table: Callable[..., Table]) -> None:
    here = table()
    hub = here.process_groups[0].communicator("all").hub
    sent: list[Message] = []

    def send(message: Message) -> None:
        sent.append(message)
        raise KeyboardInterrupt if isinstance(message, Meet) else ConnectionLostError(detail="gone")

    with patch.object(hub, "send", send), pytest.raises(KeyboardInterrupt):
        hub.meet("form", b"", WAIT_S)
    assert [type(one) for one in sent] == [Meet, Withdraw]  # the bytes may be on their way


def test_who_does_not_join_a_communicator_of_two_has_the_groups_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: Any) -> Any:
        raise CollectiveTimeoutError(missing=(0,))

    def wait_made(generation: str, is_made: Callable[[], bool], deadline_s: float) -> bool:
        wait_until(is_made)
        return True

    monkeypatch.setattr(communicator_init, "_make", absent)
    hub: Any = SimpleNamespace(generation="1", ranks=(2, 3), values={}, notify=lambda: None, wait_made=wait_made)
    with pytest.raises(CollectiveTimeoutError) as caught:
        communicator_init.form(hub, WAIT_S)
    assert caught.value.missing == (2,)


def test_a_rank_that_can_not_form_the_group_tells_the_others(
    table: Callable[..., Table], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, real = table(), communicator_init.form

    def form(hub: HubClient, deadline_s: float) -> Any:
        if hub.owner.rank == 1:
            raise RuntimeError("can't start new thread")
        return real(hub, deadline_s)

    monkeypatch.setattr(communicator_init, "form", form)
    for one in [here.start(process_group.form) for process_group in here.process_groups]:
        error = _error_of(one)
        assert isinstance(error, InternalError)
        assert "can't start new thread" in error.detail
    monkeypatch.undo()
    monkeypatch.setattr(backends, "load", lambda *_: here.create)
    here.form()


def assert_set(event: threading.Event) -> None:
    assert event.wait(WAIT_S)


# ---------------------------------------------------------------------------------------------- calls


class Call:
    """A call of one rank: it goes through the consistency check, and then waits to be let go on."""

    def __init__(self, process_group: ProcessGroup, ends: Callable[[], Outcome] = Outcome) -> None:
        self.passed = threading.Event()
        self.go = threading.Event()
        self.process_group = process_group
        self._ends = ends

    def __call__(self) -> None:
        self.process_group.communicator("all").run("allreduce", self._attempt, WAIT_S)

    def _attempt(self, communicator: Any, seq: int) -> Outcome:
        launch = Launch(seq=seq, ranks=tuple(range(WORLD)), timeout_s=WAIT_S)
        try:
            communicator.agree(launch, b"")
        except RaycollectError as exc:
            return Outcome(error=exc)
        self.passed.set()
        assert_set(self.go)
        return self._ends()


def start_calls(here: Table, ends: Callable[[], Outcome] = Outcome) -> list[tuple[Call, Future[Any]]]:
    here.form()
    calls = [Call(process_group, ends) for process_group in here.process_groups]
    return [(one, here.start(one)) for one in calls]


@pytest.mark.parametrize("kind", [Plain, Seeing])
@pytest.mark.parametrize("how", ["member", "hub"])
def test_a_call_for_which_the_dead_did_their_part_ends_well(
    table: Callable[..., Table], monkeypatch: pytest.MonkeyPatch, kind: type[Plain], how: str
) -> None:
    """Only the next one hears of the death."""
    later: list[Callable[[], None]] = []

    def begin_later(delay_s: float, call: Callable[[], None]) -> None:
        assert 0 < delay_s <= 1
        later.append(call)

    here = table(kind)
    calls = start_calls(here)
    dead = 2 if how == "member" else 0
    living = [rank for rank in range(WORLD) if rank != dead]
    assert_set(calls[dead][0].passed)
    calls[dead][0].go.set()
    calls[dead][1].result(WAIT_S)
    for rank in living:
        assert_set(calls[rank][0].passed)
    monkeypatch.setattr(timers, "soon_or_now", begin_later)
    if how == "member":
        here.kill(dead)
    else:
        for rank in living:
            here.process_groups[rank].orphaned(ParticipantDiedError(rank=0, detail="its process has ended"))
    told = {rank: [one for one in here.made[rank].told if one != "close"] for rank in living}
    assert told == dict.fromkeys(living, [("lost", dead)] if kind is Seeing else [])
    assert len(later) == (0 if kind is Seeing else 2), "it may not see it by itself"
    for rank in living:
        calls[rank][0].go.set()
        calls[rank][1].result(WAIT_S)
        again = _error_of(here.start(Call(here.process_groups[rank])))
        assert isinstance(again, GroupBrokenError)
        assert f"rank {dead} (W{dead})" in str(again)
    for call in later:
        call()  # after the launch has ended it changes nothing


@pytest.mark.parametrize("kind", [Plain, Seeing])
def test_passed_check_counts_despite_a_simultaneous_death(table: Callable[..., Table], kind: type[Plain]) -> None:
    """The hub's answer and the end of a process come at once; the caller looks at both afterwards."""
    here = table(kind)
    here.form()
    here.holds = lambda rank, message: rank == 1 and isinstance(message, Met)
    calls = [Call(process_group) for process_group in here.process_groups]
    running = [here.start(one) for one in calls]
    for rank in (0, 2):
        assert_set(calls[rank].passed)
        calls[rank].go.set()
        running[rank].result(WAIT_S)
    here.kill(2)
    assert [type(message) for _, message in here.held] == [Met, Gone]
    calls[1].go.set()
    here.release()
    running[1].result(WAIT_S)


def test_a_connection_that_a_rank_closed_as_it_left_is_no_broken_group(table: Callable[..., Table]) -> None:
    """The others find it closed before the hub tells them, and wait where that rank comes next."""
    here = table()
    here.form()
    here.holds = lambda rank, message: isinstance(message, Drop)
    here.process_groups[0].communicator("all")._give_up(KernelError(rank=0, detail="no memory"))
    found = [threading.Event() for _ in range(2)]

    def closed(event: threading.Event) -> Callable[..., Any]:
        def agree(*_: Any) -> Any:
            event.set()
            raise GroupBrokenError(group_name="g", detail="the connection to rank 0 has ended")

        return agree

    for rank, event in enumerate(found, 1):
        here.made[rank].agree = closed(event)
    calls = [Call(process_group) for process_group in here.process_groups]
    running = [here.start(one) for one in calls]
    for event in found:
        assert_set(event)
    here.release()
    for call, one in zip(calls, running, strict=True):
        call.go.set()
        one.result(WAIT_S)


def test_call_missing_the_work_of_dead_ranks_names_them(table: Callable[..., Table]) -> None:
    here = table(Seeing)
    calls = start_calls(here, lambda: Outcome(error=PlanAbortedError(detail="rank 2 has ended")))
    for call, _ in calls:
        assert_set(call.passed)
    here.kill(2)
    for rank in (0, 1):
        calls[rank][0].go.set()
        error = _error_of(calls[rank][1])
        assert isinstance(error, ParticipantDiedError)
        assert error.rank == 2
    calls[2][0].go.set()
    calls[2][1].exception(WAIT_S)


@pytest.mark.parametrize("kind", [Plain, Seeing])
def test_a_call_that_is_whole_here_returns_though_it_failed_elsewhere(
    table: Callable[..., Table], kind: type[Plain]
) -> None:
    """Where the backend sees for itself what is lacking, nobody is interrupted by what another says of its own end."""
    here = table(kind)
    calls = start_calls(here)
    for call, _ in calls:
        assert_set(call.passed)
    calls[2][0]._ends = lambda: Outcome(error=KernelError(rank=2, detail="no memory"))
    calls[2][0].go.set()
    assert isinstance(_error_of(calls[2][1]), KernelError)
    assert (("abort", 2) in here.made[0].told) == (kind is Plain), "the others must be woken there"
    for rank in (0, 1):
        calls[rank][0].go.set()
        calls[rank][1].result(WAIT_S)


class Broken(Call):
    """One that finds the connection to rank 0 ended when it first begins."""

    def _attempt(self, communicator: Any, seq: int) -> Outcome:
        if self.passed.is_set():
            return super()._attempt(communicator, seq)
        self.passed.set()
        self.go.set()
        return Outcome(error=GroupBrokenError(group_name="g", detail="the connection to rank 0 has ended"))


@pytest.mark.parametrize("error", [KernelError(detail="no memory"), PlanAbortedError(detail="it begins again")])
def test_who_sees_a_rank_leave_before_its_word_comes_waits_for_that(
    table: Callable[..., Table], error: RaycollectError
) -> None:
    """A rank that has left closes its connections, and says why: the one may be noticed before the other."""
    here = table()
    here.form()
    here.holds = lambda rank, message: rank == 1 and isinstance(message, Drop)
    here.process_groups[0].communicator("all")._give_up(error)
    call = Broken(here.process_groups[1])
    outcome = here.start(call)
    assert_set(call.passed)
    others = [Call(here.process_groups[rank]) for rank in (0, 2)]
    for one in others:
        one.go.set()
    rest = [here.start(one) for one in others]
    here.release()
    for future in (outcome, *rest):
        future.result(WAIT_S)


def test_a_connection_that_ends_without_a_word_breaks_the_call_for_all(
    table: Callable[..., Table], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member_communicator, "CAUSE_S", 0.01)
    here = table()
    here.form()
    others = [here.start(Call(here.process_groups[rank])) for rank in (0, 2)]
    for one in (here.start(Broken(here.process_groups[1])), *others):
        assert isinstance(_error_of(one), GroupBrokenError)
