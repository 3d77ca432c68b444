"""How processes form a group by themselves: rank 0 leads, the others follow. Needs no Ray."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from raycollect import backends
from raycollect.channel import Hub, Link
from raycollect.channel.messages import Depart, Message, Refused, Welcome
from raycollect.channel.protocol import OTHER_VERSION
from raycollect.core import threads
from raycollect.core.model import Address, GroupSpec
from raycollect.engine.device_staging import memory_of
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
    from_wire,
    kept,
)
from raycollect.group.bootstrap_store import MOST_WHO, BootstrapStore, Record
from raycollect.group.coordinator_server import CoordinatorServer
from raycollect.group.process_group import ProcessGroup

FADING_S = 5.0
"""How long a failed leader stays to tell late members that the group did not form, in seconds."""

PROBE_S = 2.0
"""How long a leader may take to show another one that it lives, in seconds."""

_POLL_S = (0.002, 0.1)
_RETRY_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class BootstrapRequest:
    """What one process was told of the group."""

    name: str
    world_size: int
    rank: int
    backend: str
    who: str  # what a person calls this process: Worker(3f2a91)
    machine: str  # equal for processes that can share memory
    timeout_s: float  # how long to wait for the others, here and in later calls, in seconds
    options: tuple[tuple[str, Any], ...] = ()  # `GroupSpec.options`
    gpu: backends.Gpu | None = None  # the GPU of this process, if the backend is yet to be chosen

    @property
    def hello(self) -> dict[str, Any]:
        """What this process says to rank 0."""
        who = self.who[:MOST_WHO]
        named = {"rank": self.rank, "world_size": self.world_size, "backend": self.backend, "who": who}
        return named | {"options": repr(self.options)}


class FailureNotice:
    """The hub of a group that failed to form, until all members have heard of it."""

    def __init__(self, server: CoordinatorServer, retract: Callable[[], None]) -> None:
        self._server = server
        self._retract = retract
        self._thread = threads.start("raycollect-fading", self._fade)

    def end(self) -> None:
        """Ends it now."""
        self._server.all_told.set()
        self._thread.join()

    def _fade(self) -> None:
        self._server.all_told.wait(FADING_S)
        threads.survives(self._retract, place="taking back where rank 0 is")
        self._server.close()


# ---------------------------------------------------------------------------------------------- rank 0


def lead(
    request: BootstrapRequest, store: BootstrapStore, hub: Hub
) -> tuple[ProcessGroup | None, RaycollectError | None, FailureNotice | None]:
    """Becomes rank 0: posts its address, and waits for the others.

    Returns:
        The process group; or the error, and what tells it to the others.

    Raises:
        GroupExistsError: Another process leads a group of this name.
    """
    server = CoordinatorServer(store.host, request.name, request.hello)
    record = Record(address=server.address, who=request.who).to_bytes()
    if request.world_size > 1:
        try:
            _post(request, store, record, hub)
        except BaseException:
            server.close()
            raise
    process_group = _make_group(request, server.group_id, server.send, store.host, server.leave, server.flush)
    server.attach(process_group)

    def retract() -> None:
        store.remove(request.name, record)

    try:
        _agree(process_group, request)
        server.complete = True
        retract()  # before the others can leave, and join a group of this name again
        process_group.form()
    except BaseException as exc:
        error = kept(exc) if isinstance(exc, RaycollectError) else InternalError(detail=f"joining ended: {exc!r}")
        server.fail(error)
        notice = FailureNotice(server, retract)
        if not isinstance(exc, RaycollectError):
            raise
        return None, error, notice
    return process_group, None, None


def _post(request: BootstrapRequest, store: BootstrapStore, record: bytes, hub: Hub) -> None:
    """Posts the address of rank 0; replaces the record of a dead leader, and what is no record."""
    while not store.post(request.name, record):
        there = _look(store, request.name)
        if there is None:
            continue
        if isinstance(there, Record) and _is_alive(there.address, hub):
            detail = f"rank 0 of a group of this name waits for its members already: {there.who}"
            raise GroupExistsError(group_name=request.name, detail=detail)
        store.replace(request.name, record)
        return


def _look(store: BootstrapStore, name: str) -> Record | str | None:
    """The record; or, as text, why what is there is none; None: nothing is there."""
    try:
        there = store.read(name)
        return None if there is None else Record.from_bytes(there)
    except InvalidGroupError as exc:
        return exc.detail


def _is_alive(address: Address, hub: Hub) -> bool:
    """Whether a leader waits for its members there; one that only tells of a failure makes room."""
    uplink = _Uplink()
    try:
        link = hub.connect(address, {"probe": True}, uplink, PROBE_S)
    except ChannelError:
        return False
    answer = uplink.answer(PROBE_S)
    link.close()
    return not isinstance(answer, ChannelError)


# ---------------------------------------------------------------------------------------------- the others


class _Uplink:
    """A member's connection to rank 0."""

    def __init__(self) -> None:
        self.link: Link | None = None
        self.process_group: ProcessGroup | None = None
        self._answer: Message | ChannelError | None = None
        self._answered = threading.Event()
        self._lock = threading.Lock()
        self._early: list[Message] = []
        self._lost: str | None = None  # why the connection has ended

    def answer(self, timeout_s: float) -> Message | ChannelError | None:
        """Waits for the first message of rank 0; None: there is none."""
        self._answered.wait(timeout_s)
        return self._answer

    def attach(self, process_group: ProcessGroup) -> None:
        """Hands the messages that came, and those that will come, to a process group."""
        with self._lock:
            early, self._early = self._early, []
            for message in early:
                self._hand(process_group, message)
            lost = self._lost
            self.process_group = None if lost is not None else process_group
        if lost is not None:
            self._lose(process_group, lost)

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
            if self.process_group is None:
                self._early.append(message)
            else:
                self._hand(self.process_group, message)

    def closed(self, link: Link, reason: ChannelError) -> None:
        """The connection has ended; on the hub's thread."""
        if not self._answered.is_set():
            self._answer = kept(reason)
            self._answered.set()
        with self._lock:
            self._lost = reason.detail
            process_group, self.process_group = self.process_group, None  # which holds this
        if process_group is not None:
            self._lose(process_group, reason.detail)

    def _lose(self, process_group: ProcessGroup, why: str) -> None:
        actor = process_group.members[0] if process_group.members else ""
        detail = f"its process, which relays for the group, ended ({why})"
        process_group.orphaned(ParticipantDiedError(group_name=process_group.name, rank=0, actor=actor, detail=detail))

    def _hand(self, process_group: ProcessGroup, message: Message) -> None:
        if isinstance(message, Refused):
            process_group.lost(from_wire(message.error))
        else:
            process_group.received(message)


def follow(request: BootstrapRequest, store: BootstrapStore, hub: Hub) -> ProcessGroup:
    """Becomes another rank than 0: finds rank 0, and waits with it for the others.

    Raises:
        CollectiveTimeoutError: Rank 0, or another rank, did not come in time.
        RaycollectError: The group failed to form.
    """
    started_s = time.monotonic()
    deadline_s = started_s + request.timeout_s
    uplink, group_id = _find_leader(request, store, hub, deadline_s)
    left = replace(request, timeout_s=max(deadline_s - time.monotonic(), 0.001))
    process_group = _make_group(left, group_id, uplink.send, store.host, uplink.leave)
    uplink.attach(process_group)
    try:
        _agree(process_group, left)
        process_group.form()
    except BaseException:
        process_group.close()
        raise
    process_group.timeout_s = request.timeout_s
    return process_group


def _find_leader(request: BootstrapRequest, store: BootstrapStore, hub: Hub, deadline_s: float) -> tuple[_Uplink, str]:
    """Connects to the posted address, again and again, as the record may be stale or yet to come."""
    tried, again_s, pause_s, why = None, 0.0, _POLL_S[0], ""
    while True:
        now_s = time.monotonic()
        there = _look(store, request.name)
        if there is None:
            why = "it has posted nothing"
        elif isinstance(there, str):
            why = f"{there}. Delete {store.where(request.name)}, or start rank 0, which replaces it"
        elif there != tried or now_s >= again_s:
            found = _enter(request, there, hub, deadline_s)
            if not isinstance(found, str):
                return found
            why = f"{there.who} does not answer: {found}"
            tried, again_s = there, now_s + _RETRY_S
        if now_s >= deadline_s:
            detail = f"after {request.timeout_s:g} s these had not come: rank 0 ({why})"
            raise CollectiveTimeoutError(
                op="join", group_name=request.name, rank=0, missing=(0,), timeout_s=request.timeout_s, detail=detail
            )
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, _POLL_S[1])


def _enter(request: BootstrapRequest, record: Record, hub: Hub, deadline_s: float) -> tuple[_Uplink, str] | str:
    """Connects to a leader.

    Returns:
        The connection, and the group's id; or why there is none: nobody is there, or the leader of a group that is
        complete or has failed, so that the next group of this name will have another leader.
    """
    uplink = _Uplink()
    try:
        link = uplink.link = hub.connect(record.address, request.hello, uplink, max(deadline_s - time.monotonic(), 0.1))
    except (ConnectionLostError, AuthenticationError, ProtocolError) as exc:
        if isinstance(exc, ProtocolError) and (not exc.peer or exc.detail.startswith(OTHER_VERSION)):
            raise  # the hello can't be sent, or not to this version
        return exc.detail  # a dead leader's record, or its port is another's now
    answer = uplink.answer(max(deadline_s - time.monotonic(), 0.1))
    if isinstance(answer, Welcome):
        return uplink, str(answer.participant.get("group_id"))
    link.close()
    if isinstance(answer, Refused):
        raise from_wire(answer.error)
    return answer.detail if isinstance(answer, ChannelError) else "it says nothing"


# ---------------------------------------------------------------------------------------------- both


def _make_group(
    request: BootstrapRequest,
    group_id: str,
    send: Callable[[Message], None],
    host: str,
    leave: Callable[[], None],
    flush: Callable[[], None] = lambda: None,
) -> ProcessGroup:
    spec = GroupSpec(
        name=request.name,
        group_id=group_id,
        backend=request.backend,
        world_size=request.world_size,
        options=request.options,
        timeout_s=request.timeout_s,
    )
    return ProcessGroup(spec, request.rank, send, host=host, timeout_s=request.timeout_s, leave=leave, flush=flush)


def _agree(process_group: ProcessGroup, request: BootstrapRequest) -> None:
    """Exchanges who and where the members are, from which all choose the same backend."""
    gpu = None if request.gpu is None else asdict(request.gpu)
    words = process_group.confer(
        "join", json.dumps({"who": request.who[:MOST_WHO], "machine": request.machine, "gpu": gpu}).encode()
    )
    said = [_said(rank, word) for rank, word in enumerate(words)]
    machines = [one["machine"] for one in said]
    backend = request.backend
    if backend == "auto":
        gpus = [one["gpu"] for one in said]
        backend = backends.choose(machines, gpus, dict(request.options)).backend
    backends.check_placement(backend, machines, request.name)
    spec = replace(process_group.spec, backend=backend, ops=backends.ops_of(backend), memory=memory_of(backend))
    process_group.settle(spec, tuple(one["who"] for one in said))


def _said(rank: int, word: bytes) -> dict[str, Any]:
    try:
        said = json.loads(word)
        gpu = None if said["gpu"] is None else backends.Gpu(**said["gpu"])
        return {"who": str(said["who"]), "machine": str(said["machine"]), "gpu": gpu}
    except (ValueError, TypeError, LookupError, RecursionError):
        raise ProtocolError(detail=f"rank {rank} does not say who and where it is") from None
