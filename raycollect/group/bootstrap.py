"""How processes form a group by themselves: rank 0 leads, the others follow. Needs no Ray."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from msgspec.structs import replace

from raycollect import backends
from raycollect.channel import ControlLink, Hub
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
from raycollect.group.bootstrap_store import BootstrapStore, LeaderRecord
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
    """A member's description of itself, which it sends to the others as it joins."""

    who: str  # this process's name for a person: Worker(3f2a91)
    machine: str  # equal for processes that can share memory
    gpu: backends.Gpu | None = None  # the GPU of this process, if the members still have to choose a backend


_INTRODUCTIONS = Codec[Introduction](Introduction, "member's word")


@dataclass(frozen=True, slots=True, kw_only=True)
class BootstrapRequest:
    """One process's arguments for the group, and its introduction to the others."""

    spec: GroupSpec  # rank 0 chooses its id; its backend may be "auto"
    rank: int
    me: Introduction
    tracer: Tracer = field(default_factory=Tracer)  # whether calls of the group are recorded


# ---------------------------------------------------------------------------------------------- rank 0


def lead(request: BootstrapRequest, store: BootstrapStore, notices: dict[str, CoordinatorServer]) -> ProcessGroup:
    """Becomes rank 0: posts its address, and waits for the others.

    If the group fails to form, its server is added to `notices` by name, to report the failure to the others.

    Raises:
        GroupExistsError: Another process leads a group of this name.
        CollectiveTimeoutError: Another rank did not join in time.
        RaycollectError: The group failed to form.
    """
    name, world_size = request.spec.name, request.spec.world_size
    server = CoordinatorServer(store.host, request.spec, request.me.who)
    record = LeaderRecord.of(server.address, request.me.who).to_bytes()
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
    except BaseException as exc:  # also a signal: the others must not wait for this rank
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
    """Posts the address of rank 0. Replaces a dead leader's record, and a malformed one."""
    until_s = time.monotonic() + PROBE_S
    while not store.post(request.spec.name, record):
        there = _look(store, request.spec.name)
        if there is None:
            continue
        is_alive = _is_alive(there.address) if isinstance(there, LeaderRecord) else None
        if is_alive and isinstance(there, LeaderRecord):
            detail = f"rank 0 of a group of this name waits for its members already: {there.who}"
            raise GroupExistsError(group_name=request.spec.name, detail=detail)
        if is_alive is None or time.monotonic() > until_s:
            store.post(request.spec.name, record, replace=True)
            return
        time.sleep(_POLL_S[0])  # the other leader removes its own record, and might remove the new one


def _retract(store: BootstrapStore, name: str, record: bytes) -> None:
    """Removes the record, unless it was replaced."""
    with suppress(OSError, InvalidGroupError):  # members that connect detect that the record is stale
        if store.read(name) == record:
            store.remove(name)


def _look(store: BootstrapStore, name: str) -> LeaderRecord | str | None:
    """Returns the record; a text if the posted bytes are malformed, with the reason; None if nothing is posted."""
    try:
        there = store.read(name)
        return None if there is None else LeaderRecord.from_bytes(there)
    except InvalidGroupError as exc:
        return exc.detail


def _is_alive(address: Address) -> bool | None:
    """Whether a leader waits for its members at an address.

    Returns:
        False if the leader is ending and removes its record; None if no leader answers.
    """
    until_s = time.monotonic() + PROBE_S
    try:
        stream = open_stream(address, "control", {"probe": True}, PROBE_S)
    except ChannelError:
        return None
    try:
        stream.receive(max(until_s - time.monotonic(), 0.0))
        return True
    except ChannelError:
        return time.monotonic() >= until_s  # the leader is silent; otherwise it has closed the connection
    finally:
        stream.close()


# ---------------------------------------------------------------------------------------------- the others


class _Uplink:
    """A member's connection to rank 0."""

    def __init__(self) -> None:
        self.link: ControlLink | None = None
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

    def received(self, link: ControlLink, message: Message) -> None:
        """Handles a message of rank 0, on the hub's thread."""
        process_group = self.process_group
        if process_group is not None and isinstance(message, Refused):
            process_group.lost(from_wire(message.error))
        elif process_group is not None:
            process_group.received(message)

    def closed(self, link: ControlLink, reason: ChannelError) -> None:
        """Handles the end of the connection, on the hub's thread."""
        process_group, self.process_group = self.process_group, None  # breaks a reference cycle
        if process_group is not None:
            actor = process_group.member.actor(0)
            detail = f"its process, which relays for the group, ended ({reason.detail})"
            died = ParticipantDiedError(group_name=process_group.name, rank=0, actor=actor, detail=detail)
            process_group.orphaned(died)


def follow(request: BootstrapRequest, store: BootstrapStore, hub: Hub) -> ProcessGroup:
    """Becomes a rank other than 0: finds rank 0, and waits with it for the others.

    Raises:
        CollectiveTimeoutError: Rank 0, or another rank, did not join in time.
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
    """Connects to the posted address. Retries, as the record may be stale or not posted yet."""
    tried, again_s, pause_s, why = None, 0.0, _POLL_S[0], ""
    while True:
        now_s = time.monotonic()
        there = _look(store, request.spec.name)
        if there is None:
            why = "it has not posted its address"
        elif isinstance(there, str):
            why = f"{there}. Delete {store.where(request.spec.name)}, or start rank 0, which replaces it"
        elif there != tried or now_s >= again_s:
            result = _enter(request, there, store.host, hub, deadline_s)
            if not isinstance(result, str):
                return result
            why = f"{there.who} does not answer: {result}"
            tried, again_s = there, now_s + _RETRY_S
        if now_s >= deadline_s:
            name, limit_s = request.spec.name, request.spec.timeout_s
            detail = f"after {limit_s:g} s these had not arrived: rank 0 ({why})"
            raise CollectiveTimeoutError(
                op="join", group_name=name, rank=0, missing=(0,), timeout_s=limit_s, detail=detail
            )
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, _POLL_S[1])


def _enter(
    request: BootstrapRequest, record: LeaderRecord, host: str, hub: Hub, deadline_s: float
) -> ProcessGroup | str:
    """Connects to a leader.

    Returns:
        The process group, or a text with the reason for having none: no leader answers, or its group is complete or
        has failed, so that the next group of this name has another leader.
    """
    hello = hello_of(request.spec, request.rank, request.me.who)
    try:
        stream = open_stream(record.address, "control", hello, max(deadline_s - time.monotonic(), 0.1))
    except (ConnectionLostError, AuthenticationError, ProtocolError) as exc:
        if isinstance(exc, ProtocolError) and (not exc.peer or exc.detail.startswith(OTHER_VERSION)):
            raise  # the hello is invalid, or the peer has another version
        return exc.detail  # the record is of a dead leader, whose port another process may use
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
        with Deferred():  # the hub watches the connection, and only the link may close it
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
    """Exchanges introductions; all members choose the same backend from them."""
    words = process_group.confer(_INTRODUCTIONS.encode(request.me))
    members = [_read(rank, word) for rank, word in enumerate(words)]
    machines = [member.machine for member in members]
    backend = request.spec.backend
    if backend == "auto":
        gpus = [member.gpu for member in members]
        backend = backends.choose(machines, gpus, dict(request.spec.options)).backend
    backends.check_placement(backend, machines, request.spec.name)
    process_group.settle(
        placed(on_backend(process_group.spec, backend), machines), tuple(member.who for member in members)
    )


def _read(rank: int, word: bytes) -> Introduction:
    try:
        return _INTRODUCTIONS.decode(word)
    except ProtocolError:
        raise ProtocolError(detail=f"rank {rank} sent a malformed introduction") from None
