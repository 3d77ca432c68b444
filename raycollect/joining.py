"""How processes become a group by themselves: rank 0 leads, the others follow. Needs no Ray."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from raycollect import backends
from raycollect.bulletin import Bulletin
from raycollect.channel import Hub, Link
from raycollect.channel.messages import Depart, Message, Refused, Welcome
from raycollect.errors import (
    AuthenticationError,
    ChannelError,
    CollectiveTimeoutError,
    ConnectionLostError,
    GroupExistsError,
    InternalError,
    ParticipantDiedError,
    RaycollectError,
    from_wire,
)
from raycollect.model import Address, GroupSpec
from raycollect.seat import Seat
from raycollect.staging import memory_of
from raycollect.star import Star

__all__ = ["Claim", "Fading", "follow", "lead"]

FADING_S = 5.0
"""How long a leader stays to tell those who come too late that the group did not come about."""

_POLL_S = (0.002, 0.1)
_RETRY_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What one process was told of the group.

    Attributes:
        name: What the user calls it.
        world_size: The number of ranks.
        rank: This process's.
        backend: A backend's name, or ``"auto"``.
        who: What a person calls this process: ``Worker(3f2a91)``.
        machine: Equal for processes that can share memory.
        gpu: What this process has for a group on GPUs, where the backend is yet to be chosen.
        timeout_s: How long to wait for the others, in seconds; and later calls for each other.
        options: What the backend is given besides (`GroupSpec.options`).
    """

    name: str
    world_size: int
    rank: int
    backend: str
    who: str
    machine: str
    timeout_s: float
    options: tuple[tuple[str, Any], ...] = ()
    gpu: backends.Gpu | None = None

    @property
    def hello(self) -> dict[str, Any]:
        """What it says to rank 0."""
        named = {"rank": self.rank, "world_size": self.world_size, "backend": self.backend, "who": self.who}
        return named | {"options": repr(self.options)}


class Fading:
    """The hub of a group that did not come about, until all have heard of it."""

    def __init__(self, star: Star, retract: Callable[[], None]) -> None:
        self._star = star
        self._retract = retract
        self._thread = threading.Thread(target=self._fade, name="raycollect-fading", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Ends it now."""
        self._star.all_told.set()
        self._thread.join()

    def _fade(self) -> None:
        self._star.all_told.wait(FADING_S)
        self._retract()
        self._star.close()


# ---------------------------------------------------------------------------------------------- rank 0


def lead(claim: Claim, bulletin: Bulletin, hub: Hub) -> tuple[Seat | None, RaycollectError | None, Fading | None]:
    """Becomes rank 0: posts where it is, and waits for the others.

    Returns:
        The seat; or why there is none, and who tells the others.

    Raises:
        GroupExistsError: Another process leads a group of this name.
    """
    star = Star(bulletin.host, claim.name, claim.hello)
    record = _write_record(star.address, claim.who)
    if claim.world_size > 1:
        try:
            _post(claim, bulletin, record, hub)
        except BaseException:
            star.close()
            raise
    seat = _make_seat(claim, star.group_id, star.send, bulletin.host, star.leave, star.flush)
    star.attach(seat)

    def retract() -> None:
        bulletin.remove(claim.name, record)

    try:
        _agree(seat, claim)
        star.complete = True
        retract()  # before the others can leave, and join a group of this name again
        seat.form()
    except BaseException as exc:
        error = exc if isinstance(exc, RaycollectError) else InternalError(detail=f"joining ended: {exc!r}")
        star.fail(error)
        fading = Fading(star, retract)
        if not isinstance(exc, RaycollectError):
            raise
        return None, error, fading
    return seat, None, None


def _post(claim: Claim, bulletin: Bulletin, record: bytes, hub: Hub) -> None:
    """Posts where rank 0 is; a record that a dead leader left is replaced."""
    while not bulletin.post(claim.name, record):
        there = bulletin.read(claim.name)
        if there is None:
            continue
        address, who = _read_record(there)
        if _is_alive(address, hub):
            detail = f"rank 0 of a group of this name waits for its members already: {who}"
            raise GroupExistsError(group_name=claim.name, detail=detail)
        bulletin.replace(claim.name, record)
        return


def _is_alive(address: Address, hub: Hub) -> bool:
    try:
        link = hub.connect(address, {"probe": True}, _Uplink(), 2.0)
    except ChannelError:
        return False
    link.close()
    return True


# ---------------------------------------------------------------------------------------------- the others


class _Uplink:
    """The connection to rank 0, seen from a member."""

    def __init__(self) -> None:
        self.link: Link | None = None
        self.seat: Seat | None = None
        self._answer: Message | ChannelError | None = None
        self._answered = threading.Event()
        self._lock = threading.Lock()
        self._early: list[Message] = []
        self._lost = ""

    def answer(self, timeout_s: float) -> Message | ChannelError | None:
        """Waits for what rank 0 says first; None where it says nothing."""
        self._answered.wait(timeout_s)
        return self._answer

    def attach(self, seat: Seat) -> None:
        """Hands on to a seat what came, and what will come."""
        with self._lock:
            self.seat = seat
            early, self._early = self._early, []
            for message in early:
                self._hand(seat, message)
            lost = self._lost
        if lost:
            self._lose(seat, lost)

    def send(self, message: Message) -> None:
        """Sends to rank 0."""
        if self.link is None:
            raise ConnectionLostError(detail="not connected")
        self.link.send(message)

    def leave(self) -> None:
        """Says goodbye."""
        if self.link is not None:
            try:
                self.link.send(Depart(group_id=""))
            except ConnectionLostError:
                pass
            self.link.close()

    def received(self, link: Link, message: Message) -> None:
        """Rank 0 said something; on the hub's thread."""
        if not self._answered.is_set():
            self._answer = message
            self._answered.set()
            return
        with self._lock:
            if self.seat is None:
                self._early.append(message)
            else:
                self._hand(self.seat, message)

    def closed(self, link: Link, reason: ChannelError) -> None:
        """The connection has ended; on the hub's thread."""
        if not self._answered.is_set():
            self._answer = reason
            self._answered.set()
        with self._lock:
            self._lost = reason.detail
            seat = self.seat
        if seat is not None:
            self._lose(seat, reason.detail)

    def _lose(self, seat: Seat, why: str) -> None:
        actor = seat.members[0] if seat.members else ""
        detail = f"its process, which relays for the group, ended ({why})"
        seat.lost(ParticipantDiedError(group_name=seat.name, rank=0, actor=actor, detail=detail))

    def _hand(self, seat: Seat, message: Message) -> None:
        if isinstance(message, Refused):
            seat.lost(from_wire(message.error))
        else:
            seat.received(message)


def follow(claim: Claim, bulletin: Bulletin, hub: Hub) -> Seat:
    """Becomes another rank than 0: finds rank 0 and waits with it for the others.

    Raises:
        CollectiveTimeoutError: Rank 0, or another rank, did not come in time.
        RaycollectError: The group did not come about.
    """
    started_s = time.monotonic()
    deadline_s = started_s + claim.timeout_s
    uplink, group_id = _find_leader(claim, bulletin, hub, deadline_s)
    left = replace(claim, timeout_s=max(deadline_s - time.monotonic(), 0.001))
    seat = _make_seat(left, group_id, uplink.send, bulletin.host, uplink.leave)
    uplink.attach(seat)
    try:
        _agree(seat, left)
        seat.form()
    except BaseException:
        seat.close()
        raise
    seat.timeout_s = claim.timeout_s
    return seat


def _find_leader(claim: Claim, bulletin: Bulletin, hub: Hub, deadline_s: float) -> tuple[_Uplink, str]:
    """Connects to whom the bulletin names, again and again: a record may be stale, or yet to come."""
    tried, again_s, pause_s = b"", 0.0, _POLL_S[0]
    while True:
        now_s = time.monotonic()
        record = bulletin.read(claim.name)
        if record is not None and (record != tried or now_s >= again_s):
            found = _enter(claim, record, hub, deadline_s)
            if found is not None:
                return found
            tried, again_s = record, now_s + _RETRY_S
        if now_s >= deadline_s:
            why = "has posted nothing" if record is None else f"does not answer: {_read_record(record)[1]}"
            detail = f"after {claim.timeout_s:g} s these had not come: rank 0 (it {why})"
            raise CollectiveTimeoutError(
                op="join", group_name=claim.name, rank=0, missing=(0,), timeout_s=claim.timeout_s, detail=detail
            )
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, _POLL_S[1])


def _enter(claim: Claim, record: bytes, hub: Hub, deadline_s: float) -> tuple[_Uplink, str] | None:
    """Presents itself to a leader; None where nobody is there."""
    address, _ = _read_record(record)
    uplink = _Uplink()
    try:
        uplink.link = hub.connect(address, claim.hello, uplink, max(deadline_s - time.monotonic(), 0.1))
    except (ConnectionLostError, AuthenticationError):
        return None  # a dead leader's record, or its port is another's now
    answer = uplink.answer(max(deadline_s - time.monotonic(), 0.1))
    if isinstance(answer, Welcome):
        return uplink, str(answer.participant.get("group_id"))
    uplink.link.close()
    if isinstance(answer, Refused):
        raise from_wire(answer.error)
    return None


# ---------------------------------------------------------------------------------------------- both


def _make_seat(
    claim: Claim,
    group_id: str,
    send: Callable[[Message], None],
    host: str,
    leave: Callable[[], None],
    flush: Callable[[], None] = lambda: None,
) -> Seat:
    spec = GroupSpec(
        name=claim.name,
        group_id=group_id,
        backend=claim.backend,
        world_size=claim.world_size,
        options=claim.options,
        timeout_s=claim.timeout_s,
    )
    return Seat(spec, claim.rank, send, host=host, timeout_s=claim.timeout_s, leave=leave, flush=flush)


def _agree(seat: Seat, claim: Claim) -> None:
    """Learns who the others are, and where; all come to the same backend."""
    gpu = None if claim.gpu is None else asdict(claim.gpu)
    words = seat.confer("join", json.dumps({"who": claim.who, "machine": claim.machine, "gpu": gpu}).encode())
    said = [json.loads(word) for word in words]
    machines = [one["machine"] for one in said]
    backend = claim.backend
    if backend == "auto":
        gpus = [None if one["gpu"] is None else backends.Gpu(**one["gpu"]) for one in said]
        backend = backends.choose(machines, gpus, dict(claim.options)).backend
    backends.check_placement(backend, machines, claim.name)
    spec = replace(seat.spec, backend=backend, ops=backends.ops_of(backend), memory=memory_of(backend))
    seat.settle(spec, tuple(one["who"] for one in said))


def _write_record(address: Address, who: str) -> bytes:
    return json.dumps({**asdict(address), "secret": address.secret.hex(), "who": who}).encode()


def _read_record(record: bytes) -> tuple[Address, str]:
    value = json.loads(record)
    return Address(host=value["host"], port=value["port"], secret=bytes.fromhex(value["secret"])), value["who"]
