"""A fault in each thread of a group's members, one by one, after which all goes on."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raycollect.channel import Hub
from raycollect.core import timers
from raycollect.core.model import GroupSpec
from raycollect.engine.run import Outcome
from raycollect.errors import InternalError
from raycollect.group import communicator_init, watchdog
from raycollect.group.bootstrap import BootstrapRequest, Introduction, follow, lead
from raycollect.group.bootstrap_store import DirectoryBulletin
from raycollect.group.coordinator_server import CoordinatorServer
from raycollect.group.member_communicator import MemberCommunicator
from raycollect.group.process_group import ProcessGroup
from tests.faults.thread_failures import fail_at
from tests.pure.group.watchdog_desk import HERE, QUESTION, Desk
from tests.pure.thread_faults import BOOM, WAIT_S, fault_in


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[ProcessGroup, ProcessGroup]]:
    """Two members of a group that they have made themselves, in one process."""
    with members(tmp_path) as made:
        yield made


@contextmanager
def members(path: Path) -> Iterator[tuple[ProcessGroup, ProcessGroup]]:
    bulletin, hub = DirectoryBulletin(path / "bulletin"), Hub()
    spec = GroupSpec(name="g", group_id="", backend="tcp", world_size=2, timeout_s=WAIT_S)
    first, second = (BootstrapRequest(spec=spec, rank=rank, me=Introduction(f"W{rank}", "m")) for rank in range(2))
    with ThreadPoolExecutor(2) as pool:
        joined = [pool.submit(lead, first, bulletin, {}), pool.submit(follow, second, bulletin, hub)]
        slots = joined[0].result(WAIT_S), joined[1].result(WAIT_S)
    try:
        yield slots
    finally:
        for slot in slots:
            slot.close()
        hub.close()


def both(slots: tuple[ProcessGroup, ProcessGroup], call: Callable[[ProcessGroup], Any]) -> list[Any]:
    """What two members get who do the same at once."""
    with ThreadPoolExecutor(2) as pool:
        return [_outcome(one) for one in [pool.submit(call, slot) for slot in slots]]


def _outcome(future: Future[Any]) -> Any:
    error = future.exception(WAIT_S)
    return future.result() if error is None else error


@fault_in("raycollect-helper")
def test_a_communicator_that_can_not_form_is_formed_at_the_next_call(
    two: tuple[ProcessGroup, ProcessGroup],
) -> None:
    for slot in two:
        slot.communicator("all")._leave()
    with fail_at(communicator_init, "make_communicator", thread="raycollect-helper"):
        errors = both(two, ProcessGroup.form)
    assert {type(error) for error in errors} == {InternalError}
    assert all(error.detail.startswith(f"forming the group failed: {BOOM}") for error in errors)
    assert both(two, ProcessGroup.form) == [None, None]


@fault_in("raycollect-call-...")
def test_the_thread_of_a_communicator_goes_on_with_the_next_call(two: tuple[ProcessGroup, ProcessGroup]) -> None:
    def start(slot: ProcessGroup) -> Any:
        return slot.communicator("all").start("word", lambda communicator, seq: Outcome(), WAIT_S).result(WAIT_S)

    with fail_at(MemberCommunicator, "_run", thread="raycollect-call-all"):
        error = _outcome(two[0].communicator("all").start("word", lambda communicator, seq: Outcome(), WAIT_S))
    assert isinstance(error, InternalError)
    assert error.detail.startswith(f"a call on communicator all failed: {BOOM}")
    assert {type(one) for one in both(two, start)} == {Outcome}


@fault_in("raycollect-helper")
def test_a_hub_that_fades_ends_whatever_fails() -> None:
    star = CoordinatorServer("127.0.0.1", GroupSpec(name="g", group_id="", backend="tcp", world_size=2), "W0")
    board = SimpleNamespace(retract=lambda: None)
    with fail_at(board, "retract", thread="raycollect-helper"):
        star.fail(InternalError(detail="why"), lambda: board.retract())
        star.end()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((star.address.host, star.address.port), WAIT_S)


@fault_in("raycollect-timer")
@pytest.mark.parametrize("holder", [watchdog.Watchdog, watchdog])
def test_who_asks_what_a_member_does_hears_of_it_after_a_failure(monkeypatch: pytest.MonkeyPatch, holder: Any) -> None:
    """If all looking fails, it is done again. If only the look at the process fails, the answer says so."""
    monkeypatch.setattr(timers, "AGAIN_S", 0.01)
    desk, answered = Desk(1), threading.Event()
    desk.client.call = None
    desk.on_send = lambda message: answered.set()
    with fail_at(holder, "look" if holder is watchdog.Watchdog else "what_runs", thread="raycollect-timer"):
        desk.watchdog.received(QUESTION)
    assert answered.wait(WAIT_S)
    (answer,) = desk.sent
    if holder is watchdog.Watchdog:
        assert (answer.rank, answer.place, answer.seq) == (1, *HERE)
    else:
        assert answer.doing.startswith(f"could not look: looking at a communicator failed: {BOOM}")
        desk.watchdog.received(QUESTION)
