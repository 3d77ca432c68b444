"""The records of declared groups, which any process of a Ray cluster can read.

A record lies in Ray's internal key-value store from the declaration of a group to its end. It names the members and
their controller, and holds no key; Ray is asked whether a member lives. Only the controller can ask what members do
(P10): see `raycollect.Group.status`. A controller that dies leaves its records behind. A reader removes those whose
process is gone, as far as Ray knows that.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from time import time
from typing import Any

import ray
from msgspec.structs import replace
from ray.exceptions import RayError

from raycollect.core import threads
from raycollect.core.codec import Codec, Wire
from raycollect.errors import ProtocolError, RayClientError, UnknownGroupError
from raycollect.errors.text import listed, shown
from raycollect.planner import Membership
from raycollect.ray_bridge import ray_actors, ray_cluster, ray_session
from raycollect.ray_bridge.ray_cluster import KeyValueStore

MOST_RECORD_NBYTES = 64 << 20
"""The longest record; that of a group of 100,000 members takes a third of it."""

CONNECT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 10.0
POST_TIMEOUT_S = 1.0
"""How long the store may take for a record; a process that ends waits for that."""

DEAD, RESTARTED, UNKNOWN = "DEAD", "RESTARTED", "UNKNOWN"
"""States beside those of Ray: another process than the one that joined; an actor that Ray has forgotten."""

GONE = (DEAD, RESTARTED, UNKNOWN)

_PREFIX = b"posted/"
_log = logging.getLogger("raycollect")

_posting = threads.pool("raycollect-post", 1)
"""One thread, so that records arrive in order; the process ends after the last has arrived."""


class MemberRecord(Wire, frozen=True, kw_only=True):
    """One rank."""

    actor: str
    actor_id: str
    node_id: str
    pid: int  # the process that joined
    # Ray's state of the actor when it was asked: "ALIVE", "DEAD", ...; or "RESTARTED": it lives in another
    # process; "UNKNOWN": Ray has no such actor any more. Empty in what is posted
    state: str = ""
    restarts: int = 0
    rank: int


class GroupRecord(Wire, frozen=True, kw_only=True):
    """A declared group, for processes that have no part in it."""

    name: str  # its name, which is unique for its controller alone
    group_id: str  # the nonce that tells groups of one name apart
    backend: str
    epoch: int  # how often it was rebuilt
    job_id: str  # the Ray job of its controller
    actor_id: str  # the actor that the controller is; empty for a driver or task
    host: str  # the IP address of the controller's node
    pid: int  # the controller's process
    since: float  # when it was declared, or rebuilt, in seconds since 1970
    members: tuple[MemberRecord, ...]  # by rank

    @classmethod
    def of(cls, membership: Membership) -> GroupRecord:
        """Describes a group that this process has declared."""
        spec = membership.spec
        return cls(
            name=spec.name,
            group_id=spec.group_id,
            backend=spec.backend,
            epoch=membership.epoch,
            job_id=ray.get_runtime_context().get_job_id(),
            actor_id=ray_actors.current_actor_id(),
            host=ray_session.node_address(),
            pid=os.getpid(),
            since=time(),
            members=tuple(
                MemberRecord(rank=one.rank, actor=one.actor, actor_id=one.actor_id, node_id=one.node_id, pid=one.pid)
                for one in membership.members
            ),
        )

    @classmethod
    def from_bytes(cls, record: bytes) -> GroupRecord | None:
        """Reads a record; None for one of another version, or of another program."""
        try:
            return _RECORDS.decode(record) if len(record) <= MOST_RECORD_NBYTES else None
        except ProtocolError:
            return None

    def to_bytes(self) -> bytes:
        """Packs the record."""
        return _RECORDS.encode(self)


_RECORDS = Codec[GroupRecord](GroupRecord, "record of a group", version=4)


def post(membership: Membership) -> None:
    """Posts a declared group in another thread; there is no record if the store does not answer."""
    store = KeyValueStore()
    if store.is_connected:  # Ray runs here
        record = GroupRecord.of(membership).to_bytes()
        _soon(membership, lambda key: store.put(key, record, overwrite=True, timeout_s=POST_TIMEOUT_S))


def remove(membership: Membership) -> None:
    """Removes a record in another thread; it stays until its controller ends if the store does not answer."""
    store = KeyValueStore()
    if store.is_connected and not membership.is_derived:
        _soon(membership, lambda key: store.delete(key, timeout_s=POST_TIMEOUT_S))


def _soon(membership: Membership, do: Callable[[bytes], object]) -> None:
    name, key = membership.spec.name, _PREFIX + membership.spec.group_id.encode()

    def try_it() -> None:
        try:
            do(key)
        except (RayError, RuntimeError, OSError) as exc:
            _log.info("what `raycollect status` says of group %r is out of date: %s", name, exc)

    with contextlib.suppress(RuntimeError):  # this process is ending; readers remove its records
        _posting.submit(threads.survives, try_it)


def find_cluster(address: str | None = None) -> str:
    """Finds the address ``"host:port"`` of a running cluster's global control store, which need not answer.

    `address` is that, or ``"auto"``; None: `RAY_ADDRESS`, else the cluster that runs on this host.

    Raises:
        ConnectionError: None runs here, or several do, or the address makes no sense.
        RayClientError: The address is one of Ray Client.
    """
    named = address or os.environ.get("RAY_ADDRESS") or "auto"
    if named.startswith("ray://"):
        raise RayClientError
    try:
        return ray_cluster.cluster_address(named)
    except ValueError as exc:
        raise ConnectionError(f"{named!r} is not the address of a Ray cluster: {exc}") from exc


class ClusterReader:
    """A reader of a running cluster. It is no driver: no job begins, and nothing is started.

    Raises:
        ConnectionError: Nothing answers at the address, or something else than Ray.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        host, _, port = address.rpartition(":")
        try:  # Ray's own client would wait for 40 s
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
        except (OSError, ValueError, OverflowError) as exc:
            raise ConnectionError(f"no Ray cluster answers at {address}: {exc}") from exc
        try:
            self._store, self._tables = ray_cluster.read_cluster(address)
        except (RayError, RuntimeError) as exc:
            detail = str(exc).partition(". ")[0]
            if "AuthToken" in detail:
                detail += " (set RAY_AUTH_MODE, and the token, as for the cluster)"
            raise ConnectionError(f"{address} refuses, or is not a Ray cluster of this version: {detail}") from exc

    def alive_nodes(self) -> int:
        """Counts the nodes that live; ConnectionError: the cluster does not answer."""
        with self._answering():
            return self._tables.living_nodes()

    def groups(self, name: str | None = None) -> tuple[GroupRecord, ...]:
        """The groups that are declared now, or those of one name; the oldest first, with their actors' states.

        Raises:
            UnknownGroupError: There is none of that name.
            ConnectionError: The cluster does not answer.
        """
        with self._answering():
            posted = sorted(self._posted(), key=lambda one: one.since)
            chosen = [one for one in posted if name in (None, one.name)]
            found = tuple(replace(one, members=tuple(map(self._as_it_is, one.members))) for one in chosen)
        if name is not None and not found:
            there = listed(map(shown, sorted({one.name for one in posted})))
            detail = f"no process of {self.address} has declared it; there are {f'[{there}]' if there else 'none'}"
            raise UnknownGroupError(group_name=name, detail=detail)
        return found

    @contextlib.contextmanager
    def _answering(self) -> Iterator[None]:
        try:
            yield
        except (RayError, RuntimeError) as exc:
            raise ConnectionError(f"the Ray cluster at {self.address} does not answer: {exc}") from exc

    def _posted(self) -> list[GroupRecord]:
        found = []
        ended = self._tables.ended_jobs()
        for key in self._store.keys(_PREFIX, timeout_s=ANSWER_TIMEOUT_S):
            record = self._store.get(key, timeout_s=ANSWER_TIMEOUT_S)
            one = GroupRecord.from_bytes(record) if record else None  # it may have ended since
            if one is not None and self._is_left_behind(one, ended):
                self._store.delete(key, timeout_s=ANSWER_TIMEOUT_S)
            elif one is not None:
                found.append(one)
        return found

    def _is_left_behind(self, one: GroupRecord, ended: set[str]) -> bool:
        if one.job_id in ended:  # no job, and no process of an actor, ever comes back
            return True
        return bool(one.actor_id) and _state_of(self._tables.actor(one.actor_id), one.pid) in GONE

    def _as_it_is(self, member: MemberRecord) -> MemberRecord:
        actor = self._tables.actor(member.actor_id)
        return replace(member, state=_state_of(actor, member.pid), restarts=int(actor.get("NumRestarts", 0)))


def _state_of(actor: Mapping[str, Any], pid: int) -> str:
    if not actor:
        return UNKNOWN
    state = str(actor["State"])
    return RESTARTED if state == "ALIVE" and actor["Pid"] != pid else state


def summary(members: Sequence[MemberRecord]) -> str:
    """What the states of its members mean for a group, in words."""
    lost = [one.rank for one in members if one.state in GONE]
    if lost:
        return f"broken: rank {listed(lost)} gone"
    waiting = [one.rank for one in members if one.state != "ALIVE"]
    return f"rank {listed(waiting)} not alive" if waiting else "all members alive"
