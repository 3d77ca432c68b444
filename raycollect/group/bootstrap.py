"""How processes form a group by themselves: rank 0 leads, the others follow. Needs no Ray."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from msgspec.structs import replace

from raycollect import backends
from raycollect.channel import Hub, Link
from raycollect.channel.messages import Gone, Message, Refused, Welcome
from raycollect.channel.protocol import OTHER_VERSION
from raycollect.channel.stream import open_stream
from raycollect.core.codec import Codec
from raycollect.core.model import Address, GroupSpec
from raycollect.core.signals import Deferred
from raycollect.errors import (
    AuthenticationError,
    ChannelError,
    CollectiveTimeoutError,
    ConnectionLostError,
    GroupExistsError,
    InternalError,
    InvalidGroupError,
    ParticipantDiedError,
    ProtocolError,
    RaycollectError,
    copy_error,
    from_wire,
    strip_traceback,
)
from raycollect.group.bootstrap_store import BootstrapStore, Record
from raycollect.group.coordinator_server import CoordinatorServer, hello_of
from raycollect.group.group_member import GroupMember
from raycollect.group.membership import on_backend, placed
from raycollect.group.process_group import ProcessGroup
from raycollect.observe import Tracer

PROBE_S = 2.0
"""How long a leader may take to show another one that it lives, in seconds."""

_POLL_S = (0.002, 0.1)
_RETRY_S = 0.5


class Introduction(NamedTuple):
    """What a member tells the others of itself as it joins."""

    who: str  # what a person calls this process: Worker(3f2a91)
    machine: str  # equal for processes that can share memory
    gpu: backends.Gpu | None = None  # the GPU of this process, if the backend is yet to be chosen


_INTRODUCTIONS = Codec[Introduction](Introduction, "member's word")


@dataclass(frozen=True, slots=True, kw_only=True)
class BootstrapRequest:
    """What one process was told of the group, and what it tells the others."""

    spec: GroupSpec  # its id is for rank 0 to choose, and its backend may be "auto"
    rank: int
    me: Introduction
    tracer: Tracer = field(default_factory=Tracer)  # whether calls of the group are recorded


# ---------------------------------------------------------------------------------------------- rank 0


def lead(request: BootstrapRequest, store: BootstrapStore, notices: dict[str, CoordinatorServer]) -> ProcessGroup:
    """Becomes rank 0: posts its address, and waits for the others.

    If the group fails to form, `notices` gets by its name what tells the others.

    Raises:
        GroupExistsError: Another process leads a group of this name.
        CollectiveTimeoutError: Another rank did not come in time.
        RaycollectError: The group failed to form.
    """
    name, world_size = request.spec.name, request.spec.world_size
    server = CoordinatorServer(store.host, request.spec, request.me.who)
    record = Record.of(server.address, request.me.who).to_bytes()
    if world_size > 1:
        try:
            _post(request, store, record)
        except BaseException:
            server.close()
            raise
    member = GroupMember(server.spec, 0, server.send, host=store.host, flush=server.flush, tracer=request.tracer)
    process_group = ProcessGroup(member, leave=server.leave)
    server.attach(process_group)
    retract = partial(_retract, store, name, record)
    try:
        _agree(process_group, request)
        server.complete = True
        retract()  # before the others can leave, and join a group of this name again
        process_group.form()
        return process_group
    except BaseException as exc:
        error = (
            strip_traceback(exc)
            if isinstance(exc, RaycollectError)
            else InternalError(detail=f"joining ended: {exc!r}")
        )
        server.fail(error, retract)
        notices[name] = server
        if not isinstance(exc, RaycollectError):
            raise
    raise copy_error(error)


def _post(request: BootstrapRequest, store: BootstrapStore, record: bytes) -> None:
    """Posts the address of rank 0; replaces the record of a dead leader, and what is no record."""
    until_s = time.monotonic() + PROBE_S
    while not store.post(request.spec.name, record):
        there = _look(store, request.spec.name)
        if there is None:
            continue
        is_alive = _is_alive(there.address) if isinstance(there, Record) else None
        if is_alive and isinstance(there, Record):
            detail = f"rank 0 of a group of this name waits for its members already: {there.who}"
            raise GroupExistsError(group_name=request.spec.name, detail=detail)
        if is_alive is None or time.monotonic() > until_s:
            store.post(request.spec.name, record, replace=True)
            return
        time.sleep(_POLL_S[0])  # it removes its record itself, and might remove the one in its place


def _retract(store: BootstrapStore, name: str, record: bytes) -> None:
    """Removes a record that was not replaced."""
    with suppress(OSError, InvalidGroupError):  # those who connect find out that it is stale
        if store.read(name) == record:
            store.remove(name)


def _look(store: BootstrapStore, name: str) -> Record | str | None:
    """The record; or, as text, why what is there is none; None: nothing is there."""
    try:
        there = store.read(name)
        return None if there is None else Record.from_bytes(there)
    except InvalidGroupError as exc:
        return exc.detail


def _is_alive(address: Address) -> bool | None:
    """Whether a leader waits for its members there; False: it makes room, and removes its record; None: it is gone."""
    until_s = time.monotonic() + PROBE_S
    try:
        stream = open_stream(address, "control", {"probe": True}, PROBE_S)
    except ChannelError:
        return None
    try:
        stream.receive(max(until_s - time.monotonic(), 0.0))
        return True
    except ChannelError:
        return time.monotonic() >= until_s  # it was silent; else it has closed the connection
    finally:
        stream.close()


# ---------------------------------------------------------------------------------------------- the others


class _Uplink:
    """A member's connection to rank 0."""

    def __init__(self) -> None:
        self.link: Link | None = None
        self.process_group: ProcessGroup | None = None

    def send(self, message: Message) -> None:
        """Sends to rank 0."""
        if self.link is None:
            raise ConnectionLostError(detail="not connected")
        self.link.send(message)

    def leave(self) -> None:
        """Says goodbye."""
        if self.link is not None:
            with suppress(ConnectionLostError):
                self.link.send(Gone(group_id="", rank=-1, died=False, detail=""))
            self.link.close()

    def received(self, link: Link, message: Message) -> None:
        """Rank 0 said something; on the hub's thread."""
        process_group = self.process_group
        if process_group is not None and isinstance(message, Refused):
            process_group.lost(from_wire(message.error))
        elif process_group is not None:
            process_group.received(message)

    def closed(self, link: Link, reason: ChannelError) -> None:
        """The connection has ended; on the hub's thread."""
        process_group, self.process_group = self.process_group, None  # which holds this
        if process_group is not None:
            actor = process_group.member.actor(0)
            detail = f"its process, which relays for the group, ended ({reason.detail})"
            died = ParticipantDiedError(group_name=process_group.name, rank=0, actor=actor, detail=detail)
            process_group.orphaned(died)


def follow(request: BootstrapRequest, store: BootstrapStore, hub: Hub) -> ProcessGroup:
    """Becomes another rank than 0: finds rank 0, and waits with it for the others.

    Raises:
        CollectiveTimeoutError: Rank 0, or another rank, did not come in time.
        RaycollectError: The group failed to form.
    """
    deadline_s = time.monotonic() + request.spec.timeout_s
    process_group = _find_leader(request, store, hub, deadline_s)
    try:
        process_group.timeout_s = max(deadline_s - time.monotonic(), 0.001)
        _agree(process_group, request)
        process_group.form()
    except BaseException:
        process_group.close()
        raise
    process_group.timeout_s = request.spec.timeout_s
    return process_group


def _find_leader(request: BootstrapRequest, store: BootstrapStore, hub: Hub, deadline_s: float) -> ProcessGroup:
    """Connects to the posted address, again and again, as the record may be stale or yet to come."""
    tried, again_s, pause_s, why = None, 0.0, _POLL_S[0], ""
    while True:
        now_s = time.monotonic()
        there = _look(store, request.spec.name)
        if there is None:
            why = "it has posted nothing"
        elif isinstance(there, str):
            why = f"{there}. Delete {store.where(request.spec.name)}, or start rank 0, which replaces it"
        elif there != tried or now_s >= again_s:
            found = _enter(request, there, store.host, hub, deadline_s)
            if not isinstance(found, str):
                return found
            why = f"{there.who} does not answer: {found}"
            tried, again_s = there, now_s + _RETRY_S
        if now_s >= deadline_s:
            name, limit_s = request.spec.name, request.spec.timeout_s
            detail = f"after {limit_s:g} s these had not arrived: rank 0 ({why})"
            raise CollectiveTimeoutError(
                op="join", group_name=name, rank=0, missing=(0,), timeout_s=limit_s, detail=detail
            )
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, _POLL_S[1])


def _enter(request: BootstrapRequest, record: Record, host: str, hub: Hub, deadline_s: float) -> ProcessGroup | str:
    """Connects to a leader.

    Returns:
        The process group; or why there is none: nobody is there, or the leader of a group that is complete or has
        failed, so that the next group of this name will have another leader.
    """
    hello = hello_of(request.spec, request.rank, request.me.who)
    try:
        stream = open_stream(record.address, "control", hello, max(deadline_s - time.monotonic(), 0.1))
    except (ConnectionLostError, AuthenticationError, ProtocolError) as exc:
        if isinstance(exc, ProtocolError) and (not exc.peer or exc.detail.startswith(OTHER_VERSION)):
            raise  # the hello can't be sent, or not to this version
        return exc.detail  # a dead leader's record, or its port is another's now
    uplink = _Uplink()
    try:
        answer = stream.receive(max(deadline_s - time.monotonic(), 0.1))
        if isinstance(answer, Refused):
            raise from_wire(answer.error)
        if not isinstance(answer, Welcome):
            raise ProtocolError(detail=f"{type(answer).__name__} where Welcome was due")
        spec = replace(request.spec, group_id=answer.group_id)
        member = GroupMember(spec, request.rank, uplink.send, host=host, tracer=request.tracer)
        process_group = uplink.process_group = ProcessGroup(member, leave=uplink.leave)
        with Deferred():  # from here on the hub watches the connection, which only its link may close
            uplink.link = hub.adopt(stream, hello, uplink)
        return process_group
    except ChannelError as exc:
        (uplink.link or stream).close()
        return exc.detail
    except BaseException:
        (uplink.link or stream).close()
        raise


# ---------------------------------------------------------------------------------------------- both


def _agree(process_group: ProcessGroup, request: BootstrapRequest) -> None:
    """Exchanges who and where the members are, from which all choose the same backend."""
    words = process_group.confer("join", _INTRODUCTIONS.encode(request.me))
    members = [_read(rank, word) for rank, word in enumerate(words)]
    machines = [one.machine for one in members]
    backend = request.spec.backend
    if backend == "auto":
        gpus = [one.gpu for one in members]
        backend = backends.choose(machines, gpus, dict(request.spec.options)).backend
    backends.check_placement(backend, machines, request.spec.name)
    process_group.settle(placed(on_backend(process_group.spec, backend), machines), tuple(one.who for one in members))


def _read(rank: int, word: bytes) -> Introduction:
    try:
        return _INTRODUCTIONS.decode(word)
    except ProtocolError:
        raise ProtocolError(detail=f"rank {rank} does not say who and where it is") from None
