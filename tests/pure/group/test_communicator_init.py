"""The ranks of a group form a communicator, all or none, though one leaves, dies or is interrupted meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any
from unittest.mock import patch

import pytest

from raycollect.channel.messages import Gone, Meet, Message, Met, Withdraw
from raycollect.core.model import GroupSpec, Launch
from raycollect.engine.run import Outcome
from raycollect.errors import (
    CollectiveTimeoutError,
    ConnectionLostError,
    GroupBrokenError,
    KernelError,
    ParticipantDiedError,
    PlanAbortedError,
    RaycollectError,
)
from raycollect.group.channel_exchange import ChannelExchange
from raycollect.group.coordinator_client import CoordinatorClient
from raycollect.group.group_member import GroupMember
from tests.pure.group.tables import WORLD, Call, Seeing, Table, assert_set, error_of
from tests.pure.watched import WAIT_S
from tests.support.waiting import wait_until

SPEC = GroupSpec(name="g", group_id="id", backend="shm", world_size=2)


def _is_made(message: Message) -> bool:
    return isinstance(message, Meet) and message.place.startswith("made")


@pytest.mark.parametrize("how", ["leaves", "dies", "orphaned"])
def test_messages_after_the_join_belong_to_later_calls(table: Callable[..., Table], how: str) -> None:
    here = table(Seeing)
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
    assert (("lost", {"dies": 1, "orphaned": 0, "leaves": -1}[how]) in here.communicators[2].events) == (
        how != "leaves"
    )
    assert isinstance(error_of(here.start(here.process_groups[2].form)), GroupBrokenError)


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
    assert [type(error_of(joining[rank])) for rank in (1, 2)] == [expected] * 2
    assert here.communicators[1].events[-1] == "close"
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
    assert isinstance(error_of(broken), KernelError)
    assert isinstance(error_of(others[0]), KernelError)
    here.release()
    assert isinstance(error_of(others[1]), KernelError)


@pytest.mark.parametrize("alone", [True, False])
def test_a_rank_that_is_interrupted_as_it_waits_for_the_others_is_not_met(
    table: Callable[..., Table], alone: bool
) -> None:
    """Ctrl-C in a notebook: the others wait for its next call, also where they had come at that moment."""
    here = table()
    changed = here.process_groups[0].communicator("all").client.changed
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


def test_a_signal_stays_one_where_the_coordinator_is_gone(table: Callable[..., Table]) -> None:
    here = table()
    client = here.process_groups[0].communicator("all").client
    sent: list[Message] = []

    def send(message: Message) -> None:
        sent.append(message)
        raise KeyboardInterrupt if isinstance(message, Meet) else ConnectionLostError(detail="gone")

    with patch.object(client, "send", send), pytest.raises(KeyboardInterrupt):
        client.meet(client.begin("join", 0.0, WAIT_S), "form", b"", WAIT_S)
    assert [type(one) for one in sent] == [Meet, Withdraw]  # the bytes may be on their way


def test_a_death_that_follows_the_end_of_a_meeting_does_not_change_how_it_ends() -> None:
    client = CoordinatorClient(GroupMember(SPEC, 0, lambda message: None), "all")
    call, found = client.begin("join", 0.0, WAIT_S), Future[Any]()
    missed = {"group_id": "id", "communicator": "all", "blobs": [], "missing": [1], "error": None}

    def meet() -> None:
        try:
            found.set_result(client.meet(call, "form", b"", WAIT_S))
        except RaycollectError as exc:
            found.set_result(exc)

    thread = threading.Thread(target=meet)
    thread.start()
    assert wait_until(lambda: client._meeting)
    with client.lock:
        client.answered(Met(call=client._meeting, **missed))
        client.stop(ParticipantDiedError(rank=1, detail="as it was late"))
    assert isinstance(found.result(WAIT_S), CollectiveTimeoutError)
    thread.join()


def test_a_wait_for_the_controllers_answer_ends_with_an_abort_or_in_time() -> None:
    aborted = ChannelExchange("", 0, lambda message: aborted.abort(message.seq))
    with pytest.raises(PlanAbortedError):
        aborted(Launch(seq=7, ranks=(0, 1), timeout_s=WAIT_S), b"")
    silent = ChannelExchange("", 0, lambda message: None)
    with pytest.raises(CollectiveTimeoutError):
        silent(Launch(seq=7, ranks=(0, 1), timeout_s=0.01), b"")
