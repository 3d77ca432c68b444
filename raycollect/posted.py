"""What a cluster can be told about the groups in it: who declares one posts a record, and any process may read it.

The record lies in Ray's internal key-value store from the declaration to the end of the group. It says who the members
are and who drives them; it holds no key, and whether a member lives is asked of Ray. What the members are doing only
their controller can ask (P10): see `raycollect.Group.status`.

A controller that dies leaves its records behind. Whoever reads removes those of which Ray knows that their process is
gone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from time import time
from typing import Any, TypeVar

import msgpack
import ray
from ray.exceptions import RayError

from raycollect import ray_internals
from raycollect.errors import RayClientError, UnknownGroupError
from raycollect.group import Membership

__all__ = ["Cluster", "Posted", "PostedMember", "find_cluster", "post", "remove", "summary"]

VERSION = 1
"""The one version of a record."""

CONNECT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 10.0
POST_TIMEOUT_S = 1.0
"""How long the store has to take a record; at the end of the process that is waited for."""

DEAD, RESTARTED, UNKNOWN = "DEAD", "RESTARTED", "UNKNOWN"
"""States of a member beside those of Ray: another process than the one that joined; an actor that Ray has forgotten."""

GONE = (DEAD, RESTARTED, UNKNOWN)
"""States in which the process that joined is no more."""

_NAMESPACE = b"raycollect"
_PREFIX = b"posted/"
_Record = TypeVar("_Record", "Posted", "PostedMember")
_log = logging.getLogger("raycollect")

_posting = ThreadPoolExecutor(max_workers=1, thread_name_prefix="raycollect-post")
"""One thread: what is posted first arrives first, and the process ends after the last has arrived."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PostedMember:
    """One rank.

    Attributes:
        rank: Its rank.
        actor: What a person calls it.
        actor_id: The Ray actor id, in hexadecimal.
        node_id: The Ray node id.
        pid: Its process.
        state: What Ray said of the actor when it was asked: ``"ALIVE"``, ``"DEAD"``, ``"RESTARTING"``, ...;
            ``"RESTARTED"``: it lives in another process than the one that joined; ``"UNKNOWN"``: Ray has no such actor
            any more. Empty in what is posted.
        restarts: How often Ray has restarted it.
    """

    rank: int
    actor: str
    actor_id: str
    node_id: str
    pid: int
    state: str = ""
    restarts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Posted:
    """A declared group, for processes that have no part in it.

    Attributes:
        name: Its name, which is unique for its controller alone.
        group_id: The nonce that tells groups of one name apart.
        backend: The backend that it uses.
        ordering: ``"program"`` or ``"data"``.
        epoch: How often it was rebuilt.
        job_id: The Ray job of its controller.
        actor_id: The actor that the controller is; empty for a driver or task.
        host: The IP address of the controller's node.
        pid: The controller's process.
        since: When it was declared, or rebuilt, in seconds since 1970.
        members: By rank.
    """

    name: str
    group_id: str
    backend: str
    ordering: str
    epoch: int
    job_id: str
    actor_id: str
    host: str
    pid: int
    since: float
    members: tuple[PostedMember, ...]

    @classmethod
    def of(cls, membership: Membership) -> Posted:
        """Describes a group that this process has declared."""
        spec = membership.spec
        return cls(
            name=spec.name,
            group_id=spec.group_id,
            backend=spec.backend,
            ordering=spec.ordering,
            epoch=membership.epoch,
            job_id=ray.get_runtime_context().get_job_id(),
            actor_id=ray_internals.current_actor_id(),
            host=ray_internals.node_address(),
            pid=os.getpid(),
            since=time(),
            members=tuple(
                PostedMember(rank=one.rank, actor=one.actor, actor_id=one.actor_id, node_id=one.node_id, pid=one.pid)
                for one in membership.members
            ),
        )

    @classmethod
    def from_bytes(cls, record: bytes) -> Posted | None:
        """Reads a record; None for one of another version, or of somebody else."""
        try:
            found = msgpack.unpackb(record)
            if found.pop("version") != VERSION:
                return None
            members = tuple(_checked(PostedMember(**one)) for one in found.pop("members"))
            return _checked(cls(**found, members=members))
        except (ValueError, TypeError, LookupError, AttributeError, msgpack.UnpackException):
            return None

    def to_bytes(self) -> bytes:
        """Gives the record."""
        packed: bytes = msgpack.packb({"version": VERSION, **asdict(self)})
        return packed


def post(membership: Membership) -> None:
    """Posts a declared group, soon: nobody waits for it, and where the store does not answer there is no record."""
    client = ray_internals.cluster_client()
    if client is not None:  # Ray runs here
        _soon(_put, client, membership, Posted.of(membership).to_bytes())


def remove(membership: Membership) -> None:
    """Takes away what `post` has posted, soon; nothing where it was not.

    Where the store does not answer, it is asked again when the next group begins or ends.
    """
    client = ray_internals.cluster_client()
    if client is not None and not membership.is_derived:
        _soon(_delete, client, membership)


def _soon(do: Callable[..., None], client: Any, membership: Membership, *record: bytes) -> None:
    with contextlib.suppress(RuntimeError):  # this process is ending: its records will be seen to be left behind
        _posting.submit(do, client, membership.spec.name, _PREFIX + membership.spec.group_id.encode(), *record)


_overdue: list[bytes] = []
"""The keys of records that could not be taken away. The one thread alone looks at it."""


def _put(client: Any, name: str, key: bytes, record: bytes) -> None:
    with _told(name):
        client.internal_kv_put(key, record, True, _NAMESPACE, timeout=POST_TIMEOUT_S)
        _delete_overdue(client)


def _delete(client: Any, name: str, key: bytes) -> None:
    _overdue.append(key)
    with _told(name):
        _delete_overdue(client)


def _delete_overdue(client: Any) -> None:
    while _overdue:  # the newest first: an older one may be of a store that is gone
        client.internal_kv_del(_overdue[-1], False, _NAMESPACE, timeout=POST_TIMEOUT_S)
        _overdue.pop()


@contextlib.contextmanager
def _told(name: str) -> Iterator[None]:
    """Says where the store did not do what it was asked for, and goes on."""
    try:
        yield
    except (RayError, RuntimeError, OSError) as exc:
        _log.info("what `raycollect status` says of group %r is out of date: %s", name, exc)


def find_cluster(address: str | None = None) -> str:
    """Finds the address of a running cluster; starts none.

    Args:
        address: ``"host:port"``, or ``"auto"``; None: what `RAY_ADDRESS` says, else the one that runs on this host.

    Returns:
        ``"host:port"`` of its global control store. Nobody has been asked yet whether it answers.

    Raises:
        ConnectionError: None runs here, or several do, or the address makes no sense.
        RayClientError: The address is one of Ray Client.
    """
    named = address or os.environ.get("RAY_ADDRESS") or "auto"
    if named.startswith("ray://"):
        raise RayClientError
    try:
        return ray_internals.cluster_address(named)
    except ValueError as exc:
        raise ConnectionError(f"{named!r} is no address of a Ray cluster: {exc}") from exc


class Cluster:
    """A reader's end of a running cluster. It is no driver: no job begins, and nothing is started.

    Args:
        address: As `find_cluster` gives it.

    Raises:
        ConnectionError: Nobody answers there, or something else than Ray.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        host, _, port = address.rpartition(":")
        try:  # Ray's own client would wait for 40 s
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
        except (OSError, ValueError, OverflowError) as exc:
            raise ConnectionError(f"no Ray cluster answers at {address}: {exc}") from exc
        try:
            self._client, self._state = ray_internals.read_cluster(address)
        except (RayError, RuntimeError) as exc:
            detail = str(exc).partition(". ")[0]
            if "AuthToken" in detail:
                detail += " (set RAY_AUTH_MODE, and the token, as for the cluster)"
            raise ConnectionError(f"{address} refuses, or is no Ray cluster of this version: {detail}") from exc

    def alive_nodes(self) -> int:
        """Counts the nodes that live.

        Raises:
            ConnectionError: The cluster does not answer.
        """
        try:
            return sum(bool(node["Alive"]) for node in self._state.node_table())
        except (RayError, RuntimeError) as exc:
            raise self._lost(exc) from exc

    def groups(self, name: str | None = None) -> tuple[Posted, ...]:
        """The groups that are declared now, the oldest first, with the states of their members' actors.

        Args:
            name: Only those of that name.

        Raises:
            UnknownGroupError: There is none of that name.
            ConnectionError: The cluster does not answer.
        """
        try:
            posted = self._posted()
            if name is not None and all(one.name != name for one in posted):
                names = sorted({one.name for one in posted})
                detail = f"no process of {self.address} has declared it; there are {names or 'none'}"
                raise UnknownGroupError(group_name=name, detail=detail)
            chosen = (one for one in posted if name is None or one.name == name)
            return tuple(self._as_it_is(one) for one in sorted(chosen, key=lambda one: one.since))
        except (RayError, RuntimeError) as exc:
            if isinstance(exc, UnknownGroupError):
                raise
            raise self._lost(exc) from exc

    def _posted(self) -> list[Posted]:
        """What is posted by processes that live; what others have left behind is removed."""
        found = []
        ended = {job["JobID"] for job in self._state.job_table() if job["IsDead"]}
        for key in self._client.internal_kv_keys(_PREFIX, _NAMESPACE, timeout=ANSWER_TIMEOUT_S):
            record = self._client.internal_kv_get(key, _NAMESPACE, timeout=ANSWER_TIMEOUT_S)
            one = Posted.from_bytes(record) if record else None  # it may have ended since
            if one is not None and self._is_left_behind(one, ended):
                self._client.internal_kv_del(key, False, _NAMESPACE, timeout=ANSWER_TIMEOUT_S)
            elif one is not None:
                found.append(one)
        return found

    def _is_left_behind(self, one: Posted, ended: set[str]) -> bool:
        """Whether Ray knows that the controller is gone: no job, and no process of an actor, ever comes back."""
        if one.job_id in ended:
            return True
        return bool(one.actor_id) and _state_of(self._state.actor_table(one.actor_id), one.pid) in GONE

    def _as_it_is(self, one: Posted) -> Posted:
        return replace(one, members=tuple(map(self._member_as_it_is, one.members)))

    def _member_as_it_is(self, member: PostedMember) -> PostedMember:
        actor = self._state.actor_table(member.actor_id)
        return replace(member, state=_state_of(actor, member.pid), restarts=int(actor.get("NumRestarts", 0)))

    def _lost(self, exc: Exception) -> ConnectionError:
        return ConnectionError(f"the Ray cluster at {self.address} does not answer: {exc}")


def _state_of(actor: Mapping[str, Any], pid: int) -> str:
    """The state of an actor, of which a process was known; the actor as Ray's table has it, empty where it has none."""
    if not actor:
        return UNKNOWN
    state = str(actor["State"])
    return RESTARTED if state == "ALIVE" and actor["Pid"] != pid else state


def _checked(record: _Record) -> _Record:
    """A record whose fields are of their kinds.

    Raises:
        TypeError: One is not.
    """
    kinds: dict[str, type | tuple[type, ...]] = {"str": str, "int": int, "float": (int, float)}
    for name, annotation in type(record).__annotations__.items():
        kind = kinds.get(annotation, tuple)
        if not isinstance(getattr(record, name), kind):
            raise TypeError(f"{name} is {getattr(record, name)!r}")
    return record


def summary(members: Sequence[PostedMember]) -> str:
    """In words, what the states of its members mean for a group."""
    lost = [one.rank for one in members if one.state in GONE]
    if lost:
        return f"broken: rank {', '.join(map(str, lost))} gone"
    waiting = [one.rank for one in members if one.state != "ALIVE"]
    return f"rank {', '.join(map(str, waiting))} not alive" if waiting else "all members alive"
