"""How groups form that processes make themselves: leaders and followers in threads, a directory and real sockets."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raycollect.channel import Hub, protocol
from raycollect.channel.messages import Refused
from raycollect.core import threads
from raycollect.core.model import Address, GroupSpec
from raycollect.errors import (
    CollectiveTimeoutError,
    GroupBrokenError,
    GroupExistsError,
    InvalidGroupError,
    ProtocolError,
)
from raycollect.group import bootstrap, coordinator_server
from raycollect.group.bootstrap import BootstrapRequest, Introduction, follow, lead
from raycollect.group.bootstrap_store import DirectoryBulletin, LeaderRecord
from raycollect.group.coordinator_server import CoordinatorServer, hello_of
from raycollect.group.process_group import ProcessGroup
from tests.pure.watched import WAIT_S
from tests.support.waiting import wait_until

NAME = "g"


def asked(**changes: Any) -> GroupSpec:
    """What a process is told of the group."""
    fields = {"name": NAME, "group_id": "", "world_size": 2, "backend": "tcp", "timeout_s": WAIT_S}
    return GroupSpec(**{**fields, **changes})


class Place:
    """Where some members meet."""

    def __init__(self, path: Path) -> None:
        self.board = DirectoryBulletin(path)
        self.hub = Hub()
        self.fading: dict[str, CoordinatorServer] = {}
        self.threads = ThreadPoolExecutor(8)
        self.process_groups: list[ProcessGroup] = []

    def claim(self, rank: int, **changes: Any) -> BootstrapRequest:
        return BootstrapRequest(spec=asked(**changes), rank=rank, me=Introduction(f"process {rank}", "here"))

    def lead(self, **changes: Any) -> ProcessGroup:
        process_group = lead(self.claim(0, **changes), self.board, self.fading)
        self.process_groups.append(process_group)
        return process_group

    def follow(self, rank: int = 1, **changes: Any) -> ProcessGroup:
        process_group = follow(self.claim(rank, **changes), self.board, self.hub)
        self.process_groups.append(process_group)
        return process_group

    def start(self, what: Any, *args: Any, **changes: Any) -> Future[Any]:
        return self.threads.submit(what, *args, **changes)

    def end_fading(self) -> None:
        """What rank 0 does before it leads another group of that name."""
        while self.fading:
            self.fading.popitem()[1].end()

    def close(self) -> None:
        self.threads.shutdown()
        for process_group in self.process_groups:
            process_group.close()
        self.end_fading()
        self.hub.close()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    (tmp_path / "job").mkdir(mode=0o700)
    made = Place(tmp_path / "job")
    yield made
    made.close()
    assert made.board.read(NAME) is None, "a record stayed behind"


def _file(place: Place) -> Path:
    return Path(place.board.where(NAME))


GARBAGE = {
    "empty": b"",
    "object": b"{}",
    "list": b"[1,2]",
    "secret": b'{"host":"127.0.0.1","port":9,"secret":"00","who":"w"}',
    "digits": b"1" * 5000,
}


@pytest.mark.parametrize("case", GARBAGE)
def test_leader_replaces_a_malformed_record(place: Place, case: str) -> None:
    _file(place).write_bytes(GARBAGE[case])
    following = place.start(place.follow)
    assert place.lead().world_size == following.result(WAIT_S).world_size == 2


def test_irreplaceable_record_raises_invalid_group_error(place: Place) -> None:
    _file(place).mkdir()
    with pytest.raises(InvalidGroupError, match="rendezvous directory"):
        place.lead()
    _file(place).rmdir()


def test_stale_record_is_replaced_by_a_new_leader(place: Place) -> None:
    dead = LeaderRecord.of(Address(host="127.0.0.1", port=9, secret=bytes(32)), "process 77")
    place.board.post(NAME, dead.to_bytes())
    with pytest.raises(CollectiveTimeoutError, match="process 77 does not answer"):
        place.follow(timeout_s=0.05)
    following = place.start(place.follow)
    place.lead()
    following.result(WAIT_S)


def test_a_leader_leaves_the_record_of_another_in_its_place(place: Place) -> None:
    for mine, left in ((b"mine", None), (b"another's", b"mine")):
        place.board.post(NAME, b"mine", replace=True)
        bootstrap._retract(place.board, NAME, mine)
        assert place.board.read(NAME) == left
    place.board.remove(NAME)


@contextmanager
def _listener(place: Place, words: bytes) -> Iterator[None]:
    """Posts a record of a process that says these words to everybody."""
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as other:

        def serve() -> None:
            while not over.is_set():
                sock, _ = other.accept()
                with sock:
                    sock.sendall(words)

        serving = place.start(serve)
        address = Address(host="127.0.0.1", port=other.getsockname()[1], secret=bytes(32))
        place.board.post(NAME, LeaderRecord.of(address, "process 77").to_bytes())
        yield
        over.set()
        socket.create_connection(other.getsockname()).close()
        serving.result(WAIT_S)


def test_port_of_a_foreign_server_counts_as_no_leader(place: Place) -> None:
    with _listener(place, b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(64)):
        with pytest.raises(CollectiveTimeoutError, match="process 77 does not answer"):
            place.follow(timeout_s=0.05)
        following = place.start(place.follow)
        place.lead()
        following.result(WAIT_S)


def test_a_leader_of_an_earlier_release_is_told_at_once(place: Place) -> None:
    challenge = struct.pack(">I4sH16s", 22, protocol.MAGIC, protocol.VERSION - 1, bytes(16))
    with _listener(place, challenge), pytest.raises(ProtocolError, match="speaks version"):
        place.follow()
    place.board.remove(NAME)


def test_oversized_hello_raises_protocol_error_at_once(place: Place) -> None:
    leading = place.start(place.lead, options=(("x", "y" * 100_000),))
    assert wait_until(lambda: place.board.read(NAME) is not None)
    with pytest.raises(ProtocolError, match="hello"):
        place.follow(options=(("x", "y" * 100_000),))
    place.start(place.follow, world_size=3).exception(WAIT_S)
    assert isinstance(leading.exception(WAIT_S), InvalidGroupError)
    place.end_fading()


def test_malformed_self_description_raises_protocol_error() -> None:
    for word in (b"", b"7", b"{}", b'{"who": 1, "machine": 2, "gpu": {"a": 1}}', b"[" * 5000):
        with pytest.raises(ProtocolError, match="rank 3"):
            bootstrap._read(3, word)


# ---------------------------------------------------------------------------------------------- one after the other


def test_groups_of_one_name_follow_each_other_at_any_pace(place: Place) -> None:
    """Each member forms the next group as soon as it has left; who is faster waits there for those who are not."""
    rounds, world = 60, 3

    def live(rank: int) -> list[str]:
        ids = []
        for number in range(rounds):
            changes = {"world_size": world, "backend": "shm"}
            role = (rank + number) % world  # each leads in turn
            process_group = place.lead(**changes) if role == 0 else place.follow(role, **changes)
            ids.append(process_group.spec.group_id)
            if (number + rank) % 4 == 0:
                time.sleep(0.002 * rank)  # a member that has something else to do
            process_group.part()
        return ids

    found = [one.result(60) for one in [place.start(live, rank) for rank in range(world)]]
    assert found[0] == found[1] == found[2]
    assert len(set(found[0])) == rounds


@pytest.mark.parametrize("fading", [True, False])
def test_rejected_follower_waits_for_the_next_group(
    place: Place, fading: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its leader stays for a while, to tell others; who has been told, and comes again, does not mean that group."""
    monkeypatch.setattr(coordinator_server, "FADING_S", WAIT_S)
    leading = place.start(place.lead, world_size=3)
    with pytest.raises(InvalidGroupError):
        place.follow(1, world_size=3, backend="shm")
    assert isinstance(leading.exception(WAIT_S), InvalidGroupError)
    again = place.start(place.follow, 1, world_size=3)
    late = place.start(place.follow, 2, world_size=3)
    assert isinstance(late.exception(WAIT_S), InvalidGroupError), "it had not been told"
    assert not again.done()
    late = place.start(place.follow, 2, world_size=3)
    if not fading:
        place.end_fading()
    process_group = place.lead(world_size=3)  # another process may lead: the old one makes room
    assert {again.result(WAIT_S).spec.group_id, late.result(WAIT_S).spec.group_id} == {process_group.spec.group_id}
    place.end_fading()


def test_a_leader_that_waits_is_not_replaced(place: Place) -> None:
    leading = place.start(place.lead)
    assert wait_until(lambda: place.board.read(NAME) is not None)
    with pytest.raises(GroupExistsError, match="process 0"):
        place.lead()
    place.follow()
    leading.result(WAIT_S)


class _Caller:
    """One end of a connection to a star."""

    def __init__(self) -> None:
        self.heard: list[Any] = []
        self.over = threading.Event()

    def received(self, link: Any, message: Any) -> None:
        self.heard.append(message)

    def closed(self, link: Any, reason: Any) -> None:
        self.over.set()


@pytest.mark.parametrize("complete", [True, False])
def test_complete_star_turns_later_followers_away(place: Place, complete: bool) -> None:
    """Without a word: who comes reads the record again, where the next leader will post."""
    star = CoordinatorServer("127.0.0.1", asked(world_size=3), "w")
    hello = hello_of(asked(world_size=3), 1, "process 1")
    try:
        star.complete = complete
        if not complete:
            star.fail(GroupBrokenError(group_name=NAME, detail="why"))
        for turn in range(3):
            caller = _Caller()
            place.hub.connect(star.address, hello, caller, WAIT_S)
            if turn or complete:
                assert caller.over.wait(WAIT_S)
                assert caller.heard == []
            else:
                assert wait_until(lambda: caller.heard)  # noqa: B023 - asked before the next turn
                assert isinstance(caller.heard[0], Refused)
        assert bootstrap._is_alive(star.address) is False, "and makes room for another leader"
    finally:
        star.end()
        star.close()
    assert bootstrap._is_alive(star.address) is None


def test_rank_0_goes_on_though_a_member_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be in a call with others, which has a limit, and the member may be stopped for good."""
    monkeypatch.setattr(coordinator_server, "MOST_FLUSH_S", 0.01)
    star = CoordinatorServer("127.0.0.1", asked(world_size=3), "w")
    try:
        star._links[2] = SimpleNamespace(queued_nbytes=1)  # type: ignore[assignment]
        assert threads.has_ended(threads.call_in_helper(star.flush), WAIT_S)
    finally:
        star._links.clear()
        star.close()


def test_turned_away_follower_tries_the_new_record(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A follower that was turned away tries a new record at once."""
    monkeypatch.setattr(bootstrap, "PROBE_S", 0.5)  # the record is removed by nobody
    star = CoordinatorServer("127.0.0.1", asked(), "w")
    star.complete = True
    place.board.post(NAME, LeaderRecord.of(star.address, "w").to_bytes())
    try:
        following = place.start(place.follow)
        assert place.lead().spec.group_id == following.result(WAIT_S).spec.group_id
    finally:
        star.close()
