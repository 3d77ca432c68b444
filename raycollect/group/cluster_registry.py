"""The records of declared groups, which any process of a Ray cluster can read.

Ray's internal key-value store holds a record from the declaration of a group to its end. The record names the members
and their controller, and holds no key. Readers get the states of members from Ray. Only the controller can query the
members themselves (P10): see `raycollect.Group.status`. The records of a controller that dies stay in the store, until
a reader removes them, if Ray reports the end of the controller's process.
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
"""How long the store may take for a record; a process that exits waits for it."""

DEAD, RESTARTED, UNKNOWN = "DEAD", "RESTARTED", "UNKNOWN"
"""States besides Ray's. RESTARTED: another process than the one that joined. UNKNOWN: Ray has no such actor."""

GONE = (DEAD, RESTARTED, UNKNOWN)

_PREFIX = b"posted/"
_log = logging.getLogger("raycollect")

_posting = threads.pool("raycollect-post", 1)
"""One thread, so that records arrive in order. The process exits after the last record has arrived."""


class MemberRecord(Wire, frozen=True, kw_only=True):
    """One rank."""

    actor: str
    actor_id: str
    node_id: str
    pid: int  # the process that joined
    # Ray's state of the actor when the record is read: "ALIVE", "DEAD", ...; or RESTARTED, UNKNOWN. Empty in the
    # store
    state: str = ""
    restarts: int = 0
    rank: int


class GroupRecord(Wire, frozen=True, kw_only=True):
    """A declared group, for processes that are not members."""

    name: str  # unique per controller
    group_id: str  # a nonce, unique also among groups of one name
    backend: str
    epoch: int  # the number of rebuilds
    job_id: str  # the Ray job of its controller
    actor_id: str  # the controller, if it is an actor; empty for a driver or task
    host: str  # the IP address of the controller's node
    pid: int  # the controller's process
    since: float  # the time of the declaration or rebuild, in seconds since 1970
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
                MemberRecord(
                    rank=member.rank,
                    actor=member.actor,
                    actor_id=member.actor_id,
                    node_id=member.node_id,
                    pid=member.pid,
                )
                for member in membership.members
            ),
        )

    @classmethod
    def from_bytes(cls, record: bytes) -> GroupRecord | None:
        """Reads a record; None if it is of another version or another program."""
        try:
            return _RECORDS.decode(record) if len(record) <= MOST_RECORD_NBYTES else None
        except ProtocolError:
            return None

    def to_bytes(self) -> bytes:
        """Packs the record."""
        return _RECORDS.encode(self)


_RECORDS = Codec[GroupRecord](GroupRecord, "record of a group", version=4)


def post(membership: Membership) -> None:
    """Posts a declared group in another thread; no record is posted if the store does not answer."""
    store = KeyValueStore()
    if store.is_connected:  # Ray runs here
        record = GroupRecord.of(membership).to_bytes()
        _soon(membership, lambda key: store.put(key, record, overwrite=True, timeout_s=POST_TIMEOUT_S))


def remove(membership: Membership) -> None:
    """Removes a record in another thread. If the store does not answer, the record stays until its controller ends."""
    store = KeyValueStore()
    if store.is_connected and not membership.is_derived:
        _soon(membership, lambda key: store.delete(key, timeout_s=POST_TIMEOUT_S))


def _soon(membership: Membership, do: Callable[[bytes], object]) -> None:
    name, key = membership.spec.name, _PREFIX + membership.spec.group_id.encode()

    def try_it() -> None:
        try:
            do(key)
        except (RayError, RuntimeError, OSError) as exc:
            _log.info("`raycollect status` is out of date for group %r: %s", name, exc)

    with contextlib.suppress(RuntimeError):  # this process is exiting; readers remove its records
        _posting.submit(threads.survives, try_it)


def find_cluster(address: str | None = None) -> str:
    """Finds the address ``"host:port"`` of a running cluster's global control store, without connecting to it.

    `address` is such an address, or ``"auto"``; None: `RAY_ADDRESS`, else the cluster that runs on this host.

    Raises:
        ConnectionError: No cluster runs on this host, or several do, or the address is invalid.
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
    """A reader of a running cluster. It starts no job and no process.

    Raises:
        ConnectionError: No Ray cluster answers at the address.
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
        """Counts the live nodes; ConnectionError: the cluster does not answer."""
        with self._answering():
            return self._tables.living_nodes()

    def groups(self, name: str | None = None) -> tuple[GroupRecord, ...]:
        """The declared groups, or those of one name, with the states of their actors; the oldest first.

        Raises:
            UnknownGroupError: No group has that name.
            ConnectionError: The cluster does not answer.
        """
        with self._answering():
            posted = sorted(self._posted(), key=lambda record: record.since)
            chosen = [record for record in posted if name in (None, record.name)]
            records = tuple(replace(record, members=tuple(map(self._as_it_is, record.members))) for record in chosen)
        if name is not None and not records:
            there = listed(map(shown, sorted({record.name for record in posted})))
            detail = f"no process of {self.address} has declared it; there are {f'[{there}]' if there else 'none'}"
            raise UnknownGroupError(group_name=name, detail=detail)
        return records

    @contextlib.contextmanager
    def _answering(self) -> Iterator[None]:
        try:
            yield
        except (RayError, RuntimeError) as exc:
            raise ConnectionError(f"the Ray cluster at {self.address} does not answer: {exc}") from exc

    def _posted(self) -> list[GroupRecord]:
        records = []
        ended = self._tables.ended_jobs()
        for key in self._store.keys(_PREFIX, timeout_s=ANSWER_TIMEOUT_S):
            record = self._store.get(key, timeout_s=ANSWER_TIMEOUT_S)
            group = GroupRecord.from_bytes(record) if record else None  # None: the group has ended
            if group is not None and self._is_left_behind(group, ended):
                self._store.delete(key, timeout_s=ANSWER_TIMEOUT_S)
            elif group is not None:
                records.append(group)
        return records

    def _is_left_behind(self, group: GroupRecord, ended: set[str]) -> bool:
        if group.job_id in ended:  # a job never restarts, nor does a process
            return True
        return bool(group.actor_id) and _state_of(self._tables.actor(group.actor_id), group.pid) in GONE

    def _as_it_is(self, member: MemberRecord) -> MemberRecord:
        actor = self._tables.actor(member.actor_id)
        return replace(member, state=_state_of(actor, member.pid), restarts=int(actor.get("NumRestarts", 0)))


def _state_of(actor: Mapping[str, Any], pid: int) -> str:
    if not actor:
        return UNKNOWN
    state = str(actor["State"])
    return RESTARTED if state == "ALIVE" and actor["Pid"] != pid else state


def summary(members: Sequence[MemberRecord]) -> str:
    """The state of a group, by the states of its members, in words."""
    lost = [member.rank for member in members if member.state in GONE]
    if lost:
        return f"broken: rank {listed(lost)} gone"
    waiting = [member.rank for member in members if member.state != "ALIVE"]
    return f"rank {listed(waiting)} not alive" if waiting else "all members alive"
